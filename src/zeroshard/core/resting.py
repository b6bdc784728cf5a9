"""What rests where, decided once: which parameters make a unit, and which part of a master is the
weight itself.

    runtime/units.py, build.py, segment.py     make units, storages and masters by it
    planner/model.py, exact.py                 count them

Pure: neither torch nor a parameter is known here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zeroshard.core.placement import Tier

B = TypeVar("B", bound=Hashable)  # a block


@dataclass(frozen=True)
class AtRest:
    """This rank's elements of a state: the first `split` on the device, the others on `tier`."""

    dtype: object
    numel: int
    split: int
    tier: Tier

    @property
    def away(self) -> Tier | None:
        """Where those rest that are not on the device; None where all are."""
        return self.tier if self.split < self.numel else None


def is_weight(weight: AtRest, master: AtRest) -> bool:
    """Whether a master is the weights themselves, those that follow from it: both rest alike."""
    return (weight.dtype, weight.split, weight.away) == (master.dtype, master.split, master.away)


def num_shared(weight: AtRest, master: AtRest) -> int:
    """Return how many first elements of a master are the weights themselves: all, or those on the
    device where the weights have its dtype and reach as far.
    """
    if is_weight(weight, master):
        return master.numel
    return master.split if weight.dtype == master.dtype and weight.split >= master.split else 0


def unit_limit(blocks: Iterable[int], parameters: Sequence[int], *, whole: bool = True) -> int:
    """Return the most elements of a unit of leftovers: those of the largest block, of the largest
    parameter, or an eighth of all (not `whole`: else tiles would be put together again).
    """
    return max([*blocks, *parameters, sum(parameters) // 8 if whole else 0], default=0)


def packed(
    parameters: Iterable[tuple[str, int, B | None]], limit: int
) -> list[tuple[B | None, list[str]]]:
    """Return the units of `parameters` (name, elements, and the block that each is in, if any), in
    definition order: a block, or the names of leftovers that follow each other, up to `limit`
    elements. A block between them ends a unit.
    """
    units: list[tuple[B | None, list[str]]] = []
    seen: set[B] = set()
    rest: list[str] | None = None
    rest_numel = 0
    for name, numel, block in parameters:
        if block is not None:
            rest = None
            if block not in seen:
                seen.add(block)
                units.append((block, []))
            continue
        if rest is None or rest_numel + numel > limit:
            rest, rest_numel = [], 0
            units.append((None, rest))
        rest.append(name)
        rest_numel += numel
    return units
