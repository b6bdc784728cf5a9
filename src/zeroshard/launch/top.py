"""``zeroshard top``: a line per rank of a run on this host, while it runs.

    zeroshard top                  the newest run of yours
    zeroshard top 4711             the one with this process id
    zeroshard top --once --json    once, for programs

It reads the file with each rank's heartbeat, which ``launch/worker.py`` keeps and an engine writes
to at every forward and step (the rest at most twice a second), and asks nobody. A rank waits for
those that have begun fewer forwards and steps. What ran under another launcher has no such file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zeroshard.launch.worker import COUNT, RUN_FOLDER, STATUS, TIME
from zeroshard.system.this_host import parent_of
from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    Table,
    UsageError,
    count_text,
    print_json,
    size_text,
    three_digits,
)

_EVERY_S = 1.0  # between two looks


@dataclass(frozen=True)
class RankStatus:
    """One rank, as its file says; the bytes are those that its engine counts on its device."""

    rank: int
    pid: int
    silent_s: float | None  # since its last forward or step began or ended; None before the first
    beats: int  # how many of those it has shown
    step: int  # that are over
    step_s: float
    tokens_per_s: float  # of this rank; 0 where the model is called with no whole numbers
    held_bytes: int
    peak_bytes: int
    reserved_bytes: int  # by torch's allocator of an accelerator
    waits_for: tuple[int, ...] = ()


def statuses(directory: Path) -> list[RankStatus]:
    """Return the ranks that are alive in the directory of a run, in order."""
    found: list[RankStatus] = []
    for path in directory.glob("rank-*.heart"):
        pid = int(path.stem.removeprefix("rank-"))
        data = b""
        with suppress(OSError):
            data = path.read_bytes()
        if len(data) < TIME.size + COUNT.size + STATUS.size or not Path(f"/proc/{pid}").exists():
            continue
        (beat,), (rank, beats) = TIME.unpack_from(data), COUNT.unpack_from(data, TIME.size)
        silent_s = time.monotonic() - beat if beat else None
        status = STATUS.unpack_from(data, TIME.size + COUNT.size)
        found.append(RankStatus(rank, pid, silent_s, beats, *status))
    found.sort(key=lambda one: one.rank)
    return [
        replace(one, waits_for=tuple(other.rank for other in found if other.beats < one.beats))
        for one in found
    ]


def table(ranks: Sequence[RankStatus]) -> Table:
    """Return them as a table."""
    rows = []
    for one in ranks:
        sizes = (size_text(size) if size else "-" for size in (one.held_bytes, one.peak_bytes))
        silent = "-" if one.silent_s is None else f"{one.silent_s:.1f}"
        tokens = count_text(one.tokens_per_s) if one.tokens_per_s else "-"
        waits = ", ".join(map(str, one.waits_for))
        rows.append((one.rank, one.step, three_digits(one.step_s), tokens, *sizes,
                     size_text(one.reserved_bytes) if one.reserved_bytes else "-", silent,
                     f"rank {waits}" if waits else "-"))  # fmt: skip
    columns = ("rank", "step", "s/step", "tokens/s", "held", "peak", "reserved", "silent s",
               "waiting for")  # fmt: skip
    return Table(columns, rows, text=("waiting for",), is_framed=False)


def _directory(run: str | None) -> Path:
    """Return the directory of the run that the line names. Raises UsageError."""
    if run is not None and Path(run).is_dir():
        return Path(run)
    newest: list[tuple[float, Path]] = []
    for path in Path(tempfile.gettempdir()).glob(f"{RUN_FOLDER}*"):
        with suppress(OSError):  # another user's, or just gone
            pids = [int(one.stem.removeprefix("rank-")) for one in path.glob("rank-*.heart")]
            parents = set[str]()
            for pid in pids:
                with suppress(OSError):  # it is gone
                    parents.add(str(parent_of(pid)))
            if parents and (run is None or run in parents):
                newest.append((path.stat().st_mtime, path))
    if not newest:
        raise UsageError(
            f"top: no ranks of {'any zeroshard run' if run is None else run} are on this host: give"
            " the process id of zeroshard run, or its directory"
        )
    return max(newest)[1]


def _top(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    directory, console = _directory(arguments.run), Console()
    ranks = statuses(directory)
    if arguments.json:
        print_json([asdict(one) for one in ranks])
    elif arguments.once or not console.is_terminal:
        table(ranks).print()
    else:
        with suppress(KeyboardInterrupt), Live(table(ranks).rich(), console=console) as live:
            while ranks := statuses(directory):
                live.update(table(ranks).rich(), refresh=True)
                time.sleep(_EVERY_S)
    return 0


COMMAND = Subcommand(
    "top", "a line per rank of a run on this host, while it runs",
    "zeroshard top\nzeroshard top 4711 --once --json",
    (
        Option("[RUN]", "process id of zeroshard run, or its directory (default: the newest)",
               dest="run"),
        Option("--once", "print it once"),
        JSON,
    ),
    _top,
    description="Show step, speed, memory and silence of each rank of zeroshard run.",
)  # fmt: skip
