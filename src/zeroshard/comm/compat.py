"""What is not the same on every installation: the two collectives that torch 2.13 renamed, under
their new names on every torch, without a warning on any; and Triton, which is optional.

Everything else in torch.distributed is called where it is used. No patching.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["all_gather_single", "kernels_for", "reduce_scatter_single"]

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


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
