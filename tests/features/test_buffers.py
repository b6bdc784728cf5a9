"""Buffers stay local unless asked otherwise."""

from __future__ import annotations

import gc

import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from zeroshard.memory import Pages


def _running_mean(rank: int, world: int, broadcast: bool) -> tuple[list[float], list[float]]:
    """Return the batch norm's running mean after two steps here, and under torch's DDP with the
    same setting.
    """
    out = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = (
            zs.shard(model, optimizer, stage=3, broadcast_buffers=broadcast) if sharded else None
        )
        runs = (
            model
            if sharded
            else nn.parallel.DistributedDataParallel(model, broadcast_buffers=broadcast)
        )
        for step in range(2):
            torch.manual_seed(10 * step + rank)
            runs(torch.randn(8, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        out.append(model[1].running_mean.tolist())
        if engine is not None:
            engine.close()
    return out[0], out[1]


def test_buffers_follow_ddp_with_and_without_broadcast() -> None:
    for broadcast in (False, True):
        for ours, ddps in run_ranks(2, _running_mean, broadcast):
            assert ours == ddps


def test_large_tensors_come_on_pages_that_are_used_again_once_their_last_view_is_gone() -> None:
    pool = Pages()
    first = pool.empty(1 << 20, torch.float32, torch.device("cpu"))
    address, view = first.data_ptr(), first[5:]
    first.fill_(3)
    del first
    other = pool.empty(1 << 20, torch.float32, torch.device("cpu"))
    assert other.data_ptr() != address and bool((view == 3).all()), "a view keeps its pages"
    del view
    assert pool.empty(1 << 20, torch.float32, torch.device("cpu")).data_ptr() == address
    outlives = pool.empty(1 << 20, torch.float32, torch.device("cpu")).fill_(7)
    del pool
    gc.collect()
    assert bool((outlives == 7).all())
