"""An engine that follows a schedule of ``torch.distributed.pipelining``: what it does between the
computations of its stages, and around each of them.

    between     the list of core/pipeline_orders.py: UNSHARD starts the gathers of a stage and
                holds its units, RESHARD releases them, REDUCE_GRAD takes note of finished reduces
    around B    a backward of the stage's units alone; the last one of a step reduces as outside
                ``engine.no_sync()``, the others as inside
    around I    nothing is taken and nothing reduced: torch keeps the graph for W
    around W    torch puts gradients into ``.grad`` by itself: they are taken from there

Schedules with an action list run ours, and call us for these three (``register_custom_function``);
the others (GPipe, 1F1B) run none, and we go along the list at each computation. Either way the
methods of the stages are replaced on the objects, and put back by `remove`.

Invariant: what torch runs to learn shapes leaves no gradient, no reduce and no micro-batch. What it
does not do: change what a schedule computes, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.pipeline_orders import (
    BACKWARDS,
    COMPUTATIONS,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    Action,
    place,
)
from zeroshard.core.placement import OtherAxis
from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.backward_pass import BackwardMode
from zeroshard.runtime.join import weighed
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights

_REFUSED = (
    "a backward outside of {name}.step(), which the engine follows, would bring gradients of a part"
    " of the model: call the schedule's step(), or end following with the remove() of what"
    " engine.follow() has returned"
)
_OURS = "_zeroshard"  # marks the functions that stand in for a stage's methods


@dataclass(frozen=True)
class FollowOptions:
    """The options of the user for following."""

    budget: int | None = None  # bytes of stages that stay gathered; see core/pipeline_orders.py
    no_sync: bool = True  # for all micro-batches of a stage but the last


@dataclass(frozen=True)
class _Driven:
    """One stage, and its units."""

    stage: Any  # of torch's, which is private
    units: Sequence[Unit]
    num_backwards: int  # of a step


class Following:
    """A schedule that drives the stages of one engine, until `remove`."""

    def __init__(
        self,
        schedule: Any,
        units: Mapping[int, Sequence[Unit]],
        weights: Weights,
        backward: Backward,
        scaler: LossScaler | None,
        options: FollowOptions,
    ) -> None:
        """`units`: the units of each stage, by its number."""
        self.schedule = schedule
        self._weights = weights
        self._backward = backward
        self._scaler = scaler
        self._options = options
        self._undo = ExitStack()
        self.is_on = False  # drives the engine
        self._runs_lists = _runs_lists(schedule)
        sizes = {number: gathered_bytes(held) for number, held in units.items()}
        self._placed = place(_actions_of(schedule), sizes, options.budget)
        self._next = 0  # in `_placed`, where the schedule runs no list
        self._driving = False
        self._left: dict[int, int] = {}  # of a step's backwards, those to come, by stage
        divisor = schedule._n_microbatches if schedule.scale_grads else 1
        self._mode = BackwardMode(scaled=scaler is not None, divisor=divisor)
        computations = [one for action in self._placed for one in action.computations]
        self._stages = {}
        for stage in stages_of(schedule):
            number = stage.stage_index
            count = sum(one.stage == number and one.kind in BACKWARDS for one in computations)
            self._stages[number] = _Driven(stage, units[number], count)

    # ------------------------------------------------------------------ on the objects, and off

    def begin(self) -> None:
        """Put ourselves around the schedule and its stages."""
        refused = _REFUSED.format(name=type(self.schedule).__name__)
        self._undo.enter_context(self._backward.running_as(refused=refused))
        self._put(self.schedule, "step", self._around_step)
        for driven in self._stages.values():
            stage = driven.stage
            self._put(stage, "clear_runtime_states", self._around_beginning, driven)
            self._put(stage, "forward_one_chunk", self._around, driven, "F")
            self._put(stage, "backward_one_chunk", self._around_backward, driven)
            self._put(stage, "backward_weight_one_chunk", self._around, driven, "W")
            self._put(stage, "perform_reduce_grad", lambda original, factor: None)
            self._put(stage, "_prepare_backward_infra", self._around_inference)
        if self._runs_lists:  # a schedule with an action list runs ours
            from torch.distributed.pipelining import schedules as torchs

            schedule, functions = self.schedule, self.schedule._comp_type_to_function_map
            lists, rank = schedule.pipeline_order_with_comms, schedule.rank
            before = lists[rank]
            lists[rank] = [_to_torch(action, torchs) for action in self._placed]
            self._undo.callback(lists.__setitem__, rank, before)
            for name in (UNSHARD, RESHARD, REDUCE_GRAD):
                kind = torchs._ComputationType.from_str(name)
                schedule.register_custom_function(
                    kind, lambda one, _, name=name: self._run(name, one.stage_index)
                )
                self._undo.callback(functions.pop, kind, None)
        self.is_on = True

    def remove(self) -> None:
        """Give the schedule and its stages back as they were. Not inside a step."""
        if self._driving:
            raise StateError("remove() inside the schedule's step(): call it between steps")
        self._undo.close()
        self.is_on = False

    def _put(self, target: Any, name: str, around: Callable[..., Any], *first: Any) -> None:
        original, own = getattr(target, name), target.__dict__
        if own.get(name) is None:
            self._undo.callback(own.pop, name, None)
        else:
            self._undo.callback(own.__setitem__, name, own[name])

        def replaced(*args: Any, **options: Any) -> Any:
            return around(*first, original, *args, **options)

        setattr(replaced, _OURS, self)
        own[name] = replaced

    # ------------------------------------------------------------------ between the computations

    def _run(self, kind: str, number: int) -> None:
        units = self._stages[number].units
        if kind == UNSHARD:
            self._weights.hold_stage(units)
        elif kind == RESHARD:
            self._weights.release_stage(units)
        else:
            # the last backward has started them, unit by unit
            self._backward.reductions.advance()

    def _advance(self, until: frozenset[str]) -> None:
        """For a schedule that runs no list: run our actions up to the next of those kinds."""
        placed = self._placed
        while self._next < len(placed) and placed[self._next].kind not in until:
            self._run(placed[self._next].kind, placed[self._next].stage)
            self._next += 1

    # ------------------------------------------------------------------ around a step

    def _around_step(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._backward.running:
            raise StateError(
                "the last step of the schedule did not finish: call engine.reset() on every rank"
                " after an exception"
            )
        # here: later, ranks would wait for the activations of one that has refused
        self._backward.collect_dropped()
        self._backward.accumulation.check(scaled=self._mode.scaled, divisor=self._mode.divisor)
        self._next = 0
        self._left = {number: one.num_backwards for number, one in self._stages.items()}
        self._driving = True
        try:
            return original(*args, **options)
        except BaseException:
            self.schedule._internal_losses.clear()  # torch would count them with the next step's
            raise
        finally:
            self._driving = False

    def _around_beginning(self, driven: _Driven, original: Callable[..., Any]) -> Any:
        """A schedule begins a step: refuse another one, before a rank waits for another."""
        if not self._driving and driven.stage.has_backward:
            raise StateError(
                f"stage {driven.stage.stage_index} is driven by another schedule than the"
                f" {type(self.schedule).__name__} that the engine follows: one schedule drives a"
                " stage; end following with the remove() of what engine.follow() has returned"
            )
        return original()

    @contextmanager
    def _computing(self, driven: _Driven, kind: str) -> Iterator[None]:
        """Run one computation of a stage inside."""
        if self._runs_lists or not self._driving:  # somebody else's evaluation
            yield
            return
        self._advance(COMPUTATIONS)
        if self._next == len(self._placed) or self._placed[self._next].kind != kind:
            raise StateError(
                f"{type(self.schedule).__name__} runs {kind} of stage {driven.stage.stage_index}"
                " where its order says otherwise: this version of torch is not supported; update it"
            )
        yield
        self._next += 1
        self._advance(COMPUTATIONS | {UNSHARD})

    # ------------------------------------------------------------------ around a computation

    def _around(
        self, driven: _Driven, kind: str, original: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        with self._computing(driven, kind), self._gradients(driven, kind):
            return original(*args, **options)

    def _around_backward(
        self,
        driven: _Driven,
        original: Callable[..., Any],
        chunk: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        kind = "B" if full_backward else "I"
        with ExitStack() as stack:
            if loss is not None:
                loss = stack.enter_context(weighed(self._backward, self._scaler, loss))
            flags = {"full_backward": full_backward, "last_backward": last_backward}
            return self._around(driven, kind, original, chunk, loss=loss, **flags)

    @contextmanager
    def _gradients(self, driven: _Driven, kind: str) -> Iterator[None]:
        """Take the gradients of a computation inside, and hand complete units over."""
        backward, brings = self._backward, kind in BACKWARDS
        if not driven.stage.has_backward or kind == "F":
            yield  # schedule.eval(): torch computes nothing
            return
        self._left[driven.stage.stage_index] -= brings
        left = self._left[driven.stage.stage_index]
        sync = backward.mode.sync and not (left and self._options.no_sync)
        # in halves: torch looks at every parameter before it begins, and no hook says which W reads
        whole = () if kind == "B" else driven.units
        held = whole if self._options.budget is None else ()
        scaled, divisor = self._mode.scaled, self._mode.divisor
        with backward.running_as(sync=sync, has_loss=True, scaled=scaled, divisor=divisor):
            if held:
                self._weights.hold_stage(held)
            for unit in whole:
                self._weights.unshard(unit, "backward")
            with backward.of_schedule(driven.units if brings else (), retains=kind == "I"):
                yield
            if held:
                self._weights.release_stage(held)

    def _around_inference(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run the backward by which torch learns the shapes of gradients, and keep nothing."""
        with self._backward.of_schedule(()):
            return original(*args, **options)


# ---------------------------------------------------------------------------- schedules and stages


def stages_of(schedule: Any) -> list[Any]:
    """Return this rank's stages of `schedule`. Raises ConfigError for what is none of torch's."""
    if _runs_lists(schedule):
        return list(schedule._stages)
    if hasattr(schedule, "_stage") and hasattr(schedule, "_get_pipeline_order"):
        return [schedule._stage]
    raise ConfigError(
        f"schedule is a {type(schedule).__name__}: engine.follow() takes a schedule of"
        " torch.distributed.pipelining"
    )


def units_of(
    schedule: Any, modules: Sequence[nn.Module], units: Sequence[Unit]
) -> dict[int, list[Unit]]:
    """Return the units of each stage of `schedule`, by its number; `modules`: the engine's own.

    Raises ConfigError where the stages are not the engine's, or cannot be driven.
    """
    stages = stages_of(schedule)
    for stage in stages:
        _check_stage(schedule, stage, modules)
    missing = [module for module in modules if all(s.submod is not module for s in stages)]
    if missing:
        raise ConfigError(
            f"a {type(missing[0]).__name__} of this engine is no stage of the"
            f" {type(schedule).__name__}: give zs.shard() this rank's stages of the schedule, all"
            " of them and no other"
        )
    if _runs_lists(schedule) and schedule._comp_type_to_function_map:
        names = ", ".join(str(kind.value) for kind in schedule._comp_type_to_function_map)
        raise ConfigError(
            f"the schedule has custom functions for {names} already: engine.follow() registers its"
            " own; leave them out"
        )
    index_of = {id(p): unit for unit in units for s in unit.segments for p in s.parameters}
    out = {}
    for stage in stages:
        mine = dict.fromkeys(index_of[id(parameter)] for parameter in stage.submod.parameters())
        out[stage.stage_index] = sorted(mine, key=lambda unit: unit.index)
    return out


def _check_stage(schedule: Any, stage: Any, modules: Sequence[nn.Module]) -> None:
    number, name = stage.stage_index, type(schedule).__name__
    if all(stage.submod is not module for module in modules):
        raise ConfigError(
            f"stage {number} of the {name} is not one of this engine's: give zs.shard() this rank's"
            " stages of the schedule"
        )
    if hasattr(stage.__dict__.get("forward_one_chunk"), _OURS):
        raise ConfigError(
            f"stage {number} follows another schedule already: one schedule drives a stage; end"
            " that with the remove() of what engine.follow() has returned"
        )
    if stage.dw_builder is not None:
        raise ConfigError(
            f"stage {number} has a dw_builder, which computes gradients where no hook sees them:"
            " leave it out"
        )


def check_mesh(schedule: Any, others: Sequence[OtherAxis]) -> None:
    """Raise ConfigError where the stages are on several ranks and the engine's mesh does not say
    so: each stage would clip, skip steps and scale losses for itself.
    """
    ranks = stages_of(schedule)[0].group_size
    if ranks > 1 and all(axis.name != "pp" for axis in others):
        raise ConfigError(
            f"the stages of the {type(schedule).__name__} are on {ranks} ranks, and the mesh that"
            " zs.shard() was given has no axis 'pp': give it the whole mesh"
        )


def check_budget(budget: int, units: Mapping[int, Sequence[Unit]], row: str) -> None:
    """Raise ConfigError for a `budget` in bytes that cannot be kept, or has no effect."""
    sizes = {number: gathered_bytes(held) for number, held in units.items()}
    if not any(sizes.values()):
        raise ConfigError(
            f"budget={budget} has no effect: policy={row!r} keeps whole weights on every rank;"
            " leave it out"
        )
    number = max(sizes, key=lambda number: sizes[number])
    if budget < sizes[number]:
        raise ConfigError(
            f"budget={budget} bytes is below the weights of stage {number}, {sizes[number]} bytes:"
            " give as many, or leave it out, and each unit is gathered for itself"
        )


def gathered_bytes(units: Sequence[Unit]) -> int:
    """Return the bytes of those weights of `units` that rest sharded."""
    return sum(unit.residency.traits.nominal_bytes * unit.cells.weight.is_sharded for unit in units)


# ---------------------------------------------------------------------------- torch's action lists


def _runs_lists(schedule: Any) -> bool:
    return hasattr(schedule, "_comp_type_to_function_map") and hasattr(
        schedule, "pipeline_order_with_comms"
    )


def _actions_of(schedule: Any) -> list[Action]:
    """Return what this rank does in a step, in order."""
    if _runs_lists(schedule):
        return [from_torch(one) for one in schedule.pipeline_order_with_comms[schedule.rank]]
    number = schedule._stage.stage_index
    orders = schedule._get_pipeline_order()
    if orders is None and not schedule._has_backward:
        return [Action(number, "F", index) for index in range(schedule._n_microbatches)]
    if orders is None:
        raise ConfigError(
            f"a {type(schedule).__name__} does not say its order: engine.follow() takes a schedule"
            " of torch.distributed.pipelining that does"
        )
    return [from_torch(one) for one in orders[number] if one is not None]


def from_torch(action: Any) -> Action:
    """Return an action of torch's as ours."""
    parts = tuple(from_torch(part) for part in action.sub_actions or ())
    kind = action.computation_type  # before torch 2.13 its value is a number
    name = kind.value if isinstance(kind.value, str) else str(kind)
    return Action(action.stage_index, name, action.microbatch_index, parts)


def _to_torch(action: Action, torchs: Any) -> Any:
    parts = tuple(_to_torch(part, torchs) for part in action.parts) or None
    kind = torchs._ComputationType.from_str(action.kind)
    return torchs._Action(action.stage, kind, action.micro_batch, parts)
