"""The gradients of one segment between autograd and a reduce: a buffer that is being filled, and a
sum of micro-batches that waits for it.

    param.grad --copy--> GradBucket                                          --> a reduce
    inside no_sync, where the row adds micro-batches before ranks:
    param.grad --add---> PartialSum ... --cast--> GradBucket                 --> a reduce

Invariant: a bucket is handed over whole; parameters without a gradient and padding are zeros. Cost:
one copy of each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

import torch

from zeroshard.comm.transport import GradBuffer, ReduceRequest
from zeroshard.core.placement import Scope, Tier
from zeroshard.errors import StorageError
from zeroshard.memory import Loan
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.state.state import State

__all__ = ["GradBucket", "PartialSum"]


class GradBucket:
    """The buffer [numel] of one segment, in the dtype of the wire; at most one is open."""

    def __init__(self, flat: FlatWeights, request: ReduceRequest, context: Context) -> None:
        self.buffer: GradBuffer | None = None
        self.views: list[torch.Tensor] = []
        self.seen = [False] * len(flat.layout.slots)
        self.loan: Loan | None = None  # None where the gradient is summed where it rests
        self._flat = flat
        self._dtype = request.dtype
        self._codec = request.codec
        self._residual = context.options.codecs.residual(request.codec)
        self._lender = flat.lender
        self._meter = context.meter
        # with a codec the buffer is memory of ours, and encoded into one of the transport's
        self._memory = context.memory
        self.num_bytes = flat.layout.numel * request.dtype.itemsize  # of a buffer

    @property
    def rests(self) -> bool:
        """Whether the buffer is the resting gradient itself, so that there is nothing to sum."""
        return self.buffer is not None and self.loan is None

    def open_at_rest(self, resting: torch.Tensor) -> None:
        """Fill the resting gradient [numel] itself."""
        self.buffer = GradBuffer(resting)
        self.views = self._flat.buffer.views_of(resting)

    def open(self, make_room: Callable[[int], None]) -> None:
        """Borrow a buffer; `make_room(num_bytes)` is called before."""
        make_room(self.num_bytes)
        numel, device = self._flat.layout.numel, self._flat.full.device
        if self._codec is None:
            self.buffer = self._lender.grad_buffer(self._flat.key, numel, self._dtype, device)
        else:
            self.buffer = GradBuffer(self._memory.empty(numel, self._dtype))
        self.loan = self._meter.lend(self.buffer.data, self.num_bytes)
        self.views = self._flat.buffer.views_of(self.buffer.data)

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Take in a gradient of parameter `index`."""
        view = self.views[index]
        if self.seen[index]:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.seen[index] = True

    def zero_unseen(self) -> None:
        """Set to zero what has no gradient."""
        if self.buffer is None:
            return
        data, layout = self.buffer.data, self._flat.layout
        empty = list(layout.gaps)
        if not all(self.seen):
            slots = zip(layout.slots, self.seen, strict=True)
            empty += [(slot.offset, slot.stop) for slot, seen in slots if not seen]
        if empty:  # one kernel on an accelerator
            torch._foreach_zero_([data[start:stop] for start, stop in empty])

    def encode(self, buffer: GradBuffer | None) -> GradBuffer | None:
        """Return the transport's buffer with the encoding of `buffer`, which has been handed over,
        with the residual added first.
        """
        codec = self._codec
        assert codec is not None
        if buffer is None:
            return None
        numel, device = codec.encoded_bytes(buffer.data.numel()), buffer.data.device
        coded = self._lender.grad_buffer(self._flat.key, numel, torch.uint8, device)
        if self._residual is None:
            codec.encode(buffer.data, coded.data)
        else:
            self._residual.encode(codec, buffer.data, coded.data)
        return coded

    def close(self) -> None:
        """Let the next gradient open another."""
        self.buffer, self.loan, self.views = None, None, []
        self.seen = [False] * len(self.seen)

    @property
    def residual_bytes(self) -> int:
        """The bytes in which the error of encoded gradients is kept."""
        return 0 if self._residual is None else self._residual.num_bytes

    def reset_residual(self) -> None:
        """Forget what encoding has lost so far."""
        if self._residual is not None:
            self._residual.reset()

    def abandon(self) -> None:
        """After an exception: give back what was borrowed, and forget the residual."""
        self.reset_residual()
        if self.buffer is not None and self.loan is not None and self._codec is None:
            self._lender.return_buffer(self.buffer)
        self._meter.end_loan(self.loan)
        self.close()


class PartialSum:
    """A sum of gradients that no reduce has taken yet: of micro-batches on this rank, or of the
    ranks of this node.

    One that could not be made, read or written is lost: it reads as NaN.
    """

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        context: Context,
        make: Callable[[], State],
    ) -> None:
        """`make` makes the state."""
        cell, layout = plan.cells.grad, flat.layout
        # SHARD: one node's sum is the sum of all ranks
        scope = layout.scope(cell) if cell.is_partial else None
        self.of_micro_batches = scope is Scope.FULL
        self.of_nodes = scope is Scope.NODE_SHARD
        self.state: State | None = None
        self.seen = [False] * len(flat.layout.slots)  # which parameters it has a gradient of
        self._flat = flat
        self._span = layout.span(plan.rank, layout.scope(cell))
        self._make = make
        self._note = context.faults.note
        self._lost = False

    @property
    def is_there(self) -> bool:
        """Whether anything waits."""
        return self.state is not None or self._lost

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._lost = True
            self._note(error)

    def open(self) -> State:
        """Make the state, its contents undefined."""
        self.state = self._make()
        return self.state

    def take(self) -> torch.Tensor:
        """Return the sum, which lies on the device, and hold it no longer."""
        assert self.state is not None, self._flat.key
        whole, self.state = self.state.whole, None
        return whole

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient of parameter `index`."""
        slot = self._flat.layout.slots[index]
        with self._losing():
            state = self.open() if self.state is None else self.state
            with state.borrowed(slot.offset, slot.stop, write=True) as part:
                view = self._flat.buffer.view_in(part, index)
                if self.seen[index]:
                    view.add_(grad.to(view.device))
                else:
                    view.copy_(grad)
        self.seen[index] = True

    def move_to(self, bucket: GradBucket) -> None:
        """Hand the sums of every parameter over to `bucket`, which is open, and close."""
        for index in [index for index, seen in enumerate(self.seen) if seen]:
            slot = self._flat.layout.slots[index]
            with self._losing():
                if self.state is not None and not self._lost:
                    with self.state.borrowed(slot.offset, slot.stop, write=False) as part:
                        bucket.add(index, self._flat.buffer.view_in(part, index))
            if self._lost:
                bucket.views[index].fill_(float("nan"))
                bucket.seen[index] = True
        self.close()

    def zero(self, indices: Container[int]) -> None:
        """Set the sums of parameters `indices` to zero."""
        if self.state is None:
            return
        for piece in self._flat.layout.pieces_in(self._span):
            if piece.index in indices and (self.of_nodes or self.seen[piece.index]):
                start, stop = piece.shard_start, piece.shard_stop
                with self._losing(), self.state.borrowed(start, stop, write=True) as part:
                    part.zero_()

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes at rest."""
        return {} if self.state is None else self.state.bytes_by_tier()

    def close(self) -> None:
        """Give the memory back; nothing waits any more."""
        if self.state is not None:
            self.state.close()
        self.state, self.seen, self._lost = None, [False] * len(self.seen), False
