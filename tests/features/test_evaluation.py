"""Forwards without gradients over collectives that meet by order alone: ranks that gather other
units, or run another number of forwards, are told, where nothing else would ever tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import on_ranks, spawn_ranks
from tests.support.hosts import pretended_host
from zeroshard import PlanMismatch

NATIVE = zs.Comm(transport="nccl")  # over gloo's collectives, which match by order alone, too


class Two(nn.Module):
    """Two units of one size, whose order, or one of them, a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.a.weight, 1.0)
        nn.init.constant_(self.b.weight, 2.0)

    def forward(self, x: torch.Tensor, order: str = "ab") -> torch.Tensor:
        for name in order:
            x = getattr(self, name)(x)
        return x


class Run:
    """One engine, its model and its optimizer on one rank."""

    def __init__(self, rank: int, *, trains: bool = True, **options: Any) -> None:
        self.rank = rank
        self.model = Two()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5) if trains else None
        options = {"stage": 3, "units": ["a", "b"], "comm": NATIVE} | options
        self.engine = zs.shard(self.model, self.optimizer, stall_timeout_s=20, **options)

    def evaluate(self, order: str = "ab") -> float:
        with torch.no_grad():
            return self.model(torch.ones(1, 8), order).sum().item()

    def evaluate_apart(self) -> float:
        """The units in another order on rank 1."""
        return self.evaluate("ab" if self.rank == 0 else "ba")

    def step(self) -> None:
        assert self.optimizer is not None
        self.engine.backward(self.model(torch.ones(1, 8)).mean() * 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except PlanMismatch as error:
        return str(error)
    return "nothing"


UNLIKE = (
    r"the ranks ran other units in a forward without gradients; the first difference is number \d+:"
    r" rank 0: gather [ab] fp32 128; rank 1: gather [ab] fp32 128\. "
)
AFTERWARDS: dict[str, Callable[[Run], object]] = {
    "the next forward": lambda run: run.evaluate(),
    "the next step": lambda run: run.step(),
    "engine.exchange()": lambda run: run.engine.exchange(b""),
    "engine.full_state_dict()": lambda run: run.engine.full_state_dict(),
    "engine.close()": lambda run: run.engine.close(),
}


@pytest.mark.parametrize("apart", [False, True], ids=["one host", "a host each"])
@on_ranks(2, timeout=120)
def test_units_in_another_order_are_told_by_whatever_comes_next(rank: int, apart: bool) -> None:
    said = {}
    with pretended_host(rank) if apart else nullcontext():
        for name, call in AFTERWARDS.items():
            run = Run(rank)
            run.step()
            run.evaluate()
            run.evaluate()
            run.evaluate_apart()  # nobody waits for the others, nor reads the device
            said[name] = _said(lambda call=call, run=run: call(run))
            run.engine.reset()
            right = run.evaluate()
            assert right == run.evaluate() == run.evaluate("ba")
            run.engine.close()
    for name, text in said.items():
        assert re.match(UNLIKE, text), (name, text)


@on_ranks(2)
def test_a_save_after_such_a_forward_is_refused_and_one_after_a_reset_is_not(
    rank: int, tmp_path: Path
) -> None:
    run = Run(rank)
    run.evaluate_apart()
    said = _said(lambda: zs.save(tmp_path, run.engine, step=0))
    run.engine.reset()
    zs.save(tmp_path, run.engine, step=0)
    run.engine.close()
    assert re.match(UNLIKE, said), said


@on_ranks(2)
def test_blocks_that_each_rank_drops_by_itself_are_told_before_the_next_step_begins(
    rank: int,
) -> None:
    """LayerDrop, or a router that skips blocks, in a validation between two steps."""
    run = Run(rank, prefetch_bytes=0)  # no unit is gathered that is not used
    run.step()
    run.evaluate("ab"[rank])
    said = _said(lambda: run.model(torch.ones(1, 8)))  # of the next step, whose backward would hang
    run.engine.reset()
    run.step()
    run.engine.close()
    assert re.match(UNLIKE, said), said


@on_ranks(2)
def test_a_strict_engine_tells_it_at_the_end_of_the_forward_itself(rank: int) -> None:
    run = Run(rank, strict=True)
    assert run.evaluate() == run.evaluate("ba")
    said = _said(run.evaluate_apart)
    run.engine.reset()
    run.engine.close()
    assert re.match(UNLIKE, said), said


def _ends(rank: int, world: int) -> None:
    run = Run(rank, trains=False)
    run.evaluate_apart()
    print("the program ends", flush=True)


def test_a_program_that_ends_after_such_a_forward_does_not_end_well() -> None:
    for result in spawn_ranks(2, _ends):
        assert result.exitcode == PlanMismatch.exit_code, result
        assert "the program ends" in result.stdout
        assert re.search(UNLIKE, result.stderr), result.stderr


@on_ranks(2)
def test_a_forward_that_one_rank_alone_evaluates_is_told_by_name(rank: int) -> None:
    run = Run(rank)
    run.evaluate()
    if rank == 0:
        run.model(torch.ones(1, 8))  # the same gathers, of a forward that is not evaluated
    else:
        run.evaluate()
    said = _said(lambda: run.engine.exchange(b""))
    run.engine.reset()
    run.evaluate()
    run.engine.close()
    assert "rank 0 is in engine.exchange(), rank 1 is in a forward without gradients" in said


# -------------------------------------------------------------------------- programs that are right


@on_ranks(2)
def test_a_rank_evaluates_alone_where_nothing_is_gathered(rank: int) -> None:
    """Where nothing is gathered a rank may evaluate by itself."""
    for stage in (1, 2):
        run = Run(rank, stage=stage)
        for _ in range(2):
            run.step()
            if rank == 1:
                run.evaluate("ba")
        run.engine.exchange(b"")
        run.engine.close()
    run = Run(rank)
    run.step()
    run.evaluate()
    with run.engine.gathered():
        if rank == 1:
            run.evaluate("ba")
    run.evaluate()
    run.step()
    run.engine.close()


@on_ranks(2)
def test_ranks_that_read_each_others_memory_run_units_in_any_order(rank: int) -> None:
    run = Run(rank, comm=zs.Comm(transport="shared_memory"), strict=True)
    seen = [run.evaluate_apart() for _ in range(3)]
    assert seen == [run.evaluate()] * 3, seen
    run.engine.close()


@on_ranks(2, timeout=120)
def test_what_comes_between_such_forwards_goes_on(rank: int) -> None:
    """What comes between two such forwards, in pairs."""
    for options in ({}, {"trains": False}, {"comm": zs.Comm(transport="nccl", node_size=1)}):
        run = Run(rank, **options)
        between: list[Callable[[], object]] = [
            run.engine.full_state_dict,
            lambda run=run: run.engine.exchange(b""),
            run.engine.reset,
            lambda run=run: run.evaluate("b"),
            lambda run=run: run.model(torch.ones(1, 8)),
        ]
        if run.optimizer is not None:
            between += [run.step, lambda run=run: run.engine.repartition(stage=2)]
        for call in between:
            before = run.evaluate()
            call()
            after = run.evaluate()
            assert call == run.step or before == after, (options, call)
        run.engine.close()


# ------------------------------------------------------------------------------------ engine.join()


@pytest.mark.parametrize("apart", [False, True])
@on_ranks(2)
def test_a_rank_without_data_takes_part_in_the_comparison(rank: int, apart: bool) -> None:
    run = Run(rank)

    def loop() -> None:
        with run.engine.join():
            for _ in range(2 + rank):  # rank 0 shadows the last one, in the order of its own last
                run.step()
                run.evaluate_apart() if apart else run.evaluate()
        run.evaluate()

    said = _said(loop)
    run.engine.reset()
    run.engine.close()
    assert re.match(UNLIKE, said) if apart else said == "nothing", said
