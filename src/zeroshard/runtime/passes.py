"""The passes under way, and the units that are held until one of them ends.

A unit that is used outside its modules is kept for those who use it: no hook tells when they are
done. It is held until the forward, the backward or the step that may use it is over::

    forward ends          used without gradients
    all backwards end     used with gradients: as many backwards as forwards have run
    step                  left the model; or a load, a writeback, reset(): a graph may refer to the
                          weights that no hook announces

It gathers and releases nothing: what has to be released is returned.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from zeroshard.runtime.unit import Unit, Use

__all__ = ["Passes", "Until"]


class Until(IntEnum):
    """How long a unit is held that is used outside its modules."""

    FORWARD_ENDS = 0
    BACKWARD_ENDS = 1
    STEP = 2


class Passes:
    """The forwards of one engine, of the model or of any module that needs a unit, and their
    graphs.
    """

    def __init__(self) -> None:
        self.running = 0  # forwards under way
        self.evaluates = False  # the forward of the model under way runs without gradients
        # forwards with gradients since the last step, less backwards: graphs that may still need
        # what is held
        self._graphs = 0
        self._held: dict[int, tuple[Unit, Until]] = {}

    def enter(self, evaluates: bool | None) -> None:
        """A forward begins; None: not the model's own."""
        self.running += 1
        self.evaluates = self.evaluates if evaluates is None else evaluates

    def leave(self, evaluates: bool | None) -> list[Unit]:
        """A forward ends; return the units that were held until then."""
        self.evaluates = self.evaluates if evaluates is None else evaluates
        self.running = max(0, self.running - 1)
        if self.running:
            return []
        self._graphs += torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0
        return self._drop(Until.FORWARD_ENDS) if self._held else []

    def end_backward(self) -> list[Unit]:
        """A backward is over, and its graph is gone; return the units that were held until then."""
        self._graphs = max(0, self._graphs - 1)
        return [] if self._graphs else self._drop(Until.BACKWARD_ENDS)

    def end_step(self) -> list[Unit]:
        """The weights have changed: no graph can need them; return all units that were held."""
        self._graphs = 0
        return self._drop(Until.STEP)

    def hold(self, unit: Unit, until: Until) -> None:
        """Hold `unit` at least `until` then; the caller has it gathered."""
        held = self._held.get(unit.index)
        if held is None:
            unit.acquire(Use.DIRECT)
        self._held[unit.index] = (unit, until if held is None else max(until, held[1]))

    def _drop(self, event: Until) -> list[Unit]:
        """Stop holding the units that were held until `event`, or less."""
        units = [unit for unit, until in self._held.values() if until <= event]
        for unit in units:
            del self._held[unit.index]
            unit.release(Use.DIRECT)
        return units
