"""Text on the terminal that may come from files of other people: no markup, and no character that a
terminal obeys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.core.untrusted import printable

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["cell", "say"]


def say(line: str) -> None:
    """Print `line`, which may have several, on stdout; no line of it is folded."""
    print(printable(line))


def cell(value: object) -> Text:
    """Return `value` in words for a cell of a table of rich's, in one line."""
    from rich.text import Text

    return Text(printable(str(value)).replace("\n", "\\n").replace("\t", "\\t"))
