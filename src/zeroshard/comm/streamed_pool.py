"""A pool of device buffers that may be given back on one stream and taken on another.

Invariant: whoever takes a buffer is ordered after whoever gave it back, by an event. On CPU there
are no streams and nothing to order. Cost: one event per return on accelerators.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["StreamedPool", "mark", "order_after"]


def mark(device: torch.device) -> Any:
    """Return an event behind everything on the device's current stream; a placeholder on CPU."""
    if device.type == "cpu":
        return False
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def order_after(event: Any) -> None:
    """Let the current stream wait for an event of `mark`."""
    if event is not False:
        event.wait()


class StreamedPool:
    """Flat buffers within `limit_bytes` (at least one; None: twice the largest asked for)."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._largest_bytes = 0
        self._idle: list[tuple[torch.Tensor, Any]] = []  # (uint8 buffer, event)
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def has_room(self, num_bytes: int) -> bool:
        """Whether `take` would stay within the limit."""
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        limit = 2 * self._largest_bytes if self._limit_bytes is None else self._limit_bytes
        lent = sum(buffer.numel() for buffer in self._lent.values())
        return not self._lent or lent + num_bytes <= limit

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an undefined tensor [numel], ordered after its last use. Idle buffers that no
        longer fit the limit are freed.
        """
        num_bytes = max(numel * dtype.itemsize, 64)
        self.has_room(num_bytes)
        fits = [
            entry
            for entry in self._idle
            if entry[0].numel() >= num_bytes and entry[0].device == device
        ]
        best = min(fits, key=lambda entry: entry[0].numel(), default=None)
        if best is None:
            self._trim(num_bytes)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._idle = [entry for entry in self._idle if entry is not best]
            buffer = best[0]
            order_after(best[1])
        self._lent[buffer.untyped_storage().data_ptr()] = buffer
        return buffer[: numel * dtype.itemsize].view(dtype)

    def _trim(self, num_bytes: int) -> None:
        limit = 2 * self._largest_bytes if self._limit_bytes is None else self._limit_bytes
        while (
            self._idle
            and sum(b.numel() for b in [*self._lent.values(), *(e[0] for e in self._idle)])
            + num_bytes
            > limit
        ):
            # the allocator frees in the order of the stream that is current
            order_after(self._idle[0][1])
            del self._idle[0]

    def give(self, tensor: torch.Tensor) -> None:
        """Put back what `take` returned."""
        # an empty tensor has no address of its own
        buffer = self._lent.pop(tensor.untyped_storage().data_ptr())
        self._idle.append((buffer, mark(tensor.device)))

    def clear(self) -> None:
        """Forget everything."""
        self._idle.clear()
        self._lent.clear()
