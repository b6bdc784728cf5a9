"""The engine: one object per sharded model, made by ``zeroshard.shard``.

It holds the parts together and answers the user; the parts do the work:

    hooks.py --> loop.py --> weights.py  (gather, prefetch, release) --> unit.py --> flight.py
                         --> backward.py (units complete) --> reductions.py --> bucket.py
    optimizer.step() --> loop.py --> finalize.py (average, agree, clip), rest.py (publish)
    whole.py: parameters and gradients gathered for the user     join.py: ranks without data
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from zeroshard.core.policy import Policy
from zeroshard.core.sizes import parse_bytes
from zeroshard.errors import ConfigError, StateError, StorageError
from zeroshard.memory import placeholder_value
from zeroshard.optim.several import each_of, joined
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import Tile
from zeroshard.runtime.access import StateAccess
from zeroshard.runtime.accumulate import Accumulate, Accumulated, LossFn, check_accumulate
from zeroshard.runtime.assembly import Assembly
from zeroshard.runtime.build import (
    GivenValues,
    Parts,
    build_units,
    make_master,
    plan_units,
    step_settings,
)
from zeroshard.runtime.context import Context
from zeroshard.runtime.join import Average, Join, LeafLoop, refuse_leaves, weighed
from zeroshard.runtime.pipeline import Following, FollowOptions, check_budget, check_mesh, units_of
from zeroshard.runtime.relayout import OffloadedStates
from zeroshard.runtime.reports import (
    MemoryReport,
    OptimizerReport,
    TrafficReport,
    describe_bytes,
)
from zeroshard.runtime.segment_states import RestingPiece
from zeroshard.runtime.shelf import RestPlace
from zeroshard.runtime.step_tiles import StepTiles
from zeroshard.runtime.trace import tracing
from zeroshard.runtime.trail_writer import trailing
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.units import UnitPlan, roots_of
from zeroshard.state.state import move

__all__ = [
    "Engine",
    "RestingPiece",
    "attach",
    "living_engines",
    "open_engines",
    "parts_of",
    "relaid",
    "states_of",
]


class Requested(Protocol):
    """The request of ``shard()`` for an engine."""

    def __call__(self, engine: Engine, changes: Mapping[str, Any]) -> None:
        """Lay `engine` out anew with these `changes`."""

    def check_optimizer(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError for an optimizer that ``shard()`` would refuse."""


_log = logging.getLogger("zeroshard")
NOT_GIVEN_BACK = "rank %d: close() has not given everything back: %s"
_FOLLOW = "engine.follow()"
# what users of DeepSpeed and FSDP type first: model, optimizer and loop stay the user's own
_ELSEWHERE = {
    "step": "optimizer.step()",
    "zero_grad": "optimizer.zero_grad()",
    "train": "model.train()",
    "eval": "model.eval()",
    "parameters": "model.parameters()",
    "state_dict": "engine.full_state_dict() for weights, zs.save() for a run that resumes",
    "module_state_dict": "engine.full_state_dict()",
    "load_state_dict": "model.load_state_dict() for weights, zs.load() for a run that resumes",
    "save_checkpoint": "zs.save(directory, engine, step=n)",
    "load_checkpoint": "zs.load(directory, engine)",
    "save_16bit_model": "engine.full_state_dict(), or zeroshard checkpoint export --to hf",
    "unshard": "with engine.gathered(params): ...",
    "summon_full_params": "with engine.gathered(): ...",
    "set_requires_gradient_sync": "with engine.no_sync(): ...",
}
# the engines of this process, in the order in which they were made
_ENGINES: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def living_engines() -> list[Engine]:
    """Return the engines of this process that are alive, in the order of their shard()."""
    return list(_ENGINES.values())


def open_engines() -> list[Engine]:
    """Return the living engines that are not closed."""
    return [engine for engine in living_engines() if not engine._states.is_closed]


def states_of(engine: Engine) -> StateAccess:
    """Return what the package itself asks of an engine beside its public methods: checkpoints,
    averages, reports.
    """
    return engine._states


def averages_in(engine: Engine) -> list[weakref.ref[Average]]:
    """Return the averages that have been made of `engine`, in order; dead ones keep their place."""
    return engine._averages


def parts_of(engine: Engine) -> Parts:
    """Return the parts that hold the states of `engine`. They are others after each repartition."""
    return Parts(engine._context, engine._loop, engine._finalizer, engine._watch, engine._sharded)


def attach(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer`, which has been checked, step the parameters of `engine` (``Engine.attach``).
    Collective.
    """
    context, units = engine._context, engine._weights.units
    settings = step_settings(context, units, engine._backward.decisions)
    sharded = ShardedOptimizer(optimizer, engine._loop, *settings)
    older = [(one, dict(one.state)) for one in each_of(optimizer)]
    try:
        with context.faults.together(lost=True):
            for unit in units:
                for segment in unit.trainable:
                    if segment.master is None:
                        master = make_master(segment, unit.cells, context)
                        move(segment.weight, master, segment.aliased)
                        segment.watch(strict=context.options.strict)
            tiles = StepTiles(units, context, whole=sharded.states.whole)
            sharded.attach(tiles.all)
    except StorageError:
        sharded.detach()
        for one, state in older:
            one.state.update(state)
        raise
    engine._step_with(sharded, tiles)


def relaid(
    engine: Engine,
    units: Sequence[Unit],
    plans: Sequence[UnitPlan],
    context: Context,
    *,
    prefetch_bytes: int | None,
    cut: Sequence[list[Tile]],
) -> None:
    """Let `engine` be the engine of `units`, in which its states rest now; its optimizer steps
    the tiles `cut` of them.
    """
    engine._hooks.remove()
    engine._put_together(units, plans, context, prefetch_bytes)
    engine._rejoin(cut)


class Engine(Assembly):
    """A sharded model and its optimizer. Made by :func:`zeroshard.shard`; every method is called
    on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        plans: Sequence[UnitPlan],
        context: Context,
        *,
        prefetch_bytes: int | None,
        repartition: Requested,
    ) -> None:
        """`repartition` does what the method of that name asks for."""
        super().__init__(module)
        self._repartition = repartition
        self._offloaded: OffloadedStates | None = None
        self._averages: list[weakref.ref[Average]] = []
        units = build_units(plans, context, plan_units(plans, context), GivenValues(context))
        self._put_together(units, plans, context, prefetch_bytes)
        context.faults.agree()  # that the weights have been written to where they rest
        _ENGINES[next(_numbers)] = self

    # ------------------------------------------------------------------ what it is

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale (1.0 in other precisions)."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @property
    def steps_skipped(self) -> int:
        """Steps that were not taken because a gradient was not finite: waits for the device where
        it has yet to tell.
        """
        return self._finalizer.skipped

    @property
    def units(self) -> dict[str, int]:
        """Elements of each unit, in order."""
        return {
            unit.name: sum(slot.numel for s in unit.segments for slot in s.flat.layout.slots)
            for unit in self._weights.units
        }

    if not TYPE_CHECKING:  # a type checker says itself that a name, or a call, is none

        def __getattr__(self, name: str) -> object:
            use = f": use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            told = f"'Engine' object has no attribute {name!r}{use}"
            raise AttributeError(told, name=name, obj=self)

        def __call__(self, *inputs: object, **named: object) -> None:
            raise TypeError("an Engine is not called: call the model, model(...)")

    def __repr__(self) -> str:
        transport = self._context.transport
        return (
            f"Engine({type(self.module).__name__}, policy={self.policy.name},"
            f" {self._context.precision.describe()}, units={len(self.units)}, rank {transport.rank}"
            f" of {transport.size} over {self._context.axes.name(self._context.levels.name)})"
        )

    def attach(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        """Shard `optimizer`, or each of a list, built from ``model.parameters()``, in place.

        After ``shard(model)`` without one, bf16 and fp16 masters start from the weights as they are
        in that precision; give the optimizer to ``shard()`` to keep the fp32 numbers. Raises
        ConfigError, before anything is changed, for what ``shard()`` refuses of an optimizer;
        StorageError where there is no room for masters and moments on their tier; both on every
        rank where one has reason to.
        """
        self._states.check_open(trained=True)
        if self._sharded is not None:
            raise ConfigError(
                "an optimizer is attached already: give all of a model's optimizers at once, as a"
                " list, or use param groups"
            )
        with self._states.everyone.together("engine.attach()"):
            joint = joined(optimizer)
            self._repartition.check_optimizer(self, joint)
        attach(self, joint)

    def optimizer_part(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's ``state_dict()``, for ``load_state_dict()``
        on the same rank of as many ranks (``engine.optimizer.load_state_dict()`` of several).

        It is no checkpoint by itself: `zeroshard.save` writes one, which loads on any number of
        ranks.
        """
        self._states.check_open()
        if self._sharded is None:
            raise StateError("no optimizer is attached: give it to shard() or engine.attach()")
        return self._sharded.part()

    @property
    def offload_fraction(self) -> float | None:
        """The share of the optimizer's state off the device that ``fraction="auto"`` has come
        to; None where it is not automatic.
        """
        balance = None if self._tiles is None else self._tiles.balance
        return None if balance is None else balance.fraction

    @property
    def tiles_ahead(self) -> dict[str, int]:
        """Tiles that the host has stepped in backwards (``offload.step_in_backward``): how many
        were "kept", and "dropped" because the step was another one than assumed.
        """
        return {} if self._sharded is None else dict(self._sharded.runner.ahead_counts)

    # ------------------------------------------------------------------ a step

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward of `loss` (0-d) times what it counts; in fp16 of the scaled loss.

        With a `weight` on every backward since ``zero_grad()``, on every rank, the gradient of the
        step is the sum of weights x gradients over ranks and micro-batches, divided by the sum of
        weights: where `loss` is the mean over `weight` samples or tokens, the gradient of the mean
        over all of them. Do not divide such a loss by the number of micro-batches. 0 counts
        nothing, even of a loss that is NaN. A tensor (0-d) is read by the host. Without `weight`,
        ranks count the same, or as ``batch_shares`` says, and micro-batches are added.

        The loss is multiplied, so that gradients which cross ranks (experts, 'cp') count what the
        rank of their loss says; other parameters that `loss` reaches see it, too.
        """
        self._states.check_open(trained=True)
        for listener in self._loop.events.lost:
            listener(loss)
        with weighed(self._backward, self._scaler, loss, weight) as scaled:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def no_sync(self) -> AbstractContextManager[None]:
        """Say that more micro-batches follow before the step: gradients rest where the policy's
        cell says meanwhile.
        """
        return self._backward.running_as(sync=self._backward.leaves is not None)

    def leaves(self, step: int | None = None, *, seed: int = 0) -> LeafLoop:
        """Go through this rank's leaves of a step, for ``zs.shard(..., leaves=V)``: numbers below V
        of micro-batches; each takes one ``engine.backward(loss)``.

        Which rank has which leaf follows from the ranks; the sum of their gradients, divided by V
        (or by the sum of their weights), does not. Inside, the default generators of the CPU and of
        the engine's device are seeded with (`seed`, `step`, leaf), and afterwards they are as they
        were; take the data of a leaf from (step, leaf), too. `step` (None: the engine's count of
        steps, which a checkpoint holds) is the number of the step. Clip and step follow after the
        loop, and ``zero_grad()``. Collective; raises ConfigError without `leaves`, StateError where
        a leaf has no backward, or gradients of an earlier step are there.
        """
        self._states.check_open(trained=True)
        if self._backward.leaves is None:
            raise ConfigError("engine.leaves() needs zs.shard(..., leaves=V): the leaves of a step")
        number = self._finalizer.step if step is None else step
        device = self._context.device
        return LeafLoop(self._loop, self._backward.leaves, device, step=number, seed=seed)

    def accumulate(
        self,
        batches: Iterable[Any],
        loss_fn: LossFn,
        *,
        tier: str = "device",
        disk_path: str | None = None,
    ) -> Accumulated:
        """Run the forwards and backwards of all `batches`, with ``engine.backward(loss_fn(batch))``
        for each in effect, but all of them through one unit before the next: weights are gathered,
        and read where they rest, twice per step however many batches there are, and gradients
        reduced once.

        `loss_fn` runs the model on one batch, in a thread of its own, and returns the loss, or the
        loss and its weight: the number of samples or tokens that it is the mean over. Blocks run
        twice, as under activation checkpointing; their inputs rest on `tier` ("device", "host", or
        "disk" in the directory `disk_path`). Clip and step follow as usual; inside ``no_sync()``
        more may come before. Bits are the same as ``zero1`` gives inside ``no_sync()``, but for
        parameters that several blocks use and for randomness (docs/accumulation.md). Collective;
        the numbers of batches need not be the same on all ranks.

        In a run with leaves `batches` is ``engine.leaves(step)``, and `loss_fn` is given each
        leaf's number: bits are the same as in the loop over them, and each leaf is reduced.

        Raises ConfigError for what cannot run so, StateError where batches use different modules;
        after an exception call ``engine.reset()``.
        """
        self._states.check_open(trained=True)
        following = self._states.following
        check_accumulate(self._hooks, followed=following is not None and following.is_on)
        place = RestPlace.of(tier, None, disk_path)
        return Accumulate(self._hooks, self._context, self._scaler, place).run(batches, loss_fn)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train on uneven numbers of batches: in this context a rank that has ended its loop
        shadows the others until theirs has ended.

        Inside, all ranks with data must do the same: forwards of the module, backwards,
        ``clip_grad_norm_``, steps, ``zero_grad()`` of all gradients, updates of a ``zs.EMA``, and
        nothing else that is collective. Gradients are divided by the number of all ranks. Ranks
        along 'tp' end together; 'pp' is refused. Needs an optimizer. A learning rate scheduler that
        is stepped in the loop falls behind on a rank that has ended its loop: step it after the
        context, or load its state from a rank with the most batches. Collective; raises
        PlanMismatch where ranks with data do different things.
        """
        self._states.check_open(trained=True)
        refuse_leaves(self._backward.leaves, "join")
        if self._sharded is None:
            raise ConfigError("join() needs an optimizer: give it to shard() or engine.attach()")
        if self._states.following is not None and self._states.following.is_on:
            raise ConfigError(
                "join() cannot shadow a schedule: its ranks wait for each other's activations;"
                " run as many batches on every rank"
            )
        if self._context.own:
            raise ConfigError(
                "join() shadows data parallel ranks alone, and some parameters have a mesh of their"
                " own (mesh_of): run as many batches on every rank"
            )
        if stages := [axis.name for axis in self._context.mesh.others if not axis.alike]:
            raise ConfigError(
                f"join() shadows data parallel ranks, and this mesh has {stages[0]!r}, along which"
                " ranks have other parameters: run as many batches on every rank"
            )
        join = Join(
            self._loop, self._finalizer, self._sharded, self._context.transport, self._averages
        )
        with self._backward.running_as(joined=True), join.joined():
            yield

    def follow(
        self, schedule: Any, *, budget: int | str | None = None, no_sync: bool = True
    ) -> Following:
        """Let `schedule` (torch.distributed.pipelining) drive the stages that were given to
        ``zs.shard()``: its ``step()`` runs them, ``clip_grad_norm_`` and ``optimizer.step()`` come
        after it.

        Gradients of all micro-batches but a stage's last are added as inside ``no_sync()``
        (`no_sync` False: each is reduced, which gives all rows the same bits); that context around
        ``schedule.step()`` says that more steps of the schedule follow. The schedule's
        ``scale_grads`` is done here, and in fp16 its loss is scaled. With a `budget` in bytes (or
        "2GiB") the weights of a stage stay gathered over its micro-batches as long as they fit;
        without one, modules gather and release them. Collective over the mesh.

        Returns what ends it: ``remove()``; so does ``close()``. Raises ConfigError for a schedule
        of other stages, a second one, or a budget below one stage or without effect.
        """
        self._states.check_open()
        refuse_leaves(self._backward.leaves, "follow")
        peers = self._states.peers
        with self._context.axes.together(_FOLLOW) as along, peers.together(_FOLLOW) as meeting:
            if (other := self._states.following) is not None and other.is_on:
                raise ConfigError(
                    f"the engine follows a {type(other.schedule).__name__} already: end that"
                    " with the remove() of what engine.follow() has returned"
                )
            room = parse_bytes(budget, "budget") if isinstance(budget, str) else budget
            units = units_of(schedule, roots_of(self.module), self._weights.units)
            check_mesh(schedule, self._context.mesh.others)
            if room is not None:
                check_budget(room, units, self.policy.name)
            options = FollowOptions(room, no_sync)
            following = Following(
                schedule, units, self._weights, self._backward, self._scaler, options
            )
            report = {
                "schedule": type(schedule).__name__,
                "budget": repr(budget),
                "no_sync": str(no_sync),
                "n_microbatches": str(schedule._n_microbatches),
                "scale_grads": str(schedule.scale_grads),
            }
            along.compare(report)
            meeting.compare(report)
        self._states.follow(following)
        return following

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their 2-norm over all ranks is at most `max_norm`.

        Returns the norm before, a 0-d fp32 tensor, the same number on every rank and in every row;
        on an accelerator mostly one of the device, which is not waited for. Raises StateError
        without a gradient.
        """
        self._states.check_open(trained=True)
        return self._listeners.clip(float(max_norm))

    # -------------------------------------------------- parameters and gradients, whole and at rest

    def gathered(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | None = None,
        *,
        writeback: bool = False,
        discard: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context that holds full parameters (default: all) readable inside, collectively.

        A DTensor is one inside, too, whole over the data parallel ranks: ``full_tensor()``, on
        every rank, is all of it. With `writeback`, edits inside are kept: rank 0's, or the same on
        every rank (of DTensors, and beside 'tp', on every rank); others raise StateError, or
        PlanMismatch, at the end. With `discard`, edits are this rank's own, and are dropped at the
        end: an adapter that is merged to generate with. Edits without either are lost and raise
        where they are seen.

        An array or a view that is kept of a sharded weight (``.numpy()``, ``detach()``) keeps its
        numbers from before the next step, and the memory of the weight's unit as long as it lives.
        """
        self._states.check_readable()
        if writeback and discard:
            raise ConfigError("gathered(writeback=True, discard=True): edits are kept, or dropped")
        if writeback:
            self._states.finish_step()
        return self._whole.gathered(params, writeback=writeback, discard=discard)

    def full_state_dict(
        self,
        *,
        rank0_only: bool = True,
        names: str | Iterable[str] | None = None,
        trained: bool = False,
    ) -> dict[str, Any]:
        """Return the model's whole ``state_dict()`` on CPU, DTensors whole, streamed a unit at a
        time, with what ``get_extra_state()`` of modules returns here; empty on other ranks, and on
        replicas along 'tp', unless `rank0_only` is False.

        `trained`: of the parameters that require a gradient alone, without buffers: an adapter.
        `names`: of these names alone, or of those that match a pattern (``"*.lora_*"``), as
        fnmatch reads it. Nothing else is gathered then where the others are of another dtype, or
        frozen where these are trained. Collective; ConfigError for a pattern that matches nothing,
        PlanMismatch where ranks ask for different names.
        """
        self._states.check_readable(ends_graphs=True)
        return self._whole.full_state_dict(rank0_only=rank0_only, names=names, trained=trained)

    def full_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the averaged gradient of `param` [its shape, whole of a DTensor] on every rank,
        or None where no rank used it. Collective.
        """
        self._states.check_open(trained=True)
        return self._whole.full_grad(param)

    def hide_gradients(self) -> None:
        """Let ``param.grad`` be None between a backward and the step, as in DeepSpeed, in the place
        of a gradient that raises StateError when it is read. Then the optimizer's ``zero_grad()``
        alone drops gradients. Raises StateError without an optimizer.
        """
        self._states.check_open(trained=True)
        self._states.hide_gradients()

    def exchange(self, payload: bytes, call: str = "engine.exchange()") -> list[bytes]:
        """Return every rank's `payload`, in rank order. Collective; PlanMismatch, on every rank,
        where other ranks are in another `call`.
        """
        return self._states.peers.exchange(payload, call)

    # ------------------------------------------------------------------ reports

    def memory(self) -> MemoryReport:
        """Return the bytes of this rank at rest by state, in use beyond that now, and the peak
        of the latter.
        """
        self._backward.collect_dropped()
        return self._states.accounts.report()

    def traffic(self) -> TrafficReport:
        """Return the payload bytes and calls per collective since `reset_traffic`."""
        return TrafficReport.of(self._context.transport.traffic)

    def explain_optimizer(self) -> OptimizerReport:
        """Return, for each param group, the kind of step that its optimizer takes (elementwise,
        blockwise, per tensor, matrix), how that is known, what it needs of the layout and why, and
        what every rank owns of it. Print the result, or take ``to_dict()`` of it.

        Not collective; before a first step it tries one on numbers of its own. Raises StateError
        without an optimizer, and of a closed engine.
        """
        self._states.check_open()
        return self._states.accounts.optimizer()

    def reset_traffic(self) -> None:
        """Count payload from zero."""
        self._context.transport.traffic.reset()

    def trace(self, directory: str | Path) -> AbstractContextManager[None]:
        """Record the steps inside, and write them to ``DIRECTORY/rank-00000.json`` at the end: one
        file per rank, in Chrome's trace event format, which Perfetto opens and ``zeroshard report
        DIRECTORY`` reads.

        The file holds what each lane has done for which unit, with its bytes, the time that
        compute has waited for another lane, and the bytes of this rank by state
        (docs/timeline.md). `directory` is made where it is missing; a file of this rank that is
        there is replaced, as a whole. Enter it between steps. Bits, order and traffic of the steps
        do not change. What has been recorded is written, too, when the context is left by an
        exception.

        Not collective: some ranks may trace and others not. Raises StateError of a closed engine
        and inside another trace of it, StorageError where the directory cannot be written.
        """
        self._states.check_open()
        labels = {
            "model": type(self.module).__name__,
            "policy": self.policy.name,
            "precision": self._context.precision.describe(),
            "ranks": str(self.world),
        }
        return tracing(directory, self._context, self._loop, self._states.accounts, labels)

    def trail(self, directory: str | Path, *, every: int = 10) -> AbstractContextManager[None]:
        """Write hashes of every n-th step inside (numbers that `every` divides) to
        ``DIRECTORY/rank-00000.jsonl``, one file per rank: ``zeroshard compare`` says where the
        trails of two runs part. With ``zs.shard(..., leaves=V)`` these may have any numbers of
        ranks, and ``zeroshard replay`` runs a step again; without, both have the same ranks.

        Hashed are, by unit, weights, the gradient of each leaf (without leaves: micro-batch), sums,
        and optimizer states (docs/replay.md). Lines are added to a file that is there. Bits, order
        and traffic of the steps do not change. Enter it between steps, and anew after
        ``engine.repartition()``.

        Collective. Raises ConfigError where the mesh has axes beside the data parallel one, or
        parameters with a mesh of their own; PlanMismatch where ranks differ about `every`;
        StorageError where the directory cannot be written, or a file there is a link or no regular
        one: at once, on every rank, or at the end.
        """
        self._states.check_open()
        return trailing(
            directory, self._context, self._loop, self._states, every=every, row=self.policy.name
        )

    # ------------------------------------------------------------------ phases

    def offload_states(self) -> int:
        """Bring every state that rests on the device to the host; return the bytes. Collective.

        Until `reload_states`, whatever needs a state raises StateError. Raises StateError inside a
        backward or ``gathered()``.
        """
        self._states.check_open()
        if self._offloaded is not None:
            return self._offloaded.num_bytes
        with self._states.peers.together("engine.offload_states()"):
            self._loop.check_between_steps("offload_states()")
        self._backward.reductions.wait()
        self._states.join_step()
        self._weights.end_pass()
        offloaded = OffloadedStates(
            self._weights, self._sharded, self._context.transports, self._context.device
        )
        offloaded.begin()
        self._context.memory.release_idle()
        self._offloaded = offloaded
        return offloaded.num_bytes

    def reload_states(self) -> None:
        """Bring back what `offload_states` took away, bit for bit. Collective."""
        if self._offloaded is not None:
            self._states.peers.exchange(b"", "engine.reload_states()")
            self._offloaded.end()
            self._offloaded = None

    def repartition(
        self,
        *,
        policy: str | Policy | None = None,
        stage: int | None = None,
        offload: Any = None,
        mesh: Any = None,
        dp: str | Sequence[str] | None = None,
        shares: Sequence[float] | str | None = None,
        node_size: int | None = None,
    ) -> None:
        """Lay every state out anew between two steps: in another row, on other tiers, over other
        ranks. Module, parameters, optimizer and engine stay the objects they are, and what is not
        given stays as it was.

        The weights, masters, optimizer states, averages (zs.EMA), loss scale and step counts are
        bit for bit those that ``zs.save()`` and, in an engine of the new layout, ``zs.load()``
        would give; beside the larger of both layouts this takes two units of memory. `mesh` and
        `dp` are as in ``zs.shard()``; a rank that is not in it gives its part away and refuses to
        be used until a repartition over a mesh with it. `shares` are as in ``zs.shard()``, or
        "equal"; `node_size` is comm.node_size.

        Collective over the old and the new ranks together. Raises StateError while gradients rest
        that no step has taken, and inside a pass, ConfigError for what cannot be done, and
        PlanMismatch where ranks disagree, on every rank, before anything is changed; StorageError
        on every rank where a tier has failed on the way: then only zs.load() helps.
        """
        changes = {
            "policy": policy, "stage": stage, "offload": offload, "mesh": mesh, "dp": dp,
            "shares": shares, "node_size": node_size,
        }  # fmt: skip
        self._repartition(
            self, {name: value for name, value in changes.items() if value is not None}
        )

    # ------------------------------------------------------------------ recovery and the end

    def reset(self) -> None:
        """After an exception in forward, backward or step, on every rank: units at rest, no
        gradient, ready for the next forward.

        A step that ended by an exception goes no further: parameters may have taken part of it.
        One that was taken late (offload.delayed_update) is brought into the weights.
        Where ranks have finished different numbers of steps, forwards and steps are refused until
        zs.load(). Collective, over the whole mesh where it has other axes.
        """
        self._states.check_open()
        self._states.end_step()
        self._context.axes.give_up()
        self._context.transports.abandon()
        self._context.axes.abandon()
        self._context.streams.drain()  # memory that lanes still use is about to be released
        self._context.meter.reset()
        self._weights.abandon()
        self._backward.abandon()
        self._finalizer.abandon()
        self._context.faults.reset()
        self._recovery.meet(self._sharded, "engine.reset()")
        if self._offloaded is None:  # else everything had arrived before
            for segment in self._weights.segments:
                if segment.flat.awaits_nodes:  # what the last step has published was on its way
                    segment.flat.publish()
            if self._context.faults.is_lost:
                return
            if self._sharded is not None and self._sharded.runner.lags:
                self._states.finish_step()
            else:  # in one order: the ranks' next forwards may have several
                self._weights.run(self._weights.schedule.publish())

    def close(self) -> None:
        """Give back a plain module, in the dtypes it came with (trained parameters with their
        masters' numbers), and a plain optimizer.

        The optimizer's state is dropped. Collective. What a failed tier has lost is given back as
        it is, NaN where it cannot be read: that is logged where it is known, and else a
        StorageError on every rank once everything has been given back.

        Where a repartition was cut off, or this rank has left in one, nothing is left to give back:
        the parameters keep no numbers, and the call is not collective.
        """
        if self._states.is_closed:
            return
        if self._weights.availability.is_given_up:
            self._leave()
            return
        self._states.peers.exchange(b"", "engine.close()")
        told = self._context.faults.refusal if self._context.faults.is_lost else None
        self.reload_states()
        self._states.check_open(trained=True)
        if self._states.following is not None:
            self._states.following.remove()
        self._backward.abandon()
        try:
            self._states.join_step()
        except StateError as error:  # a write that is lost, which may have been told before
            _log.warning("close() gives back what rests: %s", error)
        self._weights.end_step()
        self._whole.restore_plain()
        self._hooks.remove()
        if self._sharded is not None:
            self._sharded.detach()
        failure: StorageError | None = None
        try:
            self._context.faults.agree()
        except StorageError as error:
            failure = error
        self._context.transports.begin_write()
        self._context.close()
        for segment in self._weights.segments:  # the engine is in cycles, which end later
            segment.close()
        self._context.memory.release_idle()
        self._states.close()
        if held := self._states.accounts.unreleased():
            _log.warning(NOT_GIVEN_BACK, self.rank, describe_bytes(held))
        if told is not None:
            _log.warning("the module is given back although a tier failed before: %s", told)
        elif failure is not None:
            raise failure

    def _leave(self) -> None:
        """Take the hooks off a module and an optimizer that have their numbers elsewhere."""
        self._hooks.remove()
        for segment in self._weights.segments:
            for parameter, dtype in zip(segment.parameters, segment.given, strict=True):
                nothing = torch.full((), placeholder_value(dtype), dtype=dtype)
                parameter.data = nothing.to(parameter.device).expand(parameter.shape)
        if self._sharded is not None:
            self._sharded.detach()
        self._states.close()
