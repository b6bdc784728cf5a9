"""Transports between ranks: one protocol, one transport per kind of link, one place that counts.

`kernels_for` says whether codecs, sums and squares are computed by Triton's kernels.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from zeroshard.system.device import TRITON

__all__ = ["kernels_for"]


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
