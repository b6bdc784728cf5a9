"""Memory that is not at rest: where it comes from, who counts it, and what stands for numbers that
lie elsewhere.

    host_memory()     pages of the host, aligned, pinned beside an accelerator
    bounce_buffer()   what travels between the two
    Pool              flat tensors that are lent and come back; at most `limit_bytes` of them
    Pages             large CPU tensors; their pages are used again when the last view dies
    MemoryCounter     bytes that are live, and their peak
    placeholder()     one NaN, expanded to a shape
    Trimmer           gives what the allocator keeps back to the system
    storage_of()      the storage behind a tensor, whatever mode or subclass is around it

None of them knows a rank, a unit or a state.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.memory.host_pages import HUGE_BYTES, PinnedPages, map_pages
from zeroshard.system.device import Device

__all__ = [
    "HUGE_BYTES", "Loan", "Mark", "MemoryCounter", "Pages", "Pool", "Trimmer", "address_of",
    "bounce_buffer", "cast_for", "drain", "has_streams", "heap_bytes", "host_memory", "mark",
    "note_copy", "order_after", "pinned_pages", "placeholder", "placeholder_value", "reads_wait",
    "return_freed_memory", "storage_of", "synchronize", "to_placeholder",
]  # fmt: skip

_HAS_ADVICE = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_FREE")


# --------------------------------------------------------------------------------- where it is from


def host_memory(num_bytes: int, *, pinned: bool = False, align: int = 1) -> memoryview:
    """Return `num_bytes` bytes of host memory that start on a multiple of `align`; they live as
    long as the view, or a slice of it, does.

    Pages are anonymous and private, huge from 2 MiB on (disks are then handed fewer, longer
    segments: measured with O_DIRECT, reads 1.28 times as fast, writes 1.15). `pinned`: locked, for
    an accelerator, these bytes and no more (host_pages.py). Raises OSError, RuntimeError or
    ValueError where there is none.
    """
    if not num_bytes:
        return memoryview(bytearray())
    # what aligning skips is never touched; a mapping starts on a page
    size = num_bytes + (align if align > mmap.PAGESIZE else 0)
    pages = pinned_pages() if pinned else None
    view = None if pages is None else pages.take(size)
    if view is None and pinned:
        array: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        view = memoryview(array)
    elif view is None:
        view = memoryview(map_pages(size))
    start = -address_of(view) % align
    return view[start : start + num_bytes]


@functools.cache
def pinned_pages() -> PinnedPages | None:
    """Return the pinned pages of this process; None where no driver registers any."""
    accelerator = Device.accelerator()
    register = None if accelerator is None else accelerator.host_register()
    return None if register is None else PinnedPages(register)


def note_copy(tensor: torch.Tensor, copy: Mark) -> None:
    """Keep the host memory of `tensor`, if that is pinned, until a `copy` from or to it is over."""
    pages = pinned_pages()
    if pages is not None:
        pages.note(tensor, copy)


def address_of(view: memoryview) -> int:
    """Return where `view`, which is not empty, begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


# -------------------------------------------------------------------------------------------- pools


class Mark:
    """A place in the order of a device's stream: after everything that the stream which is current
    on `device` has been given. The current device may be another one.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._event: Any = self._module.Event()
        self._event.record(self._module.current_stream(device))

    def wait(self, stream: Any = None) -> None:
        """Make `stream` (None: the current one of the device) wait until it is reached."""
        self._event.wait(self._module.current_stream(self._device) if stream is None else stream)

    def done(self) -> bool:
        """Whether it is reached."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Make the host wait until it is reached."""
        self._event.synchronize()


@functools.cache  # asked for each buffer
def has_streams(device: torch.device) -> bool:
    """Whether work on `device` is enqueued on streams."""
    return device.type != "cpu" and Device.of(device).has_streams


def mark(device: torch.device) -> Mark | None:
    """Return a mark; None on a device without streams, where all is in program order."""
    return Mark(device) if has_streams(device) else None


def synchronize(device: torch.device) -> None:
    """Make the host wait until `device` has done all that it was given; at once on the CPU."""
    Device.of(device).synchronize()


def drain(device: torch.device) -> None:
    """Make the host wait for the current stream of `device`; at once without streams."""
    if (reached := mark(device)) is not None:
        reached.synchronize()


def order_after(event: Mark | None) -> None:
    """Make the current stream of the mark's device wait for it."""
    if event is not None:
        event.wait()


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer of a pool."""

    data: torch.Tensor  # uint8
    num_bytes: int
    home: Any  # the stream with the allocator to which it returns; None without streams
    lent: torch.Tensor  # of `data`, as it was lent last: lent again where the same is asked for
    last_use: Mark | None = None  # before which nobody else may write to it

    @classmethod
    def make(cls, num_bytes: int, device: torch.device) -> _Buffer:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        home = Device.of(device).current_stream() if has_streams(device) else None
        return cls(data, num_bytes, home, data)


class Pool:
    """Flat tensors that are lent and come back. Temporaries are reused, since the first touch of
    fresh pages costs more than the copy.

    Lent and idle together stay within `limit_bytes` (None: twice the largest asked for), except
    that what is lent is never refused. Whoever takes a buffer is ordered after whoever gave it
    back, by an event: the two may be on different streams.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._largest_bytes = 0
        self._idle: list[_Buffer] = []
        self._lent: dict[int, _Buffer] = {}  # by address
        self._lent_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether `take` would stay within the limit."""
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        return not self._lent or self._lent_bytes + num_bytes <= self._limit

    @property
    def _limit(self) -> int:
        return 2 * self._largest_bytes if self._limit_bytes is None else self._limit_bytes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an undefined tensor [numel], the caller's until `give`: of the smallest idle
        buffer that fits. One that a lane may still use makes the caller wait, and is the last
        choice, after a new one within the limit. Idle buffers that no longer fit it are freed.
        """
        wanted = numel * dtype.itemsize
        num_bytes = max(wanted, 64)
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        best: _Buffer | None = None
        pending: _Buffer | None = None
        for buffer in self._idle:
            if buffer.num_bytes < num_bytes or buffer.data.device != device:
                continue
            if not (buffer.last_use is None or buffer.last_use.done()):
                pending = pending or buffer  # the oldest
            elif best is None or buffer.num_bytes < best.num_bytes:
                best = buffer
        if best is None and pending is not None and self._excess(num_bytes) > 0:
            best = pending
        if best is None:
            excess = self._excess(num_bytes)
            while self._idle and excess > 0:
                buffer = self._idle.pop(0)
                if buffer.last_use is not None:
                    buffer.last_use.wait(buffer.home)  # its allocator may give it away at once
                excess -= buffer.num_bytes
            best = _Buffer.make(num_bytes, device)
        else:
            self._idle.remove(best)
            if best.last_use is not None:
                order_after(best.last_use)
        self._lent[best.data.data_ptr()] = best
        self._lent_bytes += best.num_bytes
        if best.lent.dtype is not dtype or best.lent.numel() != numel:
            best.lent = best.data[:wanted].view(dtype)
        return best.lent

    def _excess(self, num_bytes: int) -> int:
        """Return by how many bytes another buffer of `num_bytes` would exceed the limit."""
        idle_bytes = sum(buffer.num_bytes for buffer in self._idle)
        return self._lent_bytes + idle_bytes + num_bytes - self._limit

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what `take` returned. What was lent before `clear` is ignored."""
        # an empty tensor has no address of its own
        buffer = self._lent.pop(tensor.untyped_storage().data_ptr(), None)
        if buffer is not None:
            self._lent_bytes -= buffer.num_bytes
            buffer.last_use = mark(tensor.device)
            self._idle.append(buffer)

    def take_back(self) -> None:
        """Take back all that is lent, after an exception: nobody gives what was under way."""
        for buffer in [*self._lent.values()]:
            self.give(buffer.data)

    def clear(self) -> None:
        """Forget everything."""
        self._idle.clear()
        self._lent.clear()
        self._lent_bytes = 0


def reads_wait(tensor: torch.Tensor) -> bool:
    """Whether the host waits for a device when it reads `tensor`."""
    return tensor.device.type != "cpu"


def bounce_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return undefined host memory [numel] for what goes to or comes from `device`: pinned where
    that is an accelerator: else copies would be ten times as slow and make the host wait. Pinned
    memory is lent again when its last tensor has died and its copies are over.
    """
    if device.type == "cpu" or not numel:
        return torch.empty(numel, dtype=dtype)
    pages = pinned_pages()
    view = None if pages is None else pages.lend(numel * dtype.itemsize)
    if view is None:
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    return torch.frombuffer(view, dtype=dtype, count=numel)


def cast_for(
    target: torch.Tensor, source: torch.Tensor, dtype: torch.dtype, *, copy: bool
) -> torch.Tensor:
    """Return `source` [numel] in `dtype`, in memory from which it goes to where `target` is;
    `copy`: never `source` itself.
    """
    if reads_wait(source) == reads_wait(target):
        return source.to(dtype, copy=copy)
    return bounce_buffer(source.numel(), dtype, target.device).copy_(source)


class Pages:
    """Large uninitialised CPU tensors on pages that are used again, step after step; other
    tensors are plain ones.

    Measured on 200 MB: a copy takes 9 ms into warm pages, 18 into fresh huge ones (and 60 more
    where memory is fragmented), 87 into fresh 4 KiB ones. Pages come back when the last view of
    their tensor dies, and from there the kernel may take them at any moment (MADV_FREE): under
    pressure they cost no memory, without it they still count as resident. On systems without that
    advice, nothing is kept. Not `yielding`, pages stay ours while they are idle: a disk may write
    to them past the page cache, which before Linux 5.18 did not take back what was given away.
    """

    def __init__(self, *, yielding: bool = True) -> None:
        self._idle: dict[int, list[mmap.mmap]] = {}  # by size
        self._yielding = yielding

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised 1-D tensor."""
        num_bytes = numel * dtype.itemsize
        if device.type != "cpu" or num_bytes < HUGE_BYTES or not _HAS_ADVICE:
            return torch.empty(numel, dtype=dtype, device=device)
        idle = self._idle.setdefault(num_bytes, [])
        pages = idle.pop() if idle else map_pages(num_bytes)
        lent = memoryview(pages)  # dies with the tensor's storage
        weakref.finalize(lent, _take_back, weakref.ref(self), pages).atexit = False
        return torch.frombuffer(lent, dtype=dtype)

    def clear(self) -> None:
        """Give the idle pages back to the system."""
        self._idle.clear()


def _take_back(pool: weakref.ref[Pages], pages: mmap.mmap) -> None:
    """Keep `pages` for the next borrower; the kernel may take their memory meanwhile."""
    if (alive := pool()) is not None:
        if alive._yielding:
            pages.madvise(mmap.MADV_FREE)
        alive._idle.setdefault(len(pages), []).append(pages)


# ----------------------------------------------------------------------------------------- counting


@dataclass(slots=True, eq=False)
class Loan:
    """A buffer of a pool, counted until `MemoryCounter.end_loan`."""

    at: int  # its address
    num_bytes: int
    lent_again: bool = False  # the pool has lent its memory to somebody else meanwhile


class MemoryCounter:
    """Bytes that are live, and the most that ever were.

    A pool may lend a buffer anew before the reduce that it was lent for has ended. When it does so
    is a matter of time, and differs between ranks; `live`, by which gathers ahead are decided, must
    not. So `live` counts such memory for both, and `peak` once.
    """

    __slots__ = ("_lent", "_loans", "_twice", "live", "peak")

    def __init__(self) -> None:
        self.peak = 0
        self.reset()

    def reset(self) -> None:
        """After an exception, perhaps between memory and its count: nothing is live or lent."""
        self.live = 0
        self._twice = 0  # bytes of loans that have been lent again
        self._loans: dict[int, Loan] = {}  # by address
        self._lent: set[Loan] = set()  # those and the ones that have been lent again

    @property
    def used(self) -> int:
        """Bytes that are live now, memory that was lent twice counted once."""
        return self.live - self._twice

    def add(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes as live."""
        self.live += num_bytes
        self.peak = max(self.peak, self.live - self._twice)

    def remove(self, num_bytes: int) -> None:
        """Count `num_bytes` fewer bytes as live."""
        self.live -= num_bytes
        assert self.live >= 0, self.live

    def lend(self, buffer: torch.Tensor, num_bytes: int) -> Loan:
        """Count `num_bytes` bytes of `buffer`."""
        loan = Loan(buffer.data_ptr(), num_bytes)
        before = self._loans.get(loan.at)
        if before is not None:
            before.lent_again = True
            self._twice += before.num_bytes
        self._loans[loan.at] = loan
        self._lent.add(loan)
        self.live += num_bytes
        self.peak = max(self.peak, self.live - self._twice)
        return loan

    def end_loan(self, loan: Loan | None) -> None:
        """Count `loan` no longer."""
        if loan is None or loan not in self._lent:
            return
        self._lent.remove(loan)
        if loan.lent_again:
            self._twice -= loan.num_bytes
        else:
            del self._loans[loan.at]
        self.live -= loan.num_bytes


# ------------------------------------------------------------------------------------- placeholders


def placeholder_value(dtype: torch.dtype) -> float | int | bool:
    """Return what a placeholder reads as: NaN, or the largest value of a dtype that has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


@functools.cache
def _one(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    one = torch.full((1,), float("nan") if dtype.is_floating_point else 0, dtype=torch.float32)
    return one.to(device, dtype)


def placeholder(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return what stands for numbers that rest elsewhere: one NaN (zero in dtypes without),
    expanded to `shape`. Reading it gives no stale number.
    """
    return _one(dtype, torch.device(device)).expand(shape)


def to_placeholder(tensor: torch.Tensor) -> None:
    """Let a CPU `tensor` refer to a placeholder instead of its memory; its shape stays."""
    tensor.data = placeholder(tensor.shape, tensor.dtype)


# ----------------------------------------------------------------------------- the allocator's heap


def return_freed_memory() -> None:
    """Let the allocator give freed pages back to the system: glibc keeps what is below 32 MB,
    and small objects soon lie between.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _HeapFigures(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_bytes() -> tuple[int, int]:
    """Return the bytes of the allocator's heap that are in use, and all of it; 0, 0 where it does
    not say. Cost: 0.1 ms.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0, 0
    ask.restype = _HeapFigures
    found = ask()
    return found.uordblks, found.arena


_LOOKS = 8  # at the heap, for every time that it may be trimmed


class Trimmer:
    """Lets the allocator give freed pages back when `every_bytes` of temporaries have come and gone
    (None: never) and the heap has grown past one and a half times the most that was in use.

    What rests on disk is meant to leave memory, but glibc keeps what is freed below 32 MB and finds
    its own holes too small for aligned memory: measured, a step on disk of 250 million parameters
    left 850 MB behind. A trim takes about 5 ms there, and activations touch their pages anew
    afterwards, which took a tenth of a step on the CPU: so none for what the next pass uses again.
    """

    def __init__(self, every_bytes: int | None) -> None:
        self._every_bytes = every_bytes
        self.is_on = every_bytes is not None
        self._passed = self._unseen = self._most_used = 0

    def passed(self, num_bytes: int) -> None:
        """Count `num_bytes` of temporaries that are no longer needed."""
        if self._every_bytes is None:
            return
        self._passed += num_bytes
        self._unseen += num_bytes
        if self._unseen < self._every_bytes // _LOOKS:
            return
        self._unseen = 0
        used, size = heap_bytes()
        self._most_used = max(self._most_used, used)
        is_large = size >= 1.5 * self._most_used + self._every_bytes or not size
        if self._passed >= self._every_bytes and is_large:
            self._passed = 0
            return_freed_memory()


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a dense tensor, unseen by guards and modes; None where it has none."""
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage() if tensor.layout is torch.strided else None
        except (NotImplementedError, RuntimeError):  # tensors that wrap others
            return None
