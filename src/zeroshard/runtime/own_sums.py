"""The sums of a segment that one rank forms before a reduce: its micro-batches inside no_sync, or
its own leaves where these make up a node of the tree (runtime/leaves.py).

    MicroBatchSum   param.grad --add--> the sum, as it comes
    OwnLeaves       param.grad --keep--> once a leaf is whole --add--> the last sum of a counter

Both rest on the gradient's tier. Invariant: a sum that could not be made, read or written is lost:
it reads as NaN. Cost: one pass over the sum for each micro-batch; for leaves one more where the
tree adds two sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from zeroshard.core.layout import Range
from zeroshard.core.placement import Tier
from zeroshard.errors import StorageError
from zeroshard.runtime.context import Context
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.grad import BinaryCounter
from zeroshard.state.state import State
from zeroshard.tier.store import Store


class MicroBatchSum:
    """The sum of one rank's micro-batches [numel], a parameter at a time, as gradients come."""

    def __init__(
        self, flat: FlatWeights, context: Context, dtype: torch.dtype, store: Store | None
    ) -> None:
        """It rests in `store` (None: on the device)."""
        self._flat, self._dtype, self._store = flat, dtype, store
        self._memory, self._note = context.memory, context.faults.note
        self._state: State | None = None  # None: lost, or not there
        self.reset()

    def reset(self) -> None:
        """Forget it, and give its memory back."""
        if self._state is not None:
            self._state.close()
        self._state = None
        self._has = [False] * len(self._flat.layout.slots)  # by parameter
        self.waits = self._is_lost = False  # waits: gradients are here that no reduce has taken

    def forget(self, indices: Collection[int]) -> None:
        """Forget the gradients of parameters `indices`."""
        for index in indices:
            self._has[index] = False

    def bytes_by_tier(self) -> Mapping[Tier, int]:
        """Return the bytes that rest here, by tier."""
        return {} if self._state is None else self._state.bytes_by_tier()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Lose the sum where the body raises StorageError."""
        try:
            yield
        except StorageError as error:
            self._is_lost = True
            self._note(error)

    def _open(self) -> State:
        """Make it, its contents undefined."""
        numel, store = self._flat.layout.numel, self._store
        if store is None:
            self._state = State(self._memory.empty(numel, self._dtype))
        else:
            name = f"{self._flat.key} partial gradient"
            self._state = State(None, store.allocate(name, numel, self._dtype))
        return self._state

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient of parameter `index`."""
        slot, self.waits = self._flat.layout.slots[index], True
        with self._losing():
            state = self._open() if self._state is None else self._state
            with state.borrowed(slot.offset, slot.stop, write=True) as part:
                view = self._flat.buffer.view_in(part, index)
                if self._has[index]:
                    view.add_(grad.to(view.device))
                else:
                    view.copy_(grad)
        self._has[index] = True

    def move_to(self, views: Sequence[torch.Tensor], filled: list[bool]) -> None:
        """Move it to `views`, by parameter; add to those that are `filled`."""
        for index in [index for index, has in enumerate(self._has) if has]:
            slot, view = self._flat.layout.slots[index], views[index]
            with self._losing():
                if self._state is not None and not self._is_lost:
                    with self._state.borrowed(slot.offset, slot.stop, write=False) as part:
                        there = self._flat.buffer.view_in(part, index)
                        (view.add_ if filled[index] else view.copy_)(there)
            if self._is_lost:
                view.fill_(float("nan"))
            filled[index] = True
        self.reset()


class OwnLeaves(BinaryCounter):
    """The sums of one rank's leaves [numel each], which make up a node of the tree, and the
    gradients of the leaf under way: they stay where autograd has left them until all have come,
    since the parts of one leaf are added before leaves are.
    """

    def __init__(
        self, flat: FlatWeights, context: Context, wire: torch.dtype, store: Store | None
    ) -> None:
        """A leaf's gradient is rounded to `wire`; sums rest in `store` (None: on the device)."""
        assert context.leaves is not None, flat.key
        super().__init__(context.leaves.tree, flat.key, store)
        self._flat, self._wire = flat, wire
        self._memory, self._note = context.memory, context.faults.note
        self._grads: dict[int, torch.Tensor] = {}  # by parameter
        self._is_lost = False

    def reset(self) -> None:
        """Forget all."""
        super().reset()
        self._grads, self._is_lost = {}, False

    @property
    def waits(self) -> bool:
        """Whether gradients are here that are in no sum yet."""
        return bool(self._grads)

    def forget(self, indices: Collection[int]) -> None:
        """Forget the gradients of parameters `indices`."""
        for index in indices:
            self._grads.pop(index, None)

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Keep a gradient of parameter `index`, or a further part of it."""
        before = self._grads.get(index)
        self._grads[index] = (grad if before is None else before + grad).to(self._wire)

    def leaf(self) -> torch.Tensor | None:
        """Return the leaf's gradient [numel], which is as it is there from now on; None where it
        has none.
        """
        if not self._grads:
            return None
        whole = self._memory.empty(self._flat.layout.numel, self._wire)
        self._write(whole)
        self._grads = dict(enumerate(self._flat.buffer.views_of(whole)))
        return whole

    def _write(self, out: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """Store the leaf's gradient in `out`, added to the sum `before`. A parameter without one
        counts as +0.0.
        """
        views = self._flat.buffer.views_of(out)
        if before is None:
            for index, view in enumerate(views):
                grad = self._grads.get(index)
                view.zero_() if grad is None else view.copy_(grad)
        else:
            for index, there in enumerate(self._flat.buffer.views_of(before)):
                torch.add(there, self._grads.get(index, 0.0), out=views[index])
        if out is not before:
            for start, stop in self._flat.layout.gaps:
                out[start:stop].zero_()

    def end_leaf(self, span: Range | None, out: torch.Tensor | None) -> None:
        """Add the gradients that have come, of leaf `span` (None: this rank has none), as the tree
        does; after its last leaf move the sum to `out` [numel].
        """
        try:
            if span is not None:
                span, before = self._take(span)
                total = before if out is None else out
                if total is None:
                    total = self._memory.empty(self._flat.layout.numel)
                self._write(total, before)
                span = self.merge(span, total)
                if out is None:
                    self.keep(span, total)
            elif out is not None and not self._is_lost:
                self._move_to(out)
        except StorageError as error:
            self._is_lost = True
            self._note(error)
        self._grads = {}
        if out is not None and self._is_lost:
            out.fill_(float("nan"))
            self.reset()

    def _take(self, span: Range) -> tuple[Range, torch.Tensor | None]:
        """Stop holding the last sum, if it is on the device and the tree adds leaves `span` to it;
        return the leaves of both, and the sum.
        """
        last, here = self._held[-1] if self._held else ((0, 0), None)
        if here is None or here.tensor is None or not self._tree.merges(last, span):
            return span, None
        self._held.pop()
        return (last[0], span[1]), here.tensor

    def _move_to(self, out: torch.Tensor) -> None:
        """Move the only sum to `out`; zeros where there is none."""
        assert len(self._held) < 2, self._key
        if not self._held:
            out.zero_()
            return
        _, held = self._held.pop()
        with held.borrowed(0, held.numel, write=False) as there:
            out.copy_(there)
        held.close()
