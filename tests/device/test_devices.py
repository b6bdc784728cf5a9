"""Several devices, a slow one, and one whose memory runs out."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zeroshard as zs
from tests.device.programs import (
    CASES,
    FIFO,
    QUICK,
    THREADS,
    Branching,
    Schedule,
    set_schedule,
    trained,
)
from tests.features.test_experts import ORDERS
from tests.support.experts import in_turn
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    Routed,
    batch,
    differences,
    equal,
    final_state,
    make_model,
    take_steps,
    two_groups,
)
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.transport import ReduceRequest
from zeroshard.errors import PlanMismatch
from zeroshard.runtime.ledger import explain

_DEVICE = "tests.device.zsim"
ENOUGH = 2 << 30  # bytes


def _on(device: int) -> Any:
    return torch.get_device_module("zsim").device(device)


# ------------------------------------------------------------------------------- several devices


def _second_device(rank: int, world: int, row: str) -> list[str]:
    program = CASES[f"{row} bf16"].program
    expected = trained(program, rank, world, FIFO)
    with _on(1):
        return program.train("zsim:1", rank=rank).differs_from(expected)


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_a_model_on_the_second_device_has_the_same_bits(row: str) -> None:
    assert run_ranks(1, _second_device, row, device=_DEVICE) == [[]]


def _beside_the_cpu(rank: int, world: int, name: str) -> list[str]:
    program = CASES[name].program
    with sdpa_kernel(SDPBackend.MATH):  # a backend without fused attention is given this one
        return trained(program, rank, world, FIFO).differs_from(program.train("cpu", rank=rank))


@pytest.mark.parametrize("name", ["pipeline zero3", "tensor parallel zero3"])
def test_a_cut_model_has_the_bits_of_the_cpu(name: str) -> None:
    assert run_ranks(2, _beside_the_cpu, name, device=_DEVICE) == [[], []]


@on_ranks(1, device=_DEVICE)
def test_two_engines_train_on_two_devices_in_turns(rank: int) -> None:
    """Train on two devices of one process in turns."""
    set_schedule(FIFO)
    expected = CASES["zero3 bf16"].program.train("zsim:0", rank=rank)
    made = []
    for index in range(2):
        with _on(index):
            model = CASES["zero3 bf16"].program._model(f"zsim:{index}")
            optimizer = two_groups(model)
            made.append((model, optimizer, zs.shard(model, optimizer, precision="bf16")))
    for step in range(3):
        for index, parts in enumerate(made):
            data = [tokens.to(f"zsim:{index}") for tokens in batch(rank, step)]
            with _on(index):
                take_steps(rank, [step], *parts, data=lambda *_, data=data: data)
    found = []
    for index, (model, _, engine) in enumerate(made):
        with _on(index):
            state = {name: value.cpu() for name, value in final_state(model, engine).items()}
        found += differences(state, expected.state)
    assert found == []


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Gated(nn.Module):
    """Blocks, and as many parameters around them, half of which rank 1 does not use."""

    def __init__(self, *, uses_all: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(8)) for _ in range(2))
        self.blocks = nn.Sequential(_Scale(), _Scale())
        self.uses_all = uses_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.blocks(x).chunk(2, 1)
        right = right * self.second if self.uses_all else right
        return (left * self.first + right).square().mean()


def _gated(rank: int, row: str, device: str, **options: Any) -> dict[str, torch.Tensor]:
    model = _Gated(uses_all=rank == 0).to(device)
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row, units=[_Gated, _Scale], **options)
    for step in range(2):
        engine.backward(model(torch.full((2, 16), 1.0 + rank + step).to(device)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in final_state(model, engine).items()}


def _told(rank: int, world: int, name: str) -> str:
    set_schedule(FIFO)
    try:
        if name == "blocks":
            trained(Branching(row="zero3", steps=1), rank, world, FIFO)
        else:  # gathers meet: reduces alone do not
            comm = zs.Comm(transport="nccl", separate_reduce_group=True)
            _gated(rank, "zero3", "cpu", comm=comm)
    except PlanMismatch as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("name, unit", [("blocks", "blocks"), ("gates", "reduce")])
def test_at_stage_3_ranks_in_different_branches_are_told_before_the_step(
    name: str, unit: str
) -> None:
    """Native collectives meet in the order in which they begin: else two blocks would be added."""
    first, other = run_ranks(2, _told, name, device=_DEVICE)
    assert first == other
    assert re.search(rf"is number \d: rank 0: .*{unit}.*; rank 1: ", first)


def _beside_other_gates(rank: int, world: int, row: str) -> list[str]:
    set_schedule(FIFO)
    return differences(_gated(rank, row, "zsim:0"), _gated(rank, row, "cpu"))


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2"])
def test_below_stage_3_a_unit_may_end_with_the_backward_of_one_rank_alone(row: str) -> None:
    assert run_ranks(2, _beside_other_gates, row, device=_DEVICE) == [[], []]


@on_ranks(2)
def test_reduces_follow_rank_0_and_after_a_reset_the_order_of_units(rank: int) -> None:
    started: list[str] = []
    reduce = NativeTransport.reduce

    def noted(
        transport: NativeTransport, request: ReduceRequest, *args: Any, **options: Any
    ) -> Any:
        started.append(request.key)
        return reduce(transport, request, *args, **options)

    torch.manual_seed(0)
    model = Routed()
    optimizer = two_groups(model)
    with mock.patch.object(NativeTransport, "reduce", noted):
        comm = zs.Comm(transport="nccl")
        engine = zs.shard(model, optimizer, policy="zero2", comm=comm)
        for step in range(4):
            if step == 3:
                engine.reset()
            engine.backward(model(*batch(rank, step), ((3, 1, 0, 2), (0, 2, 3))[rank]))
            optimizer.step()
            optimizer.zero_grad()
    first, followed = ("norm", 3, 2, 1, 0, "embed"), ("norm", 2, 0, 1, 3, "embed")
    orders = [name for order in (first, followed, followed, first) for name in order]
    assert [key.removeprefix("blocks.").split(":")[0].split(".")[0] for key in started] == [
        str(name) for name in orders
    ]


def _experts_in_turn(
    rank: int,
    world: int,
    row: str,
    orders: dict[int, tuple[int, ...]],
    schedule: Schedule = FIFO,
    device: str = "zsim:0",
    ordered: bool | None = None,
) -> dict[str, torch.Tensor] | str:
    set_schedule(schedule)
    try:
        return in_turn(rank, row, orders, device=device, comm=zs.Comm(ordered=ordered))
    except PlanMismatch as refused:
        return str(refused)


def test_ranks_with_other_experts_may_reduce_them_in_another_order() -> None:
    """Each group of ranks with the same experts has collectives of its own, which meet in order."""
    for orders in ORDERS:
        expected = run_ranks(4, _experts_in_turn, "ddp", orders, device=_DEVICE)
        for row, schedule in (("zero2", QUICK[1]), ("zero3", QUICK[0])):
            found = run_ranks(4, _experts_in_turn, row, orders, schedule, device=_DEVICE)
            assert all(map(equal, found, expected)), row
    orders = ORDERS[0] | {3: (0, 2, 1)}  # and 1 has the same experts
    told = set(run_ranks(4, _experts_in_turn, "zero3", orders, device=_DEVICE))
    assert len(told) == 1 and re.search(r"is number \d: rank 1: .*; rank 3: ", told.pop())
    expected = run_ranks(4, _experts_in_turn, "ddp", orders, FIFO, "cpu", device=_DEVICE)
    for row in ("ddp", "zero2"):  # in one order
        on_device = (row, orders, FIFO, "zsim:0", True)
        found = run_ranks(4, _experts_in_turn, *on_device, device=_DEVICE)
        assert all(map(equal, found, expected)), row


def _a_device_each(rank: int, world: int, row: str, delay_us: int) -> list[str]:
    from tests.device import zsim

    program = CASES[f"{row} bf16"].program
    expected = trained(program, rank, world, FIFO)
    set_schedule(THREADS)
    own = torch.device("zsim", rank)
    if rank == 1:
        zsim.set_delay(own, delay_us)
    try:
        with _on(rank):
            return program.train(str(own), rank=rank).differs_from(expected)
    finally:
        zsim.set_delay(own, 0)


@pytest.mark.parametrize("delay_us", [0, 200])
@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_ranks_with_a_device_each_of_which_one_is_slow_agree(row: str, delay_us: int) -> None:
    assert run_ranks(2, _a_device_each, row, delay_us, device=_DEVICE) == [[], []]


# --------------------------------------------------------------------------------- out of memory


class _Short:
    """A device that has no memory left beside what is in use."""

    def __enter__(self) -> None:
        from tests.device import zsim

        module = torch.get_device_module("zsim")
        module.synchronize()
        module.empty_cache()
        zsim.set_memory_limit(module.memory_reserved())

    def __exit__(self, *error: object) -> None:
        from tests.device import zsim

        zsim.set_memory_limit(ENOUGH)


def _run_out(where: str, run: Any, rank: int) -> torch.OutOfMemoryError:
    """Run out of memory in a forward, a backward or a step; return what is raised."""
    model, optimizer, engine = run
    x, y = (tokens.to("zsim:0") for tokens in batch(rank, 1))
    try:
        if where == "forward":
            with _Short():
                model(x, y)
        loss = model(x, y)
        if where == "backward":
            with _Short():
                engine.backward(loss)
        engine.backward(loss)
        with _Short():
            optimizer.step()
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError(f"there was memory for the {where}")


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("row", ["ddp", "zero3"])  # zero3's forward runs out in a gather
@on_ranks(1, device=_DEVICE)
def test_training_goes_on_after_a_device_was_out_of_memory(rank: int, row: str, where: str) -> None:
    """Compare with a run that never failed, and the table in the error."""
    states, text = [], ""
    data = {step: [tokens.to("zsim:0") for tokens in batch(rank, step)] for step in range(3)}
    for fails in (False, True):
        set_schedule(FIFO)
        model = make_model(width=64).to("zsim:0")
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, policy=row, precision="bf16")
        run = model, optimizer, engine
        for step in range(3):
            if step == 1 and fails:
                error = _run_out(where, run, rank)
                explain(error)
                text = "\n".join([str(error), *getattr(error, "__notes__", [])])
                error.__traceback__ = None
                engine.reset()
            take_steps(rank, [step], *run, data=lambda _, number: data[number])
        state = final_state(model, engine)
        states.append({name: value.cpu() for name, value in state.items()})
    assert all(bool(value.isfinite().all()) for value in states[1].values())
    found = differences(states[1], states[0])
    if where != "step":  # which may have taken a part of the parameters
        assert not found, "\n".join(found)
    assert "optimizer" in text and "Net" in text, text
