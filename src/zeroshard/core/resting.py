"""Rules of what rests, each written once: the parameters that make a unit, the part of a master
that is the weight itself, and the part of a state that rests on another tier.

    runtime/units.py, build.py, segment.py     make units, storages and masters by it
    planner/model.py, exact.py                 count them

Pure: neither torch nor a parameter is known here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zeroshard.core.layout import ALIGN, Range
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
        """The tier of those that are not on the device; None where all are."""
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
    """Return the most elements of a unit of leftovers: as many as the largest block or the largest
    parameter has, or an eighth of all (not `whole`: else tiles would be put together again).
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


# ---------------------------------------------------------------------------------- tiers and tiles
# Offload++ (Twin-Flow) steps a fraction of the optimizer state on the host and the rest on the
# device at the same time. The fraction is one cut through all segments, in unit order::
#
#     unit 0 | unit 1 | unit 2 | unit 3 | unit 4          fraction 0.4: the last 40% of the elements
#     <------- device -------->|<--- other tier ---       rest on the host
#
# The end of the model leaves because its gradients come first in backward and its weights are
# needed last in the next forward. Cuts fall on multiples of `align`. Pure arithmetic.


def splits(numels: Sequence[int], fraction: float, align: int = ALIGN) -> list[int]:
    """Return how many first elements of each segment of `numels` rest on the device.

    `fraction` in [0, 1] of all elements rest on the other tier.
    """
    assert 0.0 <= fraction <= 1.0, fraction
    total = sum(numels)
    left = total - round(fraction * total / align) * align
    out = []
    for numel in numels:
        here = max(0, min(numel, left))
        left -= here
        out.append(here)
    return out


def tiles(split: int, numel: int, tile_numel: int) -> list[Range]:
    """Return [split, numel) in ranges of at most `tile_numel` elements."""
    assert tile_numel > 0 and 0 <= split <= numel, (split, numel, tile_numel)
    return [(start, min(start + tile_numel, numel)) for start in range(split, numel, tile_numel)]


def balanced(fraction: float, device_s: float, other_s: float, *, least: float = 0.0) -> float:
    """Return the fraction at which device and other tier would take the same time.

    `device_s` and `other_s` are what the step of each part took.
    ``balanced(0.5, 1.0, 3.0) == 0.25``: three quarters at the device's speed take 1.5, a quarter at
    the other's 1.5. At least `least` (what the device has no room for) and a hundredth of either
    side remain, to be measured.
    """
    assert 0.0 < fraction < 1.0 and device_s > 0 and other_s > 0, (fraction, device_s, other_s)
    device_speed, other_speed = (1.0 - fraction) / device_s, fraction / other_s
    return min(max(other_speed / (device_speed + other_speed), least, 0.01), 0.99)
