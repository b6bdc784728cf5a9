"""Options and commands as data: what argparse makes of them, and what values they refuse."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zeroshard.errors import ConfigError
from zeroshard.terminal import (
    JSON,
    LineParser,
    Option,
    Subcommand,
    UsageError,
    as_usage,
    count,
    listed,
    made,
    one_of,
)


def _parse(option: Option, *argv: str) -> dict[str, Any]:
    parser = LineParser(prog="x")
    option.add_to(parser)
    return vars(parser.parse_args(argv))


@pytest.mark.parametrize(
    ("option", "argv", "found"),
    [
        (JSON, [], {"json": False}),
        (JSON, ["--json"], {"json": True}),
        (Option("--gpus N", type=int), [], {"gpus": None}),
        (Option("--gpus N", type=int, default=0), [], {"gpus": 0}),
        (Option("--gpus N", type=int), ["--gpus", "3"], {"gpus": 3}),
        (Option("--tee, -t VALUE"), ["-t", "3"], {"tee": "3"}),
        (Option("--to", choices=("a", "b")), ["--to", "b"], {"to": "b"}),
        (Option("--data FILE ...", default=[]), [], {"data": []}),
        (Option("--data FILE ..."), ["--data", "a", "b"], {"data": ["a", "b"]}),
        (Option("DIR", type=Path, dest="source"), ["a"], {"source": Path("a")}),
        (Option("[PATH]", dest="path"), [], {"path": None}),
        (Option("FILE ...", dest="files"), ["a", "b"], {"files": ["a", "b"]}),
        (Option("--comm K=V", action="append", default=[]), ["--comm", "a"], {"comm": ["a"]}),
    ],
    ids=lambda value: value.written if isinstance(value, Option) else None,
)
def test_an_option_is_what_its_help_shows(
    option: Option, argv: list[str], found: dict[str, Any]
) -> None:
    assert _parse(option, *argv) == found
    parser = LineParser(prog="x")
    option.add_to(parser)
    shown = parser.format_help()
    assert all(word in shown for word in (*option.names, option.unit.split(" ...")[0].strip("[]")))


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        (count(2), "1", "'1' is not a whole number of at least 2"),
        (count(0), "-1", "'-1' is not a whole number of at least 0"),
        (one_of(("a", "b")), "c", "'c' is not one of a, b"),
        (listed(count(1)), "2,x", "'x' is not a whole number of at least 1"),
    ],
)
def test_a_value_of_another_type_is_a_usage_error_of_one_line(
    kind: Any, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse(Option("--it IT", type=kind), f"--it={text}")
    error = capsys.readouterr().err
    assert ended.value.code == 2 and complaint in error and error.count("\n") == 1


def test_a_list_has_each_value_once() -> None:
    assert listed(one_of(("a", "b")))("b,a,b") == ["b", "a"]


def test_what_a_value_must_be_is_in_the_error() -> None:
    option = Option("--port, -p N", type=int, must="a port number")
    assert _parse(option, "-p", "3") == {"port": 3}
    with pytest.raises(UsageError, match=r"^--port must be a port number, not 'http'$"):
        _parse(option, "--port", "http")


def test_a_command_has_options_or_commands_and_shows_an_example() -> None:
    def run(arguments: argparse.Namespace) -> int:
        return len(arguments.file)

    show = Subcommand("show", "it", "x show a", (Option("FILE", dest="file"),), run)
    top = Subcommand("x", "", "x show a\nx show b", commands=(show,))
    parser = LineParser(prog="x")
    top.declare(parser)
    arguments = parser.parse_args(["show", "abc"])
    assert arguments.handler(arguments) == 3
    assert parser.format_help().endswith("examples:\n  x show a\n  x show b\n")


def test_a_dataclass_is_made_of_the_arguments_with_the_names_of_its_fields() -> None:
    @dataclass(frozen=True)
    class Asked:
        size: int
        path: Path | None = None
        kind: str = "plain"

    given = argparse.Namespace(size=3, other=4, kind="told")
    assert made(Asked, given, path=Path("a")) == Asked(3, Path("a"), "told")


def test_a_refused_configuration_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"^plan: gpus=0$"), as_usage("plan: "):
        raise ConfigError("gpus=0")
