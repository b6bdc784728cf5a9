"""Commands and options as data: one place says an argument's name, unit, type, choices and help.

    Option("--gpus N", "number of GPUs", int)           a value; its name as the help shows it
    Option("--all", "every step")                       a flag
    Option("FILE", "a JSON file", Path, dest="file")    a value without a name
    Option("--data FILE ...", "train on these files")   one value or more; "[FILE]": one or none

A :class:`Subcommand` has options and a handler, or further commands. Standard library only, so that
``--help`` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from zeroshard.errors import ConfigError

T = TypeVar("T")


class UsageError(Exception):
    """An invalid command line: one line, exit code 2."""


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
