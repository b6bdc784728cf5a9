"""The facts about a call of `shard()` that the ranks compare, as text: the settings, the model, the
options of the param groups, and the initial values.

    settings    the same on every rank of the mesh
    model       the same on every data parallel rank, and on replicas (plain parameters along 'tp')
    values      a digest of each; of a deferred model they may differ, where files overwrite them

Entries stand in order of importance: the first difference is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.comm.device_mesh import MeshAxes
from zeroshard.comm.ranks import Groups, Meeting
from zeroshard.config import Config
from zeroshard.core.digest import digest_of, holders
from zeroshard.core.precision import dtype_name
from zeroshard.nn.deferred import fingerprint_of
from zeroshard.runtime.build import Dtypes
from zeroshard.runtime.units import UnitPlan, named_parameters_once
from zeroshard.state.local import local_of, part_of, whole_shape

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
        cls, call: Call, dtypes: Dtypes, plans: Sequence[UnitPlan], settings: dict[str, str]
    ) -> Report:
        """Return the report about a `call` whose model is cut into `plans`."""
        model, named = call.model, named_parameters_once(call.model)
        groups = {own.pattern: own.holders.groups for own in call.mesh_axes.own}
        report = _model_report(model, call.optimizer, dtypes, plans)
        values = _initial_values(model) if call.sync_from is None else {}
        if values and any(fingerprint_of(parameter) is not None for parameter in named.values()):
            report["a deferred model"] = "yes"
        else:
            report, values = report | values, {}
        return cls(
            settings,
            report,
            values,
            frozenset(_initial(name) for name, p in named.items() if part_of(name, p).axes),
            {
                _initial(p): groups[one.pattern]
                for one in plans
                if one.pattern
                for p in one.parameters
            },
        )

    def bring(self, meeting: Meeting) -> None:
        """Let the data parallel ranks compare it in a `meeting`, whose answers `compare` takes."""
        meeting.compare(self.settings | self.model)
        meeting.within.update(self.within)
        known = self.values | self.model
        names = known.keys() - self.parts
        meeting.give([self.values, {name: known[name] for name in self.within if name in names}])

    def compare(
        self, answers: Sequence[Any], along_axes: Meeting, replicas: Groups
    ) -> dict[str, str]:
        """Return which values of a deferred model differ between the data parallel ranks, and how;
        let these ranks be compared with those along the other axes, of which `replicas` hold the
        same parameters.
        """
        values, of_some = zip(*answers, strict=True)
        differences = _differing(values, self.within)
        along_axes.compare(self.settings)
        along_axes.compare(self._alike(differences, of_some), replicas)
        return differences

    def _alike(
        self, differences: Mapping[str, str], of_some: Sequence[Mapping[str, str]]
    ) -> dict[str, str]:
        """Return what is the same on replicas, as every rank of a group says it: of parameters that
        `of_some` ranks hold, given by each, one digest.
        """
        left_out = self.within.keys() | differences.keys() | self.parts
        known = self.values | self.model
        alike = {name: text for name, text in known.items() if name not in left_out}
        if self.within:
            mine = [[t for name, t in one.items() if name not in differences] for one in of_some]
            digest = hashlib.blake2b(json.dumps(mine).encode(), digest_size=8).hexdigest()
            alike["initial values of parameters with a mesh of their own"] = digest
        return alike


def settings_report(settings: Config, mesh_axes: MeshAxes, node_size: int | None) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, in order of importance."""
    report = {
        "policy": settings.at(mesh_axes.rank).resolved_policy().name,
        "shares": str(settings.shares),
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
) -> dict[str, str]:
    """Return what of the model must be equal on all of its ranks, in order of importance."""
    report: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, parameter in named_parameters_once(model).items():
        names[id(parameter)] = name
        dtype = dtype_name(dtypes.of[id(parameter)])
        kind = "trained" if parameter.requires_grad else "frozen"
        report[f"parameter {name}"] = f"{whole_shape(parameter)} {dtype} {kind}"
    for plan in plans:
        report[f"unit {plan.name}"] = ", ".join(plan.parameters)
    report["optimizer"] = type(optimizer).__name__
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        params = [names[id(parameter)] for parameter in group["params"]]
        report[f"optimizer param group {index}"] = ", ".join(params)
        for key, value in group.items():
            if key not in ("params", "param_names"):
                report[f"optimizer param group {index}: {key}"] = repr(value)
    return report


def _initial_values(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter's values, or of how they will be computed."""
    values: dict[str, str] = {}
    for name, parameter in named_parameters_once(model).items():
        recipe = fingerprint_of(parameter)
        value = digest_of(local_of(parameter)) if recipe is None else f"deferred {recipe}"
        values[_initial(name)] = value
    return values


def _differing(
    everyone: Sequence[Mapping[str, str]], within: Mapping[str, Groups]
) -> dict[str, str]:
    """Return the entries that are not the same on every rank (or `within` groups of ranks), with
    who holds what; all have the same names.
    """
    found: dict[str, str] = {}
    all_ranks = (tuple(range(len(everyone))),)
    for name in everyone[0]:
        for ranks in within.get(name, all_ranks):
            texts = [everyone[rank][name] for rank in ranks]
            if len(set(texts)) > 1:
                found.setdefault(name, holders(texts, ranks))
    return found


def _initial(name: str) -> str:
    """Return what reports call the initial value of a parameter."""
    return f"initial value of {name}"


def errors_by_id(model: nn.Module, differences: Mapping[str, str]) -> dict[int, str]:
    """Return, by parameter id, the error message for values that differ between ranks."""
    remedy = f"{REMEDY}, or give it values with zs.load_pretrained() before its first use"
    named = named_parameters_once(model).items()
    keys = {_initial(name): id(parameter) for name, parameter in named}
    return {
        keys[name]: f"the ranks disagree, first about {name!r}: {who}. {remedy}"
        for name, who in differences.items()
    }
