"""The ``zeroshard`` program: commands, and errors as one line on stderr with an exit code.

A command's handler is a function from the parsed arguments to the exit code; it imports what it
needs when it runs, so that ``--help`` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from zeroshard._version import __version__
from zeroshard.commands import (
    checkpoint_command,
    config,
    doctor,
    generate,
    report,
    trail_command,
)
from zeroshard.launch import deepspeed_line, top
from zeroshard.launch.options import RUN, parse_run
from zeroshard.planner import plan_command, walk_command
from zeroshard.terminal import (
    EXIT_USAGE,
    LineParser,
    Option,
    Subcommand,
    UsageError,
    explain,
    note,
)

PROGRAM = Subcommand(
    "zeroshard", "", "zeroshard run --nproc 2 examples/train_gpt.py",
    (Option("--debug", "show the traceback of an error of ours"),),
    description="ZeRO for PyTorch: plan, launch, checkpoints, measure.",
)  # fmt: skip
COMMAND_LINE = "command_line.py"  # tells our benchmarks from another package of this name
MISSING = (
    "bench: the benchmarks are not part of the installed package: run it in a checkout of"
    " zeroshard's repository, where `make bench` sets up all it needs"
)
BENCH = Subcommand(
    "bench", "measure this library beside the others",
    "zeroshard bench step --sizes medium --contenders zero3,fsdp2",
)  # fmt: skip
COMMANDS = (
    RUN, deepspeed_line.COMMAND, deepspeed_line.AS_DEEPSPEED,
    plan_command.command(doctor.this_machine), walk_command.COMMAND,
    checkpoint_command.COMMAND, config.COMMAND, doctor.COMMAND, report.COMMAND, top.COMMAND,
    trail_command.COMPARE, trail_command.REPLAY, generate.COMMAND, BENCH,
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code; usage errors and --help raise SystemExit."""
    arguments = sys.argv[1:] if argv is None else argv
    # Where a daemon or ``>&-`` has closed a standard stream, the next file would get its number,
    # and the ranks would take that for theirs: it is the null device from here on.
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (it stays)
    try:
        return _dispatch(arguments)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        code, message = explain(error)
        if message:
            note(message)
        return code


def _dispatch(arguments: list[str]) -> int:
    parser, parsers = build_parsers()
    command = arguments[1:] if arguments[:1] == ["--debug"] else arguments
    debug = arguments[: len(arguments) - len(command)]
    # not by the parser: the arguments after the script are not ours
    if command[:1] == ["run"]:
        return _launch(deepspeed_line.Line(parse_run(parsers["run"], [*debug, *command[1:]])))
    if command[:1] == ["deepspeed"]:
        line = deepspeed_line.parse(parsers["deepspeed"], command[1:])
        return _launch(line)
    if command[:1] == ["as-deepspeed"]:
        return deepspeed_line.become(parsers["as-deepspeed"], command[1:])
    # only now: most installations have no benchmarks, and most commands need none
    if [word for word in arguments if not word.startswith("-")][:1] == ["bench"]:
        add_benchmarks(parsers["bench"])
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    return int(parsed.handler(parsed))


def _launch(line: deepspeed_line.Line) -> int:
    """Start the ranks of a line, and return when they have ended."""
    if line.options.hosts is not None:
        from zeroshard.launch.hosts import launch_on_hosts

        return launch_on_hosts(line.options, line.options.hosts, line.hosts or None)
    from zeroshard.launch.run import launch, leave

    deepspeed_line.take_devices(line.devices)
    leave(launch(line.options))


def build_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of all, and the parsers of the commands, by name."""
    parser = LineParser(prog=PROGRAM.name)
    PROGRAM.declare(parser)
    parser.add_argument("--version", action="version", version=f"zeroshard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LineParser)
    return parser, {command.name: command.add_to(commands) for command in COMMANDS}


def add_benchmarks(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks' commands to the parser of ``zeroshard bench``.

    Benchmarks lie beside the package, in ``benchmarks/`` of a checkout, not in an installed wheel.
    Those beside this package are taken, else those that ``import benchmarks`` finds. Raises
    UsageError where there are none.
    """
    root = Path(__file__).resolve().parents[3]
    if (root / "benchmarks" / COMMAND_LINE).is_file():
        if sys.path[0] != str(root):
            sys.path.insert(0, str(root))
    else:
        found = find_spec("benchmarks")
        places = found.submodule_search_locations or [] if found else []
        if not any((Path(place) / COMMAND_LINE).is_file() for place in places):
            raise UsageError(MISSING)
    from benchmarks import command_line

    command_line.add_commands(parser)
