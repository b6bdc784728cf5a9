"""Medians with bootstrap intervals, and what they say about a target. Pure numbers; needs only
numpy.

Two programs that are run in turn (A B A B ...) see the same machine within each pair, so the ratio
of a pair is steadier than either time. The median over pairs is reported with the percentile
bootstrap of the median (Efron and Tibshirani, *An Introduction to the Bootstrap*, 1993, section
13.3), 95% by default.

Invariant: a target *holds* or *misses* only when the whole interval is on one side of it; otherwise
it is *undecided*, whatever the median. Fewer than 12 pairs decide nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MIN_PAIRS", "Interval", "Verdict", "bootstrap_median", "judge"]

MIN_PAIRS = 12


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap interval, ``low <= median <= high``."""

    median: float
    low: float
    high: float


class Verdict(enum.StrEnum):
    """What the measured interval says about "at least the target"."""

    HOLDS = "holds"
    MISSES = "misses"
    UNDECIDED = "undecided"
    TOO_FEW = "too few pairs"


def bootstrap_median(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Return the median of `values` and the percentile bootstrap interval of it. The same `seed`
    gives the same interval.

    Raises ValueError when there are no values.
    """
    import numpy as np

    if not values:
        raise ValueError("bootstrap_median: no values")
    data = np.asarray(values, dtype=np.float64)
    resampled = np.random.default_rng(seed).choice(
        data, size=(num_resamples, len(data)), replace=True
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(resampled, axis=1), (tail, 1 - tail))
    return Interval(float(np.median(data)), float(low), float(high))


def judge(interval: Interval, target: float, *, num_pairs: int) -> Verdict:
    """Say whether the measured quantity is at least `target`."""
    if num_pairs < MIN_PAIRS:
        return Verdict.TOO_FEW
    if interval.low >= target:
        return Verdict.HOLDS
    return Verdict.MISSES if interval.high < target else Verdict.UNDECIDED
