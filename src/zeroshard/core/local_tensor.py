"""The tensor that is here of a DTensor.

Invariant: torch.distributed.tensor is imported where there are DTensors, and nowhere else (it takes
a second).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "local_of"]

_DTENSOR = "torch.distributed.tensor"


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    dtensor = getattr(sys.modules.get(_DTENSOR), "DTensor", None)  # not imported: there is none
    return dtensor is not None and issubclass(kind, dtensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is here of a DTensor; any other tensor itself. No copy."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor
