"""Checkpoints of models laid out over meshes: (dp, tp, pp) in any sizes, the same numbers by name.

A layout cuts one model: along 'tp' by ``parallelize_module``, along 'pp' into stages that keep the
names of the whole model, over the data parallel ranks by zeroshard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroshard as zs
from tests.support.tensor_parallel import Case, mesh_of, micro_batches
from tests.support.training import two_groups
from zeroshard.checkpoint.steps import step_path
from zeroshard.formats.export import export


@dataclass(frozen=True)
class Layout:
    """How a run is laid out; axes in the order of the mesh."""

    sizes: tuple[tuple[str, int], ...]
    row: str = "zero3"
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, row: str = "zero3", options: dict[str, Any] | None = None, **sizes: int) -> Layout:
        """Return the layout with an axis per keyword."""
        return cls(tuple(sizes.items()), row, tuple((options or {}).items()))


@dataclass
class Run:
    """One run of one layout."""

    case: Case
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    engine: zs.Engine

    def train(self, steps: range) -> None:
        """Train; not along 'pp', where no stage is a model."""
        for step in steps:
            for x, y in micro_batches(self.engine.rank, step, self.case.vocabulary):
                with self.case.around_loss():
                    self.engine.backward(self.model(x, y))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return zs.save(
            folder, self.engine, step=step, states={"schedule": self.schedule}, **options
        )

    def load(self, folder: Path, **options: Any) -> zs.Restored:
        return zs.load(folder, self.engine, states={"schedule": self.schedule}, **options)


def begin(
    case: Case,
    layout: Layout,
    stages: Callable[[nn.Module, int, int], None] | None = None,
    *,
    zeros: bool = False,
) -> Run:
    """Begin a run of `case`; `stages` leaves one of several stages of a model. With `zeros` all
    values are 0: those that a load brings are seen.
    """
    mesh = mesh_of(**dict(layout.sizes))
    names = dict(layout.sizes)
    model = case.model()
    if names.get("pp", 1) > 1:
        assert stages is not None
        stages(model, mesh.get_local_rank("pp"), names["pp"])
    if names.get("tp", 1) > 1:
        model = parallelize_module(model, mesh["tp"], case.plan())
    if zeros:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    optimizer = two_groups(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    engine = zs.shard(model, optimizer, mesh=mesh, policy=layout.row, **dict(layout.options))
    return Run(case, mesh, model, optimizer, schedule, engine)


def exported(folder: Path, step: int, out: Path) -> dict[str, torch.Tensor]:
    """Return everything in a step whole, by name: masters, and states as "NAME|KEY"."""
    export(step_path(folder, step), out, "torch")
    content = torch.load(out, weights_only=True)
    found: dict[str, torch.Tensor] = dict(content["model"])
    for name, state in content["optimizer"].items():
        found |= {f"{name}|{key}": torch.as_tensor(value) for key, value in state.items()}
    for group in content["param_groups"]:
        for name in group["params"]:
            found[f"{name}|decay"] = torch.tensor(group["weight_decay"])
    return found
