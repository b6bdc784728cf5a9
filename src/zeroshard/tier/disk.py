"""The disk tier: files that worker threads read and write past the page cache (ZeRO-Infinity,
arXiv 2104.07857, section 6.3: asynchronous bulk requests and a small pool of pinned buffers).

    storage    one file, preallocated, its end rounded up to the block      swapdir.py
    transfer   cut into pieces of 2 MiB, `queue_depth` of them in flight    transfer.py
    tensor     aligned host memory: the disk's own; else through a buffer   this file, transfer.py
    verify     a checksum per MiB, in memory: stale bytes are found too     this file

    store = DiskStore(SwapDirectory("/mnt/nvme", rank=0), device)
    storage = store.allocate("blocks.3:fp32 exp_avg", numel, torch.float32)
    # aligned: no copy where start is a multiple of a block
    buffer = store.staging.tensor(stop - start, torch.float32)
    storage.read(start, stop, buffer).wait()

Invariant: a read returns what was written last, or raises StorageError naming file, state and
bytes. Failed requests and truncated files are always found, with `verify` any other change and
writes that never arrived, too. A storage never reads again after a failed write. A file that is
deleted or replaced still works: its descriptor is open.

Cost: numel * itemsize bytes of disk and one descriptor per storage; `queue_depth` * 2 MiB of
bounce buffers, and the staging pool. An edge inside a block (with `verify`: inside a MiB) is read,
changed and written. Nothing is synced to the disk or survives the process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from zeroshard.core.layout import round_up
from zeroshard.core.placement import Tier
from zeroshard.core.work import DoneWork, Probe, Work
from zeroshard.errors import StorageError
from zeroshard.memory import Mark, MemoryCounter, has_streams
from zeroshard.system.device import Device
from zeroshard.tier.store import Direct, Direction, Link, link_of, operation_on
from zeroshard.tier.swapdir import BLOCK, SwapDirectory, accepts_direct, read_blocks, write_blocks
from zeroshard.tier.transfer import DiskPiece, Memory, Scratch, Staging, TierTransfer, Workers, cut

# ------------------------------------------------------------------------------------------- bounce
# Copies between a tensor and a worker's bounce buffer.
#
#     HostBytes     host memory: the disk uses it itself where it is aligned, else a plain copy
#     LinkedBytes   an accelerator's memory (or a test's link): through a pinned buffer and the link
#
# [Note: device and disk] A transfer runs later, in another thread. So an event waits for the stream
# that was current when it was started; the copies run on the store's own stream, and the worker
# waits for each before it reuses its buffer. When the transfer's `wait` returns, the bytes are
# valid on every stream.


class Bytes(Protocol):
    """A tensor as bytes, for one transfer."""

    def straight(self, start: int, stop: int, align: int) -> memoryview | None:
        """Return bytes [start, stop) if the disk can use them in place, aligned to `align`."""

    def put(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        """Copy `num_bytes` of `memory` from `low` to byte `start` of the tensor, and wait."""

    def get(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        """The other way."""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # a single element may have any stride
    return tensor.detach().as_strided(tensor.shape, (1,)).view(torch.uint8)


class _HostBytes:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # keeps the memory alive
        self._address = tensor.data_ptr()
        # Not through numpy: its arrays forbid torch to resize the storage, which is how gathered
        # weights are released.
        buffer = (ctypes.c_ubyte * tensor.nbytes).from_address(self._address)
        self._view = memoryview(buffer).cast("B")

    def straight(self, start: int, stop: int, align: int) -> memoryview | None:
        return None if (self._address + start) % align else self._view[start:stop]

    def put(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        # without the GIL, and in this thread alone
        ctypes.memmove(self._address + start, memory.address + low, num_bytes)

    def get(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        ctypes.memmove(memory.address + low, self._address + start, num_bytes)


class _LinkedBytes:
    def __init__(
        self, tensor: torch.Tensor, carry: Callable[[torch.Tensor, torch.Tensor, Direction], None]
    ) -> None:
        self._bytes = _flat(tensor)
        self._carry = carry

    def straight(self, start: int, stop: int, align: int) -> memoryview | None:
        return None

    def put(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        source = memory.tensor(low, num_bytes, torch.uint8)
        self._carry(self._bytes[start : start + num_bytes], source, "to_device")

    def get(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        out = memory.tensor(low, num_bytes, torch.uint8)
        self._carry(out, self._bytes[start : start + num_bytes], "to_host")


class BounceBuffers:
    """Decides for each tensor, and owns the stream of the copies on an accelerator."""

    def __init__(self, device: torch.device, link: Link, staging: Staging) -> None:
        self._link = link
        self._staging = staging
        self._pretended = device.type == "cpu" and not isinstance(link, Direct)
        self._starting = threading.Lock()  # a link is not asked from two threads at once
        self._stream: Any = None
        if has_streams(device):
            self._stream = Device.of(device).make_stream()

    def of(self, tensor: torch.Tensor) -> Bytes:
        """Return `tensor` as bytes; on an accelerator, once the current stream's work has run."""
        if tensor.device.type == "cpu":
            if self._pretended and not self._staging.owns(tensor):
                return _LinkedBytes(tensor, self._carry)
            return _HostBytes(tensor)
        if self._stream is None:
            return _LinkedBytes(tensor, self._carry)
        before = Mark(tensor.device)

        def carry(out: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
            before.wait(self._stream)
            self._carry(out, source, direction)

        return _LinkedBytes(tensor, carry)

    def _carry(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
        # which only inference mode may change, and that is a matter of threads
        inference = out.is_inference()
        with self._starting, self._on_stream(), torch.inference_mode(inference):
            work = self._link.copy(out, source, direction)
        synchronize = getattr(work, "synchronize", work.wait)  # an enqueued copy: of its own event
        synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        return Device.of(self._stream.device).stream(self._stream)


# ---------------------------------------------------------------------------------------- checksums
# xxh3-64 of what was last written to each unit of a storage, kept in memory.
#
# Because the sums are not on the disk, a lost or misplaced write is found as surely as a flipped
# bit. A unit that was never written has no sum. Cost: 8 bytes per MiB, and one pass over the bytes
# of every read and write, beside the disk and without the GIL.


UNIT = 1 << 20  # bytes that one sum covers


class Checksums:
    """The sums of `num_bytes` bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._sums: list[int | None] = [None] * -(-num_bytes // UNIT)

    def note(self, low: int, data: memoryview) -> None:
        """Remember `data`, whole units from byte `low` on."""
        for index, unit in self._units(low, data):
            self._sums[index] = xxhash.xxh3_64_intdigest(unit)

    def first_difference(self, low: int, data: memoryview) -> tuple[int, int] | None:
        """Return the byte range of the first unit of `data` with another sum, None without one."""
        for index, unit in self._units(low, data):
            expected = self._sums[index]
            if expected is not None and xxhash.xxh3_64_intdigest(unit) != expected:
                return index * UNIT, index * UNIT + len(unit)
        return None

    @staticmethod
    def _units(low: int, data: memoryview) -> list[tuple[int, memoryview]]:
        assert low % UNIT == 0, low
        starts = range(0, len(data), UNIT)
        return [((low + start) // UNIT, data[start : start + UNIT]) for start in starts]


# --------------------------------------------------------------------------------------------- disk

_log = logging.getLogger("zeroshard")
# bytes per request: 1 MiB cost 5 to 10% of the bandwidth measured, more gained nothing and leaves
# threads idle
_CHUNK = 2 << 20
_QUEUE_DEPTH = 8
_DEFAULT_STAGING = 256 << 20
_REMEDY = "name another disk_path if it happens again"


class DiskStore:
    """Files in `directory`, for a model on `device`.

    `direct` says whether the page cache is out of the way; where the file system refuses, rank 0
    says so once. `staging` is the pool from which callers take buffers. `close` removes the
    directory. Raises StorageError when it cannot be used.
    """

    def __init__(
        self,
        directory: SwapDirectory,
        device: torch.device,
        *,
        verify: bool = False,
        staging_bytes: int | None = None,
        queue_depth: int = _QUEUE_DEPTH,
        link: Link | None = None,
    ) -> None:
        pinned = device.type != "cpu"
        self.tier = Tier.DISK
        self.account = MemoryCounter()
        self.probe = Probe()
        self.link = link_of(device) if link is None else link
        self.verify = verify
        self.staging = Staging(staging_bytes or _DEFAULT_STAGING, pinned=pinned)
        self.storages: list[_DiskStorage] = []
        self.bounce_buffers = BounceBuffers(device, self.link, self.staging)
        self.files = directory
        self.direct = _probe(directory)
        self.workers = Workers(queue_depth, max(_CHUNK, UNIT), pinned=pinned)
        self._end = weakref.finalize(self, _end, self.workers, self.files)  # also at exit

    @property
    def path(self) -> Path:
        """The directory of this rank."""
        return self.files.path

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> _DiskStorage:
        storage = _DiskStorage(self, key, numel, dtype)
        self.storages.append(storage)
        self.account.add(numel * dtype.itemsize)
        return storage

    def remove(self, storage: _DiskStorage) -> None:
        """Stop counting `storage`, which was closed."""
        self.storages.remove(storage)
        self.account.remove(storage.numel * storage.dtype.itemsize)

    def close(self) -> None:
        for storage in list(self.storages):
            storage.close()
        if self._end.alive:
            self._end()
            self.workers.join()
            self.staging.close()
            self.link.close()


def _end(workers: Workers, files: SwapDirectory) -> None:
    workers.stop()
    files.remove()


def _probe(files: SwapDirectory) -> bool:
    try:
        direct = accepts_direct(files.fd, Memory(BLOCK, pinned=False).view)
    except OSError as error:
        files.remove()
        raise StorageError(f"disk_path {files.path.parent}: {error.strerror}") from error
    if not direct and files.rank == 0:
        effect = "what rests there goes through the page cache"
        _log.warning("%s: its file system refuses O_DIRECT; %s", files.path.parent, effect)
    return direct


class _DiskStorage:
    """A file, preallocated."""

    def __init__(self, store: DiskStore, key: str, numel: int, dtype: torch.dtype) -> None:
        self.key = key
        self.numel = numel
        self.dtype = dtype
        self.tier = Tier.DISK
        self._store = store
        self.num_bytes = numel * dtype.itemsize
        self._file_bytes = round_up(self.num_bytes, BLOCK)
        self._fd, self._name = store.files.create(key, self._file_bytes, direct=store.direct)
        self.path = store.path / self._name
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self._close_file.atexit = False  # a thread may be using it
        self._sums = Checksums(self._file_bytes) if store.verify else None
        self._lost = ""  # why the first write that failed did
        self._under_way: list[TierTransfer] = []

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        return self._start(start, stop, out, writes=False)

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        return self._start(start, stop, source, writes=True)

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        staging = self._store.staging
        tensor = staging.tensor(stop - start, self.dtype)
        works: list[Work] = []
        try:
            works.append(self.read(start, stop, tensor))
            works[-1].wait()
            yield tensor
            if write:
                works.append(self.write(start, stop, tensor))
                works[-1].wait()
        finally:
            for work in works:
                if isinstance(work, TierTransfer):
                    work.wait_end()  # an interrupted wait left the disk using the buffer
            staging.give(tensor)

    def flush(self) -> None:
        """Wait, on the host, for all transfers, failed or not."""
        self._store.workers.wait_ends(self._under_way)

    def close(self) -> None:
        if self in self._store.storages:
            self.flush()
            self._store.remove(self)
            self._close_file()
            self._store.files.unlink(self._name)

    def _start(self, start: int, stop: int, tensor: torch.Tensor, *, writes: bool) -> Work:
        assert 0 <= start <= stop <= self.numel, (self.key, start, stop, self.numel)
        shape = tensor.shape
        assert shape == (stop - start,) and tensor.is_contiguous(), (self.key, shape, start, stop)
        assert tensor.dtype is self.dtype, (self.key, tensor.dtype)
        assert self._close_file.alive, f"{self.key}: closed"
        self._store.files.check_process(self.key)
        if start == stop:
            return DoneWork()
        first, last = start * self.dtype.itemsize, stop * self.dtype.itemsize
        unit = BLOCK if self._sums is None else UNIT
        pieces = cut(first, last, storage_bytes=self.num_bytes, unit=unit, chunk=_CHUNK)
        there = self._store.bounce_buffers.of(tensor)
        do = self._write_piece if writes else self._read_piece

        def run(piece: DiskPiece, scratch: Scratch) -> None:
            do(there, piece.start - first, piece, scratch)

        recording, timed = self._store.probe.recording, run
        if recording is not None:
            operation = operation_on(self, last - first, writes=writes)
            timed = recording.by_pieces(run, len(pieces), operation)
        transfer = TierTransfer(pieces, timed, writes=writes, beside=self._under_way)
        self._store.workers.start(transfer)
        return transfer

    def _straight(self, there: Bytes, start: int, piece: DiskPiece) -> memoryview | None:
        """Return the tensor's bytes of a piece if the disk can use them in place."""
        align = BLOCK if self._store.direct else 1
        stop = start + piece.stop - piece.start
        return there.straight(start, stop, align) if piece.whole else None

    def _read_piece(self, there: Bytes, start: int, piece: DiskPiece, scratch: Scratch) -> None:
        view = self._straight(there, start, piece)
        if view is not None:
            self._fetch(view, piece.low)
            return
        memory = scratch()
        self._fetch(memory.view[: piece.high - piece.low], piece.low)
        there.put(start, memory, piece.start - piece.low, piece.stop - piece.start)

    def _write_piece(self, there: Bytes, start: int, piece: DiskPiece, scratch: Scratch) -> None:
        num_bytes = piece.stop - piece.start
        try:
            view = self._straight(there, start, piece)
            if view is None:
                memory = scratch()
                view = memory.view[: piece.high - piece.low]
                if piece.start == piece.low and piece.stop == self.num_bytes:
                    # beyond the storage's end there is nothing to keep
                    view[num_bytes:] = bytes(len(view) - num_bytes)
                elif not piece.whole:
                    self._fetch(view, piece.low)
                there.get(start, memory, piece.start - piece.low, num_bytes)
            with self._naming("write", piece.low, piece.low + len(view)):
                self._check_file()
                if self._sums is not None:
                    self._sums.note(piece.low, view)
                write_blocks(self._fd, view, piece.low)
        except BaseException as error:
            self._lost = self._lost or str(error) or type(error).__name__
            raise

    def _fetch(self, out: memoryview, low: int) -> None:
        """Read whole units from byte `low` of the file on, and check them."""
        with self._naming("read", low, low + len(out)):
            self._check_file()
            read_blocks(self._fd, out, low)
        wrong = None if self._sums is None else self._sums.first_difference(low, out)
        if wrong is not None:
            raise StorageError(
                f"{self.path}: {self.key}: bytes {wrong[0]} to {wrong[1]} are not what was written"
                " there last: the disk lost or damaged them, or something else wrote to the file;"
                f" {_REMEDY}"
            )

    def _check_file(self) -> None:
        """Refuse a lost file, and a truncated one: writing would fill its gap with zeros."""
        if self._lost:
            raise StorageError(
                f"{self.path}: {self.key}: an earlier write to it failed, so it does not hold what"
                f" it should: {self._lost}"
            )
        size = os.fstat(self._fd).st_size
        if size < self._file_bytes:
            raise StorageError(
                f"{self.path}: {self.key}: the file was cut off at byte {size}, it had"
                f" {self._file_bytes}; {_REMEDY}"
            )

    @contextmanager
    def _naming(self, verb: str, low: int, high: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or error
            raise StorageError(
                f"{self.path}: {self.key}: cannot {verb} bytes {low} to {high} ({why}); {_REMEDY}"
            ) from error
