"""``engine.repartition()``: what was requested of shard() is requested again, with other settings.

    the old ranks agree        nothing is under way, all ask for the same
    old and new ranks meet     who holds the states; the settings, where a rank comes back
    the new ranks make ready   transports and stores, memory on other tiers
    ---------------------------------------------------------------- from here on numbers move
    runtime/relayout.py        segment by segment
    all say how it ended

Invariant: up to the line nothing of the engine has changed, and an error is raised on every rank;
after it every rank comes to the end, where a tier that has failed is told on every rank. Ranks that
leave keep an engine that refuses to be used and knows the model: a later call may wake it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.checkpoint.rank_part import encoded_options, generators, restore_generators
from zeroshard.checkpoint.save import end_saves
from zeroshard.comm.device_mesh import MeshAxes, mesh_axes_of
from zeroshard.comm.groups import HandOver, HandOverError
from zeroshard.comm.ranks import Ranks
from zeroshard.comm.select import FIRST_STALL_TIMEOUT_S
from zeroshard.config import AUTO, Config, build_config
from zeroshard.core.digest import first_difference, holders
from zeroshard.core.placement import Tier
from zeroshard.core.shares import shares_of
from zeroshard.core.values import decode, encode
from zeroshard.errors import (
    CheckpointError,
    ConfigError,
    PeerLostError,
    PlanMismatch,
    StallError,
    StateError,
    StorageError,
    ZeroshardError,
)
from zeroshard.hetero import resolved
from zeroshard.optim.several import each_of
from zeroshard.runtime.build import Parts, PlannedUnits, build_units, plan_units
from zeroshard.runtime.context import Context
from zeroshard.runtime.ema import averages_of, updates_of
from zeroshard.runtime.engine import Engine, parts_of, relaid, states_of
from zeroshard.runtime.relayout import Facts, Move, facts_of, release_parameters
from zeroshard.runtime.segment_states import states_at_rest
from zeroshard.sharding.checks import check_optimizer, check_whole_steps
from zeroshard.sharding.request import ShardRequest, changed_request
from zeroshard.state.local import local_of

_log = logging.getLogger("zeroshard")

# ------------------------------------------------------------------------------------------- rejoin
# The facts that a rank needs beside the states to come back to an engine (``engine.repartition``):
# options of param groups, counts, the loss scale, the random generators.


def carried(engine: Engine) -> dict[str, Any]:
    """Return what a rank that comes back has to know beside the states, as JSON. Raises
    CheckpointError for an option of a param group that has no form.
    """
    parts = parts_of(engine)
    sharded, scaler = parts.sharded, parts.context.options.loss_scaler
    return {
        "groups": [] if sharded is None else encoded_options(sharded.optimizer),
        "scaler": None if scaler is None else scaler.state_dict(),
        "counts": [parts.finalizer.step, parts.finalizer.skipped],
        "steps": None if sharded is None else [sharded.num_finished, sharded.runner.num_steps],
        "generators": encode(generators(), "random generators", _as_text),
    }


def take_over(engine: Engine, known: Mapping[str, Any]) -> None:
    """Continue, on a rank that has come back, what the others were doing."""
    parts = parts_of(engine)
    parts.finalizer.continue_from(*known["counts"])
    if parts.sharded is not None:
        parts.sharded.continue_from(*known["steps"])
        for group, options in zip(
            parts.sharded.optimizer.param_groups, known["groups"], strict=True
        ):
            group.update({key: decode(value, _no_tensor) for key, value in options.items()})
        steps = [one.step for one in each_of(parts.sharded.optimizer)]
        if any(hasattr(step, "_wrapped_by_lr_sched") for step in steps):
            _log.warning(
                "rank %d comes back, and its learning rate scheduler stood still while it was away:"
                " before its next step(), load the state_dict() of a scheduler on a rank that"
                " stayed",
                engine.rank,
            )
    scaler = parts.context.options.loss_scaler
    if scaler is not None and known["scaler"] is not None:
        scaler.load_state_dict(known["scaler"])
    if known["generators"] is not None:
        restore_generators(decode(known["generators"], _from_text))


def _as_text(path: str, tensor: torch.Tensor) -> str:
    """Return a tensor as the text that stands in JSON for it."""
    data = base64.b64encode(tensor.cpu().contiguous().numpy().tobytes()).decode()
    return f"{str(tensor.dtype).removeprefix('torch.')} {data}"


def _from_text(text: str) -> torch.Tensor:
    dtype, data = text.split(" ")
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))


def _no_tensor(path: str) -> torch.Tensor:
    raise ValueError(f"{path} is no number")


# -------------------------------------------------------------------------------------- repartition

EQUAL = "equal"  # shares that are none

_CALL = "engine.repartition()"
_SAME = "Build the same model on every rank, with as many zs.EMA"
_AWAY = (
    "this rank has left the ranks of its engine in engine.repartition(): its model, optimizer and"
    " engine can be used again after engine.repartition(mesh=...) with a mesh that contains it"
)
_CUT_OFF = (
    "engine.repartition() was cut off while states moved, and what rests is not whole: make model"
    " and engine anew, and call zs.load()"
)


class MakeContext(Protocol):
    """Make what the parts of an engine share (sharding/api.py). Collective over the
    ranks of `mesh_axes`.
    """

    def __call__(
        self, request: ShardRequest, mesh_axes: MeshAxes, /, *, trains: bool
    ) -> Context: ...


@dataclass(frozen=True)
class _Ready:
    """A new layout that this rank has a part in, before anything moves."""

    request: ShardRequest
    mesh_axes: MeshAxes
    context: Context
    planned: PlannedUnits


class Repartition:
    """The last request of one engine, and how to change it."""

    def __init__(self, request: ShardRequest, mesh_axes: MeshAxes, make: MakeContext) -> None:
        self._request = request
        self._mesh_axes = mesh_axes
        self._make = make
        self._is_away = False

    def check_optimizer(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError for an optimizer that ``shard()`` would refuse with the model of
        `engine`.
        """
        is_first = self._mesh_axes.rank == 0
        check_optimizer(optimizer, engine.module, self._request.settings, is_first=is_first)

    def __call__(self, engine: Engine, changes: Mapping[str, Any]) -> None:
        """Lay `engine` out anew with these `changes` (``Engine.repartition``)."""
        if states_of(engine).is_closed or not self._is_away:
            states_of(engine).check_open()
        mesh = changes.get("mesh")
        try:
            # what one of the old ranks refuses is raised on all of them
            new_ranks = mesh.mesh.tolist() if isinstance(mesh, DeviceMesh) else mesh
            ranks = Ranks() if self._is_away else states_of(engine).peers
            with ranks.together(_CALL) as meeting:
                self._check_call(engine, changes)
                updates = [] if self._is_away else list(map(updates_of, averages_of(engine)))
                meeting.compare({"mesh": str(new_ranks), "updates of zs.EMA": str(updates)})
            if not self._is_away:
                states_of(engine).finish_step()
        except (CheckpointError, ConfigError, PlanMismatch, StateError, StorageError) as refused:
            # on the ranks that come to the engine, too
            if isinstance(mesh, DeviceMesh) and _rank() in mesh.mesh and self._grows(mesh):
                with HandOver(_mesh_axes_in(mesh, changes).group).ranks.together(_CALL):
                    raise refused
            raise
        mesh_axes, hand_over, answers = self._meet(engine, changes)
        request = self._agree_on_settings(engine, hand_over, mesh_axes, answers, changes)
        relayout = _Relayout(engine, hand_over, answers, is_away=self._is_away)
        ready = relayout.prepare(lambda: self._ready(engine, request, mesh_axes, changes))
        relayout.run()
        self._is_away = ready is None
        if ready is not None:
            self._request, self._mesh_axes = ready.request, ready.mesh_axes
        relayout.end()
        for average in averages_of(engine):
            average.num_updates = 0  # a rank that comes back has not counted

    # ------------------------------------------------------------------ the old ranks

    @property
    def _ranks(self) -> list[int]:
        """The ranks of the job over which the engine lies, or lay when this rank left."""
        group = self._mesh_axes.group
        return [_rank()] if group is None else dist.get_process_group_ranks(group)

    def _check_call(self, engine: Engine, changes: Mapping[str, Any]) -> None:
        """Raise for what cannot be done on this rank, whatever the others say."""
        mesh = changes.get("mesh")
        if not changes:
            raise ConfigError(
                f"{_CALL} without a change: pass policy=, offload=, shares=, mesh= or node_size="
            )
        if changes.get("policy") == AUTO:
            raise ConfigError("policy='auto' plans for shard() alone: name a row")
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"mesh is a {type(mesh).__name__}, not a DeviceMesh: make one with"
                " torch.distributed.init_device_mesh()"
            )
        if "dp" in changes and mesh is None:
            raise ConfigError(
                f"dp={changes['dp']!r} names dimensions of a mesh, and there is none: pass mesh="
            )
        if self._is_away:
            if mesh is None or _rank() not in mesh.mesh:
                raise StateError(_AWAY)
            return
        states, parts = states_of(engine), parts_of(engine)
        if states.following is not None and states.following.is_on:
            raise ConfigError(f"{_CALL} while the engine follows a schedule: end that first")
        if self._mesh_axes.own or self._mesh_axes.dims.others:
            raise ConfigError(
                f"{_CALL} moves data parallel ranks alone, and this engine has other axes or"
                " mesh_of: save, close and shard() again"
            )
        parts.loop.check_between_steps(_CALL)
        if states.has_pending_gradients:
            raise StateError(
                f"{_CALL} while gradients rest that no step has taken: call it after"
                " optimizer.step() or zero_grad()"
            )
        parts.check_at_rest(_CALL)
        states.join_trained()  # a late step makes states
        # raises for state that cannot be cut
        facts_of(states_at_rest(parts.weights, parts.sharded, _averages(engine)))
        old, new = set(self._ranks), set() if mesh is None else set(mesh.mesh.flatten().tolist())
        if mesh is not None and new - old and old - new:  # some leave and others come
            raise ConfigError(
                f"mesh has the ranks {mesh.mesh.flatten().tolist()}, and the engine lies over"
                f" {self._ranks}: go over a mesh that contains both, or one inside the other"
            )
        end_saves(engine)

    # ------------------------------------------------------------------ old and new ranks

    def _grows(self, mesh: DeviceMesh) -> bool:
        """Whether ranks come to the engine: all ranks that take part are then in `mesh`."""
        return self._is_away or not set(mesh.mesh.flatten().tolist()) <= set(self._ranks)

    def _meet(
        self, engine: Engine, changes: Mapping[str, Any]
    ) -> tuple[MeshAxes | None, HandOver, list[dict[str, Any]]]:
        """Return this rank's new axes (None: it leaves), all ranks that take part, and what each of
        these says of itself. Collective over them.

        Raises, on every rank, for a refusal of any, and where the states of the new ranks cannot
        come from these ranks.
        """
        mesh, mesh_axes = changes.get("mesh"), self._mesh_axes
        if grows := mesh is not None and self._grows(mesh):
            mesh_axes = _mesh_axes_in(mesh, changes)
        hand_over = HandOver(mesh_axes.group)
        with hand_over.ranks.together(_CALL, remedy=_SAME) as meeting:
            leaves = mesh is not None and _rank() not in mesh.mesh
            if mesh is not None and not (grows or leaves):
                mesh_axes = _mesh_axes_in(mesh, changes)
            averages = str(len(averages_of(engine)))
            model = json.dumps(self._request.report.model).encode()
            digest = hashlib.blake2b(model, digest_size=8).hexdigest()
            meeting.compare({"model": digest, "averages": averages})
            settings = _settings(self._request.common, changes)
            policy = settings.policy
            known = {  # the settings that may change, for ranks that come back
                "policy": policy if policy is None or isinstance(policy, str) else None,
                "stage": settings.stage,
                "offload": settings.offload.model_dump(mode="json"),
                "shares": EQUAL if settings.shares is None else settings.shares,
                "node_size": settings.comm.node_size,
            }
            ranks = None if self._is_away else self._ranks
            meeting.give({"ranks": ranks, "rank": _rank(), "settings": known})
        answers: list[dict[str, Any]] = meeting.answers
        held = [one["ranks"] for one in answers if one["ranks"] is not None]
        here = {one["rank"] for one in answers}
        if not held:
            raise ConfigError(
                f"no rank of mesh= {sorted(here)} holds the states: all have left the engine"
            )
        if any(set(ranks) - here for ranks in held):
            raise ConfigError(
                f"mesh= {sorted(here)} leaves out ranks that hold a part of the states, which lie"
                f" over {held[0]}: call {_CALL} on these, too, over a mesh that contains them"
            )
        return None if leaves else mesh_axes, hand_over, answers

    def _agree_on_settings(
        self,
        engine: Engine,
        hand_over: HandOver,
        mesh_axes: MeshAxes | None,
        answers: Sequence[dict[str, Any]],
        changes: Mapping[str, Any],
    ) -> ShardRequest | None:
        """Return the new request of a rank of the new layout. Raises on every rank."""
        with hand_over.ranks.together(_CALL) as meeting:
            request = None
            if mesh_axes is not None:
                settings = self._request.common
                if self._is_away:
                    first = next(one for one in answers if one["ranks"] is not None)
                    settings = _settings(settings, first["settings"])
                settings = _settings(settings, changes)
                measured = isinstance(settings.shares, str) and "shares" not in changes
                if measured and "mesh" in changes:
                    raise ConfigError(
                        f"shares={settings.shares!r} was measured on other ranks: pass shares="
                        " again"
                    )
                request = changed_request(self._request, settings, mesh_axes)
                if engine.optimizer is not None:
                    check_whole_steps(
                        engine.optimizer,
                        request.settings,
                        engine.module,
                        is_first=mesh_axes.rank == 0,
                    )
                cells = request.settings.resolved_policy().all_cells
                if averages_of(engine) and {one.optim.tier for one in cells} != {Tier.DEVICE}:
                    raise ConfigError(
                        "zs.EMA keeps an average beside masters on the device: leave"
                        " offload.optimizer there, or drop the average first"
                    )
                meeting.give(request.report.settings)
        reports = [found for found in meeting.answers if found is not None]
        entries = [[f"{name} = {text}" for name, text in report.items()] for report in reports]
        position, found = first_difference(entries)
        if len(set(found)) > 1:
            name = entries[0][position].split(" = ")[0]
            raise PlanMismatch(
                f"the ranks disagree, first about {name!r}: {holders(found)}. Pass the same options"
                " on every rank"
            )
        return request

    def _ready(
        self,
        engine: Engine,
        request: ShardRequest | None,
        mesh_axes: MeshAxes | None,
        changes: Mapping[str, Any],
    ) -> _Ready | None:
        """Make the new layout's transports and stores, on its ranks."""
        if request is None or mesh_axes is None:
            return None
        shares = changes.get("shares")
        if isinstance(shares, str) and shares != EQUAL:  # they follow what is measured now
            rests = engine.memory().tiers.values()
            own_bytes = sum(by_tier.get(Tier.DEVICE.value, 0) for by_tier in rests)
            device = parts_of(engine).context.device
            numbers = resolved(shares, mesh_axes.group, device, own_bytes)
            request = replace(request, shares=shares_of(numbers))
        trains = parts_of(engine).sharded is not None
        context = self._make(request, mesh_axes, trains=trains)
        scaler = parts_of(engine).context.options.loss_scaler
        context = replace(context, options=replace(context.options, loss_scaler=scaler))
        # strides and dtypes are those that shard() found: plans look at them when segments are made
        try:
            return _Ready(request, mesh_axes, context, plan_units(request.plans, context))
        except StorageError:
            context.close()
            raise


class _Relayout:
    """The states of one engine on their way into another layout."""

    def __init__(
        self,
        engine: Engine,
        hand_over: HandOver,
        answers: Sequence[Mapping[str, Any]],
        *,
        is_away: bool,
    ) -> None:
        self._engine = engine
        self._hand_over = hand_over
        self._ready: _Ready | None = None  # None: this rank leaves
        self._parts: Parts = parts_of(engine)
        self._move = Move(hand_over, self._parts, _averages(engine), has_states=not is_away)
        self._facts: list[Facts] = []
        holds = [one["ranks"] is not None for one in answers]
        self._first = holds.index(True)  # the first rank of the old layout
        self._some_come_back = not all(holds)
        self._carried: dict[str, Any] | None = None  # for ranks that come back
        self._comes_back = is_away

    def prepare(self, make: Callable[[], _Ready | None]) -> _Ready | None:
        """Make the new layout ready, return it, and tell every rank what is held and wanted here.
        Nothing has changed; raises on every rank.
        """
        try:
            with self._hand_over.ranks.together(_CALL) as meeting:
                ready = self._ready = make()
                facts = self._move.facts(None if ready is None else ready.planned)
                known = None
                if self._some_come_back and not self._comes_back:
                    try:
                        known = carried(self._engine)
                    except CheckpointError as odd:  # an option of a param group without a form
                        raise ConfigError(str(odd)) from odd
                meeting.give([asdict(facts), known])
        except ZeroshardError:
            if self._ready is not None:
                self._ready.context.close()
            raise
        self._facts = [Facts(**found) for found, _ in meeting.answers]
        if self._some_come_back:
            self._carried = meeting.answers[self._first][1]
            states = [known["generators"] for _, known in meeting.answers if known is not None]
            if any(state != states[0] for state in states):
                self._carried["generators"] = None
        return ready

    def run(self) -> None:
        """Move everything. What is cut off leaves an engine that refuses to be used."""
        try:
            self._run()
        except BaseException as error:
            for parts in (self._parts, parts_of(self._engine)):
                parts.weights.availability.give_up(_CUT_OFF)
            if isinstance(error, Exception) and not isinstance(error, HandOverError):
                # the other ranks end what waits for this one, and are told of the error; where
                # another rank's has caused it, that is raised
                ready = None if self._ready is None else self._ready.context
                for context in (self._parts.context, ready):
                    if context is not None:
                        with suppress(Exception):
                            context.close()
                follows = isinstance(error, (PeerLostError, StallError))
                reason = "" if follows else f"{type(error).__name__}: {error}"
                try:
                    self._hand_over.meet(reason, ended=True)
                except HandOverError as of_another:
                    if follows:
                        raise of_another from error
            raise

    def _run(self) -> None:
        ready, move = self._ready, self._move
        move.begin(self._facts)
        if ready is None:
            move.give_all()
        else:
            release_parameters(self._parts)
            context, plans = ready.context, ready.request.plans
            units = build_units(plans, context, ready.planned, move)
            prefetch_bytes = ready.request.settings.prefetch_bytes
            relaid(self._engine, units, plans, context, prefetch_bytes=prefetch_bytes, cut=move.cut)
            context.faults.end_shard()
        if self._carried is not None:
            for buffer in self._engine.module.buffers():
                self._hand_over.give(local_of(buffer), self._first)
        if ready is None:
            self._parts.weights.availability.give_up(_AWAY)
        elif self._comes_back:
            assert self._carried is not None
            take_over(self._engine, self._carried)
        else:
            finalizer = self._parts.finalizer
            parts = parts_of(self._engine)
            parts.finalizer.continue_from(finalizer.step, finalizer.skipped)
            parts.backward.parameters.hides = self._parts.backward.parameters.hides
        move.end(stays=ready is not None)

    def end(self) -> None:
        """Raise StorageError on every rank where a tier has failed on any. Collective."""
        faults = None if self._ready is None else self._ready.context.faults
        try:
            with self._hand_over.ranks.together(_CALL, refusal=StorageError):
                if faults is not None:
                    faults.agree()
                if self._move.error is not None:
                    raise self._move.error
        except StorageError as error:
            if faults is not None:
                faults.lose(_CALL, str(error))
            raise


# ---------------------------------------------------------------------------------------- settings


def _settings(settings: Config, changes: Mapping[str, Any]) -> Config:
    """Return `settings` with the `changes` that a Config has. Raises ConfigError."""
    known = {name: changes.get(name) for name in ("policy", "stage", "offload", "shares")}
    if known["shares"] == EQUAL:
        settings, known["shares"] = settings.model_copy(update={"shares": None}), None
    if changes.get("node_size") is not None:
        known["comm"] = settings.comm.model_copy(update={"node_size": changes["node_size"]})
    return build_config(settings, **known)


def _mesh_axes_in(mesh: DeviceMesh, changes: Mapping[str, Any]) -> MeshAxes:
    """Return the axes of `mesh`. Collective over it; raises ConfigError."""
    limit_s = changes.get("stall_timeout_s") or FIRST_STALL_TIMEOUT_S
    mesh_axes = mesh_axes_of(mesh, changes.get("dp"), limit_s=limit_s)
    if mesh_axes.dims.others:
        raise ConfigError(
            f"{_CALL} moves data parallel ranks alone, and mesh= has other dimensions:"
            " save, close and shard() again"
        )
    return mesh_axes


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _averages(engine: Engine) -> dict[str, list[torch.Tensor]]:
    return {f"average {index}": one.averages for index, one in enumerate(averages_of(engine))}
