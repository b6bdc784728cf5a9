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

import torch

from zeroshard.comm.transport import ReduceRequest, Work
from zeroshard.comm.two_level import gather_over, mesh_of
from zeroshard.core.layout import Range
from zeroshard.core.placement import Scope, Tier
from zeroshard.memory import Loan
from zeroshard.runtime.bucket import GradBucket, PartialSum
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight, Hops, ended
from zeroshard.state.allocator import GradientAllocator
from zeroshard.state.gradient import RestingGradient
from zeroshard.state.reduction import Asked
from zeroshard.state.state import State

__all__ = ["GradientPath"]


@dataclass(frozen=True)
class Reduction:
    """One reduce under way."""

    flight: Flight
    loan: Loan | None  # of the bucket
    frees: Sequence[str]  # what streams call the memory that ends with it


class GradientPath:
    """The gradients of one trainable segment."""

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        context: Context,
        *,
        place: GradientAllocator,
        partial: Callable[[], State],
    ) -> None:
        """`place` makes the resting gradient, `partial` memory for a partial sum."""
        cells, transport = plan.cells, context.transport
        self.flat = flat
        self.cells = cells
        self.precision = precision = plan.precision(context)
        self.used = [False] * len(flat.layout.slots)  # has a gradient since the last drop
        self._transport = transport
        self._streams = context.streams
        self._meter = context.meter
        self._place = place
        self._memory = context.memory
        codec = plan.grad_codec(context)
        self._request = ReduceRequest(flat.key, flat.layout.ranges, precision.wire, codec)
        self.bucket = GradBucket(flat, self._request, context)
        self.partial = PartialSum(flat, partial, context.faults.note)
        self.reduction: Reduction | None = None
        self._held: RestingGradient | None = None
        self._resting: weakref.ref[RestingGradient] | None = None
        # nothing to sum: the buffer is the resting gradient
        self._direct = transport.size == 1 and precision.wire is precision.accumulate
        (low, high), (first, _) = flat.own_span, flat.stepped
        self._own = (low - first, high - first)
        # ranks whose sums come here
        self.members = flat.layout.members(transport.rank, flat.layout.scope(cells.optim))
        # SHARD: one node's sum is the sum of all ranks
        scope = flat.layout.scope(cells.grad) if cells.grad.is_partial else None
        # inside no_sync they are added here, before the ranks
        self.sums_micro_batches = scope is Scope.FULL
        self.sums_nodes = scope is Scope.NODE_SHARD

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
    def is_flushing(self) -> bool:
        """Whether a sum is on its way to another tier, and so held on the device, too."""
        resting = self.resting()
        return resting is not None and resting.is_flushing

    def flush(self) -> None:
        """Return when it is there."""
        resting = self.resting()
        if resting is not None:
            resting.flush()

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
        self.wait()
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
        accumulate = total is None and not fresh

        def hops() -> Hops:
            yield from self._collective(
                "resting" if total is None else "sum",
                lambda: self._start_reduce(
                    out, frees, accumulate=accumulate, with_earlier=with_earlier
                ),
            )
            if total is not None:
                self._store_sum(total, fresh)

        self._launch(hops(), frees)

    def _collective(self, target: str, start: Callable[[], Work]) -> Hops:
        """Run the collective of a reduce, which writes to `target`."""
        if self.bucket.is_open:
            self._streams.read(self.bucket.name)
        self._streams.write(f"{self.key}.{target}")
        yield from ended(start(), self._streams)

    def _launch(self, hops: Hops, frees: list[str]) -> None:
        flight = Flight([hops], self._streams, "reduce")
        if self.bucket.is_open:
            frees.append(self.bucket.name)
        self.reduction = Reduction(flight, self.bucket.loan, frees)
        self.bucket.close()

    def _start_reduce(
        self, out: torch.Tensor, frees: list[str], *, accumulate: bool, with_earlier: bool
    ) -> Work:
        buffer = self.bucket.outgoing()
        if not self.sums_nodes:
            return self._transport.reduce(self._request, buffer, out, accumulate=accumulate)
        held = None
        if with_earlier and self.partial.state is not None:
            held = self.partial.take()
            self._streams.read(f"{self.key}.partial")
            frees.append(f"{self.key}.partial")
        return mesh_of(self._transport).reduce(
            self._request, buffer, out, accumulate=accumulate, partial=held
        )

    def reduce_inside(self) -> None:
        """Hand what is here to the other ranks of this node; their sum waits here for the reduce
        that goes on between nodes.
        """
        self.wait()
        self.bucket.zero_unseen()
        state, accumulate = self.partial.state, self.partial.state is not None
        if state is None:
            state = self.partial.open()
            self._streams.alloc(f"{self.key}.partial")
        whole = state.whole

        def start() -> Work:
            buffer = self.bucket.outgoing()
            return mesh_of(self._transport).reduce_inside(
                self._request, buffer, whole, accumulate=accumulate
            )

        self._launch(self._collective("partial", start), [])

    def _room_for_sum(self, resting: RestingGradient) -> tuple[torch.Tensor | None, list[str]]:
        """Return where the reduce leaves our slice of the sum (None: where the gradient rests), and
        what streams call it.
        """
        if resting.on_device:
            return None, []
        self._streams.alloc(f"{self.key}.sum")
        return self._memory.empty(self._own[1] - self._own[0]), [f"{self.key}.sum"]

    def _store_sum(self, total: torch.Tensor, fresh: bool) -> None:
        """Hand a finished sum over to the tier where the gradient rests."""
        resting = self.resting()
        if resting is not None:
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

    def wait(self, *, block: bool = True) -> None:
        """Wait for the reduce under way (or only take note that it is over); its buffer is free
        again.
        """
        coming = self.reduction
        if coming is None or not (block or coming.flight.done()):
            return
        coming.flight.wait()
        self.reduction = None
        for name in coming.frees:
            self._streams.free(name)
        self._meter.end_loan(coming.loan)

    @property
    def gathers_averages(self) -> bool:
        """Whether the other ranks' averages have to come here."""
        return len(self.members) > 1 and self.resting() is not None

    def gather_averages(self) -> Hops:
        """Bring the other ranks' averaged slices here, where `gathers_averages`."""
        resting = self.resting()
        assert resting is not None and self.reduction is None, self.key
        if not resting.on_device:  # through the device, a segment at a time
            start, stop = self.flat.stepped
            whole = self._memory.empty(stop - start).to(self.precision.accumulate)
            resting.exchange(self._own, whole, lambda mine: self._meet(mine, whole).wait())
            return
        self._streams.write(f"{self.key}.resting")
        yield from ended(self._meet(resting.fetch(*self._own), resting.state.whole), self._streams)

    def _meet(self, mine: torch.Tensor, whole: torch.Tensor) -> Work:
        """Start bringing together what every rank that steps the same has averaged."""
        axes = next(axes for _, axes in self.flat.routes.average.levels if axes)
        ranges = self.flat.layout.ranges
        return gather_over(self._transport, axes, self.key, mine, ranges, whole)

    def resting(self) -> RestingGradient | None:
        """Return the resting gradient, if one is alive."""
        return (
            self._held
            if self._held is not None
            else (self._resting() if self._resting is not None else None)
        )

    def release_resting(self) -> None:
        """Stop holding the resting gradient: its sealed gradients do."""
        self._held = None

    def clear(self, indices: Sequence[int]) -> None:
        """Forget the gradients of parameters `indices`: the user zeroed them."""
        self.wait()
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
        self.wait()
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

    def release_idle(self) -> None:
        """Close memory on other tiers that is kept for the next gradient."""
        self._place.release_idle()

    def abandon(self) -> None:
        """After an exception: no gradient at all. The transport has forgotten what was under
        way.
        """
        self.bucket.abandon()
        if self.reduction is not None:
            self._meter.end_loan(self.reduction.loan)
        self._held, self._resting, self.reduction = None, None, None
        self.partial.close()
        self.used = [False] * len(self.used)
