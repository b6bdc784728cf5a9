"""The loop of the papers: what happens at every event of a training step, in one file.

    event                          weights of a unit            its gradients
    a module's forward begins      all-gather
                       ends        release
    a gradient at its outputs      all-gather
    a parameter's gradient                                      into the bucket
    the gradients of its inputs    release                      reduce-scatter, add
    optimizer.step() begins                                     average, agree, clip
    the user's optimizer           steps this rank's shards
    optimizer.step() ends          publish

(ZeRO, section 5; FSDP, arXiv 2304.11277, section 3.2.) runtime/hooks.py turns what torch does into
these events. Which of them move anything, the cells say: `Weights` knows what is gathered and for
whom, `Backward` whose gradients are complete, `Finalizer` what the ranks agree on.

Invariant: every event is the same call on every rank that runs the same program, or is found out
(finalize.py). Nothing here moves bytes or registers a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroshard.comm.launched import heartbeat
from zeroshard.core.residency import Residency, Use
from zeroshard.core.schedule import Phase, Until
from zeroshard.errors import StateError, StorageError
from zeroshard.optim.sharded import INTERRUPTED, ShardedOptimizer
from zeroshard.runtime.backward import Backward, retains_graph
from zeroshard.runtime.context import Context
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.recomputed import count_recomputations, is_checkpointed
from zeroshard.runtime.recovery import Recovery
from zeroshard.runtime.replicas import verify_replicas
from zeroshard.runtime.rest import Rest
from zeroshard.runtime.trees import tensors_within
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.watch import Watch, check_frozen
from zeroshard.runtime.weights import Weights
from zeroshard.state.local import local_of

__all__ = ["Loop"]


class Loop:
    """The events of one engine's steps."""

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        weights: Weights,
        backward: Backward,
        finalizer: Finalizer,
        rest: Rest,
        recovery: Recovery,
    ) -> None:
        self.weights = weights
        self.backward = backward
        self._model = model
        self._context = context
        self._finalizer = finalizer
        self._rest = rest
        self._recovery = recovery
        segments = [segment for unit in weights.units for segment in unit.segments]
        self._watch = Watch(model, (p for segment in segments for p in segment.parameters))
        self._optimizer: ShardedOptimizer | None = None
        self._after_step: Callable[[ShardedOptimizer], None] | None = None
        # a micro-batch of engine.accumulate() runs outside its sections: what it needs is held
        self.between_sections = False
        self._saved = backward.saved
        self._beat = heartbeat()
        # elsewhere ranks may run forwards that the others do not
        may_agree = context.weights_leave or context.transport.size == 1
        self._agrees = bool(context.tiering.away) and may_agree

    @contextmanager
    def outside_sections(self) -> Iterator[None]:
        """Inside, a micro-batch of engine.accumulate() runs between two sections."""
        self.between_sections = True
        try:
            yield
        finally:
            self.between_sections = False

    def attach(
        self, optimizer: ShardedOptimizer, after_step: Callable[[ShardedOptimizer], None] | None
    ) -> None:
        """Step `optimizer`; call `after_step` with it when a step is over, on every rank."""
        self._optimizer, self._after_step = optimizer, after_step

    # ------------------------------------------------------------------ the model's forward

    def begin_forward(self) -> None:
        """A forward of the model begins, outside a backward."""
        if self.backward.running:
            raise StateError(
                "the last backward did not finish: call engine.reset() on every rank after an"
                " exception"
            )
        self._context.faults.check()
        if (recording := self._context.streams.probe.recording) is not None:
            recording.enter("forward")
        if self._optimizer is not None and self._optimizer.is_interrupted:
            raise StateError(INTERRUPTED)
        check_frozen(self.weights.units)
        self.backward.tell("forward")
        self._beat()
        evaluates = not (torch.is_grad_enabled() or is_checkpointed())
        self.weights.begin("forward", repeats=evaluates and self._optimizer is None)
        self.weights.enter(evaluates=evaluates)
        self._saved.begin()
        self._broadcast_buffers()

    def end_forward(self, output: Any) -> None:
        """It has ended, perhaps by an exception (`output` None)."""
        self._saved.end()
        if self.weights.schedule.running == 1 and not self.weights.nothing_to_do:
            self.hold_parameters(output)
        self.weights.end_pass(repeats=self.weights.schedule.evaluates)
        self.weights.leave(evaluates=False)
        if (recording := self._context.streams.probe.recording) is not None:
            recording.leave()

    def agree(self) -> None:
        """It has ended well: share failures between the ranks, including those of a step that
        overlaps this forward.
        """
        if self._agrees:
            optimizer = self._optimizer
            failure = None if optimizer is None else optimizer.runner.failure()
            self._context.faults.agree(failure, lost=True)

    def shadow_forward(self) -> None:
        """Take part in a forward of the other ranks, without one of our own: what their gathers
        need of us.
        """
        for _ in self.weights.shadow("forward"):
            pass
        self._broadcast_buffers()
        self.agree()

    def _broadcast_buffers(self) -> None:
        if self._context.options.broadcast_buffers:
            for buffer in self._model.buffers():
                self._context.transport.broadcast(local_of(buffer))

    # ------------------------------------------------------------------ one module's forward

    def begin_module(self, units: Sequence[Unit], residencies: Sequence[Residency]) -> None:
        """A module's forward begins, which needs `units`; in a backward it is a recomputation."""
        in_backward = torch._C._current_graph_task_id() >= 0
        phase: Phase = "backward" if in_backward else "forward"
        recording, weights = self._context.streams.probe.recording, self.weights
        counts = in_backward == torch.is_grad_enabled() and not weights.schedule.evaluates
        plainly = recording is None and weights.availability.refusal is None and not counts
        if plainly and weights.schedule.reenter(residencies):
            weights.digest.enter(phase, units[-1].name)
            return  # most modules run inside one that spans the same unit
        if recording is not None:
            recording.enter("forward", units[0].name)
        weights.enter()
        for unit in units:
            unit.residency.acquire(Use.FORWARD)
            if commands := weights.need(unit, phase):
                weights.run(commands)
        if counts:
            count_recomputations(units, ends_one=in_backward, enter=self.backward.enter)

    def end_module(
        self, units: Sequence[Unit], residencies: Sequence[Residency], output: Any, *, apart: bool
    ) -> None:
        """It has ended; `apart`: the module is a tile, which is recomputed one at a time."""
        recording = self._context.streams.probe.recording
        if recording is None and self.weights.schedule.leave_inner(residencies):
            return
        in_backward = torch._C._current_graph_task_id() >= 0
        for unit in units:
            unit.residency.release(Use.FORWARD)
            # its own backward follows
            recomputed = in_backward and (not apart or unit.residency.has(Use.BACKWARD))
            self.weights.after_forward(unit, recomputed=recomputed)
        if self.weights.schedule.running == 1 and not in_backward:
            self.hold_parameters(output)
        self.weights.leave()
        if recording is not None:
            recording.leave()

    # ------------------------------------------------------------------ its backward

    def begin_backward(self, units: Sequence[Unit], epoch: int, grad: torch.Tensor) -> None:
        """`grad` has come to an output of a module that ran under `epoch`; it is left as it is."""
        recording = self._context.streams.probe.recording
        if recording is not None:
            recording.turn("backward", units[0].name)
        for unit in units:
            self.backward.before_unit(unit, epoch)
        if recording is not None:
            recording.until_backward_ends()

    def end_backward(self, units: Sequence[Unit], *, counted: bool, before_others: bool) -> None:
        """The gradients of its inputs have come. `counted`: its forward is one of those that a
        backward follows; `before_others`: other nodes of the module may still have to run.
        """
        done = counted and not retains_graph()  # else this graph's backward may follow once more
        for unit in units:
            if done:
                unit.residency.release(Use.FOLLOWED)
            self.backward.after_inputs(unit, before_others=before_others)

    # ------------------------------------------------------------------ parameters used elsewhere

    def use(self, unit: Unit, name: str, operation: str) -> None:
        """A released parameter is about to be read outside the modules that hold it: bring its
        unit here, or refuse.
        """
        in_backward = torch._C._current_graph_task_id() >= 0
        phase: Phase = "backward" if in_backward else "forward"
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
        context, recording = self._context, self._context.streams.probe.recording
        if recording is not None:
            recording.enter("step")
        context.faults.check()
        self.check_states()
        self._watch.check()
        if context.options.clip_norm is not None and not self._finalizer.clipped:
            self._finalizer.clip(context.options.clip_norm)
        result = self._finalizer.before_step()
        if self._finalizer.is_every(context.options.verify_every):
            verify_replicas(self.weights, self._optimizer, context)
        context.faults.agree()  # before anything is written
        since = None if recording is None else recording.now()
        self._rest.before_writing()
        if recording is not None:
            recording.waited("gather", "", since)
        self._recovery.begin_step()
        return result.finite

    def after_step(self, error: StorageError | None = None) -> None:
        """The user's optimizer has stepped: publish what was written; an `error` on any rank is
        raised on all.
        """
        optimizer, faults = self._optimizer, self._context.faults
        if optimizer is not None and optimizer.runner.was_late:
            self.weights.invalidate()
        else:
            self._rest.publish(everything=False)
        faults.agree(error, lost=True)
        self._finalizer.after_step()
        with faults.noted(lost=True):
            if self._after_step is not None and optimizer is not None:
                self._after_step(optimizer)
        self._recovery.end_step()
        if (recording := self._context.streams.probe.recording) is not None:
            recording.leave()

    def publish_late(self) -> None:
        """A step that was taken one step late goes into the weights."""
        self._rest.publish(everything=True)

    @contextmanager
    def moving(self, call: str, refused: StateError | None) -> Iterator[None]:
        """The optimizer moves its parameters inside, in `call`; then the weights follow.
        Collective.
        """
        try:
            self.check_between_steps(call)
            self.check_states()
        except StateError as error:
            refused = error
        self._context.transport.control.agree({"call": call}, call, error=refused)
        with self._rest.rewriting():
            yield

    def check_states(self) -> None:
        """Raise StateError where what rests is not what is trained, or not there."""
        self.weights.availability.check_trained()

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

    def check_at_rest(self, call: str) -> None:
        """Raise StateError, naming the `call`, where something is under way that goes on with
        the layout as it is, or where the model is not the one that was sharded.
        """
        self.check_states()
        context, optimizer = self._context, self._optimizer
        if (unsaved := context.faults.unsaved) is not None:
            raise StateError(f"{call}: what rests here is not whole: {unsaved}")
        if optimizer is not None and optimizer.is_interrupted:
            raise StateError(INTERRUPTED)
        if context.streams.probe.recording is not None:
            raise StateError(f"{call} inside engine.trace(): leave that first")
        if not self.backward.runs_plainly:
            raise StateError(
                f"{call} inside no_sync(), join() or a schedule that the engine follows: call it"
                " outside"
            )
        self._watch.check()
        check_frozen(self.weights.units)
        for leaf in self.backward.leaves:
            if not leaf.parameter.requires_grad:
                raise StateError(
                    f"parameter {leaf.name!r} was trained when the model was sharded and is frozen"
                    f" now: set requires_grad=True before {call}"
                )
