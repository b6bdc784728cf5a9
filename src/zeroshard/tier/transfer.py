"""Reads and writes of the disk tier: buffers, pieces, and the worker threads that do them
(ZeRO-Infinity, section 6.3).

A transfer's pieces are done by free threads, at most `queue_depth` at a time. A transfer that
touches units of an earlier one of the same storage starts after it, unless both read::

    write [0, 6000)   ====            both change block 1: one after the other
    write [6000, 9000)    ===
    read  [20000, 24000)      ====    at the same time as either

Invariant: a piece that a thread has taken waits for no other piece, so nothing can deadlock. A
transfer that has ended keeps no tensor alive. Who starts one may be interrupted at any line by a
signal's handler that raises: all that is counted is counted by the workers. Cost: about 20 µs of
interpreter per piece.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from zeroshard.core.layout import round_up
from zeroshard.errors import StorageError
from zeroshard.memory import HUGE_BYTES, MemoryCounter, address_of, host_memory, to_placeholder
from zeroshard.tier.swapdir import BLOCK

# ------------------------------------------------------------- buffers between disk and computation
# A bounded pool of memory that O_DIRECT accepts, used again and again (ZeRO-Infinity, section 6.3).
#
#     buffer = staging.tensor(numel, dtype)     1-D, aligned to the disk's block: a storage reads
#                                               and writes it without a copy
#     storage.read(a, b, buffer) ... storage.write(a, b, buffer) ...
#     staging.give(buffer)                      reads as NaN from here on; its memory is used again
#
# A thread that finds the pool full waits until another one gives a buffer back. The thread that
# took a buffer must give it back: then a deadlock (every lent buffer is held by a thread that waits
# for more) is detected at once and raises StorageError.
#
# Invariant: lent and idle memory is at most `limit_bytes`, except for one larger buffer that is
# lent alone. At rest no tensor refers to the pool. Cost: sizes are rounded up to 4 KiB, and memory
# is used again for the same size only. It does not queue fairly, and does not know of reads into a
# buffer that is given back.


class Memory:
    """Host memory that starts on a block; only `tensor` makes tensors on it."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.num_bytes = round_up(num_bytes, BLOCK)
        align = HUGE_BYTES if num_bytes >= HUGE_BYTES and not pinned else BLOCK
        try:
            self.view = host_memory(self.num_bytes, pinned=pinned, align=align)
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(
                f"no {self.num_bytes} bytes of host memory for staging ({error}): lower"
                " staging_bytes"
            ) from None
        self.address = address_of(self.view)

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `numel` > 0 elements from byte `start` on."""
        return torch.frombuffer(self.view[start : start + numel * dtype.itemsize], dtype=dtype)


class Staging:
    """At most `limit_bytes` of buffers."""

    def __init__(self, limit_bytes: int, *, pinned: bool = False) -> None:
        assert limit_bytes > 0, limit_bytes
        self.limit_bytes = limit_bytes
        self.account = MemoryCounter()  # lent and idle
        self._pinned = pinned
        self._closed = False
        self._changed = threading.Condition()
        self._idle: list[Memory] = []  # the longest idle first
        self._lent: dict[int, tuple[Memory, int]] = {}  # address -> memory, the thread that took it
        self._waiting: dict[int, int] = {}  # thread -> bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent now."""
        return sum(memory.num_bytes for memory, _ in self._lent.values())

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Lend `numel` uninitialised elements, aligned to a block; wait while the pool is full.

        Raises StorageError when the wait could never end, naming the bytes and the limit, or when
        the host has no memory.
        """
        if not numel:
            return torch.empty(0, dtype=dtype)
        need, thread = round_up(numel * dtype.itemsize, BLOCK), threading.get_ident()
        with self._changed:
            assert not self._closed, "the staging pool is closed"
            while not self._fits(need):
                self._refuse_deadlock(need, thread)
                self._waiting[thread] = need
                try:
                    self._changed.wait()
                finally:
                    del self._waiting[thread]
            memory = self._take(need)
            self._lent[memory.address] = (memory, thread)
        return memory.tensor(0, numel, dtype)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Lend bytes: ``tensor(num_bytes, torch.uint8)``."""
        return self.tensor(num_bytes, torch.uint8)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back `tensor`, or a view that starts where it does; `tensor` reads as NaN then."""
        if not tensor.numel():
            return
        address = tensor.data_ptr()
        to_placeholder(tensor)
        with self._changed:
            assert address in self._lent, f"no buffer was lent at {address:#x}"
            memory, _ = self._lent.pop(address)
            if self._closed:
                self.account.remove(memory.num_bytes)
            else:
                self._idle.append(memory)
            self._changed.notify_all()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a buffer that is lent now."""
        address = tensor.data_ptr()
        with self._changed:
            lent = [memory for memory, _ in self._lent.values()]
        return any(one.address <= address < one.address + one.num_bytes for one in lent)

    def close(self) -> None:
        """Free idle buffers now, and lent ones when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            self._evict(len(self._idle))

    def _fits(self, need: int) -> bool:
        return not self._lent or self.lent_bytes + need <= self.limit_bytes

    def _take(self, need: int) -> Memory:
        """Return an idle buffer of this very size, else a new one for which idle ones make room.

        Not a larger one: it would count for more than its taker knows of.
        """
        for memory in self._idle:
            if memory.num_bytes == need:
                self._idle.remove(memory)
                return memory
        while self._idle and self.account.live + need > self.limit_bytes:
            self._evict(1)
        memory = Memory(need, pinned=self._pinned)
        self.account.add(memory.num_bytes)
        return memory

    def _evict(self, count: int) -> None:
        for memory in self._idle[:count]:
            self.account.remove(memory.num_bytes)
        del self._idle[:count]

    def _refuse_deadlock(self, need: int, thread: int) -> None:
        """Raise when every lent buffer is held by a thread that waits for one that does not fit."""
        if any(self._fits(other) for other in self._waiting.values()):
            return  # it was woken and is about to go on
        holders = {holder for _, holder in self._lent.values()}
        if holders <= {*self._waiting, thread}:
            raise StorageError(
                f"staging_bytes={self.limit_bytes} is too small: {need} bytes are wanted while"
                f" {self.lent_bytes} are lent to threads that wait for more: raise it to at least"
                f" {self.lent_bytes + need}"
            )


# ----------------------------------------------------------------------------- pieces of a transfer
# A transfer is cut into pieces for worker threads. A unit is the least that the disk moves: its
# block, or the range that one checksum covers. A piece never covers parts of two units, so that
# only the first and the last can be ragged, and everything between goes straight between disk and
# memory::
#
#     unit          |-------|-------|-------|-------|-------|
#     transfer         =========================
#     pieces           |hhhh|mmmmmmmmmmmmmmm|tttt             m at most `chunk` bytes each; h and t
#                                                      inside one unit: read, change, write


@dataclass(frozen=True, slots=True)
class DiskPiece:
    """Bytes [start, stop) of a storage, inside the whole units [low, high) of its file."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def whole(self) -> bool:
        """Whether it is all of its units."""
        return self.start == self.low and self.stop == self.high


def cut(start: int, stop: int, *, storage_bytes: int, unit: int, chunk: int) -> list[DiskPiece]:
    """Return the pieces of bytes [start, stop); the last unit ends with the file's last block."""
    assert 0 <= start <= stop <= storage_bytes, (start, stop, storage_bytes)
    assert chunk % unit == 0 and unit % BLOCK == 0, (chunk, unit, BLOCK)
    file_bytes = round_up(storage_bytes, BLOCK)
    pieces = []
    while start < stop:
        if start % unit:
            end = round_up(start, unit)
        else:
            end = (start // chunk + 1) * chunk
            if stop < min(end, file_bytes) and stop - stop % unit > start:
                end = stop - stop % unit
        end = min(end, stop)
        low, high = start - start % unit, min(round_up(end, unit), file_bytes)
        pieces.append(DiskPiece(start, end, low, high))
        start = end
    return pieces


# ---------------------------------------------------------------------- transfers and their workers

# One worker's buffer for unaligned transfers, allocated at the first call. Not from the staging
# pool: whoever waits for a transfer may hold all of that.
Scratch = Callable[[], Memory]


class TierTransfer:
    """A read or write of one storage, as a Work; `beside` lists the storage's transfers."""

    def __init__(
        self,
        pieces: Sequence[DiskPiece],
        run: Callable[[DiskPiece, Scratch], None],
        *,
        writes: bool,
        beside: list[TierTransfer],
    ) -> None:
        self.pieces = pieces
        self.writes = writes
        self.beside = beside
        self.num_left = len(pieces)
        self.num_blockers = 0
        self.followers: list[TierTransfer] = []
        self._run: Callable[[DiskPiece, Scratch], None] | None = run
        self._error: BaseException | None = None
        self._over = threading.Event()

    def wait(self) -> None:
        self._over.wait()
        if isinstance(self._error, StorageError):
            raise self._error.with_traceback(None)  # or each wait would lengthen it
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._over.is_set()

    def wait_end(self) -> None:
        """Wait for the end, failed or not."""
        self._over.wait()

    def conflicts(self, other: TierTransfer) -> bool:
        """Whether one must wait for the other."""
        if not (self.writes or other.writes):
            return False
        mine, theirs = self.pieces, other.pieces
        return mine[0].low < theirs[-1].high and theirs[0].low < mine[-1].high

    def attempt(self, piece: DiskPiece, scratch: Scratch) -> None:
        """Do one piece, unless another one has failed."""
        if self._error is None and self._run is not None:
            try:
                self._run(piece, scratch)
            except BaseException as error:  # surfaces at `wait`; a worker must not end
                if isinstance(error, StorageError):  # frames refer to the tensors
                    error.__traceback__ = None
                    if error.__cause__ is not None:
                        error.__cause__.__traceback__ = None
                self._error = error

    def end(self) -> None:
        """Release its tensors and let `wait` return."""
        self._run = None
        self._over.set()


class Workers:
    """`num_threads` daemon threads for the transfers of one store."""

    def __init__(self, num_threads: int, scratch_bytes: int, *, pinned: bool) -> None:
        # a piece; (): open what is new; None: end
        self._jobs: queue.SimpleQueue[tuple[TierTransfer, DiskPiece] | tuple[()] | None]
        self._jobs, self._new = queue.SimpleQueue(), deque[TierTransfer]()
        self._lock = threading.Lock()  # not of `stop`, which the garbage collector may call
        self._num_open = 0  # transfers that were started and have not ended
        self._stopping = False
        self._threads: list[threading.Thread] = []
        for index in range(num_threads):
            job = (functools.cache(partial(Memory, scratch_bytes, pinned=pinned)),)
            name = f"zeroshard-disk-{index}"
            thread = threading.Thread(target=self._work, args=job, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, transfer: TierTransfer) -> None:
        """Start `transfer` once those under way beside it that it must wait for have ended."""
        assert not self._stopping, "the store is closed"
        self._new.append(transfer)
        self._jobs.put(())

    def _open_new(self) -> None:
        with self._lock:
            while self._new:
                transfer = self._new.popleft()
                self._num_open += 1
                blockers = [other for other in transfer.beside if transfer.conflicts(other)]
                for other in blockers:
                    other.followers.append(transfer)
                transfer.num_blockers = len(blockers)
                transfer.beside.append(transfer)
                if not blockers:
                    self._submit(transfer)
            self._end_threads()

    def wait_ends(self, transfers: list[TierTransfer]) -> None:
        """Wait for the end of every transfer that was started and is in a storage's list, or will
        be.
        """
        with self._lock:
            now = [*transfers, *(one for one in tuple(self._new) if one.beside is transfers)]
        for transfer in now:
            transfer.wait_end()

    def stop(self) -> None:
        """Let the threads end after the last transfer, waiting ones included."""
        self._stopping = True
        self._jobs.put(())

    def join(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _submit(self, transfer: TierTransfer) -> None:
        for piece in transfer.pieces:
            self._jobs.put((transfer, piece))

    def _work(self, scratch: Scratch) -> None:
        while (job := self._jobs.get()) is not None:
            if not job:
                self._open_new()
                continue
            transfer, piece = job
            transfer.attempt(piece, scratch)
            self._finish_piece(transfer)

    def _finish_piece(self, transfer: TierTransfer) -> None:
        with self._lock:
            transfer.num_left -= 1
            if transfer.num_left:
                return
            transfer.beside.remove(transfer)
            for follower in transfer.followers:
                follower.num_blockers -= 1
                if not follower.num_blockers:
                    self._submit(follower)
            transfer.followers = []
            self._num_open -= 1
            self._end_threads()
        transfer.end()

    def _end_threads(self) -> None:
        if self._stopping and not self._num_open:
            for _ in self._threads:
                self._jobs.put(None)
