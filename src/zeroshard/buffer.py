"""One segment's flat weight buffer, at rest and gathered.

All parameters of a segment lie in one flat buffer (core/layout.py), so an all-gather writes the buffer as it is and nothing is copied in
or out. At rest only this rank's slice (``local``) holds memory; the full buffer keeps its *storage object* with size 0.

[Note: storage, not objects] Gathering resizes the same storage again instead of making a new tensor. Whatever autograd saved in forward
(the parameter, or a view of it such as ``weight.t()``) refers to that storage, so it is valid again in backward, however often the buffer
was released in between. Such a view must not be read while it is released: torch raises in some places and crashes in others. Parameters
themselves are guarded (runtime/released.py); a view taken by the user is valid as long as its unit stays gathered.

Where the transport maps the peers' memory (or there is no peer) the full buffer *is* the resting shards: gathering moves nothing. Weights that
rest on another tier have no window: each rank reads its own slice alone into its place in the full buffer (ZeRO-Infinity, section 6.1, bandwidth-
centric partitioning), and the slices meet on the wire from there.

Invariant: ``full`` may be read only between ``to(REPLICATE)``'s wait and ``release()``. Cost: ``numel * itemsize`` bytes while gathered.
It does not know modules, parameters or autograd; those are runtime/unit.py's.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from zeroshard.comm.transport import Transport, Window, Work
from zeroshard.core.layout import Layout
from zeroshard.core.placement import Placement
from zeroshard.errors import StorageError
from zeroshard.tier.shelf import Shelf

__all__ = ["FlatBuffer", "Flight", "Lanes", "Meter", "PagePool", "Trimmer", "poison_value", "return_freed_memory"]

_HUGE_BYTES = 2 * 2**20  # below this the allocator's own free lists serve as well
_HAS_ADVICE = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_FREE")


class Lanes(Protocol):
    """What a buffer says about streams (runtime/streams.py implements it; see there)."""

    def fork(self, lane: Literal["gather", "reduce"]) -> None: ...

    def on(self, lane: Literal["gather", "reduce"]) -> AbstractContextManager[None]: ...

    def mark(self, lane: Literal["gather", "reduce"]) -> Any: ...

    def join(self, event: Any) -> None: ...

    def alloc(self, buffer: Hashable) -> None: ...

    def free(self, buffer: Hashable) -> None: ...

    def read(self, buffer: Hashable) -> None: ...

    def write(self, buffer: Hashable) -> None: ...


class PagePool:
    """Large uninitialised CPU tensors on pages that are used again, step after step; other tensors are plain ones.

    Measured on 200 MB: a copy takes 9 ms into warm pages, 18 into fresh huge ones (and 60 more where memory is fragmented), 87 into fresh
    4 KiB ones. Pages go back to the pool when the last view of their tensor dies, and from there the kernel may take them at any moment
    (MADV_FREE): under pressure they cost no memory, without it they still count as resident. Without such pages, nothing is pooled.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}  # by size

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised 1-D tensor."""
        num_bytes = numel * dtype.itemsize
        if device.type != "cpu" or num_bytes < _HUGE_BYTES or not _HAS_ADVICE:
            return torch.empty(numel, dtype=dtype, device=device)
        idle = self._idle.setdefault(num_bytes, [])
        if idle:
            pages = idle.pop()
        else:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_HUGEPAGE)
        lent = memoryview(pages)  # dies with the tensor's storage
        weakref.finalize(lent, _take_back, weakref.ref(self), pages).atexit = False
        return torch.frombuffer(lent, dtype=dtype)

    def take_back(self, pages: mmap.mmap) -> None:
        pages.madvise(mmap.MADV_FREE)
        self._idle.setdefault(len(pages), []).append(pages)

    def clear(self) -> None:
        """Give the idle pages back to the system."""
        self._idle.clear()


def _take_back(pool: weakref.ref[PagePool], pages: mmap.mmap) -> None:
    alive = pool()
    if alive is not None:
        alive.take_back(pages)


def return_freed_memory() -> None:
    """Let the allocator give freed pages back to the system: glibc keeps what is below 32 MB, and small objects soon lie between."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Trimmer:
    """Lets the allocator give freed pages back each time that `every_bytes` of temporaries have come and gone (None: never).

    What rests on disk is meant to leave memory, but glibc keeps what is freed below 32 MB and finds its own holes too small for aligned memory:
    measured, a step on disk of 250 million parameters left 850 MB behind. A trim takes about 5 ms there, the pages are touched anew afterwards.
    """

    def __init__(self, every_bytes: int | None) -> None:
        self._every_bytes = every_bytes
        self._passed = 0

    def passed(self, num_bytes: int) -> None:
        """Count `num_bytes` of temporaries that are no longer needed."""
        if self._every_bytes is None:
            return
        self._passed += num_bytes
        if self._passed >= self._every_bytes:
            self._passed = 0
            return_freed_memory()


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """Return what a released parameter reads as: NaN, or the largest value of a dtype that has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


class Meter:
    """Bytes that the engine holds beyond what rests, and their peak."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0

    def add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def remove(self, num_bytes: int) -> None:
        self.live -= num_bytes
        assert self.live >= 0, self.live


class Flight:
    """Works under way and the event after which compute may use their results."""

    __slots__ = ("_event", "_streams", "_works")

    def __init__(self, works: Sequence[Work], streams: Lanes, event: object) -> None:
        self._works = list(works)
        self._streams = streams
        self._event = event

    def wait(self) -> None:
        """Return when the results may be used on compute. Idempotent; a wait that raised may be tried again."""
        for work in self._works:
            work.wait()
        self._works = []
        if self._event is not None:
            self._streams.join(self._event)
            self._event = None

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def push(self) -> None:
        """Go on with what has a second stage, at a time that is the same on every rank."""
        for work in self._works:
            if isinstance(work, _Bringing):
                work.push()

    def abandon(self) -> None:
        """Return when nothing writes to the buffers any more; the transport has forgotten its part."""
        for work in self._works:
            if isinstance(work, _Bringing):
                work.abandon()
        self._works = []


class _Bringing:
    """A gather from another tier: our slice is read, then (`push`) the slices meet on the wire.

    Reads may end in any order; the wire wants the same order on every rank, so the second stage waits to be pushed. Where a read has failed the
    slice is NaN (runtime/faults.py): the other ranks wait for it.
    """

    def __init__(self, buffer: FlatBuffer, streams: Lanes, reads: Sequence[Work]) -> None:
        self._buffer = buffer
        self._streams = streams
        self._reads = list(reads)
        self._meeting: Work | None = None
        self._event: object = None

    def push(self) -> None:
        if self._meeting is not None:
            return
        with self._streams.on("gather"):
            error = self._settle()
            if error is not None:
                self._buffer.lose(error)
            self._streams.write(self._buffer.key)
            self._meeting = self._buffer.meet()
            if self._buffer.full.device.type != "cpu":
                self._meeting.wait()  # enqueues
            self._event = self._streams.mark("gather")

    def wait(self) -> None:
        self.push()
        assert self._meeting is not None
        self._meeting.wait()
        if self._event is not None:
            self._streams.join(self._event)
            self._event = None

    def _settle(self) -> StorageError | None:
        """Wait for all reads, whether they fail or not; return the first error."""
        failure: StorageError | None = None
        for read in self._reads:
            try:
                read.wait()
            except StorageError as error:
                failure = failure or error
        return failure

    def abandon(self) -> None:
        self._settle()

    def done(self) -> bool:
        return self._meeting is not None and self._meeting.done()


def gather(buffers: Sequence[FlatBuffer], streams: Lanes, *, fork: bool = True) -> Flight:
    """Start gathering `buffers` together: one wait for compute before, one event after.

    `fork` False leaves the wait out: the caller has forked since the last access on compute.
    """
    for buffer in buffers:
        buffer.take_memory()
    if all(buffer.is_local for buffer in buffers):
        return Flight([buffer.gather_here() for buffer in buffers], streams, None)
    if fork:
        streams.fork("gather")
    with streams.on("gather"):
        works = [buffer.gather_here() for buffer in buffers]
        event = None if all(buffer.rests_elsewhere for buffer in buffers) else streams.mark("gather")  # those mark their own
    return Flight(works, streams, event)


def _raise(error: StorageError, *, lost: bool = False) -> None:
    raise error


class FlatBuffer:
    """The weights of one segment."""

    def __init__(
        self,
        key: str,
        layout: Layout,
        strides: Sequence[tuple[int, ...]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        transport: Transport,
        replicated: bool,
        streams: Lanes,
        meter: Meter,
        rest: Shelf | None = None,
        note: Callable[..., None] = _raise,
    ) -> None:
        self.key = key
        self.note = note  # takes the StorageErrors of what rests on another tier: Faults.note
        self.layout = layout
        self.dtype = dtype
        self.replicated = replicated
        self._streams = streams
        self._meter = meter
        self._device = device
        self._transport = transport
        self.window: Window | None = None
        if rest is None:
            self.window = transport.window(key, layout.ranges, dtype, device, replicated=replicated)
            rest = Shelf(self.window.local)
        self.local = rest  # this rank's weights at rest
        full = None if self.window is None else self.window.full
        self._owns_full = full is None
        self.full = torch.empty(layout.numel, dtype=dtype, device=device) if full is None else full
        self.views = [self._view_of(self.full, i, strides[i]) for i in range(len(layout.slots))]
        self.strides = tuple(strides)
        if self._owns_full:
            self.full.untyped_storage().resize_(0)

    def _view_of(self, flat: torch.Tensor, index: int, stride: tuple[int, ...]) -> torch.Tensor:
        slot = self.layout.slots[index]
        return flat[slot.offset : slot.stop].as_strided(slot.shape, stride, slot.offset + flat.storage_offset())

    def view_in(self, part: torch.Tensor, index: int) -> torch.Tensor:
        """Return parameter `index` [its shape] as a view of `part`, its own elements alone."""
        return part.as_strided(self.layout.slots[index].shape, self.strides[index], part.storage_offset())

    def view(self, index: int) -> torch.Tensor:
        """Return parameter `index` [its shape] inside the full buffer; readable only while gathered."""
        return self.views[index]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return every parameter as a view of `flat` [numel], laid out as this buffer is."""
        return [self._view_of(flat, i, stride) for i, stride in enumerate(self.strides)]

    @property
    def full_bytes(self) -> int:
        """Bytes that gathering takes beyond what rests."""
        return self.layout.numel * self.dtype.itemsize if self._owns_full else 0

    @property
    def rest_bytes(self) -> int:
        """Bytes of this rank's weights at rest."""
        numel = self.layout.numel if self.replicated else self.local.numel
        return numel * self.dtype.itemsize

    @property
    def rest_name(self) -> str:
        """What streams call the memory at rest: the full buffer itself where it stays here."""
        return f"{self.key}.local" if self._owns_full else self.key

    @property
    def is_local(self) -> bool:
        """Whether gathering moves nothing (mapped memory or a single rank)."""
        return self.window is not None and self.window.aliased

    @property
    def own(self) -> slice:
        """Where this rank's share lies in the full buffer."""
        return slice(*self.layout.ranges[self._transport.rank])

    @property
    def rests_elsewhere(self) -> bool:
        """Whether the weights rest on another tier than the device, so that ranks gather them in step."""
        return self.window is None

    def to(self, placement: Placement) -> Flight:
        """Start moving to `placement`: REPLICATE gathers (valid after the flight's wait), SHARD releases."""
        if placement is Placement.SHARD:
            self.release()
            return Flight([], self._streams, None)
        assert placement is Placement.REPLICATE, placement
        return gather([self], self._streams)

    def take_memory(self) -> None:
        """Take the memory of the full buffer, on compute."""
        if self._owns_full:
            self.full.untyped_storage().resize_(self.layout.numel * self.dtype.itemsize)
            self._meter.add(self.full_bytes)
            self._streams.alloc(self.key)

    def gather_here(self) -> Work:
        """Start the all-gather on the current lane, into memory that has been taken."""
        if self.window is None:
            self._streams.write(self.key)
            return _Bringing(self, self._streams, self._read_here())
        if self.is_local:
            return self.window.gather()
        self._streams.read(self.rest_name)
        self._streams.write(self.key)
        work = self.window.gather(self.full)
        if self._device.type != "cpu":
            work.wait()  # enqueues; the lane's next event then comes after the collective
        return work

    def _read_here(self) -> list[Work]:
        try:
            return self.local.read(0, self.local.numel, self.full[self.own])
        except StorageError as error:
            self.lose(error)
            return []

    def lose(self, error: StorageError) -> None:
        """Our slice could not be read: go on without."""
        self.note(error)
        self.full[self.own].fill_(poison_value(self.dtype))

    def meet(self) -> Work:
        """Start the all-gather of the slices that have been read into the full buffer."""
        return self._transport.all_gather(f"{self.key}.weight", self.full[self.own], self.layout.ranges, self.full)

    def publish(self) -> None:
        """Say that our slice is written and may be read."""
        if self.window is not None:
            self.window.publish()

    def release(self) -> None:
        """Give the gathered memory back; the caller has waited for the flight and is done reading."""
        if self._owns_full:
            self._streams.free(self.key)
            self._meter.remove(self.full_bytes)
            self.full.untyped_storage().resize_(0)
