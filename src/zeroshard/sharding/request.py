"""The settings of a `shard()` call: read and checked on each rank, and compared (compare.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from zeroshard.comm.device_mesh import MeshAxes
from zeroshard.comm.ranks import Meeting
from zeroshard.config import AUTO, Config
from zeroshard.core.gradient_budget import least_budget, resting_whole
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import Policy
from zeroshard.core.shares import Dealer, Shares, shares_of
from zeroshard.errors import ConfigError
from zeroshard.nn.deferred import (
    fingerprint_of,
    refuse_inside,
)
from zeroshard.runtime.build import Dtypes, compute_dtypes, gradient_bytes
from zeroshard.runtime.units import UnitPlan, named_parameters_once, partition_units
from zeroshard.sharding.checks import (
    check_codecs,
    check_dtensors,
    check_leaves,
    check_model,
    check_nodes,
    check_own_meshes,
    check_per_rank,
    check_precision,
    check_renormed,
    node_size_of,
)
from zeroshard.sharding.compare import REMEDY, Call, Report, errors_by_id, settings_report
from zeroshard.state.local import local_of

_log = logging.getLogger("zeroshard")


@dataclass(frozen=True)
class ShardRequest:
    """This rank's settings, checked."""

    model: nn.Module
    settings: Config  # with this rank's own tiers
    common: Config  # as it was given, the same on every rank
    policy: Policy  # the row in force: gradients rest whole as far as the budget goes
    shares: Shares | None  # of the data parallel ranks; None: equal
    mesh: Mesh
    dtypes: Dtypes
    plans: list[UnitPlan]
    report: Report
    # of parameters whose values differ between the ranks, by id: the error, unless files give them
    # others before their first use
    differing: dict[int, str] = field(default_factory=dict)


def requested(mesh_axes: MeshAxes, read: Callable[[], tuple[Call, Config]]) -> ShardRequest:
    """Return what all ranks of `mesh_axes` request: `read` on each, checked and compared.
    Collective.

    A check raises on its own rank. The ranks meet at the end of each `together`, so that every rank
    raises: this rank's error, else a PlanMismatch with another's or with the first difference. They
    meet twice: about settings, and about the model. Raises StallError where a rank does not come
    within the limit of `mesh_axes`.
    """
    ranks = mesh_axes.ranks
    together = partial(ranks.together, "shard()", remedy=REMEDY)
    with mesh_axes.along.together("shard()"):
        with together() as meeting:
            call, settings = read()
            _report_settings(call, settings, meeting)
        numbers = _numbers(call, settings)
    facts = meeting.answers
    with mesh_axes.along.together("shard()") as along_axes:
        with together() as meeting:
            if settings.policy == AUTO:
                settings = _chosen(call, settings, facts)
            request = _checked(call, settings, numbers)
            request.report.bring(meeting)
        differences = request.report.compare(meeting.answers, along_axes, mesh_axes.along.replicas)
    return replace(request, differing=errors_by_id(call.model, differences))


def _report_settings(call: Call, settings: Config, meeting: Meeting) -> None:
    """Let the ranks compare `settings`; with policy="auto" all tell what they know of their
    machines. Raises ConfigError.
    """
    mesh_axes, report = call.mesh_axes, {"policy": AUTO}
    if settings.policy != AUTO:
        _, _, node_size = _rank_settings(settings, mesh_axes)
        report = settings_report(settings, mesh_axes, node_size)
    meeting.compare(call.first_report() | report)
    if settings.policy != AUTO and not isinstance(settings.shares, str):
        return
    if settings.policy == AUTO and (mesh_axes.dims.others or mesh_axes.own):
        raise ConfigError("policy='auto' plans data parallel ranks alone, and this mesh has"
                          " other axes or mesh_of: name a row")  # fmt: skip
    refuse_inside("shard()")
    check_model(call.model, call.optimizer)
    if settings.policy == AUTO:
        from zeroshard.planner.modules import facts  # and with it the planner

        meeting.give(facts(call.model, settings, mesh_axes.size))


def _numbers(call: Call, settings: Config) -> Sequence[float] | None:
    """Return the shares of the ranks: as they are given, or those that follow their memory, where
    rank 0 logs why. Collective.
    """
    shares, mesh_axes = settings.shares, call.mesh_axes
    if settings.policy == AUTO or not isinstance(shares, str):
        return None if isinstance(shares, str) else shares
    from zeroshard.hetero import resolved

    named = [p for p in call.model.parameters() if fingerprint_of(p) is None]
    own_bytes = sum(local_of(p).nbytes for p in named)
    device = next(call.model.parameters()).device
    numbers, reason = resolved(shares, mesh_axes.group, device, own_bytes)
    if mesh_axes.rank == 0:
        _log.info("%s", reason)
    return numbers


def _chosen(call: Call, settings: Config, everyone: list[dict[str, Any]]) -> Config:
    """Return `settings` with the row that the planner takes; rank 0 logs it. Raises ConfigError
    where nothing fits.
    """
    from zeroshard.planner.modules import decide

    mesh_axes = call.mesh_axes

    def check(chosen: Config) -> None:
        chosen.refuse_unsupported()
        check_nodes(Mesh.of(len(everyone), node_size_of(chosen, mesh_axes.dims)), chosen)

    known = (
        settings.comm.node_size if mesh_axes.dims.node_size is None else mesh_axes.dims.node_size
    )
    out, reason = decide(
        call.model, call.optimizer, settings, everyone, node_size=known, check=check
    )
    if mesh_axes.rank == 0:
        _log.info("%s", reason)
    return out


def _checked(call: Call, common: Config, shares: Sequence[float] | None) -> ShardRequest:
    """Check everything on this rank. Nothing is changed or sent. Raises ConfigError."""
    model, mesh_axes = call.model, call.mesh_axes
    settings, mesh, node_size = _rank_settings(common, mesh_axes)
    _check_sync(call.sync_from, mesh)
    refuse_inside("shard()")
    check_model(model, call.optimizer)
    check_dtensors(named_parameters_once(model), mesh_axes.mesh, mesh_axes.dims)
    precision = settings.resolved_precision()
    check_precision(model, precision)
    dtypes = compute_dtypes(model, precision)
    check_codecs(model, dtypes, settings)
    check_leaves(model, settings, mesh_axes)
    plans = partition_units(
        model, settings.units, own_meshes=[own.pattern for own in mesh_axes.own]
    )
    check_own_meshes(model, plans, mesh_axes, mesh, settings, call.sync_from)
    check_renormed(model, plans, dtypes, settings)
    cut = None if shares is None else shares_of(shares)
    compared = call.first_report() | settings_report(common, mesh_axes, node_size)
    return ShardRequest(
        model=model,
        settings=settings,
        common=common,
        policy=_budgeted(settings, cut, plans, mesh, mesh_axes, dtypes),
        shares=cut,
        mesh=mesh,
        dtypes=dtypes,
        plans=plans,
        report=Report.of(call, dtypes, plans, compared),
    )


def _check_sync(sync_from: int | None, mesh: Mesh) -> None:
    """Refuse a rank to copy from that is none, or replicas that it could not reach."""
    if sync_from is not None and not 0 <= sync_from < mesh.size:
        raise ConfigError(f"sync_from={sync_from} is not a rank of this group of {mesh.size}")
    if sync_from is not None and any(axis.alike for axis in mesh.others):
        raise ConfigError(
            f"sync_from={sync_from} would copy inside each data parallel group, and the replicas"
            " along 'tp' must begin alike: build the same model on every rank (same seed)"
        )


def changed_request(request: ShardRequest, common: Config, mesh_axes: MeshAxes) -> ShardRequest:
    """Return `request` with other `common` settings, over other `mesh_axes`: units and dtypes are
    the same, and so are shares that were measured. Raises ConfigError.
    """
    settings, mesh, node_size = _rank_settings(common, mesh_axes)
    check_codecs(request.model, request.dtypes, settings)
    check_renormed(request.model, request.plans, request.dtypes, settings)
    shares = request.shares
    if not isinstance(common.shares, str):
        shares = None if common.shares is None else shares_of(common.shares)
    return replace(
        request,
        settings=settings,
        common=common,
        policy=_budgeted(settings, shares, request.plans, mesh, mesh_axes, request.dtypes),
        shares=shares,
        mesh=mesh,
        report=replace(request.report, settings=settings_report(common, mesh_axes, node_size)),
        differing={},
    )


def _rank_settings(common: Config, mesh_axes: MeshAxes) -> tuple[Config, Mesh, int | None]:
    """Return the settings of this rank, the mesh, and the ranks per node where they are known.
    Raises ConfigError.
    """
    common.refuse_unsupported()
    check_per_rank(common, mesh_axes.size, mesh_axes)
    common.batch_sizes(mesh_axes.size)
    common.unequal_shares(mesh_axes.size)
    common.leaves_of(mesh_axes.size)
    settings = common.at(mesh_axes.rank)
    node_size = node_size_of(settings, mesh_axes.dims)
    mesh = Mesh.of(mesh_axes.size, node_size, mesh_axes.dims.others)
    check_nodes(mesh, settings)
    return settings, mesh, node_size


def _budgeted(
    settings: Config,
    shares: Shares | None,
    plans: list[UnitPlan],
    mesh: Mesh,
    mesh_axes: MeshAxes,
    dtypes: Dtypes,
) -> Policy:
    """Return the row in force, in which the gradients of some units rest whole where
    `accumulation_budget` holds them. Raises ConfigError where it holds none.
    """
    policy, budget = settings.resolved_policy(), settings.accumulation_budget
    if budget is None:
        return policy
    assert isinstance(budget, int), budget  # Config has read it
    meshes = {own.pattern: own.holders.mesh(mesh) for own in mesh_axes.own} | {"": mesh}
    sizes_of = partial(
        gradient_bytes,
        dtypes=dtypes,
        precision=settings.resolved_precision(),
        dealer=Dealer(shares),
        align=settings.comm.codecs().align,
    )
    sizes = [sizes_of(plan, policy.cells(plan.name).grad, meshes[plan.pattern]) for plan in plans]
    resting = resting_whole(sizes, budget)
    if not resting and any(unit.extra for unit in sizes):  # one rank has nothing to reduce
        shards = sum(unit.shard for unit in sizes)
        raise ConfigError(
            f"accumulation_budget={budget} bytes holds no unit: the shards of all gradients take"
            f" {shards}, and with the smallest unit's whole gradient {least_budget(sizes)}: give"
            " as many, or leave it out"
        )
    try:
        return policy.with_whole_gradients(resting)
    except ValueError as error:
        raise ConfigError(f"accumulation_budget={budget}: {error}") from None
