"""The sum of a step's leaves on its way: a binary counter of partial sums (core/tree.py).

    leaf arrives   3          4                5               6               7
    gradient       (0..3)     (0..3)           (0..3)          (0..3)          (0..7)
    partial sums              4                (4,5)           (4,5) 6

The first leaves' sum rests where the gradient does; the others, of this rank's slice alone, on the
device, or on the gradient's tier where any of it is elsewhere. Cost: at most ``Tree.most_partials``
sums, the gradient among them; each is read once, when it is added to the one before.
"""

from __future__ import annotations

from collections import Counter

import torch

from zeroshard.core.layout import Range
from zeroshard.core.placement import Tier
from zeroshard.core.tree import Tree
from zeroshard.state.gradient import Gradient
from zeroshard.state.state import State
from zeroshard.tier.store import Store

__all__ = ["PartialSums"]


class PartialSums:
    """The partial sums of one segment's slice."""

    def __init__(self, tree: Tree, key: str, store: Store | None) -> None:
        """They rest in `store` (None: on the device)."""
        self._tree = tree
        self._key = key
        self._store = store
        self._first: Range | None = None  # the leaves whose sum rests in the gradient
        self._later: list[tuple[Range, State]] = []  # what comes after them

    def reset(self) -> None:
        """Forget them."""
        self._first = None
        while self._later:
            self._later.pop()[1].close()

    def add(self, span: Range, total: torch.Tensor, gradient: Gradient, own: Range) -> None:
        """Add `total` (fp32, on the device), the sum of leaves `span`, which come next; `gradient`
        rests in range `own`.
        """
        with gradient.losing():
            while self._later and self._tree.merges(self._later[-1][0], span):
                before, held = self._later.pop()
                self._add_earlier(held, total)
                span = (before[0], span[1])
            if self._first is None or self._tree.merges(self._first, span):
                self._rest(gradient, own, total, fresh=self._first is None)
                self._first = (0, span[1])
            else:
                self._later.append((span, self._kept(total)))

    def _rest(self, gradient: Gradient, own: Range, total: torch.Tensor, *, fresh: bool) -> None:
        if not gradient.on_device:
            gradient.take(total, fresh)
            return
        there = gradient.fetch(*own)
        there.copy_(total) if fresh else there.add_(total)

    def _kept(self, total: torch.Tensor) -> State:
        """Let a partial sum rest."""
        if self._store is None or not total.numel():
            return State.of(total)
        name = f"{self._key} partial gradient"
        state = State(self._store.allocate(name, total.numel(), total.dtype))
        state.put(0, total.numel(), total)
        return state

    def _add_earlier(self, held: State, total: torch.Tensor) -> None:
        """Add the earlier sum, which rests in `held` for the last time, to `total`."""
        with held.borrowed(0, held.numel, write=False) as there:
            total.add_(there.to(total.device))
        held.close()

    def bytes_by_tier(self) -> Counter[Tier]:
        """Return the bytes that rest beside the gradient, by tier."""
        out = Counter[Tier]()
        for _, held in self._later:
            out.update(held.bytes_by_tier())
        return out
