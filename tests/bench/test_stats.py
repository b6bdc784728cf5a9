"""The bootstrap interval and the verdict: properties that do not depend on the numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.stats import MIN_PAIRS, Interval, Verdict, bootstrap_median, judge

ratios = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=40)


@settings(max_examples=30, deadline=None)
@given(ratios)
def test_the_interval_holds_the_median_and_stays_within_the_values(values: list[float]) -> None:
    interval = bootstrap_median(values, num_resamples=500)
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)


@settings(max_examples=20, deadline=None)
@given(ratios, st.floats(0.1, 10.0))
def test_scaling_the_values_scales_the_interval(values: list[float], factor: float) -> None:
    one, other = (
        bootstrap_median(values, num_resamples=500),
        bootstrap_median([v * factor for v in values], num_resamples=500),
    )
    assert (other.low, other.median, other.high) == pytest.approx(
        (one.low * factor, one.median * factor, one.high * factor)
    )


def test_the_same_values_give_the_same_interval() -> None:
    values = [random.Random(1).gauss(1.0, 0.1) for _ in range(12)]
    assert bootstrap_median(values) == bootstrap_median(values)
    assert bootstrap_median([2.0] * 12) == Interval(2.0, 2.0, 2.0)


def test_one_wild_pair_does_not_move_the_interval_away() -> None:
    interval = bootstrap_median([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0, 50.0])
    assert interval.median == pytest.approx(1.0) and interval.high < 1.1


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    source = random.Random(2)
    hits = 0
    for trial in range(100):
        interval = bootstrap_median(
            [source.gauss(5.0, 1.0) for _ in range(MIN_PAIRS)], num_resamples=400, seed=trial
        )
        hits += interval.low <= 5.0 <= interval.high
    assert 85 <= hits <= 100


def test_more_pairs_narrow_the_interval() -> None:
    source = random.Random(3)
    values = [source.gauss(1.0, 0.1) for _ in range(120)]
    few, many = bootstrap_median(values[:12]), bootstrap_median(values)
    assert many.high - many.low < few.high - few.low


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        bootstrap_median([])


@pytest.mark.parametrize(
    ("low", "high", "pairs", "verdict"),
    [
        (1.0, 1.2, 12, Verdict.HOLDS),
        (0.99, 1.2, 12, Verdict.UNDECIDED),
        (0.8, 0.999, 30, Verdict.MISSES),
        (0.8, 1.0, 30, Verdict.UNDECIDED),
        (1.5, 1.6, 11, Verdict.TOO_FEW),
    ],
)
def test_a_target_is_decided_only_by_the_whole_interval(
    low: float, high: float, pairs: int, verdict: Verdict
) -> None:
    assert judge(Interval((low + high) / 2, low, high), 1.0, num_pairs=pairs) is verdict
