"""The storage behind a tensor, looked at from outside of any mode or subclass."""

from __future__ import annotations

import torch


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a dense tensor, unseen by guards and modes; None where it has none."""
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage() if tensor.layout is torch.strided else None
        except (NotImplementedError, RuntimeError):  # tensors that wrap others
            return None
