"""``python -m benchmarks.accumulate``: steps of micro-batches whose weights rest on disk, by
``engine.accumulate()`` and by the plain loop with ``no_sync()``, in turns. One process.

    plain       each micro-batch reads every unit for its forward and again for its backward
    accumulate  all micro-batches read every unit twice together

Weights, masters and Adam's moments rest on disk, gradients on the host. `--pace` slows every
request of the disk down to so many bytes a second, all threads together, so that the disk is the
bound on any machine; without it the disk is as fast as it is. Steps alternate (A B, B A, ...), the
first of each warms up; bytes are those that the store has asked the disk for. Both must have the
same losses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from benchmarks.model import GPT, Batches
from benchmarks.plan import Size
from benchmarks.results import machine_facts
from benchmarks.tables import grid, publish
from zeroshard.core.sizes import parse_bytes
from zeroshard.runtime.engine import states_of
from zeroshard.terminal import progress
from zeroshard.tier import disk

__all__ = ["Contender", "Options", "main", "measure"]

_WAYS = ("plain", "accumulate")


@dataclass(frozen=True)
class Options:
    """What is measured."""

    path: Path
    micro_batches: int = 8
    rounds: int = 5
    layers: int = 8
    width: int = 256
    context: int = 16
    pace: int | None = None  # bytes per second


@dataclass
class Contender:
    """The steps of one way."""

    name: str
    step_s: list[float] = field(default_factory=list)
    read_bytes: int = 0  # of the last step
    written_bytes: int = 0
    losses: list[float] = field(default_factory=list)


class _Disk:
    """Counts what a disk is asked for, and paces it."""

    def __init__(self, pace: int | None) -> None:
        self.bytes = {"read": 0, "written": 0}
        self._pace = pace
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, kind: str, num_bytes: int) -> None:
        """Count a request, and wait until a disk of that pace would be done with it."""
        with self._lock:
            self.bytes[kind] += num_bytes
            now = time.monotonic()
            if self._pace is None:
                return
            self._free_at = max(self._free_at, now) + num_bytes / self._pace
            until = self._free_at
        time.sleep(until - now)


@contextmanager
def _paced(pace: int | None) -> Iterator[_Disk]:
    """Count, and pace, every request of disk stores inside."""
    store: Any = disk  # the functions that it has imported are replaced
    counted, before = _Disk(pace), (store.read_blocks, store.write_blocks)

    def around(kind: str, request: Callable[..., Any]) -> Callable[..., Any]:
        def run(fd: int, memory: memoryview, *rest: Any) -> Any:
            counted.take(kind, len(memory))
            return request(fd, memory, *rest)

        return run

    store.read_blocks = around("read", before[0])
    store.write_blocks = around("written", before[1])
    try:
        yield counted
    finally:
        store.read_blocks, store.write_blocks = before


class _Trained:
    """One model on disk, trained in one way."""

    def __init__(self, way: str, options: Options) -> None:
        self.out = Contender(way)
        self._micro_batches = options.micro_batches
        size = Size("here", options.layers, options.width, 4, 256, options.context)
        torch.manual_seed(0)
        self._model = GPT(size)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        offload = zs.Offload(
            weight="disk", grad="host", optimizer="disk", disk_path=str(options.path)
        )
        self._engine = zs.shard(self._model, self._optimizer, stage=3, offload=offload)
        self._batches = Batches(size, rank=0, num_ranks=1, device=torch.device("cpu"))

    def step(self, number: int, counted: _Disk) -> None:
        """Take a step; the first one is not timed."""
        first = number * self._micro_batches
        batches = [self._batches[first + micro] for micro in range(self._micro_batches)]
        before, began = dict(counted.bytes), time.perf_counter()
        losses = self._gradients(batches)
        self._engine.clip_grad_norm_(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        states_of(self._engine).join_step()  # it would go on into the other's step
        if number:
            self.out.step_s.append(time.perf_counter() - began)
        self.out.read_bytes = counted.bytes["read"] - before["read"]
        self.out.written_bytes = counted.bytes["written"] - before["written"]
        self.out.losses += losses

    def _gradients(self, batches: list[Any]) -> list[float]:
        if self.out.name == "accumulate":
            done = self._engine.accumulate(batches, lambda batch: self._model(*batch))
            return [float(loss) for loss in done.losses]
        losses = []
        for batch in batches:
            with self._engine.no_sync() if batch is not batches[-1] else nullcontext():
                loss = self._model(*batch)
                self._engine.backward(loss)
            losses.append(loss.item())
        return losses

    def close(self) -> None:
        """Give the disk back."""
        self._engine.close()


def measure(options: Options, told: Callable[[], None] = lambda: None) -> list[Contender]:
    """Return the steps of both ways; `told` is called after each round.

    Raises AssertionError where their losses differ.
    """
    with _paced(options.pace) as counted:
        trained = [_Trained(way, options) for way in _WAYS]
        for number in range(options.rounds + 1):
            for one in trained if number % 2 else reversed(trained):
                one.step(number, counted)
            told()
        for one in trained:
            one.close()
    plain, ours = (one.out for one in trained)
    assert plain.losses == ours.losses, "the losses differ"
    return [plain, ours]


def _show(options: Options, contenders: list[Contender], *, as_json: bool) -> int:
    ratios = [a / b for a, b in zip(*(one.step_s for one in contenders), strict=True)]
    report = {
        "machine": machine_facts(),
        "options": asdict(options) | {"path": str(options.path)},
        "contenders": [asdict(one) for one in contenders],
        "ratio": statistics.median(ratios),
    }
    pace = "as fast as it is" if options.pace is None else f"{options.pace / 1e6:.0f} MB/s"
    title = f"{options.micro_batches} micro-batches, {options.rounds} rounds, disk {pace}"
    rows = [
        (one.name, f"{statistics.median(one.step_s):.3f}", f"{one.read_bytes / 1e6:.1f}",
         f"{one.written_bytes / 1e6:.1f}")
        for one in contenders
    ]  # fmt: skip
    table = grid(title, ("way", "s / step", "MB read", "MB written"), rows)
    spread = f"[{min(ratios):.2f}, {max(ratios):.2f}]"
    note = f"accumulate is {statistics.median(ratios):.2f} times faster {spread}"
    return publish(report, [table], [note], out=None, as_json=as_json)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, help="a directory on the disk (default: temporary)")
    parser.add_argument("--pace", help="bytes per second of the disk, as 100MB (default: its own)")
    for name in ("micro-batches", "rounds", "layers", "width", "context"):
        default = getattr(Options, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = vars(parser.parse_args(arguments))
    as_json, pace, path = asked.pop("json"), asked.pop("pace"), asked.pop("path")
    with tempfile.TemporaryDirectory(dir=path) as folder:
        speed = None if pace is None else parse_bytes(pace, "--pace")
        options = Options(Path(folder), pace=speed, **asked)
        with progress("steps", options.rounds + 1) as bar:
            contenders = measure(options, bar.advance)
    return _show(options, contenders, as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
