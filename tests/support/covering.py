"""Covering arrays of strength 2: few cases in which every two values of two factors still meet.

A fault that needs one value, or two together, shows in the array as it does in the full product;
one that needs three may not (most of those that Kuhn, Wallace and Gallo, 2004, counted need one or
two). So the array runs in the quick set, and the product in the slow one.

Cost: the product is listed once, and each chosen case looks at all of it: for thousands of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]


def cases_of(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return every case: one value of each factor, as far as they are `allowed` together."""
    cases = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [case for case in cases if allowed(case)]


def pairs(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return some of :func:`cases_of`: two values of two factors that meet in any of those meet in
    one of these. The first case of all that brings most new pairs is taken, again and again, so
    the array is the same in every process.
    """
    cases = [(case, set(combinations(case.items(), 2))) for case in cases_of(factors, allowed)]
    missing = set().union(*(met for _, met in cases))
    chosen = []
    while missing:
        case, met = max(cases, key=lambda each: len(each[1] & missing))
        chosen.append(case)
        missing -= met
    return chosen


def by_pairs(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool] = lambda case: True,
    *,
    also: Sequence[Case] = (),
    slow_by: str | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test by the names of `factors`: :func:`pairs` run in the quick set, all others
    of :func:`cases_of` in the slow one. `also`: quick cases that find a fault which needs three
    values.

    `slow_by`, a factor: the test takes lists as `cases`, so that one call of ``run_ranks`` and one
    reference serve many: all of the pairs, and in the slow set, for each value of that factor, the
    product.
    """
    chosen = [*pairs(factors, allowed), *also]
    if slow_by is None:
        return pytest.mark.parametrize(
            tuple(factors),
            [
                pytest.param(*case.values(), marks=[pytest.mark.slow] * (case not in chosen))
                for case in cases_of(factors, allowed)
            ],
        )
    product = [
        pytest.param(
            cases_of({**factors, slow_by: [value]}, allowed), id=str(value), marks=pytest.mark.slow
        )
        for value in factors[slow_by]
    ]
    return pytest.mark.parametrize("cases", [pytest.param(chosen, id="pairs"), *product])
