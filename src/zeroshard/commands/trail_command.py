r"""``zeroshard compare`` and ``zeroshard replay``: where two trails part (``engine.trail(DIR)``),
and whether a step, run again, has the hashes that it had.

    zeroshard compare runs/a runs/b
    zeroshard replay runs/a --step 120 --checkpoint ckpt -- \
        train.py --checkpoint ckpt --resume --trail runs/a

A replay is the user's own script with its own arguments, on a single process or a few. It finds
another directory in the place of ``runs/a``, in which its trail is written, and another one in the
place of ``ckpt``, in which the newest step at or before the one that is asked for is the only one.
Once the step is written the script is ended, and the trails are compared
(docs/design/launching.md). A file beside the new trail (core/trail.py) asks for the hashes of the
slices that the run's ranks had, and with ``--leaf`` for one leaf of the step alone.

Invariant: neither the trail nor the checkpoints of the run are written to. Cost: files of the
checkpoint are linked, and copied where they cannot be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeroshard.core.trail import (
    REPLAY_FILE,
    REPLAY_VARIABLE,
    Comparison,
    Replay,
    Trail,
    compare,
)
from zeroshard.core.tree import Tree
from zeroshard.system.safe_files import NotReadable, from_json, printable, read_file
from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    UsageError,
    count,
    files_of_ranks,
    note,
    print_json,
    say,
)

EXIT_DIFFERENT = 1
_MOST_BYTES = 1 << 30  # of one rank's file
_LOOKS_S = 0.2  # between looks at a replay's trail
_END_BYTES = 1 << 22  # of a file in which a look sees whether the step is there
_ENDS_S = 30.0  # that a script may take to end once it is told to
_LOG_LINES = 15


# ------------------------------------------------------------------ files


def _read(directory: Path, command: str) -> Trail:
    """Return the trail in `directory`. Raises UsageError."""
    files = []
    for path in files_of_ranks(command, directory, "trail", ".jsonl"):
        try:
            files.append(_lines(path))
            Trail(files[-1:])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            reason = printable(" ".join(str(error).split()))
            raise UsageError(f"{command}: {path} is no trail, or damaged: {reason}") from None
    return Trail(files)


def _lines(path: Path) -> list[Any]:
    """Return the lines of one rank's file; those that a killed process has left torn, before
    another one's header or at the end, are left out.
    """
    lines = [line for line in read_file(path, _MOST_BYTES).split(b"\n") if line.strip()]
    found: list[Any] = []
    torn: NotReadable | None = None
    for line in lines:
        try:
            data = from_json(line)
        except NotReadable as error:
            torn = error
            continue
        if not isinstance(data, dict):
            raise NotReadable("a line is no object")
        if torn is not None and "trail" not in data:
            raise torn
        torn = None
        found.append(data)
    return found


# ------------------------------------------------------------------ compare


def _compare(arguments: argparse.Namespace) -> int:
    runs = (arguments.run_a, arguments.run_b)
    first, second = (_read(run, "compare") for run in runs)
    return _report(_compared(first, second, arguments), runs, arguments)


def _compared(first: Trail, second: Trail, arguments: argparse.Namespace, **how: Any) -> Comparison:
    try:
        return compare(first, second, leaf=arguments.leaf, unit=arguments.unit, **how)
    except ValueError as error:
        raise UsageError(f"{arguments.command}: {printable(str(error))}") from None


def _report(found: Comparison, runs: Sequence[Path], arguments: argparse.Namespace) -> int:
    """Print what has been found; return the exit code."""
    first = found.differences[0] if found.differences else None
    if arguments.json:
        print_json(
            {
                "equal": first is None,
                "steps": list(found.steps),
                "first": None
                if first is None
                else {
                    "step": first.step,
                    "phase": first.phase.partition(" ")[0],
                    "leaf": first.leaf,
                    "unit": first.unit,
                    "meaning": first.meaning,
                    "holders": [
                        {"run": str(runs[each.run]), "ranks": each.ranks, "value": each.value}
                        for each in first.holders
                    ],
                    "suspects": {
                        str(run): list(ranks)
                        for run, ranks in zip(runs, first.suspects, strict=True)
                    },
                },
                "differences": len(found.differences),
                "notes": list(found.notes),
            }
        )
        return 0 if first is None else EXIT_DIFFERENT
    for line in found.notes:
        note(line)
    if first is None:
        steps = f"{len(found.steps)} step(s), {found.steps[0]} to {found.steps[-1]}"
        asked = (arguments.leaf, arguments.unit) != (None, None)
        say(f"equal: every hash {'asked for ' * asked}of {steps}, that both trails have")
        return 0
    equal = found.steps.index(first.step)
    before = f"{equal} step(s) before it are equal" if equal else "it is the first step in both"
    unit = f", {first.unit}" if first.unit.startswith("option ") else f", unit {first.unit!r}"
    say(f"step {first.step}{unit if first.unit else ''}: {first.meaning}; {before}")
    for holder in first.holders:
        ranks = f"rank(s) {_listed(holder.ranks)}" if holder.ranks else "no rank"
        say(f"  {runs[holder.run]}, {ranks}: {holder.value}")
    for run, suspects in zip(runs, first.suspects, strict=True):
        if suspects:
            say(f"  differs on rank(s) {_listed(suspects)} of {run}")
    if (more := len(found.differences) - 1) > 0:
        say(f"  {more} more difference(s) in this step follow it")
    return EXIT_DIFFERENT


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# ------------------------------------------------------------------ replay


def _replay(arguments: argparse.Namespace) -> int:
    run, step = arguments.run, arguments.step
    trail = _read(run, "replay")
    if step not in trail.steps:
        recorded = ", ".join(map(str, list(trail.steps)[-5:])) or "none"
        raise UsageError(
            f"replay: {run} does not have step {step} of every rank (the last that it has:"
            f" {recorded})"
        )
    headers = [record.header for record in trail.steps[step]]
    if not headers[0].leaves:
        raise UsageError(
            f"replay: needs a run with leaves, zs.shard(..., leaves=V), and {run} has none"
        )
    leaves = Tree.parse(headers[0].leaves).leaves
    if arguments.leaf is not None and arguments.leaf >= leaves:
        raise UsageError(f"replay: --leaf {arguments.leaf}: {run} has leaves 0 to {leaves - 1}")
    parent = (arguments.checkpoint or run).resolve().parent
    with tempfile.TemporaryDirectory(prefix=".replay-", dir=parent) as name:
        work = Path(name)
        begun = _checkpoint_before(arguments.checkpoint, step, work / "checkpoint")
        again = {run.resolve(): work / "trail"}
        if arguments.checkpoint is not None:
            again[arguments.checkpoint.resolve()] = work / "checkpoint"
        script = [_in_place(word, again) for word in arguments.script]
        instead = {run.resolve(): Path()}
        if all(_in_place(word, instead) == word for word in arguments.script):
            raise UsageError(
                f"replay: none of the script's arguments is {run}: the script writes its trail"
                " there, and the replay's elsewhere"
            )
        (work / "trail").mkdir()
        asked = Replay.of(headers, step, arguments.leaf)
        (work / "trail" / REPLAY_FILE).write_text(json.dumps(asked.to_json()))
        threads = headers[0].curve.get("threads", "1")
        replayed = _run(script, arguments.nproc, work, step, threads)
        since = "the beginning" if begun is None else f"step {begun} of {arguments.checkpoint}"
        if not arguments.json:
            say(f"replayed on {arguments.nproc} process(es) from {since}:")
        steps = [one for one in trail.steps if one <= step]
        found = _compared(trail, replayed, arguments, steps=steps, is_replay=True)
    return _report(found, (run, Path("the replay")), arguments)


def _checkpoint_before(directory: Path | None, step: int, out: Path) -> int | None:
    """Let the newest checkpoint at or before `step` be the only one in `out`; return its step,
    None where there is none.
    """
    from zeroshard.checkpoint.steps import list_steps, saved_order

    if directory is None:
        return None
    if not directory.is_dir():
        raise UsageError(f"replay: {directory} is not a directory")
    saved = [number for _, number in saved_order(directory) if number <= step]
    out.mkdir()
    if not saved:
        return None
    newest = saved[-1]
    found = list_steps(directory)[newest]
    shutil.copytree(found, out / found.name, symlinks=True, copy_function=_link)
    return newest


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where it cannot be linked."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _in_place(word: str, again: dict[Path, Path]) -> str:
    """Return an argument of the script, with another directory in the place of a run's."""
    before, equals, path = word.rpartition("=") if word.startswith("-") else ("", "", word)
    other = again.get(Path(path).resolve()) if path else None
    return word if other is None else f"{before}{equals}{other}"


def _run(script: Sequence[str], nproc: int, work: Path, step: int, threads: str) -> Trail:
    """Run the script, with as many `threads` per rank as the run had, on which bits depend, until
    it has written `step`; return its trail. Raises UsageError where it ends before.
    """
    launcher = ["-m", "zeroshard", "run", "--nproc", str(nproc)] if nproc > 1 else []
    log = work / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launcher, *script],
            env={
                **os.environ,
                "OMP_NUM_THREADS": threads,
                REPLAY_VARIABLE: str((work / "trail" / REPLAY_FILE).resolve()),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (trail := _written(work / "trail", step)) is None:
                if process.poll() is not None:
                    trail = _written(work / "trail", step)
                    break
                time.sleep(_LOOKS_S)
        finally:
            _end(process)
    if trail is None:
        for line in log.read_text(errors="replace").splitlines()[-_LOG_LINES:]:
            note(f"| {line}")
        raise UsageError(
            f"replay: the script has ended (exit code {process.returncode}) and not written step"
            f" {step}: its last lines are above; does it resume, and take as many steps?"
        )
    return trail


def _written(directory: Path, step: int) -> Trail | None:
    """Return the trail of a replay under way once it has `step`."""
    ends = []  # not read whole at each look
    for path in directory.glob("rank-*.jsonl"):
        with suppress(OSError), path.open("rb") as file:
            file.seek(max(path.stat().st_size - _END_BYTES, 0))
            ends.append(file.read())
    if not any(f'{{"step":{step},'.encode() in end.replace(b" ", b"") for end in ends):
        return None
    with suppress(UsageError):
        trail = _read(directory, "replay")
        return trail if step in trail.steps else None
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the script and whatever it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS_S)


# ------------------------------------------------------------------ the commands

_ALONE = (
    Option("--leaf K", "compare what this leaf has computed alone; a replay computes nothing else"
           " of its last step", count(0)),
    Option("--unit NAME", "compare this unit alone"),
    JSON,
)  # fmt: skip
_COMPARE_OPTIONS = (
    Option("RUN_A", "a directory with rank-*.jsonl", Path, dest="run_a"),
    Option("RUN_B", "another one, with leaves of any number of ranks", Path, dest="run_b"),
    *_ALONE,
)  # fmt: skip
COMPARE = Subcommand(
    "compare", "where the trails of two runs part: step, phase, unit, rank",
    "zeroshard compare runs/two-ranks runs/three-ranks", _COMPARE_OPTIONS, _compare,
    description="Compare the trails that engine.trail(DIRECTORY) has written.\nExit code 0: equal,"
    " 1: different, 2: they cannot be compared.",
)  # fmt: skip
_REPLAY_OPTIONS = (
    Option("RUN", "a directory with rank-*.jsonl", Path, dest="run"),
    Option("SCRIPT ...", "the script of the run with its arguments, after --", dest="script"),
    Option("--step N", "the step to run again, one that RUN has", count(0), required=True),
    Option("--checkpoint DIR", "the run's checkpoints (default: the script runs from its"
           " beginning)", Path),
    Option("--nproc N", "processes (default: 1)", count(1), 1),
    *_ALONE,
)  # fmt: skip
REPLAY = Subcommand(
    "replay", "run a step again, on one process, and compare every hash",
    "zeroshard replay runs/a --step 120 --checkpoint ckpt -- \\\n"
    "      train.py --checkpoint ckpt --resume --trail runs/a", _REPLAY_OPTIONS, _replay,
    description="Run a script again up to a step of its trail, and compare. Its arguments that"
    " name\nRUN or DIR name other directories then: neither is written to.\nExit code 0: equal, 1:"
    " different, 2: the step could not be run.",
)  # fmt: skip
