"""Plain PyTorch and FSDP2 on the pretended device, unmodified, under every schedule: what fails for
them is the device's fault.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.device.programs import DEVICE, FIFO, QUICK, Schedule, set_schedule
from tests.support.harness import run_ranks
from tests.support.training import Run, batch, make_model, take_steps, two_groups

KINDS = ("plain", "ddp", "fsdp2", "fsdp2 bf16")
STEPS = 3


def _train(rank: int, kind: str, schedule: Schedule) -> Run:
    set_schedule(schedule)
    model: Any = make_model(width=32, layers=2).to(DEVICE)
    module: nn.Module = model
    if kind == "ddp":
        module = DistributedDataParallel(model)
    elif kind.startswith("fsdp2"):
        policy = MixedPrecisionPolicy()
        if kind.endswith("bf16"):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=policy)
    optimizer = two_groups(model)
    data = [[tokens.to(DEVICE) for tokens in batch(rank, step)] for step in range(STEPS)]
    losses = take_steps(rank, STEPS, module, optimizer, data=lambda rank, step: data[step])
    state = {name: _whole(value) for name, value in model.state_dict().items()}
    return Run(losses, state, row=kind)


def _whole(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().cpu().clone()


def _differ(rank: int, world: int, kind: str) -> list[str]:
    expected, found = _train(rank, kind, FIFO), []
    for schedule in QUICK:
        run = _train(rank, kind, schedule)
        found += [f"{schedule}: {line}" for line in run.differs_from(expected)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_they_have_the_same_bits_under_every_schedule(kind: str) -> None:
    world = 1 if kind == "plain" else 2
    for found in run_ranks(world, _differ, kind, device="tests.device.zsim"):
        assert not found, "\n".join(found)
