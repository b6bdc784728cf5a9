"""What moves between two layouts of the same elements, and between which ranks: pure arithmetic.

    held     rank 0 |---------------|  rank 1 |---------------|            each element once
    wanted   rank 0 |---------|  rank 1 |---------|  rank 2 |----------|   or more than once
    sent              0 -> 0, 0 -> 1        1 -> 1, 1 -> 2

Invariant: every element that one rank holds comes to each rank that wants it, once; both ends
name their sends in the same order. Cost: the ranks, once. It moves nothing: comm/hand_over.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.core.layout import Range


@dataclass(frozen=True)
class Send:
    """Elements [start, stop), which rank `source` holds and rank `target` wants."""

    source: int
    target: int
    start: int
    stop: int


def overlap(first: Range, second: Range) -> Range | None:
    """Return the elements that both ranges hold, None where there are none."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def sends(rank: int, held: Sequence[Range], wanted: Sequence[Range]) -> list[Send]:
    """Return what `rank` sends and is sent, other ranks in order; `held` and `wanted` by rank."""
    out = []
    for other in range(len(held)):
        for source, target in dict.fromkeys([(rank, other), (other, rank)]):
            common = overlap(held[source], wanted[target])
            if common is not None:
                out.append(Send(source, target, *common))
    return out
