"""Cases whose commands are compared with golden files: what the engine does with each unit and
segment (gather, use, release, reduce, ...), in order, in every row, tier, codec and schedule.

A case is a name, a number of ranks and a function that trains three steps and notes on a
:class:`Tape` where forwards, backwards and steps begin. Where ranks do the same, and where a step
does what the one before has done, that is said in place of the lines.

Over one-sided transports it is a matter of time when a reduce is over, and so what fits the budget:
``inside.commands`` lets it be over once the next one has been started. Left out, because it differs
from run to run: waits for sums on their way to another tier, the traffic of a run that an exception
has stopped, and that of ``hfsdp``, whose last publish may be under way when the run ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.pipelines import SINGLE, Layer, mesh_of, piped
from tests.support.training import VOCABULARY, batch, two_groups
from zeroshard.nn import checkpoint as put_away

STEPS = 3
WIDTH = 19
FACTORS = (4, 1, 6, 2)  # of the blocks: units of different sizes, so that budgets bind


Lines = tuple[str, ...]
Part = tuple[str, Lines]  # what a forward, a backward, a step, ... does


class Tape:
    """The lines of one rank, by step and part."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, list[tuple[str, list[str]]]]] = []

    def begin(self, name: str) -> None:
        """Begin a step, or another section of the case."""
        self.steps.append((name, []))

    def mark(self, name: str) -> None:
        """Begin a part of it."""
        parts = self.steps[-1][1]
        count = 1 + sum(part.split(" #")[0] == name for part, _ in parts)
        parts.append((name if count == 1 else f"{name} #{count}", []))

    def note(self, text: str) -> None:
        """Note a command, or a marker of the case's own."""
        self.steps[-1][1][-1][1].append(text)

    def told(self) -> Played:
        """Return all lines."""
        return [
            (step, tuple((part, tuple(lines)) for part, lines in parts))
            for step, parts in self.steps
        ]


Played = list[tuple[str, tuple[Part, ...]]]  # what one rank has done, by step


# ------------------------------------------------------------------------------------------ models


class Block(nn.Module):
    def __init__(self, factor: int, name: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, factor * WIDTH)
        self.down = nn.Linear(factor * WIDTH, WIDTH)
        self.name = name
        self.tape: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        self.tape.note(f". {self.name} runs")
        if h.requires_grad:
            h.register_hook(lambda _: self.tape.note(f". {self.name} runs backward"))
        out: torch.Tensor = x + self.down(nn.functional.gelu(h))
        return out


class Net(nn.Module):
    """An embedding, blocks of different sizes that run in the order of `route`, a head."""

    def __init__(self, factors: Sequence[int] = FACTORS, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Block(factor, f"h.{index}") for index, factor in enumerate(factors))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.route: Sequence[int] = range(len(factors))
        self.around: Callable[[nn.Module, torch.Tensor], torch.Tensor] = _plainly

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for index in self.route:
            h = self.around(self.h[index], h)
        logits = self.tail(h)
        if y is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(h))
        return logits


class Borrower(Net):
    """One that uses a weight of another unit's, outside its module."""

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        block: Any = self.h[1]
        return super().tail(nn.functional.linear(h, block.up.weight))


def _plainly(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return block(h)  # type: ignore[no-any-return]


def _recomputed(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, h, use_reentrant=False)  # type: ignore[no-any-return]


def _reentrant(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, h, use_reentrant=True)  # type: ignore[no-any-return]


def _put_away(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return put_away(block, h)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------- training


@dataclass
class Trained:
    """One rank's model, optimizer and engine, and what they have been seen to do."""

    tape: Tape
    model: Net
    optimizer: torch.optim.Optimizer | None
    engine: zs.Engine
    rank: int
    micro_batch: int = 0
    stopped: bool = False  # by an exception: what was under way then may have come or not

    def forward(self) -> torch.Tensor:
        self.tape.mark("forward")
        loss: torch.Tensor = self.model(*batch(self.rank, self.micro_batch))
        self.micro_batch += 1
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self.tape.mark("backward")
        self.engine.backward(loss)

    def step(self) -> None:
        assert self.optimizer is not None
        self.tape.mark("step")
        self.optimizer.step()
        self.tape.mark("zero_grad")
        self.optimizer.zero_grad()

    def traffic(self) -> None:
        """Note what has been moved in all: a publish may end after its step."""
        inside.wait_published(self.engine)
        traffic = self.engine.traffic()
        self.tape.begin("traffic")
        self.tape.mark("in all")
        for what, num_bytes in sorted(traffic.bytes.items()):
            if what != "exchange":
                self.tape.note(f"{what}: {num_bytes} bytes in {traffic.calls[what]} calls")


@contextmanager
def _sharded(
    rank: int,
    tape: Tape,
    row: str = "zero3",
    *,
    model: Callable[[], Net] = Net,
    trained: bool = True,
    comm: dict[str, Any] | None = None,
    units: Any = ("embed", Block),
    **options: Any,
) -> Iterator[Trained]:
    torch.manual_seed(0)
    net = model()
    for block in net.modules():
        if isinstance(block, Block):
            block.tape = tape
    optimizer = two_groups(net) if trained else None
    engine = zs.shard(
        net,
        optimizer,
        policy=row,
        comm=zs.Comm.model_validate(comm or {}),
        units=units if units is None else list(units),
        **options,
    )
    engine.reset_traffic()
    with inside.commands(engine, tape.note):
        own = Trained(tape, net, optimizer, engine, rank)
        yield own
        if not own.stopped and row != "hfsdp":
            own.traffic()
    engine.close()


Steps = Callable[[Trained, int], None]


def _trains(
    rank: int,
    tape: Tape,
    *,
    micro_batches: int = 1,
    no_sync: bool = False,
    before: Steps | None = None,
    clip: float | None = None,
    around: Callable[[nn.Module, torch.Tensor], torch.Tensor] = _plainly,
    disk: bool = False,
    **options: Any,
) -> None:
    """Train three steps, and call `before` each of them."""
    with tempfile.TemporaryDirectory() if disk else nullcontext() as path:
        if disk:
            options["offload"] = {**options["offload"], "disk_path": path}
        with _sharded(rank, tape, **options) as own:
            own.model.around = around
            for step in range(STEPS):
                tape.begin(f"step {step + 1}")
                if before is not None:
                    before(own, step)
                for micro in range(micro_batches):
                    hold = no_sync and micro < micro_batches - 1
                    with own.engine.no_sync() if hold else nullcontext():
                        own.backward(own.forward())
                if clip is not None:
                    tape.mark("clip_grad_norm_")
                    own.engine.clip_grad_norm_(clip)
                own.step()


def _in_order(routes: Sequence[Sequence[int]], own: Trained, step: int) -> None:
    own.model.route = routes[step]


def _borrows(routes: Sequence[Sequence[int]], own: Trained, step: int) -> None:
    """In step 3, use two large units before the second block: when h.1 comes again it does not fit
    beside what is ahead.
    """
    calls: list[nn.Module] = []

    def around(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        calls.append(block)
        if len(calls) == 2:
            large: Any = own.model.h
            h = h + large[0].up.weight.sum() * large[5].up.weight.sum()
        return _plainly(block, h)

    own.model.route = routes[step]
    if step == STEPS - 1:
        own.model.around = around


def _evaluates(own: Trained, step: int) -> None:
    with torch.no_grad():
        own.forward()


def _reads(own: Trained, step: int) -> None:
    own.tape.mark("gathered()")
    with own.engine.gathered():
        pass
    block: Any = own.model.h[1]
    own.tape.mark("gathered(h.1.up.weight)")
    with own.engine.gathered([block.up.weight]):
        pass


def _writes(own: Trained, step: int) -> None:
    own.tape.mark("gathered(writeback=True)")
    with own.engine.gathered(writeback=True), torch.no_grad():
        own.model.embed.weight.mul_(0.5)


def _accumulates(rank: int, tape: Tape, **options: Any) -> None:
    with _sharded(rank, tape, **options) as own:
        for step in range(STEPS):
            tape.begin(f"step {step + 1}")
            tape.mark("accumulate")
            batches = [batch(rank, 3 * step + micro) for micro in range(3)]
            own.engine.accumulate(batches, lambda one: own.model(*one))
            own.step()


def _forwards_first(rank: int, tape: Tape, *, reverse: bool = False, **options: Any) -> None:
    """Run two forwards, then their backwards."""
    with _sharded(rank, tape, **options) as own:
        for step in range(STEPS):
            tape.begin(f"step {step + 1}")
            losses = [own.forward(), own.forward()]
            for loss in losses[::-1] if reverse else losses:
                own.backward(loss)
            own.step()


def _summed(rank: int, tape: Tape, **options: Any) -> None:
    """Run two forwards, then one backward of their sum, then the same graph a second time."""
    with _sharded(rank, tape, **options) as own:
        for step in range(STEPS):
            tape.begin(f"step {step + 1}")
            loss = own.forward() + own.forward()
            tape.mark("backward, retained")
            own.engine.backward(loss, retain_graph=True)
            own.backward(loss)
            own.step()


class _Stop(Exception):
    pass


def _stops(rank: int, tape: Tape, *, backward: bool = False, **options: Any) -> None:
    """Raise in the middle of step 2 on every rank, reset, go on."""
    with _sharded(rank, tape, **options) as own:
        for step in range(STEPS + 1):
            tape.begin(f"step {step + 1}")
            if step == 1:
                own.stopped = True
                own.model.around = partial(_stopping, tape, backward)
                try:
                    own.backward(own.forward())
                except _Stop:
                    tape.note("raised")
                own.model.around = _plainly
                tape.mark("reset")
                own.engine.reset()
            else:
                own.backward(own.forward())
                own.step()


def _stopping(tape: Tape, backward: bool, block: nn.Module, h: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = block(h)
    if block.name == "h.2":

        def stop(_: torch.Tensor) -> None:
            raise _Stop

        if not backward:
            raise _Stop
        h.register_hook(stop)  # type: ignore[no-untyped-call]
    return out


def _infers(
    rank: int, tape: Tape, *, grads: bool = False, disk: bool = False, **options: Any
) -> None:
    """Run forwards without an optimizer; the last one over a part of the blocks."""
    with tempfile.TemporaryDirectory() if disk else nullcontext() as path:
        if disk:
            options["offload"] = {**options["offload"], "disk_path": path}
        with _sharded(rank, tape, trained=False, **options) as own:
            for step, route in enumerate(((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (0, 2), (3,))):
                own.model.route = route
                tape.begin(f"forward {step + 1}")
                with nullcontext() if grads else torch.no_grad():
                    own.forward()


def _piped(rank: int, tape: Tape, name: str, row: str = "zero3", **options: Any) -> None:
    comm = zs.Comm.model_validate({"transport": options.pop("transport", "gloo")})
    own = piped(mesh_of(), name, row, comm=comm, units=[Layer], **options)
    with inside.commands(own.engine, tape.note):
        for step in range(STEPS):
            tape.begin(f"step {step + 1}")
            tape.mark("schedule.step()")
            own.run(step, 8)
            tape.mark("step")
            own.optimizer.step()
            tape.mark("zero_grad")
            own.optimizer.zero_grad()
    own.engine.close()


# ------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One training run of `world` ranks; `slow`: not among the fast tests."""

    world: int
    run: Callable[..., None]
    options: dict[str, Any] = field(default_factory=dict)
    slow: bool = False


ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
NODE_ROWS = ("hpz", "mics", "hfsdp")
GLOO: dict[str, Any] = {"transport": "gloo"}
SHARED: dict[str, Any] = {"transport": "shared_memory"}
NODES: dict[str, Any] = {"transport": "gloo", "node_size": 2}
APART: dict[str, Any] = {**GLOO, "node_size": 1}
CASES: dict[str, dict[str, Case]] = {}  # by group, which is a file, and name


def _add(
    group: str,
    case: str,
    /,
    run: Any = _trains,
    *,
    world: int = 2,
    slow: bool = False,
    **options: Any,
) -> None:
    """Add a case of the row that its name begins with; ranks meet over gloo where `comm` does not
    say otherwise.
    """
    if (row := case.partition(",")[0]) in (*ROWS, *NODE_ROWS):
        options["row"] = row
    if run is not _piped:
        options.setdefault("comm", GLOO if world > 1 else {})
    named = CASES.setdefault(group, {})
    assert case not in named, case
    named[case] = Case(world, run, options, slow)


_MET: dict[str, dict[str, Any]] = {
    "one process": {"world": 1},
    "gloo": {},
    "shared memory": {"comm": SHARED},
}
_SUMMED_LAST: dict[str, Any] = {"micro_batches": 2, "no_sync": True}

for _row in ROWS:
    for _where, _met in _MET.items():
        _add("rows", f"{_row}, {_where}", **_met)
    for _precision in ("bf16", "fp16") if _row in ("zero1", "zero3") else ():
        _add("rows", f"{_row}, gloo, {_precision}", precision=_precision, clip=0.1)
for _row in NODE_ROWS:
    _add("nodes", f"{_row}, two nodes of one", comm=APART)
for _row in ("zero1", "zero3", *NODE_ROWS):
    for _name, _two_levels in (("flat", False), ("two levels", True)):
        _comm = {**NODES, "hierarchical": _two_levels}
        _add("nodes", f"{_row}, two nodes, {_name}", world=4, comm=_comm)
    _add("nodes", f"{_row}, two nodes, no_sync", world=4, comm=NODES, **_SUMMED_LAST)
    _comm = {**SHARED, "node_size": 2}
    _name = f"{_row}, two nodes, shared memory"
    _add("nodes", _name, world=4, comm=_comm, slow=True, **_SUMMED_LAST)

_TIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights on host": ("zero3", {"weight": "host"}),
    "weights on disk": ("zero3", {"weight": "disk"}),
    "weights kept, on host": ("zero3-keep", {"weight": "host"}),
    "half of weights on host": (
        "zero3",
        {"weight": "host", "optimizer": "host", "fraction": {"weight": 0.5, "optimizer": 0.3}},
    ),
    "all on disk": ("zero3", {"weight": "disk", "grad": "disk", "optimizer": "disk"}),
    "gradients on host": ("zero3", {"grad": "host", "optimizer": "host"}),
    "optimizer on host": ("zero2", {"optimizer": "host"}),
    "gradients of zero2 on host": ("zero2", {"grad": "host", "optimizer": "host"}),
    "gradients of zero1 on host": ("zero1", {"grad": "host", "optimizer": "host"}),
    "a delayed update": ("zero2", {"grad": "host", "optimizer": "host", "delayed_update": 1}),
}
for _name, (_row, _offload) in _TIERS.items():
    _disk = "disk" in _offload.values()
    _more = _SUMMED_LAST if "grad" in _offload else {}
    for _where, _met in _MET.items():
        _add(
            "tiers",
            f"{_name}, {_row}, {_where}",
            row=_row,
            offload=_offload,
            disk=_disk,
            slow=_where == "shared memory" and _disk,
            **_met,
            **_more,
        )

for _row in ("zero3", "zero3-keep", "zero2"):
    _coded: dict[str, dict[str, Any]] = {
        "qwZ": {"weight_codec": "int8"},
        "qgZ": {"grad_codec": "int8"},
        "qwZ and qgZ": {"weight_codec": "int4", "grad_codec": "int4", "error_feedback": True},
    }
    for _name, _codecs in _coded.items():
        if _row == "zero2" and "weight_codec" in _codecs:
            continue
        for _where, _comm in (("gloo", GLOO), ("shared memory", SHARED)):
            _add("codecs", f"{_row}, {_name}, {_where}", comm={**_comm, **_codecs})
_comm = {**NODES, "weight_codec": "int8", "grad_codec": "int8"}
_add("codecs", "hpz, qwZ and qgZ, two nodes", world=4, comm=_comm)
_comm = {**GLOO, "weight_codec": "int8"}
_add("codecs", "zero3, qwZ, gathered() between steps", comm=_comm, before=_reads)

for _row in (*ROWS, *NODE_ROWS):
    _comm = APART if _row in NODE_ROWS else GLOO
    for _name, _no_sync in (("reduced each", False), ("no_sync", True)):
        _three: dict[str, Any] = {"micro_batches": 3, "no_sync": _no_sync}
        _add("micro_batches", f"{_row}, {_name}", comm=_comm, **_three)
    _add("accumulate", f"{_row}", _accumulates, comm=_comm)
for _row in ("zero2", "zero3"):
    for _budget in (27_000, 40_000, 10**6):
        _name = f"{_row}, accumulation_budget {_budget}"
        _add("micro_batches", _name, accumulation_budget=_budget, **_three)
_add("accumulate", "zero3, one process", _accumulates, world=1)
_add("accumulate", "zero3, shared memory", _accumulates, comm=SHARED)
_add("accumulate", "zero3, weights on host", _accumulates, offload={"weight": "host"})
_add("accumulate", "zero3, no prefetch", _accumulates, prefetch_bytes=0)

for _row in ("zero1", "zero3", "zero3-keep", "hpz"):
    _comm = APART if _row == "hpz" else GLOO
    for _name, _around in (
        ("recomputed", _recomputed),
        ("reentrant", _reentrant),
        ("zeroshard.nn.checkpoint", _put_away),
    ):
        _add("checkpointing", f"{_row}, {_name}", comm=_comm, around=_around)

_ROUTES: dict[str, Sequence[Sequence[int]]] = {
    "a block used twice": ((0, 1, 2, 1, 3),) * 3,
    "a block used twice in a row": ((0, 2, 2, 3),) * 3,
    "a block skipped in step 3": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3)),
    "two blocks skipped in step 3": ((0, 1, 2, 3), (0, 1, 2, 3), (0, 3)),
    "another order in step 3": ((0, 1, 2, 3), (0, 1, 2, 3), (2, 3, 0, 1)),
    "the reverse in step 3": ((0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0)),
    "one block alone in step 2": ((0, 1, 2, 3), (2,), (0, 1, 2, 3)),
}
for _name, _routes in _ROUTES.items():
    for _row, _bytes in (("zero2", None), ("zero3", None), ("zero3", 14_000), ("zero3-keep", None)):
        if _row == "zero2" and "used twice" not in _name and "skipped" not in _name:
            continue
        _case = f"{_row}, {_name}" + (f", prefetch_bytes {_bytes}" if _bytes else "")
        _add("orders", _case, prefetch_bytes=_bytes, before=partial(_in_order, _routes))
for _name, _routes in {
    "what is needed last gives way": ((1, 2, 1, 3, 4),) * 3,
    "what is skipped gives way first": ((1, 2, 3, 1, 4), (1, 2, 3, 1, 4), (1, 3, 1, 4)),
}.items():
    _add(
        "orders",
        f"zero3, {_name}",
        prefetch_bytes=13_000,
        model=partial(Net, (6, 2, 1, 1, 1, 6)),
        before=partial(_borrows, _routes),
    )
_ORDER = (0, 1, 2, 3, 4, 5)
for _bytes in (0, 5_000, 20_000, 60_000):
    for _row in ("zero2", "zero3", "zero3-keep"):
        _add("budgets", f"{_row}, prefetch_bytes {_bytes}", prefetch_bytes=_bytes)
    _add(
        "budgets",
        f"zero3, six blocks, the reverse in step 3, prefetch_bytes {_bytes}",
        prefetch_bytes=_bytes,
        model=partial(Net, (1, 2, 1, 5, 1, 3)),
        before=partial(_in_order, (_ORDER, _ORDER, _ORDER[::-1])),
    )
for _bytes in (0, 20_000):
    for _where in ("one process", "shared memory"):
        _name = f"zero3, {_where}, prefetch_bytes {_bytes}"
        _add("budgets", _name, prefetch_bytes=_bytes, **_MET[_where])

_tied = partial(Net, tied=True)
for _row in ("zero1", "zero3", "zero3-keep"):
    _add("uses", f"{_row}, tied", model=_tied)
    _add("uses", f"{_row}, tied, units apart", model=_tied, units=["embed", Block, "head"])
    _add("uses", f"{_row}, a weight used outside its module", model=Borrower)
    _add("uses", f"{_row}, two forwards, then their backwards", _forwards_first)
    _name = f"{_row}, two forwards, the last backward first"
    _add("uses", _name, _forwards_first, reverse=True)
    _add("uses", f"{_row}, two forwards, one backward, twice", _summed)
    _add("uses", f"{_row}, evaluation between steps", before=_evaluates)
    _add("uses", f"{_row}, gathered() between steps", before=_reads)
    _add("uses", f"{_row}, written between steps", before=_writes)
    _add("recovery", f"{_row}, an exception in the forward", _stops)
    _add("recovery", f"{_row}, an exception in the backward", _stops, backward=True)
_name = "zero3, used outside its module, two forwards, then their backwards"
_add("uses", _name, _forwards_first, model=Borrower)

for _tier in ("device", "host", "disk"):
    for _where, _met in _MET.items():
        for _bytes in (None, 30_000):
            _add(
                "inference",
                f"weights on {_tier}, {_where}, prefetch_bytes {_bytes}",
                _infers,
                offload={"weight": _tier},
                disk=_tier == "disk",
                prefetch_bytes=_bytes,
                **_met,
            )
_add("inference", "with gradients, gloo", _infers, grads=True)
_add("inference", "encoded at rest, gloo", _infers, comm={**GLOO, "weight_codec": "int8"})


def _pipe(case: str, **options: Any) -> None:
    _add("pipelines", case, _piped, world=4, name=case.partition(",")[0], **options)


for _name in ("GPipe", "1F1B", "Interleaved1F1B"):
    for _row in ("zero1", "zero3", "zero3-keep"):
        # room for one stage, or for all
        for _room in (None, 8_000 if _name in SINGLE else 6_000, "1MiB"):
            if _room is not None and (_row == "zero1" or _name == "1F1B"):
                continue
            if _name == "GPipe" and _row == "zero3-keep":
                continue
            _pipe(
                f"{_name}, {_row}, budget {_room}",
                row=_row,
                budget=_room,
                slow=_row == "zero3-keep" or _room == "1MiB",
            )
_pipe("LoopedBFS, zero3, budget 6000", budget=6_000, slow=True)
_pipe("ZBVZeroBubble, zero3", slow=True)
_pipe("1F1B, zero3, each micro-batch reduced", no_sync=False)
_pipe("1F1B, zero3, recomputed", recomputes=True)
_pipe("1F1B, zero3, weights on host", offload={"weight": "host"})


# ------------------------------------------------------------------------------------------ playing


def play(rank: int, world: int, group: str, names: Sequence[str]) -> list[Played]:
    """Return this rank's lines of each case."""
    told = []
    for name in names:
        case, tape = CASES[group][name], Tape()
        try:
            case.run(rank, tape, **case.options)
        except Exception as error:
            error.add_note(f"in the case {name!r} of {group}")
            raise
        told.append(tape.told())
    return told


def lists(group: str, *, slow: bool) -> str:
    """Run the cases of `group` and return what each has done. What a case, a rank or a step does as
    one before has done is only named.
    """
    told: dict[str, list[Played]] = {}
    chosen = {name: case for name, case in CASES[group].items() if case.slow == slow}
    for world in sorted({case.world for case in chosen.values()}):
        names = [name for name, case in chosen.items() if case.world == world]
        answers = run_ranks(world, play, group, names, timeout=110)
        for index, name in enumerate(names):
            told[name] = [answer[index] for answer in answers]
    writer = _Writer()
    for name in chosen:
        writer.write(name, told[name])
    return "\n".join(writer.lines).lstrip() + "\n"


class _Writer:
    """The text of a group."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._steps: dict[tuple[Part, ...], str] = {}  # where each was first
        self._parts: dict[Lines, str] = {}

    def write(self, case: str, ranks: Sequence[Played]) -> None:
        """Write a case; where ranks do not do the same, each of them."""
        self.lines += ["", f"=== {case}"]
        for steps in zip(*ranks, strict=True):
            if all(step == steps[0] for step in steps):
                self._step(case, *steps[0])
                continue
            for rank, (step, parts) in enumerate(steps):
                self._step(case, f"{step}, rank {rank}", parts)

    def _step(self, case: str, step: str, parts: tuple[Part, ...]) -> None:
        here = f"{step} of {case}"
        first = self._steps.setdefault(parts, here)
        if first != here:
            self.lines.append(f"{step}: as {first.removesuffix(f' of {case}')}")
            return
        self.lines.append(f"{step}:")
        for part, lines in parts:
            first = self._parts.setdefault(lines, f"{part} of {here}")
            if not lines:
                self.lines.append(part)
            elif first == f"{part} of {here}":
                self.lines += [f"{part}:", *lines]
            else:
                first = first.removesuffix(f" of {case}").removesuffix(f" of {step}")
                self.lines.append(f"{part}: as {first}")
