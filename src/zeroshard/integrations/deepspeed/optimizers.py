"""The optimizer of a configuration's ``optimizer`` section, DeepSpeed's own classes, and what
``initialize()`` returns in the place of an optimizer.

All of them are torch.optim's classes: zeroshard steps shards of them on whatever tier they rest, so
an Adam for the CPU and one for CUDA are the same here, and a checkpoint of one loads in the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import zeroshard as zs

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLion",
    "Lion",
    "ZeROOptimizer",
    "make_optimizer",
]

_ONE_BIT = (
    "compresses what it sends by itself: take AdamW, and zero_quantized_gradients"
    " (comm.grad_codec), which compresses gradients under every optimizer"
)
_NORMS = "scales by norms of whole parameters, and ZeRO steps pieces of them: take AdamW"
_WIDTHS = "needs the mup package's widths: build it yourself and pass optimizer= to initialize()"
_REFUSED = {
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "lamb": _NORMS,
    "muon": "orthogonalises whole matrices, and ZeRO steps pieces of them: take AdamW",
    "muadam": _WIDTHS,
    "muadamw": _WIDTHS,
    "musgd": _WIDTHS,
}


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, algorithm 2): the sign of an average of momentum and gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), rate = group["betas"], group["lr"]
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average, grad = state["exp_avg"], parameter.grad
        assert grad is not None
        parameter.mul_(1 - rate * group["weight_decay"])
        direction = (average * beta1).add_(grad, alpha=1 - beta1).sign_()
        parameter.add_(direction, alpha=-rate)
        average.mul_(beta2).add_(grad, alpha=1 - beta2)


def _adam(params: Any, *, decoupled: bool, **options: Any) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    if options.pop("bias_correction", True) is not True:
        raise zs.ConfigError("bias_correction=False is not supported: torch's Adam always corrects")
    options.pop("fp32_optimizer_states", None)
    options.setdefault("weight_decay", 0.0)  # DeepSpeed's default, for AdamW too
    return kind(params, **options)


class DeepSpeedCPUAdam:
    """Makes a torch.optim.AdamW, or an Adam where `adamw_mode` is off: where it steps is the
    configuration's ``offload_optimizer``.
    """

    def __new__(  # type: ignore[misc]
        cls, model_params: Any, *, adamw_mode: bool = True, **options: Any
    ) -> torch.optim.Optimizer:
        return _adam(model_params, decoupled=adamw_mode, **options)


class FusedAdam:
    """Makes a torch.optim.AdamW, or an Adam where `adam_w_mode` is off."""

    def __new__(  # type: ignore[misc]
        cls, params: Any, *, adam_w_mode: bool = True, **options: Any
    ) -> torch.optim.Optimizer:
        options.pop("set_grad_none", None)  # zero_grad() of sealed gradients is one thing
        return _adam(params, decoupled=adam_w_mode, **options)


class DeepSpeedCPUAdagrad:
    """Makes a torch.optim.Adagrad."""

    def __new__(cls, model_params: Any, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        options.pop("fp32_optimizer_states", None)
        return torch.optim.Adagrad(model_params, **options)


DeepSpeedCPULion = FusedLion = Lion

# beside Adam and AdamW, by their name in a configuration
_OTHERS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls for cls in (torch.optim.Adagrad, Lion)
}


def make_optimizer(kind: str, params: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """Build the optimizer of a configuration's section over `parameters`. Raises ConfigError.

    "Adam" means AdamW unless `adam_w_mode` is off, as in DeepSpeed. Other names are torch.optim's,
    and so are the defaults with `torch_adam`: AdamW then decays weights by 0.01, not by 0.
    """
    name = kind.lower()
    if name in _REFUSED:
        raise zs.ConfigError(f"optimizer.type={kind!r} {_REFUSED[name]}")
    if "max_grad_norm" in params:
        raise zs.ConfigError("optimizer.params.max_grad_norm: use gradient_clipping instead")
    make: Callable[..., torch.optim.Optimizer]
    options = dict(params)
    if name in ("adam", "adamw"):
        decoupled = bool(options.pop("adam_w_mode", True)) or name == "adamw"
        make = partial(_adam, decoupled=decoupled)
        if options.pop("torch_adam", False):
            make = torch.optim.AdamW if decoupled else torch.optim.Adam
    elif name in _OTHERS:
        make = _OTHERS[name]
        options.pop("fp32_optimizer_states", None)
    else:
        make = _torch_class(kind)
    try:
        return make(parameters, **options)
    except zs.ConfigError:
        raise
    except Exception as error:
        reason = str(error).partition("__init__() ")[2] or str(error) or type(error).__name__
        raise zs.ConfigError(f"optimizer.params of {kind}: {reason}") from None


def _torch_class(kind: str) -> Callable[..., torch.optim.Optimizer]:
    found = getattr(torch.optim, kind, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        raise zs.ConfigError(
            f"optimizer.type={kind!r} is neither Adam, AdamW,"
            f" {', '.join(other.__name__ for other in _OTHERS.values())} nor a class of torch.optim"
        )
    return found


class _NoHooks:
    """Where a program that takes DeepSpeed's hooks off for a generation looks for them: none are
    there, and gathered parameters need none taken off.
    """

    def __init__(self) -> None:
        self.module = self
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def named_parameters(self, recurse: bool = True) -> tuple[Any, ...]:
        """Return nothing."""
        return ()

    ds_external_parameters = named_parameters

    def _register_deepspeed_module(self, module: Any) -> None:
        """Do nothing."""


class ZeROOptimizer(torch.optim.Optimizer):
    """The sharded optimizer as DeepSpeed's clients know it. torch's schedulers take it as well."""

    def __init__(self, engine: zs.Engine) -> None:
        # not torch's __init__: groups, state and hooks are those of the optimizer inside
        assert engine.optimizer is not None
        self.optimizer = engine.optimizer
        self.overflow = False  # whether the last step was skipped
        self.parameter_offload = _NoHooks()
        self._engine = engine
        self._skipped = engine.steps_skipped

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """The fp16 loss scale, 1.0 in other precisions."""
        return self._engine.loss_scale

    cur_scale = loss_scale

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        # since the last step, not since this call: a clip finds the overflow
        self.overflow = self._engine.steps_skipped > self._skipped
        self._skipped = self._engine.steps_skipped
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part; save_checkpoint() writes a whole one."""
        return self._engine.optimizer_part()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def quantize_nontrainable_params(self) -> None:
        """Do nothing: frozen weights are encoded from the start (comm.frozen_codec)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"ZeROOptimizer({self.optimizer!r})"
