"""What happens while autograd runs: which gradients came, when a unit is complete, when the
backward is over.

A unit's gradients are handed over (``GradientPath.reduce``) when every trainable parameter has one,
or when the backward of the unit's inputs is done and autograd will bring no more of them (a module
that ran in part), or else at the end of the pass (one that did not run).

[Note: nested backwards] Reentrant checkpointing runs a backward inside a backward. Each autograd
graph task that touches us is pushed on a stack and popped by its final callback; only the outermost
one ends the pass. A parameter may get a gradient in each task, so a unit that is still to be
recomputed, or that also ran outside the checkpoint, waits for those.

Invariant: outside ``no_sync`` every trainable segment is reduced exactly once per backward, on
every rank, however often its unit ran there: reduces meet by number, and a rank on which it did not
run contributes zeros. A gradient that comes after its unit was handed over stays in the segment's
buffer and goes with the next reduce; the ranks agree about what is left before a step
(finalize.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.buffer import Flight, Lanes
from zeroshard.comm.transport import Transport
from zeroshard.core.digest import Digest
from zeroshard.core.precision import dtype_name
from zeroshard.errors import ConfigError, StateError
from zeroshard.memory import MemoryCounter
from zeroshard.optim.sealed import SealedGrad
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.decisions import UNKNOWN, Decisions
from zeroshard.runtime.gradients import GradientPath
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Until, Weights

__all__ = ["Backward", "retains_graph"]

_IN_FLIGHT = 2


@dataclass(eq=False, slots=True)
class _Leaf:
    """A trainable parameter, and where its gradient goes."""

    unit: Unit
    segment: Segment
    path: GradientPath
    index: int  # in the segment
    parameter: nn.Parameter
    _sealed: SealedGrad | None = None

    def seal(self, owner: Backward, holds: object) -> None:
        """Give it its sealed gradient, which keeps `holds` alive."""
        sealed, index = self._sealed, self.index
        if sealed is None or sealed.dtype is not self.parameter.dtype:
            # see [Note: weak hooks] in hooks.py
            weak, backward = weakref.ref(self.path), weakref.ref(owner)

            def zero() -> None:
                alive, owner = weak(), backward()
                if alive is not None and owner is not None:
                    owner.zeroed()
                    alive.zero(index)

            sealed = self._sealed = SealedGrad(
                self.parameter, self.segment.names[index], None, zero
            )
        sealed.hold(holds)
        self.parameter.grad = sealed


class Backward:
    """One engine's gradients, from the first hook of a backward to the optimizer's step."""

    def __init__(
        self,
        weights: Weights,
        *,
        streams: Lanes,
        meter: MemoryCounter,
        digest: Digest,
        transport: Transport,
    ) -> None:
        self.sync = True  # False inside no_sync()
        self.has_gradient = False  # since the last drop of everything
        self.changed = False  # since the last finalize
        # whether the loss of these gradients was scaled; None: no backward yet
        self.scaled: bool | None = None
        self.scaling = False  # inside engine.backward()
        self.optimizer: ShardedOptimizer | None = None
        self.decisions = Decisions()
        self.announce: Callable[[str, Any], None] | None = None  # set by join()
        self._weights = weights
        self._meter = meter
        self._digest = digest
        self._transport = transport
        self._streams = streams
        # steps still to come whose forwards are watched for weights that their backward reads while
        # they are released
        self.traced_steps = 0
        self.read_released: str | None = None  # the first parameter that was
        self._tasks: list[int] = []
        self._retains = False  # the graph of this backward may be walked again
        self._nested = False  # a backward has run inside this one
        # parameters, by id, that get a gradient outside of reentrant checkpoints, too, and have
        # none of it yet
        self._outer: set[int] = set()
        # by graph task: units at whose outputs a gradient has arrived
        self._entered: dict[int, list[Unit]] = {}
        # whose gradients have all come; released when the backward goes on to another unit
        self._finished: dict[int, Unit] = {}
        self._flights: dict[str, GradientPath] = {}  # reduces under way, oldest first
        self._landing: list[GradientPath] = []  # whose sums go to another tier, oldest first
        self._reduced: set[int] = set()  # units handed over in this backward
        # gradients have come in this backward: one by torch.autograd.grad brings none
        self._brings = False
        # the unit at whose outputs the last gradient arrived, and the graph task
        self._at: tuple[Unit | None, int] = (None, -1)
        self._trainable = [unit for unit in weights.units if unit.trainable]
        self._all_paths = [path for unit in self._trainable for path in self._paths(unit)]
        self.leaves = [
            _Leaf(unit, segment, path, index, parameter)
            for unit in self._trainable
            for segment, path in zip(unit.trainable, self._paths(unit), strict=True)
            for index, parameter in enumerate(segment.parameters)
        ]
        sharded = any(unit.cells.weight.is_sharded for unit in weights.units)
        # the ranks run units in the same order
        self._waits_for_room = weights.ordered and (sharded or not transport.keyed)
        weights.make_room = self.make_room

    # ------------------------------------------------------------------ hooks

    def enter(self) -> None:
        """Note that a backward is running, once per graph task."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        self._at = (None, -1)
        if task < 0:
            raise StateError("a backward hook ran outside a backward")
        if not self._tasks:
            self._begin()
            self._retains = retains_graph()
            self._note_outer()
        self._nested = bool(self._tasks) or self._nested
        self._tasks.append(task)
        self._entered[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._leave(task))

    def _note_outer(self) -> None:
        """Note which parameters of units that are still to be recomputed the outermost backward
        brings a gradient itself: nested ones cannot ask.
        """
        for unit in self._trainable:
            if unit.recomputations > 0:
                self._outer.update(
                    id(p)
                    for segment in unit.trainable
                    for p in segment.parameters
                    if _gets_gradient(p)
                )

    def tell(self, what: str, argument: Any = None) -> None:
        """Inside join(): tell the other ranks what comes, a forward, a backward, a clip or a
        step.
        """
        if self.announce is not None:
            self.announce(what, argument)

    @property
    def running(self) -> bool:
        """Whether a backward is under way."""
        return bool(self._tasks)

    def before_unit(self, unit: Unit, epoch: int) -> None:
        """A gradient arrives at `unit`'s outputs: its weights are needed as they were in the
        forward under `epoch`.
        """
        task = torch._C._current_graph_task_id()
        if self._at == (unit, task) and not self._finished and self._weights.serves(unit, epoch):
            return  # another output of a module inside it
        self.enter()
        self._weights.check_epoch(unit, epoch)
        unit.in_backward = True
        self._entered[task].append(unit)
        self._release_finished(unit)
        self._at = (None if torch.is_grad_enabled() else unit, task)
        if torch.is_grad_enabled():  # create_graph=True: another backward may go through this one
            self._weights.hold(unit, "backward", Until.STEP)
        else:
            self._weights.need(unit, "backward")

    def _release_finished(self, follows: Unit) -> None:
        """The backward has come to unit `follows`: release the others whose gradients have all
        come.

        Not when they come: autograd hands a gradient over before it runs the other nodes of the
        module, which may read ``weight.detach()``. It runs the nodes that were made last first, so
        all nodes of a unit have run when it comes to another unit, but for units around others.
        """
        if not self._finished:
            return
        self._finished.pop(follows.index, None)
        for unit in list(self._finished.values()):
            if not unit.holds_others:
                self._weights.after_backward(self._finished.pop(unit.index))

    def after_inputs(self, unit: Unit, *, before_others: bool = False) -> None:
        """The gradients of `unit`'s inputs are there: whatever did not get one by now gets none
        in this backward.

        `before_others`: other nodes of the unit may still have to run.
        """
        if unit.in_backward and self._tasks:
            if unit.arrived:
                self._hand_over_complete(unit)
            # an earlier forward's output may be this one's input: its backward needs the weights
            # now
            if before_others or unit.forwards:
                self._finished[unit.index] = unit
                return
            self._finished.pop(unit.index, None)
            self._weights.after_backward(unit)

    def take(self, number: int) -> None:
        """Autograd has finished the gradient of `leaves[number]`."""
        leaf = self.leaves[number]
        parameter, unit = leaf.parameter, leaf.unit
        grad = parameter.grad
        if isinstance(grad, SealedGrad):  # no hook came before this one
            grad = grad.accumulated()
        else:
            # before the pass begins: it was None before autograd came, which tells what the user
            # has cleared
            parameter.grad = None
        self.enter()
        parameter.grad = None
        assert grad is not None, leaf.segment.names[leaf.index]
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"parameter {leaf.segment.names[leaf.index]!r} has a sparse gradient, which cannot"
                " be sharded: use sparse=False"
            )
        # create_graph=True: what is summed has no graph
        grad = grad.detach() if grad.requires_grad else grad
        leaf.path.add(leaf.index, grad, sync=self.sync, make_room=self.make_room)
        del grad
        self._brings = True
        unit.pending -= id(parameter) not in unit.arrived
        unit.arrived[id(parameter)] = torch._C._current_graph_task_id()
        if len(self._tasks) == 1:
            self._outer.discard(id(parameter))
        if unit.pending <= 0:
            self._hand_over_complete(unit)
            if not unit.has_frozen:
                self._finished[unit.index] = unit

    def cover(self, number: int) -> None:
        """Somebody else's hook runs after ours: let it find a sealed gradient instead of none."""
        self.leaves[number].seal(self, None)

    def make_room(self, num_bytes: int) -> None:
        """Wait for reduces under way, oldest first, until `num_bytes` fit the budget.

        Where ranks may run their units in different order, the transport bounds the gradient
        buffers by its own pool: to wait for a sum could be to wait for ever, each rank with the
        part that the other lacks still to come.
        """
        budget = self._weights.budget_bytes
        if not self._waits_for_room or not self._flights or not budget:
            return
        if self._meter.live + num_bytes <= budget:
            return
        for key, path in list(self._flights.items()):
            path.finish()
            del self._flights[key]
            if self._meter.live + num_bytes <= budget:
                return

    def finish(self) -> None:
        """Wait for every reduce under way, in the order in which they were started: the last
        wait then covers the ones before it.
        """
        for path in self._flights.values():
            path.finish()
        self._flights.clear()

    def gather_averages(self) -> None:
        """Bring whole averages together where every rank steps everything: all at once, one fork
        and one wait for all.
        """
        paths = [path for path in self.paths() if path.gathers_averages]
        if paths:
            self._streams.fork("reduce")
            works = [path.gather_averages() for path in paths]
            Flight(works, self._streams, self._streams.mark("reduce")).wait()

    # ------------------------------------------------------------------ a pass

    def _begin(self) -> None:
        self.collect_dropped()
        if self.scaled is not None and self.has_gradient and self.scaled != self.scaling:
            raise StateError(
                "fp16: this backward's loss is scaled otherwise than an earlier one's: call"
                " engine.backward(loss) for all"
            )
        self.tell("backward", {"sync": self.sync, "scaled": self.scaling})
        self.scaled = self.scaling
        self.decisions.micro_batches += self.decisions.micro_batches != UNKNOWN
        self.changed = True
        self.has_gradient = True
        self._reduced.clear()
        self._brings = self._nested = self._retains = False
        self._outer.clear()
        self._weights.begin("backward")
        # released parameters are asked for what they answer anyway
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self._trainable:
                unit.arrived.clear()
                unit.pending = 0
            for leaf in self.leaves:
                leaf.parameter.grad = None
                leaf.unit.pending += leaf.parameter.requires_grad

    def _hand_over_complete(self, unit: Unit) -> None:
        """Hand `unit` over, once in this pass, unless gradients of it are still to come."""
        if unit.index not in self._reduced and not self._may_get_more(unit):
            self._hand_over(unit)

    def _may_get_more(self, unit: Unit) -> bool:
        # see [Note: nested backwards]
        if unit.recomputations > 0 or (len(self._tasks) > 1 and unit.forwards > 0):
            return True
        if unit.pending <= 0 and not self._nested:
            return False
        task = torch._C._current_graph_task_id()
        return any(
            id(p) in self._outer or (unit.arrived.get(id(p)) != task and _gets_gradient(p))
            for segment in unit.trainable
            for p in segment.parameters
        )

    def _hand_over(self, unit: Unit) -> None:
        unit.pending = 0
        for segment in unit.trainable:
            path = segment.grad
            assert path is not None
            if path.sums_micro_batches and not self.sync:
                continue
            self._reduce(unit, segment, sync=self.sync)
        self._transport.progress()
        # what is over decides what is prefetched: the same on every rank, whatever the timing
        if self._weights.ordered:
            self._land_oldest()
        else:
            for path in list(self._flights.values()):
                path.finish(block=False)
                if not path.in_flight:
                    del self._flights[path.key]
        if self._landing:
            self._bound_landing()

    def _land_oldest(self) -> None:
        """Of sums that rest on another tier, leave two under way: the others would wait on the
        device for the end of the pass.

        Where ranks may run their units in different order (see `make_room`), those stay whose other
        parts have not come.
        """
        waiting = [path for path in self._flights.values() if path.tiered] if self._landing else []
        for path in waiting[:-_IN_FLIGHT]:
            path.finish(block=self._waits_for_room)
            if path.in_flight:
                return
            del self._flights[path.key]

    def _bound_landing(self) -> None:
        """Of sums on their way to another tier, leave two: each is held on the device until it
        is there. A matter of this rank alone.
        """
        self._landing = [path for path in self._landing if path.in_flight or path.is_landing]
        landing = [path for path in self._landing if not path.in_flight]
        for path in landing[:-_IN_FLIGHT]:
            path.land()

    def _reduce(self, unit: Unit, segment: Segment, *, sync: bool) -> None:
        path = segment.grad
        assert path is not None
        layout = segment.flat.layout
        self._digest.fold(
            "reduce", unit.name, dtype_name(path.precision.wire), layout.numel, ordered=False
        )
        if self._weights.trace is not None:
            self._weights.trace("reduce", unit.name)
        if path.sums_nodes and not sync:
            path.reduce_inside()
        else:
            path.reduce(make_room=self.make_room, with_earlier=self._brings)
        self._flights.pop(path.key, None)
        if path.in_flight:
            self._flights[path.key] = path
        if path.tiered:
            self._landing.append(path)
        self._reduced.add(unit.index)

    def shadow(self, *, sync: bool, scaled: bool) -> None:
        """Take part in a backward of the other ranks, without one of our own: gather what they
        gather, contribute zeros.
        """
        before, self.sync, self.scaling = (self.sync, self.scaling), sync, scaled
        self._begin()
        self._brings = True
        for unit in self._weights.shadow("backward"):
            # at once, as they do: they may wait for our part before they gather on
            self._hand_over(unit)
        self._end()
        self.sync, self.scaling = before

    def _leave(self, task: int) -> None:
        self._tasks.remove(task)
        self._at = (None, -1)
        entered = self._entered.pop(task)
        if not self._tasks:
            self._end()
            return
        for unit in entered:  # reentrant checkpointing: that part is over
            if self._finished.pop(unit.index, None) is not None:
                self._weights.after_backward(unit)

    def _end(self) -> None:
        for unit in reversed(self._trainable):
            if unit.index not in self._reduced:
                self._hand_over(unit)
        for unit in self._weights.units:
            if unit.in_backward:
                self._weights.after_backward(unit)
        self._finished.clear()
        self._weights.end_pass()
        if not self._retains:
            self._weights.end_backward()
        self.seal()

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients rest here that no reduce over all ranks has taken."""
        return any(path.has_local or path.has_node_sum for path in self._all_paths)

    def flush(self) -> None:
        """Reduce everything once more: some rank `has_unreduced` gradients (every backward was
        inside ``no_sync``, or some came late).
        """
        self._brings = True
        for unit in reversed(self._trainable):
            for segment in unit.trainable:
                self._reduce(unit, segment, sync=True)
        self.seal()

    @staticmethod
    def _paths(unit: Unit) -> list[GradientPath]:
        return [segment.grad for segment in unit.trainable if segment.grad is not None]

    # ------------------------------------------------------------------ what the user sees as .grad

    def seal(self) -> None:
        """Put sealed gradients where autograd or the step has left none."""
        holds = self.optimizer is None
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in self.leaves:
                if leaf.path.used[leaf.index]:
                    leaf.seal(self, leaf.path.resting() if holds else None)
        if self.optimizer is not None:
            self.optimizer.seal()
            for path in self._all_paths:
                if path.flat.stepped[0] < path.flat.stepped[1]:
                    path.let_go()

    def collect_dropped(self) -> None:
        """Forget the gradients that the user has cleared, on the model's side or the
        optimizer's.
        """
        if not self.has_gradient or self._tasks:
            return
        cleared = {id(p) for p in self.optimizer.dropped()} if self.optimizer is not None else set()
        everything = all(all(path.used) for path in self._all_paths)
        with torch._C.DisableTorchFunctionSubclass():
            gone_leaves = [
                leaf
                for leaf in self.leaves
                if leaf.path.used[leaf.index]
                and (leaf.parameter.grad is None or id(leaf.parameter) in cleared)
            ]
            for leaf in gone_leaves:
                leaf.parameter.grad = None
        gone: dict[GradientPath, list[int]] = {}
        for leaf in gone_leaves:
            gone.setdefault(leaf.path, []).append(leaf.index)
        for path, indices in gone.items():
            path.drop(indices)
        # gradients of parameters unused here; a step agrees about what is used
        anything = any(
            any(path.used) or (self.changed and path.resting() is not None)
            for path in self._all_paths
        )
        if not anything:
            all_cleared = len(cleared) >= len(self.leaves) and all(
                id(leaf.parameter) in cleared for leaf in self.leaves
            )
            same_on_all = everything or not self.changed or all_cleared
            self.forget()
            self.decisions.micro_batches = 0 if same_on_all else UNKNOWN
        elif gone_leaves and not self.changed:
            # before a step the ranks need not have used the same parameters
            names = ", ".join(leaf.segment.names[leaf.index] for leaf in gone_leaves)
            self.decisions.note("gradients cleared by zero_grad()", names)

    def zeroed(self) -> None:
        """Note that the user sets gradients to zero. Before the first step the ranks need not
        have used the same parameters.
        """
        if not self.changed:
            self.decisions.note_once("zero_grad(set_to_none=False)", "called")

    def forget(self) -> None:
        """No gradient rests here any more."""
        self.has_gradient = False
        self.changed = True
        self.scaled = None
        self.read_released = None
        self.decisions.micro_batches = 0
        if self.optimizer is not None:
            self.optimizer.clear()

    def abandon(self) -> None:
        """After an exception: no backward is running and no gradient rests."""
        self._tasks.clear()
        self._at = (None, -1)
        self._entered.clear()
        self._finished.clear()
        self._flights.clear()
        self._landing.clear()
        self._reduced.clear()
        for unit in self._trainable:
            for path in self._paths(unit):
                path.abandon()
            for segment in unit.trainable:
                for parameter in segment.parameters:
                    parameter.grad = None
        self.forget()

    def paths(self) -> Sequence[GradientPath]:
        """Return every trainable segment's gradient path, in unit order."""
        return self._all_paths


def _gets_gradient(parameter: torch.Tensor) -> bool:
    """Whether the graph task that is running accumulates a gradient in `parameter`, or has done
    so.
    """
    if not parameter.requires_grad:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))


def retains_graph() -> bool:
    """Whether the backward that is running keeps its graph (``retain_graph=True`` or
    ``create_graph=True``).
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
