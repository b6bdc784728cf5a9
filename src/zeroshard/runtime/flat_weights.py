"""One segment's flat weights: at rest, kept for a backward, and gathered by the hops of a route.

    rest (a State) ----- unshard: read, encode, all-gather, keep, decode -----> full (FullBuffer)
    rest, encoded ------ unshard: read bytes, all-gather bytes, decode -------^
    column (hpz) ------- unshard_backward: all-gather inside the node, decode ----^
    rest <-- publish: slices of other nodes arrive (a column), then peers may read

What rests here is this rank's part as the row's cell says: its own slice, its column, or the whole
buffer. Where the routes keep one, the column of a forward's gather stays on the device until its
backward: ZeRO++'s secondary shard (arXiv 2306.10209, section 3.2), ``numel / node_size`` elements,
encoded where weights travel encoded, so that both passes compute with the same numbers. Where the
transport maps the peers' memory (or there is no peer) the full buffer *is* the resting shards:
gathering moves nothing. Weights that rest on another tier have no window: each rank reads its own
slice alone into its place in the full buffer (ZeRO-Infinity, section 6.1, bandwidth-centric
partitioning), and the slices meet on the wire from there.

Invariant: ``full`` may be read only between the wait of an `unshard` flight and the release of its
buffer. It does not know modules, parameters or autograd; those are runtime/unit.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter

import torch
from xxhash import xxh3_64_intdigest

from zeroshard.comm.levels import PrivateWindow, ReadyHop, Start
from zeroshard.comm.transport import Window, Work
from zeroshard.core.digest import digest_of
from zeroshard.core.layout import Piece, Range
from zeroshard.core.placement import Portion, Scope
from zeroshard.core.route import Axis, Hop, Kind, Route
from zeroshard.core.wire import BlockCodec
from zeroshard.core.work import Operation, Probe
from zeroshard.errors import StorageError
from zeroshard.memory import placeholder_value, reads_wait
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.streams import Lane
from zeroshard.state.state import FullBuffer, State
from zeroshard.tier.store import EncodedStorage


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

    # this rank's own parameters, where nobody else may write, and digests of them as published
    _watched: tuple[torch.Tensor, Sequence[Piece], Sequence[Range]] | None = None
    _published: list[str | int] | None = None
    _version = 0  # of the memory then

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
        self.codec: BlockCodec | None = plan.codec(context)  # in which weights travel
        self.scope = layout.scope(cells.weight)  # of what rests here
        self.replicated = self.scope is Scope.FULL  # every rank keeps the whole buffer
        self.rest_span = layout.span(rank, self.scope)
        # the range of the buffer that this rank's optimizer steps, and that which is its alone
        self.stepped = layout.span(rank, layout.scope(cells.optim))
        self._all_step_all = self.replicated and layout.scope(cells.optim) is Scope.FULL
        self.own_span = layout.ranges[rank]
        self.window: Window | None = None
        if rest is None and self.codec is not None:
            assert self.scope is Scope.SHARD, (self.key, self.scope)
            numel = self.rest_span[1] - self.rest_span[0]
            at_rest = torch.zeros(numel, dtype=plan.dtype, device=context.device)
            rest = State(at_rest, link=context.memory.link)
        if rest is None:
            self.window, at_rest = context.levels.memory(
                plan.key, layout.ranges, plan.dtype, context.device, self.scope
            )
            rest = State(at_rest, link=context.memory.link)
        self.rest = rest  # this rank's weights at rest
        self.weight = self._part(self.stepped, context)  # those that follow from its masters
        self.buffer = FullBuffer(
            layout,
            plan.strides,
            plan.dtype,
            context.device,
            None if self.window is None else self.window.full,
        )
        self.strides = self.buffer.strides  # of each parameter
        self.full_bytes = self.buffer.num_bytes  # that gathering takes beyond what rests
        # whether disks write into what is gathered
        self._on_pages = rest.rests_elsewhere and not reads_wait(self.buffer.tensor)
        self.routes = plan.routes(context, rest, reads=reads_first)
        self.keeps_column = any(hop.kind is Kind.KEEP for hop in self.routes.unshard_forward)
        self.column: torch.Tensor | None = None  # between forward and backward
        self._column_span = layout.span(rank, Scope.NODE_SHARD)
        self._arrived: torch.Tensor | None = None  # the encoded column of what is gathered now
        self.context = context  # of the ranks that have these parameters
        is_stepped = plan.trainable and context.options.trains
        # whether what rests here is a column, and this rank writes its own slice of it alone
        self.awaits_nodes = (
            self.window is not None
            and self.scope is Scope.NODE_SHARD
            and not (is_stepped and layout.scope(cells.optim) is Scope.NODE_SHARD)
        )
        # whether `publish` does anything: somebody else reads the window, or writes are watched for
        is_mapped = not isinstance(self.window, (PrivateWindow, type(None)))
        self.publishes = self.awaits_nodes or (is_mapped and not self._all_step_all)
        self._publishing: Flight | None = None  # slices of other nodes on their way here
        # a plain gather, with the buffer that it fills and the memory at rest
        self._built: tuple[torch.Tensor, torch.Tensor | None, Sequence[ReadyHop]] | None = None

    def _part(self, span: Range, context: Context) -> State:
        """Return what rests here of `span`."""
        if span == self.rest_span:
            return self.rest
        base = self.rest_span[0]
        part = self.rest.whole[span[0] - base : span[1] - base]
        return State(part, link=context.memory.link)

    # ------------------------------------------------------------------------------ what it is

    @property
    def full(self) -> torch.Tensor:
        """The gathered weights [numel]."""
        return self.buffer.tensor

    @property
    def rest_bytes(self) -> int:
        """Bytes of this rank's weights at rest."""
        return sum(self.rest.bytes_by_tier().values())

    @property
    def column_bytes(self) -> int:
        """Bytes of the column that is kept now."""
        return 0 if self.column is None else self.column.nbytes

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

    def gather(self, raw: bool) -> Sequence[ReadyHop]:
        """Take the memory of the full buffer, on compute, and return a gather into it, hop by
        hop; `raw`: of the weights as they rest, without a codec.
        """
        buffer = self.buffer
        if self._on_pages:
            buffer.take_pages(self.context.memory, self.rest_span[0])
        elif buffer.is_ours:
            buffer.storage.resize_(buffer.num_bytes)
        if self.is_local:
            return self._mapped
        if not self._is_plain or raw:
            return tuple(_Gather(self, *self._route_and_source(raw)).ready_hops())
        built, out, rest = self._built, buffer.tensor, self.rest.tensor
        if built is None or built[0] is not out or built[1] is not rest:
            hops = tuple(_Gather(self, *self._route_and_source(raw)).ready_hops())
            self._built = built = (out, rest, hops)
        return built[2]

    @cached_property
    def _is_plain(self) -> bool:
        """Whether every gather of this buffer is the same: from memory that stays, as it rests."""
        return self.codec is None and not (self.keeps_column or self.reads_first)

    @cached_property
    def _mapped(self) -> Sequence[ReadyHop]:
        """A gather that moves nothing; its bytes are those that it makes readable."""
        assert self.window is not None
        received = self._route_and_source(raw=False)[0].bytes(self.portion).total
        operation = Operation("gather", Kind.ALL_GATHER.value, self.key, received)
        describe = (lambda: operation) if received else None  # else there is a single rank
        return (ReadyHop(self.window_gather, describe=describe),)

    def _gather_column(self, out: torch.Tensor | None = None) -> Work:
        assert self.window is not None, self.key
        self.wait_published("gather")
        return self.window.gather(out)

    @cached_property
    def window_gather(self) -> Callable[..., Work]:
        """Starts the gather of the window, once what rests there is up to date."""
        assert self.window is not None, self.key
        return self._gather_column if self.awaits_nodes else self.window.gather

    def _route_and_source(self, raw: bool) -> tuple[Route, torch.Tensor]:
        """Return the route to take, and what it starts with; where that is read first: where to."""
        if self.column is not None and not raw:
            return self.routes.unshard_backward, self.column
        route = self.routes.raw if raw else self.routes.unshard_forward
        if self.replicated:
            route = self.routes.regather
        if self.reads_first:
            return route, self.full
        coded = self.coded_rest
        return route, self.rest.whole if coded is None else coded.encoded

    @property
    def probe(self) -> Probe:
        """Records waits for the segment."""
        return self.context.streams.probe

    @cached_property
    def portion(self) -> Portion:
        """This rank's part of the buffer."""
        return self.layout.portion(self.context.transport.rank)

    @cached_property
    def byte_ranges(self) -> tuple[Range, ...]:
        """The ranges of the ranks, in bytes of the buffer."""
        size = self.dtype.itemsize
        return tuple((size * start, size * stop) for start, stop in self.layout.ranges)

    @cached_property
    def encoded_ranges(self) -> tuple[Range, ...]:
        """The ranges of the ranks, in bytes of the encoded buffer."""
        assert self.codec is not None
        return tuple(self.codec.bytes_of(span) for span in self.layout.ranges)

    # ------------------------------------------------------------------------- release, publish

    def keep(self, *, for_backward: bool | None = False) -> None:
        """Keep the column of what is released next, where it is gathered again with the same
        numbers (`for_backward`; None: one that is here stays).
        """
        if for_backward and self.column is None:
            full = self.buffer.tensor[slice(*self._column_span)]
            self.column = full.clone() if self._arrived is None else self._arrived
        elif for_backward is False:
            self.column = None
        self._arrived = None

    def arrive(self, encoded: torch.Tensor) -> None:
        """Keep a copy of the column in the `encoded` buffer that a gather has filled."""
        if self.codec is not None:
            self._arrived = encoded[slice(*self.codec.bytes_of(self._column_span))].clone()

    def release_column(self) -> None:
        """Release what a forward has kept for its backward."""
        self.column = None

    def close(self) -> None:
        """Give all memory back, that at rest, too."""
        self.release_column()
        self.buffer.close()
        self.rest.release()
        self._built = self._watched = None
        if self.window is not None:
            self.window.close()

    def watch(self, span: Range) -> None:
        """Find out from now on whether elements `span` of the buffer, which rest here, are written
        to by anybody but us.
        """
        base = self.rest_span[0]
        memory = self.rest.whole[span[0] - base : span[1] - base]
        pieces, size = self.layout.pieces_in(span), memory.element_size()
        places = [(size * one.shard_start, size * one.shard_stop) for one in pieces]  # in bytes
        self._watched, self.publishes = (memory, pieces, places), True
        self._published = self._digests()

    def _digests(self) -> list[str | int] | None:
        """Return a digest of each watched parameter's own part, as it is now."""
        if self._watched is None:
            return None
        memory, _, places = self._watched
        self._version = memory._version
        if memory.device.type != "cpu":
            data = memory.view(torch.uint8)
            return [digest_of(data[start:stop]) for start, stop in places]
        # not by numpy(), after which no storage can be resized any more
        there = memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr()))
        return [xxh3_64_intdigest(there[start:stop]) for start, stop in places]

    def written(self, *, ends: bool) -> list[str]:
        """Return the names of watched parameters with other numbers than were published, or than
        this was asked last; `ends`: we begin to write there ourselves, and publish next. Writes to
        the optimizer's pieces count a version of the memory that rests here: those are kept.
        """
        if self._watched is None or self._published is None:
            return []
        version, before, now = self._version, self._published, self._digests()
        assert now is not None
        self._published = None if ends else now
        if now == before or self._version != version:
            return []
        watched = zip(self._watched[1], before, now, strict=True)
        return [piece.name for piece, old, new in watched if old != new]

    def publish_everywhere(self) -> None:
        """`publish`, where every rank that keeps the whole buffer has written all of it, and takes
        nothing from us.
        """
        if self.replicated:
            self._published = self._digests()
        else:
            self.publish()

    def publish(self) -> None:
        """Say that our slice is written and may be read. Where a rank keeps its column, slices of
        other nodes come first, and whoever needs them waits for the flight: `wait_published`.
        """
        self._published = None if self._watched is None else self._digests()
        if self.window is None or self._all_step_all:
            return
        if not self.awaits_nodes:
            self.window.publish()
            return
        self.wait_published()
        levels, column, base = self.context.levels, self.rest.whole, self.rest_span[0]
        own = column[self.own_span[0] - base : self.own_span[1] - base]
        (start,) = levels.gathers((Axis.NODE,), self.key, own, self.layout.ranges, column)
        others = ReadyHop(start, between=True)
        hops = [others, ReadyHop(self.window.publish, "here", between=True)]
        self._publishing = Flight([hops], self.context.streams, "gather")
        self._publishing.go()
        levels.hold_writes(self._publishing)

    def wait_published(self, lane: Lane = "compute") -> None:
        """Return when what rests here is up to date, on `lane`, with what other nodes have
        published.
        """
        if self._publishing is not None:
            self._publishing.wait(lane)
            self._publishing = None

    def abandon(self) -> None:
        """After an exception: nothing is under way or kept. The transports have given up."""
        self.column = self._arrived = self._publishing = None
        if self.buffer.tensor.untyped_storage().nbytes():  # whatever the unit's state says
            self.buffer.release()
        if not self.replicated and self._published is not None:
            self._published = self._digests()  # a write that is lost is told once


class _Gather:
    """One gather of a segment's weights that moves something, and the buffers between its hops."""

    def __init__(self, flat: FlatWeights, route: Route, source: torch.Tensor) -> None:
        """`source` is what it starts with, or where that is read to."""
        self._flat = flat
        self._memory = flat.context.memory
        self._route = route
        self._source = self._whole = source  # what a hop sends, and what the last one has filled
        self._starts: Iterator[Start] = iter(())
        self._key = f"{flat.key}.weight"
        self._window = flat.window
        if source is flat.column:
            self._key, self._window = f"{flat.key}.column", None

    def ready_hops(self) -> Iterator[ReadyHop]:
        """Yield each hop that does something here, ready to be started."""
        if not self._route.hops:  # what rests here is whole
            copies = self._window is None
            yield ReadyHop(self._copy, "here") if copies else ReadyHop(self._gathers(())[0])
        for kind, group in groupby(self._route, attrgetter("kind")):
            if kind is Kind.READ:
                yield ReadyHop(self._read, "read", self._reading)
            elif kind is Kind.ALL_GATHER:
                hops = tuple(group)
                if hops[0].wire.codec is None:
                    starts = self._gathers(hops)
                else:
                    yield ReadyHop(partial(self._receive, hops), "here")
                    starts = [lambda: next(self._starts)()] * len(hops)
                for hop, start in zip(hops, starts, strict=True):
                    describe, between = partial(self._gathering, hop), hop.axis is Axis.NODE
                    yield ReadyHop(start, describe=describe, between=between)
            elif kind is Kind.ENCODE:
                yield ReadyHop(self._encode, "here")
            elif kind is Kind.KEEP:
                yield ReadyHop(self._keep, "here")
            elif kind is Kind.DECODE:
                yield ReadyHop(self._decode, "here")

    def _gathers(self, hops: Sequence[Hop]) -> Sequence[Start]:
        """Return the starts of the levels of one all-gather."""
        flat, window, local, key = self._flat, self._window, self._source, self._key
        axes = tuple(hop.axis for hop in hops if hop.axis is not None)
        if isinstance(window, PrivateWindow) and hops and flat.scope is not Scope.NODE_SHARD:
            local, key = flat.weight.whole, flat.key  # what this rank has stepped
        elif window is not None:
            return [partial(flat.window_gather, flat.full)]
        elif self._route.hops[0].kind is Kind.READ:
            local = flat.full[slice(*flat.rest_span)]  # which has been read
        local, ranges, out = local.view(torch.uint8), flat.byte_ranges, flat.buffer.bytes
        return flat.context.levels.gathers(axes, key, local, ranges, out)

    def _gathering(self, hop: Hop) -> Operation:
        received = hop.link_bytes(self._flat.portion).total
        return Operation(hop.lane, hop.kind.value, self._flat.key, received)

    def _copy(self) -> None:
        self._flat.full.copy_(self._source)

    def _reading(self) -> Operation:
        return Operation("tier read", "", self._flat.key)  # the tier notes the read itself

    def _read(self) -> Work:
        """Start reading our slice from another tier."""
        flat = self._flat
        self._source = flat.full[slice(*flat.rest_span)]
        if flat.rest.is_encoded:
            num_bytes = sum(part.num_bytes for part in flat.rest.parts)
            self._source = self._whole = self._memory.empty_for_disk(num_bytes, torch.uint8)
        return _Reads(flat.rest, self._source, partial(self._lose, self._source))

    def _lose(self, out: torch.Tensor, error: StorageError) -> None:
        """Our slice could not be read: go on with NaN, which bytes of ones are a scale of, too."""
        self._flat.note(error)
        out.fill_(255 if out.dtype is torch.uint8 else placeholder_value(self._flat.dtype))

    @property
    def _codec(self) -> BlockCodec:
        assert self._flat.codec is not None, self._flat.key
        return self._flat.codec

    def _encode(self) -> None:
        out = self._empty(self._source.numel())
        self._codec.encode(self._source, out)
        self._source = self._whole = out

    def _empty(self, numel: int) -> torch.Tensor:
        return self._memory.empty(self._codec.encoded_bytes(numel), torch.uint8)

    def _receive(self, hops: Sequence[Hop]) -> None:
        """Take memory for the encoded buffer: on the lane on which it is decoded and dropped."""
        self._whole, flat = self._empty(self._flat.layout.numel), self._flat
        levels, ranges = flat.context.levels, flat.encoded_ranges
        axes = [hop.axis for hop in hops if hop.axis is not None]
        self._starts = iter(levels.gathers(axes, self._key, self._source, ranges, self._whole))

    def _keep(self) -> None:
        self._flat.arrive(self._whole)

    def _decode(self) -> None:
        self._codec.decode(self._whole, self._flat.full)
        self._whole = self._source = self._flat.full  # nothing else holds the encoding
        self._starts = iter(())
