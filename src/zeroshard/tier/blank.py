"""What stands for numbers that rest elsewhere: one NaN (zero in dtypes without), expanded to
their shape. Reading it gives no stale number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

__all__ = ["blank", "stand_in"]


@functools.cache
def _nan(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1,), float("nan") if dtype.is_floating_point else 0, dtype=torch.float32).to(
        dtype
    )


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return one NaN on the CPU, expanded to `shape`."""
    return _nan(dtype).expand(shape)


def blank(tensor: torch.Tensor) -> None:
    """Let `tensor` refer to a stand-in instead of its memory; its shape stays."""
    tensor.data = stand_in(tensor.shape, tensor.dtype)
