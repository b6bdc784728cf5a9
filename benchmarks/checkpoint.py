"""``zeroshard bench checkpoint``: saving and loading beside the disk itself, and beside
torch.distributed.checkpoint. One process.

Contenders take turns (A B C A B C ...) on the same bytes: the fp32 weights and Adam moments of a
stack of square layers.

            plain                                        zeroshard       torch.distributed
    write   one file, 4 MiB at a time, then fsync        zs.save         checkpoint.save
    read    that file, 4 MiB at a time, into one buffer  zs.load         checkpoint.load
            (kept: the same, into new memory, where it stays)
    pause   one copy of the state into warm memory       Saver.save, in the background

Before each turn the file system is synced, so that nobody pays for another's writing and removing,
and before each read the files are dropped from the page cache, so that all three read the disk;
`--warm` leaves them there.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_load
import torch.distributed.checkpoint.state_dict_saver as dcp_save
from torch import nn

from benchmarks.results import machine_facts
from benchmarks.stats import bootstrap_median, judge
from benchmarks.tables import grid, publish
from zeroshard.checkpoint.load import load
from zeroshard.checkpoint.manifest import CHUNK_BYTES
from zeroshard.checkpoint.save import Saver, save
from zeroshard.checkpoint.shard_files import as_bytes
from zeroshard.runtime.engine import states_of
from zeroshard.sharding.api import shard
from zeroshard.terminal import progress

__all__ = ["Comparison", "Options", "run"]

_WIDTH = 2048
_DCP = "torch.distributed.checkpoint"
# what is compared, with what, the turns of both, and the least that is asked of their ratio
_COMPARED = (
    ("save", "plain write and fsync", "write_ours", "write_plain", 0.8),
    ("save", _DCP, "write_ours", "write_dcp", 1.0),
    ("load", "plain read", "read_ours", "read_plain", 0.8),
    ("load", "plain read into memory that keeps it", "read_ours", "read_kept", 0.8),
    ("load", _DCP, "read_ours", "read_dcp", 1.0),
    ("pause in the background", "one memory copy", "pause_ours", "copy_plain", 1 / 1.3),
)


@dataclass(frozen=True)
class Options:
    """What is measured; `folder` is where the files are written (None: a temporary one)."""

    gigabytes: float
    rounds: int
    folder: Path | None
    warm: bool


@dataclass
class Comparison:
    """Seconds of both, turn by turn, and what was asked of their ratio."""

    what: str
    other: str
    seconds: list[float]  # ours
    other_seconds: list[float]
    target: float  # of other / ours, at least

    def row(self, num_bytes: int) -> tuple[str, ...]:
        ratio = bootstrap_median(
            [b / a for a, b in zip(self.seconds, self.other_seconds, strict=True)]
        )
        speeds = [
            f"{num_bytes / bootstrap_median(s).median / 1e9:.2f}"
            for s in (self.seconds, self.other_seconds)
        ]
        verdict = judge(ratio, self.target, num_pairs=len(self.seconds))
        return (
            self.what,
            self.other,
            *speeds,
            f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
            f"{self.target:.2f}",
            str(verdict),
        )


class _Rig:
    """The state, and one turn of each contender."""

    def __init__(self, folder: Path, num_bytes: int, *, warm: bool) -> None:
        layers = max(1, round(num_bytes / (12 * _WIDTH * _WIDTH)))
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.engine = shard(self.model, self.optimizer)
        self.model(torch.randn(1, _WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.folder = folder
        self.warm = warm
        pieces = [piece.tensor for piece in states_of(self.engine).resting_pieces()]
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if value.numel() > 1
        ]
        self.tensors = [*pieces, *moments]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        self.numbered = {str(index): tensor.detach() for index, tensor in enumerate(self.tensors)}
        self.copies = [torch.empty_like(tensor) for tensor in self.tensors]
        self.saver = Saver(folder / "background", self.engine, keep_last=1)

    def write_plain(self) -> None:
        with (self.folder / "plain").open("wb", buffering=0) as file:
            for tensor in self.tensors:
                data = as_bytes(tensor)
                for start in range(0, len(data), CHUNK_BYTES):
                    file.write(data[start : start + CHUNK_BYTES])
            os.fsync(file.fileno())

    def write_ours(self) -> None:
        save(self.folder / "ours", self.engine, step=0)

    def write_dcp(self) -> None:
        dcp_save.save(self.numbered, checkpoint_id=self.folder / "dcp", no_dist=True)

    def read_plain(self) -> None:
        buffer = bytearray(CHUNK_BYTES)
        with (self.folder / "plain").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def read_kept(self) -> None:
        kept = torch.empty(self.num_bytes, dtype=torch.uint8)
        target, start = as_bytes(kept), 0
        with (self.folder / "plain").open("rb", buffering=0) as file:
            while start < len(target):
                start += file.readinto(target[start : start + CHUNK_BYTES]) or 0

    def read_ours(self) -> None:
        load(self.folder / "ours", self.engine)

    def read_dcp(self) -> None:
        dcp_load.load(self.numbered, checkpoint_id=self.folder / "dcp", no_dist=True)

    def copy_plain(self) -> None:
        for copy, tensor in zip(self.copies, self.tensors, strict=True):
            copy.copy_(tensor)

    def pause_ours(self) -> None:
        self.saver.save(0)

    def forget(self) -> None:
        """Drop the files from the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file() and not self.warm:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(turn: Callable[[], None]) -> float:
    gc.collect()
    os.sync()  # what earlier turns left to write or to free
    start = time.perf_counter()
    turn()
    return time.perf_counter() - start


def _measure(rig: _Rig, rounds: int) -> Iterator[dict[str, float]]:
    """Yield the seconds of every contender, round by round; the first round warms up."""
    for number in range(rounds + 1):
        seconds: dict[str, float] = {}
        for name in ("write_plain", "write_ours", "write_dcp"):
            shutil.rmtree(rig.folder / "dcp", ignore_errors=True)
            (rig.folder / "plain").unlink(missing_ok=True)
            shutil.rmtree(rig.folder / "ours", ignore_errors=True)
            seconds[name] = _timed(getattr(rig, name))
        rig.write_plain()
        rig.write_ours()
        for name in ("read_plain", "read_kept", "read_ours", "read_dcp"):
            rig.forget()
            seconds[name] = _timed(getattr(rig, name))
        for name in "copy_plain", "pause_ours":
            seconds[name] = _timed(getattr(rig, name))
        rig.saver.wait()
        if number:
            yield seconds


def run(options: Options, *, out: Path | None, as_json: bool) -> int:
    """Measure, and print a table (or JSON)."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="zeroshard-bench-") as where:
        rig = _Rig(Path(where), int(options.gigabytes * 1e9), warm=options.warm)
        found: list[dict[str, float]] = []
        with progress(f"{rig.num_bytes / 1e9:.2f} GB", options.rounds) as bar:
            for seconds in _measure(rig, options.rounds):
                found.append(seconds)
                bar.advance()
        rig.saver.close()
        size = rig.num_bytes
    times = {name: [seconds[name] for seconds in found] for name in found[0]}
    comparisons = [
        Comparison(what, other, times[ours], times[theirs], target)
        for what, other, ours, theirs, target in _COMPARED
    ]
    report = {
        "machine": machine_facts(),
        "bytes": size,
        "warm": options.warm,
        "comparisons": [asdict(each) for each in comparisons],
    }
    cache = "warm" if options.warm else "cold"
    table = grid(
        f"{size / 1e9:.2f} GB, {options.rounds} rounds, {cache} page cache",
        ("what", "beside", "GB/s", "its GB/s", "times as fast", "target", ""),
        [each.row(size) for each in comparisons],
        num_text=2,
    )
    return publish(report, [table], (), out=out, as_json=as_json)
