"""The gradients of one segment before a reduce over all ranks has taken them.

    cell of the gradient
    any, outside no_sync   param.grad --copy--> buffer --reduce--> accumulator
    any, of one rank       param.grad --copy or add--> accumulator
    S, inside no_sync      the same
    P, inside no_sync      param.grad --add--> sum of micro-batches .. --cast--> buffer --reduce-->
    P of a node, inside    param.grad --copy--> buffer --reduce inside--> sum of the node .. ----->
    P, own leaves          param.grad --add--> binary counter ...... --add--> buffer --reduce-->

The buffer [numel] has the dtype of the wire; the sums have that in which gradients rest. Sums of
micro-batches (runtime/own_sums.py) lie on the tier of the cell, the sum of the node's ranks
[column] on the device.

Invariants: a buffer is handed over whole (parameters without a gradient and padding are zeros); at
most one is open, and one on its way; the reduces of one segment complete in order. Cost: one copy
of each gradient, and ``numel * wire (N-1)/N`` bytes on the wire per reduce.

What it does not do: it does not know when a backward ends (runtime/backward.py), what becomes of
the sum over all ranks (runtime/grad.py), nor what a module is.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from zeroshard.comm.levels import NodeSum, ReadyHop
from zeroshard.comm.transport import ReduceRequest, Work
from zeroshard.core.layout import Range
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.precision import dtype_name
from zeroshard.core.route import Axis, Kind
from zeroshard.core.work import Operation
from zeroshard.errors import StateError
from zeroshard.memory import Loan
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.grad import Accumulator
from zeroshard.runtime.leaves import Leaves
from zeroshard.state.gradient import Gradient

if TYPE_CHECKING:  # made in build.py
    from zeroshard.runtime.own_sums import MicroBatchSum, OwnLeaves


_COPY, _ADD = attrgetter("copy_"), attrgetter("add_")


@dataclass
class Reduction:
    """One reduce under way."""

    flight: Flight
    buffer: torch.Tensor | None  # the bucket's
    loan: Loan | None
    # other memory of it: an accelerator's allocator would give it away while the lane still uses it
    uses: Sequence[object]
    # sums of leaves that it forms beside the gradient, one after another, and the leaves of each
    apart: tuple[Sequence[Range], torch.Tensor] | None

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
        micro_batches: MicroBatchSum,
        own_leaves: OwnLeaves | None,
    ) -> None:
        """`accumulator` takes what reduces bring. Gradients wait in `micro_batches`, or in
        `own_leaves` where each rank adds up its own.
        """
        cell, layout = plan.cells.grad, flat.layout
        # inside no_sync: micro-batches before ranks, or the ranks of a node before nodes (where one
        # node's sum is not the sum of all ranks)
        self.sums_micro_batches = plan.sums_micro_batches
        self.sums_nodes = cell.is_partial and layout.scope(cell) is Scope.NODE_SHARD
        self.flat = flat
        self.key = flat.key  # the segment's key in collectives
        self.accumulator = accumulator
        self.precision = precision = plan.precision(context)
        self.wire = dtype_name(precision.wire)  # of gradients on it
        # elements of the whole parameters: parts differ in size along 'tp', so ranks compare this
        self.whole_numel = sum(prod(part.shape) for part in plan.parts)
        # the parameters that count in a norm, where not all do (docs/design/composition.md)
        self.counted = plan.counted(context)
        # of each parameter: whether it has a gradient since the last drop
        self.used = [False] * len(layout.slots)
        # whether a reduce goes in two levels
        axes, levels = {hop.axis for hop in flat.routes.reduce}, context.levels
        sums_nodes_first = levels.is_deep and not {Axis.LOCAL, Axis.NODE}.isdisjoint(axes)
        self._lenders = levels.inside if sums_nodes_first else levels.flat, levels.flat
        self._lender = self._lenders[0]  # of the buffer that is open
        self.buffer: torch.Tensor | None = None
        self.loan: Loan | None = None  # None where the buffer is the resting gradient
        self.reduction: Reduction | None = None
        # called before a reduce with `key` and what returns this rank's gradient, None without one
        self.handed_over: list[Callable[[str, Callable[[], torch.Tensor | None]], None]] = []
        self._micro_batches, self._own = micro_batches, own_leaves
        self._sum = micro_batches if own_leaves is None else own_leaves  # the one in use
        self._column = layout.span(plan.rank, Scope.NODE_SHARD)
        self._node_sum: torch.Tensor | None = None  # [column], of earlier micro-batches
        self._context = context
        self._streams, self._meter = context.streams, context.meter
        # with a codec the buffer is memory of ours, and encoded into one of the transport's
        self._memory = context.memory
        self._codec = plan.grad_codec(context)
        self._residual = context.options.codecs.residual(self._codec)
        # sums of leaves are not rounded
        wire = precision.wire if self._own is None else torch.float32
        self._request = ReduceRequest(flat.key, layout.ranges, wire, self._codec)
        self.num_bytes = layout.numel * wire.itemsize  # of a buffer
        # start the first level of a reduce: of all ranks, or of a node (alone, or before nodes)
        self._reduce: Callable[..., Work] = partial(levels.flat.reduce, self._request)
        self._both: NodeSum | None = None
        if sums_nodes_first:
            of_columns = levels.reduce_inside(self._request)
            self._reduce_inside = partial(levels.inside.reduce, of_columns)
            self._both = levels.node_sum(self._request)
            self._reduce = partial(self._both.inside, of_columns)
        self._leaves = context.leaves
        self._rounds = context.leaves is None and wire is not precision.accumulate
        # nothing to sum, and nothing that a buffer would round: it is the resting gradient
        exact = wire is precision.compute and precision.accumulate is torch.float32
        alone = context.transport.size == 1 and context.leaves is None
        self._direct = alone and (not self._rounds or (exact and self._codec is None))
        # by id of a buffer, for as long as somebody holds it (pools lend the same few again): every
        # parameter as a view of its memory, and the gaps; views of the buffer itself would hold it
        self._cuts: dict[int, tuple[object, list[torch.Tensor], list[torch.Tensor]]] = {}
        self._make_room: Callable[[int], None] = lambda num_bytes: None
        self._close()

    def _close(self) -> tuple[torch.Tensor | None, Loan | None]:
        """Let the next gradient open another buffer; return the one that was open, and its loan."""
        closed = self.buffer, self.loan
        self.buffer = self.loan = None
        self._adds = False  # whether that holds sums of earlier backwards, too
        self._gaps: list[torch.Tensor] = []  # the parts of the buffer between parameters
        # of each parameter: its part of the buffer, whether it has a gradient there, and what takes
        # its next one as it is; None where `add` does
        self.views: list[torch.Tensor] = []
        self.filled = [False] * len(self.used)
        self.takes: list[Callable[[torch.Tensor], object] | None] = [None] * len(self.used)
        return closed

    def follow(self, make_room: Callable[[int], None]) -> None:
        """Call `make_room(num_bytes)` before a buffer is borrowed, from now on."""
        self._make_room = make_room

    @property
    def in_norm(self) -> Sequence[bool]:
        """For each parameter whether its elements count in a norm here: used ones do, and of
        parameters that other ranks along the mesh have alike, the first rank's.
        """
        if self.counted is None:
            return self.used
        return [used and counts for used, counts in zip(self.used, self.counted, strict=True)]

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes of the gradient at rest now on each tier, sums that wait included."""
        resting, out = self.accumulator.resting(), Counter[Tier]()
        out.update(self._sum.bytes_by_tier())
        out.update({} if resting is None else resting.numbers.bytes_by_tier())
        if self._node_sum is not None:
            out[Tier.DEVICE] += self._node_sum.nbytes
        if self.accumulator.partial_sums is not None:
            out.update(self.accumulator.partial_sums.bytes_by_tier())
        return out

    @property
    def in_flight(self) -> bool:
        """Whether a reduce of this segment is under way."""
        return self.reduction is not None

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients are here that no reduce over all ranks has taken yet."""
        return self.buffer is not None or self._sum.waits or self._node_sum is not None

    # ------------------------------------------------------------------ what autograd brings

    def add(
        self, index: int, grad: torch.Tensor, *, sync: bool, more: bool = False, once: bool = False
    ) -> None:
        """Take in the gradient of parameter `index`. `more` gradients of it may come before a
        reduce, from other micro-batches; `once`: of no parameter does a second one, and `takes`
        may take the others.
        """
        self.used[index] = True
        rests = self._own is not None or (self.sums_micro_batches and (self._sum.waits or not sync))
        # a sum in the dtype of the wire would be rounded after every micro-batch
        if rests or (more and self._rounds):
            self._sum.add(index, grad)
            return
        if self.buffer is None:
            self._open(adds=once)
            if once:
                self.takes = list(map(_ADD if self._adds else _COPY, self.views))
        view, self.takes[index] = self.views[index], None
        if not self.filled[index]:
            (view.add_ if self._adds else view.copy_)(grad)
        elif view.dtype is self._request.dtype or self._adds:
            view.add_(grad)
        else:  # rounded as in a buffer
            view.copy_(view.to(self._request.dtype).add_(grad))
        self.filled[index] = True

    def open_zeros(self) -> None:
        """Have a buffer open, without a gradient, where gradients would have opened one."""
        if self.buffer is None and self._own is None:
            self._open()

    def _open(self, *, adds: bool = False) -> None:
        """Open a buffer: the resting gradient [numel] itself where nothing is to be summed and
        nothing rests, or what comes may be added (`adds`) to what does; else memory of the
        transport's, or with a codec of ours.
        """
        accumulator, flat, wire = self.accumulator, self.flat, self._request.dtype
        # a sum that waits, and what a listener is given, is rounded to the dtype of the wire
        rounds = self._rounds and (self._micro_batches.waits or bool(self.handed_over))
        is_direct = self._direct and not (rounds or accumulator.tiered)
        rests = is_direct and accumulator.resting() is not None
        if is_direct and not (rests and (self.handed_over or self._codec is not None or not adds)):
            self._adds = rests
            buffer = accumulator.open()[0].fetch(*accumulator.own)
        else:
            self._make_room(self.num_bytes)
            if self._codec is not None:
                buffer = self._memory.empty(flat.layout.numel, wire)
            else:
                if self._leaves is not None:  # a leaf's sums may go flat, others in two levels
                    self._lender = self._lenders[bool(self._leaves.sums)]
                device, numel = self._memory.device, flat.layout.numel
                buffer = self._lender.grad_buffer(self.key, numel, wire, device)
            self.loan = self._meter.lend(buffer, self.num_bytes)
        self.buffer, cuts, key = buffer, self._cuts, id(buffer)
        if key not in cuts:
            data, until = buffer.detach(), weakref.ref(buffer, lambda _: cuts.pop(key))
            gaps = [data[start:stop] for start, stop in flat.layout.gaps]
            cuts[key] = until, flat.buffer.views_of(data), gaps
        _, self.views, self._gaps = cuts[key]

    # ------------------------------------------------------------------ reduces

    def reduce(self, *, with_earlier: bool = True) -> Flight | None:
        """Return a flight, to be started, that sums what is here over all ranks (nothing here:
        zeros) and adds it to the resting gradient; None where it is that already.

        Without `with_earlier`, sums of earlier micro-batches stay here for the next reduce.
        """
        if self.reduction is not None:
            self.wait()
        if with_earlier and self._micro_batches.waits:
            self._move_sum()
        self._zero_unfilled()
        leaves, own = self._leaves, self._own
        for listener in self.handed_over if own is not None or True in self.filled else ():
            listener(self.key, (lambda: self.buffer) if own is None else own.leaf)
        if leaves is not None and own is not None:
            if leaves.is_last:  # the sum of this rank's own leaves is reduced, after the last
                self._open()
            own.end_leaf(leaves.own, self.buffer)
            if not leaves.is_last:
                return None
        accumulator, (resting, fresh) = self.accumulator, self.accumulator.open()
        if self.buffer is not None and self.loan is None:
            self._close()
            return None
        held, apart, then = None, None, list[ReadyHop]()
        accumulate = resting.on_device and not fresh
        if leaves is not None and not accumulator.takes(leaves.spans):
            out = self._memory.empty(len(leaves.spans) * (accumulator.own[1] - accumulator.own[0]))
            apart, accumulate = (leaves.spans, out), False
        else:
            if with_earlier:
                held, self._node_sum = self._node_sum, None
            if resting.on_device:
                out = resting.fetch(*accumulator.own)
            else:
                out = accumulator.room()
                take = partial(_take, weakref.ref(resting), out, fresh)
                then = [ReadyHop(take, "here")]
        reduce, both, axis = self._reduce, self._both, Axis.FLAT
        if leaves is not None and leaves.sums:
            request = replace(self._request, sums=leaves.sums)
            reduce = partial(self._context.levels.flat.reduce, request)
        elif both is not None:
            axis, start, told = Axis.LOCAL, partial(both.between, held), self._operation
            told = partial(told, Axis.NODE)
            then = [ReadyHop(start, describe=told, unused=both.unused, between=True), *then]
        return self._hand_over(reduce, axis, out, accumulate, then, held=held, apart=apart)

    def _move_sum(self) -> None:
        """Add the sum of micro-batches to the buffer."""
        if self.buffer is None:
            self._open()
        self._micro_batches.move_to(self.views, self.filled)

    def reduce_inside(self) -> Flight:
        """Return a flight, to be started, that sums what is here over the ranks of this node; the
        sum waits here for the reduce that goes on between nodes.
        """
        self.wait()
        self._move_sum()
        self._zero_unfilled()
        (start, stop), is_there = self._column, self._node_sum is not None
        if self._node_sum is None:
            self._node_sum = self._memory.empty(stop - start, self.precision.accumulate)
        return self._hand_over(self._reduce_inside, Axis.LOCAL, self._node_sum, is_there)

    def _zero_unfilled(self) -> None:
        """Set to zero what has no gradient, or add zero to the sum that rests there."""
        data, layout = self.buffer, self.flat.layout
        if data is None:
            return
        empty = [] if self._adds else list(self._gaps)
        if False in self.filled:
            slots = zip(layout.slots, self.filled, strict=True)
            empty += [data[slot.offset : slot.stop] for slot, filled in slots if not filled]
        if empty and self._adds:
            torch._foreach_add_(empty, 0.0)
        elif empty:  # one kernel on an accelerator
            torch._foreach_zero_(empty)

    def _encode(self, reduce: Callable[..., Work]) -> Work:
        """Start `reduce` of what has been handed over, encoded in the transport's buffer, the
        residual added first. Our memory of it goes at once where nothing that was enqueued still
        reads it: whoever is slow to wait for sums would hold a second gradient of the whole model.
        """
        going, codec, coded = self.reduction, self._codec, None
        assert going is not None and codec is not None, self.key
        buffer = going.buffer
        if buffer is not None:
            num_bytes, device = codec.encoded_bytes(buffer.numel()), buffer.device
            coded = self._lender.grad_buffer(self.key, num_bytes, torch.uint8, device)
            if self._residual is None:
                codec.encode(buffer, coded)
            else:
                self._residual.encode(codec, buffer, coded)
        del buffer
        if not self._streams.enqueues:
            self._meter.end_loan(going.loan)
            going.release_buffer()
        return reduce(buffer=coded)

    def _operation(self, axis: Axis) -> Operation:
        """Return what to say of one level of a reduce."""
        hops = [hop for hop in self.flat.routes.reduce if hop.axis is axis]
        received = sum(hop.link_bytes(self.flat.portion).total for hop in hops)
        return Operation("reduce", Kind.REDUCE_SCATTER.value, self.key, received)

    def _hand_over(
        self,
        reduce: Callable[..., Work],
        axis: Axis,
        out: torch.Tensor,
        accumulate: bool,
        then: Sequence[ReadyHop] = (),
        *,
        held: torch.Tensor | None = None,
        apart: tuple[Sequence[Range], torch.Tensor] | None = None,
    ) -> Flight:
        """Return a flight that starts `reduce` over `axis` of what is in the buffer, and `then`
        other hops; the next gradient opens another buffer. `apart`: see Reduction.
        """
        reduce = partial(reduce, out=out, accumulate=accumulate)
        start = partial(reduce, buffer=self.buffer)
        if self._codec is not None:
            start = partial(self._encode, reduce)
        hops = (ReadyHop(start, describe=partial(self._operation, axis)), *then)
        flight = Flight((hops,), self._streams, "reduce", self._context.levels)
        self.reduction = Reduction(flight, *self._close(), (out, held), apart)
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
        if coming.apart is not None:
            self.accumulator.add_leaves(*coming.apart)

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
        if self._own is not None or self._sum.waits:
            self._sum.reset()
        self._node_sum = None
        self.accumulator.reset()

    def zero(self, indices: Collection[int]) -> None:
        """Set the gradients of parameters `indices` to zero, keeping them
        (``zero_grad(set_to_none=False)``).
        """
        if self._leaves is not None:
            self._check_cleared(self._leaves)
        self.wait()
        for index in indices:
            self.filled[index] = False
        self._sum.forget(indices)
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
        self.reduction = self._node_sum = None
        self.accumulator.reset()
        self._sum.reset()
        self.used[:] = [False] * len(self.used)  # a step asks this list


def _take(rests: weakref.ref[Gradient], total: torch.Tensor, fresh: bool) -> None:
    """Let `total` rest, unless all who held the gradient are gone: of padding alone at once."""
    gradient = rests()
    if gradient is not None:
        gradient.take(total, fresh)
