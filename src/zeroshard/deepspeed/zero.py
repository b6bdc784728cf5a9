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

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import zeroshard as zs
from zeroshard.comm.groups import on_cpu, ranks_through
from zeroshard.core.digest import digest_of
from zeroshard.deepspeed import comm
from zeroshard.deepspeed.held_parameters import (
    ZeroParamStatus,
    ZeroParamType,
    checks_edits,
    engine_of,
    in_one_order,
    mark,
    name_of,
)
from zeroshard.deepspeed.helpers import logger as _log
from zeroshard.deepspeed.shim import remedy

__all__ = [
    "GatheredParameters", "Init", "MiCS_Init", "OnDevice", "TiledLinear", "ZeroParamStatus",
    "ZeroParamType", "end_init_blocks", "keep_constructor", "register_external_parameter",
    "unwrap_model_for_generation",
]  # fmt: skip


class _Wrapper:
    """Enters and leaves another context manager, which its class makes of its arguments."""

    _context: AbstractContextManager[Any]

    def __enter__(self) -> Any:
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Init(_Wrapper):
    """Build modules inside without memory; initialize() computes and shards them unit by unit.

    Rank 0's values count. `dtype` is the floating point type of tensors that name none (default:
    torch's, and the configuration's precision decides how the model computes). Where states rest
    is the configuration's, so `remote_device` and `pin_memory` say nothing more before
    initialize(), and a `module` that is built already is left as it is. Parameters made inside have
    ``ds_id`` and its kin, and under a launcher the process group is there from here on. Raises
    ConfigError for a process group of its own: parameters are sharded over initialize()'s ranks.
    An initialize() inside ends the block.
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
        self._context = nullcontext()
        if rest.get("enabled", True):
            if "RANK" in os.environ:
                comm.init_distributed()
            self._context = _built(rest.get("dtype"), _deferred())

    def __enter__(self) -> Any:
        super().__enter__()
        _open_blocks.append((self, _num_modes()))
        return self

    def __exit__(self, *error: Any) -> None:
        if any(block is self for block, _ in _open_blocks):
            _open_blocks.pop()
            super().__exit__(*error)


_open_blocks: list[tuple[Init, int]] = []  # and how many modes of torch's were on with it


def _num_modes() -> int:
    return torch._C._len_torch_function_stack()


def end_init_blocks() -> None:
    """End the blocks of `Init` around this call: what follows in them is made as outside. Raises
    ConfigError where a block of another context, such as a device's, has begun inside of one.
    """
    while _open_blocks:
        block, num_modes = _open_blocks[-1]
        if num_modes != _num_modes():
            raise zs.ConfigError(
                "initialize() inside zero.Init() and a context such as torch.device(): end both"
                " blocks first"
            )
        block.__exit__(None, None, None)


MiCS_Init = Init  # the mesh of mics is initialize()'s, too


class OnDevice(_Wrapper):
    """Build modules inside on `device` ("meta": without memory), in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._context = _built(dtype, torch.device(device)) if enabled else nullcontext()


@contextmanager
def _deferred() -> Iterator[None]:
    """Build modules without memory; their parameters have the attributes of DeepSpeed's."""

    def marked(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if not hasattr(parameter, "ds_id"):
            mark([parameter])

    hook = register_module_parameter_registration_hook(marked)
    try:
        with zs.deferred_init():
            yield
    finally:
        hook.remove()


@contextmanager
def _built(dtype: torch.dtype | None, context: AbstractContextManager[Any]) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with context:
            yield
    finally:
        if dtype is not None:
            torch.set_default_dtype(before)


class GatheredParameters(_Wrapper):
    """Hold whole parameters inside; with `modifier_rank`, that rank's edits reach all. Collective.

    Without it edits are this rank's own and are dropped at the end, as an adapter that is merged to
    generate with; the log says so, once. With ``enable_sanity_checks`` they are a StateError, on
    every rank. `fwd_module` needs nothing: a module's parameters are gathered whenever its forward
    asks for them.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter | None] | nn.Parameter | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params or ())
        self._context = _gathered(in_one_order(given), modifier_rank) if enabled else nullcontext()


_told: list[str] = []  # the parameter, in the line about edits that are dropped


@contextmanager
def _gathered(params: list[Any], modifier_rank: int | None) -> Iterator[None]:
    by_engine: dict[zs.Engine | None, list[Any]] = {}
    for parameter in params:
        by_engine.setdefault(engine_of(parameter), []).append(parameter)
    keeps = modifier_rank is not None
    with ExitStack() as stack:
        for engine, held in by_engine.items():
            marked = [one for one in held if hasattr(one, "ds_status")]
            if engine is None:
                deferred = [one for one in held if zs.nn.is_deferred(one)]
                zs.materialize(*deferred)
                _broadcast(deferred, 0)
                for one in () if keeps else marked:
                    stack.callback(setattr, one, "data", one.detach().clone())
            else:
                stack.enter_context(engine.gathered(held, writeback=keeps, discard=not keeps))
                for one in marked:
                    stack.callback(setattr, one, "ds_status", ZeroParamStatus.NOT_AVAILABLE)
            for one in marked:
                one.ds_status = ZeroParamStatus.AVAILABLE  # for good, if plain
        if modifier_rank is not None:
            yield
            _broadcast(params, modifier_rank)
            return
        checked = [one for engine in by_engine if engine and checks_edits(engine)
                   for one in by_engine[engine]]  # fmt: skip
        dropped = [one for one in params if engine_of(one) or hasattr(one, "ds_status")]
        digests = [(one.device, digest_of(one)) for one in checked]
        samples = [] if _told else [_sample(one) for one in dropped]
        yield
        if edited := _edited(checked, digests):
            raise zs.StateError(
                f"in-place modification of {', '.join(edited[:3])} inside GatheredParameters"
                " without modifier_rank, where edits do not last: give modifier_rank= the rank that"
                " edits"
            )
        pairs = zip(dropped, samples, strict=False)
        changed = next((one for one, seen in pairs if not _is_as(one, seen)), None)
        if changed is not None and comm.get_rank() == 0 and not _told:
            _told.append(name_of(changed))
            _log.warning(
                "%s was changed inside GatheredParameters without modifier_rank: such changes are"
                " dropped at its end; give modifier_rank= the rank that edits to keep them",
                *_told,
            )


def _sample(parameter: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    """Return what tells most edits of a parameter: where it is, its version, 64 elements."""
    flat = parameter.detach().reshape(-1)
    return parameter.data_ptr(), parameter._version, flat[:: flat.numel() // 64 + 1].clone()


def _is_as(parameter: torch.Tensor, seen: tuple[int, int, torch.Tensor]) -> bool:
    now = _sample(parameter)
    return now[:2] == seen[:2] and torch.equal(now[2], seen[2])


def _edited(params: list[Any], before: list[tuple[torch.device, str]]) -> list[str]:
    """Return which parameters any rank has given other numbers, if only through ``.data``, which
    counts no version. Collective.
    """
    if not params:
        return []
    pairs = zip(params, before, strict=True)
    changes = [digest_of(one.detach().to(place)) != digest for one, (place, digest) in pairs]
    of_ranks = ranks_through(comm.data_parallel_group()).share(changes, "GatheredParameters")
    changed = map(any, zip(*of_ranks, strict=True))
    return [name_of(one) for one, flag in zip(params, changed, strict=True) if flag]


def _broadcast(params: list[Any], rank: int) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for parameter in params:
            dense, group = parameter.data.contiguous(), comm.data_parallel_group()
            if dense.device.type == "cpu":
                group = on_cpu(group)
            dist.broadcast(dense.view(-1).view(torch.uint8), rank, group=group)
            if dense.data_ptr() != parameter.data.data_ptr():
                parameter.data.copy_(dense)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module uses is gathered when it is used."""


class SplitLinear(zs.nn.TiledLinear):
    """A linear layer that needs one tile of its weight at a time, under DeepSpeed's parameters."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        *,
        init_linear: nn.Linear | None = None,
        **rest: Any,
    ) -> None:
        known = {"input_is_already_split": False, "combine_out_splits": True, "linear_cls": None}
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
            self.copy_params_from(init_linear)

    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the numbers of `other`, a layer of the same sizes."""
        self.load_state_dict(other.state_dict())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            otherwise = "its tiles are children(), tile_ROW_COLUMN; state_dict() is nn.Linear's"
            raise AttributeError(remedy("TiledLinear", name, {}, otherwise)) from None


TiledLinear = SplitLinear


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Lend the module of an engine with all its parameters gathered, to generate with."""
    with GatheredParameters(model.parameters()):
        yield model.module


def keep_constructor(fn: Any, *_: Any, **__: Any) -> Any:
    """Return `fn` as it is: constructors are not replaced inside `Init` (Transformers replaces
    this function while it builds a model).
    """
    return fn
