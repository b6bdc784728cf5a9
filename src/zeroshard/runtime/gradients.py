"""The way of a gradient: from autograd into the segment's buffer, over the wire, into the resting gradient.

    param.grad --copy--> buffer (wire dtype) --reduce--> resting (+=)             cells.grad sharded, or outside no_sync
    param.grad --add---> partial (accumulate dtype) ... --cast--> buffer --reduce--> resting     cells.grad partial, inside no_sync

The resting gradient is a *sum* over ranks and micro-batches until ``average`` divides it, once, after the sum. Invariants: the bytes of a
buffer are handed to the transport whole (parameters without a gradient and padding are zeros); the reduces of one segment complete in
order. Cost: one copy of each gradient, and ``numel * wire (N-1)/N`` bytes on the wire per reduce.

What it does not do: it does not know when a backward ends or who reads the result (runtime/engine.py), nor what a module is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zeroshard.buffer import FlatBuffer, Flight, Lanes, Meter
from zeroshard.comm.transport import GradBuffer, Transport, Work
from zeroshard.core.placement import Tier
from zeroshard.core.policy import Cells
from zeroshard.core.precision import Precision
from zeroshard.core.work import DoneWork
from zeroshard.errors import StorageError
from zeroshard.optim.resting import DeviceResting, Resting, RestingPlace, TieredResting
from zeroshard.tier.shelf import Shelf

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
        meter: Meter,
        place: RestingPlace,
        partial: Callable[[], Shelf],
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
        self._make_partial = partial
        self._note = note
        self._buffer: GradBuffer | None = None
        self._in_place = False  # the buffer is the resting gradient
        self._views: list[torch.Tensor] = []
        self._seen = [False] * len(self.used)
        self._partial: Shelf | None = None
        self._partial_seen = [False] * len(self.used)
        self._partial_lost = False  # it could not be made, read or written: it is NaN
        self._flight: Flight | None = None
        self._flight_bytes = 0
        self._flight_fresh = False
        self._flight_name = ""
        self._round = 0  # buffers borrowed so far: names them apart
        self._held: Resting | None = None
        self._resting: weakref.ref[Resting] | None = None
        self._sum: torch.Tensor | None = None  # where a reduce under way leaves our slice, if the gradient rests elsewhere
        low, high = flat.layout.ranges[transport.rank]
        self._direct = transport.size == 1 and precision.wire is precision.accumulate  # nothing to sum: the buffer is the resting gradient
        self._own = (low, high) if self.sums_are_replicated else (0, high - low)

    @property
    def key(self) -> str:
        return self.flat.key

    @property
    def sums_are_replicated(self) -> bool:
        """Whether every rank steps every parameter, and so needs the whole sum."""
        return not self.cells.optim.is_sharded

    @property
    def _buffer_name(self) -> str:
        return f"{self.key}.grad.{self._round}"

    @property
    def buffer_bytes(self) -> int:
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
        return isinstance(resting, TieredResting) and resting.is_landing

    def land(self) -> None:
        """Return when it is there."""
        resting = self.resting()
        if isinstance(resting, TieredResting):
            resting.land()

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def add(self, index: int, grad: torch.Tensor, *, sync: bool, make_room: Callable[[int], None]) -> None:
        """Take in the gradient of parameter `index`; `make_room(num_bytes)` is called before a buffer is borrowed."""
        self.used[index] = True
        if self._has_partial or (self.cells.grad.is_partial and not sync):
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
            self._buffer, self._in_place = GradBuffer(self._open_resting()[0].fetch(*self._own)), True
            self._views = flat.views_of(self._buffer.data)
            return
        make_room(self.buffer_bytes)
        self._buffer = self._transport.grad_buffer(self.key, flat.layout.numel, self.precision.wire, flat.full.device)
        self._meter.add(self.buffer_bytes)
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
        if self._partial is not None and self._partial.slab is not None:
            self._partial.slab.close()
        self._partial, self._partial_seen, self._partial_lost = None, [False] * len(self.used), False

    @property
    def has_local(self) -> bool:
        """Whether gradients are here that no reduce has taken yet."""
        return self._buffer is not None or self._has_partial

    @property
    def _has_partial(self) -> bool:
        return self._partial is not None or self._partial_lost

    def reduce(self, *, make_room: Callable[[int], None]) -> None:
        """Hand what is here to the transport (nothing here: contribute zeros); the sum is added to the resting gradient."""
        self.finish()
        if self._has_partial:
            if self._buffer is None:
                self._borrow(make_room)
            for index, seen in enumerate(self._partial_seen):
                if seen:
                    self._take_partial(index)
            self._close_partial()
        self._zero_unseen()
        resting, fresh = self._open_resting()
        if self._in_place:
            self._end_round()
            return
        if resting.divided_by:  # no zero_grad() since the last step: more is added to that average
            self._streams.write(f"{self.key}.resting")
            resting.reopen(self._own)
        out, accumulate = self._room_for_sum(resting, fresh)
        self._streams.fork("reduce")
        with self._streams.on("reduce"):
            if self._buffer is not None:
                self._streams.read(self._buffer_name)
            self._streams.write(f"{self.key}.resting" if self._sum is None else f"{self.key}.sum")
            work = self._transport.reduce(
                self.key, self._buffer, self.flat.layout.ranges, out, wire_dtype=self.precision.wire, accumulate=accumulate
            )
            if self.flat.full.device.type != "cpu":
                work.wait()  # enqueues
                self._land(fresh)
            event = self._streams.mark("reduce")
        self._flight = Flight([work], self._streams, event)
        self._flight_fresh = fresh
        self._flight_bytes = 0 if self._buffer is None else self.buffer_bytes
        self._flight_name = self._buffer_name
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

    def _room_for_sum(self, resting: Resting, fresh: bool) -> tuple[torch.Tensor, bool]:
        """Return where the reduce leaves our slice of the sum, and whether it adds to what is there."""
        if isinstance(resting, DeviceResting):
            return resting.fetch(*self._own), not fresh
        numel = self._own[1] - self._own[0]
        self._sum = self._place.scratch(numel)
        self._streams.alloc(f"{self.key}.sum")
        return self._sum, False

    def _land(self, fresh: bool) -> None:
        """Hand a finished sum over to the tier where the gradient rests."""
        resting = self._held if self._held is not None else self.resting()
        if self._sum is not None and isinstance(resting, TieredResting):
            resting.take(self._own, self._sum, fresh=fresh)
        self._sum = None

    def _end_round(self) -> None:
        self._buffer, self._views, self._in_place = None, [], False
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

    def _open_resting(self) -> tuple[Resting, bool]:
        """Return the resting gradient, held by us until `seal`, and whether it was made just now."""
        resting = self.resting()
        if resting is not None:
            self._held = resting
            return resting, False
        self._streams.alloc(f"{self.key}.resting")
        self._held = self._place.open()
        self._resting = weakref.ref(self._held)
        return self._held, True

    def finish(self, *, block: bool = True) -> None:
        """Wait for the reduce under way (or only take note that it is over); its buffer is free again."""
        if self._flight is None or not (block or self._flight.done()):
            return
        self._flight.wait()
        self._flight = None
        self._land(self._flight_fresh)
        if self.tiered:
            self._streams.free(f"{self.key}.sum")
        if self._flight_bytes:
            self._streams.free(self._flight_name)
            self._meter.remove(self._flight_bytes)
            self._flight_bytes = 0

    @property
    def gathers_averages(self) -> bool:
        """Whether every rank steps everything, so that the other ranks' averages have to come here."""
        return self.sums_are_replicated and self._transport.size > 1 and self.resting() is not None

    def gather_averages(self) -> Work:
        """Start bringing the other ranks' averaged slices here, where `gathers_averages`. The caller forks, waits and joins."""
        resting = self.resting()
        assert resting is not None and self._flight is None, self.key
        if isinstance(resting, TieredResting):
            return self._gather_through(resting)
        assert isinstance(resting, DeviceResting)
        with self._streams.on("reduce"):
            self._streams.write(f"{self.key}.resting")
            work = self._transport.all_gather(self.key, resting.fetch(*self._own), self.flat.layout.ranges, resting.tensor)
            if self.flat.full.device.type != "cpu":
                work.wait()  # enqueues
        return work

    def _gather_through(self, resting: TieredResting) -> Work:
        """Bring the other ranks' averaged slices here through the device, a segment at a time."""
        whole = self._place.scratch(self.flat.layout.numel).to(self.precision.accumulate)
        resting.exchange(self._own, whole, lambda mine: self._transport.all_gather(self.key, mine, self.flat.layout.ranges, whole).wait())
        return DoneWork()

    def resting(self) -> Resting | None:
        """Return the resting gradient, if one is alive."""
        return self._held if self._held is not None else (self._resting() if self._resting is not None else None)

    def let_go(self) -> None:
        """Stop holding the resting gradient: its sealed gradients do."""
        self._held = None

    def drop(self, indices: Sequence[int]) -> None:
        """Forget the gradients of parameters `indices`: the user zeroed them."""
        self.finish()
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
        """Set the gradient of parameter `index` to zero, keeping it (``zero_grad(set_to_none=False)``)."""
        self.finish()
        if self._partial is not None and self._partial_seen[index]:
            slot = self.flat.layout.slots[index]
            with self._losing_partial(), self._partial.borrowed(slot.offset, slot.stop, write=True) as part:
                part.zero_()
        resting = self.resting()
        if resting is not None:
            for start, stop in self._owned_spans({index}):
                resting.zero(start, stop)

    def _owned_spans(self, indices: set[int]) -> list[tuple[int, int]]:
        layout = self.flat.layout
        span = (0, layout.numel) if self.sums_are_replicated else layout.ranges[self._transport.rank]
        return [(p.shard_start, p.shard_stop) for p in layout.pieces_in(span) if p.index in indices]

    def average(self, loss_scale: float) -> bool:
        """Divide our slice of the sum by the number of ranks and by `loss_scale` (a power of two); return whether all of it is finite."""
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
        layout = self.flat.layout
        span = (0, layout.numel) if self.sums_are_replicated else layout.ranges[self._transport.rank]
        for piece in layout.pieces_in(span):
            if not resting.is_finite(piece.shard_start, piece.shard_stop):
                return piece.name
        return None

    def squares(self) -> list[float]:
        """Return, per rank whose pieces are here, the sum of squares of the averaged gradient in fp64, in rank order."""
        resting = self.resting()
        layout = self.flat.layout
        ranks = range(layout.num_shards) if self.sums_are_replicated else (self._transport.rank,)
        out = []
        for rank in ranks:
            base = layout.ranges[rank][0] if self.sums_are_replicated else 0
            total = 0.0
            if resting is not None:
                for piece in layout.pieces(rank):
                    total += resting.squares(base + piece.shard_start, base + piece.shard_stop)
            out.append(total)
        return out

    def scale(self, factor: float) -> None:
        """Multiply the averaged gradient by `factor`."""
        resting = self.resting()
        if resting is not None:
            self._streams.write(f"{self.key}.resting")
            resting.scale(factor)

    def forget_memory(self) -> None:
        """Close memory on other tiers that is kept for the next gradient."""
        self._place.forget_memory()

    def abandon(self) -> None:
        """After an exception: no gradient at all. The transport has forgotten what was under way."""
        if self._buffer is not None and not self._in_place:
            self._transport.return_buffer(self._buffer)
            self._meter.remove(self.buffer_bytes)
        if self._flight_bytes:
            self._meter.remove(self._flight_bytes)
        self._end_round()
        self._flight, self._flight_bytes = None, 0
        self._held, self._resting, self._sum = None, None, None
        self._close_partial()
        self.used = [False] * len(self.used)
