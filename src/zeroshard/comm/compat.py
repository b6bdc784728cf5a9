"""What is not the same on every installation: the two collectives that torch 2.13 renamed, under
their new names on every torch, without a warning on any; and Triton, which is optional.

The two are the process group's own methods, as `torch.distributed`'s functions of the same names
call them: these check arguments first, in a dozen Python calls, for every gather and reduce.
Everything else in torch.distributed is called where it is used. No patching.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

__all__ = ["all_gather_single", "kernels_for", "reduce_scatter_single"]


def _of_group(name: str, older: str) -> Any:
    return getattr(dist.ProcessGroup, name, None) or getattr(dist.ProcessGroup, older)


_all_gather = _of_group("all_gather_single", "_allgather_base")
_reduce_scatter = _of_group("reduce_scatter_single", "_reduce_scatter_base")


def all_gather_single(
    out: torch.Tensor,
    own: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather the `own` of every rank, [n], into `out`, [N * n]; return a handle to wait for, or
    None (not `async_op`) once it is over for the host.
    """
    options = AllgatherOptions()
    options.asyncOp = async_op
    return _started(_all_gather(group or dist.group.WORLD, out, own, options), async_op)


def reduce_scatter_single(
    out: torch.Tensor,
    data: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum the `data` of every rank, [N * n], and write this rank's slice of it to `out`, [n];
    otherwise as `all_gather_single`.
    """
    options = ReduceScatterOptions()  # to sum
    options.asyncOp = async_op
    return _started(_reduce_scatter(group or dist.group.WORLD, out, data, options), async_op)


def _started(work: Any, async_op: bool) -> Any:
    if async_op or work is None:
        return work
    work.wait()
    return None


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """Return comm/kernels.py where its kernels serve the device of `tensor`; None on CPU, and where
    Triton is not installed.
    """
    return _kernels() if tensor.is_cuda else None


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from zeroshard.comm import kernels
    except ImportError:
        return None
    return kernels
