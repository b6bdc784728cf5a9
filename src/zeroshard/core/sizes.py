"""Numbers and choices as people write them: counts of parameters with decimal suffixes ("7.5B"),
bytes with decimal or binary ones ("3.2TB", "32GiB"), names to choose from ("int8, int4 or fp8").

A size without a suffix is refused: nobody knows whether "32" was meant in bytes or in GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
