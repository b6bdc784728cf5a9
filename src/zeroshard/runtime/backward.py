"""The events while autograd runs: a gradient comes, a unit is complete, the backward is over.

A unit's gradients are handed over (``Bucket.reduce``) when every trainable parameter has one,
or when the backward of the unit's inputs is done and autograd will bring no more of them (a module
that ran in part), or else at the end of the pass (one that did not run).

[Note: nested backwards] Reentrant checkpointing runs a backward inside a backward. Each autograd
graph task that touches us is pushed on a stack and popped by its final callback; only the outermost
one ends the pass. Where the first gradient comes inside a checkpoint, the backward around it is
entered when the checkpoint runs its forward again, or is over. A parameter may get a gradient in
each task, so a unit that is still to be recomputed, or that also ran outside the checkpoint, waits
for those.

Invariant: outside ``no_sync`` every trainable segment is reduced exactly once per backward, on
every rank, however often its unit ran there: reduces meet by number, and a rank on which it did not
run contributes zeros. A gradient that comes after its unit was handed over stays in the segment's
buffer and goes with the next reduce; the ranks agree about what is left before a step
(finalize.py).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_current_graph_task_keep_graph as retains_graph

from zeroshard.core.residency import Use
from zeroshard.core.schedule import Until
from zeroshard.errors import StateError
from zeroshard.optim.sealed import SealedGrad, SealedShards
from zeroshard.runtime.backward_pass import (
    UNKNOWN,
    Accumulation,
    BackwardMode,
    BackwardPass,
    SavedTensors,
    checkpoint_around,
    gets_gradient,
    when_over,
)
from zeroshard.runtime.decisions import Decisions
from zeroshard.runtime.events import StepEvents
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.reductions import Reductions
from zeroshard.runtime.trainable import (
    ASSIGNED,
    FrozenParameters,
    TrainableParameters,
    Trained,
    names_of,
    seal,
)
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights
from zeroshard.state.gradient import Gradient

_USED = attrgetter("used")


class Backward:
    """One engine's gradients, from the first hook of a backward to the optimizer's step."""

    def __init__(
        self,
        weights: Weights,
        reductions: Reductions,
        *,
        share: float | None = None,
        leaves: Leaves | None = None,
        sums_ranks: bool = False,
    ) -> None:
        """`share`: what the loss of this rank counts where it has no weight (None: as all others).
        `leaves`: each backward is one of them. `sums_ranks`: they are not averaged.
        """
        self.share, self.leaves, self.sums_ranks = share, leaves, sums_ranks
        self.optimizer: SealedShards | None = None
        self.accumulation = Accumulation()
        self.decisions = Decisions()
        self.reductions = reductions
        self.saved = SavedTensors(weights)
        self._weights = weights
        self.mode = self._plain = BackwardMode()  # of a plain loss.backward()
        self.announce: Callable[[str, Any], None] | None = None  # inside join()
        self._pass = BackwardPass()
        # of the last gradient at an output: the module's units, and the node that made the output
        self._begun_at: tuple[Sequence[Unit], Any] = ((), None)
        self._synced = True  # the last backward was outside no_sync(), or all was flushed
        self.zeroed: set[int] = set()  # parameters, by id, since the last backward
        self._trainable = [unit for unit in weights.units if unit.trainable]
        # in unit order
        self.buckets = [bucket for unit in self._trainable for bucket in unit.buckets]
        self.parameters = TrainableParameters(self._trainable)
        self.frozen = FrozenParameters(self.parameters)

    def attach(self, optimizer: SealedShards) -> None:
        """Let the gradients rest for `optimizer` alone, which seals its shards of them."""
        self.optimizer = optimizer
        self.decisions.attach(optimizer.optimizer)
        self.frozen.attach(optimizer, self._weights.segments)

    # ------------------------------------------------------------------ how a backward is run

    @property
    def runs_plainly(self) -> bool:
        """Whether no no_sync(), join() or schedule is under way."""
        return self.mode is self._plain

    @contextmanager
    def running_as(self, **changes: Any) -> Iterator[None]:
        """Run the backwards inside in a mode with these `changes`."""
        before, self.mode = self.mode, replace(self.mode, **changes)
        multiplies = changes.get("has_loss") and (
            self.mode.scaled or self.mode.weight is not None or self.share is not None
        )
        if multiplies:
            _multiplying.append(self)
        try:
            yield
        finally:
            self.mode = before
            if multiplies:
                _multiplying.remove(self)

    @contextmanager
    def of_schedule(
        self, units: Sequence[Unit], *, retains: bool = False, gathers: bool = False
    ) -> Iterator[None]:
        """Run one computation of a pipeline's schedule inside: a backward that brings the gradients
        of `units` alone (none: no gradient, as of a backward for the inputs), by hooks or as the
        ``.grad`` of parameters. `retains`: another one follows on the same graph. `gathers`: any
        number of backwards; their gradients of a unit are added until `complete` is told so.

        After an exception it stays open, until engine.reset().
        """
        self._begin(retains=retains, units=units, gathers=gathers)
        yield
        with torch._C.DisableTorchFunctionSubclass():
            for one in self.parameters.assigned(units):
                self._bring(-1)
                self._add(one, one.take())
                one.unit.arrived[id(one.parameter)] = -1
                if one.unit.has_all:
                    self.complete(one.unit)
        self._end()

    @contextmanager
    def announced(self, announce: Callable[[str, Any], None]) -> Iterator[None]:
        """Call `announce` with what comes inside: a forward, a backward, a clip or a step."""
        self.announce = announce
        try:
            yield
        finally:
            self.announce = None

    def tell(self, what: str, argument: Any = None) -> None:
        """Inside `announced`, tell the other ranks what comes."""
        if self.announce is not None:
            self.announce(what, argument)

    # ------------------------------------------------------------------ hooks

    def enter(self) -> None:
        """Note that a backward is running, once per graph task."""
        task = torch._C._current_graph_task_id()
        current = self._pass
        if task in current.tasks:
            return
        if task < 0:
            raise StateError("a backward hook ran outside a backward")
        if not self.running:
            if self.mode.refused is not None:
                raise StateError(self.mode.refused)
            current = self._begin(retains=retains_graph())
        checkpoint = checkpoint_around()
        if not current.tasks:
            if checkpoint is None and current.recomputed:  # nested ones cannot ask
                current.outer.update(
                    id(one.parameter) for one in self.parameters if gets_gradient(one.parameter)
                )
            elif checkpoint is not None:
                when_over(checkpoint, self.enter)  # which the backward around it has to
        current.push(task, checkpoint=checkpoint is not None, retains=retains_graph())
        self._weights.serve(None)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._leave(task))

    @property
    def running(self) -> bool:
        """Whether a backward is under way."""
        current = self._pass
        driven = current.units is not None and not current.ended  # by a schedule, now
        return bool(current.tasks) or driven or current.awaits_outer

    def begin_units(
        self, units: Sequence[Unit], epoch: int, events: StepEvents, grad: torch.Tensor
    ) -> None:
        """A gradient has come to an output of a module of `units`, which are one object for all of
        its modules: their weights are needed as they were in the forward under `epoch`.

        What the backward leaves is handed over now, and released if it has all its gradients. Not
        when they come: autograd hands a gradient over before it runs the other nodes of the
        module, which may read ``weight.detach()``. It runs the nodes that were made last first, so
        all nodes of a unit have run when it comes to another unit, but for units around others. By
        then a unit with some parameters that are unused here is handed over, too: other ranks,
        which use them, have done so, and collectives meet in the order in which they begin.
        """
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        self._begun_at, weights, finished = (units, node), self._weights, self._pass.finished
        if weights.served is units and weights.served_in == task and not finished:
            return
        for listener in events.before_backward:
            listener(units)
        if task not in self._pass.tasks:
            self.enter()
        if epoch != weights.epoch:
            raise StateError(
                f"backward through unit {units[0].name!r} of a forward that ran before the last"
                " optimizer.step(), load or writeback: its weights have changed since; run the"
                " forward again (or step after the backward)"
            )
        current = self._pass
        finished, entered = current.finished, current.tasks[task].entered
        # what two modules return, one around the other or one that passes it on, is one node's
        # output
        last, first = current.nodes.get(task, (None, 0))
        left = () if node is last else entered[first:]
        if node is not last:
            current.nodes[task] = node, len(entered)
        entered.extend(units)
        for unit in left:
            if unit.index not in current.reduced and unit not in units:
                self._leave_behind(unit)
        for unit in units:
            finished.pop(unit.index, None)
        for unit in [*finished.values()]:
            if not unit.holds_others:
                weights.after_backward(finished.pop(unit.index))
        again = torch.is_grad_enabled()
        for unit in units:
            unit.residency.acquire(Use.BACKWARD)
            if again:  # create_graph=True: another backward may go through this one
                weights.hold(unit, "backward", Until.STEP)
            elif commands := weights.need(unit, "backward"):
                weights.run(commands)
        weights.serve(None if again else units, task)
        for ends_now in events.after_backward:
            ends_now()

    def _leave_behind(self, unit: Unit) -> None:
        """All nodes of `unit` have run, but for nodes of units inside it."""
        own = self._pass.units
        if (own is None or unit in own) and not unit.holds_others:
            is_over = self.complete(unit, was_left=True)
            if is_over and not unit.has_frozen:
                self._pass.finished[unit.index] = unit

    def after_inputs(self, units: Sequence[Unit], *, counted: bool, before_others: bool) -> None:
        """The gradients of the inputs of `units` are there: whatever did not get one by now gets
        none in this backward.

        `counted`: their forward is one of those that a backward follows; `before_others`: other
        nodes of the units may still have to run.
        """
        done = counted and not retains_graph()  # else this graph's backward may follow once more
        current, (begun, node) = self._pass, self._begun_at
        for unit in units:
            if done:
                unit.residency.release(Use.FOLLOWED)
            counts = unit.residency.counts
            if counts[Use.BACKWARD] and (current.tasks or self.running):
                if unit.arrived:
                    self.complete(unit)
                # an output of this unit may be the input: its backward needs the weights now, or
                # soon
                begins = unit in begun and node is torch._C._current_autograd_node()
                if before_others or begins or counts[Use.FOLLOWED]:
                    current.finished[unit.index] = unit
                else:
                    current.finished.pop(unit.index, None)
                    self._weights.after_backward(unit)

    def taker(self, number: int, hooks: Mapping[int, int]) -> Callable[[torch.Tensor], None]:
        """Return the hook for when autograd has finished the gradient of `parameters[number]`;
        `hooks` are the ids of these, by number of the parameter.

        It is the only frame of most gradients: the buffer that the first one opens says what takes
        the others of its unit (`Bucket.takes`).
        """
        backward, running = weakref.ref(self), torch._C._current_graph_task_id  # [Note: weak hooks]
        key = id(self.parameters[number].parameter)
        plain = torch.Tensor if self.parameters[number].to_local is None else None  # of no DTensor

        def take_grad(parameter: torch.Tensor) -> None:
            alive = backward()
            if alive is None:
                return
            one, grad, task = alive.parameters[number], parameter.grad, running()
            if type(grad) is SealedGrad:  # no hook came before
                grad = grad.accumulated()
                alive.enter()
            # before the pass begins: it was None before autograd came, which tells what the user
            # has cleared
            parameter.grad = None
            if task not in alive._pass.tasks:
                alive.enter()
            if grad is None:
                raise StateError(
                    f"a hook on parameter {one.name!r}, set before shard(), has taken its gradient"
                    " away inside the backward, before the ranks' gradients met: let the optimizer"
                    " of shard() step and clear it, after the backward"
                )
            current, unit, bucket = alive._pass, one.unit, one.bucket
            # else torch has only looked for the shapes of gradients
            if current.units is None or unit in current.units:
                if task != current.brought:
                    alive._bring(task)
                take = bucket.takes[one.index]
                is_plain = type(grad) is plain and grad.layout is torch.strided
                if take is None or grad.requires_grad or not is_plain:
                    alive._add(one, grad)
                else:
                    bucket.takes[one.index] = None
                    bucket.used[one.index] = bucket.filled[one.index] = True
                    take(grad)
                del grad, take  # they would live until the sum of the unit has been started
                unit.arrived[key] = task
                if current.outer and len(current.tasks) == 1:
                    current.outer.discard(key)
                if len(unit.arrived) >= unit.expected:
                    if not unit.has_frozen:
                        current.finished[unit.index] = unit
                    alive.complete(unit)
            every = parameter._post_accumulate_grad_hooks
            has_next = len(every) > 1 and next(reversed(every)) != hooks[number]
            if has_next and not alive.parameters.hides:
                seal([one], alive)  # for the hook after this one

        return take_grad

    def _bring(self, task: int) -> None:
        """Graph task `task`, or a schedule (-1), brings gradients; before, none or another did."""
        if not self._pass.has_loss:
            self.accumulation.bring(of_another=_multiplying[-1:] not in ([], [self]))
        self._pass.bring(task)

    def _add(self, trained: Trained, grad: torch.Tensor) -> None:
        """Take in a gradient of any kind."""
        grad, unit, current = trained.local(grad), trained.unit, self._pass
        if self.leaves is None or not self.leaves.keep(trained, grad):
            again = current.gathers or current.nested or unit in current.recomputed
            trained.bucket.add(
                trained.index,
                grad,
                sync=self.mode.sync,
                more=current.gathers,
                # no second gradient of a parameter comes before the next reduce of its unit
                once=not (again or unit.index in current.reduced),
            )

    # ------------------------------------------------------------------ a pass

    def _begin(
        self,
        *,
        retains: bool = False,
        brings: bool = False,
        gathers: bool = False,
        units: Sequence[Unit] | None = None,
    ) -> BackwardPass:
        availability = self._weights.availability
        inputs_alone = (
            availability.is_swapped
            and not (brings or units is not None)
            and not any(gets_gradient(one.parameter) for one in self.parameters)
        )
        availability.check_gather() if inputs_alone else availability.check_trained()
        self.collect_dropped()
        mode = self.mode
        if brings:  # no backward of our own
            self.parameters.clear_gradients()
        assigned = self._replaced(units)
        if units is None or units:
            if self.leaves is not None:
                self.leaves.begin_backward(has_late=self.has_unreduced)
            self.accumulation.check(scaled=mode.scaled, divisor=mode.divisor)
            flags = {"sync": mode.sync, "scaled": mode.scaled, "weighted": mode.weight is not None}
            self.tell("backward", flags)
            if self.zeroed:
                if self.zeroed.issuperset(id(one.parameter) for one in self.parameters.used()):
                    self.accumulation.forget_weights()
                self.zeroed.clear()
            self.accumulation.add(scaled=mode.scaled, divisor=mode.divisor)
            self._synced = mode.sync
            if mode.has_loss:
                self.accumulation.weigh(mode.weight)
        repeated = {unit: unit.residency.counts[Use.REPEATED] for unit in self._trainable}
        self._pass = BackwardPass(
            retains=retains,
            brings=brings,
            gathers=gathers,
            units=units,
            has_loss=mode.has_loss,
            assigned=assigned,
            recomputed={unit: count for unit, count in repeated.items() if count},
        )
        self._weights.begin("backward")
        # those of each leaf in one backward are handed over round by round
        handed_over = self._trainable if units is None else units
        self.reductions.begin(() if gathers and self.leaves else handed_over)
        self.parameters.clear_gradients(assigned=False)
        # released parameters are asked for what they answer anyway
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._trainable:
                unit.expect_gradients()
        return self._pass

    def _replaced(self, units: Sequence[Unit] | None) -> list[Trained]:
        """Return the parameters in `units` that have assigned gradients to which the backward that
        begins adds: what rests of these is no longer theirs.
        """
        assigned, mode = self.parameters.assigned(units), self.mode
        if not assigned:
            return []
        if self.leaves is not None:
            raise StateError(
                f"the gradient assigned to {assigned[0].name!r} would be added to one leaf of every"
                f" rank, and leaves={self.leaves.tree} counts each once: assign it after the loop"
                " over engine.leaves()"
            )
        weighed = mode.weight is not None or self.share is not None
        if units is not None and (mode.scaled or weighed):
            raise StateError(
                f"the gradient assigned to {assigned[0].name!r} cannot be added where a"
                " schedule or engine.accumulate() scales or weighs the losses: assign it after them"
            )
        if self.accumulation.has_gradient:
            self.decisions.note(f"{ASSIGNED}, before a backward", names_of(assigned))
            for one in assigned:
                one.bucket.zero([one.index])
        return assigned

    def complete(self, unit: Unit, *, has_all: bool = False, was_left: bool = False) -> bool:
        """Hand `unit` over, once in this pass, unless gradients of it are still to come; return
        whether it was. `has_all`: the caller knows that none are; `was_left`: the backward has gone
        on, and some parameters may have none.
        """
        current, expected = self._pass, unit.residency.counts
        if unit.index in current.reduced or not unit.trainable:
            return False
        if not has_all:
            if current.gathers:
                return False
            # see [Note: nested backwards]
            if expected[Use.REPEATED] or (len(current.tasks) > 1 and expected[Use.FOLLOWED]):
                return False
            if current.nested or len(unit.arrived) < unit.expected:
                # read there, and none of its modules called
                if current.nested and current.in_checkpoint and unit not in current.recomputed:
                    return False
                task = torch._C._current_graph_task_id()
                if any(
                    id(p) in current.outer or (unit.arrived.get(id(p)) != task and gets_gradient(p))
                    for segment in unit.trainable
                    for p in segment.parameters
                ):
                    return False
        if was_left:
            self.reductions.open_zeros(unit, sync=self.mode.sync)
        if current.assigned and current.brings:  # autograd has added nothing to some
            for one in self.parameters.assigned([unit]):
                if one in current.assigned:
                    self._add(one, one.take())
        unit.expect_no_more()
        if self.reductions.start(unit, sync=self.mode.sync, with_earlier=current.brings):
            current.reduced[unit.index] = self._weights.schedule.num_gathered
        self.reductions.advance()
        return True

    def shadow(
        self, order: Iterable[int] | None, *, sync: bool, scaled: bool, weighted: bool
    ) -> None:
        """Take part in a backward of other ranks: gather as Weights.shadow, contribute zeros."""
        weight = 0.0 if weighted else None
        units, last = self._weights.units, self._pass.reduced
        due = deque(last.items())
        with self.running_as(sync=sync, scaled=scaled, has_loss=True, weight=weight):
            self._begin(brings=True)
            # between gathers, as our last backward did and theirs do, who may wait for our part
            # before they gather on
            for unit in chain((None,), self._weights.shadow("backward", order)):
                if unit is not None and unit.index not in self._pass.reduced:
                    self.reductions.open_zeros(unit, sync=sync)
                    if unit.index not in last:
                        self.complete(unit, has_all=True)
                while due and due[0][1] <= self._weights.schedule.num_gathered:
                    self.complete(units[due.popleft()[0]], has_all=True)
            for index, _ in due:
                self.complete(units[index], has_all=True)
            self._end()

    def _leave(self, task: int) -> None:
        for unit in self._pass.tasks[task].entered if len(self._pass.tasks) > 1 else ():
            self._leave_behind(unit)
        entered = self._pass.pop(task)
        self._begun_at = ((), None)
        self._weights.serve(None)
        if not self.running:
            self._end()
            return
        for unit in entered:  # reentrant checkpointing, or a schedule's task: that part is over
            if self._pass.finished.pop(unit.index, None) is not None:
                self._weights.after_backward(unit)

    def _end(self) -> None:
        self._pass.end()
        own = self._trainable if self._pass.units is None else self._pass.units
        for unit in reversed(own):
            if unit.index not in self._pass.reduced:
                self.complete(unit, has_all=True)
        self.reductions.start_all()
        for unit in self._weights.units:
            if unit.residency.counts[Use.BACKWARD]:
                self._weights.after_backward(unit)
        self._pass.finished.clear()
        self._weights.end_pass()
        if self._pass.retains:
            for unit, count in self._pass.recomputed.items():
                unit.residency.counts[Use.REPEATED] = count
        else:
            self._weights.end_backward()
        self.seal()

    @property
    def gradients(self) -> list[Gradient]:
        """The gradients that rest here."""
        resting = [bucket.accumulator.resting() for bucket in self.buckets]
        return [gradient for gradient in resting if gradient is not None]

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients rest here, or may rest elsewhere, that no reduce has taken."""
        may = self.accumulation.has_gradient and not self._synced
        return True in [b.has_unreduced or (may and b.sums_micro_batches) for b in self.buckets]

    def flush(self) -> None:
        """Reduce all once more: some rank has unreduced gradients, late ones or of ``no_sync``."""
        if self.leaves is not None:
            self.leaves.refuse_late()
        for unit in reversed(self._trainable):
            self.reductions.start(unit, sync=True, with_earlier=True)
        self._synced = True
        self.seal()

    # ------------------------------------------------------------------ what the user sees as .grad

    def seal(self) -> None:
        """Put sealed gradients where autograd or the step has left none."""
        self.parameters.seal(self)
        if self.optimizer is not None:
            self.optimizer.seal()
            for bucket in self.buckets:
                if bucket.accumulator.pads:
                    bucket.accumulator.release()

    def collect_dropped(self) -> None:
        """Forget the gradients that the user has cleared, on the model's side or the
        optimizer's.
        """
        if not self.accumulation.has_gradient or self.running:
            return
        changed = self.accumulation.changed
        dropped = [] if self.optimizer is None else self.optimizer.dropped()
        cleared = set(map(id, dropped))
        everything = False not in chain.from_iterable(map(_USED, self.buckets))
        gone = self.parameters.take_cleared(cleared)
        anything = True in chain.from_iterable(map(_USED, self.buckets))
        # gradients of parameters unused here; a step agrees about what is used
        if changed and not anything:
            anything = bool(self.gradients)
        if not (anything or gone or cleared):  # none has come, or the user has cleared all there
            self.accumulation.forget_count()
        elif not anything:
            same_on_all = everything or not changed or cleared.issuperset(self.parameters.ids)
            self.reset(0 if same_on_all else UNKNOWN)
        elif gone and not changed:
            # before a step the ranks need not have used the same parameters
            names = ", ".join(one.name for one in gone)
            self.decisions.note("gradients cleared by zero_grad()", names)

    def zero_gradient(self, parameter: nn.Parameter | None) -> None:
        """Set the gradient of `parameter` to zero, where one rests. Before the first step the
        ranks need not have used the same parameters.
        """
        if not self.accumulation.changed:
            self.decisions.note_once("zero_grad(set_to_none=False)", "called")
        one = self.parameters.of(parameter)
        if one is not None:
            one.bucket.zero([one.index])
            self.zeroed.add(id(one.parameter))

    def reset(self, micro_batches: int = 0) -> None:
        """No gradient rests here any more; `micro_batches`: see Accumulation.clear."""
        self.accumulation.clear(micro_batches)
        self.saved.clear()
        for bucket in self.buckets:
            bucket.accumulator.release()  # also where no parameter was used: zeros rest there
        if self.optimizer is not None:
            self.optimizer.clear()

    def abandon(self) -> None:
        """After an exception: no backward is running and no gradient rests."""
        self._pass, self._begun_at = BackwardPass(), ((), None)
        # of one that a signal's handler has ended by an exception where its context begins or ends
        mode = replace(self.mode, scaled=False, divisor=1, has_loss=False, weight=None)
        self.mode = self._plain if mode == self._plain else mode
        _multiplying[:] = [other for other in _multiplying if other is not self]
        self.reductions.abandon()
        for bucket in self.buckets:
            bucket.abandon()
        self.parameters.clear_gradients()
        if self.leaves is not None:
            self.leaves.abandon()
        self.reset()


# engines that have multiplied the loss of the backward under way, which may reach others
_multiplying: list[Backward] = []
