"""Buffers between disk and computation: a bounded pool of memory that O_DIRECT accepts, used
again and again (ZeRO-Infinity, section 6.3).

    buffer = staging.tensor(numel, dtype)     1-D, aligned to the disk's block: a storage reads and
                                              writes it without a copy
    storage.read(a, b, buffer) ... storage.write(a, b, buffer) ...
    staging.give(buffer)                      it reads as NaN from here on; its memory is the next
                                              one's

A thread that finds the pool full waits until another one gives a buffer back. The thread that took
a buffer must give it back: then a deadlock (every lent buffer is held by a thread that waits for
more) is detected at once and raises StorageError.

Invariant: lent and idle memory is at most `limit_bytes`, except for one larger buffer that is lent
alone. At rest no tensor refers to the pool. Cost: sizes are rounded up to 4 KiB, and memory is used
again for the same size only. It does not queue fairly, and does not know of reads into a buffer
that is given back.
"""

from __future__ import annotations

import threading

import torch

from zeroshard.errors import StorageError
from zeroshard.memory import HUGE_BYTES, MemoryCounter, address_of, host_memory, to_placeholder
from zeroshard.tier.direct_io import BLOCK, round_up


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
