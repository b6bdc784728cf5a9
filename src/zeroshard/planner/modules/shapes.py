"""A module as the planner sees it: the units that ``shard`` would cut it into, the dtypes in which
their parameters would compute, and its activations, traced where it can run. A family that is not
known in closed form (families.py) is built as a module, by Transformers' class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeroshard.core.precision import PRECISIONS, dtype_name
from zeroshard.errors import ConfigError
from zeroshard.planner.families import (
    config_of,
    is_foreign,
    positions_of,
    read_config,
    read_model,
    shape_of_config,
)
from zeroshard.planner.model import Decoder, GroupShape, ModelShape, UnitShape, fitted
from zeroshard.planner.modules.activations import trace_activations
from zeroshard.planner.training import Training
from zeroshard.runtime.build import compute_dtypes
from zeroshard.runtime.units import UnitPlan, partition_units


def shape_with_activations(
    model: nn.Module,
    training: Training,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> ModelShape:
    """Return `shape_of_module` with its activations, traced where that is possible; its note says
    how they are known. Raises ConfigError where the module does not run with `inputs`.
    """
    shape, given = shape_of_module(model, training), inputs is not None
    if inputs is not None:
        shape = replace(shape, inputs=_token_ids(inputs))
    training = fitted(shape, training)[1]
    if inputs is None and getattr(model, "main_input_name", None) == "input_ids":  # Transformers
        tokens = torch.empty(training.batch, training.sequence, dtype=torch.int64, device="meta")
        inputs = {"input_ids": tokens, "labels": tokens}
    if inputs is None:
        known = "in closed form" if shape.decoder is not None else "not known: no inputs were given"
        return replace(shape, note=f"activations {known}")
    try:
        with _checkpointing(model, training.checkpointing and not given):
            trace = trace_activations(model, shape, training, inputs, loss)
    except Exception as error:  # whatever the model's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if given:
            raise ConfigError(f"{type(model).__name__} does not run on inputs: {reason}") from error
        known = "not known" if shape.decoder is None else "in closed form"
        return replace(shape, note=f"activations {known}: the model could not be traced ({reason})")
    if not given and shape.decoder is None:  # token ids were made above
        shape = replace(shape, inputs=(training.batch, training.sequence))
    return replace(shape, note="activations traced", trace=trace)


def _token_ids(inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the shape of the token ids that `inputs` begin with, None where they do not."""
    first = next((one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)), None)
    if first is None or first.dim() != 2 or first.dtype not in (torch.int32, torch.int64):
        return None
    return first.shape[0], first.shape[1]


@contextmanager
def _checkpointing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Have a Transformers model recompute its layers inside, if `wanted`; others do so by
    themselves.
    """
    checkpoints: Any = model
    if not wanted or checkpoints.is_gradient_checkpointing:
        yield
        return
    checkpoints.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        checkpoints.gradient_checkpointing_disable()


def shape_of_module(model: nn.Module, training: Training, spec: Any = None) -> ModelShape:
    """Return `model` as the planner sees it, in the units that ``shard(units=spec)`` would cut.

    A model of Transformers brings its config with it, from which activations follow.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model to plan is an nn.Module, not a {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    dtypes = compute_dtypes(model, PRECISIONS[training.precision]).of
    units, plans = [], partition_units(model, spec)
    uses = _uses(model, plans)
    for number, unit in enumerate(plans):
        groups: dict[tuple[str, bool], list[tuple[str, tuple[int, ...]]]] = {}
        for name, parameter in unit.parameters.items():
            if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
                raise ConfigError(
                    f"parameter {name!r} is {parameter.dtype}: plans know fp32, bf16 and fp16; plan"
                    " the model without quantization, and name a row to shard this one"
                )
            key = (dtype_name(dtypes[id(parameter)]), parameter.requires_grad)
            groups.setdefault(key, []).append((name, tuple(parameter.shape)))
        shapes = (GroupShape(tuple(part), *key) for key, part in groups.items())
        units.append(UnitShape(unit.name, tuple(shapes), uses[number]))

    decoder, used, positions = None, None, None
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict):
        fields: dict[str, Any] = to_dict()
        positions = positions_of(fields)
        decoder, used = _decoder(fields, type(model).__name__)
    return ModelShape(
        type(model).__name__,
        tuple(units),
        decoder,
        used,
        tokenwise=decoder is not None,
        positions=positions,
    )


def _decoder(fields: dict[str, Any], where: str) -> tuple[Decoder | None, int | None]:
    """Return the decoder that the `fields` of a config.json describe, and how many parameters a
    token uses; a model with images beside text counts its text alone.
    """
    text = fields.get("text_config")
    try:
        known = shape_of_config(text if isinstance(text, dict) else fields, where)
    except ConfigError:  # not a family that is known in closed form
        return None, None
    return known.decoder, known.numel if known.used_numel is None and text else known.used_numel


def _uses(model: nn.Module, plans: Sequence[UnitPlan]) -> Counter[int]:
    """Return how often a forward comes to each unit: once, and again wherever a parameter of it is
    another module's, too, and other units lie between (in the order of definition).
    """
    unit_of = {id(p): number for number, plan in enumerate(plans) for p in plan.parameters.values()}
    uses, seen, last = Counter(range(len(plans))), set[int](), -1
    for _, parameter in model.named_parameters(remove_duplicate=False):
        number = unit_of[id(parameter)]
        uses[number] += id(parameter) in seen and number != last
        seen.add(id(parameter))
        last = number
    return uses


# -------------------------------------------------------------- a config.json built by Transformers
# Without memory; no code that a model brings with it is run, and nothing is loaded from elsewhere.

# in the order in which they are tried; "": whatever else there is
_HEADS = ("CausalLM", "ImageTextToText", "Seq2SeqLM", "MaskedLM", "")


def shape_of_path(path: Path, training: Training) -> ModelShape:
    """Return the model that `path` describes: see `read_model`, beside which a config.json may name
    any family that Transformers has, where it is installed. Raises ConfigError.
    """
    config = config_of(path)
    if config is None or not is_foreign(path):
        return read_model(path)
    fields, where = read_config(config), str(config)
    model = _build(fields, where)
    if model is None and any(path.glob("*.safetensors")):
        return read_model(path)
    if model is None:
        raise ConfigError(
            f"{where}: neither zeroshard nor the Transformers that is installed knows"
            f" model_type={fields['model_type']!r}: give --params, or --model"
            " package.module:factory"
        )
    with _quiet():
        return shape_with_activations(model, training)


def _build(fields: dict[str, Any], where: str) -> nn.Module | None:
    """Return the model of a config.json's `fields`, without memory; None where Transformers has
    none.
    """
    import transformers

    heads = (*(("ImageTextToText",) if "vision_config" in fields else ()), *_HEADS)
    if fields["model_type"] not in transformers.CONFIG_MAPPING:
        return None
    try:
        rest = {name: value for name, value in fields.items() if name != "model_type"}
        with _quiet(), torch.device("meta"):
            config = transformers.AutoConfig.for_model(fields["model_type"], **rest)
            for head in heads:
                auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
                if type(config) in auto._model_mapping:
                    model: nn.Module = auto.from_config(config, dtype=torch.float32)
                    return model
    except Exception as error:  # whatever Transformers says of a config
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(f"{where}: Transformers does not build it: {reason}") from error
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave Transformers' warnings out: of token ids, losses, and what is no question of sizes."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
