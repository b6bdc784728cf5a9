"""A window in memory of its own that no peer maps: its slices meet in the all-gather of whatever
transport made it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.comm.transport import Transport, Work
from zeroshard.core.layout import Range, end_of
from zeroshard.errors import StateError

__all__ = ["PrivateWindow"]


class PrivateWindow:
    """One slice per rank, on `device`. Peers are told nothing: a gather is the message."""

    def __init__(
        self,
        transport: Transport,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> None:
        self.key = key
        self.ranges = tuple(ranges)
        self.aliased = False
        start, stop = self.ranges[transport.rank]
        self.full = (
            torch.zeros(end_of(self.ranges), dtype=dtype, device=device) if replicated else None
        )
        self.local = (
            torch.zeros(stop - start, dtype=dtype, device=device)
            if self.full is None
            else self.full[start:stop]
        )
        self._transport = transport

    def gather(self, out: torch.Tensor | None = None) -> Work:
        target = self.full if out is None else out
        if target is None:
            raise StateError(f"window {self.key} rests sharded: gather needs `out`")
        return self._transport.all_gather(self.key, self.local, self.ranges, target)

    def publish(self) -> None: ...

    def close(self) -> None:
        self.full, self.local = None, torch.empty(0)
