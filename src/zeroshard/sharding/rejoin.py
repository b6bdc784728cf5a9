"""The facts that a rank needs beside the states to come back to an engine (``engine.repartition``):
options of param groups, counts, the loss scale, the random generators.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.checkpoint.rank_part import encoded_options, generators, restore_generators
from zeroshard.checkpoint.values import decode, encode
from zeroshard.runtime.engine import Engine, parts_of

_log = logging.getLogger("zeroshard")


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
        if hasattr(parts.sharded.optimizer.step, "_wrapped_by_lr_sched"):
            _log.warning(
                "rank %d comes back, and its learning rate scheduler stood still while it was away:"
                " load the state_dict() of that of a rank that stayed before the next"
                " scheduler.step()",
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
