"""The leaves of one ``engine.accumulate()``: each unit is reduced once per round of leaves, as in
the loop over them, but unit after unit.

    loop         leaf 0: units 2 1 0     leaf 3: units 2 1 0     leaf 6: units 2 1 0
    accumulate   unit 2: leaves 0 3 6    unit 1: leaves 0 3 6    unit 0: leaves 0 3 6

A unit that several sections use (an embedding and a head) gets parts of each leaf's gradient in all
of them, and a leaf's parts are added before leaves are. So each leaf's gradients of such a unit are
kept until its last section has run, where inputs of visits rest.

Invariant: sums and random numbers are those of the loop. Cost: the gradients that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zeroshard.runtime.backward import Backward
from zeroshard.runtime.leaf_loop import Draws
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.shelf import RestPlace, Shelf
from zeroshard.runtime.trainable import Trained
from zeroshard.runtime.unit import Unit


class LeafTurns:
    """Whose turn it is, and what is kept of whom."""

    def __init__(self, leaves: Leaves, draws: Draws, backward: Backward, place: RestPlace) -> None:
        """`draws` are those of this rank's leaves; gradients are kept at `place`."""
        self._leaves, self._draws, self._backward = leaves, draws, backward
        self._shelf = Shelf(place, chained=False)
        self._number = 0  # whose turn it is: a round, and this rank's leaf of it
        self._ending: Sequence[Unit] = ()  # whose last section runs
        self._ended: set[Unit] = set()
        self._kept: dict[Unit, dict[tuple[int, Trained], Any]] = {}

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Run this rank's leaf `number` inside, with its random numbers."""
        self._go_to(number)
        with self._draws.of(number):
            yield

    def _go_to(self, number: int) -> None:
        self._number = number
        self._leaves.turn(number)

    def keep(self, trained: Trained, grad: torch.Tensor) -> bool:
        """Keep a gradient that a section to come may add to; return whether it is kept."""
        if trained.unit in self._ending or trained.unit in self._ended:
            return False
        kept, key = self._kept.setdefault(trained.unit, {}), (self._number, trained)
        if key in kept:
            grad = self._shelf.unpack(kept[key]) + grad
        kept[key] = self._shelf.pack(grad)
        return True

    def _take(self, unit: Unit) -> Iterator[tuple[Trained, torch.Tensor]]:
        """Yield what is kept of `unit` and of the leaf whose turn it is, and keep it no longer."""
        kept = self._kept.get(unit, {})
        for number, trained in list(kept):
            if number == self._number:
                yield trained, self._shelf.unpack(kept.pop((number, trained)))

    def begin_section(self, ending: Sequence[Unit]) -> None:
        """The backward has come to the last section of the units `ending`."""
        self._ending = [unit for unit in ending if unit.trainable]

    def reduce(self) -> None:
        """The leaf whose turn it is has run in this section: hand the ending units over."""
        reductions = self._backward.reductions
        for unit in self._ending:
            for trained, grad in self._take(unit):
                trained.bucket.add(trained.index, grad, sync=True, make_room=reductions.make_room)
            if self._leaves.is_last:
                self._backward.complete(unit, has_all=True)
            else:
                reductions.start(unit, sync=True, with_earlier=True)
                reductions.advance()

    def end_section(self, done: int) -> None:
        """Hand the ending units over in the rounds after those of `done` leaves of this rank."""
        for number in range(done, self._leaves.num_rounds):
            self._go_to(number)
            for unit in self._ending if number >= len(self._leaves.of_rank) else ():
                self._backward.reductions.open_zeros(unit, sync=True)  # as ranks with a leaf do
            self.reduce()
        self._ended.update(self._ending)
        self._ending = ()

    def end(self, trained: Sequence[Unit]) -> None:
        """All sections have run: hand over what is left of the units `trained`."""
        for unit in reversed(trained):
            if unit not in self._ended:
                self.begin_section([unit])
                self.end_section(0)
