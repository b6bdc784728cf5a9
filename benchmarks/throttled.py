"""Ranks that are not equally fast: equal micro-batches beside micro-batches cut by `batch_shares`.

    python -m benchmarks.throttled                   four ranks on two cores, half of them throttled
    python -m benchmarks.throttled --ranks 2 --json  two ranks on one core

Ranks come in pairs of a fast and a slow one, and each pair has a core of its own, which it shares
by time: this process lets one of the two run and stops the other (SIGCONT, SIGSTOP), two slots for
the fast one and one for the slow one. So a slow rank has half the speed of a fast one, whatever the
other does: a slot is not given away while its rank waits. All of it is stopped, threads that bring
bytes included, as a slower machine would be slower in all.

First each rank measures its speed, alone, with a plain model: samples per second of forward and
backward. The ideal step of a global batch of G samples takes G / (the sum of speeds), and shares
are the speeds by their sum, rounded to whole samples. Both contenders then take turns (A B A B
...) on the same global batches. With half of the ranks at half speed, equal micro-batches wait for
the slow ones: 1.5 times the ideal, so 1.5 is the most that unequal ones can win.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import zeroshard as zs
from benchmarks import PATH
from benchmarks.model import GPT, Batches
from benchmarks.plan import Size
from benchmarks.results import machine_facts
from benchmarks.stats import bootstrap_median

__all__ = ["main", "table"]

_SIZE = Size("throttled", layers=2, width=128, heads=4, vocabulary=256, context=64)
_SLOT_S = 0.004
_POLL_S = 0.01
_CONTENDERS = ("equal", "unequal")


# ---------------------------------------------------------------------------- who throttles


def _slots(pids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return whose turns the three slots of each core are: fast, fast, slow."""
    half = len(pids) // 2
    return [(fast, fast, slow) for fast, slow in zip(pids[:half], pids[half:], strict=True)]


def _throttle(process: subprocess.Popen[bytes], pids: Sequence[int], slot_s: float) -> None:
    """Let the ranks run in their slots until `process`, which has started them, has ended."""
    cores, running = _slots(pids), set(pids)
    with contextlib.suppress(ProcessLookupError):  # a rank has ended: the others are about to
        for number in itertools.count():
            turn = {slots[number % 3] for slots in cores}
            for pid in running - turn:
                os.kill(pid, signal.SIGSTOP)
            for pid in turn - running:
                os.kill(pid, signal.SIGCONT)
            running = turn
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(slot_s)
                return


def _pids(process: subprocess.Popen[bytes], directory: Path, ranks: int) -> list[int]:
    """Return the processes of the ranks once all are there, none where `process` has ended."""
    files = [directory / f"rank-{rank}" for rank in range(ranks)]
    while process.poll() is None:
        if all(file.exists() for file in files):
            return [int(file.read_text()) for file in files]
        time.sleep(_POLL_S)
    return []


def _start(arguments: Sequence[str], ranks: int, slot_s: float, directory: Path) -> int:
    """Run the ranks of this file, throttled; return the exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "zeroshard", "run", "--nproc", str(ranks), __file__, *arguments]
    process = subprocess.Popen([*run, "--directory", str(directory)], env=environment)
    pids: list[int] = []
    try:
        pids = _pids(process, directory, ranks)
        if pids:
            (directory / "go").touch()
            _throttle(process, pids, slot_s)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if process.poll() is None and sys.exc_info()[0] is not None:
            process.terminate()
        process.wait()
    return process.returncode


# ---------------------------------------------------------------------------- a rank


def _take_core(rank: int, ranks: int) -> None:
    """Run on the core of this rank's pair, threads to come included."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % (ranks // 2) % len(cores)]})


def _wait_for_throttle(directory: Path, rank: int) -> None:
    """Tell who throttles this process, and go on once all are throttled."""
    part = directory / f"pid-{rank}"
    part.write_text(str(os.getpid()))
    part.rename(directory / f"rank-{rank}")
    while not (directory / "go").exists():
        time.sleep(_POLL_S)


class _Contender:
    """One engine, and how many samples of each batch its ranks take."""

    def __init__(self, sizes: Sequence[int], row: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(_SIZE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        shares = [size / sum(sizes) for size in sizes]
        self.engine = zs.shard(self.model, self.optimizer, policy=row, batch_shares=shares)
        self.sizes = sizes
        self.step = 0
        self.losses: list[float] = []
        rank = dist.get_rank()
        self._part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        self._share = shares[rank]
        size = Size(**{**vars(_SIZE), "batch": sum(sizes)})
        self._batches = Batches(size, rank=0, num_ranks=1, device=torch.device("cpu"))

    def turn(self, steps: int) -> float:
        """Return the seconds of a step."""
        batches = [self._batches[self.step + number] for number in range(steps)]
        losses = []
        dist.barrier()
        begin = time.perf_counter()
        for inputs, targets in batches:
            loss = self.model(inputs[self._part], targets[self._part])
            self.engine.backward(loss)
            self.engine.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach() * self._share)
        dist.barrier()
        seconds = (time.perf_counter() - begin) / steps
        total = torch.stack(losses).double()
        dist.all_reduce(total)
        self.losses += total.tolist()
        self.step += steps
        return seconds


def _speed(batch: int, seconds: float) -> float:
    """Return the samples per second of forwards and backwards of a plain model on this rank."""
    model = GPT(_SIZE)
    size = Size(**{**vars(_SIZE), "batch": batch})
    inputs, targets = Batches(size, rank=0, num_ranks=1, device=torch.device("cpu"))[0]
    model(inputs, targets).backward()
    dist.barrier()
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        model(inputs, targets).backward()
        done += batch
    return done / (time.perf_counter() - begin)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    ranks = dist.get_world_size()
    equal = [given.batch // ranks] * ranks
    speeds = torch.zeros(ranks, dtype=torch.float64)
    speeds[dist.get_rank()] = _speed(equal[0], given.probe_s)
    dist.all_reduce(speeds)
    shares = (speeds / speeds.sum()).tolist()
    sizes = dict(zip(_CONTENDERS, (equal, zs.split_batch(given.batch, shares)), strict=True))
    contenders = {name: _Contender(sizes[name], given.row) for name in _CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in _CONTENDERS}
    for number in range(given.rounds + 1):
        for name, contender in contenders.items():
            seconds = contender.turn(given.steps)
            if number:  # the first is not timed
                times[name].append(seconds)
    first, second = (contenders[name].losses for name in _CONTENDERS)
    far = max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))
    return {
        "speeds": speeds.tolist(),
        "ideal_s": given.batch / float(speeds.sum()),
        "sizes": sizes,
        "step_s": times,
        "losses": {name: contenders[name].losses for name in _CONTENDERS},
        "largest_relative_difference_of_losses": far,
    }


# ---------------------------------------------------------------------------- what is printed


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the medians, and the ratios of turns that followed each other."""
    equal, unequal = (found["step_s"][name] for name in _CONTENDERS)
    ratio = bootstrap_median([a / b for a, b in zip(equal, unequal, strict=True)])
    over = bootstrap_median([seconds / found["ideal_s"] for seconds in unequal])
    return {
        "median_s": {name: median(times) for name, times in found["step_s"].items()},
        "times_faster": vars(ratio),
        "times_the_ideal": vars(over),
    }


def table(found: dict[str, Any]) -> str:
    """Return the numbers as lines of text."""
    summary = found["summary"]
    faster, over = summary["times_faster"], summary["times_the_ideal"]
    speeds = ", ".join(f"{speed:.1f}" for speed in found["speeds"])
    lines = [f"speeds of the ranks: {speeds} samples/s; ideal step {found['ideal_s'] * 1e3:.0f} ms"]
    for name in _CONTENDERS:
        sizes = ", ".join(map(str, found["sizes"][name]))
        step_s = summary["median_s"][name]
        lines.append(f"{name:8} micro-batches {sizes:16} {step_s * 1e3:8.0f} ms/step")
    lines += [
        f"unequal is {faster['median']:.2f} times as fast ({faster['low']:.2f} to"
        f" {faster['high']:.2f}), {over['median']:.2f} times the ideal ({over['low']:.2f} to"
        f" {over['high']:.2f})",
        "largest relative difference of losses:"
        f" {found['largest_relative_difference_of_losses']:.1e}",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throttled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, help="an even number: half are throttled")
    parser.add_argument("--batch", type=int, default=384, help="samples of all ranks together")
    parser.add_argument("--row", default="zero2", help="of the table of policies")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--probe-s", type=float, default=5.0, help="seconds to measure speeds")
    parser.add_argument("--slot-s", type=float, default=_SLOT_S, help="seconds of a slot")
    parser.add_argument("--json", action="store_true", help="all raw numbers")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    return parser


def main(arguments: list[str]) -> int:
    """Start the ranks, throttle them, and print what rank 0 has written."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.ranks < 2 or given.ranks % 2 or given.batch % given.ranks:
        parser.error("--ranks must be even, and --batch a multiple of it")
    if given.directory is not None:
        _rank(given)
        return 0
    facts = machine_facts()
    with tempfile.TemporaryDirectory(prefix="zeroshard-throttled-") as name:
        code = _start(arguments, given.ranks, given.slot_s, Path(name))
        if code:
            return code
        found = json.loads(Path(name, "found.json").read_text(encoding="utf-8"))
    found |= {"machine": facts, "arguments": arguments, "summary": _summary(found)}
    print(json.dumps(found) if given.json else table(found))
    return 0


def _rank(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    _take_core(int(os.environ["RANK"]), given.ranks)
    zs.init_distributed("gloo")
    _wait_for_throttle(given.directory, dist.get_rank())
    found = _measure(given)
    if dist.get_rank() == 0:
        (given.directory / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
