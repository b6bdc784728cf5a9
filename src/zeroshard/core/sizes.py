"""Numbers and choices as people write them: counts of parameters with decimal suffixes ("7.5B"),
bytes with decimal or binary ones ("3.2TB", "32GiB"), names to choose from ("int8, int4 or fp8").

A size without a suffix is refused: nobody knows whether "32" was meant in bytes or in GiB. Then the
use of one size, the budget of whole gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from zeroshard.errors import ConfigError

_COUNTS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}
_BYTES |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def any_of(names: Iterable[str]) -> str:
    """Return `names` as choices: "int8, int4 or fp8"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def parse_count(text: str, what: str) -> int:
    """Return the number that `text` ("7.5B") says; `what` names the option in the ConfigError."""
    return _parse(text, what, _COUNTS, "7.5B")


def parse_bytes(text: str, what: str) -> int:
    """Return the bytes that `text` ("32GiB") says; `what` names the option in the ConfigError."""
    return _parse(text, what, _BYTES, "32GiB")


def _parse(text: str, what: str, units: dict[str, int], example: str) -> int:
    found = _NUMBER.fullmatch(text.strip())
    by_lower = {name.lower(): size for name, size in units.items()}
    if found is None or (found[2] and found[2].lower() not in by_lower):
        raise ConfigError(
            f"{what}={text!r} is not a size: a number and one of {', '.join(units)}, as in"
            f" {example}"
        )
    if not found[2]:
        raise ConfigError(
            f"{what}={text!r} has no unit: write one of {', '.join(units)}, as in {example}"
        )
    size = int(Fraction(found[1]) * by_lower[found[2].lower()])
    if size < 1:
        raise ConfigError(f"{what}={text!r} is less than one")
    return size


# ------------------------------------------------------------------ whole gradients within a budget
# The units that keep their whole gradient between micro-batches, within a budget of bytes.
#
# Inside ``no_sync`` a unit's gradient either rests whole on each rank, a sum of micro-batches that
# is reduced once, or is reduced at each micro-batch and rests as a shard. Whole gradients of the
# smallest units come first, the later unit first among equals, as long as the next one fits::
#
#     two ranks, block.0 of 4, block.1 of 4, head of 16     budget 12   none          2 + 2 + 8
#                                                           budget 14   block.1       2 + 4 + 8
#                                                           budget 16   both blocks   4 + 4 + 8
#
# Invariants: what rests is within the budget; a larger budget takes the same units and perhaps
# more, so that traffic falls monotonically; the next unit in line does not fit into what is left.
# Cost: n log n. The choice depends on sizes alone, so that it is the same on every rank.


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
    """Return the names of the `units` (given in the order of the forward) that keep their whole
    gradient, in the order in which they were taken.

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
    """Return the `units` that a reduce makes smaller, in the order in which they are taken."""
    return sorted((unit for unit in reversed(units) if unit.extra > 0), key=lambda one: one.extra)
