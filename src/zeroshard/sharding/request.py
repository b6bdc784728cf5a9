"""The settings of a `shard()` call: read and checked on each rank, and compared as text, with the
model, the options of the param groups, and the initial values.

    settings    the same on every rank of the mesh
    model       the same on every data parallel rank, and on replicas (plain parameters along 'tp')
    values      a digest of each; of a deferred model they may differ, where files overwrite them

Entries stand in order of importance: the first difference is told.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.comm.device_mesh import MeshAxes
from zeroshard.comm.ranks import Groups, Meeting
from zeroshard.config import AUTO, Config
from zeroshard.core.digest import digest_of, holders
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import Policy
from zeroshard.core.precision import dtype_name
from zeroshard.core.shares import Shares, WholeParameters, has_blocks, shares_of
from zeroshard.core.sizes import least_budget, resting_whole
from zeroshard.errors import ConfigError
from zeroshard.nn.deferred import fingerprint_of, refuse_inside
from zeroshard.optim.copies import cuts_blocks, is_elementwise
from zeroshard.optim.several import class_name, each_of
from zeroshard.runtime.build import compute_dtypes, dealer_of, gradient_bytes
from zeroshard.runtime.context import Dtypes
from zeroshard.runtime.units import UnitPlan, named_parameters_once, partition_units
from zeroshard.sharding import checks
from zeroshard.state.local import local_of, part_of, whole_shape

_log = logging.getLogger("zeroshard")

REMEDY = "Build the same model with the same options on every rank (same seed), or use sync_from=0"

# settings that must be the same on every rank
_COMPARED = (
    "prefetch_bytes", "strict", "verify_every", "broadcast_buffers", "gradient_clipping",
    "loss_scale", "batch_shares", "accumulation_budget", "leaves", "gradient_reduction",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The arguments of shard() on this rank, beside its settings."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    mesh_axes: MeshAxes
    sync_from: int | None

    def first_report(self) -> dict[str, str]:
        """Return how every report begins. Ranks that have a mesh have compared it before
        (seat_of).
        """
        mesh = {"mesh": "none"} if self.mesh_axes.mesh is None else {}
        return mesh | {"sync_from": str(self.sync_from)}


@dataclass(frozen=True)
class Report:
    """The facts that this rank tells about its request."""

    settings: dict[str, str]
    model: dict[str, str]
    values: dict[str, str]  # of a deferred model; of others they are entries of `model`
    parts: frozenset[str]  # entries about parts, which differ along the mesh
    # entries of parameters that some ranks hold, and by which groups of ranks
    within: dict[str, Groups]

    @classmethod
    def of(
        cls,
        call: Call,
        dtypes: Dtypes,
        plans: Sequence[UnitPlan],
        owned: WholeParameters,
        settings: dict[str, str],
    ) -> Report:
        """Return the report about a `call`; `plans` and `owned` say how its model is cut."""
        model, named = call.model, named_parameters_once(call.model)
        groups = {own.pattern: own.holders.groups for own in call.mesh_axes.own}
        report = _model_report(model, call.optimizer, dtypes, plans, owned)
        # a digest of each parameter's values, or of how they will be computed
        values: dict[str, str] = {}
        for name, p in named.items() if call.sync_from is None else ():
            recipe = fingerprint_of(p)
            value = digest_of(local_of(p)) if recipe is None else f"deferred {recipe}"
            values[_initial(name)] = value
        if any(text.startswith("deferred ") for text in values.values()):
            report["a deferred model"] = "yes"
        else:
            report, values = report | values, {}
        return cls(
            settings,
            report,
            values,
            frozenset(_initial(name) for name, p in named.items() if part_of(name, p).axes),
            {_initial(name): groups[one.pattern] for one in plans if one.pattern
             for name in one.parameters},
        )  # fmt: skip

    def bring(self, meeting: Meeting) -> None:
        """Let the data parallel ranks compare it in a `meeting`; `compare` takes the answers."""
        meeting.compare(self.settings | self.model)
        meeting.within.update(self.within)
        known = self.values | self.model
        names = known.keys() - self.parts
        meeting.give([self.values, {name: known[name] for name in self.within if name in names}])

    def compare(
        self, answers: Sequence[Any], along_axes: Meeting, replicas: Groups
    ) -> dict[str, str]:
        """Return which values of a deferred model differ between the data parallel ranks, and how;
        let these ranks be compared with the ranks along the other axes; `replicas` of them hold the
        same parameters.
        """
        values, of_some = zip(*answers, strict=True)
        # not the same on every rank (or `within` groups of ranks); all have the same names
        differences: dict[str, str] = {}
        all_ranks = (tuple(range(len(values))),)
        for name in values[0]:
            for ranks in self.within.get(name, all_ranks):
                texts = [values[rank][name] for rank in ranks]
                if len(set(texts)) > 1:
                    differences.setdefault(name, holders(texts, ranks))
        along_axes.compare(self.settings)
        left_out = self.within.keys() | differences.keys() | self.parts
        known = self.values | self.model
        alike = {name: text for name, text in known.items() if name not in left_out}
        if self.within:  # of parameters that some ranks hold, given by each of them, one digest
            mine = [[t for name, t in one.items() if name not in differences] for one in of_some]
            digest = hashlib.blake2b(json.dumps(mine).encode(), digest_size=8).hexdigest()
            alike["initial values of parameters with a mesh of their own"] = digest
        along_axes.compare(alike, replicas)
        return differences


def settings_report(settings: Config, mesh_axes: MeshAxes, node_size: int | None) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, in order of importance."""
    report = {
        "policy": settings.at(mesh_axes.rank).resolved_policy().name,
        "shares": str(settings.ownership or settings.shares),
        "precision": settings.resolved_precision().describe(),
        "comm": settings.comm.model_dump_json(),
        "comm.node_size": str(node_size),
        "offload": settings.offload.model_dump_json(exclude={"disk_path"}),
    }
    return report | {name: str(getattr(settings, name)) for name in _COMPARED}


def _model_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dtypes: Dtypes,
    plans: Sequence[UnitPlan],
    owned: WholeParameters,
) -> dict[str, str]:
    """Return what of the model must be equal on all of its ranks, in order of importance."""
    report: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, parameter in named_parameters_once(model).items():
        names[id(parameter)] = name
        dtype = dtype_name(dtypes.of[id(parameter)])
        kind = "trained" if parameter.requires_grad else "frozen"
        rows = owned.rows.get(name)
        ways = (("cut", owned.cut), ("cut between blocks", owned.blocks))
        stepped = [f"in parts {rows}"] if rows else [how for how, of in ways if name in of]
        told = f"{whole_shape(parameter)} {dtype} {kind}"
        report[f"parameter {name}"] = ", ".join([told, *stepped])
    for plan in plans:
        report[f"unit {plan.name}"] = ", ".join(plan.parameters)
    report["optimizer"] = class_name(optimizer)
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        params = [names[id(parameter)] for parameter in group["params"]]
        report[f"optimizer param group {index}"] = ", ".join(params)
        for key, value in group.items():
            if key not in ("params", "param_names"):
                report[f"optimizer param group {index}: {key}"] = repr(value)
    return report


def _initial(name: str) -> str:
    """Return what reports call the initial value of a parameter."""
    return f"initial value of {name}"


@dataclass(frozen=True)
class ShardRequest:
    """This rank's settings, checked."""

    model: nn.Module
    settings: Config  # with this rank's own tiers
    common: Config  # as it was given, the same on every rank
    policy: Policy  # the row in force: gradients rest whole as far as the budget goes
    shares: Shares | WholeParameters | None  # of the data parallel ranks; None: equal
    owned: WholeParameters  # what they own where `ownership` says so
    mesh: Mesh
    dtypes: Dtypes
    plans: list[UnitPlan]
    report: Report
    # of parameters with values that differ between the ranks, by id: the error, unless files give
    # them others before their first use
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
    remedy = f"{REMEDY}, or give it values with zs.load_pretrained() before its first use"
    keys = {_initial(name): id(p) for name, p in named_parameters_once(call.model).items()}
    errors = {
        keys[name]: f"the ranks disagree, first about {name!r}: {who}. {remedy}"
        for name, who in differences.items()
    }
    return replace(request, differing=errors)


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
    checks.check_model(call.model)
    if call.optimizer is not None:
        checks.check_optimizer(call.optimizer, call.model, settings)
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
    return resolved(shares, mesh_axes.group, device, own_bytes)


def _chosen(call: Call, settings: Config, everyone: list[dict[str, Any]]) -> Config:
    """Return `settings` with the row that the planner takes; rank 0 logs it. Raises ConfigError
    where nothing fits.
    """
    from zeroshard.planner.modules import decide

    mesh_axes = call.mesh_axes

    def check(chosen: Config) -> None:
        chosen.refuse_unsupported()
        node_size = checks.node_size_of(chosen, mesh_axes.dims)
        checks.check_nodes(Mesh.of(len(everyone), node_size), chosen)

    named = mesh_axes.dims.node_size
    known = settings.comm.node_size if named is None else named
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
    if call.sync_from is not None and not 0 <= call.sync_from < mesh.size:
        raise ConfigError(f"sync_from={call.sync_from} is not a rank of this group of {mesh.size}")
    if call.sync_from is not None and any(axis.alike for axis in mesh.others):
        raise ConfigError(
            f"sync_from={call.sync_from} would copy inside each data parallel group, and the"
            " replicas along 'tp' must begin alike: build the same model on every rank (same seed)"
        )
    refuse_inside("shard()")
    checks.check_model(model)
    named = named_parameters_once(model)
    for pattern in settings.matrix_parts or ():
        # another stage of a pipeline may have them
        if all(axis.alike for axis in mesh.others) and not checks.trained_like(pattern, named):
            raise ConfigError(f"matrix_parts: no trained parameter has a name like {pattern!r}")
    if call.optimizer is not None:
        checks.check_optimizer(call.optimizer, model, settings, is_first=mesh_axes.rank == 0)
    checks.check_dtensors(named, mesh_axes.mesh, mesh_axes.dims)
    precision = settings.resolved_precision()
    checks.check_precision(model, precision)
    dtypes = compute_dtypes(model, precision)
    checks.check_codecs(model, dtypes, settings)
    checks.check_leaves(model, settings, mesh_axes)
    plans = partition_units(
        model, settings.units, own_meshes=[own.pattern for own in mesh_axes.own]
    )
    checks.check_own_meshes(model, plans, mesh_axes, mesh, settings, call.sync_from)
    checks.check_renormed(model, plans, dtypes, settings)
    owned = _owned(model, call.optimizer, settings)
    cut = _cut(settings, owned, None if shares is None else shares_of(shares))
    compared = call.first_report() | settings_report(common, mesh_axes, node_size)
    return ShardRequest(
        model=model,
        settings=settings,
        common=common,
        policy=_budgeted(settings, cut, plans, mesh, mesh_axes, dtypes),
        shares=cut,
        owned=owned,
        mesh=mesh,
        dtypes=dtypes,
        plans=plans,
        report=Report.of(call, dtypes, plans, owned, compared),
    )


def _owned(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Config
) -> WholeParameters:
    """Return which parameters ranks own whole: all, but for what an elementwise one of several
    optimizers steps beside others, and what one steps by blocks. Raises ConfigError for
    `matrix_parts` that are not of the model's parameters.
    """
    named, cut, blocks = named_parameters_once(model), set[str](), set[str]()
    parts = checks.matrix_parts(named, settings)
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in named.items()}
        every = each_of(optimizer)
        for one in every:
            for index, group in enumerate(one.param_groups):
                members = [names[id(p)] for p in group["params"] if p.requires_grad]
                if is_elementwise(one):
                    cut.update(members if not all(map(is_elementwise, every)) else ())
                elif settings.ownership and cuts_blocks(one, index):
                    rows = (name for name in members if named[name].is_contiguous())
                    blocks.update(name for name in rows if has_blocks(named[name].numel()))
    parts = {name: rows for name, rows in parts.items() if name not in cut | blocks}
    owned = WholeParameters(frozenset(cut), blocks=frozenset(blocks), parts=tuple(parts.items()))
    matrices = {
        name
        for name, parameter in named.items()
        if all(len(shape) == 2 for shape in owned.shapes(name, tuple(parameter.shape)))
    }
    return replace(owned, matrices=frozenset(matrices - cut - blocks))


def _cut(
    settings: Config, owned: WholeParameters, shares: Shares | None
) -> Shares | WholeParameters | None:
    """Return what the ranks have of what is sharded: what is `owned` as `settings` say, or
    `shares`.
    """
    if settings.ownership == "whole":
        return replace(owned, matrices=frozenset())
    return owned if settings.ownership else shares


def changed_request(request: ShardRequest, common: Config, mesh_axes: MeshAxes) -> ShardRequest:
    """Return `request` with other `common` settings, over other `mesh_axes`: units and dtypes are
    the same, and so are shares that were measured. Raises ConfigError.
    """
    settings, mesh, node_size = _rank_settings(common, mesh_axes)
    checks.check_codecs(request.model, request.dtypes, settings)
    checks.check_renormed(request.model, request.plans, request.dtypes, settings)
    measured = request.shares if isinstance(request.shares, tuple) else None
    if not isinstance(common.shares, str):
        measured = None if common.shares is None else shares_of(common.shares)
    shares = _cut(common, request.owned, measured)
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
    checks.check_per_rank(common, mesh_axes.size, mesh_axes)
    common.batch_sizes(mesh_axes.size)
    common.unequal_shares(mesh_axes.size)
    common.leaves_of(mesh_axes.size)
    settings = common.at(mesh_axes.rank)
    node_size = checks.node_size_of(settings, mesh_axes.dims)
    mesh = Mesh.of(mesh_axes.size, node_size, mesh_axes.dims.others)
    checks.check_nodes(mesh, settings)
    return settings, mesh, node_size


def _budgeted(
    settings: Config,
    shares: Shares | WholeParameters | None,
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
    align = settings.comm.codecs().align
    sizes_of = partial(
        gradient_bytes,
        dtypes=dtypes,
        precision=settings.resolved_precision(),
        dealer=dealer_of(plans, meshes, dtypes, shares, align),
        align=align,
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
