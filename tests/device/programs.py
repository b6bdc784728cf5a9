"""Trainings on the pretended device: rows, precisions and options, each run under every schedule.

A schedule is an order in which a device may run what streams and events allow. The engine must give
the same bits in all of them: a wait that is missing shows as another number. CUDA has an order of
its own: there lanes start late in place of ``compute_first``, and compute in place of
``compute_last``, and memory that the engine gives back is overwritten.

    outcome = compare(rank, world, CASES["zero3 bf16"], QUICK)
    assert not outcome.found

Cost: a run of three steps takes about a tenth of a second of CPU.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.device.compositions import (
    Decoded,
    Divided,
    Generated,
    Inferred,
    Kept,
    Left,
    Shrunk,
    shared_folder,
)
from tests.device.meetings import meeting
from tests.gpu.chosen import HAS_CUDA
from tests.support import pipelines, tensor_parallel
from tests.support.adversary import disturbed
from tests.support.experts import Listed
from tests.support.programs import DTYPES, WIDTH, Program, Trained, _on_host, checkpoint_on_host
from tests.support.training import ROWS, Net, Routed, Run, final_state, two_groups
from zeroshard.comm.select import has_native
from zeroshard.memory import host_pages, pinned_pages
from zeroshard.optim.runner import TileRunner
from zeroshard.system.device import Device

DEVICE = "cuda:0" if HAS_CUDA else "zsim:0"
STEPS = 3
UNIT = 33_216  # elements of a block
PRECISIONS = ("fp32", "bf16", "fp16")
NODE_ROWS = ("hpz", "mics", "hfsdp")
Schedule = tuple[str, int]  # name and seed
FIFO: Schedule = ("fifo", 0)
THREADS: Schedule = ("threads", 0)
QUICK: tuple[Schedule, ...] = (("compute_first", 0), ("compute_last", 0), ("random", 1))
ALL: tuple[Schedule, ...] = (*QUICK, ("random", 2), ("random", 3), THREADS)

_LATE = {"compute_first": "lanes", "compute_last": "compute"}

HOST = {"weight": "host", "grad": "host", "optimizer": "host"}
STATES = {"grad": "host", "optimizer": "host"}


# ------------------------------------------------------------------------------- between two steps


def off_and_on(run: Trained, step: int) -> None:
    """Everything to the host and back, after the first step."""
    if step == 0:
        run.engine.offload_states()
        run.engine.reload_states()


def fail_and_reset(run: Trained, step: int) -> None:
    """A backward that an exception cuts off, after the first step."""
    if step > 0:
        return
    block: Any = run.model.blocks[0]
    handle = block.up.weight.register_hook(_fail)
    with suppress(ZeroDivisionError):
        run.engine.backward(run.model(*run.data(run.rank, 0)))
        raise AssertionError("the backward has not failed")
    handle.remove()
    run.engine.reset()


def reset_and_allocate(run: Trained, step: int) -> None:
    """The same, and other tensors in the memory that is free then, to be read a step later."""
    fail_and_reset(run, step)
    if step == 0:
        sizes = [parameter.numel() for parameter in run.model.parameters()] + [UNIT] * 4
        run.kept["taken"] = [
            torch.ones(numel, dtype=dtype, device=DEVICE)
            for numel in sizes
            for dtype in (torch.float32, torch.bfloat16)
        ]
    else:
        run.extra += [one.float().mean() for one in run.kept.pop("taken", [])]


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def average(run: Trained, step: int) -> None:
    """A moving average, and an evaluation with it."""
    if step == 0:
        run.kept["average"] = zs.EMA(run.engine, 0.9)
    mean = run.kept["average"]
    mean.update()
    with mean.swapped(), torch.no_grad():
        run.extra.append(run.model(*run.data(run.rank, step)).detach())


def repartition(run: Trained, step: int) -> None:
    """Another row after the first step, and the first again after the second."""
    if step < 2:
        run.kept.setdefault("row", run.engine.policy.name)
        run.engine.repartition(policy="zero1" if step == 0 else run.kept["row"])


def to_host_and_back(run: Trained, step: int) -> None:
    """All states on the host after the first step, and on the device again after the second."""
    if step < 2:
        run.engine.repartition(offload=zs.Offload(**(HOST if step == 0 else {})))


def shift_shares(run: Trained, step: int) -> None:
    """Shares of two ranks after the first step, and equal ones again after the second."""
    if step < 2:
        run.engine.repartition(shares=[0.25, 0.75] if step == 0 else "equal")


def save_and_load(run: Trained, step: int) -> None:
    """Save after the first step, and go back there after the second."""
    if step == 0:
        run.kept["owner"], folder = shared_folder()
        run.kept["folder"] = folder
        zs.save(folder, run.engine, step=1)
    elif step == 1:
        zs.load(run.kept["folder"], run.engine)


def evaluate_and_load(run: Trained, step: int) -> None:
    """Save after the first step; after the others evaluate and load, without a wait between."""
    if step == 0:
        save_and_load(run, step)
        return
    with torch.no_grad():
        run.extra.append(run.model(*run.data(run.rank, step)).detach())
    zs.load(run.kept["folder"], run.engine)


def edit(run: Trained, step: int) -> None:
    """Halve the head after the first step."""
    if step == 0:
        with run.engine.gathered(writeback=True), torch.no_grad():
            run.model.head.weight.mul_(0.5)


# ------------------------------------------------------------------------------------------- cases
@dataclass(frozen=True)
class Joined(Program):
    """Ranks with uneven numbers of batches."""

    def take(self, run: Trained) -> list[float]:
        with run.engine.join():
            return replace(self, steps=self.steps - run.rank)._take(run)

    def _take(self, run: Trained) -> list[float]:
        return super().take(run)


@dataclass(frozen=True)
class OfLeaves(Program):
    """The leaves of each step that are this rank's."""

    def take(self, run: Trained) -> list[float]:
        losses = []
        for step in range(self.steps):
            for leaf in run.engine.leaves(step):
                loss = run.model(*run.data(0, step * self.micro_batches + leaf))
                run.engine.backward(loss)
                losses.append(loss.detach())
            if self.clip is not None:
                run.engine.clip_grad_norm_(self.clip)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return [loss.item() for loss in losses]


@dataclass(frozen=True)
class OnOneCurve(OfLeaves):
    """The same, for its weights alone, which plain PyTorch has that adds leaves in a tree."""

    def take(self, run: Trained) -> list[float]:
        super().take(run)
        return []

    def train_plainly(self, device: str, *, rank: int = 0) -> Run:
        model, leaves = self._model(device), self.options["leaves"]
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        model.to(DTYPES[self.precision])
        optimizer, data = two_groups(nn.ParameterList(masters)), self._data(device, 0)
        for step in range(self.steps):
            grads = []
            for leaf in range(leaves):
                loss = model(*data(0, step * self.micro_batches + leaf))
                grads.append([g.float() for g in torch.autograd.grad(loss, model.parameters())])
            for master, *parts in zip(masters, *grads, strict=True):
                master.grad = _tree(parts) / leaves
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
        return Run([], _on_host(final_state(model, None)), row="plain")


def _tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add neighbours first, split at the largest power of two below the number of parts."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return _tree(parts[:middle]) + _tree(parts[middle:])


@dataclass(frozen=True)
class Branching(Program):
    """Each rank runs blocks of its own choice in its own order; all of them run on some rank."""

    routes_per_step: bool = False  # else a micro-batch has one of its own

    def _model(self, device: str) -> Net:
        torch.manual_seed(0)
        return Routed(width=WIDTH).to(device)

    def _data(self, device: str, rank: int) -> Callable[[int, int], list[Any]]:
        data, every = super()._data(device, rank), self.micro_batches if self.routes_per_step else 1
        return lambda rank, number: [*data(rank, number), ROUTES[rank % 2][number // every % 3]]


# block 0 ends the first route of both: what fails there has started as much on each
ROUTES = (((1, 3, 0), (3, 0), (0, 1, 2, 3)), ((3, 2, 0), (1, 2), (3, 2, 1, 0)))


@dataclass(frozen=True)
class BranchingJoined(Branching, Joined):
    """The same with uneven numbers of batches."""


@dataclass(frozen=True)
class BranchingLeaves(Branching, OfLeaves):
    """The same with leaves."""


@dataclass(frozen=True)
class Accumulated(Program):
    """All micro-batches through one unit before the next; their inputs rest on a tier."""

    tier: str = "device"

    def take(self, run: Trained) -> list[float]:
        losses = []
        for step in range(self.steps):
            numbers = range(step * self.micro_batches, (step + 1) * self.micro_batches)
            batches = [run.data(run.rank, number) for number in numbers]
            done = run.engine.accumulate(batches, lambda one: run.model(*one), tier=self.tier)
            losses += [loss.detach() for loss in done.losses]
            run.optimizer.step()
            run.optimizer.zero_grad()
        return [loss.item() for loss in losses]


@dataclass(frozen=True)
class BranchingAccumulated(Branching, Accumulated):
    """Units in order over micro-batches that take one branch, another one on each rank."""

    routes_per_step: bool = True


@dataclass(frozen=True)
class Pipelined(Program):
    """A stage on each rank, 1F1B over four micro-batches."""

    def train(self, device: str, *, rank: int = 0, transport: str = "auto") -> Run:
        dp = dist.get_world_size() // 2
        mesh = pipelines.mesh_of(pp=2, dp=dp, device=device.partition(":")[0])
        shapes = torch.zeros(1, pipelines.LENGTH, dtype=torch.long)
        piped = pipelines.piped(mesh, "1F1B", self.row, shapes=shapes, precision=self.precision)
        piped.train(self.steps, 4, clip=self.clip)
        state = _on_host(piped.state())
        piped.engine.close()
        return Run([*chain(*piped.losses), *piped.norms], state, row=self.row)


@dataclass(frozen=True)
class TensorParallel(Program):
    """A Llama of DTensors, cut in two."""

    def train(self, device: str, *, rank: int = 0, transport: str = "auto") -> Run:
        dp = dist.get_world_size() // 2
        mesh = tensor_parallel.mesh_of(device.partition(":")[0], dp=dp, tp=2)
        done = tensor_parallel.train(
            tensor_parallel.CASES["llama"],
            mesh,
            self.steps,
            most=2,
            clip=self.clip,
            policy=self.row,
            precision=self.precision,
        )
        return Run([*done.losses, *done.norms], _on_host(done.state), row=self.row)


@dataclass(frozen=True)
class Evaluated(Program):
    """Evaluates between clipping, which reads the norm, and the step."""

    def take(self, run: Trained) -> list[float]:
        for step in range(self.steps):
            run.engine.backward(run.model(*run.data(run.rank, step)))
            run.engine.clip_grad_norm_(1.0)
            with torch.no_grad():
                run.extra.append(run.model(*run.data(run.rank, step)).detach())
            run.optimizer.step()
            run.optimizer.zero_grad()
        return []


@dataclass(frozen=True)
class Zeroed(Program):
    """Sets the gradients of a first micro-batch to zero, and keeps them."""

    def take(self, run: Trained) -> list[float]:
        losses = []
        for step in range(self.steps):
            for number in (2 * step, 2 * step + 1):
                run.optimizer.zero_grad(set_to_none=False)
                loss = run.model(*run.data(run.rank, number))
                run.engine.backward(loss)
                losses.append(loss.detach())
            run.optimizer.step()
            run.optimizer.zero_grad()
        return [loss.item() for loss in losses]


@dataclass(frozen=True)
class Registered(Program):
    """With pages of the host that a driver has locked, as CUDA's does, and steps there that take
    their time: a forward begins beside them.
    """

    def train(self, device: str, *, rank: int = 0, transport: str = "auto") -> Run:
        with _registered_pages(), mock.patch.object(TileRunner, "_step", _step_slowly):
            return super().train(device, rank=rank, transport=transport)


_step_tile = TileRunner._step


def _step_slowly(runner: TileRunner, *args: Any) -> None:
    time.sleep(0.01)  # less than what lanes take for a host that is elsewhere
    _step_tile(runner, *args)


_map_pages = host_pages.map_pages


@contextmanager
def _registered_pages() -> Iterator[None]:
    if HAS_CUDA:  # CUDA registers pages itself
        yield
        return
    from tests.device import zsim

    locked: set[int] = set()
    mapped: list[Any] = []  # until the end: a copy that comes too late finds other numbers

    def register(address: int, num_bytes: int) -> None:
        zsim.register_host(address, num_bytes)
        locked.add(address)

    def unregister(address: int) -> None:
        if address in locked:
            locked.remove(address)
            zsim.unregister_host(address)

    def map_pages(num_bytes: int) -> Any:
        mapped.append(_map_pages(num_bytes))
        return mapped[-1]

    driver = SimpleNamespace(register=register, unregister=unregister)
    pinned_pages.cache_clear()
    try:
        with (
            mock.patch.object(Device, "host_register", lambda device: driver),
            mock.patch.object(host_pages, "map_pages", map_pages),
        ):
            yield
    finally:
        zsim.module.synchronize()
        pinned_pages.cache_clear()
        for address in list(locked):  # kept for the next borrower, who never comes
            unregister(address)


@dataclass(frozen=True)
class Closed(Program):
    """Reads what `close()` gives back."""

    def end(self, run: Trained) -> dict[str, torch.Tensor]:
        state = super().end(run)
        return state | {f"{name}, given back": p for name, p in run.model.named_parameters()}


def project_embedding(model: Any) -> None:
    """Let the backward read a weight of the first unit, too: an embedding's own does not."""
    model.embed = nn.Sequential(model.embed, nn.Linear(WIDTH, WIDTH).to(DEVICE))


def freeze_embedding(model: Any) -> None:
    """Leave the embedding as it is."""
    model.embed.requires_grad_(False)


def add_codes(model: Any) -> None:
    """Give a block frozen integers of 16 bits, for which NCCL has no type."""
    codes = torch.arange(192, dtype=torch.int16, device=DEVICE)
    model.blocks[0].codes = nn.Parameter(codes, requires_grad=False)


@dataclass(frozen=True)
class Case:
    """A program, and what else it must give the bits of than itself in order."""

    name: str
    program: Program
    is_plain: bool = False  # plain PyTorch's bits are promised
    is_as_on_cpu: bool = False  # those of the same program on CPUs
    worlds: tuple[int, ...] = (1, 2)
    kind: str = ""  # a row of the table


TWO: dict[str, Any] = {"micro_batches": 2}
FIVE: dict[str, Any] = {"micro_batches": 5}
NATIVE = {"transport": "nccl"}  # also in one process
CODES = {"weight_codec": "int8", "grad_codec": "int4"}


def _rows() -> list[Case]:
    return [
        Case(
            f"{row} {precision}",
            Program(row=row, precision=precision),
            is_plain=True,
            worlds=(1, 2, 4) if precision == "bf16" else (1, 2),
        )
        for row in ROWS
        for precision in PRECISIONS
    ]


def _low_states() -> list[Case]:
    """Return cases in which masters and moments are decoded for their step."""
    low: Any = zs.Precision("bf16", master="remainder", moments="bf16")  # type: ignore[arg-type]
    return [
        *(Case(f"remainders {row}", Program(row=row, precision=low, clip=0.1)) for row in ROWS),
        Case("remainders, fused", Program(precision=low, fused=True, **TWO), worlds=(1, 2)),
        Case("remainders off the device", Program(precision=low, after=off_and_on)),
    ]


def _fused() -> list[Case]:
    """Return cases in which the host reads nothing of a step."""
    clipped: dict[str, Any] = {"fused": True, "clip": 0.1}
    node: dict[str, Any] = {"comm": {"node_size": 1}, **clipped}
    return [
        *(Case(f"fused {row}", Program(row=row, **clipped), worlds=(1, 2, 4)) for row in ROWS),
        *(Case(f"fused {row}", Program(row=row, **node), worlds=(2,)) for row in NODE_ROWS),
        Case("fused, not clipped", Program(fused=True), is_plain=True),
        Case("fused, fp32", Program(precision="fp32", **clipped)),
        Case("fused, fp16", Program(precision="fp16", **clipped)),
        Case("fused, no_sync", Program(row="zero2", no_sync=True, **TWO, **clipped)),
        Case("fused, native, codecs", Program(comm={**NATIVE, **CODES}, **TWO, **clipped)),
        Case("fused, ordered", Program(comm={"ordered": True}, **clipped)),
        Case("fused, joined", Joined(**clipped), worlds=(2,)),
        Case("fused, average", Program(after=average, **clipped)),
        Case("fused, reset", Program(after=fail_and_reset, **clipped)),
        Case("fused, repartition", Program(after=repartition, **clipped)),
        Case("fused, save and load", Program(after=save_and_load, **clipped)),
        Case("fused, off the device and back", Program(after=off_and_on, **clipped)),
    ]


def _nodes() -> list[Case]:
    made = []
    for row in NODE_ROWS:
        made.append(Case(row, Program(row=row, comm={"node_size": 1}), worlds=(2,)))
        program = Program(row=row, comm={"node_size": 2})
        made.append(Case(f"{row} of two nodes", program, worlds=(4,)))
    for row in ("zero1", "zero3"):
        for world in (2, 4):
            program = Program(row=row, comm={"node_size": world // 2, "hierarchical": True})
            made.append(Case(f"two levels of {world}, {row}", program, worlds=(world,)))
    return made


def _meshes() -> list[Case]:
    made = []
    for row in ("zero1", "zero3"):
        for name, kind in {"pipeline": Pipelined, "tensor parallel": TensorParallel}.items():
            program = kind(row=row, precision="fp32", clip=0.1)
            made.append(Case(f"{name} {row}", program, worlds=(2, 4)))
    return made


def _inferences() -> list[Case]:
    encoded: dict[str, Any] = {"row": "zero3", "comm": {"frozen_codec": "int8"}}
    host, disk = {"weight": "host"}, {"weight": "disk"}
    return [
        Case("inference", Inferred(steps=4), is_plain=True),
        Case("inference, from the host", Inferred(offload=host), is_plain=True),
        Case("inference, from disk", Inferred(offload=disk), is_plain=True),
        Case("inference in int8, from the host", Inferred(offload=host, **encoded)),
        Case("inference in int8, from disk", Inferred(offload=disk, **encoded)),
        Case("inference, then steps", Inferred(offload=host, later=2), is_as_on_cpu=True),
        Case("generate", Generated(offload=host, device_bytes=2000), is_plain=True),
        Case("generate, all on the host", Generated(offload=host, device_bytes=0), is_plain=True),
        Case("decode", Decoded(device_bytes=2000), is_plain=True),
        Case("decode, all on the host", Decoded(device_bytes=0), is_plain=True),
    ]


def _experts() -> list[Case]:
    # a step on the host has other last bits beside an accelerator: torch's fused kernel takes it
    every: dict[str, Any] = {"worlds": (2, 4), "is_as_on_cpu": True}
    one: dict[str, Any] = {"precision": "fp32", "clip": 0.1}
    return [
        *(Case(f"experts {row}", Divided(row=row, **one), **every) for row in ("ddp", "zero3")),
        # with four, ranks of one group run other experts between collectives (docs/moe.md)
        Case("experts as modules", Divided(kind=Listed, **one), **{**every, "worlds": (2,)}),
        Case("experts, no_sync", Divided(row="zero2", no_sync=True, **one, **TWO), **every),
        Case("experts, on the host", Divided(offload=HOST, **one), worlds=(2, 4)),
    ]


def _moves() -> list[Case]:
    on_cpu: dict[str, Any] = {"is_as_on_cpu": True}
    two: dict[str, Any] = {**on_cpu, "worlds": (2,)}
    one: dict[str, Any] = {"precision": "fp32"}
    return [
        Case("to the host and back", Program(after=to_host_and_back, **one)),
        Case("to the host and back, bf16", Program(after=to_host_and_back)),
        Case("shares shift", Program(after=shift_shares, **one), **two),
        Case("a rank leaves", Left(**one), **two),
        Case("a rank leaves, on the host", Left(offload=STATES, **one), worlds=(2,)),
        Case("kept in memory", Kept(**one), **on_cpu),
        Case("kept in memory, on the host", Kept(row="zero2", offload=STATES), worlds=(1, 2)),
        Case("kept in memory, one goes on", Shrunk(**one), **two),
    ]


def _transports() -> list[Case]:
    over_gloo = Program(row="zero3", comm={"transport": "gloo"})
    made = [Case("over gloo", over_gloo, worlds=(2,))]
    for row in ("ddp", "zero2", "zero3"):
        program = Program(row=row, comm=NATIVE, **TWO)
        made.append(Case(f"native {row}", program, is_plain=True, worlds=(1,)))
    read = Closed(precision="fp32", comm=NATIVE, prepare=project_embedding, **TWO)
    made.append(Case("native, all read", read, worlds=(1,)))
    apart = {"separate_reduce_group": True}
    made += [
        Case(f"reduces apart, {row}", Program(row=row, comm=apart)) for row in ("zero3", "zero1")
    ]
    made.append(
        Case("reduces apart, hpz", Program(row="hpz", comm={"node_size": 1, **apart}), worlds=(2,))
    )
    return made + [Case(f"ordered {row}", Program(row=row, comm={"ordered": True})) for row in ROWS]


def _codecs() -> list[Case]:
    codes: dict[str, dict[str, Any]] = {
        **{f"weights in {code}": {"weight_codec": code} for code in ("int8", "int4", "fp8")},
        **{f"gradients in {code}": {"grad_codec": code} for code in ("int8", "int4", "fp8")},
        "error feedback": {"grad_codec": "int4", "error_feedback": True},
    }
    return [
        *(Case(name, Program(comm=comm)) for name, comm in codes.items()),
        Case("codecs and no_sync", Program(comm=CODES, no_sync=True, **TWO)),
        Case("codecs, hpz", Program(row="hpz", comm={"node_size": 1, **CODES}), worlds=(2,)),
        Case("native codecs", Program(comm={**NATIVE, **CODES}, **TWO), worlds=(1,)),
        Case("frozen in int4", Program(comm={"frozen_codec": "int4"}, prepare=freeze_embedding)),
    ]


def _options() -> list[Case]:
    budget = {"accumulation_budget": "400KiB"}
    again: dict[str, Any] = {"after": fail_and_reset}
    return [
        Case("micro-batches", Program(**TWO), is_plain=True),
        Case("micro-batches of stage 1", Program(row="zero1", **TWO), is_plain=True, worlds=(1,)),
        Case("no_sync", Program(no_sync=True, **TWO)),
        Case("no_sync of stage 2", Program(row="zero2", no_sync=True, **TWO)),
        Case("clipped", Program(clip=0.1)),
        Case("accumulation budget", Program(no_sync=True, options=budget, **TWO)),
        Case("checkpointed on the host", Program(prepare=checkpoint_on_host), is_plain=True),
        Case("accumulate", Accumulated(micro_batches=3)),
        Case("accumulate on the host", Accumulated(micro_batches=3, tier="host")),
        Case("off the device and back", Program(after=off_and_on), is_plain=True),
        Case("reset", Program(**again), is_plain=True),
        Case("native reset", Program(comm=NATIVE, **again), is_plain=True, worlds=(1,)),
        Case("reset, codecs", Program(comm={**NATIVE, **CODES}, **again), worlds=(1,)),
        Case("reset, on the host", Program(offload=HOST, **again)),
        Case("reset, memory taken", Program(comm=NATIVE, after=reset_and_allocate), worlds=(1,)),
        Case("repartition, on the host", Program(offload=STATES, after=repartition)),
        Case("average", Program(after=average)),
        Case("repartition", Program(after=repartition), is_plain=True),
        Case("edited", Program(after=edit)),
        Case("save and load", Program(after=save_and_load)),
        Case("joined", Joined(), worlds=(2,)),
        *(
            Case(
                f"leaves {row}{where}",
                OfLeaves(row=row, offload=off, options=leaves, clip=0.1, **FIVE),
            )
            for row, leaves in (("zero1", {"leaves": 4}), ("zero3", {"leaves": 5}))
            for where, off in (("", {}), (", on the host", STATES))
        ),
        *(
            Case(f"one curve, {row}", OnOneCurve(row=row, options={"leaves": 5}, **FIVE), True)
            for row in ("zero1", "zero3")
        ),
        Case("shares", Program(options={"shares": [0.25, 0.75]}), worlds=(2,)),
        *(
            Case(
                f"integers of 16 bits, {name}", Program(prepare=add_codes, options=how), worlds=(2,)
            )
            for name, how in {"equal": {}, "shares": {"shares": [0.25, 0.75]}}.items()
        ),
    ]


def _branches() -> list[Case]:
    two: dict[str, Any] = {"worlds": (2,)}
    plain: dict[str, Any] = {"is_plain": True, **two}
    on_cpu: dict[str, Any] = {"is_as_on_cpu": True, **two}
    one: dict[str, Any] = {"row": "zero2", "precision": "fp32"}
    nodes = {"node_size": 2, "hierarchical": True}
    return [
        *(
            Case(f"branches {row}", Branching(row=row), **plain)
            for row in ("ddp", "zero1", "zero2")
        ),
        Case("branches, clipped", Branching(clip=0.1, **one), **on_cpu),
        *(
            Case(
                f"branches, no_sync of {row}", Branching(row, "fp32", no_sync=True, **TWO), **on_cpu
            )
            for row in ("zero1", "zero2")
        ),
        Case("branches, joined", BranchingJoined(clip=0.1, **one), **on_cpu),
        Case("branches, leaves", BranchingLeaves(options={"leaves": 5}, **FIVE, **one), **on_cpu),
        Case("branches, accumulate", BranchingAccumulated(**TWO, **one), **on_cpu),
        Case("branches, reset", Branching(row="zero2", after=fail_and_reset), **plain),
        Case("branches, repartition", Branching(row="zero2", after=repartition), **plain),
        Case("branches, on the host", Branching(offload=STATES, **TWO, **one), **two),
        Case("branches, codec", Branching(comm={"grad_codec": "int4"}, **one), **two),
        Case("branches, two levels", Branching(comm=nodes, **one), worlds=(4,)),
    ]


def _tiers() -> list[Case]:
    tiers: dict[str, tuple[str, dict[str, Any]]] = {
        "optimizer on the host": ("zero1", {"optimizer": "host"}),
        "states on the host": ("zero2", STATES),
        "gradients on the host": ("zero3", {"grad": "host"}),
        "everything on the host": ("zero3", HOST),
        "in the backward": ("zero2", {**STATES, "step_in_backward": True}),
        "everything in the backward": ("zero3", {**HOST, "step_in_backward": True}),
        "late": ("zero3", {**STATES, "delayed_update": 1}),
        "everything late": ("zero3", {**HOST, "delayed_update": 1}),
        "a fraction": ("zero2", {**STATES, "fraction": 0.4}),
        "a fraction of all": ("zero3", {**HOST, "fraction": 0.4}),
        "optimizer on disk": ("zero3", {"optimizer": "disk"}),
        "everything on disk": ("zero3", dict.fromkeys(HOST, "disk")),
    }
    grads: dict[str, Any] = {"row": "zero2", "precision": "fp32", "offload": {"grad": "host"}}
    everything: dict[str, Any] = {"precision": "fp32", "offload": HOST}
    made = [
        Case("evaluated, gradients on the host", Evaluated(**grads), worlds=(1,)),
        Case(
            "save and load, gradients on the host",
            Program(after=save_and_load, **grads),
            worlds=(1,),
        ),
        Case(
            "evaluate and load, on the host",
            Program(after=evaluate_and_load, **everything),
            worlds=(1,),
        ),
        Case("zeroed, gradients on the host", Zeroed(micro_batches=2, **grads), worlds=(1,)),
        Case("registered pages", Registered(row="zero2", offload=STATES), worlds=(1,)),
        Case("gradients on disk", Program(offload={"grad": "disk"}, **TWO), worlds=(1,)),
    ]
    for name, (row, offload) in tiers.items():
        made.append(Case(name, Program(row=row, offload=offload, **TWO)))
        program = Program(row=row, precision="fp32", offload=offload, **TWO)
        made.append(Case(f"{name}, fp32", program))
    return made


_KINDS: dict[str, Callable[[], list[Case]]] = {
    "rows in fp32, bf16, fp16": _rows,
    "masters as remainders, moments in bf16": _low_states,
    "fused optimizers, clips": _fused,
    "rows over nodes, two levels": _nodes,
    "pipelines, tensor parallelism": _meshes,
    "native and ordered sums, gloo": _transports,
    "codecs": _codecs,
    "options and calls": _options,
    "ranks in different branches": _branches,
    "tiers": _tiers,
    "inference": _inferences,
    "experts": _experts,
    "ranks that come and go": _moves,
}


def _cases() -> dict[str, Case]:
    return {
        case.name: replace(case, kind=kind, program=replace(case.program, steps=STEPS))
        for kind, make in _KINDS.items()
        for case in make()
    }


CASES = _cases()
"""By name."""


def cases_of(world: int) -> list[str]:
    """Return the names of the cases that `world` ranks run."""
    return [name for name, case in CASES.items() if world in case.worlds]


# ------------------------------------------------------------------------------------- comparing


@dataclass
class Outcome:
    """What the schedules of one case gave."""

    found: list[str] = field(default_factory=list)  # differences
    num_runs: int = 0
    cpu_s: float = 0.0
    waits: dict[str, int] = field(default_factory=dict)  # of the host in a step, by reason


def compare(rank: int, world: int, name: str, schedules: Sequence[Schedule]) -> Outcome:
    """Train in order, then in each of `schedules`, and without an engine where that is promised."""
    case, outcome = CASES[name], Outcome()
    torch.use_deterministic_algorithms(HAS_CUDA, warn_only=True)
    began = time.process_time()
    expected = trained(case.program, rank, world, FIFO)
    for schedule in schedules:
        run = trained(case.program, rank, world, schedule)
        outcome.found += [f"{schedule}: {line}" for line in run.differs_from(expected)]
    is_plain = case.is_plain and world <= 2  # a sum of two has one order
    if HAS_CUDA and world > 1 and not has_native(dist.group.WORLD, torch.device(DEVICE)):
        is_plain = is_plain and case.program.precision == "fp32"  # gloo's sums are not rounded
    if is_plain:
        set_schedule(FIFO)
        plain = case.program.train_plainly(DEVICE, rank=rank)
        outcome.found += expected.differs_from(plain)
    is_as_on_cpu = case.is_as_on_cpu and world <= 2 and not HAS_CUDA
    if is_as_on_cpu:
        outcome.found += expected.differs_from(in_folder(case.program, "cpu", rank))
    outcome.num_runs = 1 + len(schedules) + is_plain + is_as_on_cpu
    outcome.cpu_s = time.process_time() - began
    return outcome


def measure(rank: int, world: int, name: str, schedules: Sequence[Schedule]) -> Outcome:
    """Compare, and count the waits of a step: those of a run that has one more."""
    outcome = compare(rank, world, name, schedules)
    fewer, more = (_waits(rank, world, name, STEPS + extra) for extra in (0, 1))
    outcome.waits = dict(more - fewer)
    return outcome


def _waits(rank: int, world: int, name: str, steps: int) -> Counter[str]:
    """Return how often the host waits in a run, by reason."""
    from tests.device import zsim

    before = Counter(zsim.host_waits())
    trained(replace(CASES[name].program, steps=steps), rank, world, FIFO)
    return Counter(zsim.host_waits()) - before


def set_schedule(schedule: Schedule) -> None:
    """Let the pretended device of this process run in that order."""
    if HAS_CUDA:
        return
    from tests.device import zsim  # registers the device, which is not for pytest's own process

    zsim.set_schedule(*schedule)


def trained(program: Program, rank: int, world: int, schedule: Schedule) -> Run:
    """Train under `schedule`. Raise AssertionError where collectives of the ranks do not meet."""
    set_schedule(schedule)
    if not HAS_CUDA:
        with meeting(world):
            return in_folder(program, DEVICE, rank)
    late = _LATE.get(schedule[0])
    with nullcontext() if late is None else disturbed(DEVICE, late):
        return in_folder(program, DEVICE, rank)


def in_folder(program: Program, device: str, rank: int) -> Run:
    """Train on `device`, with a directory for what rests on disk."""
    with tempfile.TemporaryDirectory() as folder:
        if "disk" in program.offload.values():
            program = replace(program, offload={**program.offload, "disk_path": folder})
        return program.train(device, rank=rank)
