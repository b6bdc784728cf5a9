"""Whether an optimizer can go on from state that was read from somewhere, found out before
anything of its own changes.

A copy of the optimizer steps a few elements of our own twice: the state that it keeps then says
which keys it needs and of which kind each is.

Invariant: the user's optimizer, its parameters, state and hooks, and torch's random number
generators are as they were. Cost: two steps of a few elements per param group.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroshard.optim.elementwise import bare_copy, unhooked_step

__all__ = ["fitted_state", "state_after_trial"]

_NUMEL = 64
_NUM_STEPS = 2  # some rules make a buffer at the second step only


def state_after_trial(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Return the state that `optimizer` keeps of a parameter of its own of `dtype` on `device`,
    in a param group of `options`.

    Raises whatever a step with these options raises.
    """
    parameter = nn.Parameter(torch.ones(_NUMEL, dtype=dtype, device=device))
    clone = bare_copy(optimizer)
    clone.param_groups = [{**copy.deepcopy(dict(options)), "params": [parameter]}]
    clone.state = defaultdict(dict)
    step = unhooked_step(type(clone))
    with (
        torch.random.fork_rng(
            devices=[device] if device.type == "cuda" else [], device_type="cuda"
        ),
        torch.enable_grad(),
    ):
        for _ in range(_NUM_STEPS):
            parameter.grad = torch.ones_like(parameter)
            step(clone)
    return dict(clone.state[parameter])


def fitted_state(state: Mapping[str, Any], trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` in the dtypes and on the devices of `trial`, the state of another
    parameter; empty state stays empty.

    Raises ValueError saying which key is missing, or of which kind it is and should be.
    """
    missing = [key for key in trial if key not in state]
    if state and missing:
        raise ValueError(f"{missing[0]!r} is missing")
    return {
        key: _fitted(key, value, trial[key]) if key in trial else value
        for key, value in state.items()
    }


def _fitted(key: str, value: Any, model: Any) -> Any:
    if _kind(value) != _kind(model):
        raise ValueError(f"{key!r} is {_kind(value)}, not {_kind(model)}")
    return value.to(model.device, model.dtype) if isinstance(model, torch.Tensor) else value


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        numbers = (
            "floating point"
            if value.is_floating_point()
            else "complex"
            if value.is_complex()
            else str(value.dtype).removeprefix("torch.")
        )
        return f"a tensor of {numbers}" if value.dim() else f"a tensor of one number, {numbers}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a plain number"
    return f"a {type(value).__name__}"
