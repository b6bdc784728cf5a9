"""Every operation of a run, on the lanes that it has on CUDA: none touches memory that another lane
has not finished with, and no memory goes back to its allocator while a lane still uses it.

One process of a fake process group of 8, over the NCCL transport, on CPU tensors: values mean
nothing, order and lifetime are those of a device (tests/support/lane_sanitizer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.support.lane_sanitizer import LaneSanitizer
from zeroshard import memory
from zeroshard.runtime import gradients
from zeroshard.runtime.gradients import Reduction

WIDTH = 64
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{row: (row, {}) for row in ("ddp", "zero1", "zero2", "zero3", "zero3-keep")},
    **{row: (row, {"node_size": 4}) for row in ("hpz", "mics", "hfsdp")},
    "two levels": ("zero3", {"node_size": 4, "hierarchical": True}),
    "ordered": ("zero3", {"ordered": True}),
    "weight codec": ("zero3", {"weight_codec": "int8"}),
    "gradient codec": ("zero3", {"grad_codec": "int4"}),
    "both codecs, hpz": ("hpz", {"node_size": 4, "weight_codec": "int8", "grad_codec": "int4"}),
}


class _Net(nn.Module):
    """Blocks, the last of which runs only when asked to."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.uses_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.uses_all else self.blocks[:-1]:
            x = x + block(x)
        return x.square().mean()


def _watch(
    case: str,
    *,
    world: int = 8,
    precision: str = "fp32",
    blocks: int = 3,
    program: Callable[[zs.Engine, _Net, torch.optim.Optimizer], None],
    drop: int | None = None,
) -> LaneSanitizer:
    """Run `program` under the sanitizer, which leaves out the `drop`-th fork or join."""
    policy, comm = CASES[case]
    torch.manual_seed(0)
    sanitizer = LaneSanitizer(drop=drop)
    with fake_world(world), sanitizer.watching():
        model = _Net(blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        units = [f"blocks.{index}" for index in range(blocks)]
        options = zs.Comm(transport="nccl", **comm)
        engine = zs.shard(
            model, optimizer, policy=policy, units=units, comm=options, precision=precision
        )
        program(engine, model, optimizer)
    return sanitizer


def _batch() -> torch.Tensor:
    return torch.randn(2, WIDTH)


def _steps(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    """Two steps of two micro-batches with clipping, a block unused in one, and an evaluation."""
    for step in range(2):
        with engine.no_sync():
            engine.backward(model(_batch()))
        model.uses_all = step == 0
        engine.backward(model(_batch()))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(_batch())


def _one_step(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    model(_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(_batch())


def _reset_in_between(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    """A backward that an exception cuts off, `reset()`, and a step."""

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = model.blocks[0][0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(_batch()).backward()
    handle.remove()
    engine.reset()
    _one_step(engine, model, optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", list(CASES))
def test_no_lane_touches_what_another_has_not_finished_with(case: str, precision: str) -> None:
    sanitizer = _watch(case, precision=precision, program=_steps)
    assert sanitizer.findings == []
    assert sanitizer.num_operations > 200
    assert len(sanitizer.syncs) >= 12


def test_nor_in_a_world_of_sixty_four() -> None:
    assert _watch("zero3", world=64, program=_steps).findings == []


@pytest.mark.parametrize("case", ["zero3", "mics", "gradient codec"])
def test_nor_after_an_exception_and_reset(case: str) -> None:
    assert _watch(case, program=_reset_in_between).findings == []


@pytest.mark.parametrize("case", ["zero1", "zero3", "hpz"])
def test_each_wait_that_is_left_out_is_found(case: str) -> None:
    """A join of the reduce lane that a later one covers, before anybody reads the sum, is none."""
    whole = _watch(case, blocks=2, program=_one_step)
    assert whole.findings == []
    for number, sync in enumerate(whole.syncs):
        found = _watch(case, blocks=2, program=_one_step, drop=number).findings
        is_covered = sync == "join(reduce)" and sync in whole.syncs[number + 1 :]
        assert found or is_covered, (number, sync)


@pytest.mark.parametrize("case", ["gradient codec", "mics", "hfsdp"])
def test_memory_that_a_reduce_does_not_hold_is_found(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(flight: Any, loan: Any, frees: Any, uses: Any) -> Reduction:
        return Reduction(flight, loan, frees, ())

    monkeypatch.setattr(gradients, "Reduction", forgetful)
    findings = _watch(case, program=_steps).findings
    assert {finding.kind for finding in findings} == {"drop"}
    assert {finding.other_lane for finding in findings} == {"reduce"}


def test_a_pool_that_waits_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "order_after", lambda event: None)
    findings = _watch("zero3", blocks=6, program=_steps).findings
    assert "race" in {finding.kind for finding in findings}
