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
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.buffer import FlatBuffer, Flight, Lanes, mesh_of
from zeroshard.comm.codec import Codec
from zeroshard.comm.quantized import Feedback, Residual
from zeroshard.comm.transport import Transport, Work
from zeroshard.core.layout import Range
from zeroshard.core.placement import Cells, Scope, Tier
from zeroshard.core.precision import Precision
from zeroshard.core.work import DoneWork
from zeroshard.errors import StorageError
from zeroshard.memory import Loan, MemoryCounter
from zeroshard.runtime.bucket import GradBucket, PartialSum
from zeroshard.state.gradient import GradientAllocator, RestingGradient
from zeroshard.state.reduction import Asked
from zeroshard.state.state import State

__all__ = ["GradientPath"]


@dataclass(frozen=True)
class Reduction:
    """One reduce under way."""

    flight: Flight
    fresh: bool  # the sum is the first to rest
    loan: Loan | None  # of the bucket
    total: torch.Tensor | None  # our slice of the sum, still to land on another tier
    frees: Sequence[str]  # what streams call the memory that ends with it


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
        self.bucket = GradBucket(
            flat,
            precision.wire,
            transport=transport,
            streams=streams,
            meter=meter,
            scratch=place.scratch,
            codec=codec,
        )
        self.partial = PartialSum(flat, partial, note)
        self.reduction: Reduction | None = None
        self._held: RestingGradient | None = None
        self._resting: weakref.ref[RestingGradient] | None = None
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

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes of the gradient at rest now on each tier, partial sums included."""
        out: dict[Tier, int] = {}
        for held in (self.partial, self.resting()):
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
        return self.reduction is not None

    def add(
        self, index: int, grad: torch.Tensor, *, sync: bool, make_room: Callable[[int], None]
    ) -> None:
        """Take in the gradient of parameter `index`; `make_room(num_bytes)` is called before a
        buffer is borrowed.
        """
        self.used[index] = True
        if self.sums_micro_batches and (self.partial.is_there or not sync):
            self.partial.add(index, grad)
            return
        self._open_bucket(make_room)
        self.bucket.add(index, grad)

    def _open_bucket(self, make_room: Callable[[int], None]) -> None:
        if self.bucket.is_open:
            return
        if self._direct and not self.tiered and self.resting() is None:
            self.bucket.open_at_rest(self._open_resting()[0].fetch(*self._own))
        else:
            self.bucket.open(make_room)

    @property
    def has_local(self) -> bool:
        """Whether gradients are here that no reduce has taken yet."""
        return self.bucket.is_open or (self.partial.is_there and not self.sums_nodes)

    @property
    def has_node_sum(self) -> bool:
        """Whether a sum over this node's ranks is here that no reduce between nodes has taken
        yet.
        """
        return self.sums_nodes and self.partial.is_there

    def reduce(self, *, make_room: Callable[[int], None], with_earlier: bool = True) -> None:
        """Hand what is here to the transport (nothing here: contribute zeros); the sum is added
        to the resting gradient.

        Without `with_earlier`, sums of earlier micro-batches stay here for the next reduce.
        """
        self.finish()
        if with_earlier and self.partial.is_there and not self.sums_nodes:
            self._open_bucket(make_room)
            self.partial.move_to(self.bucket)
        self.bucket.zero_unseen()
        resting, fresh = self._open_resting()
        if self.bucket.rests:
            self.bucket.close()
            return
        if resting.is_average:  # no zero_grad() since the last step: more is added to that average
            self._streams.write(f"{self.key}.resting")
            resting.reopen(self._own)
        total, frees = self._room_for_sum(resting)
        out = resting.fetch(*self._own) if total is None else total
        self._streams.fork("reduce")
        with self._streams.on("reduce"):
            if self.bucket.is_open:
                self._streams.read(self.bucket.name)
            self._streams.write(f"{self.key}.{'resting' if total is None else 'sum'}")
            work = self._start_reduce(
                out, frees, accumulate=total is None and not fresh, with_earlier=with_earlier
            )
            if self.flat.full.device.type != "cpu":
                work.wait()  # enqueues
                self._land(total, fresh)
                total = None
            event = self._streams.mark("reduce")
        self._take_off(Flight([work], self._streams, event), fresh, total, frees)

    def _start_reduce(
        self, out: torch.Tensor, frees: list[str], *, accumulate: bool, with_earlier: bool
    ) -> Work:
        buffer, options = self.bucket.outgoing(self.residual), self._wire(accumulate)
        if not self.sums_nodes:
            return self._transport.reduce(self.key, buffer, self.flat.layout.ranges, out, **options)
        held = None
        if with_earlier and self.partial.state is not None:
            held = self.partial.take()
            self._streams.read(f"{self.key}.partial")
            frees.append(f"{self.key}.partial")
        return mesh_of(self._transport).reduce(
            self.key, buffer, self.flat.layout.ranges, out, partial=held, **options
        )

    def _wire(self, accumulate: bool) -> dict[str, Any]:
        dtype = self.precision.wire if self._codec is None else torch.uint8
        return {"wire_dtype": dtype, "accumulate": accumulate, "codec": self._codec}

    def reduce_inside(self) -> None:
        """Hand what is here to the other ranks of this node; their sum waits here for the reduce
        that goes on between nodes.
        """
        self.finish()
        self.bucket.zero_unseen()
        state, accumulate = self.partial.state, self.partial.state is not None
        if state is None:
            state = self.partial.open()
            self._streams.alloc(f"{self.key}.partial")
        self._streams.fork("reduce")
        with self._streams.on("reduce"):
            if self.bucket.is_open:
                self._streams.read(self.bucket.name)
            self._streams.write(f"{self.key}.partial")
            work = mesh_of(self._transport).reduce_inside(
                self.key,
                self.bucket.outgoing(self.residual),
                self.flat.layout.ranges,
                state.whole,
                **self._wire(accumulate),
            )
            if self.flat.full.device.type != "cpu":
                work.wait()  # enqueues
            event = self._streams.mark("reduce")
        self._take_off(Flight([work], self._streams, event), False, None, [])

    def _take_off(
        self, flight: Flight, fresh: bool, total: torch.Tensor | None, frees: list[str]
    ) -> None:
        if self.bucket.is_open:
            frees.append(self.bucket.name)
        self.reduction = Reduction(flight, fresh, self.bucket.loan, total, frees)
        self.bucket.close()

    def _room_for_sum(self, resting: RestingGradient) -> tuple[torch.Tensor | None, list[str]]:
        """Return where the reduce leaves our slice of the sum (None: where the gradient rests), and
        what streams call it.
        """
        if resting.on_device:
            return None, []
        self._streams.alloc(f"{self.key}.sum")
        return self._place.scratch(self._own[1] - self._own[0]), [f"{self.key}.sum"]

    def _land(self, total: torch.Tensor | None, fresh: bool) -> None:
        """Hand a finished sum over to the tier where the gradient rests."""
        resting = self.resting()
        if total is not None and resting is not None:
            resting.take(self._own, total, fresh=fresh)

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
        coming = self.reduction
        if coming is None or not (block or coming.flight.done()):
            return
        coming.flight.wait()
        self.reduction = None
        self._land(coming.total, coming.fresh)
        for name in coming.frees:
            self._streams.free(name)
        self._meter.give_back(coming.loan)

    @property
    def gathers_averages(self) -> bool:
        """Whether the other ranks' averages have to come here."""
        return len(self.members) > 1 and self.resting() is not None

    def gather_averages(self) -> Work:
        """Start bringing the other ranks' averaged slices here, where `gathers_averages`. The
        caller forks, waits and joins.
        """
        resting = self.resting()
        assert resting is not None and self.reduction is None, self.key
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
            self.partial.seen[index] = False
        if not any(self.used):
            self.partial.close()
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
        span = self.flat.layout.span(self._transport.rank, self.flat.layout.scope(self.cells.grad))
        self.partial.zero(
            [
                (piece.shard_start, piece.shard_stop)
                for piece in self.flat.layout.pieces_in(span)
                if piece.index in indices and (self.sums_nodes or self.partial.seen[piece.index])
            ]
        )

    def _owned_spans(self, indices: set[int]) -> list[tuple[int, int]]:
        return [
            (p.shard_start, p.shard_stop)
            for p in self.flat.layout.pieces_in(self.flat.stepped)
            if p.index in indices
        ]

    def average(self, loss_scale: float) -> bool:
        """Divide our slice of the sum by the number of ranks and by `loss_scale` (a power of
        two); return whether all of it is finite, as far as the host knows.
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
        resting, out = self.resting(), {}
        for rank in self.members:
            total = 0.0
            for index, span in self._spans(rank):
                if resting is not None and self.used[index]:
                    total += resting.squares(*span)
            out[rank] = total
        return out

    def asked(self) -> list[Asked]:
        """Return what the host has yet to read of an accelerator to know `squares`, and whether
        the averages are finite.
        """
        resting = self.resting()
        if resting is None:
            return []
        return resting.asked(span for rank in self.members for _, span in self._spans(rank))

    def _spans(self, rank: int) -> Iterator[tuple[int, Range]]:
        """Yield the parameters of which `rank` averages a part, and where that rests here."""
        base = self.flat.layout.ranges[rank][0] - self.flat.stepped[0]
        for piece in self.flat.layout.pieces(rank):
            yield piece.index, (base + piece.shard_start, base + piece.shard_stop)

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
        self.bucket.abandon()
        if self.reduction is not None:
            self._meter.give_back(self.reduction.loan)
        self._held, self._resting, self.reduction = None, None, None
        self.partial.close()
        self.used = [False] * len(self.used)
