"""DeepSpeed's names for reading and setting one parameter's master, gradient and optimizer state,
whole or this rank's part: ``zeroshard.ParameterStates``.

    safe_get_full_fp32_param(param)                   safe_set_local_grad(param, value)
    safe_get_local_optimizer_state(param, "exp_avg")  ... two verbs, two extents, three states

All of them are collective, except that reading a part sends nothing (the first read of a gradient
in a step does). A plain parameter has a gradient, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.integrations.deepspeed.owners import engine_of

__all__ = ["SAFE"]

# by the end of the name: the accessor of ParameterStates, and a description
_STATES = {
    "fp32_param": ("master", "the fp32 master (a set master sets the weight, too)"),
    "grad": ("grad", "the averaged gradient, None (to a set: StateError) where there is none"),
    "optimizer_state": ("state", "state `optim_state_key`, None (to a set: StateError) before a"
                        " step, and for a key that the optimizer does not have"),
}  # fmt: skip


def _states(param: nn.Parameter) -> zs.ParameterStates:
    engine = engine_of(param)
    if engine is None:
        raise zs.ConfigError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine: give its model to"
            " initialize() first"
        )
    return zs.ParameterStates(engine, param)


def _accessor(verb: str, extent: str, ending: str) -> Callable[..., torch.Tensor | None]:
    """Return the function whose name has these three parts."""
    name, what = _STATES[ending]
    local = extent == "local"

    def get(param: nn.Parameter, optim_state_key: str = "") -> Any:
        if engine_of(param) is None:  # a plain parameter
            return param.grad if (name, local) == ("grad", False) else None
        key = [optim_state_key] if optim_state_key else []
        return getattr(_states(param), name)(*key, local=local)

    def put(param: nn.Parameter, value: torch.Tensor, optim_state_key: str = "") -> None:
        key = [optim_state_key] if optim_state_key else []
        getattr(_states(param), f"set_{name}")(*key, value, local=local)

    made = get if verb == "get" else put
    made.__name__ = made.__qualname__ = f"safe_{verb}_{extent}_{ending}"
    extents = {"full": "", "local": "this rank's part of "}
    made.__doc__ = f"{verb.title()} {extents[extent]}{what}."
    return made


SAFE = {
    f"safe_{verb}_{extent}_{ending}": _accessor(verb, extent, ending)
    for verb, extent, ending in itertools.product(("get", "set"), ("full", "local"), _STATES)
}


def __getattr__(name: str) -> Any:
    if name not in SAFE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return SAFE[name]
