"""The optimizer of a configuration's ``optimizer`` section, DeepSpeed's own classes, and what
``initialize()`` returns in the place of an optimizer.

All of them are torch.optim's classes: zeroshard steps shards of them on whatever tier they rest, so
an Adam for the CPU and one for an accelerator are the same here, and a checkpoint of one loads in
the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.deepspeed.answers import as_config_error, attribute, call, torch_class
from zeroshard.deepspeed.comm import data_parallel_group
from zeroshard.deepspeed.shim import OPTIMIZER_REFUSED, remedy
from zeroshard.optim.copies import check_rule
from zeroshard.optim.several import JointOptimizer, each_of

_REFUSED = {  # by types in lower case
    "onebitadam zerooneadam onebitlamb":
        "compresses what it sends by itself: take AdamW, and zero_quantized_gradients"
        " (comm.grad_codec), which compresses gradients under every optimizer",
    "muadam muadamw musgd":
        "needs the mup package's widths: build it yourself and pass optimizer= to initialize()",
}  # fmt: skip


_Values = dict[str, Any]


class _ByParameter(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def update(self, parameter: Tensor, grad: Tensor, state: _Values, group: _Values) -> None:
        """Step one parameter."""
        raise NotImplementedError


class Lion(_ByParameter):
    """Lion (Chen et al., 2023, algorithm 2): the sign of an average of momentum and gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def update(self, parameter: Tensor, grad: Tensor, state: _Values, group: _Values) -> None:
        (beta1, beta2), rate = group["betas"], group["lr"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average = state["exp_avg"]
        parameter.mul_(1 - rate * group["weight_decay"])
        direction = (average * beta1).add_(grad, alpha=1 - beta1).sign_()
        parameter.add_(direction, alpha=-rate)
        average.mul_(beta2).add_(grad, alpha=1 - beta2)


class FusedLamb(_ByParameter):
    """LAMB (You et al., 2019, algorithm 2) with the arithmetic of DeepSpeed's kernel: the averages'
    bias is corrected in the rate, as in Adam's paper, and the ratio of the norms of weights and
    update is held between `min_coeff` and `max_coeff`.

    Options: eps (1e-8), eps_inside_sqrt (False), weight_decay (0), max_coeff (10), min_coeff
    (0.01); DeepSpeed's max_grad_norm and amsgrad only as they are without effect.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": tuple(betas)}
        defaults |= {"eps": 1e-8, "eps_inside_sqrt": False, "weight_decay": 0.0}
        defaults |= {"max_coeff": 10.0, "min_coeff": 0.01}
        if options.pop("max_grad_norm", 0.0) or options.pop("amsgrad", False):
            raise TypeError("FusedLamb neither clips (max_grad_norm) nor knows amsgrad")
        if unknown := options.keys() - defaults.keys():
            raise TypeError(f"FusedLamb has no option {min(unknown)!r}")
        super().__init__(params, defaults | options)

    def update(self, parameter: Tensor, grad: Tensor, state: _Values, group: _Values) -> None:
        (beta1, beta2), rate = group["betas"], group["lr"]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        average.mul_(beta1).add_(grad, alpha=1 - beta1)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["eps_inside_sqrt"]:
            scale = (squares + group["eps"]).sqrt_()
        else:
            scale = squares.sqrt().add_(group["eps"])
        update = (average / scale).add_(parameter, alpha=group["weight_decay"])
        size, change = parameter.norm(), update.norm()
        ratio = (size / change).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((size != 0) & (change != 0), ratio, 1.0)
        if group["bias_correction"]:
            rate = rate * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        parameter.sub_(update.mul_(ratio * rate))


def _adam(params: Any, mode: str, **options: Any) -> torch.optim.Optimizer:
    """Make an AdamW, or an Adam where the option `mode` is off."""
    kind = torch.optim.AdamW if options.pop(mode, True) else torch.optim.Adam
    if options.pop("bias_correction", True) is not True:
        raise zs.ConfigError("bias_correction=False is not supported: torch's Adam always corrects")
    options.pop("fp32_optimizer_states", None)
    options.setdefault("weight_decay", 0.0)  # DeepSpeed's default, for AdamW too
    return kind(params, **options)


def mark_for_muon(model: nn.Module) -> None:
    """Set `use_muon` of each parameter as DeepSpeed does: matrices, but for embeddings and head."""
    for name, parameter in model.named_parameters():
        is_end = any(word in name.lower() for word in ("embed", "lm_head"))
        vars(parameter)["use_muon"] = parameter.ndim >= 2 and not is_end


def steps_whole(optimizer: Any) -> bool:
    """Whether ranks must own whole parameters for what `optimizer` does: it steps those, and not
    pieces of them, with the bits of one process. False of what cannot be sharded at all.
    """
    found = False
    for one in each_of(optimizer):
        try:
            check_rule(one)
        except zs.ConfigError:
            try:
                check_rule(one, whole=True)
            except zs.ConfigError:
                return False
            found = True
    return found


class MuonWithAuxAdam(JointOptimizer):
    """Muon and AdamW over one model, by the name that DeepSpeed gives to both."""


def _muon(
    params: Any, *, muon_lr: Any = None, adam_lr: Any = None, ns_method: str = "gram",
    adam_w_mode: bool = True, torch_adam: bool = False, per_head_muon: bool = False, **options: Any,
) -> torch.optim.Optimizer:  # fmt: skip
    """Make a torch.optim.Muon of the parameters with `use_muon` and an AdamW of the others, with
    DeepSpeed's defaults; of each group with options of its own.

    torch's Newton-Schulz iterates in bf16, as `ns_method` "standard" does; DeepSpeed's "gram"
    iterates in fp16 on the Gram matrix, and rounds otherwise.
    """
    if ns_method not in ("gram", "standard") or per_head_muon:
        what = "per_head_muon" if per_head_muon else f"ns_method={ns_method!r}"
        raise zs.ConfigError(f"optimizer.params.{what} is not supported: leave it out")
    defaults: dict[bool, dict[str, Any]] = {
        True: {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0},
        False: {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    }
    unknown = options.keys() - (defaults[True].keys() | defaults[False].keys())
    if unknown:
        raise zs.ConfigError(f"optimizer.params of Muon has no option {min(unknown)!r}")
    given = [*params]
    grouped = [one for one in given if isinstance(one, dict)]
    loose = [one for one in given if not isinstance(one, dict)]
    groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for group in [*grouped, *([{"params": loose}] if loose else [])]:
        for by_muon, chosen in ((True, muon_lr), (False, adam_lr)):
            lr = {} if chosen is None else {"lr": chosen}
            trained = [one for one in group["params"] if one.requires_grad]
            mine = [one for one in trained if getattr(one, "use_muon", False) is by_muon]
            own = {**defaults[by_muon], **options, **lr, **group, "params": mine}
            own["use_muon"] = by_muon  # programs read it
            keys = ("params", "use_muon", *defaults[by_muon])
            groups[by_muon] += [{key: own[key] for key in keys}] if mine else []
    made: list[torch.optim.Optimizer] = []
    if groups[True]:
        made.append(torch.optim.Muon(groups[True], eps=1e-7, adjust_lr_fn="original"))
    if groups[False]:
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        made.append(kind(groups[False]))
    return MuonWithAuxAdam(made) if len(made) > 1 else made[0]


class _Adam(type):
    """The class of classes that make torch's Adam and AdamW: of both `isinstance()` is true."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Adam)  # AdamW is one


class DeepSpeedCPUAdam(metaclass=_Adam):
    """Makes a torch.optim.AdamW, or an Adam where `adamw_mode` is off: where it steps is the
    configuration's ``offload_optimizer``.
    """

    def __new__(cls, model_params: Any, **options: Any) -> Any:
        return _adam(model_params, "adamw_mode", **options)


class FusedAdam(metaclass=_Adam):
    """Makes a torch.optim.AdamW, or an Adam where `adam_w_mode` is off."""

    def __new__(cls, params: Any, **options: Any) -> Any:
        options.pop("set_grad_none", None)  # zero_grad() of sealed gradients is one thing
        return _adam(params, "adam_w_mode", **options)


class DeepSpeedCPUAdagrad:
    """Makes a torch.optim.Adagrad."""

    def __new__(cls, model_params: Any, **options: Any) -> Any:
        options.pop("fp32_optimizer_states", None)
        return torch.optim.Adagrad(model_params, **options)


DeepSpeedCPULion = FusedLion = Lion

# beside Adam and AdamW, by their name in a configuration
_OTHERS: dict[str, type[torch.optim.Optimizer]] = {
    cls.__name__.lower(): cls for cls in (torch.optim.Adagrad, Lion)
}
_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **dict.fromkeys(("adam", "adamw"), partial(_adam, mode="adam_w_mode")),
    "lamb": FusedLamb,
    "muon": _muon,
    **_OTHERS,
}


def make_optimizer(kind: str, params: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """Build the optimizer of a configuration's section over `parameters`. Raises ConfigError.

    "Adam" means AdamW unless `adam_w_mode` is off, as in DeepSpeed. Other names are torch.optim's,
    and so are the defaults with `torch_adam`: AdamW then decays weights by 0.01, not by 0.
    """
    name = kind.lower()
    for names, why in _REFUSED.items():
        if name in names.split():
            raise zs.ConfigError(f"optimizer.type={kind!r} {why}")
    if "max_grad_norm" in params:
        raise zs.ConfigError("optimizer.params.max_grad_norm: use gradient_clipping instead")
    options = dict(params)
    make = _MAKERS.get(name)
    if make is None:
        known = ("Adam", "AdamW", "Lamb", "Muon", *(other.__name__ for other in _OTHERS.values()))
        make = torch_class(
            torch.optim, torch.optim.Optimizer, f"optimizer.type={kind!r}", kind, known
        )
    if name == "adamw":
        options["adam_w_mode"] = True
    if name in ("adam", "adamw") and options.pop("torch_adam", False):
        make = torch.optim.AdamW if options.pop("adam_w_mode", True) else torch.optim.Adam
    elif name in _MAKERS:
        options.pop("fp32_optimizer_states", None)
    with as_config_error(f"optimizer.params of {kind}"):
        return make(parameters, **options)


def _nothing(*_: Any, **__: Any) -> tuple[Any, ...]:
    return ()


class _NoHooks:
    """Stands where programs that take DeepSpeed's hooks off for a generation look for them: there
    are none, and gathered parameters need none taken off.
    """

    named_parameters = ds_external_parameters = _register_deepspeed_module = _nothing

    def __init__(self) -> None:
        self.module = self
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []


class _ScaleView:
    """The loss scale of an optimizer, read when it is asked for."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    cur_scale = loss_scale = attribute("_optimizer.loss_scale", "The scale, 1.0 but in fp16.")
    dynamic = attribute("_optimizer.dynamic_loss_scale", "Whether it moves.")

    def __getattr__(self, name: str) -> Any:
        otherwise = "engine.dynamic_loss_scale_args() is how the scale moves"
        raise AttributeError(remedy("the loss scaler", name, OPTIMIZER_REFUSED, otherwise))


class ZeROOptimizer(torch.optim.Optimizer):
    """The sharded optimizer as DeepSpeed's clients know it. torch's schedulers take it as well."""

    def __init__(self, engine: zs.Engine, *, is_static: bool = False) -> None:
        """`is_static`: the configuration gives fp16's scale, which stays."""
        # not torch's __init__: groups, state and hooks belong to the optimizer inside
        assert engine.optimizer is not None
        self.optimizer = engine.optimizer
        self.overflow = False  # whether the last step was skipped
        self.parameter_offload = _NoHooks()
        self._engine = engine
        self._is_static = is_static
        self._skipped = engine.steps_skipped

    param_groups = attribute("optimizer.param_groups", "The groups of the optimizer inside.")
    state = attribute(
        lambda self: zs.OptimizerStates(self._engine),
        "The state of the optimizer inside, on any tier: copies of what is not on the device.",
    )
    defaults = attribute("optimizer.defaults", "The defaults of the optimizer inside.")
    loss_scale = attribute("_engine.loss_scale", "The fp16 loss scale, 1.0 in other precisions.")
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

    dynamic_loss_scale = attribute(
        lambda self: self._engine.precision.needs_loss_scaling and not self._is_static,
        "Whether fp16's scale moves.",
    )
    loss_scaler = attribute(_ScaleView, "The scale, as an object.")
    dtype = attribute("_engine.precision.compute", "Of the weights that compute.")
    communication_data_type = attribute("_engine.precision.reduce", "Of gradients on the wire.")
    dp_process_group = attribute(lambda self: data_parallel_group(), "The group of all ranks.")
    real_dp_process_group = attribute(
        lambda self: [data_parallel_group() for _ in self.param_groups], "The same, by group."
    )
    partition_count = attribute(
        lambda self: [self._engine.world for _ in self.param_groups], "The ranks of each group."
    )
    bit16_groups = attribute(
        lambda self: [list(group["params"]) for group in self.param_groups],
        "The parameters of each group.",
    )
    fp16_groups = bit16_groups
    custom_loss_scaler = attribute(lambda self: False, "The scale is the configuration's.")
    has_overflow = call("overflow", "Whether the last step was skipped.")
    check_overflow = has_overflow
    needs_scaler = call("_engine.precision.needs_loss_scaling", "Whether losses are scaled.")
    get_lr = call(lambda self: self.param_groups[0]["lr"], "Return the first group's rate.")

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def scale_if_loss(self, value: Any) -> Any:
        """Return a loss (0-d) times fp16's scale, and anything else as it is."""
        is_loss = isinstance(value, torch.Tensor) and value.ndim == 0
        return value.float() * self.loss_scale if is_loss and self.needs_scaler() else value

    def get_fp32_grad_for_param(self, param: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the averaged gradient of `param`, whole. Collective."""
        return zs.ParameterStates(self._engine, param).grad()

    def quantize_nontrainable_params(self) -> None:
        """Do nothing: frozen weights are encoded from the start (comm.frozen_codec)."""

    def __getattr__(self, name: str) -> Any:
        inside = self.__dict__.get("optimizer")
        if name not in OPTIMIZER_REFUSED and hasattr(inside, name):
            return getattr(inside, name)
        otherwise = "optimizer.optimizer is torch's own, engine.engine is zeroshard's"
        raise AttributeError(remedy("the optimizer", name, OPTIMIZER_REFUSED, otherwise))

    def __repr__(self) -> str:
        return f"ZeROOptimizer({self.optimizer!r})"
