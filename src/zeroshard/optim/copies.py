"""Copies of the user's optimizer, to step parameters of our own or some of the user's, and its
modes.

``TileOptimizer``: the user's ``optimizer.step()`` walks all param groups at once; state that rests
on another tier can only be stepped a tile at a time. This is the same optimizer (class, attributes)
with param groups and state of its own, so that it may step other parameters, in another thread,
while the user's own step goes on. Options that a step itself changes in its group (a counter) are
changed once per step, by the user's own call.

``state_after_trial``: whether an optimizer can go on from state that was read from somewhere, found
out before anything of its own changes. A copy steps a few elements of our own twice: the state that
it keeps then says which keys it needs and the kind of each.

Invariant: the user's optimizer, its parameters, options, state and hooks, and torch's random number
generators are as they were. Cost: a copy of each group's dictionary per tile; two steps of a few
elements per param group for a trial.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zeroshard.system.device import undisturbed

_NUMEL = 64
_NUM_STEPS = 2  # some rules make a buffer at the second step only


class TileOptimizer:
    """A stand-in for `optimizer` with the options that its groups have now; `off_device`: it
    steps on the host what computes on an accelerator.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, off_device: bool) -> None:
        self._step = unhooked_step(type(optimizer))
        self._clone = object.__new__(type(optimizer))
        vars(self._clone).update(_attributes(optimizer))
        self._options = [_options(group, off_device) for group in optimizer.param_groups]

    def step(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        states: dict[torch.Tensor, dict[str, Any]],
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """Step `parameters`, by the index of their param group, with their `states`; return the
        states afterwards.
        """
        self._clone.param_groups = [
            {**dict(self._options[index]), "params": list(members)}
            for index, members in parameters.items()
        ]
        self._clone.state = defaultdict(dict, states)
        self._step(self._clone)
        return self._clone.state


def _options(group: Mapping[str, Any], off_device: bool) -> dict[str, Any]:
    """Return a group's options for a step on the host.

    A model on an accelerator leaves the choice of kernel to torch, which on the host takes the
    slowest: the fused one is asked for there.
    """
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if not off_device:
        return options
    for key, value in options.items():
        if isinstance(value, torch.Tensor):
            options[key] = value.cpu()
    if (
        "fused" in options
        and not options["fused"]
        and not options.get("foreach")
        and not options.get("differentiable")
    ):
        options["fused"] = True
    return options


def unhooked_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Return the class's ``step`` without torch's wrapper around it, which runs the hooks
    registered for all optimizers.
    """
    step: Any = cls.step
    hooked = getattr(step, "hooked", False) and hasattr(step, "__wrapped__")
    return step.__wrapped__ if hooked else step  # type: ignore[no-any-return]


def set_training(optimizer: torch.optim.Optimizer) -> None:
    """Call the ``train()`` of an optimizer that has one: some step only then (schedule-free)."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy without state, groups and hooks, which reaches nothing of the user's.

    By hand: copy.copy() would keep the three attributes of ``Optimizer.__getstate__`` and lose a
    subclass's own. Attributes are copied deeply, but wherever they lead to a parameter of the
    user's they find a placeholder on the meta device.
    """
    clone = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): clone}
    for group in optimizer.param_groups:
        for param in group["params"]:
            memo[id(param)] = nn.Parameter(
                torch.empty(param.shape, dtype=param.dtype, device="meta"),
                requires_grad=param.requires_grad,
            )
    vars(clone).update(copy.deepcopy(_attributes(optimizer), memo))
    return clone


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that a copy without state and groups needs, with no hooks.

    Attributes that shadow methods are left out: every LR scheduler puts its own ``step`` there.
    """
    return {
        name: OrderedDict() if name.startswith("_optimizer_") and name.endswith("_hooks") else value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups")
        and not callable(getattr(type(optimizer), name, None))
    }


def state_after_trial(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    home: torch.device,
) -> dict[str, Any]:
    """Return the state that `optimizer` keeps of a parameter of its own of `dtype` on `device`,
    in a param group of `options`, where the model computes on `home`.

    Raises whatever a step with these options raises.
    """
    parameter = nn.Parameter(torch.ones(_NUMEL, dtype=dtype, device=device))
    clone = bare_copy(optimizer)
    own = copy.deepcopy(_options(options, off_device=device.type != home.type))
    clone.param_groups = [{**own, "params": [parameter]}]
    clone.state = defaultdict(dict)
    set_training(clone)
    step = unhooked_step(type(clone))
    with undisturbed(device), torch.enable_grad():
        for _ in range(_NUM_STEPS):
            parameter.grad = torch.ones_like(parameter)
            step(clone)
    return dict(clone.state[parameter])


def fitted_state(state: Mapping[str, Any], trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` in the dtypes and on the devices of `trial`, the state of another
    parameter; empty state stays empty.

    Raises ValueError saying which key is missing, or what kind it is and should be.
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


# -------------------------------------------------------------------- modes of the user's optimizer
# Schedule-free optimizers (Defazio et al., The Road Less Scheduled, 2024) train at one point and
# evaluate at another, an average of where they have been. Their ``eval()`` moves the parameters
# there, and ``train()`` back, each element by itself. Here these parameters are shards of the
# masters, so the weights have to follow, on every rank, as after a step.


_MODES = ("train", "eval")


def hide_modes(
    optimizer: torch.optim.Optimizer, moving: Callable[[str], AbstractContextManager[None]]
) -> Iterator[Mode]:
    """Hide ``train()`` and ``eval()``, where the class has both, by ones that run inside
    ``moving``, which is given the call in words.
    """
    if all(callable(getattr(type(optimizer), name, None)) for name in _MODES):
        for name in _MODES:
            yield Mode(optimizer, name, moving)


class Mode:
    """An entry in an optimizer's instance dictionary that hides a method until it is removed."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str,
        moving: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._optimizer, self._name, self._moving = optimizer, name, moving
        self._own = vars(optimizer).get(name)
        self._method = getattr(optimizer, name)
        vars(optimizer)[name] = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self._moving(f"optimizer.{self._name}()"):
            return self._method(*arguments, **options)

    def remove(self) -> None:
        """Let the optimizer's own method be seen again."""
        del vars(self._optimizer)[self._name]
        if self._own is not None:
            vars(self._optimizer)[self._name] = self._own
