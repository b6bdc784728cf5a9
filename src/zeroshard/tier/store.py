"""The one protocol between the engine and where states rest.

A **store** is one tier's memory on this rank; a **storage** is one state of one segment in it:
`numel` elements of one dtype, flat (ZeRO-Offload, section 4; ZeRO-Infinity, section 5)::

    # started now, waited for later
    storage.read(start, stop, out)   out (on the device, or in a staging buffer) <-- storage
    storage.write(start, stop, src)  src --> storage
    # the host step: host memory itself, or a copy of disk
    with storage.borrowed(start, stop, write=True) as tensor:

Invariants. Overlapping reads and writes take effect in the order in which they were started. `out`
and `src` must not be touched before the Work has been waited for. No tensor on a storage's memory
exists outside ``borrowed``. Bytes never written are undefined.

One thread at a time may use a storage. Nothing is collective.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.recording import Operation, Probe
from zeroshard.core.route.hop import Kind
from zeroshard.core.work import Work
from zeroshard.memory import MemoryCounter


class Storage(Protocol):
    """`numel` elements of `dtype` at rest on one tier, counted from the storage's start."""

    key: str  # names the state in errors: "blocks.3:fp32 exp_avg"
    numel: int
    dtype: torch.dtype
    tier: Tier

    @property
    def num_bytes(self) -> int:
        """Bytes that rest there."""

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        """Start copying elements [start, stop) into `out` [stop - start], contiguous."""

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        """Start copying `source` [stop - start] into elements [start, stop)."""

    def borrowed(
        self, start: int, stop: int, *, write: bool
    ) -> AbstractContextManager[torch.Tensor]:
        """Lend elements [start, stop) as a CPU (or device) tensor, valid inside the context.

        With `write`, what is written to it rests in the storage when the context ends without an
        exception. Waits for what is under way.
        """

    def close(self) -> None:
        """Give the memory back. Idempotent; whatever is under way is waited for."""


class Store(Protocol):
    """One tier's memory on this rank."""

    tier: Tier
    account: MemoryCounter
    probe: Probe  # of reads and writes, each noted once

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> Storage:
        """Allocate a storage. Raises StorageError naming `key`, the bytes and the place."""

    def close(self) -> None:
        """Close every storage and give back threads and files. Idempotent."""


def operation_on(storage: Storage, num_bytes: int, *, writes: bool) -> Operation:
    """Return a read or write of `storage`, as traces note it."""
    if writes:
        return Operation("tier write", Kind.WRITE.value, storage.key, num_bytes)
    return Operation("tier read", Kind.READ.value, storage.key, num_bytes)
