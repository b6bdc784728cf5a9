"""A window in memory of its own that no peer maps: its slices meet in the all-gather of whatever
transport made it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.comm.transport import Transport, Work
from zeroshard.core.layout import Range, end_of
from zeroshard.errors import StateError


def private(
    ranges: Sequence[Range],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    replicated: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return zeros for the whole buffer where it rests `replicated`, and for `rank`'s slice of
    it.
    """
    start, stop = ranges[rank]
    if not replicated:
        return None, torch.zeros(stop - start, dtype=dtype, device=device)
    full = torch.zeros(end_of(ranges), dtype=dtype, device=device)
    return full, full[start:stop]


class PrivateWindow:
    """One slice per rank, on `device`. Not mapped by peers; gather() is an all-gather."""

    def __init__(
        self,
        transport: Transport,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
        aliased: bool = False,
    ) -> None:
        self.key = key
        self.ranges = tuple(ranges)
        self.aliased = aliased
        self.full, self.local = private(
            self.ranges, transport.rank, dtype, device, replicated=replicated
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
