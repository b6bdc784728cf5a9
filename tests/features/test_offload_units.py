"""States on other tiers beside small units, recomputation and steps that run into the forward:
the device's bits, whatever the timing.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.training import has_parameters, make_model, take_steps, train, two_groups

CHECKPOINTS = {"kept": None, "recomputed": False, "reentrant": True}


class Block(nn.Module):
    def __init__(self, width: int, reentrant: bool | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self._run(x)
            if self.reentrant is None
            else checkpoint(self._run, x, use_reentrant=self.reentrant)
        )

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _stack(width: int, blocks: int, checkpoints: str) -> nn.Module:
    torch.manual_seed(0)
    inner = [Block(width, CHECKPOINTS[checkpoints]) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(7, width), *inner, nn.Linear(width, 7))


def _train(rank: int, row: str, model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """Train two steps of two micro-batches; rank 1 is late at every forward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, policy=row, **options)
    for step in range(2):
        for micro in range(2):
            time.sleep(0.01 * rank)
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + micro + rank))
            model(x.requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return state


def _on_host(rank: int, world: int, checkpoints: str) -> dict[str, list[str]]:
    """Train with everything on the host; return what differs from the device."""
    out = {}
    for width, blocks, row, each in (
        (3, 1, "zero3", False),
        (3, 1, "zero3-keep", False),
        (33, 2, "zero3", True),
        (33, 4, "zero3-keep", True),
    ):
        units = {"units": has_parameters} if each else {}
        offload = zs.Offload(weight="host", grad="host", optimizer="host")
        runs = [
            _train(rank, row, _stack(width, blocks, checkpoints), offload=tier, **units)
            for tier in (None, offload)
        ]
        out[f"{row}, {blocks} blocks of {width}"] = [
            name for name, value in runs[0].items() if not torch.equal(value, runs[1][name])
        ]
    return out


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_ranks_that_run_the_same_program_at_different_speed_agree_about_what_they_gather(
    checkpoints: str,
) -> None:
    for differences in run_ranks(2, _on_host, checkpoints, timeout=60):
        assert not any(differences.values()), differences


def _slow_step(rank: int, world: int, precision: str) -> dict[str, list[str]]:
    """Train in one process with a step that is slower than the next forward; return what differs
    from the device.
    """
    options = {"precision": precision, "micro_batches": 2}
    reference = train(rank, "zero2", 4, **options)
    out = {}
    for optimizer_tier in ("host", "device"):
        model = make_model()
        optimizer = two_groups(model)
        offload = zs.Offload(grad="host", optimizer=optimizer_tier, fraction=0.4)
        engine = zs.shard(model, optimizer, policy="zero2", precision=precision, offload=offload)
        inside.delay_tiles(engine, lambda: time.sleep(0.005))
        take_steps(0, 4, model, optimizer, engine, micro_batches=2)
        state = engine.full_state_dict(rank0_only=False)
        engine.close()
        out[optimizer_tier] = [
            name for name, value in state.items() if not torch.equal(value, reference.state[name])
        ]
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_that_runs_into_the_forward_brings_every_weight_before_it_is_read(
    precision: str,
) -> None:
    assert not any(run_ranks(1, _slow_step, precision, timeout=60)[0].values())
