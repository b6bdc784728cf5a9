"""Numbers in the tables that commands print."""

from __future__ import annotations

__all__ = ["size_text", "three_digits"]


def size_text(num_bytes: int) -> str:
    """Return decimal bytes with three digits: "31.4 GB"."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{three_digits(num_bytes / 10**power)} {unit}"
    return f"{num_bytes} B"


def three_digits(number: float) -> str:
    """Return three digits, or the whole number where it has more; a dash for zero."""
    if number == 0:
        return "-"
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"
