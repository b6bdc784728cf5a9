"""How bytes get from the device to the host and back.

    Direct      CPU, or no streams: a copy is a copy, done when it returns
    Enqueued    streams: a copy on the current stream (the caller chooses the lane,
                runtime/streams.py), from or into pinned memory

Invariant: copies in one direction take effect in the order in which they were started. A link moves
bytes; it does not allocate. Tests have links of their own (tests/support).
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from zeroshard.core.work import DoneWork, Work
from zeroshard.memory import Mark, has_streams, note_copy

Direction = Literal["to_host", "to_device"]


class Link(Protocol):
    """The way between device and host."""

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        """Start ``out.copy_(source)``."""

    def close(self) -> None:
        """Give back threads. Idempotent."""


def link_of(device: torch.device) -> Link:
    """Return the link that `device` needs."""
    return Enqueued(device) if has_streams(device) else Direct()


class Direct:
    """Device and host are the same memory, or the host waits for each copy."""

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        out.copy_(source)
        return DoneWork()

    def close(self) -> None: ...


class Enqueued:
    """Copies on the current stream; the host side is pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        out.copy_(source, non_blocking=True)
        copied = Mark(self._device)
        note_copy(source if direction == "to_device" else out, copied)
        return copied

    def close(self) -> None: ...
