"""The gradients of one segment before a reduce over all ranks has taken them.

    cell of the gradient
    any, outside no_sync   param.grad --copy--> buffer --reduce--> accumulator
    S, inside no_sync      the same
    P, inside no_sync      param.grad --add--> sum of micro-batches .. --cast--> buffer --reduce-->
    P of a node, inside    param.grad --copy--> buffer --reduce inside--> sum of the node .. ----->

The buffer [numel] has the dtype of the wire; the two sums have that in which gradients rest. The
sum of micro-batches lies on the tier of the cell, that of the node's ranks [column] on the device.

Invariants: a buffer is handed over whole (parameters without a gradient and padding are zeros); at
most one is open, and one on its way; the reduces of one segment complete in order. A sum of
micro-batches that could not be made, read or written is lost: it reads as NaN. Cost: one copy of
each gradient, and ``numel * wire (N-1)/N`` bytes on the wire per reduce.

What it does not do: it does not know when a backward ends (runtime/backward.py), what becomes of
the sum over all ranks (runtime/grad.py), nor what a module is.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from zeroshard.comm.levels import Step
from zeroshard.comm.transport import ReduceRequest, Transport, Work
from zeroshard.core.layout import Range
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.recording import Operation
from zeroshard.core.route import Axis, Kind
from zeroshard.errors import StateError, StorageError
from zeroshard.memory import Loan
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.grad import Accumulator
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.partial_sums import BinaryCounter
from zeroshard.state.gradient import Gradient
from zeroshard.state.state import State
from zeroshard.tier.store import Store

__all__ = ["Bucket"]


@dataclass
class Reduction:
    """One reduce under way."""

    flight: Flight
    buffer: torch.Tensor | None  # the bucket's
    loan: Loan | None
    # other memory of it: an accelerator's allocator would give it away while the lane still uses it
    uses: Sequence[object]

    def release_buffer(self) -> None:
        """Hold the buffer no longer."""
        self.buffer = self.loan = None


class Bucket:
    """The gradients of one trainable segment that no reduce over all ranks has taken yet."""

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        context: Context,
        *,
        accumulator: Accumulator,
        store: Store | None,
    ) -> None:
        """`accumulator` takes what reduces bring. In `store` (None: on the device) a sum of
        micro-batches rests, where the cell has one.
        """
        cell, layout = plan.cells.grad, flat.layout
        scope = layout.scope(cell)  # SHARD: one node's sum is the sum of all ranks
        # inside no_sync: micro-batches before ranks, or the ranks of a node before nodes
        self.sums_micro_batches = cell.is_partial and scope is Scope.FULL
        self.sums_nodes = cell.is_partial and scope is Scope.NODE_SHARD
        self.flat = flat
        self.key = flat.key  # the segment's key in collectives
        self.accumulator = accumulator
        self.precision = precision = plan.precision(context)
        # by which ranks compare reduces: those of parts may differ along 'tp'
        self.whole_numel = sum(prod(part.shape) for part in plan.parts)
        # of which the elements count in a norm, where not all do (docs/design/mesh.md)
        self.counted = plan.counted(context)
        none = [False] * len(layout.slots)  # a flag for each parameter
        self.used = none.copy()  # has a gradient since the last drop
        # the buffer that is open, its part of each parameter, and which of them have a gradient
        self.buffer: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.filled = none.copy()
        self.loan: Loan | None = None  # None where the gradient is summed where it rests
        self.num_bytes = layout.numel * precision.wire.itemsize  # of a buffer
        self.reduction: Reduction | None = None
        self.has_sum = False  # whether a sum of micro-batches waits for a reduce
        self._summed = none.copy()  # ... and of which parameters
        self._sum: State | None = None  # None: lost, or not there
        self._is_lost = False
        self._store = store if self.sums_micro_batches else None
        self._column = layout.span(plan.rank, Scope.NODE_SHARD)
        self._node_sum: torch.Tensor | None = None  # [column], of earlier micro-batches
        self._context = context
        self._streams = context.streams
        self._meter = context.meter
        # with a codec the buffer is memory of ours, and encoded into one of the transport's
        self._memory = context.memory
        self._codec = plan.grad_codec(context)
        self._residual = context.options.codecs.residual(self._codec)
        self._request = ReduceRequest(flat.key, layout.ranges, precision.wire, self._codec)
        self._leaves = context.leaves
        self._arriving: tuple[Sequence[Range], torch.Tensor] | None = None  # sums of leaves
        self._counter: BinaryCounter | None = None  # of this rank's own leaves
        if self._leaves is not None and self._leaves.is_local:
            self._counter = BinaryCounter(self._leaves.tree, self.key, self._store)
        # nothing to sum: the buffer is the resting gradient
        alone = context.transport.size == 1 and self._leaves is None
        self._direct = alone and precision.wire is precision.accumulate

    @property
    def in_norm(self) -> Sequence[bool]:
        """Of which parameters the elements count in a norm here: used ones, and of those that
        other ranks along the mesh have alike, the first rank's.
        """
        if self.counted is None:
            return self.used
        return [used and counts for used, counts in zip(self.used, self.counted, strict=True)]

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes of the gradient at rest now on each tier, sums that wait included."""
        resting, out = self.accumulator.resting(), Counter[Tier]()
        out.update({} if self._sum is None else self._sum.bytes_by_tier())
        out.update({} if resting is None else resting.numbers.bytes_by_tier())
        if self._node_sum is not None:
            out[Tier.DEVICE] += self._node_sum.nbytes
        if self.accumulator.partial_sums is not None:
            out.update(self.accumulator.partial_sums.later.bytes_by_tier())
        if self._counter is not None:
            out.update(self._counter.bytes_by_tier())
        return out

    @property
    def in_flight(self) -> bool:
        """Whether a reduce of this segment is under way."""
        return self.reduction is not None

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients are here that no reduce over all ranks has taken yet."""
        return self.buffer is not None or self.has_sum or self._node_sum is not None

    # ------------------------------------------------------------------ what autograd brings

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
        rests = self.sums_micro_batches and (self.has_sum or not sync)
        # a sum in the dtype of the wire would be rounded after every micro-batch
        if rests or (more and self.precision.wire is not self.precision.accumulate):
            self._add_to_sum(index, grad)
            return
        if self.buffer is None:
            self._open(make_room)
        view = self.views[index]
        (view.add_ if self.filled[index] else view.copy_)(grad)
        self.filled[index] = True

    def open_zeros(self, make_room: Callable[[int], None]) -> None:
        """Have a buffer open, without a gradient."""
        if self.buffer is None:
            self._open(make_room)

    def _open(self, make_room: Callable[[int], None]) -> None:
        """Open a buffer."""
        accumulator = self.accumulator
        if self._direct and not accumulator.tiered and accumulator.resting() is None:
            self._open_at_rest()
        else:
            make_room(self.num_bytes)
            self._borrow()

    def _open_at_rest(self) -> None:
        """Fill the resting gradient [numel] itself."""
        resting = self.accumulator.open()[0].fetch(*self.accumulator.own)
        self.buffer = resting
        self.views = self.flat.buffer.views_of(resting)

    def _borrow(self, dtype: torch.dtype | None = None) -> None:
        """Fill memory of the transport's, or with a codec of ours; in the dtype of the wire, or in
        another.
        """
        numel, device = self.flat.layout.numel, self.flat.full.device
        wire = dtype or self._request.dtype
        if self._codec is None:
            lender = self.flat.lender if self._leaves is None else self._lender
            self.buffer = lender.grad_buffer(self.key, numel, wire, device)
        else:
            self.buffer = self._memory.empty(numel, wire)
        self.loan = self._meter.lend(self.buffer, self.buffer.nbytes)
        self.views = self.flat.buffer.views_of(self.buffer)

    @property
    def _lender(self) -> Transport:
        """The transport of the buffers of the next reduce."""
        if self._leaves is not None and self._leaves.sums:
            return self._context.levels.flat
        return self.flat.lender

    def _close(self) -> None:
        """Let the next gradient open another buffer."""
        self.buffer, self.loan, self.views = None, None, []
        self.filled = [False] * len(self.filled)

    # ------------------------------------------------------------------ the sum of micro-batches

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Lose the sum where the body raises StorageError."""
        try:
            yield
        except StorageError as error:
            self._is_lost = True
            self._context.faults.note(error)

    def _open_sum(self) -> State:
        """Make the sum, its contents undefined."""
        numel, dtype = self.flat.layout.numel, self.precision.accumulate
        if self._store is None:
            self._sum = State.of(self._memory.empty(numel, dtype))
        else:
            self._sum = State(self._store.allocate(f"{self.key} partial gradient", numel, dtype))
        return self._sum

    def _add_to_sum(self, index: int, grad: torch.Tensor) -> None:
        slot, self.has_sum = self.flat.layout.slots[index], True
        with self._losing():
            state = self._open_sum() if self._sum is None else self._sum
            with state.borrowed(slot.offset, slot.stop, write=True) as part:
                view = self.flat.buffer.view_in(part, index)
                if self._summed[index]:
                    view.add_(grad.to(view.device))
                else:
                    view.copy_(grad)
        self._summed[index] = True

    def _move_sum(self, make_room: Callable[[int], None]) -> None:
        """Add the sum of micro-batches to the buffer."""
        if self.buffer is None:
            self._open(make_room)
        for index in [index for index, summed in enumerate(self._summed) if summed]:
            slot = self.flat.layout.slots[index]
            with self._losing():
                if self._sum is not None and not self._is_lost:
                    with self._sum.borrowed(slot.offset, slot.stop, write=False) as part:
                        view = self.views[index]
                        micro_batches = self.flat.buffer.view_in(part, index)
                        (view.add_ if self.filled[index] else view.copy_)(micro_batches)
            if self._is_lost:
                self.views[index].fill_(float("nan"))
            self.filled[index] = True
        self._close_sum()

    def _close_sum(self) -> None:
        """Give the memory of the sum back."""
        if self._sum is not None:
            self._sum.close()
        self._sum, self._summed = None, [False] * len(self._summed)
        self.has_sum = self._is_lost = False

    # ------------------------------------------------------------------ reduces

    def reduce(
        self, *, make_room: Callable[[int], None], with_earlier: bool = True
    ) -> Flight | None:
        """Return a flight, to be started, that sums what is here over all ranks (nothing here:
        zeros) and adds it to the resting gradient; None where it is that already.

        Without `with_earlier`, sums of earlier micro-batches stay here for the next reduce.
        """
        if self.reduction is not None:
            self.wait()
        if with_earlier and self.has_sum:
            self._move_sum(make_room)
        self._zero_unfilled()
        for listener in [] if self._leaves is None else self._leaves.handed_over:
            listener(self.key, self.buffer)
        if self._counter is not None and self._counts_up(self._counter, make_room):
            return None
        accumulator, (resting, fresh) = self.accumulator, self.accumulator.open()
        if self.buffer is not None and self.loan is None:
            self._close()
            return None
        if self._leaves is not None:
            return self._reduce_leaves(self._leaves)
        held = None
        if with_earlier:
            held, self._node_sum = self._node_sum, None
        if resting.on_device:
            out = resting.fetch(*accumulator.own)
            return self._hand_over(self._steps(out, held, accumulate=not fresh), held, out)
        out = accumulator.room()
        to_rest = Step(partial(_take, weakref.ref(resting), out, fresh), "here")
        return self._hand_over([*self._steps(out, held, accumulate=False), to_rest], held, out)

    def _counts_up(self, counter: BinaryCounter, make_room: Callable[[int], None]) -> bool:
        """Add what is in the buffer to the sum of this rank's leaves; return whether others follow
        before a reduce. In the last round that sum becomes the buffer.
        """
        leaves, numel = self._leaves, self.flat.layout.numel
        assert leaves is not None, self.key
        if leaves.own is not None:
            grad = self._memory.empty(numel).zero_() if self.buffer is None else self.buffer
            with self._losing():
                counter.add(leaves.own, grad, self._memory)
        self._return_buffer()
        if not leaves.is_last:
            return True
        make_room(numel * torch.float32.itemsize)
        self._borrow(torch.float32)
        assert self.buffer is not None, self.key
        with self._losing():
            counter.move_to(self.buffer)
        if self._is_lost:
            self.buffer.fill_(float("nan"))
            self._is_lost = False
        return False

    def _return_buffer(self) -> None:
        """Give a buffer back that no reduce takes."""
        if self.buffer is not None:
            self._lender.return_buffer(self.buffer)
            self._meter.end_loan(self.loan)
            self._close()

    def _reduce_leaves(self, leaves: Leaves) -> Flight:
        """Return a flight that forms the sums of the leaves of this round; `wait` adds them up."""
        spans, sums = leaves.spans, leaves.sums
        low, high = self.accumulator.own
        out = self._memory.empty(len(spans) * (high - low))
        request = self._request
        if sums or self._counter is not None:
            dtype = request.dtype if self._counter is None else torch.float32
            request = replace(request, dtype=dtype, sums=sums)
        if sums:
            reduce = partial(self._context.levels.flat.reduce, request, out=out, accumulate=False)
            steps: Sequence[Step] = [self._first(reduce, Axis.FLAT)]
        else:
            steps = self._steps(out, None, accumulate=False, request=request)
        self._arriving = (spans, out)
        return self._hand_over(steps, out)

    def reduce_inside(self, *, make_room: Callable[[int], None]) -> Flight:
        """Return a flight, to be started, that sums what is here over the ranks of this node; the
        sum waits here for the reduce that goes on between nodes.
        """
        self.wait()
        if self.has_sum:
            self._move_sum(make_room)
        self._zero_unfilled()
        is_there = self._node_sum is not None
        out = self._open_node_sum() if self._node_sum is None else self._node_sum
        levels = self._context.levels
        reduce = partial(levels.inside.reduce, levels.reduce_inside(self._request))
        started = partial(reduce, out=out, accumulate=is_there)
        return self._hand_over([self._first(started, Axis.LOCAL)])

    def _open_node_sum(self) -> torch.Tensor:
        """Make the sum of this node's ranks [column], its contents undefined."""
        start, stop = self._column
        self._node_sum = self._memory.empty(stop - start, self.precision.accumulate)
        return self._node_sum

    def _zero_unfilled(self) -> None:
        """Set to zero what has no gradient."""
        if self.buffer is None:
            return
        data, layout = self.buffer, self.flat.layout
        empty = list(layout.gaps)
        if not all(self.filled):
            slots = zip(layout.slots, self.filled, strict=True)
            empty += [(slot.offset, slot.stop) for slot, filled in slots if not filled]
        if empty:  # one kernel on an accelerator
            torch._foreach_zero_([data[start:stop] for start, stop in empty])

    def _steps(
        self,
        out: torch.Tensor,
        held: torch.Tensor | None,
        *,
        accumulate: bool,
        request: ReduceRequest | None = None,
    ) -> Sequence[Step]:
        """Return the sum over all ranks to `out`, step by step; `held`: earlier sums of this
        node's ranks.
        """
        levels, request = self._context.levels, request or self._request
        if not self.flat.sums_nodes_first:
            reduce = partial(levels.flat.reduce, request, out=out, accumulate=accumulate)
            return [self._first(reduce, Axis.FLAT)]
        both = levels.node_sum(request, out, accumulate=accumulate, held=held)
        describe = partial(self._operation, Axis.NODE)
        second = Step(both.between, describe=describe, unused=both.unused)
        return [self._first(both.inside, Axis.LOCAL), second]

    def _first(self, reduce: Callable[..., Work], axis: Axis) -> Step:
        """Return the step in which `reduce` takes what is in the buffer."""
        start = partial(reduce, buffer=self.buffer)
        if self._codec is not None:
            start = partial(self._encode, reduce)
        return Step(start, describe=partial(self._operation, axis))

    def _encode(self, reduce: Callable[..., Work]) -> Work:
        """Start `reduce` of what has been handed over, encoded. Our memory of it goes at once where
        nothing that was enqueued still reads it: whoever is slow to wait for sums would hold a
        second gradient of the whole model.
        """
        going = self.reduction
        assert going is not None, self.key
        coded = self._encoding(going.buffer)
        if not self._streams.enqueues:
            self._meter.end_loan(going.loan)
            going.release_buffer()
        return reduce(buffer=coded)

    def _encoding(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        """Return the transport's buffer with the encoding of `buffer`, which has been handed over,
        with the residual added first.
        """
        codec = self._codec
        assert codec is not None
        if buffer is None:
            return None
        num_bytes, device = codec.encoded_bytes(buffer.numel()), buffer.device
        coded = self.flat.lender.grad_buffer(self.key, num_bytes, torch.uint8, device)
        if self._residual is None:
            codec.encode(buffer, coded)
        else:
            self._residual.encode(codec, buffer, coded)
        return coded

    def _operation(self, axis: Axis) -> Operation:
        """Return what to say of one level of a reduce."""
        hops = [hop for hop in self.flat.routes.reduce if hop.axis is axis]
        received = sum(hop.link_bytes(self.flat.portion).total for hop in hops)
        return Operation("reduce", Kind.REDUCE_SCATTER.value, self.key, received)

    def _hand_over(self, steps: Sequence[Step], *uses: object) -> Flight:
        """Return a flight of `steps`, which use memory beside the buffer; the next gradient opens
        another one.
        """
        flight = Flight([steps], self._streams, "reduce", self._context.levels)
        self.reduction = Reduction(flight, self.buffer, self.loan, uses)
        self._close()
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
        if self._arriving is not None:
            (spans, out), self._arriving = self._arriving, None
            self.accumulator.add_leaves(spans, out)

    # ------------------------------------------------------------------ what the user clears

    def clear(self, indices: Sequence[int]) -> None:
        """Forget the gradients of parameters `indices`: the user zeroed them."""
        if self._leaves is not None:
            self._check_cleared(self._leaves)
        for index in indices:
            self.used[index] = False
        if any(self.used):
            self.zero(indices)
            return
        if self.reduction is not None:
            self.wait()
        self.filled = [False] * len(self.filled)
        if self.has_sum:
            self._close_sum()
        self._node_sum = None
        if self._counter is not None:
            self._counter.reset()
        self.accumulator.reset()

    def zero(self, indices: Collection[int]) -> None:
        """Set the gradients of parameters `indices` to zero, keeping them
        (``zero_grad(set_to_none=False)``).
        """
        if self._leaves is not None:
            self._check_cleared(self._leaves)
        self.wait()
        for index in indices:
            self.filled[index] = self._summed[index] = False
        if self._node_sum is not None:
            for piece in self.flat.layout.pieces_in(self._column):
                if piece.index in indices:
                    self._node_sum[piece.shard_start : piece.shard_stop].zero_()
        self.accumulator.zero(indices)

    def _check_cleared(self, leaves: Leaves) -> None:
        """Raise StateError between the leaves of a step: partial sums are of all parameters."""
        if leaves.in_step:
            raise StateError(
                "gradients were cleared between the leaves of a step: clear them after the loop"
                " over engine.leaves(), or leave that first"
            )

    # ------------------------------------------------------------------ codecs and exceptions

    @property
    def residual_bytes(self) -> int:
        """The bytes in which the error of encoded gradients is kept."""
        return 0 if self._residual is None else self._residual.num_bytes

    def reset_residual(self) -> None:
        """Forget what encoding has lost so far."""
        if self._residual is not None:
            self._residual.reset()

    def abandon(self) -> None:
        """After an exception: no gradient at all. The transport has forgotten what was under
        way.
        """
        self.reset_residual()
        if self.buffer is not None and self.loan is not None and self._codec is None:
            self._lender.return_buffer(self.buffer)
        self._meter.end_loan(self.loan)
        self._close()
        if self.reduction is not None:
            self.reduction.flight.abandon()
            self._meter.end_loan(self.reduction.loan)
        self.reduction = self._node_sum = self._arriving = None
        if self._counter is not None:
            self._counter.reset()
        self.accumulator.reset()
        self._close_sum()
        self.used[:] = [False] * len(self.used)  # a step asks this list


def _take(rests: weakref.ref[Gradient], total: torch.Tensor, fresh: bool) -> None:
    """Let `total` rest, unless all who held the gradient are gone: of padding alone at once."""
    gradient = rests()
    if gradient is not None:
        gradient.take(total, fresh)
