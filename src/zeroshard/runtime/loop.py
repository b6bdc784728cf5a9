"""The loop of the papers: what happens at every event of a training step. Those of a backward, the
three in the middle, are in runtime/backward.py.

    event                          weights of a unit            its gradients
    a module's forward begins      all-gather
                       ends        release
    a gradient at its outputs      all-gather
    a parameter's gradient                                      into the bucket
    its last parameter's gradient                               reduce-scatter, add
    another unit's gradient        release
    optimizer.step() begins                                     average, agree, clip (unless done)
    the user's optimizer           steps this rank's shards
    optimizer.step() ends          publish

(ZeRO, section 5; FSDP, arXiv 2304.11277, section 3.2.) runtime/hooks.py turns what torch does into
these events. Which of them move anything, the cells say: `Weights` knows what is gathered and for
whom, `Backward` which gradients are complete, `Finalizer` what the ranks agree on. Whatever else
happens at an event listens to it (events.py).

Invariant: every event is the same call on every rank that runs the same program, or is found out
(finalize.py). Nothing here moves bytes or registers a hook.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroshard.core.residency import Use
from zeroshard.core.schedule import Phase, Until
from zeroshard.errors import StateError
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.backward_pass import count_recomputations, is_checkpointed
from zeroshard.runtime.context import Context
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.leaves import this_micro_batch
from zeroshard.runtime.rest import Rest
from zeroshard.runtime.trees import tensors_within
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights

if TYPE_CHECKING:
    from zeroshard.runtime.events import StepEvents


class Loop:
    """The events of one engine's steps."""

    def __init__(
        self,
        context: Context,
        weights: Weights,
        backward: Backward,
        finalizer: Finalizer,
        rest: Rest,
        events: StepEvents,
    ) -> None:
        self.weights = weights
        self.availability = weights.availability
        self.backward = backward
        self.events = events
        self._context = context
        self._finalizer = finalizer
        self._rest = rest
        # a micro-batch of engine.accumulate() runs outside its sections: what it needs is held
        self.between_sections = False
        # all weights are here for a forward of the whole model that is compiled
        self.compiled = False
        self._saved = backward.saved
        self._thread = threading.get_ident()  # of the last forward of the model

    @contextmanager
    def outside_sections(self) -> Iterator[None]:
        """Inside, a micro-batch of engine.accumulate() runs between two sections."""
        self.between_sections = True
        try:
            yield
        finally:
            self.between_sections = False

    # ------------------------------------------------------------------ the model's forward

    def begin_forward(self) -> None:
        """A forward of the model begins, outside a backward."""
        if self.backward.running:
            raise StateError(
                "the last backward did not finish: call engine.reset() on every rank after an"
                " exception"
            )
        self._thread = threading.get_ident()
        for listener in self.events.before_forward:
            listener()
        evaluates = not (torch.is_grad_enabled() or is_checkpointed())
        self.weights.begin("forward", repeats=evaluates and self.backward.optimizer is None)
        self.weights.enter(evaluates=evaluates)
        self.weights.digest.begin(not self.weights.nothing_to_do)
        self._saved.begin()
        self._begun()

    def end_forward(self, output: Any) -> None:
        """It has ended, perhaps by an exception (`output` None)."""
        self._saved.end()
        if self.weights.schedule.running == 1 and not self.weights.nothing_to_do:
            self.hold_parameters(output)
        if output is not None or sys.exc_info()[1] is None:  # else others may come to nothing more
            self.weights.end_pass(repeats=self.weights.schedule.evaluates)
        self.weights.leave(evaluates=False)
        for listener in self.events.after_forward:
            listener()

    def agree(self) -> None:
        """It has ended well: share failures, also of a step that overlaps it, and compare."""
        for listener in self.events.forward_agreed:
            listener()
        if not (torch.is_grad_enabled() or is_checkpointed()):
            for listener in self.events.evaluated:
                listener()

    def shadow_forward(self, order: Iterable[int] | None) -> None:
        """Take part in a forward of other ranks, without one of our own: see Weights.shadow."""
        self.weights.digest.begin()
        self.weights.begin("forward")
        for _ in self.weights.shadow("forward", order):
            pass
        self.weights.end_pass()
        self._begun()
        self.agree()

    def _begun(self) -> None:
        for listener in self.events.forward_begun:
            listener()

    # ------------------------------------------------------------------ one module's forward

    def begin_module(self, units: Sequence[Unit]) -> None:
        """A module's forward begins, which needs `units`; a module around it does not have all of
        them. In a backward it is a recomputation.
        """
        in_backward = torch._C._current_graph_task_id() >= 0
        phase: Phase = "backward" if in_backward else "forward"
        weights, schedule = self.weights, self.weights.schedule
        weights.enter()
        for unit in units:
            unit.residency.acquire(Use.FORWARD)
            if commands := weights.need(unit, phase):
                weights.run(commands)
        if in_backward == torch.is_grad_enabled() and not schedule.evaluates:
            count_recomputations(units, ends_one=in_backward, enter=self.backward.enter)
        elif not in_backward:
            for unit in units:
                schedule.inside.add(unit.residency)

    def end_module(self, units: Sequence[Unit], output: Any, *, apart: bool) -> None:
        """It has ended; `apart`: the module is a tile, which is recomputed one at a time."""
        in_backward = torch._C._current_graph_task_id() >= 0
        for unit in units:
            residency = unit.residency
            residency.release(Use.FORWARD)
            if not residency.counts[Use.FORWARD]:
                self.weights.schedule.inside.discard(residency)
            # its own backward follows
            recomputed = in_backward and (not apart or residency.has(Use.BACKWARD))
            self.weights.after_forward(unit, recomputed=recomputed)
        if self.weights.schedule.running == 1 and not in_backward:
            self.hold_parameters(output)
        self.weights.leave()

    # ------------------------------------------------------------------ parameters used elsewhere

    def use(self, unit: Unit, name: str, operation: str) -> None:
        """A released parameter is about to be read outside the modules that hold it: bring its
        unit here, or refuse.
        """
        in_backward = torch._C._current_graph_task_id() >= 0
        phase: Phase = "backward" if in_backward else "forward"
        if (
            threading.get_ident() != self._thread
            and not in_backward
            and this_micro_batch() is None
            and any(thread.ident == self._thread for thread in threading.enumerate())
        ):
            raise StateError(
                f"parameter {name!r} cannot be read here ({operation}): this is not the thread of"
                " the training loop, which its weights are not ready for. Read it in that thread,"
                " inside engine.gathered(), and hand over a copy"
            )
        if not unit.cells.weight.is_sharded:
            self.weights.unshard(unit, phase)  # on its way to every rank already
            return
        # .data is how code looks, or writes
        training = torch.is_grad_enabled() and operation != ".data"
        if not (in_backward or self.weights.schedule.running or training):
            late = "; an optimizer made after shard() needs engine.attach(optimizer)"
            raise StateError(
                f"parameter {name!r} rests sharded and cannot be read here ({operation}): read it"
                " inside engine.gathered(), on every rank"
                f"{late if self.backward.optimizer is None else ''}"
            )
        may_follow = in_backward or torch.is_grad_enabled()
        if not (in_backward or self.weights.schedule.running):
            self.weights.digest.begin(self.backward.runs_plainly)
        self.weights.hold(unit, phase, Until.BACKWARD_ENDS if may_follow else Until.FORWARD_ENDS)

    def hold(self, unit: Unit) -> None:
        """Keep `unit` gathered until the next step."""
        if unit.cells.weight.is_sharded:
            self.weights.hold(unit, "forward", Until.STEP)

    def hold_parameters(self, output: Any) -> None:
        """Keep the units of parameters in `output`, which has left the model, until the next
        step: they may be used anywhere, on one rank alone.
        """
        for tensor in tensors_within(output):
            if isinstance(tensor, nn.Parameter) and hasattr(tensor, "_zeroshard"):
                tensor._zeroshard.hold()

    # ------------------------------------------------------------------ optimizer.step()

    def before_step(self) -> bool:
        """``optimizer.step()`` begins: agree on the gradients, and wait until every rank is done
        reading the weights. Return whether the step may be taken.
        """
        for listener in self.events.before_step:
            listener()
        finite = self._finalizer.before_step()
        for listener in self.events.averaged:
            listener()
        self._context.faults.agree()  # before anything is written
        with self._context.streams.probe.waiting("gather"):
            self._rest.before_writing()
        return finite

    def noted(self) -> AbstractContextManager[None]:
        """Note a StorageError of the body, of a step, which `after_step` raises."""
        return self._context.faults.noted(lost=True)

    def after_step(self, *, late: bool = False) -> None:
        """The user's optimizer has stepped: publish what was written, unless the step ends `late`;
        what was `noted` on any rank is raised on all.
        """
        if late:
            self.weights.invalidate()
        else:
            self._rest.publish(everything=False)
        self._context.faults.agree()
        self._finalizer.after_step()
        for listener in [*self.events.after_step]:  # the first step's leaves the list
            listener()

    def publish_late(self) -> None:
        """A step that was taken one step late goes into the weights."""
        self._rest.publish(everything=True)

    @contextmanager
    def moving(self, call: str, check: Callable[[], None]) -> Iterator[None]:
        """The optimizer moves its parameters inside, in `call`; then the weights follow. Raises, on
        every rank, what `check` raises on one. Collective.
        """
        with self._context.transport.control.together(call) as meeting:
            self.check_between_steps(call)
            self.availability.check_trained()
            check()
            meeting.compare({"call": call})
        with self._rest.rewriting():
            yield

    def zero_gradient(self, parameter: nn.Parameter | None) -> None:
        """The ``zero_()`` of a sealed gradient on the optimizer's side was called."""
        self.backward.zero_gradient(parameter)

    def check_between_steps(self, call: str) -> None:
        """Raise StateError, naming the `call`, inside a forward, a backward or ``gathered()``."""
        if (
            self.backward.running
            or self.weights.schedule.running
            or any(unit.residency.is_held for unit in self.weights.units)
        ):
            raise StateError(
                f"{call} inside a forward, a backward or gathered(): call it between steps"
            )
