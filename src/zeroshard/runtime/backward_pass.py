"""The notes of `Backward`. Of one backward: how it is run, its graph tasks, how far each unit has
come. Of all backwards since the user cleared the gradients: whether gradients rest here, their
number of micro-batches, their weights, and whether they have been averaged.

    backward --add--> a sum --finalized--> an average --add--> a sum ... --clear--> nothing

Invariant: `micro_batches` is the same number on every rank, or UNKNOWN; the ranks compare it before
a step (finalize.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from zeroshard.core.digest import holders
from zeroshard.core.residency import UnitState, Use
from zeroshard.errors import StateError
from zeroshard.runtime.trainable import Trained
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights
from zeroshard.state.local import local_of

# --------------------------------------------------------------------------------------- recomputed
# Forwards that torch's reentrant checkpoint will run again inside the backward: how many of a
# unit's are still to come.
#
# A reentrant checkpoint runs its forward without gradients, runs it again in backward, and then
# runs a backward of its own, in which each parameter gets a gradient. So a unit inside several such
# checkpoints gets several gradients in one backward, and only the last one completes it. Each
# forward of a module inside ``CheckpointFunction.forward`` counts one up, each forward with
# gradients inside a backward one down.
#
# The counts are in core/residency.py. Cost: nothing where gradients are on. What it does not do:
# know the reentrant checkpoints of other libraries; a gradient that comes late for that reason is
# reduced before the step (backward.py).


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def count_recomputations(
    units: Sequence[Unit], *, ends_one: bool, enter: Callable[[], None]
) -> None:
    """Count the forward of a module of `units` that is about to run: with gradients inside a
    backward (`ends_one`), or without outside of it. `enter` notes that backward, which may bring no
    gradient before the one that the checkpoint runs inside it.
    """
    if ends_one:
        if any(unit.residency.has(Use.REPEATED) for unit in units) and is_recomputed():
            enter()
            for unit in units:
                unit.residency.release(Use.REPEATED)
    elif is_checkpointed():
        for unit in units:
            unit.residency.acquire(Use.REPEATED)


def is_checkpointed() -> bool:
    """Whether this runs inside the forward of a reentrant checkpoint."""
    return _frame_of(CheckpointFunction.forward.__code__) is not None


def is_recomputed() -> bool:
    """Whether this runs inside the backward of a reentrant checkpoint, and not in the nested
    backward that it starts.
    """
    return _frame_of(CheckpointFunction.backward.__code__, _RUN_BACKWARD) is not None


def checkpoint_around() -> Any:
    """Return the autograd node of the reentrant checkpoint that has this running in its backward,
    None outside of one.
    """
    inside = _frame_of(_RUN_BACKWARD)
    code = CheckpointFunction.backward.__code__
    around = inside and _frame_of(code, _RUN_BACKWARD, inside.f_back)
    return None if around is None else around.f_locals["ctx"]


def gets_gradient(parameter: torch.Tensor) -> bool:
    """Whether the graph task that is running accumulates a gradient in `parameter`, or has done
    so.
    """
    if not parameter.requires_grad:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))


def when_over(node: Any, call: Callable[[], None]) -> None:
    """Call `call` once, in the backward of `node`, right after the node itself has run."""

    def over(*grads: Any) -> None:
        handle.remove()
        call()

    handle = node.register_hook(over)


def _frame_of(
    code: CodeType, but_not: CodeType | None = None, frame: FrameType | None = None
) -> FrameType | None:
    """Return the innermost frame that runs `code`, from `frame` (default: the caller's caller) on
    outwards, none beyond one that runs `but_not`.
    """
    frame = frame or sys._getframe(2)
    while frame is not None and frame.f_code is not but_not:
        if frame.f_code is code:
            return frame
        frame = frame.f_back
    return None


# -------------------------------------------------------------------------------------------- saved
# Finds what reads released weights in a backward: watched are the tensors that autograd saves in a
# forward, for some steps after one that was not finite.
#
# A saved tensor that lies in the gathered memory of a unit is noted with the parameter's name;
# where it is read while that unit is released, NaN is what it gives, and the name is kept for the
# error.
#
# Cost: nothing, but for the steps that are watched.


# after one that had to be skipped: what is computed rarely (a penalty every 16 steps) is to come
# again
_WATCHED_STEPS = 20


class SavedTensors:
    """The tensors that autograd saves in forwards of the model."""

    def __init__(self, weights: Weights) -> None:
        # the first parameter that the gradients here have read while it was released
        self.read_released: str | None = None
        self._weights = weights
        self._steps_to_watch = 0
        self._watched: torch.autograd.graph.saved_tensors_hooks | None = None

    def watch_steps(self) -> None:
        """A step had to be skipped: watch those that follow."""
        self._steps_to_watch = _WATCHED_STEPS

    def end_step(self) -> None:
        """A step is taken or skipped."""
        self._steps_to_watch = max(0, self._steps_to_watch - 1)

    def clear(self) -> None:
        """No gradient rests here any more."""
        self.read_released = None

    def begin(self) -> None:
        """A forward begins: watch it, if a step asks for it."""
        if self._steps_to_watch and torch.is_grad_enabled():
            self._watched = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._watched.__enter__()

    def end(self) -> None:
        """It ends."""
        if self._watched is not None:
            self._watched.__exit__()
            self._watched = None

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Unit | None, str]:
        """Note the unit and the parameter of a tensor that autograd saves."""
        address = local_of(tensor).data_ptr()
        for unit in self._weights.units:
            for segment in unit.segments if unit.residency.state is UnitState.FULL else ():
                place = (address - segment.flat.full.data_ptr()) // segment.flat.dtype.itemsize
                for name, slot in zip(segment.names, segment.flat.layout.slots, strict=True):
                    if slot.offset <= place < slot.stop:
                        return tensor, unit, name
        return tensor, None, ""

    def _unpack(self, saved: tuple[torch.Tensor, Unit | None, str]) -> torch.Tensor:
        tensor, unit, name = saved
        if unit is None or unit.residency.state is UnitState.FULL:
            return tensor
        self.read_released = self.read_released or name
        return torch.full_like(tensor, float("nan"))


# ------------------------------------------------------------------------------------ backward pass

# micro-batches of a rank that cannot tell whether all gradients were cleared
UNKNOWN = (1 << 32) - 1
# kinds of backwards, a bit each
UNWEIGHTED, WEIGHTED, PLAIN, OF_ANOTHER = 1, 2, 4, 8
Weight = tuple[float, float, float]  # parts of one number, each what the ones before leave over
_KINDS = ("no backward", "none with a weight", "all with a weight", "some with a weight")


@dataclass(frozen=True)
class BackwardMode:
    """The mode in which backwards run, and the fate of their gradients."""

    sync: bool = True  # False inside no_sync()
    scaled: bool = False  # inside engine.backward()
    divisor: int = 1  # by which the step divides, beside the number of ranks
    has_loss: bool = False  # the engine has the loss, which counts its share or `weight`
    weight: float | None = None  # of engine.backward(weight=)
    refused: str | None = None  # why a backward that no schedule runs is refused
    joined: bool = False  # inside join(): other ranks may shadow this one


@dataclass
class _Task:
    """One graph task."""

    in_checkpoint: bool  # a reentrant one runs it, inside another task
    entered: list[Unit] = field(default_factory=list)  # that have had a gradient at their outputs


@dataclass(eq=False)
class BackwardPass:
    """One backward, from its first graph task to the end of its last."""

    # set by a pipeline schedule: this backward produces the gradients of these units. The schedule
    # ends it, not the last graph task
    units: Sequence[Unit] | None = None
    ended: bool = False
    has_loss: bool = False  # see BackwardMode
    gathers: bool = False  # gradients of several micro-batches: units are handed over when told
    # with gradients that the user has assigned; autograd adds to them
    assigned: Sequence[Trained] = ()
    brings: bool = False  # gradients have come: one by torch.autograd.grad brings none
    brought: int | None = None  # the graph task that brought the last one
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
    # with all their gradients; released when the backward goes on to another unit
    finished: dict[int, Unit] = field(default_factory=dict)
    # units handed over, in order, and how many gathers each of them followed
    reduced: dict[int, int] = field(default_factory=dict)
    # by graph task: of the last outputs, and how many units were entered before that
    nodes: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def bring(self, task: int) -> None:
        """A gradient comes, brought by graph task `task`."""
        self.brings, self.brought = True, task

    def end(self) -> None:
        """No gradient comes any more."""
        self.ended = True

    @property
    def in_checkpoint(self) -> bool:
        """Whether the backward that runs now belongs to a reentrant checkpoint."""
        return any(task.in_checkpoint for task in self.tasks.values())

    def push(self, task: int, *, checkpoint: bool, retains: bool) -> None:
        """A graph task begins, the first or one inside another; `checkpoint`: of a reentrant
        checkpoint, inside another task.
        """
        if not self.tasks:
            self.awaits_outer = checkpoint
            self.retains = self.retains or retains
        self.nested = self.nested or checkpoint or bool(self.tasks)
        self.tasks[task] = _Task(in_checkpoint=checkpoint)

    def pop(self, task: int) -> list[Unit]:
        """A graph task is over; return the units that it has come to."""
        self.nodes.pop(task, None)
        return self.tasks.pop(task).entered


class Accumulation:
    """The gradients that backwards have left since the last `clear`."""

    def __init__(self) -> None:
        self.has_gradient = False
        self.changed = False  # since the last average
        self.scaled = False  # whether the loss of these gradients was scaled
        self.divisor = 1  # by which the step divides them, beside the number of ranks
        self.micro_batches = 0  # backwards
        self.kinds = 0  # of backwards
        self._weight: Fraction | int = 0  # the exact sum of their weights
        self._weighs = True  # whether none of these is negative or not finite

    def check(self, *, scaled: bool, divisor: int = 1) -> None:
        """Raise StateError where a backward of a `scaled` loss, or of another, cannot be added, or
        one with gradients that are to be divided by another `divisor`.
        """
        if self.has_gradient and self.scaled != scaled:
            raise StateError(
                "fp16: this backward's loss is scaled otherwise than an earlier one's: call"
                " engine.backward(loss) for all"
            )
        if self.has_gradient and self.divisor != divisor:
            raise StateError(
                f"scale_grads divides these gradients by {divisor}, and those that rest here by"
                f" {self.divisor}: give all schedules of one step as many micro-batches and the"
                " same scale_grads, or call zero_grad() between them"
            )

    def add(self, *, scaled: bool, divisor: int = 1) -> None:
        """A backward begins."""
        self.micro_batches += self.micro_batches != UNKNOWN
        self.has_gradient = self.changed = True
        self.scaled, self.divisor = scaled, divisor

    def assign(self, *, scaled: bool) -> None:
        """Gradients rest that no backward has brought, divided as the gradients of `scaled` losses
        are.
        """
        if not self.has_gradient:
            self.has_gradient, self.scaled = True, scaled

    @property
    def weight(self) -> Weight:
        """The sum of their weights: so that the ranks' add up to the same number, however backwards
        are dealt out. NaN where a weight is negative or not finite.
        """
        if not self._weighs or not self._weight:
            return 0.0 if self._weighs else math.nan, 0.0, 0.0
        parts, left = [], self._weight
        for _ in range(3):  # 159 bits
            parts.append(float(left))
            left -= Fraction(parts[-1])
        return parts[0], parts[1], parts[2]

    def weigh(self, weight: float | None) -> None:
        """The loss of a backward that has begun counts `weight` (None: its rank's share)."""
        if weight is None:
            self.kinds |= UNWEIGHTED
        else:
            self.kinds |= WEIGHTED
            if 0.0 <= weight < math.inf:
                self._weight += Fraction(weight)
            else:
                self._weighs = False

    def bring(self, *, of_another: bool) -> None:
        """A backward brings a gradient of a loss that the engine does not see: a plain
        ``loss.backward()``, or that `of_another` engine, which has multiplied the loss.
        """
        self.kinds |= OF_ANOTHER if of_another else PLAIN

    def finalized(self) -> None:
        """The gradients have been averaged, or stepped."""
        self.changed = False

    def forget_count(self) -> None:
        """Other ranks may have cleared what they had; none has come here."""
        self.micro_batches = UNKNOWN

    def clear(self, micro_batches: int = 0) -> None:
        """No gradient rests here any more; `micro_batches` UNKNOWN: others may have some."""
        self.has_gradient = self.scaled = False
        self.changed, self.divisor = True, 1
        self.forget_weights()
        self.micro_batches = micro_batches

    def forget_weights(self) -> None:
        """All gradients that rest here are zeros (``zero_grad(set_to_none=False)``)."""
        self.kinds, self._weight, self._weighs = 0, 0, True


def total_weight(
    kinds: Sequence[int], weights: Sequence[Weight], *, shared: bool = False
) -> float | None:
    """Return the sum of all ranks' `weights`, rounded once; None where no backward had one.

    Raises StateError where only some of the backwards had one (`kinds`, of every rank), for weights
    that are negative or not finite, and for a sum of 0; where losses are `shared` (batch_shares),
    and one was not seen, and where another engine has multiplied one.
    """
    found = set(kinds)  # a few, of thousands of ranks
    if any(kind & OF_ANOTHER for kind in found):
        raise StateError(
            "another engine's backward() has brought these gradients, and has multiplied its loss"
            " by a weight, its batch_shares or its loss scale: make one engine, of a module"
            " that holds both models, or call zero_grad() where these gradients are not wanted"
        )
    if not any(kind & WEIGHTED for kind in found):
        if shared and any(kind & PLAIN for kind in found):
            raise StateError(
                "batch_shares multiply the loss, and loss.backward() does not show it to the"
                " engine: call engine.backward(loss) instead, on every rank"
            )
        return None
    if any(kind & ~WEIGHTED for kind in found):
        told = [_KINDS[(kind & WEIGHTED) + bool(kind & ~WEIGHTED)] for kind in kinds]
        raise StateError(
            f"backwards with a weight and without one cannot be added ({holders(told)}): give every"
            " engine.backward() of a step a weight on every rank, or none, and call zero_grad()"
            " between the steps"
        )
    wrong = [str(rank) for rank, parts in enumerate(weights) if not math.isfinite(parts[0])]
    total = math.inf if wrong else float(sum(Fraction(part) for parts in weights for part in parts))
    if not math.isfinite(total):
        raise StateError(
            f"a weight of engine.backward() on rank {', '.join(wrong) or 'all'} is negative or not"
            " finite: give the number of samples or tokens that the loss is the mean over"
        )
    if not total:
        raise StateError(
            "the weights of all backwards of this step are 0 on every rank, so there is nothing to"
            " average: call zero_grad() and go on with the next batch"
        )
    return total
