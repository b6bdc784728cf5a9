"""What a rank that comes back to an engine (``engine.repartition``) has to know beside the states:
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

__all__ = ["carried", "take_over"]

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
        "steps": None if sharded is None else [sharded.taken, sharded.runner.num_steps],
        "generators": _generators(),
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
        _restore_generators(known["generators"])


def _generators() -> dict[str, Any]:
    """Return the random generators' states as JSON."""
    tensors: dict[str, torch.Tensor] = {}

    def store(path: str, tensor: torch.Tensor) -> str:
        tensors[path] = tensor
        return path

    found = encode(generators(), "random generators", store)
    data = {
        path: [
            base64.b64encode(tensor.cpu().contiguous().numpy().tobytes()).decode(),
            str(tensor.dtype).removeprefix("torch."),
        ]
        for path, tensor in tensors.items()
    }
    return {"state": found, "tensors": data}


def _restore_generators(carried: Mapping[str, Any]) -> None:
    def fetch(path: str) -> torch.Tensor:
        text, dtype = carried["tensors"][path]
        raw = bytearray(base64.b64decode(text))
        return torch.frombuffer(raw, dtype=getattr(torch, dtype))

    restore_generators(decode(carried["state"], fetch))


def _no_tensor(path: str) -> torch.Tensor:
    raise ValueError(f"{path} is no number")
