"""Where the elements of one cut lie in another: pure arithmetic.

    old    |---- 0 ----|--------- 1 ---------|
    new    |-- 0 --|------ 1 ------|--- 2 ---|
    both   | 0, 0  | 0, 1 |  1, 1  |  1, 2   |

A cut is a list of ranges, in order and disjoint; ranges need not touch. What moves from one cut to
another are the ranges that both hold (ZeRO's partitions, a split between tiers, the shards of two
checkpoints). Invariant: every element that both cuts hold is in exactly one overlap. Cost: the
ranges of both, once. It moves nothing; runtime/step_tiles.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.core.layout import Range

__all__ = ["Overlap", "overlap", "overlaps"]


@dataclass(frozen=True)
class Overlap:
    """Elements [start, stop) that range `old` of one cut and range `new` of another both hold."""

    old: int
    new: int
    start: int
    stop: int


def overlap(first: Range, second: Range) -> Range | None:
    """Return the elements that both ranges hold, None where there are none."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def overlaps(old: Sequence[Range], new: Sequence[Range]) -> list[Overlap]:
    """Return what the two cuts share, in the order of the elements."""
    out, here, there = [], 0, 0
    while here < len(old) and there < len(new):
        common = overlap(old[here], new[there])
        if common is not None:
            out.append(Overlap(here, there, *common))
        if old[here][1] <= new[there][1]:
            here += 1
        else:
            there += 1
    return out
