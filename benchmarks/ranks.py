"""The ranks of a comparison, which starts itself once more under ``zeroshard run``: started, told
what this machine can do, and timed together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard as zs
from benchmarks import PATH
from benchmarks.plan import SIZES

__all__ = ["answer", "parser_of_turns", "start", "start_with_report", "timed"]


def parser_of_turns(description: str) -> argparse.ArgumentParser:
    """Return the options of a benchmark whose ways take turns, in pairs of some steps each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--pairs", type=int, default=12, help="turns of each (default: 12)")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn (default: 3)")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of the ranks
    return parser


def answer(measure: Callable[[], Any], out: Path) -> None:
    """Be one of the ranks: measure on one thread, and write what rank 0 has found as JSON."""
    zs.init_distributed()
    torch.set_num_threads(1)
    found = measure()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def start(script: str, ranks: int, arguments: Sequence[str], options: Sequence[str] = ()) -> int:
    """Run `script` on `ranks` ranks of one thread each, with `options` of ``zeroshard run``; return
    the exit code.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"}
    line = ["--nproc", str(ranks), *options, script, *arguments]
    command = [sys.executable, "-m", "zeroshard", "run", *line]
    return subprocess.run(command, env=environment, check=False).returncode


def start_with_report(
    script: str, ranks: int, arguments: Sequence[str], *, with_disk: bool = False
) -> int:
    """Measure this machine, `with_disk` the one of temporary files, too; then `start`, with
    ``--report FILE`` of what ``zeroshard doctor`` has found. Its folder is there until the end.
    """
    from zeroshard.commands.doctor import examine

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="zeroshard-validate-") as directory:
        report = Path(directory, "report.json")
        found = examine(Path(directory) if with_disk else None)
        report.write_text(json.dumps(found), encoding="utf-8")
        return start(script, ranks, [*arguments, "--report", str(report)])


def timed(step: Callable[[int], object], steps: int) -> float:
    """Return the seconds of one of `steps` steps, after an untimed one, between two barriers."""
    step(0)
    dist.barrier()
    begin = time.perf_counter()
    for number in range(steps):
        step(number)
    dist.barrier()
    return (time.perf_counter() - begin) / steps
