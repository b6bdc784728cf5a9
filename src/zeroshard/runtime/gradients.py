"""The way of a gradient: from autograd into the segment's buffer, over the wire, into the
resting gradient.

    cells.grad sharded, or outside no_sync:
        param.grad --copy--> buffer (wire dtype) --reduce--> resting (+=)
    cells.grad partial, inside no_sync:
        param.grad --add---> partial (accumulate dtype) ... --cast--> buffer --reduce--> resting

The resting gradient is a *sum* over ranks and micro-batches until ``average`` divides it, once,
after the sum. Invariants: the bytes of a buffer are handed to the transport whole (parameters
without a gradient and padding are zeros); the reduces of one segment complete in order. Cost: one
copy of each gradient, and ``numel * wire (N-1)/N`` bytes on the wire per reduce.

What it does not do: it does not know when a backward ends or who reads the result
(runtime/engine.py), nor what a module is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zeroshard.buffer import FlatBuffer, Flight, Lanes, mesh_of
from zeroshard.comm.codec import Codec
from zeroshard.comm.quantized import Feedback, Residual
from zeroshard.comm.transport import GradBuffer, Transport, Work
from zeroshard.core.placement import Cells, Scope, Tier
from zeroshard.core.precision import Precision
from zeroshard.core.work import DoneWork
from zeroshard.errors import StorageError
from zeroshard.memory import Loan, MemoryCounter
from zeroshard.state.gradient import GradientAllocator, RestingGradient
from zeroshard.state.state import State

__all__ = ["GradientPath"]


class GradientPath:
    """The gradients of one trainable segment."""

    def __init__(
        self,
        flat: FlatBuffer,
        cells: Cells,
        precision: Precision,
        *,
        transport: Transport,
        streams: Lanes,
        meter: MemoryCounter,
        place: GradientAllocator,
        codec: Codec | None,
        feedback: Feedback | None,
        partial: Callable[[], State],
        note: Callable[[StorageError], None],
    ) -> None:
        self.flat = flat
        self.cells = cells
        self.precision = precision
        self.used = [False] * len(flat.layout.slots)  # has a gradient since the last drop
        self._transport = transport
        self._streams = streams
        self._meter = meter
        self._place = place
        self._codec = codec
        self.residual = None if codec is None or feedback is None else Residual(feedback)
        self._make_partial = partial
        self._note = note
        self._buffer: GradBuffer | None = None
        self._views: list[torch.Tensor] = []
        self._seen = [False] * len(self.used)
        self._partial: State | None = None
        self._partial_seen = [False] * len(self.used)
        self._partial_lost = False  # it could not be made, read or written: it is NaN
        self._flight: Flight | None = None
        self._loan: Loan | None = None  # of the buffer, but where that is the resting gradient
        self._flight_loan: Loan | None = None
        self._flight_fresh = False
        self._flight_frees: list[str] = []  # what streams call the memory that ends with it
        self._round = 0  # buffers borrowed so far: names them apart
        self._held: RestingGradient | None = None
        self._resting: weakref.ref[RestingGradient] | None = None
        # where a reduce under way leaves our slice, if the gradient rests elsewhere
        self._sum: torch.Tensor | None = None
        # nothing to sum: the buffer is the resting gradient
        self._direct = transport.size == 1 and precision.wire is precision.accumulate
        (low, high), (first, _) = flat.own_span, flat.stepped
        self._own = (low - first, high - first)
        # ranks whose sums come here
        self.members = flat.layout.members(transport.rank, flat.layout.scope(cells.optim))
        # OWN: one node's sum is the sum of all ranks
        scope = flat.layout.scope(cells.grad) if cells.grad.is_partial else None
        # inside no_sync they are added here, before the ranks
        self.sums_micro_batches = scope is Scope.WHOLE
        self.sums_nodes = scope is Scope.COLUMN

    @property
    def key(self) -> str:
        """The segment's key in collectives."""
        return self.flat.key

    @property
    def sums_are_shared(self) -> bool:
        """Whether other ranks step what this one does, and so need its sum."""
        return len(self.members) > 1

    @property
    def _buffer_name(self) -> str:
        return f"{self.key}.grad.{self._round}"

    @property
    def buffer_bytes(self) -> int:
        """The bytes of one gradient buffer in the wire dtype."""
        return self.flat.layout.numel * self.precision.wire.itemsize

    @property
    def rest_bytes(self) -> int:
        """Bytes of the gradient at rest now, partial sums included."""
        return sum(self.bytes_by_tier().values())

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes of the gradient at rest now on each tier, partial sums included."""
        out: dict[Tier, int] = {}
        for held in (self._partial, self.resting()):
            if held is not None:
                for tier, num_bytes in held.bytes_by_tier().items():
                    out[tier] = out.get(tier, 0) + num_bytes
        return out

    def move_rest(self, split: int) -> None:
        """Let the gradients to come rest on the device up to element `split`."""
        self._place.move(split)

    @property
    def tiered(self) -> bool:
        """Whether the resting gradient lies, in part or as a whole, on another tier."""
        return self._place.tiered

    @property
    def is_landing(self) -> bool:
        """Whether a sum is on its way to another tier, and so held on the device, too."""
        resting = self.resting()
        return resting is not None and resting.is_landing

    def land(self) -> None:
        """Return when it is there."""
        resting = self.resting()
        if resting is not None:
            resting.land()

    @property
    def in_flight(self) -> bool:
        """Whether a reduce of this segment is under way."""
        return self._flight is not None

    def add(
        self, index: int, grad: torch.Tensor, *, sync: bool, make_room: Callable[[int], None]
    ) -> None:
        """Take in the gradient of parameter `index`; `make_room(num_bytes)` is called before a
        buffer is borrowed.
        """
        self.used[index] = True
        if self.sums_micro_batches and (self._has_partial or not sync):
            self._add_partial(index, grad)
            return
        if self._buffer is None:
            self._borrow(make_room)
        view = self._views[index]
        if self._seen[index]:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._seen[index] = True

    def _borrow(self, make_room: Callable[[int], None]) -> None:
        flat = self.flat
        if self._direct and not self.tiered and self.resting() is None:
            self._buffer = GradBuffer(self._open_resting()[0].fetch(*self._own))
            self._views = flat.views_of(self._buffer.data)
            return
        make_room(self.buffer_bytes)
        if self._codec is None:
            self._buffer = self._transport.grad_buffer(
                self.key, flat.layout.numel, self.precision.wire, flat.full.device
            )
        else:
            self._buffer = GradBuffer(self._place.scratch(flat.layout.numel, self.precision.wire))
        self._loan = self._meter.lend(self._buffer.data, self.buffer_bytes)
        self._round += 1
        self._streams.alloc(self._buffer_name)
        self._views = flat.views_of(self._buffer.data)

    def _add_partial(self, index: int, grad: torch.Tensor) -> None:
        slot = self.flat.layout.slots[index]
        with self._losing_partial():
            if self._partial is None:
                self._partial = self._make_partial()
            with self._partial.borrowed(slot.offset, slot.stop, write=True) as part:
                view = self.flat.view_in(part, index)
                if self._partial_seen[index]:
                    view.add_(grad.to(view.device))
                else:
                    view.copy_(grad)
        self._partial_seen[index] = True

    @contextmanager
    def _losing_partial(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._partial_lost = True
            self._note(error)

    def _close_partial(self) -> None:
        if self._partial is not None:
            self._partial.close()
        self._partial, self._partial_seen, self._partial_lost = (
            None,
            [False] * len(self.used),
            False,
        )

    @property
    def has_local(self) -> bool:
        """Whether gradients are here that no reduce has taken yet."""
        return self._buffer is not None or (self._has_partial and not self.sums_nodes)

    @property
    def has_node_sum(self) -> bool:
        """Whether a sum over this node's ranks is here that no reduce between nodes has taken
        yet.
        """
        return self.sums_nodes and self._has_partial

    @property
    def _has_partial(self) -> bool:
        return self._partial is not None or self._partial_lost

    def reduce(self, *, make_room: Callable[[int], None], with_earlier: bool = True) -> None:
        """Hand what is here to the transport (nothing here: contribute zeros); the sum is added
        to the resting gradient.

        Without `with_earlier`, sums of earlier micro-batches stay here for the next reduce.
        """
        self.finish()
        if with_earlier and self._has_partial and not self.sums_nodes:
            if self._buffer is None:
                self._borrow(make_room)
            for index, seen in enumerate(self._partial_seen):
                if seen:
                    self._take_partial(index)
            self._close_partial()
        self._zero_unseen()
        resting, fresh = self._open_resting()
        if self._buffer is not None and self._loan is None:  # summed in place
            self._end_round()
            return
        if resting.is_average:  # no zero_grad() since the last step: more is added to that average
            self._streams.write(f"{self.key}.resting")
            resting.reopen(self._own)
        out, accumulate = self._room_for_sum(resting, fresh)
        self._streams.fork("reduce")
        with self._streams.on("reduce"):
            if self._buffer is not None:
                self._streams.read(self._buffer_name)
            self._streams.write(f"{self.key}.resting" if self._sum is None else f"{self.key}.sum")
            work = self._start_reduce(out, accumulate=accumulate, with_earlier=with_earlier)
            if self.flat.full.device.type != "cpu":
                work.wait()  # enqueues
                self._land(fresh)
            event = self._streams.mark("reduce")
        self._take_off(work, event, fresh=fresh)

    def _start_reduce(self, out: torch.Tensor, *, accumulate: bool, with_earlier: bool) -> Work:
        buffer, options = self._encoded(), self._wire(accumulate)
        if not self.sums_nodes:
            return self._transport.reduce(self.key, buffer, self.flat.layout.ranges, out, **options)
        held = None
        if with_earlier and self._partial is not None:
            held, self._partial = self._partial.whole, None
            self._streams.read(f"{self.key}.partial")
            self._flight_frees.append(f"{self.key}.partial")
        return mesh_of(self._transport).reduce(
            self.key, buffer, self.flat.layout.ranges, out, partial=held, **options
        )

    def _wire(self, accumulate: bool) -> dict[str, Any]:
        dtype = self.precision.wire if self._codec is None else torch.uint8
        return {"wire_dtype": dtype, "accumulate": accumulate, "codec": self._codec}

    def _encoded(self) -> GradBuffer | None:
        """Return the transport's buffer with what is to be sent, encoded where gradients travel
        so.
        """
        codec, buffer = self._codec, self._buffer
        if codec is None or buffer is None:
            return buffer
        coded = self._transport.grad_buffer(
            self.key, codec.encoded_bytes(buffer.data.numel()), torch.uint8, buffer.data.device
        )
        if self.residual is None:
            codec.encode(buffer.data, coded.data)
        else:
            self.residual.encode(codec, buffer.data, coded.data)
        return coded

    def reduce_inside(self) -> None:
        """Hand what is here to the other ranks of this node; their sum waits here for the reduce
        that goes on between nodes.
        """
        self.finish()
        self._zero_unseen()
        accumulate = self._partial is not None
        if self._partial is None:
            self._partial = self._make_partial()
            self._streams.alloc(f"{self.key}.partial")
        self._streams.fork("reduce")
        with self._streams.on("reduce"):
            if self._buffer is not None:
                self._streams.read(self._buffer_name)
            self._streams.write(f"{self.key}.partial")
            work = mesh_of(self._transport).reduce_inside(
                self.key,
                self._encoded(),
                self.flat.layout.ranges,
                self._partial.whole,
                **self._wire(accumulate),
            )
            if self.flat.full.device.type != "cpu":
                work.wait()  # enqueues
            event = self._streams.mark("reduce")
        self._take_off(work, event, fresh=False)

    def _take_off(self, work: Work, event: object, *, fresh: bool) -> None:
        self._flight = Flight([work], self._streams, event)
        self._flight_fresh = fresh
        self._flight_loan = self._loan
        if self._buffer is not None:
            self._flight_frees.append(self._buffer_name)
        self._end_round()

    def _take_partial(self, index: int) -> None:
        slot = self.flat.layout.slots[index]
        with self._losing_partial():
            if self._partial is not None and not self._partial_lost:
                with self._partial.borrowed(slot.offset, slot.stop, write=False) as part:
                    self._views[index].copy_(self.flat.view_in(part, index))
        if self._partial_lost:
            self._views[index].fill_(float("nan"))
        self._seen[index] = True

    def _room_for_sum(self, resting: RestingGradient, fresh: bool) -> tuple[torch.Tensor, bool]:
        """Return where the reduce leaves our slice of the sum, and whether it adds to what is
        there.
        """
        if resting.on_device:
            return resting.fetch(*self._own), not fresh
        numel = self._own[1] - self._own[0]
        self._sum = self._place.scratch(numel)
        self._flight_frees.append(f"{self.key}.sum")
        self._streams.alloc(f"{self.key}.sum")
        return self._sum, False

    def _land(self, fresh: bool) -> None:
        """Hand a finished sum over to the tier where the gradient rests."""
        resting = self._held if self._held is not None else self.resting()
        if self._sum is not None and resting is not None:
            resting.take(self._own, self._sum, fresh=fresh)
        self._sum = None

    def _end_round(self) -> None:
        self._buffer, self._loan, self._views = None, None, []
        self._seen = [False] * len(self.used)

    def _zero_unseen(self) -> None:
        if self._buffer is None:
            return
        end = 0
        for slot, seen in zip(self.flat.layout.slots, self._seen, strict=True):
            if seen:
                if slot.offset > end:
                    self._buffer.data[end : slot.offset].zero_()
                end = slot.stop
        if end < self.flat.layout.numel:
            self._buffer.data[end:].zero_()
        self._streams.write(self._buffer_name)

    def _open_resting(self) -> tuple[RestingGradient, bool]:
        """Return the resting gradient, held by us until `seal`, and whether it was made just
        now.
        """
        resting = self.resting()
        if resting is not None:
            self._held = resting
            return resting, False
        self._streams.alloc(f"{self.key}.resting")
        self._held = self._place.open()
        self._resting = weakref.ref(self._held)
        return self._held, True

    def finish(self, *, block: bool = True) -> None:
        """Wait for the reduce under way (or only take note that it is over); its buffer is free
        again.
        """
        if self._flight is None or not (block or self._flight.done()):
            return
        self._flight.wait()
        self._flight = None
        self._land(self._flight_fresh)
        for name in self._flight_frees:
            self._streams.free(name)
        self._flight_frees = []
        self._meter.give_back(self._flight_loan)
        self._flight_loan = None

    @property
    def gathers_averages(self) -> bool:
        """Whether the other ranks' averages have to come here."""
        return self.sums_are_shared and self.resting() is not None

    def gather_averages(self) -> Work:
        """Start bringing the other ranks' averaged slices here, where `gathers_averages`. The
        caller forks, waits and joins.
        """
        resting = self.resting()
        assert resting is not None and self._flight is None, self.key
        if not resting.on_device:
            return self._gather_through(resting)
        with self._streams.on("reduce"):
            self._streams.write(f"{self.key}.resting")
            work = self._meet(resting.fetch(*self._own), resting.state.whole)
            if self.flat.full.device.type != "cpu":
                work.wait()  # enqueues
        return work

    def _gather_through(self, resting: RestingGradient) -> Work:
        """Bring the other ranks' averaged slices here through the device, a segment at a time."""
        start, stop = self.flat.stepped
        whole = self._place.scratch(stop - start).to(self.precision.accumulate)
        resting.exchange(self._own, whole, lambda mine: self._meet(mine, whole).wait())
        return DoneWork()

    def _meet(self, mine: torch.Tensor, whole: torch.Tensor) -> Work:
        """Start bringing together what every rank that steps the same has averaged."""
        ranges = self.flat.layout.ranges
        if len(self.members) < self._transport.size:
            return mesh_of(self._transport).gather_column(self.key, mine, ranges, whole)
        return self._transport.all_gather(self.key, mine, ranges, whole)

    def resting(self) -> RestingGradient | None:
        """Return the resting gradient, if one is alive."""
        return (
            self._held
            if self._held is not None
            else (self._resting() if self._resting is not None else None)
        )

    def let_go(self) -> None:
        """Stop holding the resting gradient: its sealed gradients do."""
        self._held = None

    def drop(self, indices: Sequence[int]) -> None:
        """Forget the gradients of parameters `indices`: the user zeroed them."""
        self.finish()
        if self.sums_nodes:
            self._zero_partial(set(indices))
        for index in indices:
            self.used[index] = False
            self._partial_seen[index] = False
        if not any(self.used):
            self._close_partial()
            self._held, self._resting = None, None
            return
        resting = self.resting()
        if resting is not None:
            gone = set(indices)
            for start, stop in self._owned_spans(gone):
                resting.zero(start, stop)

    def zero(self, index: int) -> None:
        """Set the gradient of parameter `index` to zero, keeping it
        (``zero_grad(set_to_none=False)``).
        """
        self.finish()
        self._zero_partial({index})
        resting = self.resting()
        if resting is not None:
            for start, stop in self._owned_spans({index}):
                resting.zero(start, stop)

    def _zero_partial(self, indices: set[int]) -> None:
        if self._partial is None:
            return
        span = self.flat.layout.span(self._transport.rank, self.flat.layout.scope(self.cells.grad))
        for piece in self.flat.layout.pieces_in(span):
            if piece.index in indices and (self.sums_nodes or self._partial_seen[piece.index]):
                with (
                    self._losing_partial(),
                    self._partial.borrowed(piece.shard_start, piece.shard_stop, write=True) as part,
                ):
                    part.zero_()

    def _owned_spans(self, indices: set[int]) -> list[tuple[int, int]]:
        return [
            (p.shard_start, p.shard_stop)
            for p in self.flat.layout.pieces_in(self.flat.stepped)
            if p.index in indices
        ]

    def average(self, loss_scale: float) -> bool:
        """Divide our slice of the sum by the number of ranks and by `loss_scale` (a power of
        two); return whether all of it is finite.
        """
        resting = self.resting()
        if resting is None:
            return True
        self._streams.write(f"{self.key}.resting")
        return resting.average(self._own, self._transport.size * loss_scale)

    def first_bad(self) -> str | None:
        """Return the name of the first parameter here whose averaged gradient is not finite."""
        resting = self.resting()
        if resting is None:
            return None
        for piece in self.flat.layout.pieces_in(self.flat.stepped):
            if not resting.is_finite(piece.shard_start, piece.shard_stop):
                return piece.name
        return None

    def squares(self) -> dict[int, float]:
        """Return, for every rank whose averages are here, the sum of squares of its own in fp64;
        not of gradients that were cleared elsewhere.
        """
        resting = self.resting()
        layout, out = self.flat.layout, {}
        for rank in self.members:
            base = layout.ranges[rank][0] - self.flat.stepped[0]
            total = 0.0
            if resting is not None:
                for piece in (piece for piece in layout.pieces(rank) if self.used[piece.index]):
                    total += resting.squares(base + piece.shard_start, base + piece.shard_stop)
            out[rank] = total
        return out

    def scale(self, factor: float) -> None:
        """Multiply the averaged gradient by `factor`."""
        resting = self.resting()
        if resting is not None:
            self._streams.write(f"{self.key}.resting")
            resting.scale(factor)

    def forget_residual(self) -> None:
        """Forget what encoding has lost so far."""
        if self.residual is not None:
            self.residual.forget()

    def forget_memory(self) -> None:
        """Close memory on other tiers that is kept for the next gradient."""
        self._place.forget_memory()

    def abandon(self) -> None:
        """After an exception: no gradient at all. The transport has forgotten what was under
        way.
        """
        self.forget_residual()
        if self._buffer is not None and self._loan is not None and self._codec is None:
            self._transport.return_buffer(self._buffer)
        self._meter.give_back(self._loan)
        self._meter.give_back(self._flight_loan)
        self._end_round()
        self._flight, self._flight_loan = None, None
        self._held, self._resting, self._sum = None, None, None
        self._flight_frees = []
        self._close_partial()
        self.used = [False] * len(self.used)
