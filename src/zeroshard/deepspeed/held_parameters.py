"""Parameters that an engine holds: the attributes that DeepSpeed's users read on one, the names
``safe_*`` for its master, gradient and optimizer state (whole or this rank's part), and the answers
of ``state_dict()``.

Under stage 3 DeepSpeed hangs ``ds_id``, ``ds_shape``, ``ds_numel``, ``ds_status`` and
``ds_persist`` on every parameter, and programs tell by them whether a parameter must be gathered
before it is read. A released parameter keeps its shape here, so only the status says something new.

    safe_get_full_fp32_param(param)                   safe_set_local_grad(param, value)
    safe_get_local_optimizer_state(param, "exp_avg")  ... two verbs, two extents, three states

All of them are ``zeroshard.ParameterStates`` and collective, except that reading a part sends
nothing (the first read of a gradient in a step does). A plain parameter has a gradient alone, and
so has a frozen one, which has none: reading its states gives None.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

import zeroshard as zs
from zeroshard.deepspeed.helpers import logger as _log
from zeroshard.deepspeed.shim import SAFE, remedy

# by id of the parameter: its place in the module
_owners: weakref.WeakKeyDictionary[zs.Engine, dict[int, int]] = weakref.WeakKeyDictionary()
_closers: weakref.WeakKeyDictionary[zs.Engine, Any] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_used: list[bool] = []  # whether any engine was made in this process


def was_used() -> bool:
    """Whether `own` was ever called."""
    return bool(_used)


# whether the whole parameter is in memory
ZeroParamStatus = Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])
# where a parameter lies; every parameter of ours is PARTITIONED or NORMAL
ZeroParamType = Enum("ZeroParamType", ["NORMAL", "PARTITIONED", "REMOTE"])


def own(engine: zs.Engine, close: Callable[[], None]) -> None:
    """Note that `engine` holds its module's parameters; `close` ends it."""
    _used[:] = [True]
    parameters = engine.module.parameters()
    _owners[engine] = {id(parameter): place for place, parameter in enumerate(parameters)}
    _closers[engine] = weakref.WeakMethod(close)


def destroy(engine: zs.Engine) -> None:
    """End `engine`, and give back its module's parameters. Collective."""
    close = _closers[engine]() if engine in _closers else None
    if close is not None:
        close()
    else:
        release(engine)
        engine.close()


def release(engine: zs.Engine) -> None:
    """Note that it holds them no more."""
    _owners.pop(engine, None)


def engine_of(parameter: object) -> zs.Engine | None:
    """Return the engine that holds `parameter`, or None for a plain one."""
    return next((engine for engine, held in _owners.items() if id(parameter) in held), None)


def checks_edits(engine: zs.Engine) -> bool:
    """Whether the configuration of `engine` asks for DeepSpeed's sanity checks."""
    close = _closers[engine]() if engine in _closers else None
    return bool(close is not None and close.__self__.is_sanity_checks_enabled())


def name_of(parameter: nn.Parameter) -> str:
    """Return how to speak of a parameter: by its name, or the shape of a plain one."""
    engine = engine_of(parameter)
    named = engine.module.named_parameters() if engine is not None else ()
    found = next((repr(name) for name, one in named if one is parameter), None)
    return f"parameter {found}" if found else f"a parameter of shape {tuple(parameter.shape)}"


def in_one_order(parameters: Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """Return each parameter once, in an order that is the same on every rank, without None, which
    stands for a layer's missing bias.

    Transformers gathers a set, in an order of each rank's own. Plain parameters of one shape keep
    the order in which they come: a set may exchange them until initialize() takes rank 0's values.
    """

    def key(parameter: nn.Parameter) -> tuple[tuple[int, ...], str, int]:
        places = (held.get(id(parameter)) for held in _owners.values())
        place = next((place for place in places if place is not None), -1)
        return tuple(parameter.shape), str(parameter.dtype), place

    given = {id(parameter): parameter for parameter in parameters if parameter is not None}
    return sorted(given.values(), key=key)


class _NoShard:
    """Stands for ``ds_tensor``: this rank's part is read through functions."""

    def __getattr__(self, name: str) -> Any:
        use = (
            "safe_get_local_fp32_param(param) for this rank's part, and to set it"
            " safe_set_local_fp32_param(param, value)"
        )
        raise AttributeError(remedy("a parameter", "ds_tensor", {}, use))

    def __setattr__(self, name: str, value: object) -> None:
        getattr(self, name)  # which raises


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters that rest in shards the attributes of DeepSpeed's."""
    for parameter in parameters:
        vars(parameter).update(
            ds_id=next(_numbers),
            ds_shape=parameter.shape,
            ds_numel=parameter.numel(),
            ds_status=ZeroParamStatus.NOT_AVAILABLE,
            ds_persist=False,  # a small one is gathered as any other
            ds_tensor=_NoShard(),
        )


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Take them off again."""
    for parameter in parameters:
        for name in ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_persist", "ds_tensor"):
            vars(parameter).pop(name, None)


# by the end of the name: the accessor of ParameterStates, and a description
_STATES = {
    "fp32_param": ("master", "the fp32 master. Setting it sets the weight, too"),
    "grad": ("grad", "the averaged gradient. Without one reading gives None, setting StateError"),
    "optimizer_state": ("state", "the optimizer's state `optim_state_key`, such as exp_avg. Without"
                        " one reading gives None, setting StateError"),
}  # fmt: skip


def _states(param: nn.Parameter) -> zs.ParameterStates:
    engine = engine_of(param)
    if engine is None:
        raise zs.ConfigError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine: give its model to"
            " initialize() first"
        )
    return zs.ParameterStates(engine, param)


def _accessor(full_name: str) -> Callable[..., torch.Tensor | None]:
    """Return the function of this name: "safe", a verb, an extent and a state."""
    _, verb, extent, ending = full_name.split("_", 3)
    (name, what), local = _STATES[ending], extent == "local"

    def get(param: nn.Parameter, optim_state_key: str = "") -> Any:
        if engine_of(param) is None or not param.requires_grad:  # plain, or frozen
            return param.grad if (name, local) == ("grad", False) else None
        return getattr(_states(param), name)(*filter(None, [optim_state_key]), local=local)

    def put(param: nn.Parameter, value: torch.Tensor, optim_state_key: str = "") -> None:
        write = getattr(_states(param), f"set_{name}")
        write(*filter(None, [optim_state_key]), value, local=local)

    made = get if verb == "get" else put
    made.__name__ = made.__qualname__ = full_name
    part = "this rank's part of " if local else ""
    made.__doc__ = f"{verb.title()} {part}{what}."
    return made


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Set the averaged gradient of each trained parameter to ``update_func(gradient, param)``.
    Collective.
    """
    for param in param_list:
        if engine_of(param) is None or not param.requires_grad:
            if param.grad is not None:
                param.grad.copy_(update_func(param.grad, param))
        elif (whole := _ACCESSORS["safe_get_full_grad"](param)) is not None:
            _ACCESSORS["safe_set_full_grad"](param, update_func(whole, param))


_ACCESSORS = {name: _accessor(name) for name in SAFE}


def __getattr__(name: str) -> Any:
    if name not in _ACCESSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _ACCESSORS[name]


# -------------------------------------------------------------------- state dicts of sharded models
# DeepSpeed answers ``state_dict()`` at stage 3 with empty tensors. Its programs ask on one rank and
# write over what it lacks (DeepSpeed-Chat's ``save_hf_format()`` before
# ``save_zero_three_model()``), so an error there would end a training before its weights are saved.
# Here a parameter that is not gathered is a tensor of its shape on the device "meta": it has no
# numbers, can be written to a file, and whoever loads or reads it gets torch's error. A warning
# names what has the numbers. Buffers and gathered parameters are themselves. A module's own
# ``save_pretrained()`` of such tensors is refused before it writes any, on whichever rank calls it.
#
# Invariant: the entries in the modules' instance dictionaries go with the engine's ``destroy()``.


_WARNING = (
    "state_dict() of a model that rests sharded: its parameters are tensors on the device 'meta',"
    " without numbers. Call engine.save_16bit_model(DIRECTORY) on every rank to write them, or"
    " state_dict() inside zero.GatheredParameters(model.parameters())"
)


def answer_state_dicts(model: nn.Module) -> None:
    """Let each module of `model` answer ``state_dict()``, whatever is gathered."""
    told: list[bool] = []
    for module in model.modules():
        module.__dict__["state_dict"] = partial(_state_dict, module, told)
        if hasattr(type(module), "save_pretrained"):
            module.__dict__["save_pretrained"] = partial(_save_pretrained, module)


def end_state_dicts(model: nn.Module) -> None:
    """End what `answer_state_dicts` began."""
    for module in model.modules():
        module.__dict__.pop("state_dict", None)
        module.__dict__.pop("save_pretrained", None)


def _state_dict(module: nn.Module, told: list[bool], /, *args: Any, **options: Any) -> Any:
    try:
        # the modules inside answer for themselves: what raises is said of this one's own parameters
        return type(module).state_dict(module, *args, **options)
    except zs.StateError:
        if args:
            options = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
    if not told:
        told.append(True)
        _log.warning("%s", _WARNING)
    prefix, out = options.get("prefix", ""), options.get("destination")
    out = OrderedDict() if out is None else out
    for name, parameter in module._parameters.items():
        if parameter is not None:
            out[prefix + name] = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            out[prefix + name] = buffer if options.get("keep_vars") else buffer.detach()
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        out[prefix + _EXTRA_STATE_KEY_SUFFIX] = module.get_extra_state()
    for name, child in module._modules.items():
        if child is not None:
            inside = {**options, "destination": out, "prefix": f"{prefix}{name}."}
            child.state_dict(**inside)
    return out


def _save_pretrained(module: Any, /, *args: Any, **options: Any) -> Any:
    """Call the module's own method, unless it would write parameters without numbers: of a PEFT
    model it writes those that are trained. Raises StateError on this rank alone.
    """
    save = type(module).save_pretrained
    given = signature(save).bind(module, *args, **options).arguments
    given |= given.get("kwargs", {})
    if given.get("state_dict") is None and given.get("is_main_process", True):
        adapts, state = hasattr(module, "peft_config"), module.state_dict()
        for name, parameter in module.named_parameters():
            if (parameter.requires_grad or not adapts) and name in state and state[name].is_meta:
                raise zs.StateError(
                    f"engine.module.save_pretrained(): {name!r} rests sharded: call"
                    " engine.save_pretrained(DIRECTORY) on every rank, or this inside"
                    " zero.GatheredParameters(model.parameters())"
                )
    return save(module, *args, **options)
