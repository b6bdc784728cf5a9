"""A sanitizer of lanes: it sees every operation of a run as CUDA's streams would, without a GPU.

The engine reports nothing: a TorchDispatchMode takes the memory that each operation reads and
writes, collectives included, on the lane in force; forks, marks, joins, events and threads move
vector clocks (tests/support/pretended_device.py). Two kinds of finding::

    race    an operation touches memory that another lane has written (or written what another lane
            has read), and is not ordered after it
    drop    memory goes back to the allocator of its home lane, the one that it was allocated on,
            while another lane still uses it: the next allocation there may get it at once

Device and host are one memory here, and told apart so: the host's is what `host_memory` and
`bounce_buffer` give, what factories give that were told no `torch.device`, and results of
operations on it alone, which the thread itself runs, in the order of its program. An operation with
a tensor of the device runs on the lane in force; where it also has one of the host it is a copy,
for which the thread waits unless it is ``non_blocking``.

Invariant: the order is that of a CUDA run (``enqueues``): nothing here is waited for by the host
but where it says so. Memory that is pinned by torch (`bounce_buffer`) may be dropped under a copy:
torch's allocator keeps it. Cost: some 40 microseconds per operation. It knows byte ranges, not
strides: two interleaved views of one range count as overlapping. One engine at a time.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.pretended_device import PretendedDevice, Timeline, site_of_caller
from zeroshard import memory
from zeroshard.comm import codec, native_transport
from zeroshard.optim import runner
from zeroshard.runtime import finalize, segment, shelf
from zeroshard.runtime.streams import Event, Lane, Streams
from zeroshard.sharding import api
from zeroshard.state import gradient, norms
from zeroshard.tier import stores
from zeroshard.tier.store import Enqueued

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "randn")
# operations whose result the host waits for
_READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero")


@dataclass(frozen=True)
class Finding:
    """Something that is not ordered."""

    kind: str  # race, drop
    operation: str
    lane: str
    other: str  # the operation that it is not ordered after
    other_lane: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.operation} on {self.lane}, {self.other} on {self.other_lane}"


@dataclass(frozen=True)
class _Access:
    operation: str
    lane: str
    tick: int
    start: int
    stop: int
    writes: bool


@dataclass(eq=False)
class _Memory:
    """One storage, or a range of the host's memory: where it is from, and who has touched it."""

    home: str
    start: int = 0  # of a range of the host's memory: its address
    on_host: bool = False
    is_young: bool = False  # made by a factory, and not met with other memory: not sure yet
    is_kept: bool = False  # by its allocator, until lanes that use it have ended
    alive: weakref.ref[Any] | None = None
    accesses: list[_Access] = field(default_factory=list)


class _Operations(TorchDispatchMode):
    def __init__(self, sanitizer: LaneSanitizer) -> None:
        super().__init__()
        self._sanitizer = sanitizer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):  # else it touches no memory
            self._sanitizer.ran(func, args, kwargs or {}, out)
        return out


class _Streams(Streams):
    """Streams of the sanitizer: those of an engine, or, with a prefix, of an activation store."""

    enqueues = has_lanes = True

    def __init__(self, time: Timeline, prefix: str = "") -> None:
        super().__init__()
        self._time = time
        self._prefix = prefix

    def _name(self, lane: Lane) -> Any:
        return lane if lane == "compute" else self._prefix + lane

    def fork(self, lane: Lane) -> None:
        self._time.fork(self._name(lane))

    def on(self, lane: Lane) -> Any:
        return self._time.on(self._name(lane))

    def mark(self, lane: Lane) -> Event:
        return self._time.mark(self._name(lane))

    def join(self, event: Event, lane: Lane = "compute") -> None:
        self._time.join(event, lane)

    def drain(self) -> None:
        self._time.drain()


class LaneSanitizer(Timeline):
    """What watches the memory that operations touch, on the timeline of a device."""

    def __init__(self, *, drop: int | None = None, without: Collection[str] = ()) -> None:
        super().__init__(drop, without)
        self.findings: list[Finding] = []
        self.launches: list[str] = []  # operations on the device, in order
        self._memories: dict[int, _Memory] = {}  # by storage
        self._ranges: list[int] = []  # addresses of the host's memory, in order
        self._by_range: dict[int, tuple[int, _Memory]] = {}  # where each ends
        self._lock = threading.RLock()
        self._empty = torch.empty

    @property
    def num_operations(self) -> int:
        """How many operations the device was given."""
        return len(self.launches)

    # ------------------------------------------------------------------ what it stands in for

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Give every engine that is made inside the order of a device, and watch."""
        device = PretendedDevice(self, self._watch)
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, num_bytes: int) -> Any:
            self._resize(storage, num_bytes)
            resized = resize(storage, num_bytes)
            ctypes.memset(storage.data_ptr(), 0, num_bytes)
            return resized

        def scratch(of: codec.Codec, tensor: torch.Tensor) -> torch.Tensor:
            numel = codec._tile_numel(of, tensor) * 3 // 2
            return torch.empty(numel, device=tensor.device)  # the CPU's is kept, a device's new

        patches: list[tuple[Any, str, Any]] = [
            (torch, "get_device_module", lambda _: device),
            (torch.UntypedStorage, "resize_", resized),
            (api, "make_streams", lambda _: _Streams(self)),
            (shelf, "make_streams", lambda _: _Streams(self, "activation ")),
            (codec, "_scratch", scratch),
            (native_transport, "host_waits", lambda device: False),
            (stores, "host_memory", partial(self._host_memory, stores.host_memory)),
            (runner, "ThreadPoolExecutor", device.pool),
        ]
        _device_constructors()  # torch remembers what they are: not the ones patched here
        for name in _FACTORIES:
            patches.append((torch, name, partial(self._made, getattr(torch, name))))
        for name, stand_in in (("cpu", self._fetched), ("tolist", self._listed)):
            patches.append((torch.Tensor, name, _method(stand_in, getattr(torch.Tensor, name))))
        for module in (memory, segment):
            patches.append((module, "mark", memory.Mark))
        for module in (memory, gradient, norms, stores, codec, finalize):
            patches.append((module, "reads_wait", lambda tensor: not self.is_on_host(tensor)))
        for module in (memory, gradient):
            patches.append((module, "bounce_buffer", self._bounce_buffer))
        for module in (api, stores):
            patches.append((module, "link_of", Enqueued))
        for module in (runner, segment):
            patches.append((module, "threading", SimpleNamespace(Event=device.thread_event)))
        with ExitStack() as stack:
            for target, name, value in patches:
                stack.enter_context(mock.patch.object(target, name, value))
            stack.enter_context(self._watch())
            yield

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Watch this thread."""
        with _Operations(self):
            yield

    def _host_memory(
        self, original: Callable[..., memoryview], num_bytes: int, *, pinned: bool, align: int = 1
    ) -> memoryview:
        view = original(num_bytes, align=align)
        if num_bytes:
            start = memory.address_of(view)
            with self._lock:
                bisect.insort(self._ranges, start)
                known = _Memory("host", start, on_host=True)
                self._by_range[start] = (start + num_bytes, known)
            weakref.finalize(view.obj, self._unmapped, start).atexit = False
        return view

    def _unmapped(self, start: int) -> None:
        with self._lock:
            self._ranges.remove(start)
            _, known = self._by_range.pop(start)
            self._free(known, "the host's memory goes")

    def _bounce_buffer(self, numel: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        out = torch.empty(numel, dtype=dtype)
        with self._lock:
            if numel:
                self._memory_of(out).is_kept = True
        return out

    # ------------------------------------------------------------------ whose memory it is

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the host's memory."""
        with self._lock:
            return _span(tensor) is not None and self._memory_of(tensor).on_host

    def _made(self, factory: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Any:
        """Return what a factory makes: of a device where one is named as such."""
        outer = getattr(self._thread, "makes_host", False)
        makes_host = self._thread.makes_host = not isinstance(options.get("device"), torch.device)
        try:
            out = factory(*args, **options)
        finally:
            self._thread.makes_host = outer
        if factory is self._empty and out.numel() and not out.is_meta:
            ctypes.memset(out.data_ptr(), 0, out.nbytes)  # a fake collective leaves it as it is
        with self._lock:
            if makes_host and _span(out) is not None:
                self._give_to_host(self._memory_of(out))  # torch.tensor() is no operation
        return out

    def _fetched(self, original: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
        """``Tensor.cpu()``: a copy in the host's memory, which the host has waited for."""
        if _span(tensor) is None or self.is_on_host(tensor):
            return tensor
        out = tensor.detach().clone()
        with self._lock:
            found = self._memory_of(out)
            found.on_host, found.is_kept = True, True  # by the allocator of pinned memory
        self._read("cpu", tensor)
        return out

    def _listed(self, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """``Tensor.tolist()``, which is no operation on the CPU."""
        self._read("tolist", tensor)
        return original(tensor)

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        """The host reads a tensor of the device, and waits until it may."""
        if self.is_on_host(tensor):
            return
        with self._lock:
            self._begin(self.lane)
            self._access(name, tensor, self.lane, writes=False)
            self.host_waits_for(self.clocks[self.lane], name)

    def _give_to_host(self, found: _Memory) -> None:
        found.on_host, found.is_young, found.home = True, False, self.program
        found.accesses = []

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        place = bisect.bisect_right(self._ranges, tensor.data_ptr()) - 1
        if place >= 0:
            stop, known = self._by_range[self._ranges[place]]
            if tensor.data_ptr() < stop:
                return known
        return self._memory_in(tensor.untyped_storage())

    def _memory_in(self, storage: Any) -> _Memory:
        key = storage._cdata
        found = self._memories.get(key)
        if found is None or found.alive is None or found.alive() is None:
            alive = weakref.ref(storage, partial(self._died, key))
            found = self._memories[key] = _Memory(self.lane, alive=alive)
        return found

    # ------------------------------------------------------------------ what runs

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """An operation has been given to the device, or run by the host."""
        name = str(func)
        with self._lock:
            taken = [one for one in _tensors((args, kwargs)) if _span(one) is not None]
            made = [one for one in _tensors(out) if _span(one) is not None]
            inside = {id(one.untyped_storage()) for one in taken}
            fresh = [one for one in made if id(one.untyped_storage()) not in inside]
            if not taken and not fresh:
                return
            lane, crosses = self._settle(name, taken, fresh)
            self._begin(lane)
            written = {id(one) for one in _written(func, name, args, kwargs)}
            for tensor in taken:
                self._access(name, tensor, lane, writes=id(tensor) in written)
            for tensor in fresh:
                self._access(name, tensor, lane, writes=True)
            if lane != self.program:
                self.launches.append(name)
                waits = crosses and not _is_non_blocking(name, args, kwargs)
                if waits or name.startswith(_READS):
                    self.host_waits_for(self.clocks[lane], name)

    def _settle(
        self, name: str, taken: list[torch.Tensor], fresh: list[torch.Tensor]
    ) -> tuple[str, bool]:
        """Say whose memory all of it is; return the lane that the operation runs on, and whether it
        takes numbers from the host to the device or back.
        """
        known = {id(one): self._memory_of(one) for one in taken}
        settled = [known[id(one)] for one in taken if not known[id(one)].is_young]
        at_host = bool(settled) and all(one.on_host for one in settled)
        if at_host and name.startswith(("aten.copy_", "aten._foreach_copy_")):
            at_host = len(settled) == len(taken)  # from the host into new memory of the device
        if not taken:
            at_host = bool(getattr(self._thread, "makes_host", False))
        for one in taken:
            found = known[id(one)]
            if found.is_young and at_host:
                self._give_to_host(found)
            elif settled:
                found.is_young = False
        for one in fresh:
            found = self._memory_of(one)
            found.is_young = not taken
            if at_host:
                self._give_to_host(found)
        crosses = any(known[id(one)].on_host and one.dim() for one in taken)
        return (self.program if at_host else self.lane), crosses and not at_host

    def _begin(self, lane: str) -> None:
        """Whatever this thread has done comes before what it gives `lane` now."""
        if lane != self.program:
            self.order(lane, self.clocks[self.program])
        self.clocks[lane][lane] += 1

    def _access(self, name: str, tensor: torch.Tensor, lane: str, *, writes: bool) -> None:
        span = _span(tensor)
        if span is None:
            return
        found = self._memory_of(tensor)
        if found.start:
            begin = tensor.data_ptr() - found.start
            span = begin, begin + span[1] - span[0]
        own = self.clocks[lane]
        access = _Access(name, lane, own[lane], *span, writes)
        kept = []
        for other in found.accesses:
            meets = other.start < access.stop and access.start < other.stop
            if meets and (writes or other.writes) and own[other.lane] < other.tick:
                self._find("race", name, lane, other)
            covered = (
                access.start <= other.start
                and other.stop <= access.stop
                and own[other.lane] >= other.tick
                and (writes or not other.writes)
            )
            if not covered:  # whoever comes after `access` comes after it
                kept.append(other)
        found.accesses = [*kept, access]

    # ------------------------------------------------------------------ what goes

    def _died(self, key: int, reference: object) -> None:
        with self._lock:
            found = self._memories.get(key)
            if found is not None and found.alive is reference:
                del self._memories[key]
                self._free(found, "the last reference goes")

    def _resize(self, storage: Any, num_bytes: int) -> None:
        if not storage.nbytes() and not num_bytes:
            return
        with self._lock:
            found = self._memory_in(storage)
            if storage.nbytes():
                self._free(found, "resize_")
            self._begin(self.lane)  # its home may have used the same bytes until now
            tick = self.clocks[self.lane][self.lane]
            taken = _Access("resize_", self.lane, tick, 0, num_bytes, writes=True)
            found.home, found.accesses = self.lane, [taken]
            found.is_young = False

    def _free(self, found: _Memory, name: str) -> None:
        """Memory goes back to the allocator of its home lane, from this thread."""
        known = self.clocks[found.home] | self.clocks[self.program]
        for access in () if found.is_kept else found.accesses:
            if known[access.lane] < access.tick:
                self._find("drop", name, found.home, access)

    def _find(self, kind: str, name: str, lane: str, other: _Access) -> None:
        finding = Finding(kind, f"{name} in {site_of_caller()}", lane, other.operation, other.lane)
        if finding not in self.findings:
            self.findings.append(finding)


def _method(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what may stand in for a method of tensors."""

    def method(tensor: torch.Tensor) -> Any:
        return stand_in(original, tensor)

    return method


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the bytes of its storage that `tensor` lies in; None where it has no memory."""
    has_memory = type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)
    if not has_memory or not tensor.numel() or tensor.device.type == "meta":
        return None
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    extent = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(extent) + 1) * size


def _is_non_blocking(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    given = args[2] if name.startswith("aten.copy_") and len(args) > 2 else None
    return bool(kwargs.get("non_blocking", False) if given is None else given)


def _written(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to; a collective does not say, and writes to the
    first of its arguments.
    """
    if name.startswith("c10d."):
        return _tensors(args[0])
    out = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            out += _tensors(given)
    return out
