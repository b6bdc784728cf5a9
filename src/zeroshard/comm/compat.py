"""Differences between installations: the two collectives that torch 2.13 renamed, under their new
names on every torch, without a warning on any; limits of time; Triton, where it is.

Of a step's own gathers and sums the process group's methods are called: the functions of
torch.distributed around them check their arguments first, in a dozen Python calls each. Everything
else in torch.distributed is called where it is used. No patching.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist

from zeroshard.system.device import TRITON

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _method(name: str, older: str) -> Any:
    return getattr(dist.ProcessGroup, name, None) or getattr(dist.ProcessGroup, older)


# (group, out, own, AllgatherOptions) and (group, out, data, ReduceScatterOptions) -> Work | None
group_all_gather = _method("all_gather_single", "_allgather_base")
group_reduce_scatter = _method("reduce_scatter_single", "_reduce_scatter_base")


def has_timed_out(error: RuntimeError) -> bool:
    """Return whether a backend says, in its own words, that its limit of time has passed."""
    return any(words in str(error) for words in ("imed out", "timeout"))


def kernels_for(tensor: torch.Tensor) -> ModuleType | None:
    """Return comm/kernels.py where its kernels serve the device of `tensor`; None on CPU, and where
    Triton is not installed.
    """
    return _kernels() if tensor.device.type in TRITON else None


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from zeroshard.comm import kernels
    except ImportError:
        return None
    return kernels
