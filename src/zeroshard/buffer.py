"""One segment's flat weight buffer, at rest and gathered.

All parameters of a segment lie in one flat buffer (core/layout.py), so an all-gather writes the
buffer as it is and nothing is copied in or out. At rest only this rank's slice (``local``) holds
memory; the full buffer keeps its *storage object* with size 0.

[Note: storage, not objects] Gathering resizes the same storage again instead of making a new
tensor. Whatever autograd saved in forward (the parameter, or a view of it such as ``weight.t()``)
refers to that storage, so it is valid again in backward, however often the buffer was released in
between. Such a view must not be read while it is released: torch raises in some places and crashes
in others. Parameters themselves are guarded (runtime/released.py).

[Note: views that leave] A view of a parameter that leaves its module (``return self.position[:n]``)
may be read, and saved by autograd, while the unit is released. Release therefore leaves the storage
to such views and makes another one for the next gather: the memory lives as long as anything refers
to it, and holds the numbers from before the next step. Without gradients autograd saves nothing, so
any reference that is not ours is a view that has left; with gradients the views are looked for in
what a module returns (runtime/hooks.py), and `leave` is called.

Where the transport maps the peers' memory (or there is no peer) the full buffer *is* the resting
shards: gathering moves nothing. Weights that rest on another tier have no window: each rank reads
its own slice alone into its place in the full buffer (ZeRO-Infinity, section 6.1, bandwidth-
centric partitioning), and the slices meet on the wire from there.

Invariant: ``full`` may be read only between ``to(REPLICATE)``'s wait and ``release()``. Cost:
``numel * itemsize`` bytes while gathered. It does not know modules, parameters or autograd; those
are runtime/unit.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal, Protocol

import torch

from zeroshard.comm.codec import Codec
from zeroshard.comm.transport import Transport, Window, Work
from zeroshard.comm.two_level import ColumnWindow, TwoLevelTransport
from zeroshard.core.layout import Layout, Range
from zeroshard.core.placement import Cells, Placement, Scope
from zeroshard.errors import StorageError
from zeroshard.memory import MemoryCounter, Pages, placeholder_value
from zeroshard.state.encoded import EncodedStorage
from zeroshard.state.state import State

__all__ = [
    "FlatBuffer",
    "Flight",
    "Lanes",
    "mesh_of",
]


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


class Flight:
    """Works under way and the event after which compute may use their results."""

    __slots__ = ("_event", "_streams", "_works")

    def __init__(self, works: Sequence[Work], streams: Lanes, event: object) -> None:
        self._works = list(works)
        self._streams = streams
        self._event = event

    def wait(self) -> None:
        """Return when the results may be used on compute. Idempotent; a wait that raised may be
        tried again.
        """
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
        """Return when nothing writes to the buffers any more; the transport has forgotten its
        part.
        """
        for work in self._works:
            if isinstance(work, _Bringing):
                work.abandon()
        self._works = []


class _Decoding:
    """A gather of encoded slices: decoded into the full buffer once they are here."""

    def __init__(self, buffer: FlatBuffer, work: Work, encoded: torch.Tensor) -> None:
        self._buffer = buffer
        self._work = work
        self._encoded: torch.Tensor | None = encoded

    def wait(self) -> None:
        self._work.wait()
        encoded, self._encoded = self._encoded, None
        if encoded is not None:
            self._buffer.decode(encoded)

    def done(self) -> bool:
        return self._work.done()


class _Bringing:
    """A gather from another tier: our slice is read, then (`push`) the slices meet on the wire.

    Reads may end in any order; the wire wants the same order on every rank, so the second stage
    waits to be pushed. Where a read has failed the slice is NaN (runtime/faults.py): the other
    ranks wait for it.
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
    reads_first = all(buffer.is_read_first for buffer in buffers)
    with streams.on("gather"):
        works = [buffer.gather_here() for buffer in buffers]
        event = None if reads_first else streams.mark("gather")  # those mark their own
    return Flight(works, streams, event)


def mesh_of(transport: Transport) -> TwoLevelTransport:
    """Return `transport`, which serves a mesh of nodes: rows with columns have no other."""
    assert isinstance(transport, TwoLevelTransport), transport.name
    return transport


def _raise(error: StorageError, *, lost: bool = False) -> None:
    raise error


def _autograd_may_save() -> bool:
    """Whether references to the weights may be autograd's own: in a backward, or a forward with
    gradients.
    """
    return torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0


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
        cells: Cells,
        streams: Lanes,
        meter: MemoryCounter,
        is_stepped: bool = True,
        codec: Codec | None = None,
        pages: Pages | None = None,
        rest: State | None = None,
        note: Callable[..., None] = _raise,
    ) -> None:
        self.key = key
        self.note = note  # takes the StorageErrors of what rests on another tier: Faults.note
        self.layout = layout
        self.dtype = dtype
        self.scope = layout.scope(cells.weight)  # of what rests here
        # the range of the buffer that this rank's optimizer steps
        self.stepped = layout.span(transport.rank, layout.scope(cells.optim))
        self.rest_span = layout.span(transport.rank, self.scope)
        self._column_span = layout.span(transport.rank, Scope.COLUMN)
        self._keeps_column = self.scope is Scope.OWN and layout.scope(cells.between) is Scope.COLUMN
        # between forward and backward (ZeRO++'s secondary shard); encoded where weights travel so
        self._column: torch.Tensor | None = None
        # the encoded column of what is gathered now, if it may be kept
        self._arrived: torch.Tensor | None = None
        self._pages = Pages() if pages is None else pages
        self.codec = codec  # in which weights travel
        self.exact = False  # the next gather goes without
        self._streams = streams
        self._meter = meter
        self._device = device
        self._transport = transport
        self.window: Window | None = None
        if rest is None and codec is not None:
            assert self.scope is Scope.OWN, (key, self.scope)
            rest = State.of(torch.zeros(self._length(self.rest_span), dtype=dtype, device=device))
        if rest is None:
            self.window, at_rest = self._make_window(
                layout.scope(cells.optim) if is_stepped else Scope.OWN
            )
            rest = State.of(at_rest)
        self.rest = rest  # this rank's weights at rest
        self.weight = self._part(self.stepped)  # those that follow from its masters
        full = None if self.window is None else self.window.full
        self._owns_full = full is None
        self._has_left = False  # whether a view of the full buffer is known to be used elsewhere
        self.strides = tuple(strides)
        self._make_full(full)

    def _make_full(self, full: torch.Tensor | None) -> None:
        """Make the full buffer, or take `full`, and the views of it."""
        self.full = (
            torch.empty(self.layout.numel, dtype=self.dtype, device=self._device)
            if full is None
            else full
        )
        self.views = self.views_of(self.full)
        if full is None:
            self.full.untyped_storage().resize_(0)
            self._own_references = self._references()

    def _references(self) -> int:
        """Return how many tensors and storage objects refer to the full buffer's memory."""
        return torch._C._storage_Use_Count(self.full.untyped_storage()._cdata)

    def leave(self, address: int) -> bool:
        """Leave the gathered memory, at the next release, to a tensor at `address`; return
        whether it lies in there.
        """
        if not self._owns_full or not 0 <= address - self.full.data_ptr() < self.full_bytes:
            return False
        self._has_left = True
        return True

    @staticmethod
    def _length(span: Range) -> int:
        return span[1] - span[0]

    def _make_window(self, written: Scope) -> tuple[Window, torch.Tensor]:
        """Make the window; return it and what of it rests here."""
        if self.scope is Scope.COLUMN:
            columns = mesh_of(self._transport).column_window(
                self.key, self.layout.ranges, self.dtype, self._device, written=written
            )
            return columns, columns.rest
        replicated = self.scope is Scope.WHOLE
        window = self._transport.window(
            self.key, self.layout.ranges, self.dtype, self._device, replicated=replicated
        )
        if replicated:
            assert window.full is not None, self.key
            return window, window.full
        return window, window.local

    def _part(self, span: Range) -> State:
        """Return what rests here of `span`."""
        if span == self.rest_span:
            return self.rest
        base = self.rest_span[0]
        return State.of(self.rest.whole[span[0] - base : span[1] - base])

    @property
    def replicated(self) -> bool:
        """Whether every rank keeps the whole buffer."""
        return self.scope is Scope.WHOLE

    @property
    def own_span(self) -> Range:
        """The range of the buffer that is this rank's alone."""
        return self.layout.ranges[self._transport.rank]

    def _view_of(self, flat: torch.Tensor, index: int, stride: tuple[int, ...]) -> torch.Tensor:
        slot = self.layout.slots[index]
        return flat[slot.offset : slot.stop].as_strided(
            slot.shape, stride, slot.offset + flat.storage_offset()
        )

    def view_in(self, part: torch.Tensor, index: int) -> torch.Tensor:
        """Return parameter `index` [its shape] as a view of `part`, its own elements alone."""
        return part.as_strided(
            self.layout.slots[index].shape, self.strides[index], part.storage_offset()
        )

    def view(self, index: int) -> torch.Tensor:
        """Return parameter `index` [its shape] inside the full buffer; readable only while
        gathered.
        """
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
        return sum(self.rest.bytes_by_tier().values())

    @property
    def rest_name(self) -> str:
        """What streams call the memory at rest: the full buffer itself where it stays here."""
        return f"{self.key}.local" if self._owns_full else self.key

    @property
    def is_local(self) -> bool:
        """Whether gathering moves nothing (mapped memory or a single rank)."""
        return self.window is not None and self.window.aliased

    @property
    def rests_elsewhere(self) -> bool:
        """Whether the weights rest on another tier than the device."""
        return not self.rest.on_device and self.coded_rest is None

    @property
    def coded_rest(self) -> EncodedStorage | None:
        """The weights at rest, if they rest encoded."""
        return self.rest.away if isinstance(self.rest.away, EncodedStorage) else None

    @property
    def is_read_first(self) -> bool:
        """Whether a gather begins by reading another tier."""
        return self.rests_elsewhere and self._column is None

    @property
    def column_bytes(self) -> int:
        """Bytes of the column that is kept between forward and backward, now."""
        return 0 if self._column is None else self._column.numel() * self._column.element_size()

    def to(self, placement: Placement) -> Flight:
        """Start moving to `placement`: REPLICATE gathers (valid after the flight's wait), SHARD
        releases.
        """
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
        if self._column is not None and not self.exact:
            self._streams.read(f"{self.key}.column")
            self._streams.write(self.key)
            return self._enqueued(self._meet_columns(self._column))
        if self.coded_rest is not None:
            self._streams.read(self.rest_name)
            self._streams.write(self.key)
            return self._enqueued(self._meet_encoded(self.coded_rest.encoded))
        if self.rests_elsewhere:
            self._streams.write(self.key)
            return _Bringing(self, self._streams, self._read_here())
        if self.window is None:
            self._streams.read(self.rest_name)
            self._streams.write(self.key)
            return self._enqueued(self.meet(self.rest.whole))
        if self.is_local:
            return self.window.gather()
        self._streams.read(self.rest_name)
        self._streams.write(self.key)
        return self._enqueued(self.window.gather(self.full))

    def _enqueued(self, work: Work) -> Work:
        if self._device.type != "cpu":
            work.wait()  # enqueues; the lane's next event then comes after the collective
        return work

    def _read_here(self) -> list[Work]:
        try:
            return self.rest.read(0, self.rest.numel, self.full[slice(*self.rest_span)])
        except StorageError as error:
            self.lose(error)
            return []

    def lose(self, error: StorageError) -> None:
        """Our slice could not be read: go on without."""
        self.note(error)
        self.full[slice(*self.rest_span)].fill_(placeholder_value(self.dtype))

    def meet(self, here: torch.Tensor | None = None) -> Work:
        """Start the all-gather of the slices that rest in `here` (default: that have been read
        into the full buffer).
        """
        here, key = (
            self.full[slice(*self.rest_span)] if here is None else here,
            f"{self.key}.weight",
        )
        if self.codec is not None and not self.exact:
            mine = self._empty_encoding(here.numel())
            self.codec.encode(here, mine)
            return self._meet_encoded(mine)
        if self.scope is Scope.COLUMN:
            return mesh_of(self._transport).gather_inside(key, here, self.layout.ranges, self.full)
        return self._transport.all_gather(key, here, self.layout.ranges, self.full)

    def _meet_encoded(self, mine: torch.Tensor) -> Work:
        """Start the all-gather of encoded slices."""
        encoded = self._empty_encoding(self.layout.numel)
        return _Decoding(
            self,
            self._transport.all_gather(f"{self.key}.weight", mine, self._encoded_ranges, encoded),
            encoded,
        )

    def _meet_columns(self, column: torch.Tensor) -> Work:
        """Start bringing this node's columns together."""
        mesh, key = mesh_of(self._transport), f"{self.key}.column"
        if self.codec is None:
            return mesh.gather_inside(key, column, self.layout.ranges, self.full)
        encoded = self._empty_encoding(self.layout.numel)
        return _Decoding(
            self, mesh.gather_inside(key, column, self._encoded_ranges, encoded), encoded
        )

    def _empty_encoding(self, numel: int) -> torch.Tensor:
        assert self.codec is not None
        return self._pages.empty(self.codec.encoded_bytes(numel), torch.uint8, self._device)

    @cached_property
    def _encoded_ranges(self) -> tuple[Range, ...]:
        assert self.codec is not None
        return tuple(self.codec.bytes_of(span) for span in self.layout.ranges)

    def decode(self, encoded: torch.Tensor) -> None:
        """Fill the full buffer from all slices."""
        assert self.codec is not None
        self.codec.decode(encoded, self.full)
        if self._keeps_column:
            self._arrived = encoded[slice(*self.codec.bytes_of(self._column_span))].clone()

    def arrive(self) -> None:
        """Return when what rests here is up to date with what other nodes have published."""
        if isinstance(self.window, ColumnWindow):
            self.window.arrive()

    def publish(self) -> None:
        """Say that our slice is written and may be read."""
        if self.window is not None:
            self.window.publish()

    def release(self, *, for_backward: bool | None = False) -> None:
        """Give the gathered memory back; the caller has waited for the flight and is done reading.

        `for_backward`: it is gathered again with the same numbers; where the policy says so, its
        column stays (None: a column that is here stays).
        """
        if for_backward is False:
            self.forget_column()
        elif (
            for_backward
            and self._keeps_column
            and self._column is None
            and (self.codec is None or self._arrived is not None)
        ):
            self._streams.alloc(f"{self.key}.column")
            self._streams.read(self.key)
            self._column = (
                self.full[slice(*self._column_span)].clone()
                if self._arrived is None
                else self._arrived
            )
            self._streams.write(f"{self.key}.column")
        self._arrived = None
        if self._owns_full:
            self._streams.free(self.key)
            self._meter.remove(self.full_bytes)
            if self._has_left or (
                not _autograd_may_save() and self._references() > self._own_references
            ):
                self._has_left = False
                with torch.inference_mode(False):  # else only another inference could write to it
                    self._make_full(None)  # see [Note: views that leave]
            else:
                self.full.untyped_storage().resize_(0)

    def forget_column(self) -> None:
        """Let go of the column that was kept for a backward."""
        if self._column is not None:
            self._streams.free(f"{self.key}.column")
            self._column = None
