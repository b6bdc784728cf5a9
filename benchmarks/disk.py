"""``zeroshard bench disk``: the disk tier beside the disk itself, and beside fio where it is
installed. One process.

Contenders take turns (A B C, B C A, ...: disks have bursts) on as many bytes on the same file
system; the first round warms up:

    raw     plain threads with preadv and pwritev on aligned memory, past the page cache: what the
            disk gives to Python
    store   tier/disk.py: three storages, through a ring of staging buffers, as the optimizer step
            uses
            them
    fio     the outside reference on the raw contender's files, as many requests of the same size in
            flight, its buffers in huge pages too

    read    12 bytes per parameter, what Adam reads of fp32 states: the master weight and two
            moments
    write   12 bytes per parameter
    mix     both, at the same time: one group of parameters is written while the next one is read

GB/s count every byte that was moved, both ways in the mix. The raw mix has no order; the store
writes a group when it has been read. Where the file system refuses O_DIRECT everybody goes through
the page cache, and the title says so.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload import disk_step
from benchmarks.raw_disk import NUM_GROUPS, NUM_STATES, REQUEST_BYTES, Options, Raw
from benchmarks.results import machine_facts
from benchmarks.tables import grid, publish
from zeroshard.core.work import Work
from zeroshard.terminal import Table, progress
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.swapdir import SwapDirectory

__all__ = ["Options", "Row", "run"]

_KINDS = ("read", "write", "mix")


@dataclass
class Row:
    """GB/s of every contender, round by round; fio's are empty where it is not installed."""

    what: str
    raw: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        """Return the row as text: medians, and ratios of each round as median [least, most]."""
        speeds = [
            f"{statistics.median(speed):.2f}" if speed else ""
            for speed in (self.raw, self.store, self.fio)
        ]
        return (self.what, *speeds, _ratio(self.store, self.raw), _ratio(self.store, self.fio))


def _ratio(ours: list[float], others: list[float]) -> str:
    if not others:
        return ""
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    return f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"


class _Storages:
    """One storage per state, and a ring of groups of staging buffers."""

    def __init__(self, store: DiskStore, options: Options) -> None:
        numel = options.state_bytes // 4
        self._numel = numel
        self._group = options.group_bytes // 4
        names = ("fp32 master", "fp32 exp_avg", "fp32 exp_avg_sq")
        self._storages = [store.allocate(name, numel, torch.float32) for name in names]
        self._ring = [
            [store.staging.tensor(self._group, torch.float32) for _ in names]
            for _ in range(NUM_GROUPS)
        ]
        for buffer in (buffer for group in self._ring for buffer in group):
            buffer.normal_()

    def turn(self, kind: str) -> None:
        works: list[list[Work]] = [[] for _ in self._ring]
        starts = range(0, self._numel, self._group)
        for number in range(len(starts) + 1):
            if number < len(starts):
                self._start(works, number, "read" if kind != "write" else "write")
            if number and kind == "mix":
                self._start(works, number - 1, "write")
        for under_way in works:
            _wait(under_way)

    def _start(self, works: list[list[Work]], number: int, verb: str) -> None:
        """Start reading or writing group `number`, once its buffers are free."""
        place = number % len(self._ring)
        _wait(works[place])
        start = number * self._group
        stop = min(start + self._group, self._numel)
        works[place] = [
            getattr(storage, verb)(start, stop, buffer[: stop - start])
            for storage, buffer in zip(self._storages, self._ring[place], strict=True)
        ]


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()


class _Fio:
    """fio on the raw contender's files; `name` is empty where it is not installed, or can do
    none of what is needed.
    """

    def __init__(self, raw: Raw, options: Options, *, direct: bool) -> None:
        self.name = ""
        self.missing = "fio is not installed: no outside reference"
        self._arguments = [
            "fio",
            "--name=zeroshard",
            f"--filename={':'.join(str(path).replace(':', chr(92) + ':') for path in raw.paths)}",
            f"--size={options.state_bytes * NUM_STATES}",
            f"--bs={min(REQUEST_BYTES, options.state_bytes)}",
            f"--iodepth={options.queue_depth}",
            f"--direct={int(direct)}",
            "--thread",
            "--allow_file_create=0",
            "--output-format=json",
        ]
        if shutil.which("fio") is None:
            return
        for engine in ("libaio", "io_uring"):
            try:
                self._speed([*self._arguments, f"--ioengine={engine}", "--rw=read"])
            except (subprocess.CalledProcessError, ValueError, KeyError, IndexError) as error:
                self.missing = (
                    f"fio is installed but does not run with libaio or io_uring ({error}): no"
                    " outside reference"
                )
                continue
            version = subprocess.run(
                ["fio", "--version"], capture_output=True, text=True, check=True
            ).stdout.strip()
            self.name, self.missing = f"{version}, {engine}", ""
            self._arguments.append(f"--ioengine={engine}")
            return

    def speed(self, kind: str) -> float:
        """Return GB/s."""
        return self._speed([*self._arguments, f"--rw={'rw' if kind == 'mix' else kind}"])

    @staticmethod
    def _speed(arguments: list[str]) -> float:
        environment = os.environ | {
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"
        }  # or its buffers lie in pages of 4 KiB: a third of the speed
        done = subprocess.run(
            arguments, capture_output=True, text=True, check=True, env=environment
        )
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9


def _speed(turn: Callable[[str], None], kind: str, options: Options) -> float:
    start = time.perf_counter()
    turn(kind)
    moved = options.state_bytes * NUM_STATES * (2 if kind == "mix" else 1)
    return moved / (time.perf_counter() - start) / 1e9


def _measure(
    raw: Raw, storages: _Storages, fio: _Fio, options: Options
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (kind, GB/s of every contender), round by round; the first round warms up and is not
    yielded.
    """
    raw.turn("write")  # what was never written is not read from the disk either
    storages.turn("write")
    contenders: list[tuple[str, Callable[[str], float]]] = [
        ("raw", lambda kind: _speed(raw.turn, kind, options)),
        ("store", lambda kind: _speed(storages.turn, kind, options)),
        *([("fio", fio.speed)] if fio.name else []),
    ]
    for number in range(options.rounds + 1):
        first = number % len(contenders)
        for kind in _KINDS:
            speeds = {
                name: measure(kind) for name, measure in contenders[first:] + contenders[:first]
            }
            if number:
                yield kind, speeds


def step_row(options: Options, path: Path) -> Row:
    """Return the disk step as a row of ``zeroshard bench disk``: GB/s of the raw bytes, and of
    the step that moves as many.
    """
    run = disk_step(
        options.num_bytes // 12, options.rounds, path, grad="device", verify=options.verify
    )
    speeds = {
        c.name: [c.facts["bytes"] / seconds / 1e9 for seconds in c.step_s]
        for c in run.contenders
        if c.facts["bytes"]
    }
    return Row("step", raw=speeds["raw"], store=speeds["disk step"])


def run(options: Options, *, out: Path | None, as_json: bool) -> int:
    """Measure, and print a table (or JSON). Raises StorageError when the directory cannot be
    used or is full.
    """
    path = Path(tempfile.gettempdir()) if options.path is None else options.path
    cpu = torch.device("cpu")
    store = DiskStore(
        SwapDirectory(path, rank=0, run="bench"),
        cpu,
        verify=options.verify,
        queue_depth=options.queue_depth,
        staging_bytes=options.ring_bytes,
    )
    rows = {kind: Row(kind) for kind in _KINDS}
    try:
        storages = _Storages(store, options)
        raw = Raw(store, options)
        fio = _Fio(raw, options, direct=store.direct)
        with progress(f"{options.num_bytes / 1e9:.2f} GB", options.rounds * len(_KINDS)) as bar:
            for kind, speeds in _measure(raw, storages, fio, options):
                for contender, speed in speeds.items():
                    getattr(rows[kind], contender).append(speed)
                bar.advance()
        raw.close()
    finally:
        store.close()
    rows["step"] = step_row(options, path)
    measured = list(rows.values())
    report = _report(options, measured, fio, direct=store.direct)
    table = _table(options, measured, direct=store.direct)
    return publish(report, [table], [fio.name or fio.missing], out=out, as_json=as_json)


def _report(options: Options, rows: list[Row], fio: _Fio, *, direct: bool) -> dict[str, Any]:
    return {
        "machine": machine_facts(),
        "bytes": options.state_bytes * NUM_STATES,
        "rounds": options.rounds,
        "queue_depth": options.queue_depth,
        "request_bytes": REQUEST_BYTES,
        "direct": direct,
        "verify": options.verify,
        "fio": fio.name or None,
        "gigabytes_per_s": [asdict(row) for row in rows],
    }


def _table(options: Options, rows: list[Row], *, direct: bool) -> Table:
    way = "O_DIRECT"
    if not direct:
        way = "BUFFERED, through the page cache: the file system refuses O_DIRECT"
    title = (
        f"{options.num_bytes / 1e9:.2f} GB, {options.queue_depth} requests in flight,"
        f" {options.rounds} rounds, {way}{', with checksums' if options.verify else ''}"
    )
    columns = ("what", "raw GB/s", "store GB/s", "fio GB/s", "store / raw", "store / fio")
    return grid(title, columns, [row.cells() for row in rows])
