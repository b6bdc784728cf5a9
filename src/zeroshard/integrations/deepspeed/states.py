"""DeepSpeed's names for reading and setting one parameter's master, gradient and optimizer state,
whole or this rank's part: ``zeroshard.ParameterStates``.
"""

from __future__ import annotations

import torch
from torch import nn

import zeroshard as zs
from zeroshard.integrations.deepspeed.owners import engine_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


def _states(param: nn.Parameter) -> zs.ParameterStates:
    engine = engine_of(param)
    if engine is None:
        raise zs.ConfigError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine: give its model to"
            " initialize() first"
        )
    return zs.ParameterStates(engine, param)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master [the parameter's shape]; None for a plain parameter. Collective."""
    return None if engine_of(param) is None else _states(param).master()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged gradient; None where no rank used the parameter, or the step has taken
    it. Collective.
    """
    return param.grad if engine_of(param) is None else _states(param).grad()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return state `optim_state_key` ("exp_avg", ...); None before the first step, and for a key
    that the optimizer does not have. Collective.
    """
    return None if engine_of(param) is None else _states(param).state(optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master, and with it the weight. Collective."""
    _states(param).set_master(value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the averaged gradient. Collective; StateError without one."""
    _states(param).set_grad(value)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set state `optim_state_key`. Collective; StateError before a step."""
    _states(param).set_state(optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master, 1-D; empty where it has none."""
    return None if engine_of(param) is None else _states(param).master(local=True)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the averaged gradient. Collective, the first time in a step."""
    return None if engine_of(param) is None else _states(param).grad(local=True)


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Return this rank's part of an optimizer state; empty where it has none."""
    return None if engine_of(param) is None else _states(param).state(optim_state_key, local=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master, and with it the weight. Collective."""
    _states(param).set_master(value, local=True)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the averaged gradient. Collective, the first time in a step."""
    _states(param).set_grad(value, local=True)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set this rank's part of an optimizer state. Collective."""
    _states(param).set_state(optim_state_key, value, local=True)
