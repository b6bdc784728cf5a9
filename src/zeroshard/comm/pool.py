"""A free list of flat tensors: temporaries are reused instead of allocated, since the first
touch of fresh pages costs more than the copy.

Invariant: a tensor handed out is nobody else's until it is given back. Cost: at most `limit_bytes`
lie idle. It does not wait, count what is on loan, or know what the tensors are for.
"""

from __future__ import annotations

import torch

__all__ = ["TensorPool"]


class TensorPool:
    """Flat tensors by device, smallest fit first."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._idle: dict[torch.device, list[torch.Tensor]] = {}  # flat uint8 buffers

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an undefined tensor [numel]; ours until `give`."""
        num_bytes = numel * dtype.itemsize
        fits = [
            buffer
            for buffer in self._idle.get(device, [])
            if num_bytes <= buffer.numel() <= max(2 * num_bytes, 4096)
        ]
        if fits:
            best = min(fits, key=torch.Tensor.numel)
            self._idle[device] = [buffer for buffer in self._idle[device] if buffer is not best]
        else:
            best = torch.empty(max(num_bytes, 64), dtype=torch.uint8, device=device)
        return best[:num_bytes].view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Put back what `take` returned."""
        storage = tensor.untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        idle = self._idle.setdefault(tensor.device, [])
        if (
            self._limit_bytes is None
            or sum(b.numel() for b in idle) + buffer.numel() <= self._limit_bytes
        ):
            idle.append(buffer)

    def clear(self) -> None:
        """Forget what lies idle."""
        self._idle.clear()
