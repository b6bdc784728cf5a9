"""The output of commands: lines, tables, JSON, sizes, and a progress bar.

Text may come from files of other people: no markup, and no character that a terminal obeys. rich
colours what goes to a terminal, and nothing that goes elsewhere. It is imported when a table or a
bar is shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroshard.system.safe_files import printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table as RichTable


def say(line: str) -> None:
    """Print `line`, which may have several, on stdout; no line of it is folded."""
    print(printable(line))


def note(line: str) -> None:
    """Print a line beside the answer, on stderr."""
    sys.stderr.write(f"zeroshard: {printable(line)}\n")


def say_facts(facts: Iterable[tuple[str, str | None]], *, width: int) -> None:
    """Print the facts that there are, each in a line after its name."""
    for name, fact in facts:
        if fact:
            say(f"{name:{width}} {fact}")


def print_json(data: Any) -> None:
    """Print what ``--json`` asks for: what a table shows, as plain values."""
    print(json.dumps(data, indent=1, default=str))


# ------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Table:
    """A table. Its columns hold numbers, apart from the columns `text`; without names of columns it
    has no head.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    text: Collection[str] = ()
    folded: Collection[str] = ()  # columns with texts that break where a width is given
    is_framed: bool = True  # else a rule below the head, and as narrow as can be
    styles: Sequence[str] = ()  # of the rows, on a terminal

    def print(self, width: int | None = None) -> None:
        """Print it, in lines of at most `width` (None: as wide as it is), or as few more as its
        numbers need. A narrower terminal breaks lines, which loses no number.
        """
        from rich.console import Console

        if width is not None and not self.is_framed:
            # in which no word of an unframed table is broken
            total = len(self.columns) - 1
            for name, *column in zip(self.columns, *self.rows, strict=True):
                texts = (name, *map(str, column))
                words = (text.split() if name in self.folded else [text] for text in texts)
                total += max(len(word) for part in words for word in part)
            width = max(width, total)
        Console(width=width or 1000).print(self.rich(), soft_wrap=width is None)

    def rich(self) -> RichTable:
        """Return it as rich's."""
        from rich.box import HEAVY_HEAD, SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title, style="table.title") if self.title else None,
            title_justify="left",
            box=HEAVY_HEAD if self.is_framed else SIMPLE_HEAD,
            show_header=any(self.columns),
            show_edge=self.is_framed,
            pad_edge=self.is_framed,
            padding=(0, int(self.is_framed)),
        )
        for name in self.columns:
            justify: Any = "left" if name in self.text else "right"
            table.add_column(
                Text(printable(name)), justify=justify, no_wrap=name not in self.folded
            )
        for number, row in enumerate(self.rows):
            cells = (printable(str(one)).replace("\n", "\\n").replace("\t", "\\t") for one in row)
            table.add_row(*map(Text, cells), style=self.styles[number] if self.styles else None)
        return table

    def markdown(self) -> str:
        """Return it as markdown, its title before it."""
        ruler = ("---" if name in self.text else "---:" for name in self.columns)
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (self.columns, *self.rows)]
        lines.insert(1, f"|{'|'.join(ruler)}|")
        return "\n".join([*([f"**{self.title}**", ""] if self.title else []), *lines, ""])


# ------------------------------------------------------------------ numbers


def size_text(num_bytes: int) -> str:
    """Return decimal bytes with three digits: "31.4 GB"."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{three_digits(num_bytes / 10**power)} {unit}"
    return f"{num_bytes} B"


def count_text(number: float) -> str:
    """Return a count with three digits: "44.3k"."""
    for power, unit in ((9, "G"), (6, "M"), (3, "k")):
        if number >= 0.9995 * 10**power:
            return f"{three_digits(number / 10**power)}{unit}"
    return three_digits(number)


def three_digits(number: float) -> str:
    """Return three digits, or the whole number where it has more; a dash for zero."""
    if number == 0:
        return "-"
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


# ------------------------------------------------------------------ progress


@dataclass
class Bar:
    """A progress bar on a terminal's stderr; lines appear above it, on a terminal or not."""

    live: Progress

    def begin(self, what: str, total: float | None) -> None:
        """Begin anew, with `total` steps or bytes, where it is known."""
        for task in self.live.task_ids:
            self.live.remove_task(task)
        self.live.add_task(what, total=total)

    def tell(self, what: str) -> None:
        """Name what is under way."""
        self.live.update(self.live.task_ids[0], description=what)

    def advance(self, count: float = 1) -> None:
        """Go ahead."""
        self.live.advance(self.live.task_ids[0], count)

    def step(self, what: str) -> None:
        """Go one step ahead, to `what`."""
        self.tell(what)
        self.advance()

    def say(self, line: str) -> None:
        """Print a line on stderr."""
        self.live.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(
    what: str = "", total: float | None = None, *, is_bytes: bool = False, is_quiet: bool = False
) -> Iterator[Bar]:
    """Show a progress bar on a terminal's stderr, unless `is_quiet`; it is gone afterwards."""
    import rich.progress as columns
    from rich.console import Console

    console = Console(stderr=True)
    shown = (
        columns.TextColumn("{task.description}", markup=False),
        columns.BarColumn(),
        columns.DownloadColumn() if is_bytes else columns.MofNCompleteColumn(),
        columns.TimeRemainingColumn(),
    )
    is_hidden = is_quiet or not console.is_terminal
    with columns.Progress(*shown, console=console, transient=True, disable=is_hidden) as live:
        bar = Bar(live)
        bar.begin(what, total)
        yield bar
