"""Commands: their options as data, and what they print.

One place says an argument's name, unit, type, choices and help:

    Option("--gpus N", "number of GPUs", int)           a value; its name as the help shows it
    Option("--all", "every step")                       a flag
    Option("FILE", "a JSON file", Path, dest="file")    a value without a name
    Option("--data FILE ...", "train on these files")   one value or more; "[FILE]": one or none

A :class:`Subcommand` has options and a handler, or further commands. Standard library only, so that
``--help`` and usage errors answer at once: rich, which colours what goes to a terminal and nothing
that goes elsewhere, is imported when a table or a bar is shown.

What is printed may come from files of other people: no markup, and no character that a terminal
obeys.
"""

from __future__ import annotations

import argparse
import difflib
import json
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from zeroshard.errors import ConfigError, ZeroshardError
from zeroshard.system.safe_files import printable

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table as RichTable

T = TypeVar("T")
EXIT_USAGE, EXIT_INTERNAL, EXIT_IO, EXIT_INTERRUPTED = 2, 70, 74, 130


class UsageError(Exception):
    """An invalid command line: one line, exit code 2."""


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the line for an error; no line for a closed pipe."""
    if isinstance(error, UsageError):
        return EXIT_USAGE, str(error)
    if isinstance(error, ZeroshardError):
        return error.exit_code, str(error)
    if isinstance(error, BrokenPipeError):
        return EXIT_IO, ""
    if isinstance(error, OSError):
        if error.filename is None or error.strerror is None:
            return EXIT_IO, str(error)
        return EXIT_IO, f"{error.filename}: {error.strerror}"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if (number := getattr(error, "sigval", None)) is not None:
        # torch's handlers outlive its agent: between two starts of a job, or at its end
        return 128 + int(number), f"ended by {signal.Signals(number).name}"
    return EXIT_INTERNAL, f"internal error, {type(error).__name__}: {error} (--debug shows where)"


@contextmanager
def as_usage(before: str = "") -> Iterator[None]:
    """Turn a ConfigError, of a value that the line gives, into a usage error."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(f"{before}{error}") from None


class LineParser(argparse.ArgumentParser):
    """An argument parser with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


@dataclass(frozen=True)
class Option:
    """An argument of a command line: `written` is its name and unit as the help shows them, `must`
    what its value must be, for the error; the other fields are as in ``add_argument``.
    """

    written: str
    help: str | None = None
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: Sequence[str] | None = None
    dest: str | None = None
    action: Any = None
    required: bool = False
    const: Any = None  # where it may stand without its value
    must: str = ""

    @property
    def names(self) -> list[str]:
        """Its names, with their dashes; none where it has only a place."""
        return [word for word in self.written.replace(", ", " ").split() if word.startswith("-")]

    @property
    def unit(self) -> str:
        """The name of its value; empty for a flag."""
        return self.written.removeprefix(", ".join(self.names)).strip()

    def read(self, text: str) -> Any:
        """Return the value that `text` is. Raises UsageError where it is not what it must be."""
        assert self.type is not None
        try:
            return self.type(text)
        except ValueError:
            raise UsageError(f"{self.names[0]} must be {self.must}, not {text!r}") from None

    def add_to(self, parser: Any) -> None:
        """Declare it on an argument parser, or on a group of one."""
        how = {**vars(self), "metavar": self.unit.strip("[]").removesuffix(" ...")}
        del how["written"], how["must"]
        if self.must:
            how["type"] = self.read
        if self.unit.startswith("[") or self.unit.endswith(" ..."):
            how["nargs"] = "?" if self.unit.startswith("[") else "+"
        if not self.unit and self.choices is None and self.action is None:
            how["action"] = "store_true"
        if self.default is None:
            del how["default"]
        given = {name: value for name, value in how.items() if value or name == "default"}
        parser.add_argument(*self.names, **given)


JSON = Option("--json", "print JSON")


@dataclass(frozen=True)
class Subcommand:
    """A command: its help, its options, and the handler that runs it; or further `commands`."""

    name: str
    help: str
    example: str  # of its use, a line or more
    options: Sequence[Option] = ()
    handler: Callable[[argparse.Namespace], int] | None = None
    groups: Mapping[str, Iterable[Option]] = field(default_factory=dict)  # by title, more options
    commands: Sequence[Subcommand] = ()
    description: str | None = None
    epilog: str = ""  # before the example
    usage: str | None = None
    allow_abbrev: bool = True

    def add_to(self, parsers: Any) -> LineParser:
        """Add its parser to the subparsers of another one; return it."""
        how: dict[str, Any] = {"help": self.help, "allow_abbrev": self.allow_abbrev}
        parser: LineParser = parsers.add_parser(self.name, **how)
        self.declare(parser)
        return parser

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Declare it on the parser that is its own."""
        lines = self.example.split("\n")
        head = "examples:" if len(lines) > 1 else "example:"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description, parser.usage = self.description, self.usage
        parser.epilog = "\n  ".join([self.epilog + head, *lines])
        for option in self.options:
            option.add_to(parser)
        for title, options in self.groups.items():
            group = parser.add_argument_group(title)
            for option in options:
                option.add_to(group)
        if self.commands:
            parsers = parser.add_subparsers(dest=self.name, metavar="WHAT", required=True)
            for command in self.commands:
                command.add_to(parsers)
        parser.set_defaults(handler=self.handler)


def made(kind: type[T], arguments: argparse.Namespace, /, **more: Any) -> T:
    """Return the dataclass `kind`, made of the arguments that are called as its fields are, and of
    `more`.
    """
    given = {**vars(arguments), **more}
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in known if name in given})


def split_line(
    argv: Sequence[str],
    units: Mapping[str, str],
    spell: Callable[[str], str],
    refused: Mapping[str, str],
    after: str,
) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Split a launch line into (option, value) pairs and everything from the script on. `units` has
    the unit of each option's value, by the name that `spell` makes of what is written. Raises
    UsageError for an unknown option, with `after`, for a `refused` one, and for a value too few or
    too many.
    """
    pairs: list[tuple[str, str | None]] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        written, sign, text = word.partition("=")
        name, value = spell(written), text if sign else None
        if name in refused:
            raise UsageError(f"{written} has no place here: {refused[name]}")
        if name not in units:
            near = difflib.get_close_matches(name, units, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UsageError(f"unknown option {written}{hint}; {after}")
        if sign and not units[name]:
            raise UsageError(f"{written} takes no value")
        if not sign and units[name] and not units[name].startswith("["):
            if not rest:
                raise UsageError(f"{written} needs a value")
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs, rest


def joined(pairs: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return the pairs of `split_line` as words."""
    return [name if value is None else f"{name}={value}" for name, value in pairs]


# ------------------------------------------------------------------ types of options


def count(least: int) -> Callable[[str], int]:
    """Return the type of whole numbers of at least `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """Return the type of the names that are `known`."""

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
        return text

    return name


def listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of values of a `kind` that commas separate, each taken once."""
    return lambda text: list(dict.fromkeys(map(kind, text.split(","))))


# ------------------------------------------------------------------------------- the files of ranks


def files_of_ranks(command: str, directory: Path, kind: str, ending: str) -> list[Path]:
    """Return the ``rank-*`` files in `directory`, in order: what ``engine.KIND(directory)`` has
    written. Raises UsageError, in the name of `command`, where there are none.
    """
    if not directory.is_dir():
        raise UsageError(f"{command}: {directory} is not a directory")
    paths = sorted(directory.glob(f"rank-*{ending}"))
    if not paths:
        raise UsageError(
            f"{command}: {directory} has no {kind} (rank-00000{ending}, ...): write one with `with"
            f" engine.{kind}(directory):`"
        )
    return paths


# ------------------------------------------------------------------ lines


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
