"""The way of a gradient: from autograd into the segment's buffer, over the wire, into the
resting gradient.

    cells.grad sharded, or outside no_sync:
        param.grad --copy--> buffer (wire dtype) --reduce--> resting (+=)
    cells.grad partial, inside no_sync:
        param.grad --add---> partial (accumulate dtype) ... --cast--> buffer --reduce--> resting

Invariants: the bytes of a buffer are handed to the transport whole (parameters without a gradient
and padding are zeros); the reduces of one segment complete in order. Cost: one copy of each
gradient, and ``numel * wire (N-1)/N`` bytes on the wire per reduce.

What it does not do: it does not know when a backward ends (runtime/backward.py), what becomes of
the sum (runtime/grad.py), nor what a module is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from zeroshard.comm.levels import Step
from zeroshard.comm.transport import GradBuffer, ReduceRequest, Work
from zeroshard.core.placement import Tier
from zeroshard.core.recording import Operation
from zeroshard.core.route import Axis, Kind
from zeroshard.memory import Loan
from zeroshard.runtime.bucket import GradBucket, PartialSum
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.grad import Gradient

__all__ = ["GradientPath"]


@dataclass
class Reduction:
    """One reduce under way."""

    flight: Flight
    buffer: GradBuffer | None  # the bucket's
    loan: Loan | None
    # other memory of it: an accelerator's allocator would give it away while the lane still uses it
    uses: Sequence[object]

    def release_bucket(self) -> None:
        """Hold the bucket no longer."""
        self.buffer = self.loan = None


class GradientPath:
    """The gradients of one trainable segment."""

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        context: Context,
        *,
        summed: Gradient,
        partial: PartialSum,
        whole: PartialSum,
    ) -> None:
        """`partial` is what the cell of the gradient says, if anything, and `whole` a sum of
        micro-batches in any row, which may be the same.
        """
        transport = context.transport
        self.flat = flat
        self.summed = summed
        self.partial = partial
        self._whole = whole
        self.precision = precision = plan.precision(context)
        # by which ranks compare reduces: those of parts may differ along 'tp'
        self.whole_numel = sum(prod(part.shape) for part in plan.parts)
        # of which the elements count in a norm, where not all do (docs/design/mesh.md)
        self.counted = plan.counted(context)
        self.used = [False] * len(flat.layout.slots)  # has a gradient since the last drop
        self._context = context
        self._streams = context.streams
        self._meter = context.meter
        codec = plan.grad_codec(context)
        self._request = ReduceRequest(flat.key, flat.layout.ranges, precision.wire, codec)
        self.bucket = GradBucket(flat, self._request, context)
        self.reduction: Reduction | None = None
        # nothing to sum: the buffer is the resting gradient
        self._direct = transport.size == 1 and precision.wire is precision.accumulate

    @property
    def sums_micro_batches(self) -> bool:
        """Whether they are added here inside no_sync, before the ranks."""
        return self.partial.of_micro_batches

    @property
    def _sums(self) -> tuple[PartialSum, ...]:
        return (self.partial,) if self._whole is self.partial else (self.partial, self._whole)

    @property
    def key(self) -> str:
        """The segment's key in collectives."""
        return self.flat.key

    @property
    def in_norm(self) -> Sequence[bool]:
        """Of which parameters the elements count in a norm here: used ones, and of those that
        other ranks along the mesh have alike, the first rank's.
        """
        if self.counted is None:
            return self.used
        return [used and counts for used, counts in zip(self.used, self.counted, strict=True)]

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes of the gradient at rest now on each tier, partial sums included."""
        out: dict[Tier, int] = {}
        for held in (*self._sums, self.summed.resting()):
            if held is not None:
                for tier, num_bytes in held.bytes_by_tier().items():
                    out[tier] = out.get(tier, 0) + num_bytes
        return out

    @property
    def in_flight(self) -> bool:
        """Whether a reduce of this segment is under way."""
        return self.reduction is not None

    def add(
        self,
        index: int,
        grad: torch.Tensor,
        *,
        sync: bool,
        more: bool = False,
        make_room: Callable[[int], None],
    ) -> None:
        """Take in the gradient of parameter `index`; `make_room(num_bytes)` is called before a
        buffer is borrowed. `more` gradients of it may come before a reduce.
        """
        self.used[index] = True
        rests = self.partial.of_micro_batches and (self.partial.is_there or not sync)
        # a sum in the dtype of the wire would be rounded after every micro-batch
        if rests or (more and self.precision.wire is not self.precision.accumulate):
            self._whole.add(index, grad)
            return
        if self.bucket.buffer is None:
            self._open_bucket(make_room)
        self.bucket.add(index, grad)

    def _open_bucket(self, make_room: Callable[[int], None]) -> None:
        if self.bucket.buffer is not None:
            return
        summed = self.summed
        if self._direct and not summed.tiered and summed.resting() is None:
            self.bucket.open_at_rest(summed.open()[0].fetch(*summed.own))
        else:
            self.bucket.open(make_room)

    @property
    def has_local(self) -> bool:
        """Whether gradients are here that no reduce has taken yet."""
        return self.bucket.buffer is not None or self._whole.is_there

    @property
    def has_node_sum(self) -> bool:
        """Whether a sum over this node's ranks is here that no reduce between nodes has taken
        yet.
        """
        return self.partial.of_nodes and self.partial.is_there

    def reduce(
        self, *, make_room: Callable[[int], None], with_earlier: bool = True
    ) -> Flight | None:
        """Return a flight, to be started, that sums what is here over all ranks (nothing here:
        zeros) and adds it to the resting gradient; None where it is that already.

        Without `with_earlier`, sums of earlier micro-batches stay here for the next reduce.
        """
        self.wait()
        if with_earlier:
            self._close_whole(make_room)
        self.bucket.zero_unseen()
        summed, (resting, fresh) = self.summed, self.summed.open()
        if self.bucket.rests:
            self.bucket.close()
            return None
        held = None
        if with_earlier and self.partial.of_nodes and self.partial.state is not None:
            held = self.partial.take()
        if resting.on_device:
            out = resting.fetch(*summed.own)
            return self._hand_over(self._sum(out, held, accumulate=not fresh), held, out)
        out = summed.room()
        to_rest = Step(partial(summed.take, out, fresh), "here")
        return self._hand_over([*self._sum(out, held, accumulate=False), to_rest], held, out)

    def reduce_inside(self, *, make_room: Callable[[int], None]) -> Flight:
        """Return a flight, to be started, that sums what is here over the ranks of this node; the
        sum waits here for the reduce that goes on between nodes.
        """
        self.wait()
        self._close_whole(make_room)
        self.bucket.zero_unseen()
        is_there = self.partial.state is not None
        state = self.partial.state if is_there else self.partial.open()
        levels = self._context.levels
        reduce = partial(levels.inside.reduce, levels.reduce_inside(self._request))
        assert state is not None
        started = partial(reduce, out=state.whole, accumulate=is_there)
        return self._hand_over([self._first(started, Axis.LOCAL)])

    def _close_whole(self, make_room: Callable[[int], None]) -> None:
        """Hand the sum of micro-batches over to the bucket, if there is one."""
        if self._whole.is_there:
            self._open_bucket(make_room)
            self._whole.move_to(self.bucket)

    def _sum(
        self, out: torch.Tensor, held: torch.Tensor | None, *, accumulate: bool
    ) -> Sequence[Step]:
        """Return the sum over all ranks to `out`, step by step; `held`: earlier sums of this
        node's ranks.
        """
        levels = self._context.levels
        if not self.flat.sums_nodes_first:
            reduce = partial(levels.flat.reduce, self._request, out=out, accumulate=accumulate)
            return [self._first(reduce, Axis.FLAT)]
        both = levels.node_sum(self._request, out, accumulate=accumulate, held=held)
        told = partial(self._operation, Axis.NODE)
        second = Step(both.between, told=told, unused=both.unused)
        return [self._first(both.inside, Axis.LOCAL), second]

    def _first(self, reduce: Callable[..., Work], axis: Axis) -> Step:
        """Return the step in which `reduce` takes what is in the bucket."""
        start = partial(reduce, buffer=self.bucket.buffer)
        if self._request.codec is not None:
            start = partial(self._encode, reduce)
        return Step(start, told=partial(self._operation, axis))

    def _encode(self, reduce: Callable[..., Work]) -> Work:
        """Start `reduce` of what has been handed over, encoded. Our memory of it goes at once where
        nothing that was enqueued still reads it: whoever is slow to wait for sums would hold a
        second gradient of the whole model.
        """
        going = self.reduction
        assert going is not None, self.key
        coded = self.bucket.encode(going.buffer)
        if not self._streams.enqueues:
            self._meter.end_loan(going.loan)
            going.release_bucket()
        return reduce(buffer=coded)

    def _operation(self, axis: Axis) -> Operation:
        """Return what to say of one level of a reduce."""
        hops = [hop for hop in self.flat.routes.reduce if hop.axis is axis]
        received = sum(hop.link_bytes(self.flat.portion).total for hop in hops)
        return Operation("reduce", Kind.REDUCE_SCATTER.value, self.key, received)

    def _hand_over(self, steps: Sequence[Step], *uses: object) -> Flight:
        """Return a flight of `steps`, which use memory beside the bucket; the next gradient opens
        another one.
        """
        flight = Flight([steps], self._streams, "reduce", self._context.levels)
        self.reduction = Reduction(flight, self.bucket.buffer, self.bucket.loan, uses)
        self.bucket.close()
        return flight

    def wait(self, *, block: bool = True) -> None:
        """Wait for the reduce under way (or only take note that it is over); its buffer is free
        again.
        """
        coming = self.reduction
        if coming is None or not (block or coming.flight.done()):
            return
        coming.flight.wait()
        self.reduction = None
        self._meter.end_loan(coming.loan)

    def clear(self, indices: Sequence[int]) -> None:
        """Forget the gradients of parameters `indices`: the user zeroed them."""
        self.wait()
        gone = set(indices)
        if self.partial.of_nodes:
            self.partial.zero(gone)
        for index in indices:
            self.used[index] = False
            self._whole.seen[index] = False
            self.bucket.seen[index] = False
        if not any(self.used):
            self.partial.close()
            self._whole.close()
            self.summed.reset()
            return
        self.summed.zero(gone)

    def zero(self, index: int) -> None:
        """Set the gradient of parameter `index` to zero, keeping it
        (``zero_grad(set_to_none=False)``).
        """
        self.wait()
        for sums in self._sums:
            sums.zero({index})
        self.bucket.seen[index] = False
        self.summed.zero({index})

    def abandon(self) -> None:
        """After an exception: no gradient at all. The transport has forgotten what was under
        way.
        """
        self.bucket.abandon()
        if self.reduction is not None:
            self.reduction.flight.abandon()
            self._meter.end_loan(self.reduction.loan)
        self.reduction = None
        self.summed.reset()
        self.partial.close()
        self._whole.close()
        self.used[:] = [False] * len(self.used)
