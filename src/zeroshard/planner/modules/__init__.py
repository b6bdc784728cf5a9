"""``zs.plan``: a model, as a module, a number or a file, planned on a machine before any launch.

What the planner cannot know without torch is here: which units ``shard`` would cut a module into,
and in which dtypes their parameters would compute (shapes.py). ``zs.shard`` imports it for
policy="auto" alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.planner import Axes, Machine, ModelShape, Plan, Training, describe, make_plan
from zeroshard.planner.modules.shapes import shape_of_module, shape_of_path, shape_with_activations

__all__ = ["plan", "shape_of_module", "shape_with_activations"]


def plan(
    model: nn.Module | ModelShape | str | Path,
    machine: Machine | None = None,
    training: Training | None = None,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    axes: Axes | None = None,
) -> Plan:
    """Plan every row of the policy table for `model` on `machine`, before any launch.

    `model` is a module (its parameters may be deferred), a number of parameters ("7.5B"), or the
    path of a Transformers ``config.json``, of safetensors or of a directory of them. `machine`
    (default: one H100) is made by ``zs.Machine.of("A100-80", gpus=64)``; `training` (default:
    ``zs.Training()``) says precision, optimizer and batch. `inputs` is an example of what a
    module's forward takes for one micro-batch, a tuple or a dict of keywords, in tensors of any
    kind: with it activations are traced on fake tensors. `loss(output)` is what the backward starts
    from; without it ``output.loss``, or the sum of the first tensor. A Transformers model is traced
    without either. `axes` (``zs.Axes(tp=4, pp=2)``, or "auto" for a number) add tensor and pipeline
    parallelism to data parallelism; `training` then describes one pipeline. Bytes at rest and on
    the wire are what ``engine.memory()`` and ``engine.traffic()`` will report; peaks and times are
    modelled (docs/planner.md).

        plan = zs.plan("7.5B", zs.Machine.of("V100-32", gpus=64))
        plan.recommended.row, plan.recommended.reason
        zs.shard(model, optimizer, config=plan.config())

    Raises ConfigError for a model or a size that cannot be understood, for `axes` that do not fit
    the machine or the model, and for `inputs` with which the module does not run.
    """
    chosen = Training() if training is None else training
    if isinstance(model, nn.Module):
        shape = shape_with_activations(model, chosen, inputs, loss)
    elif isinstance(model, ModelShape):
        shape = model
    else:
        suffixes = (".json", ".safetensors")
        is_path = isinstance(model, Path) or model.endswith(suffixes) or Path(model).exists()
        shape = shape_of_path(Path(model), chosen) if is_path else describe(str(model))
    where = Machine.of() if machine is None else machine
    return make_plan(shape, where, chosen, axes=axes)
