"""Sums on their way to a gradient at rest: numbers arrive in turn, and are added as a tree of
additions says (core/tree.py). Without a tree they are a chain: each is added to the sum of all
before.

    arrives                   0      1        2          3        4             5
    held, a tree of 8 leaves  (0)    (0,1)    (0,1) (2)  (0..3)   (0..3) (4)    (0..3) (4,5)
    held, a chain             (0)    (0,1)    (0..2)     (0..3)   (0..4)        (0..5)

    in no_sync, micro-batches         chain   [numel], a parameter at a time   runtime/bucket.py
    in no_sync, ranks of a node       chain   [column], by the reduce itself   the same
    leaves in turn, a rank's slice    tree    [slice]; the first: `first`      the gradient's
    leaves of a rank                  tree    [numel]                          the same

Invariant: the tree adds no two sums that are held. Cost: at most ``Tree.most_partials`` sums beside
the one that arrives; each is read once, when the next is added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zeroshard.core.layout import Range
from zeroshard.core.placement import Tier
from zeroshard.core.tree import Tree
from zeroshard.errors import StorageError
from zeroshard.state.state import DeviceMemory, State
from zeroshard.tier.store import Store


class TreeSums:
    """The sums of numbers of one segment that the tree has not added to each other yet."""

    def __init__(
        self,
        key: str,
        memory: DeviceMemory,
        *,
        note: Callable[[StorageError], None],
        tree: Tree | None = None,
        store: Store | None = None,
    ) -> None:
        """They rest in `store` (None: on the device); `note` takes a StorageError."""
        self._key, self._memory, self._note = key, memory, note
        self._tree, self._store = tree, store
        self.held: list[tuple[Range, State]] = []
        self.reset()

    def reset(self) -> None:
        """Forget them, and give their memory back."""
        while self.held:
            self.held.pop()[1].close()
        self.first: Range | None = None  # the leaves of the sum that is held elsewhere; see `add`
        self.lost = False  # whether a sum could not be made, read or written

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Lose the sums where the body raises StorageError, and note it."""
        try:
            yield
        except StorageError as error:
            self.lost = True
            self._note(error)

    def bytes_by_tier(self) -> Counter[Tier]:
        """Return the bytes that rest here, by tier."""
        out = Counter[Tier]()
        for _, state in self.held:
            out.update(state.bytes_by_tier())
        return out

    def _make(self, numel: int, dtype: torch.dtype) -> State:
        if self._store is None or not numel:
            return State(self._memory.empty(numel, dtype))
        name = f"{self._key} partial gradient"
        return State(None, self._store.allocate(name, numel, dtype))

    def chain(self, numel: int, dtype: torch.dtype) -> State:
        """Return the sum of a chain, made with undefined contents where none is held."""
        if not self.held:
            self.held.append(((0, 0), self._make(numel, dtype)))
        return self.held[-1][1]

    # ------------------------------------------------------------------ by a tree

    def _merges(self, before: Range, span: Range) -> bool:
        return self._tree is None or self._tree.merges(before, span)

    def take(self, span: Range) -> tuple[Range, torch.Tensor | None]:
        """Stop holding the last sum if it is on the device and leaves `span` are added to it;
        return the leaves of both, and the sum.
        """
        if not self.held or self.held[-1][1].tensor is None:
            return span, None
        if not self._merges(self.held[-1][0], span):
            return span, None
        before, state = self.held.pop()
        return (before[0], span[1]), state.tensor

    def takes(self, span: Range) -> bool:
        """Whether leaves `span` are next added to the first sum itself; they count as added."""
        if self.first is not None and not self._merges(self.first, span):
            return False
        self.first = (0, span[1])
        return True

    def merge(self, span: Range, total: torch.Tensor) -> Range:
        """Add to `total` (on the device), the sum of leaves `span` that come next, every sum held
        here to which the tree adds it. Return the leaves of the sum that it is then.
        """
        while self.held and self._merges(self.held[-1][0], span):
            before, state = self.held.pop()
            with state.borrowed(0, state.numel, write=False) as there:
                total.add_(there.to(total.device))
            state.close()
            span = (before[0], span[1])
        return span

    def add(
        self,
        span: Range,
        total: torch.Tensor,
        first: Callable[[torch.Tensor, bool], None] | None = None,
    ) -> None:
        """Add `total` (on the device, kept), the sum of leaves `span` that come next. With `first`
        the sum of the first leaves is held there: it is called with what is to be added, and
        whether that is all.
        """
        span, is_new = self.merge(span, total), self.first is None
        if first is not None and self.takes(span):
            first(total, is_new)
            return
        state = State(total)
        if self._store is not None and total.numel():
            state = self._make(total.numel(), total.dtype)
            state.put(0, total.numel(), total)
        self.held.append((span, state))
