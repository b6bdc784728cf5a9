"""Which units are gathered ahead, and which of them give way, within a budget of bytes.

The last pass says which unit comes next (core/order.py). Units are gathered ahead up to
``prefetch_bytes``, and no more than the budget of gathered weights and gradient buffers leaves.

Without an optimizer, weights that rest on another tier are read *around* the end of a forward
without gradients (ZeRO-Inference): nothing rewrites them before the next one, which runs the same
units, and so the last units start the reads of the first ones. Before there was a forward, the
order is that of definition.

Invariant: every decision depends on what the ranks share (order and sizes), never on timing, so
that two-sided collectives meet. Nothing is moved here: runtime/weights.py gathers and releases.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from zeroshard.core.order import Order, to_evict
from zeroshard.runtime.budget import Budget
from zeroshard.runtime.unit import Unit, UnitState

__all__ = ["Phase", "Prefetch"]

Phase = Literal["forward", "backward"]


class Prefetch:
    """The units of one engine that are gathered and not used yet."""

    def __init__(
        self, units: Sequence[Unit], budget: Budget, *, around: bool = False, alone: bool = False
    ) -> None:
        """`around`: read around the end of a pass that repeats; `alone`: no gather follows."""
        self.around = False  # in this pass
        self._may_go_around = around
        self._alone = alone
        self._units = units
        self._sizes = {unit.index: unit.full_bytes for unit in units}
        self._budget = budget
        self._order: Order[int] = Order()
        self._ahead: dict[int, Unit] = {}
        self._held: dict[int, Unit] = {}  # by a schedule, beyond the budget
        if around:
            self._order.seed("forward", [unit.index for unit in units if unit.full_bytes])

    @property
    def units(self) -> list[Unit]:
        """The units gathered ahead, oldest first."""
        return list(self._ahead.values())

    @property
    def coming(self) -> list[Unit]:
        """The units whose gathers may be under way."""
        held = [unit for unit in self._held.values() if unit.state is UnitState.GATHERING]
        return [*self._ahead.values(), *held]

    @property
    def due(self) -> list[Unit]:
        """The units of them whose reads to wait for now, so that their gathers start. Where several
        are on their way, the next one alone: the reads of the others keep the disk busy.
        """
        if not self.around:
            return self.coming
        return [] if self._alone else self.coming[:1]

    def begin(self, phase: Phase, *, repeats: bool) -> None:
        """Start a pass over the model; `repeats`: the next one may be the same, with the same
        weights.
        """
        self.around = repeats and self._may_go_around
        self._order.begin(phase)

    def last_pass(self, phase: Phase) -> list[Unit]:
        """Return the units of the last pass, in order; empty before the first."""
        return [self._units[index] for index in self._order.trace(phase)]

    def ran(self, unit: Unit, phase: Phase) -> None:
        """Note that `unit` is used now."""
        self._order.record(phase, unit.index)

    def add(self, unit: Unit) -> None:
        """Note that `unit` is gathered ahead."""
        self._ahead[unit.index] = unit

    def discard(self, unit: Unit) -> None:
        """Note that `unit` is not ahead any more: it is used, or released."""
        self._ahead.pop(unit.index, None)

    def keep(self, unit: Unit, *, kept: bool) -> None:
        """Note whether `unit`, which is gathered, waits for its backward; see Budget."""
        self._budget.keep(unit, kept=kept)

    def hold(self, unit: Unit) -> None:
        """A schedule holds `unit`: it gives way to nothing, and its bytes are the schedule's."""
        self._ahead.pop(unit.index, None)
        self._held[unit.index] = unit
        self._budget.keep(unit, kept=True)

    def let_go(self, unit: Unit) -> None:
        """A schedule holds `unit` no longer."""
        if self._held.pop(unit.index, None) is not None:
            self._budget.keep(unit, kept=False)

    def giving_way(self, unit: Unit, phase: Phase) -> list[Unit]:
        """Return those units ahead, prefetched for another order, that have to go so that `unit`
        fits the budget.
        """
        excess = unit.full_bytes - self._budget.left
        if not self._ahead or excess <= 0:
            return []
        upcoming = self._order.upcoming(phase, unit.index, around=self.around)
        evicted = to_evict(self._ahead, upcoming, sizes=self._sizes, excess_bytes=excess)
        return [self._units[index] for index in evicted]

    def following(self, unit: Unit, phase: Phase, here: Container[int]) -> list[Unit]:
        """Return the units to gather after `unit`, but for those `here` (by index)."""
        under_way = sum(self._sizes[index] for index in self._ahead)
        allowed = min(self._budget.left, self._budget.prefetch_bytes - under_way)
        if allowed <= 0:
            return []
        predicted = self._order.predict(
            phase,
            unit.index,
            sizes=self._sizes,
            live_bytes=0,
            budget_bytes=allowed,
            live=here,
            around=self.around,
        )
        return [self._units[index] for index in predicted if self._sizes[index]]

    def abandon(self) -> None:
        """Forget the order, too: the ranks may have diverged."""
        self._order = Order()
        self._ahead.clear()
        self._held.clear()
        self._budget.abandon()
