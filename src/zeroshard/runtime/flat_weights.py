"""One segment's flat weights: at rest, kept for a backward, and gathered by the hops of a route.

    rest (a State) ----- unshard: read, encode, all-gather, keep, decode -----> full (FullBuffer)
    rest, encoded ------ unshard: read bytes, all-gather bytes, decode -------^
    column (hpz) ------- unshard_backward: all-gather inside the node, decode ----^

What rests here is this rank's part as the row's cell says: its own slice, its column, or the whole
buffer. Where the transport maps the peers' memory (or there is no peer) the full buffer *is* the
resting shards: gathering moves nothing. Weights that rest on another tier have no window: each rank
reads its own slice alone into its place in the full buffer (ZeRO-Infinity, section 6.1, bandwidth-
centric partitioning), and the slices meet on the wire from there.

Invariant: ``full`` may be read only between the wait of an `unshard` flight and `release()`. It
does not know modules, parameters or autograd; those are runtime/unit.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch

from zeroshard.comm.codec import Codec
from zeroshard.comm.transport import DoneWork, Window, Work
from zeroshard.comm.two_level import ColumnWindow, gather_over, mesh_of
from zeroshard.core.layout import Range
from zeroshard.core.placement import Scope
from zeroshard.core.recording import Operation, Recording
from zeroshard.core.route import Axis, Hop, Kind, Route
from zeroshard.errors import StorageError
from zeroshard.memory import placeholder_value, reads_wait
from zeroshard.runtime.column import KeptColumn
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flight import Hops, Run, ended
from zeroshard.state.encoded import EncodedStorage
from zeroshard.state.full import FullBuffer
from zeroshard.state.state import State

__all__ = ["FlatWeights"]

_Levels = Sequence[tuple[Hop | None, tuple[Axis, ...]]]

# a route without hops: between two buffers of one memory, on a single rank
_COPY: _Levels = ((None, ()),)


class _Reads:
    """Reads of this rank's slice from another tier. Where one fails the slice is lost: the other
    ranks wait for it.
    """

    def __init__(
        self, state: State, out: torch.Tensor, lose: Callable[[StorageError], None]
    ) -> None:
        self._lose = lose
        self._works: list[Work] = []
        try:
            if state.is_encoded:
                self._works = state.read_encoded(out)
            else:
                self._works = state.read(0, state.numel, out)
        except StorageError as error:
            lose(error)

    def wait(self) -> None:
        works, self._works = self._works, []
        failure: StorageError | None = None
        for work in works:  # all of them, whether they fail or not
            try:
                work.wait()
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            self._lose(failure)

    def done(self) -> bool:
        return all(work.done() for work in self._works)


class FlatWeights:
    """The weights of one segment."""

    def __init__(
        self,
        plan: SegmentPlan,
        context: Context,
        rest: State | None = None,
        *,
        reads_first: bool = False,
    ) -> None:
        """Make them, zero-filled; `rest` where they do not rest in a window. `reads_first`: some
        of them rest on another tier, on this rank or another.
        """
        layout, cells, rank = plan.layout, plan.cells, plan.rank
        self.key = plan.key
        self.layout = layout
        self.dtype = plan.dtype
        self.codec: Codec | None = plan.codec(context)  # in which weights travel
        self.scope = layout.scope(cells.weight)  # of what rests here
        self.replicated = self.scope is Scope.FULL  # every rank keeps the whole buffer
        self.rest_span = layout.span(rank, self.scope)
        # the range of the buffer that this rank's optimizer steps, and that which is its alone
        self.stepped = layout.span(rank, layout.scope(cells.optim))
        self.own_span = layout.ranges[rank]
        self.window: Window | None = None
        if rest is None and self.codec is not None:
            assert self.scope is Scope.SHARD, (self.key, self.scope)
            numel = self.rest_span[1] - self.rest_span[0]
            at_rest = torch.zeros(numel, dtype=plan.dtype, device=context.device)
            rest = State.of(at_rest, link=context.memory.link)
        if rest is None:
            is_stepped = plan.trainable and context.options.trains
            self.window, at_rest = self._make_window(
                context, layout.scope(cells.optim) if is_stepped else Scope.SHARD
            )
            rest = State.of(at_rest, link=context.memory.link)
        self.rest = rest  # this rank's weights at rest
        self.weight = self._part(self.stepped, context)  # those that follow from its masters
        self.buffer = FullBuffer(
            layout,
            plan.strides,
            plan.dtype,
            context.device,
            None if self.window is None else self.window.full,
        )
        self.full_bytes = self.buffer.num_bytes  # that gathering takes beyond what rests
        # what streams call the memory at rest: the full buffer itself where it stays here
        self.rest_name = f"{self.key}.local" if self.buffer.is_ours else self.key
        self.routes = plan.routes(context, rest, reads=reads_first)
        # between forward and backward
        self.column = KeptColumn(
            plan.key,
            layout.span(rank, Scope.NODE_SHARD),
            self.codec,
            context.streams,
            is_wanted=any(hop.kind is Kind.KEEP for hop in self.routes.unshard_forward),
        )
        self.context = context  # of the ranks that have these parameters

    def _make_window(self, context: Context, written: Scope) -> tuple[Window, torch.Tensor]:
        """Make the window; return it and what of it rests here."""
        key, ranges, transport = self.key, self.layout.ranges, context.transport
        if self.scope is Scope.NODE_SHARD:
            columns = mesh_of(transport).column_window(
                key, ranges, self.dtype, context.device, written=written
            )
            return columns, columns.rest
        window = transport.window(
            key, ranges, self.dtype, context.device, replicated=self.replicated
        )
        if not self.replicated:
            return window, window.local
        assert window.full is not None, key
        return window, window.full

    def _part(self, span: Range, context: Context) -> State:
        """Return what rests here of `span`."""
        if span == self.rest_span:
            return self.rest
        base = self.rest_span[0]
        part = self.rest.whole[span[0] - base : span[1] - base]
        return State.of(part, link=context.memory.link)

    # ------------------------------------------------------------------------------ what it is

    @property
    def full(self) -> torch.Tensor:
        """The gathered weights [numel]."""
        return self.buffer.tensor

    @property
    def views(self) -> list[torch.Tensor]:
        """Every parameter inside the full buffer; readable only while gathered."""
        return self.buffer.views

    @property
    def strides(self) -> Sequence[tuple[int, ...]]:
        """The stride of every parameter."""
        return self.buffer.strides

    @property
    def rest_bytes(self) -> int:
        """Bytes of this rank's weights at rest."""
        return sum(self.rest.bytes_by_tier().values())

    @cached_property
    def reads_first(self) -> bool:
        """Whether a gather begins with a read of another tier, on this rank or another."""
        return any(hop.kind is Kind.READ for hop in self.routes.unshard_forward)

    @cached_property
    def is_local(self) -> bool:
        """Whether gathering moves nothing (mapped memory or a single rank)."""
        return self.window is not None and self.window.aliased

    @property
    def coded_rest(self) -> EncodedStorage | None:
        """The weights at rest, if they rest encoded on the device of every rank."""
        first = self.rest.parts[0]
        return first if isinstance(first, EncodedStorage) and not self.reads_first else None

    def note(self, error: StorageError, *, lost: bool = False) -> None:
        """Note that what rests on another tier could not be read, or (`lost`) written."""
        self.context.faults.note(error, lost=lost)

    # ------------------------------------------------------------------------------ gathering

    def take_memory(self) -> None:
        """Take the memory of the full buffer, on compute."""
        if self.buffer.is_ours:
            on_pages = self.rest.rests_elsewhere and not reads_wait(self.buffer.tensor)
            self.buffer.take(self.context.memory if on_pages else None, self.rest_span[0])
            self.context.meter.add(self.full_bytes)
            self.context.streams.alloc(self.key)

    def unshard(self, raw: bool) -> Work:
        """Start bringing the weights together, in memory that has been taken; `raw`: as they rest,
        without a codec. A single gather is returned as it is, several hops as a Run.
        """
        if self.is_local:
            return self._map()
        route, here, source = self._start(raw)
        levels = route.levels or _COPY
        hop, axes = levels[0]
        if len(levels) == 1 and (hop is None or hop.kind is Kind.ALL_GATHER):
            return self._gather(hop, axes, here, source)[1]
        return Run(self._hops(levels, here, source))

    def _hops(self, levels: _Levels, here: torch.Tensor, source: str | None) -> Hops:
        streams, whole = self.context.streams, here
        for hop, axes in levels:
            if hop is None or hop.kind is Kind.ALL_GATHER:
                whole, work = self._gather(hop, axes, here, source)
                yield hop, work
            elif hop.kind is Kind.READ:
                here, source = self.full[slice(*self.rest_span)], None
                if self.rest.is_encoded:
                    num_bytes = sum(part.num_bytes for part in self.rest.parts)
                    here = whole = self.context.memory.empty_for_disk(num_bytes, torch.uint8)
                streams.write(self.key)
                yield hop, self._read(here)
            elif hop.kind is Kind.ENCODE:
                here = whole = self._encode(here)
            elif hop.kind is Kind.KEEP:
                self.column.arrive(whole)
            elif hop.kind is Kind.DECODE:
                assert self.codec is not None
                if whole is here and source is not None:  # nothing came from other ranks
                    streams.read(source)
                    streams.write(self.key)
                self.codec.decode(whole, self.full)

    def _start(self, raw: bool) -> tuple[Route, torch.Tensor, str | None]:
        """Return the route to take, what it starts with, and what streams call that."""
        if self.column.tensor is not None and not raw:
            return self.routes.unshard_backward, self.column.tensor, self.column.name
        route = self.routes.raw if raw else self.routes.unshard_forward
        if self.replicated:
            route = self.routes.regather
        if self.coded_rest is not None:
            return route, self.coded_rest.encoded, self.rest_name
        if self.reads_first:
            return route, self.full, None  # it is read first
        return route, self.rest.whole, self.rest_name

    @property
    def recording(self) -> Recording | None:
        """Who is told of the segment's operations, if anybody is."""
        return self.context.streams.probe.recording

    def _map(self) -> Work:
        """Start a gather that moves nothing; its bytes are those that it makes readable."""
        assert self.window is not None
        recording = self.context.streams.probe.recording
        if recording is None:
            return self.window.gather()
        portion = self.layout.portion(self.context.transport.rank)
        num_bytes = self._start(raw=False)[0].bytes(portion).total
        if not num_bytes:
            return self.window.gather()  # a single rank
        operation = Operation("gather", Kind.ALL_GATHER.value, self.key, num_bytes)
        since = recording.now()
        return recording.watch(self.window.gather(), operation, since)

    def _read(self, out: torch.Tensor) -> Work:
        """Start reading our slice from another tier, which notes the read itself."""
        work = _Reads(self.rest, out, partial(self._lose, out))
        recording = self.context.streams.probe.recording
        if recording is None:
            return work
        return recording.watch(work, Operation("tier read", "", self.key), recording.now())

    def _gather(
        self, hop: Hop | None, axes: tuple[Axis, ...], here: torch.Tensor, source: str | None
    ) -> tuple[torch.Tensor, Work]:
        """Start an all-gather of `here`, and note it where somebody is told; return what it fills,
        and what is left to wait for.
        """
        streams, out, ranges = self.context.streams, self.full, self.layout.ranges
        recording = self.context.streams.probe.recording
        since = None if recording is None else recording.now()
        if source is not None:
            streams.read(source)
        streams.write(self.key)
        work: Work = DoneWork()
        if self.window is not None and source == self.rest_name:
            work = ended(self.window.gather(out), streams)
        elif hop is None:
            out.copy_(here)
        else:
            if hop.wire.codec is not None:
                out, ranges = self._empty_encoding(self.layout.numel), self._encoded_ranges
            key = source if source == self.column.name else f"{self.key}.weight"
            work = ended(gather_over(self.context.transport, axes, key, here, ranges, out), streams)
        if recording is not None and hop is not None:
            work = recording.watch(work, self._operation(hop, axes), since)
        return out, work

    def _operation(self, hop: Hop, axes: tuple[Axis, ...]) -> Operation:
        """Return what to say of an all-gather over `axes`."""
        portion = self.layout.portion(self.context.transport.rank)
        received = hop.link_bytes(portion)
        if len(axes) > 1:  # from this rank's column to the whole
            received += replace(hop, source=hop.target, axis=axes[1]).link_bytes(portion)
        return Operation(hop.lane, hop.kind.value, self.key, received.total)

    def _lose(self, out: torch.Tensor, error: StorageError) -> None:
        """Our slice could not be read: go on with NaN, which bytes of ones are a scale of, too."""
        self.note(error)
        out.fill_(255 if out.dtype is torch.uint8 else placeholder_value(self.dtype))

    def _encode(self, here: torch.Tensor) -> torch.Tensor:
        assert self.codec is not None
        out = self._empty_encoding(here.numel())
        self.codec.encode(here, out)
        return out

    def _empty_encoding(self, numel: int) -> torch.Tensor:
        assert self.codec is not None
        num_bytes = self.codec.encoded_bytes(numel)
        return self.context.memory.empty(num_bytes, torch.uint8)

    @cached_property
    def _encoded_ranges(self) -> tuple[Range, ...]:
        assert self.codec is not None
        return tuple(self.codec.bytes_of(span) for span in self.layout.ranges)

    # ------------------------------------------------------------------------- release, publish

    def release(self, *, for_backward: bool | None = False) -> int:
        """Give the gathered memory back; the caller has waited for the flight and is done reading.
        Returns the bytes that the allocator has got.

        `for_backward`: it is gathered again with the same numbers; where the policy says so, its
        column stays (None: a column that is here stays).
        """
        if for_backward is False:
            self.column.release()
        elif for_backward:
            self.column.keep(self.buffer.tensor)
        self.column.end_gather()
        if not self.buffer.is_ours:
            return 0
        self.context.streams.free(self.key)
        self.context.meter.remove(self.full_bytes)
        return self.buffer.release()

    def wait_published(self) -> None:
        """Return when what rests here is up to date with what other nodes have published."""
        if isinstance(self.window, ColumnWindow):
            self.window.wait_published()

    def publish(self) -> None:
        """Say that our slice is written and may be read."""
        if self.window is not None:
            self.window.publish()
