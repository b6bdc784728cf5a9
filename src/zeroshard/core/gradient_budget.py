"""Choose the units that keep their whole gradient between micro-batches, within a budget of bytes.

Inside ``no_sync`` a unit's gradient either rests whole on each rank, a sum of micro-batches that is
reduced once, or is reduced at each micro-batch and rests as a shard. Whole gradients of the
smallest units come first, the later unit first among equals, as long as the next one fits::

    two ranks, block.0 of 4, block.1 of 4, head of 16     budget 12   none          2 + 2 + 8
                                                          budget 14   block.1       2 + 4 + 8
                                                          budget 16   both blocks   4 + 4 + 8

Invariants: what rests is within the budget; a larger budget takes the same units and perhaps more,
so that traffic falls monotonically; the next unit in line does not fit into what is left. Cost:
n log n. The choice depends on sizes alone, so that it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.core.sizes import parse_bytes
from zeroshard.errors import ConfigError


def budget_bytes(budget: int | str | None) -> int | None:
    """Return an `accumulation_budget`, bytes or text ("2GiB"), in bytes. Raises ConfigError for
    one of less than a byte, and for text that is no size.
    """
    number = parse_bytes(budget, "accumulation_budget") if isinstance(budget, str) else budget
    if number is not None and number < 1:
        raise ConfigError(f"accumulation_budget={number} is less than one byte: leave it out")
    return number


@dataclass(frozen=True)
class UnitGradient:
    """The bytes of one unit's gradient between micro-batches, on the rank where they are most."""

    unit: str
    whole: int
    shard: int

    @property
    def extra(self) -> int:
        """The bytes that the whole gradient takes beyond a shard."""
        return self.whole - self.shard


def resting_whole(units: Sequence[UnitGradient], budget: int) -> tuple[str, ...]:
    """Return the names of the `units` (in the order of the forward) whose gradients rest whole, in
    the order in which they were taken.

    None where `budget` holds no unit beside the shards of the others.
    """
    left, taken = budget - sum(unit.shard for unit in units), []
    for unit in _in_line(units):
        left -= unit.extra
        if left < 0:
            break
        taken.append(unit.unit)
    return tuple(taken)


def least_budget(units: Sequence[UnitGradient]) -> int:
    """Return the smallest budget under which a unit rests whole; there is one that could."""
    return sum(unit.shard for unit in units) + _in_line(units)[0].extra


def _in_line(units: Sequence[UnitGradient]) -> list[UnitGradient]:
    """Return those of `units` that a reduce makes smaller, in the order in which they are taken."""
    return sorted((unit for unit in reversed(units) if unit.extra > 0), key=lambda one: one.extra)
