"""Sums without an order: the same number however they are cut, sent and added."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zeroshard.state.norms import ExactSum

FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


def total(values: list[float]) -> ExactSum:
    return sum(map(ExactSum.of, values), ExactSum())


@given(st.lists(FINITE, max_size=40), st.integers(0, 40), st.randoms(use_true_random=False))
@example([2.0**53, 1.0, 1.0, -(2.0**53)], 1, Random(0))
@example([5e-324, 1e300, -1e300], 2, Random(0))
@example([], 0, Random(0))
def test_any_order_and_any_cut_give_the_sum_rounded_once(
    values: list[float], cut: int, draw: Random
) -> None:
    whole, expected = total(values), math.fsum(values)
    assert float(whole) == expected
    draw.shuffle(values)
    assert total(values[:cut]) + total(values[cut:]) == whole


@given(st.lists(FINITE, max_size=10))
def test_bytes_hold_all_of_a_sum(values: list[float]) -> None:
    whole = total(values)
    assert ExactSum.unpack(whole.pack()) == whole
    assert len(whole.pack()) <= 10 + 270


def test_what_gradients_send_is_small() -> None:
    assert len(total([1e-6 / 3, 17.3, 2.0**-40]).pack()) < 30
    assert len(ExactSum().pack()) == 11


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([math.inf, math.inf, -1e300], math.inf),
        ([-math.inf, 2.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1.0, math.nan], math.nan),
        ([math.inf, math.nan], math.nan),
    ],
)
def test_numbers_that_are_not_finite_are_carried(values: list[float], expected: float) -> None:
    summed = total(values)
    assert not summed.is_finite
    for one in (summed, ExactSum.unpack(summed.pack()), total(values[::-1])):
        assert repr(float(one)) == repr(expected)
