"""How often the host waits for the device in a step: once, for overflow and norm together, and not
there where the optimizer is fused, which leaves out by itself what is not finite.

Over its own backend, and over the fake process group of 8 and 64 ranks, whose collectives only
copy.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.gpu.chosen import HAS_CUDA
from tests.support.sync_census import census
from tests.support.training import Net, batch, two_groups

STEPS = 3
LAYERS = 6 if HAS_CUDA else 2
WARMUP = 3  # the first steps trace what is prefetched, and make the moments


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_step_over_the_devices_backend_waits_once_and_fused_never(
    device: str, native_group: Any, precision: str, fused: bool
) -> None:
    _count(device, 1, precision, fused)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("world", [8, 64])
def test_so_it_does_in_a_larger_world(device: str, world: int, fused: bool) -> None:
    _count(device, world, "bf16", fused)


def _count(device: str, world: int, precision: str, fused: bool) -> None:
    torch.manual_seed(0)
    with fake_world(world) if world > 1 else nullcontext():
        model = Net(width=64, layers=LAYERS).to(device)
        optimizer = two_groups(model, **({"fused": True} if fused else {}))
        comm = zs.Comm(transport="nccl")
        engine = zs.shard(model, optimizer, stage=3, precision=precision, comm=comm)
        data = [[tokens.to(device) for tokens in batch(0, step)] for step in range(WARMUP + STEPS)]

        def steps(chosen: list[list[torch.Tensor]]) -> None:
            for x, y in chosen:
                engine.backward(model(x, y))
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

        steps(data[:WARMUP])
        torch.get_device_module(device).synchronize()
        with census(device) as found:
            steps(data[WARMUP:])
    print(f"{len(found.waits)} waits in {STEPS} steps, {world} ranks, {precision}:\n{found}")
    assert len(found.waits) <= (0 if fused else STEPS), str(found)
