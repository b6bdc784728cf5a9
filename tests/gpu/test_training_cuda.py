"""The engine on one GPU: real streams and events, NCCL forced at world size 1, several ranks on
one GPU over gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import ROWS, Net, batch, take_steps, two_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = "cuda:0"
MESH_ROWS = ("hpz", "mics", "hfsdp")
CODED = {"weight_codec": "int8", "grad_codec": "int4", "error_feedback": True}


@pytest.fixture
def nccl_group(tmp_path: Path) -> Any:
    """A real process group of one rank, NCCL for CUDA tensors."""
    torch.cuda.set_device(0)
    store = f"file://{tmp_path}/store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def _data(rank: int, step: int) -> list[torch.Tensor]:
    return [tokens.to(DEVICE) for tokens in batch(rank, step)]


def _train(
    row: str | None, steps: int, precision: str = "fp32", **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Net(width=64, layers=6).to(DEVICE)
    optimizer = two_groups(model)
    engine = (
        None
        if row is None
        else zs.shard(model, optimizer, policy=row, precision=precision, **options)
    )
    losses = []
    for step in range(steps):
        x, y = (t.to(DEVICE) for t in batch(0, step))
        loss = model(x, y)
        engine.backward(loss) if engine else loss.backward()
        if engine:
            engine.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if engine is None:
        return losses, {name: value.cpu().clone() for name, value in model.state_dict().items()}
    state = engine.full_state_dict()
    engine.close()
    return losses, state


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ordered", [None, True], ids=["native", "ordered"])
def test_a_whole_training_over_nccl_at_world_size_one(
    nccl_group: Any, row: str, ordered: bool | None
) -> None:
    plain_losses, plain = _train(None, 20)
    losses, state = _train(row, 20, comm=zs.Comm(transport="nccl", ordered=ordered))
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_rows_are_equal_over_nccl(nccl_group: Any, precision: str) -> None:
    runs = {row: _train(row, 20, precision, comm=zs.Comm(transport="nccl")) for row in ROWS}
    for row, (losses, state) in runs.items():
        assert losses == runs["ddp"][0], row
        assert all(torch.equal(value, runs["ddp"][1][name]) for name, value in state.items()), row


def test_memory_is_steady_over_fifty_steps_of_stage_three(nccl_group: Any) -> None:
    torch.manual_seed(0)
    model = Net(width=512, layers=12).to(DEVICE)
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, stage=3, comm=zs.Comm(transport="nccl"))
    gaps = []
    for step in range(50):
        model(*_data(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        gaps.append(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    assert gaps[-1] <= 1.02 * gaps[5] + 2**21
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    engine.close()


def test_encoded_weights_and_gradients_train_nearly_as_exact_ones(nccl_group: Any) -> None:
    exact, _ = _train("zero3", 40, comm=zs.Comm(transport="nccl"))
    coded, _ = _train("zero3", 40, comm=zs.Comm(transport="nccl", **CODED))  # type: ignore[arg-type]
    assert coded != exact and sum(coded[-10:]) == pytest.approx(sum(exact[-10:]), rel=0.05)


def _over_gloo(rank: int, world: int, row: str) -> dict[str, torch.Tensor]:
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = Net(width=32, layers=3).to(DEVICE)
    optimizer = two_groups(model)
    mesh = {"node_size": 1} if row in MESH_ROWS else {}
    engine = zs.shard(model, optimizer, policy=row, comm=zs.Comm(transport="gloo", **mesh))  # type: ignore[arg-type]
    take_steps(rank, 10, model, optimizer, data=_data)
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return state


def test_two_ranks_share_one_gpu_over_gloo_with_equal_rows() -> None:
    reference = run_ranks(2, _over_gloo, "ddp")[0]
    for row in (*ROWS[1:], *MESH_ROWS):
        for state in run_ranks(2, _over_gloo, row):
            assert all(torch.equal(value, reference[name]) for name, value in state.items()), row


def test_the_stream_sanitizer_finds_no_race(tmp_path: Path) -> None:
    code = (
        "import os, torch.distributed as dist\nfrom tests.gpu import test_engine_cuda as"
        f" t\ndist.init_process_group('cpu:gloo,cuda:nccl', init_method='file://{tmp_path}/store',"
        " rank=0, world_size=1)\nimport zeroshard as zs\nfor row in t.ROWS: t._train(row, 3,"
        " comm=zs.Comm(transport='nccl'))\nt._train('zero3', 3, comm=zs.Comm(transport='nccl',"
        " **t.CODED))\ndist.destroy_process_group()\n"
    )
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "CSAN detected" not in done.stderr, done.stderr[-4000:]
