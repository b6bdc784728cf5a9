"""``state_dict()`` of a model at stage 3, to which DeepSpeed answers with empty tensors.

Programs of DeepSpeed's ask for it on one rank and write over what it lacks (DeepSpeed-Chat's
``save_hf_format()`` before ``save_zero_three_model()``), so an error there would end a training
before its weights are saved. Here a parameter that is not gathered is a tensor of its shape on the
device "meta": it has no numbers, can be written to a file, and whoever loads or reads it gets
torch's error. A warning names what has the numbers. Buffers and gathered parameters are themselves.
A module's own ``save_pretrained()`` of such tensors is refused before it writes any, on whichever
rank calls it.

Invariant: the entries in the modules' instance dictionaries go with the engine's ``destroy()``.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

import zeroshard as zs
from zeroshard.deepspeed.small import logger as _log

_WARNING = (
    "state_dict() of a model that rests sharded: its parameters are tensors on the device 'meta',"
    " without numbers. Call engine.save_16bit_model(DIRECTORY) on every rank to write them, or"
    " state_dict() inside zero.GatheredParameters(model.parameters())"
)


def answer(model: nn.Module) -> None:
    """Let each module of `model` answer ``state_dict()``, whatever is gathered."""
    told: list[bool] = []
    for module in model.modules():
        module.__dict__["state_dict"] = partial(_state_dict, module, told)
        if hasattr(type(module), "save_pretrained"):
            module.__dict__["save_pretrained"] = partial(_save_pretrained, module)


def end(model: nn.Module) -> None:
    """Take that back."""
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
