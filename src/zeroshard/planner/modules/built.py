"""A model of a family that is not known in closed form, as Transformers' class builds it from the
config.json, without memory.

What it does not do: run code that a model brings with it, or load anything from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ConfigError
from zeroshard.planner.config_fields import read_config
from zeroshard.planner.model import ModelShape
from zeroshard.planner.model_files import config_of, is_foreign, read_model
from zeroshard.planner.modules.shapes import shape_with_activations
from zeroshard.planner.training import Training

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
