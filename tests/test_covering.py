"""Covering arrays (tests/support/covering.py): every pair that is allowed, in few cases."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.covering import by_pairs, cases_of, pairs

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def factors_of(sizes: list[int]) -> dict[str, list[str]]:
    return {
        f"factor {index}": [f"{index}.{value}" for value in range(size)]
        for index, size in enumerate(sizes)
    }


def met(cases: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {pair for case in cases for pair in combinations(case.items(), 2)}


@settings(max_examples=40)
@given(sizes=SIZES, refused=st.sets(st.integers(0, 200)))
def test_all_pairs_that_are_allowed_meet_and_no_other_case_is_there(
    sizes: list[int], refused: set[int]
) -> None:
    factors = factors_of(sizes)
    product = cases_of(factors)
    no = [case for index, case in enumerate(product) if index in refused]

    def allowed(case: dict[str, Any]) -> bool:
        return case not in no

    chosen = pairs(factors, allowed)
    assert not any(case in no for case in chosen)
    assert met(chosen) == met(cases_of(factors, allowed))
    assert chosen == pairs(factors, allowed)


@settings(max_examples=40)
@given(sizes=SIZES)
def test_the_array_is_about_as_large_as_the_two_largest_factors_need(sizes: list[int]) -> None:
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(pairs(factors_of(sizes))) <= 2 * first * second


def test_two_factors_are_their_product_and_five_a_small_part_of_it() -> None:
    rows = {"row": [1, 2, 3, 4, 5], "precision": ["fp32", "bf16", "fp16"]}
    assert pairs(rows) == cases_of(rows)
    tiers = {state: ["device", "host", "disk"] for state in ("weight", "grad", "optimizer")}
    assert (len(cases_of(rows | tiers)), len(pairs(rows | tiers))) == (405, 16)


def test_a_test_runs_pairs_in_the_quick_set_and_all_cases_with_the_slow_one() -> None:
    factors = factors_of([3, 2, 2])
    third = next(case for case in cases_of(factors) if case not in pairs(factors))
    (names, values) = by_pairs(factors, also=[third]).args
    quick = [dict(zip(names, one.values, strict=True)) for one in values if not one.marks]
    assert len(values) == 12
    assert [case for case in cases_of(factors) if case in [*pairs(factors), third]] == quick
    (name, (first, *others)) = by_pairs(factors, slow_by="factor 0").args
    assert (name, first.values, first.marks) == ("cases", (pairs(factors),), ())
    assert all(one.marks for one in others)
    assert [case for one in others for case in one.values[0]] == cases_of(factors)
