"""One backward: how it is run, its graph tasks, and how far each unit has come in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.runtime.leaves import Leaf
from zeroshard.runtime.unit import Unit

__all__ = ["BackwardPass", "Manner"]


@dataclass(frozen=True)
class Manner:
    """How backwards are run, and what becomes of their gradients."""

    sync: bool = True  # False inside no_sync()
    scaled: bool = False  # inside engine.backward()
    divisor: int = 1  # by which the step divides, beside the number of ranks
    seen: bool = False  # the engine has the loss, which counts its share or `weight`
    weight: float | None = None  # of engine.backward(weight=)
    refused: str | None = None  # why a backward that no schedule runs is refused
    joined: bool = False  # inside join(): other ranks may shadow this one


@dataclass
class _Task:
    """One graph task."""

    in_checkpoint: bool  # a reentrant one runs it, inside another task
    entered: list[Unit] = field(default_factory=list)  # at whose outputs a gradient has arrived


@dataclass(eq=False)
class BackwardPass:
    """One backward, from its first graph task to the end of its last."""

    # of a schedule's computation: the units whose gradients it brings; it ends by itself, after as
    # many graph tasks as there are
    units: Sequence[Unit] | None = None
    ended: bool = False
    seen: bool = False  # see Manner
    gathers: bool = False  # gradients of several micro-batches: units are handed over when told
    # whose gradients the user has assigned; autograd adds to them
    assigned: Sequence[Leaf] = ()
    brings: bool = False  # gradients have come: one by torch.autograd.grad brings none
    retains: bool = False  # its graph may be walked again
    nested: bool = False  # a backward has run inside this one
    # a backward around this one has not been entered yet
    awaits_outer: bool = False
    tasks: dict[int, _Task] = field(default_factory=dict)
    # parameters, by id, that get a gradient outside of reentrant checkpoints, too, and have none of
    # it yet
    outer: set[int] = field(default_factory=set)
    # units that run again in it, inside reentrant checkpoints, and how often
    recomputed: dict[Unit, int] = field(default_factory=dict)
    # whose gradients have all come; released when the backward goes on to another unit
    finished: dict[int, Unit] = field(default_factory=dict)
    reduced: set[int] = field(default_factory=set)  # units handed over
    # the unit at whose outputs the last gradient arrived, and the graph task
    at: tuple[Unit | None, int] = (None, -1)

    @property
    def driven(self) -> bool:
        """Whether a schedule runs it, now."""
        return self.units is not None and not self.ended

    def end(self) -> None:
        """No gradient comes any more."""
        self.ended = True

    def left(self, unit: Unit) -> list[Leaf]:
        """Return the leaves in `unit` to whose assigned gradients autograd has added none; none in
        a pass that brings no gradients.
        """
        if not (self.assigned and self.brings):
            return []
        with torch._C.DisableTorchFunctionSubclass():
            return [leaf for leaf in self.assigned if leaf.unit is unit and leaf.is_assigned]

    @property
    def in_checkpoint(self) -> bool:
        """Whether the backward that runs now is that of a reentrant checkpoint."""
        return any(task.in_checkpoint for task in self.tasks.values())

    def push(self, task: int, *, checkpoint: bool, retains: bool) -> None:
        """A graph task begins, the first or one inside another; `checkpoint`: that of a reentrant
        one, inside another task.
        """
        if not self.tasks:
            self.awaits_outer = checkpoint
            self.retains = self.retains or retains
        self.nested = self.nested or checkpoint or bool(self.tasks)
        self.tasks[task] = _Task(in_checkpoint=checkpoint)
        self.at = (None, -1)

    def pop(self, task: int) -> list[Unit]:
        """A graph task is over; return the units that it has come to."""
        self.at = (None, -1)
        return self.tasks.pop(task).entered

    def reach(self, unit: Unit, task: int, *, again: bool) -> None:
        """A gradient has arrived at `unit`'s outputs; `again`: the next one is of interest, too."""
        self.tasks[task].entered.append(unit)
        self.at = (None if again else unit, task)

    def took(self, unit: Unit, parameter: torch.Tensor) -> None:
        """The gradient of a `parameter` of `unit` has come."""
        self.brings = True
        unit.arrived[id(parameter)] = torch._C._current_graph_task_id()
        if len(self.tasks) == 1:
            self.outer.discard(id(parameter))
        if unit.has_all and not unit.has_frozen:
            self.finished[unit.index] = unit
