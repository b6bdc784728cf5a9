"""A sanitizer of lanes: it sees every operation of a run as CUDA's streams would, without a GPU.

`CheckingStreams` proves what the engine reports about its buffers. This one believes no report: as
a TorchDispatchMode it takes the memory that each operation reads and writes, collectives included,
on the lane in force; forks, marks and joins move vector clocks, and so do the marks of pools. Two
kinds of finding::

    race    an operation touches memory that another lane has written (or written what another lane
            has read), and is not ordered after it
    drop    memory goes back to the allocator of its home lane, the one that it was allocated on,
            while another lane still uses it: the next allocation there may get it at once

Invariant: the order is that of a CUDA run (``enqueues``): nothing here is waited for by the host.
Cost: some 20 microseconds per operation. It knows byte ranges, not strides: two interleaved views
of one range count as overlapping. For one thread, and one engine at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.lane_clocks import LaneClocks
from zeroshard import api, memory
from zeroshard.comm import codec, nccl
from zeroshard.runtime import segment
from zeroshard.runtime.streams import LANES, Lane

__all__ = ["Finding", "LaneSanitizer"]


@dataclass(frozen=True)
class Finding:
    """Something that is not ordered."""

    kind: str  # race, drop
    operation: str
    lane: Lane
    other: str  # the operation that it is not ordered after
    other_lane: Lane

    def __str__(self) -> str:
        return f"{self.kind}: {self.operation} on {self.lane}, {self.other} on {self.other_lane}"


@dataclass(frozen=True)
class _Access:
    operation: str
    lane: Lane
    tick: int
    start: int
    stop: int
    writes: bool


@dataclass(eq=False)
class _Memory:
    """One storage: where it was allocated, and who has touched it since."""

    home: Lane
    alive: weakref.ref[Any]
    accesses: list[_Access] = field(default_factory=list)


class _Mark:
    """What `zeroshard.memory.Mark` is on a device."""

    def __init__(self, sanitizer: LaneSanitizer) -> None:
        self._sanitizer = sanitizer
        self._clock = dict(sanitizer.clocks[sanitizer.lane])

    def wait(self, stream: Any = None) -> None:
        self._sanitizer.order(self._sanitizer.lane if stream is None else stream, self._clock)

    def done(self) -> bool:
        known = self._sanitizer.clocks[self._sanitizer.lane]
        return all(known[lane] >= tick for lane, tick in self._clock.items())

    def synchronize(self) -> None:
        for lane in LANES:
            self._sanitizer.order(lane, self._clock)


class LaneSanitizer(LaneClocks, TorchDispatchMode):
    """Streams for an engine, and the mode that watches what runs on them."""

    enqueues = True

    def __init__(self, *, drop: int | None = None) -> None:
        LaneClocks.__init__(self, drop)
        TorchDispatchMode.__init__(self)
        self.findings: list[Finding] = []
        self.num_operations = 0
        self.num_reads = 0  # of the device by the host: .item(), .tolist()
        self._memories: dict[int, _Memory] = {}  # by storage

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Give every engine that is made inside these streams, and watch."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, num_bytes: int) -> Any:
            self._resize(storage, num_bytes)
            return resize(storage, num_bytes)

        def mark(device: torch.device) -> _Mark:
            return _Mark(self)

        def scratch(of: codec.Codec, tensor: torch.Tensor) -> torch.Tensor:
            numel = codec._tile_numel(of, tensor) * 3 // 2
            return torch.empty(numel)  # a device's is new for each lane, the CPU's is kept

        with (
            mock.patch.object(codec, "_scratch", scratch),
            mock.patch.object(api, "make_streams", lambda device: self),
            mock.patch.object(memory, "mark", mark),
            mock.patch.object(nccl, "mark", mark),
            mock.patch.object(segment, "mark", mark),
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            self,
        ):
            yield

    # ------------------------------------------------------------------ what the engine calls

    def alloc(self, buffer: Hashable) -> None: ...

    def free(self, buffer: Hashable) -> None: ...

    def read(self, buffer: Hashable) -> None: ...

    def write(self, buffer: Hashable) -> None: ...

    # ------------------------------------------------------------------ what runs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.num_operations += 1
        if getattr(func, "is_view", False):
            return out  # touches no memory
        name = str(func)
        self.num_reads += name.startswith("aten._local_scalar_dense")
        written = _written(func, name, args, kwargs)
        taken = {id(tensor) for tensor in written}
        self.clocks[self.lane][self.lane] += 1
        for tensor in _tensors((args, kwargs)):
            self._access(name, tensor, writes=id(tensor) in taken)
        for tensor in _tensors(out):
            if id(tensor) not in taken:
                self._access(name, tensor, writes=True)  # an allocation, too
        return out

    def _access(self, name: str, tensor: torch.Tensor, *, writes: bool) -> None:
        span = _span(tensor)
        if span is None:
            return
        storage = tensor.untyped_storage()
        found = self._memory_of(storage)
        own, lane = self.clocks[self.lane], self.lane
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

    def _memory_of(self, storage: Any) -> _Memory:
        key = storage._cdata
        known = self._memories.get(key)
        if known is None or known.alive() is None:
            alive = weakref.ref(storage, partial(self._died, key))
            known = self._memories[key] = _Memory(self.lane, alive)
        return known

    def _died(self, key: int, reference: object) -> None:
        found = self._memories.pop(key, None)
        if found is not None:
            self._free(found, "the last reference goes")

    def _resize(self, storage: Any, num_bytes: int) -> None:
        if not storage.nbytes() and not num_bytes:
            return
        found = self._memory_of(storage)
        if storage.nbytes():
            self._free(found, "resize_")
        self.clocks[self.lane][self.lane] += 1  # its home may have used the same bytes until now
        tick = self.clocks[self.lane][self.lane]
        taken = _Access("resize_", self.lane, tick, 0, num_bytes, writes=True)
        found.home, found.accesses = self.lane, [taken]

    def _free(self, found: _Memory, name: str) -> None:
        """Memory goes back to the allocator of its home lane."""
        known = self.clocks[found.home]
        for access in found.accesses:
            if known[access.lane] < access.tick:
                self._find("drop", name, found.home, access)

    def _find(self, kind: str, name: str, lane: Lane, other: _Access) -> None:
        finding = Finding(kind, name, lane, other.operation, other.lane)
        if finding not in self.findings:
            self.findings.append(finding)


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
