"""``deepspeed.zero``: building a model without memory, whole parameters, and what needs nothing.

    with zero.Init():                        deferred initialisation (zs.deferred_init)
        model = GPT(config)
    with zero.GatheredParameters(parameters, modifier_rank=0):
        ...                                  read them; rank 0's edits reach every rank

Parameters of a model that no engine holds are plain: a deferred one gets its memory and rank 0's
values when it is gathered, so a loader that gathers them all (Transformers' from_pretrained under
stage 3) brings the whole model into the memory of each rank, until initialize() shards it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.integrations.deepspeed.owners import (
    ZeroParamStatus,
    ZeroParamType,
    engine_of,
    in_one_order,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "OnDevice",
    "TiledLinear",
    "ZeroParamStatus",
    "ZeroParamType",
    "keep_constructor",
    "register_external_parameter",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
]

_log = logging.getLogger("DeepSpeed")


class Init:
    """Build modules inside without memory; initialize() computes and shards them unit by unit.

    Rank 0's values count. `dtype` is the floating point type of tensors that name none (default:
    torch's, and the configuration's precision decides how the model computes). Where states rest
    is the configuration's, so `remote_device` and `pin_memory` say nothing more before
    initialize(), and a `module` that is built already is left as it is. Raises ConfigError for a
    process group of its own: parameters are sharded over the ranks of initialize().
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        **rest: Any,
    ) -> None:
        known = ("config", "enabled", "dtype", "mpu", "zero_param_parallel_group")
        for name in rest:
            if name not in known:
                raise zs.ConfigError(f"zero.Init() has no option {name!r} here: {', '.join(known)}")
        groups = (data_parallel_group, rest.get("mpu"), rest.get("zero_param_parallel_group"))
        if any(group is not None for group in groups):
            raise zs.ConfigError(
                "zero.Init() shards over the ranks of initialize(): leave out data_parallel_group,"
                " mpu and zero_param_parallel_group"
            )
        if remote_device not in (None, "none", "cpu", "nvme"):
            raise zs.ConfigError(f"remote_device={remote_device!r} is not 'none', 'cpu' or 'nvme'")
        self._enabled: bool = rest.get("enabled", True)
        self._dtype: torch.dtype | None = rest.get("dtype")
        self._stack = ExitStack()

    def __enter__(self) -> Init:
        if self._enabled:
            if self._dtype is not None:
                self._stack.enter_context(_default_dtype(self._dtype))
            self._stack.enter_context(zs.deferred_init())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


MiCS_Init = Init  # the mesh of mics is initialize()'s, too


class OnDevice:
    """Build modules inside on `device` ("meta": without memory), in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._stack.enter_context(_default_dtype(self._dtype))
            self._stack.enter_context(torch.device(self._device))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class GatheredParameters:
    """Hold whole parameters inside; with `modifier_rank`, that rank's edits reach all. Collective.

    Edits without `modifier_rank` are lost. `fwd_module` needs nothing: a module's parameters are
    gathered whenever its forward asks for them.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        one = isinstance(params, torch.Tensor)
        given: list[Any] = [params] if one else list(params or ())
        self._params = in_one_order(given)
        self._modifier_rank = modifier_rank
        self._enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self._enabled or not self._params:
            return
        by_engine: dict[zs.Engine | None, list[Any]] = {}
        for parameter in self._params:
            by_engine.setdefault(engine_of(parameter), []).append(parameter)
        with ExitStack() as stack:
            for engine, params in by_engine.items():
                if engine is None:
                    _fill(params)
                else:
                    writeback = self._modifier_rank is not None
                    stack.enter_context(engine.gathered(params, writeback=writeback))
                    stack.enter_context(_available(params))
            if self._modifier_rank is not None:
                stack.push(partial(_send, self._params, self._modifier_rank))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _fill(params: list[Any]) -> None:
    """Give deferred parameters memory, and rank 0's values on every rank."""
    deferred = [one for one in params if zs.nn.is_deferred(one)]
    zs.materialize(*deferred)
    _broadcast(deferred, 0)


def _send(params: list[Any], rank: int, kind: Any, *_: Any) -> None:
    """Leave the gathering: take the values of `rank` on every rank, unless something went wrong."""
    if kind is None:
        _broadcast(params, rank)


def _broadcast(params: list[Any], rank: int) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for parameter in params:
            dense = parameter.data.contiguous()
            dist.broadcast(dense, rank)
            if dense.data_ptr() != parameter.data.data_ptr():
                parameter.data.copy_(dense)


@contextmanager
def _available(params: list[Any]) -> Iterator[None]:
    marked = [one for one in params if hasattr(one, "ds_status")]
    for one in marked:
        one.ds_status = ZeroParamStatus.AVAILABLE
    try:
        yield
    finally:
        for one in marked:
            one.ds_status = ZeroParamStatus.NOT_AVAILABLE


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module uses is gathered when it is used."""


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Any) -> list[nn.Module]:
    """Return the modules of these classes, and do nothing else: units may run in any order, and
    in part (mixtures of experts).
    """
    names = [one for one in leaf_module_classes if isinstance(one, str)]
    classes = tuple(one for one in leaf_module_classes if not isinstance(one, str))
    return [
        module
        for module in model.modules()
        if isinstance(module, classes) or type(module).__name__ in names
    ]


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Any) -> list[nn.Module]:
    """See `set_z3_leaf_modules`."""
    return set_z3_leaf_modules(model, leaf_module_classes)


class TiledLinear(zs.nn.TiledLinear):
    """A linear layer that needs one tile of its weight at a time, under DeepSpeed's parameters."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        **rest: Any,
    ) -> None:
        known = {"input_is_already_split": False, "combine_out_splits": True, "linear_cls": None}
        init_linear = rest.pop("init_linear", None)
        for name, value in rest.items():
            if name not in known:
                raise zs.ConfigError(f"zero.TiledLinear() has no option {name!r} here")
            if value is not known[name] and value is not nn.Linear:
                raise zs.ConfigError(
                    f"{name}={value!r}: a tiled layer takes and returns what nn.Linear does here;"
                    " leave it out"
                )
        super().__init__(in_features, out_features, bias, in_tiles=in_splits, out_tiles=out_splits)
        if init_linear is not None:
            weights = {"weight": init_linear.weight, "bias": init_linear.bias}
            self.load_state_dict({key: one for key, one in weights.items() if one is not None})


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Lend the module of an engine with all its parameters gathered, to generate with."""
    gathering: AbstractContextManager[None] = GatheredParameters(list(model.parameters()))
    with gathering:
        yield model.module


def keep_constructor(fn: Any, *_: Any, **__: Any) -> Any:
    """Return `fn` as it is: constructors are not replaced inside `Init` (Transformers replaces
    this function while it builds a model).
    """
    return fn
