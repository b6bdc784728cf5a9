"""Pages of the host, and those that an accelerator copies from and to.

torch's own pinned allocator rounds up to powers of two. Here a mapping has the bytes asked for, is
touched first by threads of this rank, so that it lies on their NUMA node, and is locked in place by
the accelerator's driver (system/device.py); torch calls it pinned from then on::

    take    map, touch, register                    numbers at rest
    lend    the same, or what was lent before       numbers that travel

Invariant: as with torch's allocator, pages are unregistered or lent again only when their last
view has died and the copies that `note` was told of are over; the host waits before it unregisters.
Each mapping is registered once and unregistered once, before it is unmapped, and none shares a page
with another. What is kept for lending is never more than was in use at one time.

A forked child finds zeros there: a fork would copy pages that are locked. Cost: whole pages of
4 KiB, huge ones from 2 MiB on.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

HUGE_BYTES = 2 * 2**20  # a huge page; below it the allocator's own free lists serve as well
REFUSED = (
    "%d bytes of host memory could not be registered with the accelerator's driver (%s; the limit"
    " of locked memory, RLIMIT_MEMLOCK, is %s): torch's pinned allocator serves from here on, which"
    " rounds up to powers of two"
)
_log = logging.getLogger(__name__)
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which Python does not name


def map_pages(num_bytes: int) -> mmap.mmap:
    """Map `num_bytes` of anonymous private memory, in huge pages where it is large. Raises OSError
    or ValueError.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class HostRegister(Protocol):
    """The driver that locks pages of the host for an accelerator."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock `num_bytes` from `address` on. Raises RuntimeError where the driver refuses."""

    def unregister(self, address: int) -> None:
        """Unlock what was registered at `address`. Raises RuntimeError."""


class Copy(Protocol):
    """A copy that was enqueued."""

    def done(self) -> bool:
        """Whether it is over."""

    def synchronize(self) -> None:
        """Make the host wait until it is over."""


@dataclass(eq=False)
class _Block:
    """A mapping that is registered."""

    pages: mmap.mmap
    address: int
    num_bytes: int
    copies: list[Copy] = field(default_factory=list)  # from or to it, perhaps under way

    @property
    def is_free(self) -> bool:
        self.copies = [copy for copy in self.copies if not copy.done()]
        return not self.copies


class PinnedPages:
    """The registered mappings of this process."""

    def __init__(self, register: HostRegister) -> None:
        self._register = register
        self._is_refused = False
        self._process = os.getpid()
        self._lock = threading.RLock()  # a view may die in the thread that holds it
        self._blocks: dict[int, _Block] = {}  # by address
        self._addresses: tuple[int, ...] = ()  # sorted
        self._idle: list[_Block] = []  # to be lent, the longest idle first
        self._lent_bytes = 0
        self._most_bytes = 0  # lent, or still copied from or to, at one time

    def take(self, num_bytes: int) -> memoryview | None:
        """Return pinned memory of this size, unregistered when its last view dies; None where the
        driver has refused, which is logged once. Raises OSError or ValueError.
        """
        block = self._map(num_bytes)
        return None if block is None else self._view(block, self._release)

    def lend(self, num_bytes: int) -> memoryview | None:
        """Return pinned memory of at least this size, kept for the next borrower when its last view
        dies; None as for `take`.
        """
        num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            fits = [block for block in self._idle if block.num_bytes >= num_bytes and block.is_free]
            # the smallest that fits; of twice the size or more only where no other has room
            block = min(fits, key=lambda block: block.num_bytes, default=None)
            has_room = self._kept_bytes + num_bytes <= self._most_bytes
            if block is None or (block.num_bytes >= 2 * num_bytes and has_room):
                self._trim(num_bytes)
                block = self._map(num_bytes)
            else:
                self._idle.remove(block)
            if block is None:
                return None
            self._lent_bytes += block.num_bytes
        return self._view(block, self._keep)

    def note(self, tensor: torch.Tensor, copy: Copy) -> None:
        """Take note of a `copy` from or to `tensor`, if that lies in pages from here."""
        address = tensor.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._addresses, address) - 1
            block = self._blocks.get(self._addresses[index]) if index >= 0 else None
            if block is not None and address < block.address + block.num_bytes:
                block.copies = [*(other for other in block.copies if not other.done()), copy]

    # ------------------------------------------------------------------ mappings

    def _map(self, num_bytes: int) -> _Block | None:
        if self._is_refused:
            return None
        pages = map_pages(num_bytes)
        pages.madvise(_WIPE_ON_FORK)
        numbers = torch.frombuffer(pages, dtype=torch.uint8)
        numbers[:: mmap.PAGESIZE].zero_()
        block = _Block(pages, numbers.data_ptr(), num_bytes)
        try:
            self._register.register(block.address, num_bytes)
        except RuntimeError as error:
            self._is_refused = True
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            unlimited = limit == resource.RLIM_INFINITY
            _log.warning(REFUSED, num_bytes, error, "unlimited" if unlimited else f"{limit} bytes")
            return None
        with self._lock:
            self._blocks[block.address] = block
            self._addresses = tuple(sorted(self._blocks))
        return block

    def _view(self, block: _Block, end: Callable[[_Block], None]) -> memoryview:
        """Return the memory of `block`; `end` takes it over when no slice of that is left."""
        owner = (ctypes.c_ubyte * block.num_bytes).from_buffer(block.pages)
        weakref.finalize(owner, end, block).atexit = False
        return memoryview(owner).cast("B")

    def _release(self, block: _Block) -> None:
        if os.getpid() != self._process:
            return  # a forked child has registered nothing
        for copy in block.copies:
            copy.synchronize()
        with self._lock:
            del self._blocks[block.address]
            self._addresses = tuple(sorted(self._blocks))
        self._register.unregister(block.address)

    # ------------------------------------------------------------------ lending

    def _keep(self, block: _Block) -> None:
        with self._lock:
            self._lent_bytes -= block.num_bytes
            self._idle.append(block)

    @property
    def _kept_bytes(self) -> int:
        """Bytes that are lent or idle."""
        return self._lent_bytes + sum(block.num_bytes for block in self._idle)

    def _trim(self, num_bytes: int) -> None:
        """Release idle blocks for which there is no room beside `num_bytes` more."""
        free = [block for block in self._idle if block.is_free]
        in_use_bytes = self._kept_bytes - sum(block.num_bytes for block in free)
        self._most_bytes = max(self._most_bytes, in_use_bytes + num_bytes)
        excess = self._kept_bytes + num_bytes - self._most_bytes
        for block in free:
            if excess > 0:
                self._idle.remove(block)
                self._release(block)
                excess -= block.num_bytes
