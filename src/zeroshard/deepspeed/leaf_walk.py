"""Leaves in DeepSpeed's loop: the key ``zeroshard.leaves`` (docs/one-curve.md).

    loss = engine(batch)        begins this rank's next leaf: generators are seeded
    engine.backward(loss)       ends it
    engine.step()               ends it, too; at a boundary it waits for ranks that have more leaves

Invariant: between two steps a rank runs as many micro-batches as it has leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import zeroshard as zs


class LeafWalk:
    """This rank's leaves of the step under way."""

    def __init__(self, engine: zs.Engine, seed: int) -> None:
        """Random numbers of a leaf follow from `seed`, the step and its number."""
        self._engine, self._seed = engine, seed
        self._leaves: Iterator[int] | None = None
        self._is_open = False

    def begin(self, step: int) -> None:
        """Begin the next leaf of `step`, unless one has begun. Raises StateError after the last."""
        if self._is_open:
            return
        if self._leaves is None:
            self._leaves = self._engine.leaves(step, seed=self._seed)
        if next(self._leaves, None) is None:
            raise zs.StateError(
                "this step has had all leaves of this rank: engine.step() has to follow its last"
                " micro-batch"
            )
        self._is_open = True

    def end(self) -> None:
        """End the leaf that has begun, if any: a forward begins the next one."""
        self._is_open = False

    def finish(self) -> None:
        """Wait for the other ranks' leaves. Raises StateError where some are left here."""
        leaves, self._leaves = self._leaves, None
        self.end()
        if leaves is not None and next(leaves, None) is not None:
            raise zs.StateError(
                "engine.step() at a boundary before all leaves of this rank have run:"
                " gradient_accumulation_steps() says how many it has"
            )


class LoaderSampler(zs.LeafSampler):
    """The samples of this rank's leaves, from the step on that the engine is at."""

    def __init__(self, data: Sized, leaves: int, size: int, engine: Any) -> None:
        """`engine` is the one that ``initialize()`` returns."""
        super().__init__(data, leaves, size, engine=engine.engine)
        self._progress = engine.progress

    def __iter__(self) -> Iterator[list[int]]:
        self.set_step(self._progress.global_steps)
        yield from super().__iter__()
