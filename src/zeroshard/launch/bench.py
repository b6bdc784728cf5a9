"""Finds the commands of ``zeroshard bench``: the benchmarks lie beside the package, in
``benchmarks/`` of a checkout, and are not part of an installed wheel.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from zeroshard.terminal.declared import Subcommand, UsageError

__all__ = ["BENCH", "add_commands"]

COMMAND_LINE = "command_line.py"  # tells our benchmarks from another package of this name
MISSING = (
    "bench: the benchmarks are not part of the installed package: run it in a checkout of"
    " zeroshard's repository, where `make bench` sets up all it needs"
)
BENCH = Subcommand(
    "bench", "measure this library beside the others",
    "zeroshard bench step --sizes medium --contenders zero3,fsdp2",
)  # fmt: skip


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks' commands to the parser of ``zeroshard bench``.

    Those beside this package are taken, else those that ``import benchmarks`` finds. Raises
    UsageError where there are none.
    """
    root = Path(__file__).resolve().parents[3]
    if (root / "benchmarks" / COMMAND_LINE).is_file():
        if sys.path[0] != str(root):
            sys.path.insert(0, str(root))
    elif not _importable():
        raise UsageError(MISSING)
    from benchmarks import command_line

    command_line.add_commands(parser)


def _importable() -> bool:
    found = find_spec("benchmarks")
    places = found.submodule_search_locations or [] if found else []
    return any((Path(place) / COMMAND_LINE).is_file() for place in places)
