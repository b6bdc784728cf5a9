"""What every GPU test shares: deterministic kernels, and a process group of one rank over NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# cuBLAS reads it when it is first used
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def nccl_group(tmp_path: Path) -> Iterator[Any]:
    """A real process group of one rank, NCCL for CUDA tensors."""
    torch.cuda.set_device(0)
    store = f"file://{tmp_path}/store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
