"""``deepspeed.comm``: torch.distributed under DeepSpeed's name, and how a program joins its group.

Every name that is not here is torch.distributed's own.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import zeroshard as zs

_DEFAULT = timedelta(minutes=30)
# what only concerns how DeepSpeed looks for MPI, and what it prints
_WITHOUT_EFFECT = ("auto_mpi_discovery", "verbose", "config")


def init_distributed(
    dist_backend: str | None = None,
    *,
    distributed_port: int = 29500,
    timeout: timedelta = _DEFAULT,
    dist_init_required: bool | None = None,
    init_method: str | None = None,
    **rest: Any,
) -> None:
    """Join the process group that the launcher describes; does nothing where there is one.

    ``nccl`` means the accelerator's own backend, and gloo for CPU tensors. `rank`, `world_size` and
    `init_method` are torch's. Raises ConfigError for an option that is unknown, and without a group
    where `dist_init_required` is False.
    """
    rank, size = rest.pop("rank", -1), rest.pop("world_size", -1)
    unknown = [name for name in rest if name not in _WITHOUT_EFFECT]
    if unknown:
        raise zs.ConfigError(f"init_distributed() has no option {unknown[0]!r} here")
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise zs.ConfigError(
            "dist_init_required=False, and torch.distributed is not initialized: call"
            " init_distributed() first, or leave it out"
        )
    if rank >= 0 or init_method is not None:
        dist.init_process_group(
            dist_backend, init_method=init_method, timeout=timeout, rank=rank, world_size=size
        )
        return
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    backend = None if dist_backend == "nccl" else dist_backend
    zs.init_distributed(backend, timeout_s=timeout.total_seconds())


def is_initialized() -> bool:
    """Whether there is a process group.

    Accelerate asks this while it looks for the ranks, and with DeepSpeed on a machine without an
    accelerator it knows no backend, and then one process. It is told of gloo, to count CPU ranks.
    """
    module = sys.modules.get("accelerate.state")
    if module is not None and "RANK" in os.environ:
        state = module.PartialState._shared_state
        if state.get("backend", "") is None:
            state["backend"] = "gloo"
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """Return this process's rank; 0 for a single process without a group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 for a single process without a group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def data_parallel_group() -> Any:
    """Return the process group of all ranks, which are data parallel; None without one."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_local_rank() -> int:
    """Return this process's rank on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
