"""The sum of a step's leaves on its way: a binary counter of partial sums (core/tree.py).

    leaf arrives   3          4                5               6               7
    gradient       (0..3)     (0..3)           (0..3)          (0..3)          (0..7)
    partial sums              4                (4,5)           (4,5) 6

Of this rank's slice the first leaves' sum rests where the gradient does, and `PartialSums` holds
the others: on the device, or on the gradient's tier where any of it is elsewhere. Cost: at most
``Tree.most_partials`` sums; each is read once, when it is added to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from zeroshard.core.layout import Range
from zeroshard.core.placement import Tier
from zeroshard.core.tree import Tree
from zeroshard.state.gradient import Gradient
from zeroshard.state.state import State
from zeroshard.tier.store import Store


class BinaryCounter:
    """Sums of neighbouring leaves, of which the tree adds no two."""

    def __init__(self, tree: Tree, key: str, store: Store | None) -> None:
        """They rest in `store` (None: on the device)."""
        self._tree, self._key, self._store = tree, key, store
        self._held: list[tuple[Range, State]] = []

    def reset(self) -> None:
        """Forget them."""
        while self._held:
            self._held.pop()[1].close()

    def merge(self, span: Range, total: torch.Tensor) -> Range:
        """Add to `total` (fp32, on the device), the sum of leaves `span` that come next, every sum
        before it that the tree adds to it. Return whose sum it is then.
        """
        while self._held and self._tree.merges(self._held[-1][0], span):
            before, held = self._held.pop()
            with held.borrowed(0, held.numel, write=False) as there:
                total.add_(there.to(total.device))
            held.close()
            span = (before[0], span[1])
        return span

    def keep(self, span: Range, total: torch.Tensor) -> None:
        """Let `total`, the sum of leaves `span`, rest."""
        state = State.of(total)
        if self._store is not None and total.numel():
            name = f"{self._key} partial gradient"
            state = State(self._store.allocate(name, total.numel(), total.dtype))
            state.put(0, total.numel(), total)
        self._held.append((span, state))

    def bytes_by_tier(self) -> Counter[Tier]:
        """Return the bytes that rest here, by tier."""
        out = Counter[Tier]()
        for _, held in self._held:
            out.update(held.bytes_by_tier())
        return out


class PartialSums(BinaryCounter):
    """The sums of one segment's slice, of which the gradient holds the first."""

    _first: Range | None = None  # the leaves whose sum rests in the gradient

    def reset(self) -> None:
        """Forget them."""
        super().reset()
        self._first = None

    def takes(self, spans: Sequence[Range]) -> bool:
        """Whether the next sums, of leaves `spans`, are one that is added to the gradient itself;
        it counts as added.
        """
        span = spans[0]
        if len(spans) > 1 or (self._first is not None and not self._tree.merges(self._first, span)):
            return False
        self._first = (0, span[1])
        return True

    def add(self, span: Range, total: torch.Tensor, gradient: Gradient, own: Range) -> None:
        """Add `total` (fp32, on the device), the sum of leaves `span`, which come next; `gradient`
        rests in range `own`.
        """
        with gradient.losing():
            span = self.merge(span, total)
            if self._first is not None and not self._tree.merges(self._first, span):
                self.keep(span, total)
                return
            if not gradient.on_device:
                gradient.take(total, self._first is None)
            elif self._first is None:
                gradient.fetch(*own).copy_(total)
            else:
                gradient.fetch(*own).add_(total)
            self._first = (0, span[1])
