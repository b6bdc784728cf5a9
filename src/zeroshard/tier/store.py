"""The one protocol between the engine and the memory in which states rest; links to that memory,
and a storage that encodes what rests in another one.

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

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.wire import BlockCodec
from zeroshard.core.work import DoneWork, Kind, Operation, Probe, Work
from zeroshard.memory import Mark, MemoryCounter, has_streams, note_copy


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


# -------------------------------------------------------------------- links between device and host
#     Direct      CPU, or no streams: a copy is a copy, done when it returns
#     Enqueued    streams: a copy on the current stream (the caller chooses the lane,
#                 runtime/streams.py), from or into pinned memory
#
# Invariant: copies in one direction take effect in the order in which they were started. A link
# moves bytes; it does not allocate. Tests have links of their own (tests/support).


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


# --------------------------------------------------------------------------------- encoded storages
# Elements rest as blocks of a codec in a storage of bytes, on whatever tier (MixZ++, for frozen
# weights; ZeRO-Inference).
#
#     bytes      | scale | codes | scale | codes | ...  rest, are read, and travel in a gather
#     borrowed   |  decoded elements  |                 checkpoints read and write these: encoding
#                                                       them again gives the same bytes
#
# Invariant: reads give what the last write was decoded to. Ranges start on a block and end on one,
# or at the end of a parameter, after which its last block is padding. Cost: ``stride/block`` bytes
# per element; a copy of what is read. It does not know other ranks.


class EncodedStorage:
    """A Storage of `numel` elements, encoded in `rest`, a Storage of
    ``codec.encoded_bytes(numel)`` bytes.
    """

    def __init__(self, numel: int, dtype: torch.dtype, codec: BlockCodec, rest: Storage) -> None:
        assert rest.dtype is torch.uint8 and rest.numel == codec.encoded_bytes(numel), rest.key
        self.key = rest.key
        self.numel = numel
        self.dtype = dtype
        self.tier = rest.tier
        self.codec = codec
        self._rest = rest

    @property
    def num_bytes(self) -> int:
        return self._rest.num_bytes

    @property
    def encoded(self) -> torch.Tensor:
        """The encoding [encoded_bytes(numel)] of a storage on the device."""
        assert self.tier is Tier.DEVICE, (self.key, self.tier)
        with self._rest.borrowed(0, self._rest.numel, write=True) as there:
            return there

    def read_encoded(self, out: torch.Tensor) -> Work:
        """Start copying the encoding into `out` [encoded_bytes(numel)]."""
        return self._rest.read(0, self._rest.numel, out)

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        with self.borrowed(start, stop, write=False) as decoded:
            out.copy_(decoded)
        return DoneWork()

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        low, high = self.codec.bytes_of((start, stop))
        encoded = torch.empty(high - low, dtype=torch.uint8, device=source.device)
        self.codec.encode(source, encoded)
        return self._rest.write(low, high, encoded)

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        low, high = self.codec.bytes_of((start, stop))
        with self._rest.borrowed(low, high, write=write) as encoded:
            decoded = torch.empty(stop - start, dtype=self.dtype, device=encoded.device)
            self.codec.decode(encoded, decoded)
            yield decoded
            if write:
                self.codec.encode(decoded, encoded)

    def renew(self, store: Store) -> None:
        """Take other memory of `store` for the bytes; its contents are undefined. Raises
        StorageError.
        """
        other = store.allocate(self._rest.key, self._rest.numel, torch.uint8)
        self._rest.close()
        self._rest = other

    def close(self) -> None:
        self._rest.close()
