"""The gradients of one segment before a reduce over all ranks has taken them.

    cell of the gradient
    any, outside no_sync   param.grad --copy--> buffer --reduce--> accumulator
    any, of one rank       param.grad --copy or add--> accumulator
    S, inside no_sync      the same
    P, inside no_sync      param.grad --add--> sum of micro-batches .. --cast--> buffer --reduce-->
    P of a node, inside    param.grad --copy--> buffer --reduce inside--> sum of the node .. ----->

The buffer [numel] has the dtype of the wire; the sums (state/sums.py) have that in which gradients
rest. Sums of micro-batches lie on the tier of the cell, the sum of the node's ranks [column] on the
device.

Invariants: a buffer is handed over whole (parameters without a gradient and padding are zeros); at
most one is open, and one on its way; the reduces of one segment complete in order. Cost: one copy
of each gradient, and ``numel * wire (N-1)/N`` bytes on the wire per reduce.

What it does not do: it does not know when a backward ends (runtime/backward.py), what becomes of
the sum over all ranks (runtime/grad.py), what a leaf is (runtime/leaf_bucket.py), nor a module.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter

import torch

from zeroshard.comm.levels import NodeSum, ReadyHop
from zeroshard.comm.transport import ReduceRequest, Work
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.precision import dtype_name
from zeroshard.core.route import Axis, Kind
from zeroshard.core.tree import Tree
from zeroshard.core.work import Operation
from zeroshard.memory import Loan
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.grad import Accumulator
from zeroshard.state.gradient import Gradient
from zeroshard.state.sums import TreeSums
from zeroshard.tier.store import Store

_COPY, _ADD = attrgetter("copy_"), attrgetter("add_")


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
        tree: Tree | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        """`accumulator` takes what reduces bring; sums of micro-batches wait in `store` (None: on
        the device), added as `tree` says. `wire`: that of reduces, if it is not the precision's.
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
        wire = wire or precision.wire
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
        sums = partial(TreeSums, flat.key, context.memory, note=context.faults.note)
        here = store if self.sums_micro_batches else None
        self._sum: TreeSums = sums(tree=tree, store=here)  # [numel]
        self._summed = [False] * len(layout.slots)  # by parameter: whether it has a gradient there
        self._waits = False  # whether any gradient has gone there
        self._column = layout.span(plan.rank, Scope.NODE_SHARD)
        self._node: TreeSums = sums()  # [column]
        self._waiting = [self._sum, self._node]
        self._context = context
        self._streams, self._meter = context.streams, context.meter
        # with a codec the buffer is memory of ours, and encoded into one of the transport's
        self._memory = context.memory
        self._codec = plan.grad_codec(context)
        self._residual = context.options.codecs.residual(self._codec)
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
        self._rounds = wire is not precision.accumulate
        # nothing to sum, and nothing that a buffer would round: it is the resting gradient
        exact = wire is precision.compute and precision.accumulate is torch.float32
        kept = not self._rounds or (exact and self._codec is None)
        self._direct = context.transport.size == 1 and kept
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
        out.update({} if resting is None else resting.numbers.bytes_by_tier())
        for sums in self._waiting:
            out.update(sums.bytes_by_tier())
        return out

    @property
    def in_flight(self) -> bool:
        """Whether a reduce of this segment is under way."""
        return self.reduction is not None

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients are here that no reduce over all ranks has taken yet."""
        return self.buffer is not None or self._waits or bool(self._node.held)

    # ------------------------------------------------------------------ what autograd brings

    def add(
        self, index: int, grad: torch.Tensor, *, sync: bool, more: bool = False, once: bool = False
    ) -> None:
        """Take in the gradient of parameter `index`. `more` gradients of it may come before a
        reduce, from other micro-batches; `once`: of no parameter does a second one, and `takes`
        may take the others.
        """
        self.used[index] = True
        rests = self.sums_micro_batches and (self._waits or not sync)
        # a sum in the dtype of the wire would be rounded after every micro-batch
        if rests or (more and self._rounds):
            self._add_to_sum(index, grad)
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

    def _add_to_sum(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient of parameter `index` to the sum of micro-batches."""
        layout, self._waits = self.flat.layout, True
        with self._sum.losing():
            state = self._sum.chain(layout.numel, self.precision.accumulate)
            slot = layout.slots[index]
            with state.borrowed(slot.offset, slot.stop, write=True) as part:
                view = self.flat.buffer.view_in(part, index)
                if self._summed[index]:
                    view.add_(grad.to(view.device))
                else:
                    view.copy_(grad)
        self._summed[index] = True

    def _move_sum(self) -> None:
        """Add the sum of micro-batches to the buffer; it is forgotten here."""
        if self.buffer is None:
            self._open()
        for index in [index for index, summed in enumerate(self._summed) if summed]:
            slot, view = self.flat.layout.slots[index], self.views[index]
            with self._sum.losing():
                if not self._sum.lost:
                    state = self._sum.held[0][1]
                    with state.borrowed(slot.offset, slot.stop, write=False) as part:
                        there = self.flat.buffer.view_in(part, index)
                        (view.add_ if self.filled[index] else view.copy_)(there)
            if self._sum.lost:
                view.fill_(float("nan"))
            self.filled[index] = True
        self._forget_sum()

    def _forget_sum(self) -> None:
        self._sum.reset()
        self._summed, self._waits = [False] * len(self._summed), False

    def open_zeros(self) -> None:
        """Have a buffer open, without a gradient, where gradients would have opened one."""
        if self.buffer is None:
            self._open()

    def _open(self, *, adds: bool = False) -> None:
        """Open a buffer: the resting gradient [numel] itself where nothing is to be summed and
        nothing rests, or what comes may be added (`adds`) to what does; else memory of the
        transport's, or with a codec of ours.
        """
        accumulator, flat, wire = self.accumulator, self.flat, self._request.dtype
        # a sum that waits, and what a listener is given, is rounded to the dtype of the wire
        rounds = self._rounds and (self._waits or bool(self.handed_over))
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
        if not self._complete(with_earlier):
            return None
        for listener in self.handed_over if True in self.filled else ():
            listener(self.key, lambda: self.buffer)
        accumulator, (resting, fresh) = self.accumulator, self.accumulator.open()
        if self.buffer is not None and self.loan is None:
            self._close()
            return None
        if resting.on_device:
            out, then = resting.fetch(*accumulator.own), list[ReadyHop]()
        else:
            out = self._memory.empty(accumulator.own[1] - accumulator.own[0])
            take = partial(_take, weakref.ref(resting), out, fresh)
            then = [ReadyHop(take, "here")]
        node = self._node.held if with_earlier else None
        held = node.pop()[1].whole if node else None
        return self._hand_over(out, then, adds=resting.on_device and not fresh, held=held)

    def reduce_inside(self) -> Flight:
        """Return a flight, to be started, that sums what is here over the ranks of this node; the
        sum waits here for the reduce that goes on between nodes.
        """
        self.wait()
        self._move_sum()
        self._complete(False)
        (start, stop), adds = self._column, bool(self._node.held)
        out = self._node.chain(stop - start, self.precision.accumulate).whole
        return self._hand_over(out, adds=adds, inside=True)

    def _complete(self, with_earlier: bool) -> bool:
        """Let the buffer hold all that is to be reduced, zeros where there is no gradient (or add
        zero to the sum that rests there). Return whether to reduce now: leaves wait for the last.
        """
        if with_earlier and self._waits:
            self._move_sum()
        data, layout = self.buffer, self.flat.layout
        if data is not None:
            empty = [] if self._adds else list(self._gaps)
            if False in self.filled:
                slots = zip(layout.slots, self.filled, strict=True)
                empty += [data[slot.offset : slot.stop] for slot, filled in slots if not filled]
            if empty and self._adds:
                torch._foreach_add_(empty, 0.0)
            elif empty:  # one kernel on an accelerator
                torch._foreach_zero_(empty)
        return True

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
        out: torch.Tensor,
        then: Sequence[ReadyHop] = (),
        *,
        adds: bool,
        held: torch.Tensor | None = None,
        inside: bool = False,
    ) -> Flight:
        """Return a flight that sums what is in the buffer over all ranks, with the sum `held` of
        this node (or `inside` it), to `out`, or `adds` it there, and `then` starts other hops; the
        next gradient opens another buffer.
        """
        reduce, both, axis = self._reduce, self._both, Axis.FLAT
        if inside:
            reduce, axis = self._reduce_inside, Axis.LOCAL
        elif both is not None:
            axis, start = Axis.LOCAL, partial(both.between, held)
            told = partial(self._operation, Axis.NODE)
            then = [ReadyHop(start, describe=told, unused=both.unused, between=True), *then]
        reduce = partial(reduce, out=out, accumulate=adds)
        start = partial(reduce, buffer=self.buffer)
        if self._codec is not None:
            start = partial(self._encode, reduce)
        hops = (ReadyHop(start, describe=partial(self._operation, axis)), *then)
        flight = Flight((hops,), self._streams, "reduce", self._context.levels)
        self.reduction = Reduction(flight, *self._close(), (out, held))
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

    # ------------------------------------------------------------------ what the user clears

    def clear(self, indices: Sequence[int]) -> None:
        """Forget the gradients of parameters `indices`: the user zeroed them."""
        for index in indices:
            self.used[index] = False
        if any(self.used):
            self.zero(indices)
            return
        if self.reduction is not None:
            self.wait()
        self.filled = [False] * len(self.filled)
        if self._waits or self._node.held:
            self._forget_sum()
            self._node.reset()
        self.accumulator.reset()

    def zero(self, indices: Collection[int]) -> None:
        """Set the gradients of parameters `indices` to zero, keeping them
        (``zero_grad(set_to_none=False)``).
        """
        self.wait()
        for index in indices:
            self.filled[index] = self._summed[index] = False
        for _, state in self._node.held:
            for piece in self.flat.layout.pieces_in(self._column):
                if piece.index in indices:
                    state.whole[piece.shard_start : piece.shard_stop].zero_()
        self.accumulator.zero(indices)

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
        self.reduction = None
        self.accumulator.reset()
        self._node.reset()
        self._forget_sum()
        self.used[:] = [False] * len(self.used)  # a step asks this list


def _take(rests: weakref.ref[Gradient], total: torch.Tensor, fresh: bool) -> None:
    """Let `total` rest, unless all who held the gradient are gone: of padding alone at once."""
    gradient = rests()
    if gradient is not None:
        gradient.take(total, fresh)
