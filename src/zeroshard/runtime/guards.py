"""What must not be done to a sharded module, refused by entries in its instance dictionary that
hide the class's method of that name.

    to, half, cpu, ...   refused where they would change a parameter (buffers follow)
    deepcopy, pickle     refused: a copy would hold released parameters
    parallelize_module   refused, as is a DTensor in the place of a parameter: it goes first
    DDP, DataParallel    refused around the model: they would average gradients twice, or copy
                         released parameters

Invariant: the entries say that the module is sharded (``OWNED``) and go with the engine's
``close()``. Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

from zeroshard.errors import StateError
from zeroshard.state.local import is_dtensor

_GATHERS = (  # said by Dynamo under fullgraph=True
    "zeroshard gathers the weights of a unit here: compile each block, or leave fullgraph out"
)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])

OWNED = "_zeroshard_engine"  # in the instance dictionary of a model that an engine has sharded


def guard(model: nn.Module) -> list[Any]:
    """Mark `model` as sharded and refuse what must not be done to it and its submodules; return
    handles with ``remove()``.
    """
    wrap = _Unwrappable(type(model).__name__)
    handles = [
        _Attribute(model, OWNED, True),
        _Attribute(model, "_ddp_params_and_buffers_to_ignore", wrap),
    ]
    handles.append(_Attribute(model, "_replicate_for_data_parallel", wrap.refuse))
    for prefix, module in model.named_modules():
        if next(module.parameters(), None) is None:
            continue
        name = prefix or type(model).__name__
        for method in ("__deepcopy__", "__reduce_ex__"):
            handles.append(_Attribute(module, method, _refusing_copies(name)))
        handles.append(_Attribute(module, "_apply", _refusing_changes(module, prefix)))
        handles.append(_Attribute(module, "register_parameter", _refusing_parts(module, name)))
    return handles


class _Attribute:
    """An entry in a module's instance dictionary, which hides the class's method of that name
    until it is removed.
    """

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._module, self._name = module, name
        module.__dict__[name] = value

    def remove(self) -> None:
        self._module.__dict__.pop(self._name, None)


class _Unwrappable:
    """Raises where DistributedDataParallel or DataParallel look at the model that they are to
    wrap.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def refuse(self) -> Any:
        raise StateError(
            f"{self._name} is sharded and cannot be wrapped in DistributedDataParallel or"
            " DataParallel: the engine averages its gradients already; use the model as it is"
        )

    def __iter__(self) -> Any:
        return self.refuse()


def _refusing_copies(name: str) -> Callable[[Any], Any]:
    def refuse(memo_or_protocol: Any) -> Any:
        raise StateError(
            f"{name} is sharded and cannot be copied or pickled: build a new module and give it"
            " engine.full_state_dict(), save with zeroshard.save(), or call engine.close() first"
        )

    return refuse


def _refusing_parts(module: nn.Module, prefix: str) -> Callable[..., None]:
    """Return what stands in for ``module.register_parameter``, by which torch's parallel styles
    put DTensors in the place of parameters.
    """

    def register(name: str, param: nn.Parameter | None) -> None:
        if is_dtensor(param):
            raise StateError(
                f"parameter {name!r} of {prefix} is sharded and cannot become a DTensor: call"
                " parallelize_module() before shard(), or engine.close() first"
            )
        type(module).register_parameter(module, name, param)

    return register


def leave_alone(hook: Callable[..., Any], *, callees: bool = True) -> None:
    """Have Dynamo run `hook` as it is, and its `callees`: see [Note: compiled forwards]."""
    then = _FrameAction.SKIP if callees else _FrameAction.DEFAULT
    set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, then))


def between_graphs(hook: _Hook) -> _Hook:
    """Return `hook`, which Dynamo never traces: a graph ends where it is called."""
    leave_alone(hook)
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hook._torchdynamo_disable_msg = _GATHERS  # type: ignore[attr-defined]
    return hook


def _refusing_changes(module: nn.Module, prefix: str) -> Callable[..., nn.Module]:
    """Return what stands in for ``module._apply``, through which to(), half(), cpu() and the
    like go: it changes buffers alone.
    """

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
            with torch._C.DisableTorchFunctionSubclass():
                here = parameter.data
            if fn(here) is not here:
                raise StateError(
                    f"parameter {name!r} is sharded: its dtype, device and memory format cannot be"
                    " changed. Move or convert the model before shard() (precision= chooses the"
                    " compute dtype), or call engine.close() first"
                )
        for part in module.modules() if recurse else (module,):
            for key, buffer in part._buffers.items():
                part._buffers[key] = buffer if buffer is None else fn(buffer)
        return module

    return apply
