"""Buckets of a run with leaves (runtime/leaves.py): sums are added by the tree over the leaves.

    LeafBucket      leaf by leaf: the buffer --reduce--> this rank's slice of the round's nodes
                    --add--> the gradient (the first leaves) or a sum beside it
    OwnLeafBucket   param.grad --keep--> once a leaf is whole --add--> the sums of this rank's own
                    leaves; the last leaf's are added into the buffer --reduce--> the gradient

The sums (state/sums.py) rest on the gradient's tier. Invariant: they belong to the gradient that
holds the first; a fresh one begins anew. Cost: for own leaves one pass over the sum for each, and
one more where the tree adds two sums.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from zeroshard.comm.levels import ReadyHop
from zeroshard.core.layout import Range
from zeroshard.errors import StateError
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.state.sums import TreeSums


class LeafBucket(Bucket):
    """The gradients of the leaf under way, and the sums of this rank's slice."""

    def __init__(
        self, plan: SegmentPlan, flat: FlatWeights, context: Context, **options: Any
    ) -> None:
        super().__init__(plan, flat, context, **options)
        assert context.leaves is not None, flat.key
        self._leaves = context.leaves
        tree, note, store = self._leaves.tree, context.faults.note, options["store"]
        self._slices = TreeSums(flat.key, context.memory, note=note, tree=tree, store=store)
        self._waiting.append(self._slices)
        self._first_in = self.accumulator.resting  # the gradient with the first sum
        # the sums of leaves that the reduce under way forms beside it, one after another
        self._apart: tuple[Sequence[Range], torch.Tensor] | None = None
        self._deep = self._reduce, self._both
        self._rounds = self._direct = False  # each leaf is reduced, and rounded by its buffer

    def _open(self, *, adds: bool = False) -> None:
        # a leaf's sums may go flat, others in two levels
        self._lender = self._lenders[bool(self._leaves.formed[1])]
        super()._open(adds=adds)

    def _hand_over(
        self, out: torch.Tensor, then: Sequence[ReadyHop] = (), *, adds: bool, **options: Any
    ) -> Flight:
        """Let the reduce form the sums of the round: one that the tree adds to the first leaves'
        goes to `out`, others are added once they are here.
        """
        (spans, sums), resting = self._leaves.formed, self.accumulator.resting
        self._reduce, self._both = self._deep
        if sums:
            reduce = self._context.levels.flat.reduce
            self._reduce, self._both = partial(reduce, replace(self._request, sums=sums)), None
        if self._first_in is not resting:
            self._slices.reset()
            self._first_in = resting
        if len(spans) > 1 or not self._slices.takes(spans[0]):
            if len(spans) > 1 or not then:  # else it is memory of its own
                out = self._memory.empty(len(spans) * out.numel())
            self._apart, adds, then = (spans, out), False, ()
        return super()._hand_over(out, then, adds=adds, **options)

    def wait(self, *, block: bool = True) -> None:
        super().wait(block=block)
        apart, gradient = self._apart, self.accumulator.resting()
        if self.reduction is not None or apart is None:
            return
        (spans, sums), self._apart = apart, None
        if gradient is not None and not self.accumulator.pads:  # of padding alone nobody holds it
            with gradient.losing():
                for span, total in zip(spans, sums.view(len(spans), -1), strict=True):
                    self._slices.add(span, total, gradient.take)

    def clear(self, indices: Sequence[int]) -> None:
        self._check_cleared()
        super().clear(indices)

    def zero(self, indices: Collection[int]) -> None:
        self._check_cleared()
        super().zero(indices)

    def abandon(self) -> None:
        self._apart = None
        super().abandon()

    def _check_cleared(self) -> None:
        """Raise StateError between the leaves of a step: partial sums are of all parameters."""
        if self._leaves.in_step:
            raise StateError(
                "gradients were cleared between the leaves of a step: clear them after the loop"
                " over engine.leaves(), or leave that first"
            )


class OwnLeafBucket(LeafBucket):
    """The sums of this rank's leaves, which make up a node of the tree, and the gradients of the
    leaf under way: they stay where autograd has left them until all have come, since the parts of
    one leaf are added before leaves are.
    """

    def __init__(
        self, plan: SegmentPlan, flat: FlatWeights, context: Context, **options: Any
    ) -> None:
        assert context.leaves is not None, flat.key
        options |= {"tree": context.leaves.tree, "wire": torch.float32}  # sums are not rounded
        super().__init__(plan, flat, context, **options)
        self._grads: dict[int, torch.Tensor] = {}  # by parameter

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients are here that are in no sum yet."""
        return self.buffer is not None or bool(self._grads)

    def add(self, index: int, grad: torch.Tensor, **options: Any) -> None:
        """Keep a gradient of parameter `index`, or a further part of it, rounded as in a buffer."""
        self.used[index] = self._waits = True
        before = self._grads.get(index)
        self._grads[index] = (grad if before is None else before + grad).to(self.precision.wire)

    def open_zeros(self) -> None:
        """Only the last leaf opens a buffer."""

    def _complete(self, with_earlier: bool) -> bool:
        """Add the leaf to the sums, as the tree does; after the last leaf of the step move the
        sum to the buffer: it alone is reduced.
        """
        for listener in self.handed_over:
            listener(self.key, self._leaf)
        if is_last := self._leaves.is_last:
            self._open()
        out, span, sums = self.buffer, self._leaves.own, self._sum
        with sums.losing():
            if span is not None:
                span, before = sums.take(span)
                total = before if out is None else out
                if total is None:
                    total = self._memory.empty(self.flat.layout.numel)
                self._write(total, before)
                span = sums.merge(span, total)
                if out is None:
                    sums.add(span, total)
            elif out is not None and not sums.lost:
                assert len(sums.held) < 2, self.key
                out.zero_()
                for _, state in sums.held:
                    with state.borrowed(0, state.numel, write=False) as there:
                        out.copy_(there)
        self._grads = {}
        if out is not None:
            if sums.lost:
                out.fill_(float("nan"))
            self._forget_sum()
        return is_last

    def _leaf(self) -> torch.Tensor | None:
        """Return the leaf's gradient [numel], which is as it is there from now on; None where it
        has none.
        """
        if not self._grads:
            return None
        whole = self._memory.empty(self.flat.layout.numel, self.precision.wire)
        self._write(whole)
        self._grads = dict(enumerate(self.flat.buffer.views_of(whole)))
        return whole

    def _write(self, out: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """Store the leaf's gradient in `out`, added to the sum `before`. A parameter without one
        counts as +0.0.
        """
        views = self.flat.buffer.views_of(out)
        if before is None:
            for index, view in enumerate(views):
                grad = self._grads.get(index)
                view.zero_() if grad is None else view.copy_(grad)
        else:
            for index, there in enumerate(self.flat.buffer.views_of(before)):
                torch.add(there, self._grads.get(index, 0.0), out=views[index])
        if out is not before:
            for start, stop in self.flat.layout.gaps:
                out[start:stop].zero_()

    def zero(self, indices: Collection[int]) -> None:
        super().zero(indices)
        for index in indices:
            self._grads.pop(index, None)

    def _forget_sum(self) -> None:
        super()._forget_sum()
        self._grads = {}
