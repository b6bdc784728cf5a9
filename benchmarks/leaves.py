"""What ``leaves=V`` costs beside plain accumulation: ``zeroshard bench leaves``.

One model and the same V micro-batches a step, in three ways, at each stage:

    leaves   zs.shard(..., leaves=V): the tree over the leaves
    ordered  the plain loop, all but the last micro-batch in no_sync(): sums over ranks in order
    native   the same loop, sums in the backend's own order: its reduce-scatter over CPU tensors

The ways of a stage are alive at once on the same ranks and take turns of one step (A B C A B C
...), timed between two barriers; ratios are per round. Beside the times stand, of rank 0: payload
received per step, as ``engine.traffic()`` counts it and as core/wire.py says; and the sums of
micro-batches that rest between them at most, as ``engine.memory()`` counts their bytes and as
core/tree.py says.

What it does not do: several nodes, GPUs. `native` takes sockets, which shared memory need not:
``--transport nccl`` has all three over the backend, ordered ones by its exchange.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import zeroshard as zs
from benchmarks.contenders import adamw
from benchmarks.model import GPT, Batches
from benchmarks.plan import Size
from benchmarks.ranks import start
from benchmarks.results import machine_facts
from benchmarks.stats import bootstrap_median
from benchmarks.tables import grid, publish
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.tree import Tree
from zeroshard.core.wire import Wires
from zeroshard.errors import ConfigError
from zeroshard.planner.exact import LaidOut, most_held, rest_bytes
from zeroshard.planner.model import ModelShape, Training
from zeroshard.planner.modules import shape_of_module
from zeroshard.terminal import Table, progress

__all__ = ["WAYS", "Options", "Row", "expected", "measure", "run"]

WAYS = ("leaves", "ordered", "native")
_ROWS = ("ddp", "zero1", "zero2", "zero3")  # by stage
_WARMUP = 2  # steps of each way before the first turn


@dataclass(frozen=True)
class Options:
    """What to measure."""

    nproc: int = 2
    leaves: str = "8"
    rounds: int = 12
    layers: int = 6
    width: int = 256
    batch: int = 2  # sequences of 64 tokens in a leaf
    transport: str = "auto"

    def __post_init__(self) -> None:
        if self.tree.leaves % self.nproc:
            raise ConfigError(
                f"leaves={self.leaves} is no multiple of {self.nproc} ranks: plain accumulation has"
                " as many micro-batches on each"
            )

    @property
    def tree(self) -> Tree:
        """The tree of the leaves. Raises ConfigError."""
        try:
            return Tree.parse(self.leaves)
        except ValueError as error:
            raise ConfigError(f"leaves={self.leaves!r}: {error}") from None

    @property
    def size(self) -> Size:
        """The model, and a leaf."""
        return Size("leaves", self.layers, self.width, 4, 512, context=64, batch=self.batch)


@dataclass
class Row:
    """One way at one stage; bytes are those of rank 0."""

    stage: int
    way: str
    wire_closed: float  # received per step, in closed form
    held_closed: int  # of sums of micro-batches between them, at most, in closed form
    sums: int  # how many of them
    wire_bytes: float = 0.0  # as they were counted
    held_bytes: int = 0
    step_s: list[float] = field(default_factory=list)


# ------------------------------------------------------------------ on a rank


class _Contender:
    """One way at one stage, alive."""

    def __init__(self, stage: int, way: str, options: Options) -> None:
        self.way, self._tree = way, options.tree
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        comm = zs.Comm(transport="nccl" if way == "native" else options.transport)
        if way == "ordered" and options.transport == "nccl":
            comm = zs.Comm(transport="nccl", ordered=True)
        torch.manual_seed(0)
        self._model = GPT(options.size)
        self._optimizer = adamw(self._model.parameters())
        leaves = options.leaves if way == "leaves" else None
        shape = shape_of_module(self._model, Training("fp32"))
        self.engine = zs.shard(self._model, self._optimizer, stage=stage, comm=comm, leaves=leaves)
        self._batches = Batches(options.size, rank=0, num_ranks=1, device=torch.device("cpu"))
        self._number = 0
        self.row = Row(stage, way, *expected(shape, _ROWS[stage], way, options))

    def step(self, after: Callable[[], None] = lambda: None) -> None:
        """Take a step; `after` is called after each of its micro-batches."""
        first = self._number * self._tree.leaves
        for leaf, context in self._micro_batches():
            with context:
                self.engine.backward(self._model(*self._batches[first + leaf]))
            after()
        self.engine.clip_grad_norm_(1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._number += 1

    def _micro_batches(self) -> Iterable[tuple[int, Any]]:
        """Yield this rank's micro-batches, by leaf number, and the context of each."""
        if self.way == "leaves":
            return ((leaf, nullcontext()) for leaf in self.engine.leaves(self._number))
        own = range(self._rank, self._tree.leaves, self._num_ranks)
        no_sync = self.engine.no_sync
        return ((leaf, nullcontext() if leaf == own[-1] else no_sync()) for leaf in own)

    def count(self) -> None:
        """Count the bytes of a step that nobody times."""
        self.engine.reset_traffic()
        self.step()
        traffic = self.engine.traffic()
        self.row.wire_bytes = traffic.total - traffic.bytes.get("exchange", 0)
        self.step(after=self._hold)

    def _hold(self) -> None:
        for unit in self.engine._weights.units:
            for bucket in unit.buckets:
                bucket.wait()
        held = self.engine.memory().tiers["grad"].get("device", 0)
        self.row.held_bytes = max(self.row.held_bytes, held)

    def turn(self) -> None:
        """Take a step between two barriers."""
        dist.barrier()
        begin = time.perf_counter()
        self.step()
        dist.barrier()
        self.row.step_s.append(time.perf_counter() - begin)


def expected(shape: ModelShape, row: str, way: str, options: Options) -> tuple[float, int, int]:
    """Return the closed forms of one way in `row` on rank 0: bytes received per step; bytes of sums
    that rest between micro-batches, at most; and how many these are.
    """
    mesh, policy = Mesh(1, options.nproc), policy_row(row)
    leaves = options.leaves if way == "leaves" else None
    each = options.tree.leaves // options.nproc
    training = Training("fp32", micro_batches=each, leaves=leaves).on(options.nproc)
    laid_out, deal = LaidOut(shape, mesh, training.align), training.deal(policy, mesh)
    wire = policy.wire_bytes(
        numel=sum(one.layout.numel * one.count for one in laid_out.groups),
        mesh=mesh,
        wires=Wires.of(PRECISIONS["fp32"]),
        micro_batches=each,
        # leaves of a rank that are no subtree are reduced one by one
        no_sync=deal is None or deal.is_local,
    )
    held = rest_bytes(laid_out, policy, training)["grad"][Tier.DEVICE]
    return wire.total, held, 1 if deal is None else most_held(deal, 0)


def measure(options: Options, told: Callable[[], None] = lambda: None) -> list[Row]:
    """Return the rows of every stage and way, on a rank; `told` is called after each turn."""
    rows: list[Row] = []
    for stage in range(len(_ROWS)):
        ways = [_Contender(stage, way, options) for way in WAYS]
        for one in ways:
            for _ in range(_WARMUP):
                one.step()
            one.count()
        for _ in range(options.rounds):
            for one in ways:
                one.turn()
                told()
        for one in ways:
            one.engine.close()
        rows += [one.row for one in ways]
    return rows


def _be_rank(asked: dict[str, Any], folder: Path) -> None:
    """Measure on one rank; rank 0 writes what it has found, and a byte for each turn."""
    zs.init_distributed("gloo")
    torch.set_num_threads(1)
    is_first = dist.get_rank() == 0
    with (folder / f"turns-{dist.get_rank()}").open("wb", buffering=0) as turns:

        def told() -> None:
            turns.write(b".")

        rows = measure(Options(**asked), told)
    if is_first:
        (folder / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


# ------------------------------------------------------------------ beside the ranks


@contextmanager
def _shown(options: Options, turns: Path) -> Iterator[None]:
    """Show how far rank 0 is, by what it has written to `turns`."""
    over = threading.Event()
    total = len(_ROWS) * len(WAYS) * options.rounds
    with progress("turns", total) as bar:

        def follow() -> None:
            done = 0
            while not over.wait(0.5):
                there = turns.stat().st_size if turns.exists() else 0
                bar.advance(there - done)
                done = there

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def run(options: Options, *, out: Path | None, as_json: bool) -> int:
    """Start the ranks, and print what rank 0 has found; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="zeroshard-leaves-") as name:
        folder = Path(name)
        with _shown(options, folder / "turns-0"):
            asked = [json.dumps(asdict(options)), name]
            code = start(os.path.abspath(__file__), options.nproc, asked)
        if code:
            return code
        rows = [Row(**one) for one in json.loads((folder / "rows.json").read_text())]
    report = {
        "machine": machine_facts(),
        "options": asdict(options),
        "rows": [asdict(row) for row in rows],
    }
    return publish(report, [_table(options, rows)], _notes(rows), out=out, as_json=as_json)


def _table(options: Options, rows: Sequence[Row]) -> Table:
    title = (
        f"{options.leaves} leaves on {options.nproc} ranks,"
        f" {options.size.num_parameters / 1e6:.1f}M parameters, fp32, {options.size.tokens} tokens"
        f" a leaf, {options.rounds} rounds"
    )
    ordered = {row.stage: row for row in rows if row.way == "ordered"}
    columns = ("stage", "way", "ms / step", "to ordered", "MB received", "closed form", "sums held",
               "MB held", "closed form")  # fmt: skip
    cells = [
        (
            row.stage, row.way, f"{median(row.step_s) * 1e3:.1f}", _ratio(row, ordered[row.stage]),
            f"{row.wire_bytes / 1e6:.3f}", f"{row.wire_closed / 1e6:.3f}", row.sums,
            f"{row.held_bytes / 1e6:.3f}", f"{row.held_closed / 1e6:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    return grid(title, columns, cells, num_text=2)


def _ratio(row: Row, ordered: Row) -> str:
    """Return the median ratio of the steps of a way and ordered ones, and its 95% interval."""
    if row is ordered:
        return "1"
    pairs = zip(row.step_s, ordered.step_s, strict=True)
    found = bootstrap_median([ours / theirs for ours, theirs in pairs])
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _notes(rows: Sequence[Row]) -> Iterable[str]:
    """Yield which closed forms are not what was counted."""
    for row in rows:
        pairs = (("received", row.wire_bytes, row.wire_closed),
                 ("held", row.held_bytes, row.held_closed))  # fmt: skip
        for what, counted, closed in pairs:
            if counted != closed:
                where = f"stage {row.stage}, {row.way}"
                yield f"{where}: {counted:,.0f} bytes {what}, {closed:,.0f} in closed form"


if __name__ == "__main__":
    _be_rank(json.loads(sys.argv[1]), Path(sys.argv[2]))
