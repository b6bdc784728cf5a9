"""Refusals of `shard()` on this rank alone, before anything is compared, sent or changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import compress
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.codec import DTYPES as CODED
from zeroshard.comm.device_mesh import Dims, MeshAxes
from zeroshard.config import Config
from zeroshard.core.placement import Mesh, Scope
from zeroshard.core.precision import Precision, dtype_name
from zeroshard.core.schedule import STAGING_BYTES
from zeroshard.core.shares import WholeParameters
from zeroshard.errors import ConfigError
from zeroshard.optim.copies import check_rule, is_elementwise, is_plain, is_repeatable
from zeroshard.optim.several import check_parameters, class_name, each_of, owner
from zeroshard.optim.tiles import is_apart
from zeroshard.runtime.context import Dtypes
from zeroshard.runtime.guards import OWNED
from zeroshard.runtime.step_tiles import TILE_TENSORS
from zeroshard.runtime.units import UnitPlan, check_overlap, named_parameters_once
from zeroshard.state.local import is_dtensor, part_of
from zeroshard.system.device import Device

_log = logging.getLogger("zeroshard")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_model(model: nn.Module) -> None:
    """Raise ConfigError for a model that cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}, not a torch.nn.Module: give shard() one module"
            " that holds all the others"
        )
    if model.__dict__.get(OWNED):
        raise ConfigError(f"{type(model).__name__} is sharded already: call engine.close() first")
    wrappers = {
        nn.parallel.DistributedDataParallel: "",
        nn.DataParallel: ", on one rank per device",
    }
    for kind, more in wrappers.items():
        if isinstance(model, kind):
            raise ConfigError(
                f"the model is wrapped in {kind.__name__}: give shard() the module inside"
                f" (model.module){more}"
            )
    parameters = named_parameters_once(model)
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    named: list[tuple[str, str, torch.Tensor]]
    named = [("parameter", *one) for one in parameters.items()]
    named += [("buffer", *one) for one in model.named_buffers()]
    for role, name, tensor in named:
        # a class that dispatches operations itself has no memory of its own to be cut or sent
        plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not (plain or is_dtensor(tensor)):
            raise ConfigError(
                f"{role} {name!r} is a {type(tensor).__name__}, a tensor subclass that wraps"
                " other tensors, which cannot be sharded: put a plain tensor in its place"
                " (torchao: dequantize() it, and call quantize_() after training)"
            )
    _check_parameters(parameters)
    check_overlap(model)
    for name, module in model.named_modules():
        _check_module(name, module)


def check_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, settings: Config, *, is_first: bool = False
) -> None:
    """Raise ConfigError for an optimizer that cannot step the parameters of `model`; the rank that
    `is_first` says what the step cannot follow of `settings`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    named, whole = named_parameters_once(model), settings.ownership is not None
    check_parameters(optimizer, named, whole=whole)
    parts = matrix_parts(named, settings)
    stacks = {
        id(named[name])
        for name, rows in parts.items()
        if set(rows) == {1} and named[name].dim() > 2
    }
    for one in each_of(optimizer):
        check_rule(one, whole=whole, stacks=stacks)
    for name in parts:
        for one in (one for one in each_of(optimizer) if not is_elementwise(one)):
            for key, value in one.state.get(named[name], {}).items():
                if is_apart(value) and not (is_plain(value) and value.shape == named[name].shape):
                    raise ConfigError(
                        f"optimizer state {key!r} of {name!r} was kept of the parameter as one, and"
                        " matrix_parts steps it as several: call shard() before the first step"
                    )
    by_matrix = [one for one in each_of(optimizer) if not is_elementwise(one)]
    if settings.ownership == "whole_by_cost" and not by_matrix:
        raise ConfigError(
            "ownership='whole_by_cost' deals out Muon's products, and"
            f" {class_name(optimizer)} computes none: use ownership='whole'"
        )
    if settings.ownership and by_matrix:
        precision = settings.resolved_precision()
        options = {"master='remainder'": precision.has_remainders}
        options |= {"moments='bf16'": precision.rounds_moments}
        found = [option for option, is_set in options.items() if is_set]
        if found:
            raise ConfigError(
                f"optimizer {type(by_matrix[0]).__qualname__} steps whole parameters on the"
                f" device, and {found[0]} steps them in parts: leave it out, or take an"
                " elementwise optimizer, for example torch.optim.AdamW"
            )
    check_whole_steps(optimizer, settings, model, is_first=is_first)
    others = [type(one) for one in each_of(optimizer) if not is_repeatable(one)]
    if is_first and settings.offload.step_in_backward and others:
        _log.warning(
            "offload.step_in_backward has no effect on %s: a step of %s is not known to go by"
            " options, gradients and states alone",
            class_name(optimizer),
            others[0].__name__,
        )


def matrix_parts(named: Mapping[str, nn.Parameter], settings: Config) -> dict[str, tuple[int, ...]]:
    """Return the rows of each of the parts in which parameters are stepped, by name. Raises
    ConfigError for parts that do not fit.
    """
    out = dict[str, tuple[int, ...]]()
    for pattern, given in (settings.matrix_parts or {}).items():
        for name in (one for one in trained_like(pattern, named) if settings.ownership):
            shape, stride = named[name].shape, named[name].stride()
            rows = shape[0] if shape else 0
            sizes = (rows // max(given, 1),) * given if isinstance(given, int) else given
            told = f"matrix_parts[{pattern!r}]={given}, and {name!r} has shape {tuple(shape)}"
            if name in out:
                raise ConfigError(f"{told}: another pattern has its name too")
            fits = len(shape) > 1 and sizes and min(sizes) > 0 and sum(sizes) == rows
            if not fits or is_dtensor(named[name]):
                raise ConfigError(
                    f"{told}: parts are of the first of two or more dimensions, have all its rows"
                    " together, and are of a plain tensor"
                )
            if rows > 1 and stride[0] != max(compress(stride, [size > 1 for size in shape])):
                raise ConfigError(f"{told} and stride {stride}: make it contiguous()")
            out[name] = sizes
    return out


def trained_like(pattern: str, named: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of trained parameters that are like a `pattern` of matrix_parts."""
    return [name for name, p in named.items() if p.requires_grad and fnmatchcase(name, pattern)]


def check_whole_steps(
    optimizer: torch.optim.Optimizer, settings: Config, model: nn.Module, *, is_first: bool
) -> None:
    """Raise ConfigError where the buffers of a step off the device are smaller than a parameter of
    `model` that is stepped whole; where no size was given, say so on the rank that `is_first`.
    """
    offload, tiers = settings.offload, settings.offload.away
    if not settings.ownership or not tiers.keys() & {"grad", "optimizer"}:
        return
    named, align = named_parameters_once(model), settings.comm.codecs().align
    owned = WholeParameters(parts=tuple(matrix_parts(named, settings).items()))
    trained = {
        name: max(prod(shape) for shape, _ in owned.grains(name, tuple(parameter.shape), align))
        for name, parameter in named.items()
        if parameter.requires_grad and not is_elementwise(owner(optimizer, parameter))
    }
    if not trained:
        return
    name = max(trained, key=lambda name: trained[name])
    needs = trained[name] * TILE_TENSORS.get(offload.tier("optimizer"), 4) * 4
    if needs <= (offload.staging_bytes or STAGING_BYTES):
        return
    told = (
        f"optimizer {class_name(optimizer)} steps whole parameters, and the largest,"
        f" {name!r} of {trained[name]} elements, takes {needs} bytes of buffers on its way"
    )
    if offload.staging_bytes is not None:
        raise ConfigError(
            f"{told}, more than offload.staging_bytes={offload.staging_bytes}: give as many, or"
            " leave it out"
        )
    if is_first:
        _log.warning("%s (offload.staging_bytes is %d)", told, STAGING_BYTES)


def _check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    devices: dict[torch.device, str] = {}
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} belongs to a lazy module and has no shape yet: run the model"
                " once on some inputs before shard()"
            )
        devices.setdefault(parameter.device, name)
        if parameter.layout is not torch.strided:
            raise ConfigError(
                f"parameter {name!r} is sparse, which cannot be sharded: use a dense one"
            )
        is_float = parameter.is_floating_point()
        if parameter.is_complex() or (is_float and parameter.dtype not in _FLOATS):
            raise ConfigError(
                f"parameter {name!r} is {dtype_name(parameter.dtype)}, which is not supported: use"
                " a real dtype of 16 or 32 bits"
            )
    if len(devices) > 1:
        shown = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ConfigError(
            f"the parameters are on {len(devices)} devices ({shown}): move the model to one device"
            " before shard()"
        )
    if any(device.type == "meta" for device in devices):
        raise ConfigError(
            "the model is on the meta device and has no values: build it inside"
            " zeroshard.deferred_init() instead"
        )
    Device.of(next(iter(devices))).check_current()


def _check_module(name: str, module: nn.Module) -> None:
    shown = repr(name or "itself")
    if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
        raise ConfigError(
            f"module {shown} is traced or scripted (torch.jit), so that no hook of"
            " Python's runs in it: give shard() the module that it was made from"
        )
    if module.__dict__.get(OWNED):
        raise ConfigError(
            f"submodule {name!r} is sharded already: shard the whole model once, from the outside"
        )
    is_fsdp = type(module).__module__.startswith("torch.distributed.fsdp")
    if is_fsdp or hasattr(module, "_get_fsdp_state"):
        raise ConfigError(f"module {shown} is managed by FSDP: give shard() the plain module")
    is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    if is_sparse and module.weight.requires_grad:
        raise ConfigError(
            f"module {name!r} makes sparse gradients (sparse=True), which cannot be sharded:"
            " use sparse=False"
        )


def check_precision(model: nn.Module, precision: Precision) -> None:
    """Raise ConfigError for a parameter of another dtype than `precision` computes in."""
    for name, parameter in named_parameters_once(model).items():
        fits = parameter.dtype in (torch.float32, precision.compute)
        if parameter.is_floating_point() and not fits:
            dtype = dtype_name(parameter.dtype)
            raise ConfigError(
                f"parameter {name!r} is {dtype} but precision computes in"
                f" {dtype_name(precision.compute)}: pass precision={dtype!r} (DeepSpeed's section"
                f" {dtype!r}), or call model.float() before building the optimizer"
            )


def check_codecs(model: nn.Module, dtypes: Dtypes, settings: Config) -> None:
    """Raise ConfigError for parameters a codec cannot take, or a codec without any."""
    comm, named = settings.comm, named_parameters_once(model)
    all_train = all(parameter.requires_grad for parameter in named.values())
    if comm.frozen_codec is not None and all_train:
        raise ConfigError(
            f"comm.frozen_codec={comm.frozen_codec!r} has no effect: every parameter of this model"
            " is trained; for inference call model.requires_grad_(False) before shard()"
        )
    for setting in ("weight_codec", "frozen_codec", "grad_codec"):
        name = getattr(comm, setting)
        for path, parameter in named.items():
            takes_part = setting == "weight_codec"
            takes_part = takes_part or parameter.requires_grad == (setting == "grad_codec")
            dtype = dtypes.of[id(parameter)]
            if name is not None and takes_part and dtype not in CODED:
                raise ConfigError(
                    f"comm.{setting}={name!r} takes fp32, bf16 and fp16; parameter {path!r} is"
                    f" {dtype_name(dtype)}: leave the codec out"
                )


def check_renormed(
    model: nn.Module, plans: Sequence[UnitPlan], dtypes: Dtypes, settings: Config
) -> None:
    """Raise ConfigError for an embedding that rescales the rows of its weight that this rank's
    batch reads, in each forward, where that weight is not this rank's fp32 master.
    """
    policy = settings.resolved_policy()
    unit_of = {id(p): plan.name for plan in plans for p in plan.parameters.values()}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        weight = module.weight
        is_sharded = policy.cells(unit_of[id(weight)]).weight.is_sharded
        rounds = weight.requires_grad and dtypes.of[id(weight)] is not torch.float32
        if is_sharded or rounds:
            dtype = dtype_name(dtypes.of[id(weight)])
            where = f"policy={policy.name!r}" if is_sharded else f"its weight in {dtype}"
            raise ConfigError(
                f"module {name!r} rescales rows of its weight in each forward"
                f" (max_norm={module.max_norm}), which would be lost with {where}: use"
                " max_norm=None, and rescale them after the step inside"
                " engine.gathered(writeback=True)"
            )


def check_leaves(model: nn.Module, settings: Config, mesh_axes: MeshAxes) -> None:
    """Raise ConfigError where a step of `leaves` would depend on who computes which."""
    option = f"leaves={settings.leaves}"
    if settings.leaves is None:
        return
    if mesh_axes.own:
        raise ConfigError(
            f"{option} counts the micro-batches of data parallel ranks, and parameters with a mesh"
            f" of their own ({mesh_axes.own[0].pattern}) see parts of several: leave one out"
        )
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False) is True:
            raise ConfigError(
                f"{option}: the running statistics of module {name!r} ({type(module).__name__})"
                " depend on which rank has seen which micro-batch: use a norm without them"
                " (LayerNorm, GroupNorm), or track_running_stats=False"
            )


def check_nodes(mesh: Mesh, settings: Config) -> None:
    """Raise ConfigError for options without effect if all ranks are one node."""
    comm = settings.comm
    if mesh.size == 1 or mesh.num_nodes > 1:
        return
    if comm.hierarchical:
        raise ConfigError(
            f"comm.hierarchical=True has no effect: all {mesh.size} ranks are one node; set"
            " comm.node_size"
        )
    if comm.grad_codec == "bf16":
        raise ConfigError(
            "comm.grad_codec='bf16' rounds sums over one node on their way to others: all"
            f" {mesh.size} ranks are one; set comm.node_size"
        )


def check_per_rank(settings: Config, world: int, mesh_axes: MeshAxes) -> None:
    """Raise ConfigError for shares, or tiers per rank, that do not fit the `world` data parallel
    ranks.
    """
    shares, by_rank = settings.shares, settings.offload.by_rank
    counts = {f"offload.{state}": count for state, count in by_rank.items()}
    if shares is not None and not isinstance(shares, str):
        counts["shares"] = len(shares)
    for name, count in counts.items():
        if count != world:
            raise ConfigError(
                f"{name} is given for {count} ranks, and there are {world} data parallel ranks"
            )
    given = (["shares"] if shares is not None else []) + [f"offload.{state}" for state in by_rank]
    if given and mesh_axes.own:
        raise ConfigError(
            f"{given[0]} per rank is not supported beside mesh_of, where ranks hold other"
            " parameters: leave one of them out"
        )
    policies = [settings.at(rank).resolved_policy() for rank in range(world if by_rank else 1)]
    optims = [cells.optim for cells in policies[0].all_cells]
    if by_rank and not all(optim.scope is Scope.SHARD for optim in optims):
        raise ConfigError(
            f"{given[-1]} per rank needs a row that shards the optimizer's state over all ranks"
            f" (zero1, zero2, zero3, hpz, hfsdp), not {policies[0].name!r}"
        )
    sharded = any(optim.is_sharded for optim in optims)
    if shares is not None and not sharded:
        raise ConfigError(
            f"shares has no effect with policy={policies[0].name!r}: every rank keeps everything;"
            " take zero1, zero2 or zero3"
        )
    if isinstance(shares, str) and mesh_axes.dims.others:
        raise ConfigError(
            f"shares={shares!r} measures data parallel ranks, which would cut other stages and"
            " replicas differently: give a number per data parallel rank"
        )


def node_size_of(settings: Config, dims: Dims) -> int | None:
    """Return ranks per node, as the mesh's names or the settings say; rows that keep columns
    default to the launcher's variable.
    """
    given, policy = settings.comm.node_size, settings.resolved_policy()
    if dims.node_size is not None:
        if not policy.keeps_columns:
            raise ConfigError(
                f"policy={policy.name!r} does not shard over the inner data parallel dimension"
                " alone: take 'mics' (FSDP2's HSDP), 'hpz' or 'hfsdp', or a mesh with one, 'dp'"
            )
        if given not in (None, dims.node_size):
            raise ConfigError(
                f"comm.node_size={given} is not the mesh's nodes of {dims.node_size} ranks:"
                " leave it out"
            )
        return dims.node_size
    if given is not None or not policy.keeps_columns:
        return given
    if dims.others:
        raise ConfigError(
            f"policy={policy.name!r} needs to know the nodes: name the data parallel dimensions"
            " 'dp_replicate' and 'dp_shard', or set comm.node_size in data parallel ranks"
        )
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not text.isdecimal():
        raise ConfigError(
            f"policy={policy.name!r} needs to know the nodes: set comm.node_size (no launcher has"
            " set LOCAL_WORLD_SIZE)"
        )
    return int(text)


def check_own_meshes(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    mesh_axes: MeshAxes,
    mesh: Mesh,
    settings: Config,
    sync_from: int | None,
) -> None:
    """Raise ConfigError for what cannot be done beside meshes of parameters' own."""
    if not mesh_axes.own:
        return
    for own in mesh_axes.own:
        own.holders.mesh(mesh)
    if sync_from is not None:
        raise ConfigError(
            f"sync_from={sync_from} would copy one rank's experts to all ranks, and mesh_of lets"
            " ranks hold others: build the same model on the ranks with the same experts"
        )
    inside = {name for plan in plans if plan.pattern for name, _ in plan.owners}
    buffers = [
        f"{name}.{buffer}"
        for name, module in model.named_modules()
        if name in inside
        for buffer in module._buffers
    ]
    if settings.broadcast_buffers and buffers:
        raise ConfigError(
            f"broadcast_buffers=True would give every rank rank 0's buffer {buffers[0]!r}, which"
            " belongs to a module with a mesh of its own (mesh_of): leave it out"
        )


def check_dtensors(
    parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None, dims: Dims
) -> None:
    """Raise ConfigError where one of `parameters`, by name, is a DTensor that does not lie along
    the axes of `mesh`, of `dims`, that are not data parallel: tensor parallelism goes first, over
    an axis of the same mesh along which nothing is reduced (docs/design/composition.md).
    """
    for name, parameter in parameters.items():
        if not is_dtensor(parameter):
            continue
        part_of(name, parameter)  # refuses placements, and meshes without names
        where = parameter.device_mesh
        for axis in where.mesh_dim_names or ():
            why = _misplaced(axis, where, mesh, dims)
            if why:
                raise ConfigError(f"parameter {name!r} is a DTensor along {axis!r}, {why}")


def _misplaced(axis: str, where: DeviceMesh, mesh: DeviceMesh | None, dims: Dims) -> str:
    """Return why a DTensor of mesh `where` must not lie along `axis`, or ""."""
    if axis in dims.dp:
        return (
            "a data parallel axis of the mesh given to shard(), which cuts parameters along it"
            " itself: give it the model before fully_shard() or distribute_tensor()"
        )
    if mesh is None or axis not in dims.names:
        given = "no mesh" if mesh is None else f"a mesh of {list(dims.names)}"
        return f"and shard() was given {given}: pass mesh= with that axis, too"
    if any(other.name == axis and not other.alike for other in dims.others):
        return "along which ranks have other parameters: use an axis named 'tp'"
    ranks, expected = (dist.get_process_group_ranks(one.get_group(axis)) for one in (where, mesh))
    if ranks != expected:
        return (
            f"there over the ranks {ranks}, and in the mesh given to shard() over {expected}: use"
            " one mesh for both"
        )
    return ""
