"""Batches cut by shares: how many samples of a global batch each rank takes, and what its loss
counts.

    split_batch(10, [0.25, 0.25, 0.5])    [3, 2, 5]: 2.5, 2.5 and 5 rounded down, and the samples
                                          left over by largest remainder, lower ranks first

Pure arithmetic, in fractions: the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from zeroshard.errors import ConfigError

_TOLERANCE = 1e-6


def check_batch_shares(shares: Sequence[float]) -> None:
    """Raise ConfigError for `shares` that are not numbers >= 0 with the sum 1."""
    shown = ", ".join(f"{share:g}" for share in shares)
    if not shares or not all(0.0 <= share < math.inf for share in shares):
        raise ConfigError(f"batch_shares [{shown}] must be one number >= 0 per data parallel rank")
    if abs(math.fsum(shares) - 1.0) > _TOLERANCE:
        raise ConfigError(
            f"batch_shares [{shown}] add up to {math.fsum(shares):g}, not to 1: divide each by that"
        )


def unequal(shares: Sequence[float]) -> tuple[float, ...]:
    """Return `shares` with the sum 1, empty where all are the same."""
    if len(set(shares)) <= 1:
        return ()
    total = math.fsum(shares)
    return tuple(share / total for share in shares)


def split_batch(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Return how many of `batch_size` samples each rank takes, which may be none: its share of
    them, rounded so that all add up to `batch_size` (largest remainder).

    Raises ConfigError for shares that are not numbers >= 0 with the sum 1.
    """
    check_batch_shares(shares)
    total = sum(map(Fraction, shares))
    exact = [batch_size * Fraction(share) / total for share in shares]
    sizes = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in by_remainder[: batch_size - sum(sizes)]:
        sizes[rank] += 1
    return sizes
