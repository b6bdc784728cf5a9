"""Refuse operations that break a sharded module, by entries in its instance dictionary that
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

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from zeroshard.core.precision import dtype_name
from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.unit import Unit
from zeroshard.state.local import is_dtensor

# -------------------------------------------------------------------------------------------- watch
# Whether the model still is the one that was sharded: parameters that came or went since would
# silently not be trained.
#
#     model.blocks.append(Block())            a new parameter: no unit gathers it, no rank averages
#                                             its gradient, no optimizer steps it
#     model.head = nn.Linear(8, 8)            the same, and the sharded head is stepped without ever
#                                             being used
#
# A step refuses both by name. Frozen parameters that came later (adapters for inference, say) are
# left alone.
#
# Cost: per step the identities of all modules and parameters are compared as one list: 10
# microseconds for 300 of them.


_REMEDY = (
    "change the model before shard(), or call engine.close(), change it, build the optimizer again"
    " and shard() again"
)


class Watch:
    """The modules and parameters of one sharded model."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        segments = [segment for unit in units for segment in unit.segments]
        self._sharded = {id(parameter) for one in segments for parameter in one.parameters}
        self._frozen = [
            (name, parameter)
            for segment in segments
            if segment.bucket is None
            for name, parameter in zip(segment.names, segment.parameters, strict=True)
        ]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._remember()

    def check(self) -> None:
        """Raise StateError where a trained parameter was added, or one of ours is no longer in
        the model.
        """
        if list(map(id, chain.from_iterable(map(dict.values, self._tables)))) == self._ids:
            return
        there = {
            id(parameter): (name, parameter.requires_grad)
            for name, parameter in self._model.named_parameters()
        }
        for key, (name, trained) in there.items():
            if trained and key not in self._sharded:
                raise StateError(
                    f"parameter {name!r} came into the model after shard() and is not trained:"
                    f" {_REMEDY}"
                )
        for key in self._sharded:
            if key not in there:
                raise StateError(
                    f"parameter {self._names[key]!r} was taken out of the model after shard():"
                    f" {_REMEDY}"
                )
        self._remember()

    def check_frozen(self) -> None:
        """Raise ConfigError where a parameter that was frozen at shard() requires a gradient
        now.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name!r} was frozen when the model was sharded and requires a"
                    " gradient now: set requires_grad before shard(), or close() the engine and"
                    " shard() again"
                )

    def _remember(self) -> None:
        self._tables: list[dict[str, Any]] = []
        for module in self._model.modules():
            self._tables += [module._modules, module._parameters]
        # so that no other object takes their ids
        self._held = [*chain.from_iterable(entries.values() for entries in self._tables)]
        self._ids = list(map(id, self._held))


# -------------------------------------------------------------------------------------------- casts
# Mixed precision meets tensors that are not in the compute dtype: buffers in fp32, masks and
# positions that a forward makes.
#
#     inputs of the model                    cast to the compute dtype
#     inputs of torch.nn's own layers        cast, where the layer's weights are in the compute
#                                            dtype: torch would raise there
#     buffers                                kept: rotary frequencies and position tables lose their
#                                            meaning in bf16
#     everything else                        as torch promotes it (fp32 + bf16 is fp32), until it
#                                            reaches such a layer
#
# So a table in an fp32 buffer that is added to activations keeps the residual stream in fp32, and
# each layer reads it in bf16. FSDP2 casts at the inputs of its units
# (``MixedPrecisionPolicy.cast_forward_inputs``); here the numbers must not depend on how a model is
# cut into units. Other modules are left alone, because many compute in fp32 on purpose (a router,
# an RMSNorm); an error of theirs over dtypes gets a note that names the buffers (`explain`).
#
# Inside ``torch.autocast`` nothing is cast but the inputs of the model: autocast does so itself.
# Its cache keeps the cast of every fp32 parameter until the context ends, which is half of what
# stage 3 has released: ``torch.autocast(..., cache_enabled=False)`` casts at each use and keeps
# none. Cost: half a microsecond per layer.


_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d, nn.EmbeddingBag, nn.GroupNorm, nn.LayerNorm, nn.PReLU, nn.RNN, nn.LSTM,
    nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell, nn.MultiheadAttention, nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)  # fmt: skip
# a subclass with a forward of its own may compute in fp32 on purpose
_FORWARDS = frozenset(layer.forward for layer in _LAYERS)
_ABOUT_DTYPES = re.compile(r"dtype|scalar type|same type|Input type")


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating-point tensors in it in `dtype`. Containers keep their
    types; those that torch's pytree does not know (a key-value cache) are left as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    kind = type(value)
    if kind is dict:
        return {key: cast(item, dtype) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(cast(item, dtype) for item in value)
    if isinstance(value, (dict, list, tuple)):  # PackedSequence is a named tuple
        return tree_map_only(torch.Tensor, partial(cast, dtype=dtype), value)
    return value


def casting_hooks(model: nn.Module, dtype: torch.dtype) -> dict[nn.Module, Callable[..., Any]]:
    """Return, for each layer of `model` that takes one dtype only, a forward pre-hook (with
    kwargs) that lets it take any.
    """
    device_type = next(model.parameters()).device.type

    def takes_one(module: nn.Module) -> bool:
        dtypes = {one.dtype for one in module.parameters() if one.is_floating_point()}
        return type(module).forward in _FORWARDS and dtypes == {dtype}

    def is_other(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dtype is not dtype and value.is_floating_point()
        return type(value) in (list, tuple, PackedSequence)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(map(is_other, args)) and not (kwargs and any(map(is_other, kwargs.values()))):
            return None
        if torch.is_autocast_enabled(device_type):
            return None
        return cast(args, dtype), cast(kwargs, dtype)

    return {module: before for module in model.modules() if takes_one(module)}


def explain(
    error: BaseException | None, model: nn.Module, dtype: torch.dtype, watch: Watch
) -> None:
    """Add a note to an error of torch's about dtypes: which parameter has come into the `model`
    that we `watch`, or which buffers are not in the compute dtype `dtype`, and what to do.
    """
    if (
        not isinstance(error, RuntimeError)
        or not _ABOUT_DTYPES.search(str(error))
        or hasattr(error, "__notes__")
    ):
        return
    try:
        watch.check()
    except StateError as changed:
        error.add_note(f"zeroshard: {changed}")
        return
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if not isinstance(module, (nn.modules.batchnorm._NormBase,))
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype
    ]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    source = (
        f"buffer {names[0]!r}{more} is not, and neither is a result of it"
        if names
        else "a tensor that the model makes is not"
    )
    error.add_note(
        f"zeroshard: precision={dtype_name(dtype)!r}: weights and the inputs of torch.nn's layers"
        f" are in {dtype_name(dtype)}, but {source}: cast it where it is used, like"
        " self.table.to(x.dtype)"
    )


# ------------------------------------------------------------------------------------------- guards

_GATHERS = (  # said by Dynamo under fullgraph=True
    "zeroshard gathers the weights of a unit here: compile each block, or leave fullgraph out"
)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])

OWNED = "_zeroshard_engine"  # in the instance dictionary of a model that an engine has sharded


def guard(model: nn.Module) -> list[_Attribute]:
    """Mark `model` as sharded and refuse what must not be done to it and its submodules; return
    the entries.
    """
    wrap = _Unwrappable(type(model).__name__)
    handles = [
        _Attribute(model, OWNED, True),
        _Attribute(model, "_ddp_params_and_buffers_to_ignore", wrap),
        _Attribute(model, "_replicate_for_data_parallel", wrap.refuse),
    ]
    for prefix, module in model.named_modules():
        if next(module.parameters(), None) is None:
            continue
        name = prefix or type(model).__name__
        instead = {
            "__deepcopy__": _refusing_copies(name),
            "__reduce_ex__": _refusing_copies(name),
            "_apply": _refusing_changes(module, prefix),
            "register_parameter": _refusing_parts(module, name),
        }
        handles += [_Attribute(module, method, value) for method, value in instead.items()]
    return handles


class _Attribute:
    """An entry in a module's instance dictionary, which hides the class's method of that name
    until it is removed.
    """

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self._module, self.name = module, name
        module.__dict__[name] = value

    def remove(self) -> None:
        self._module.__dict__.pop(self.name, None)


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


def leave_alone(
    hook: Callable[..., Any], *, callees: bool = True, in_graph: Callable[..., Any] | None = None
) -> None:
    """Have Dynamo run `hook` as it is, and its `callees`, and trace `in_graph` in its place inside
    a graph: see [Note: compiled forwards].
    """
    then = _FrameAction.SKIP if callees else _FrameAction.DEFAULT
    set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, then))
    if in_graph is not None:
        hook.__dict__["_torchdynamo_inline"] = in_graph


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
