"""``zeroshard.shard`` and ``zeroshard.init_distributed``: from a plain model to an Engine.

Everything that can be refused is refused, and everything that could differ between ranks is
compared, before the first parameter is changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.agree import REMEDY, Groups, agree, differing, through
from zeroshard.comm.codec import DTYPES as CODED
from zeroshard.comm.device_mesh import Seat, seat_of
from zeroshard.comm.everyone import Everyone
from zeroshard.comm.own_mesh import OwnMesh
from zeroshard.comm.select import make_transport
from zeroshard.comm.spec import CommSpec
from zeroshard.comm.transport import Transport
from zeroshard.config import AUTO, Config, ShardOptions, build_config
from zeroshard.core.dims import Dims
from zeroshard.core.holders import Holders
from zeroshard.core.launched import meeting_file
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.precision import Precision, dtype_name
from zeroshard.core.slurm import rank_variables
from zeroshard.core.tensor_digest import digest_of
from zeroshard.errors import ConfigError, StorageError, ZeroshardError
from zeroshard.memory import MemoryCounter, Pages, check_device
from zeroshard.nn.deferred import (
    allocate,
    deferred_init,
    fingerprint_of,
    materialize,
    refuse_inside,
)
from zeroshard.nn.placed import check_dtensors
from zeroshard.optim.elementwise import check_elementwise
from zeroshard.optim.sharded import check_parameters
from zeroshard.runtime.balance import first_fraction
from zeroshard.runtime.build import Context, Dtypes, compute_dtypes
from zeroshard.runtime.context import Options
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.faults import Faults
from zeroshard.runtime.guards import OWNED
from zeroshard.runtime.overlap import check_overlap
from zeroshard.runtime.stages import model_of
from zeroshard.runtime.streams import make_streams
from zeroshard.runtime.tiering import Tiering
from zeroshard.runtime.units import UnitPlan, UnitSpec, named_parameters_once, partition_units
from zeroshard.state.local import local_of, part_of, whole_shape
from zeroshard.state.state import DeviceMemory
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.host import HostStore
from zeroshard.tier.link import link_of
from zeroshard.tier.store import Store
from zeroshard.tier.swapdir import SwapDirectory

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["deferred_init", "init_distributed", "materialize", "shard"]

_log = logging.getLogger("zeroshard")

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# settings that must be the same on every rank
_COMPARED = (
    "prefetch_bytes", "strict", "verify_every", "broadcast_buffers", "gradient_clipping",
    "loss_scale",
)  # fmt: skip


def init_distributed(backend: str | None = None, *, timeout_s: float = 1800.0) -> None:
    """Join the process group that torchrun (or ``zeroshard run``) describes in the environment.

    Does nothing for a single process (no ``RANK`` in the environment) or where a group exists
    already. Tasks of a Slurm step become ranks: without ``RANK``, torchrun's variables are set from
    ``SLURM_PROCID`` and its siblings. With CUDA each rank takes the device of its ``LOCAL_RANK``;
    the backend is then nccl for CUDA and gloo for CPU tensors, else gloo; nccl connects here and
    now. Ranks that ``zeroshard run`` has started on one host meet in a file that only this user can
    read.
    """
    if dist.is_initialized():
        return
    from_slurm = rank_variables(os.environ)
    os.environ.update(from_slurm)
    if "RANK" not in os.environ:
        return
    local_rank, device = int(os.environ.get("LOCAL_RANK", 0)), None
    if from_slurm and torch.cuda.device_count() == 1:
        local_rank = 0  # with --gpus-per-task=1 each task sees its own alone
    if torch.cuda.is_available() and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        backend = backend or "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", local_rank) if "nccl" in backend else None
    timeout, path = timedelta(seconds=timeout_s), meeting_file()
    join = partial(dist.init_process_group, backend or "gloo", timeout=timeout, device_id=device)
    if path is None:
        join()
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    join(store=store, rank=rank, world_size=size)


def shard(
    model: nn.Module | PipelineStage | Sequence[PipelineStage],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int | None = None,
    policy: str | Policy | None = None,
    config: Config | dict[str, Any] | str | Path | None = None,
    units: UnitSpec | None = None,
    mesh: DeviceMesh | None = None,
    dp: str | Sequence[str] | None = None,
    mesh_of: Mapping[str, DeviceMesh] | None = None,
    sync_from: int | None = None,
    **overrides: Unpack[ShardOptions],
) -> Engine:
    """Shard `model` and `optimizer` in place over the data parallel ranks (a collective call).

    Both stay the objects they were. `model` may be this rank's stage, or list of stages, of
    torch.distributed.pipelining (``engine.follow``). `stage` 0 to 3 or `policy` (a row's name, a
    Policy, or "auto": the fastest row that the planner finds to fit here) says where each state
    rests (default: stage 3); `config` is a Config, a dict or a path to JSON, of our form or
    DeepSpeed's, and keywords go before it; `units` are module classes, qualified names or a
    callable(name, module) -> bool (default: found automatically); `mesh` a DeviceMesh whose data
    parallel dimensions are sharded over (default: all ranks): those that `dp` names, else the only
    one, or "dp", or "dp_replicate" x "dp_shard", the nodes and local ranks of hpz, mics and hfsdp,
    and "cp". Beside them "pp" (other parameters) and "tp" (plain parameters are the same, DTensors
    are parts) may be there: norm, clip and steps are those of the whole mesh (docs/composition.md).
    `mesh_of` gives modules whose names match a pattern a mesh of their own, whose "dp" or "cp" runs
    over the ranks with the same parameters: ``{"*.experts": mesh}``. `sync_from` is a data parallel
    rank whose weights and buffers all take (default: they are compared). See ``help(zs.Config)``.

    Raises ConfigError for what cannot be done, and PlanMismatch where the ranks disagree, on every
    rank, before anything is changed.
    """
    seat = seat_of(mesh, dp, mesh_of)
    build = partial(build_config, config, stage=stage, policy=policy, units=units, **overrides)
    module: Any = model
    try:
        module = model_of(model)
        asked, error = _understood(module, optimizer, build, seat, sync_from)
    except ConfigError as refused:
        asked, error = None, refused
    differences = _compared(asked, error, seat)
    assert asked is not None  # else that has raised
    told = _told(module, differences)
    context = _make_context(module, asked, seat, sync_from, trains=optimizer is not None, told=told)
    context.prepare([local_of(buffer) for buffer in module.buffers()])
    try:
        engine = Engine(module, asked.plans, context, prefetch_bytes=asked.settings.prefetch_bytes)
    except StorageError:
        context.close()
        raise
    if optimizer is not None:
        try:
            engine.attach(optimizer)
        except StorageError:
            engine.close()
            raise
    context.faults.end_shard()
    return engine


@dataclass(frozen=True)
class _Asked:
    """This rank's settings, checked, and not yet compared with the other ranks'."""

    settings: Config
    mesh: Mesh
    dtypes: Dtypes
    plans: list[UnitPlan]
    settings_report: dict[str, str]  # must be the same on every rank of the mesh
    report: dict[str, str]  # must be the same on every data parallel rank, and on replicas
    values: dict[str, str]  # of a deferred model: should be
    parts: frozenset[str]  # entries of both about parts, which differ along the mesh
    # entries of parameters that some ranks hold, and by which groups of ranks
    within: dict[str, Groups]

    @property
    def own_meshes(self) -> tuple[str, ...]:
        """The patterns of parameters with a mesh of their own."""
        return tuple(dict.fromkeys(plan.pattern for plan in self.plans if plan.pattern))


def _compared(asked: _Asked | None, error: ZeroshardError | None, seat: Seat) -> dict[str, str]:
    """Return which initial values of a deferred model differ between the data parallel ranks;
    they are reported only if no file overwrites them. Collective.

    Raises this rank's `error`, another's, or PlanMismatch where they ask for something else.
    """
    exchange = through(seat.group)
    with seat.axes.telling("shard()"):
        report = {} if asked is None else asked.settings_report | asked.report
        within = {} if asked is None else asked.within
        agree(exchange, report, call="shard()", error=error, remedy=REMEDY, within=within)
    assert asked is not None  # else that has raised
    values, differences = asked.values, {}
    if values:
        differences = differing(exchange, values, call="shard()", within=within)
    alike = {name: text for name, text in values.items() if name not in differences}
    alike |= asked.report
    alike = {name: text for name, text in alike.items() if name not in asked.parts}
    if within:  # what peers are told is the same on all ranks of the group
        mine = json.dumps([alike.pop(name) for name in within if name in alike]).encode()
        everything = b"".join(exchange(mine, call="shard()"))
        alike["initial values of parameters with a mesh of their own"] = _hash(everything)
    seat.axes.share(None, "shard()", common=asked.settings_report, alike=alike)
    return differences


def _understood(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    build: Callable[[], Config],
    seat: Seat,
    sync_from: int | None,
) -> tuple[_Asked | None, ZeroshardError | None]:
    """Return what is asked for, checked, or why this rank refuses. Collective for policy="auto"
    alone.
    """
    try:
        settings = build()
    except ZeroshardError as refused:
        return None, refused
    everyone = None
    if settings.policy == AUTO:
        everyone = _facts(model, optimizer, settings, seat, sync_from)
    try:
        if everyone is not None:
            settings = _chosen(model, optimizer, settings, seat, everyone)
        return _checked(model, optimizer, settings, seat, sync_from), None
    except ZeroshardError as refused:
        return None, refused


def _facts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Config,
    seat: Seat,
    sync_from: int | None,
) -> list[dict[str, Any]]:
    """Return what all ranks know of their machines, for policy="auto". Collective.

    Raises this rank's error, another's, or PlanMismatch where not all ranks ask for it.
    """
    from zeroshard.auto import facts  # and with it the planner, for nobody else

    exchange, error, own = through(seat.group), None, {}
    try:
        if seat.dims.others or seat.own:
            raise ConfigError("policy='auto' plans data parallel ranks alone, and this mesh has"
                              " other axes or mesh_of: name a row")  # fmt: skip
        refuse_inside("shard()")
        _check_model(model, optimizer)
        own = facts(model, settings, 1 if seat.group is None else seat.group.size())
    except ZeroshardError as refused:
        error = refused
    report = {**_mesh_report(seat), "sync_from": str(sync_from), "policy": AUTO}  # as others begin
    with seat.axes.telling("shard()"):
        agree(exchange, report, call="shard()", error=error, remedy=REMEDY)
        everyone = exchange(json.dumps(own).encode(), "shard()")
    return [json.loads(one) for one in everyone]


def _chosen(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Config,
    seat: Seat,
    everyone: list[dict[str, Any]],
) -> Config:
    """Return `settings` with the row that the planner takes; rank 0 logs it. Raises ConfigError
    where nothing fits.
    """
    from zeroshard.auto import decide

    def check(asked: Config) -> None:
        asked.refuse_unsupported()
        _check_nodes(Mesh.of(len(everyone), _node_size(asked, seat.dims)), asked)

    known = settings.comm.node_size if seat.dims.node_size is None else seat.dims.node_size
    out, told = decide(model, optimizer, settings, everyone, node_size=known, check=check)
    if seat.rank == 0:
        _log.info("%s", told)
    return out


def _checked(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Config,
    seat: Seat,
    sync_from: int | None,
) -> _Asked:
    """Check everything on this rank. Nothing is changed or sent. Raises ConfigError."""
    world = 1 if seat.group is None else seat.group.size()
    settings.refuse_unsupported()
    settings.batch_sizes(world)
    node_size = _node_size(settings, seat.dims)
    mesh = Mesh.of(world, node_size, seat.dims.others)
    _check_nodes(mesh, settings)
    if sync_from is not None and not 0 <= sync_from < world:
        raise ConfigError(f"sync_from={sync_from} is not a rank of this group of {world}")
    if sync_from is not None and any(axis.alike for axis in mesh.others):
        raise ConfigError(
            f"sync_from={sync_from} would copy inside each data parallel group, and the replicas"
            " along 'tp' must begin alike: build the same model on every rank (same seed)"
        )
    refuse_inside("shard()")
    _check_model(model, optimizer)
    check_dtensors(named_parameters_once(model), seat.mesh, seat.dims)
    precision = settings.resolved_precision()
    _check_precision(model, precision)
    dtypes = compute_dtypes(model, precision)
    _check_codecs(model, dtypes, settings)
    plans = partition_units(model, settings.units, own_meshes=[own.pattern for own in seat.own])
    _check_own_meshes(model, plans, seat, mesh, settings, sync_from)
    groups = {own.pattern: own.holders.groups for own in seat.own}
    within = {
        _initial(name): groups[plan.pattern]
        for plan in plans
        if plan.pattern
        for name in plan.parameters
    }
    common = {"sync_from": str(sync_from), **_settings_report(settings, node_size)}
    common = _mesh_report(seat) | common
    report = _report(model, optimizer, dtypes, plans)
    values = _initial_values(model) if sync_from is None else {}
    named = named_parameters_once(model).items()
    parts = frozenset(_initial(name) for name, p in named if part_of(name, p).axes)
    if values and any(fingerprint_of(parameter) is not None for parameter in model.parameters()):
        deferred = report | {"a deferred model": "yes"}
        return _Asked(settings, mesh, dtypes, plans, common, deferred, values, parts, within)
    return _Asked(settings, mesh, dtypes, plans, common, report | values, {}, parts, within)


def _make_context(
    model: nn.Module,
    asked: _Asked,
    seat: Seat,
    sync_from: int | None,
    *,
    trains: bool,
    told: Mapping[int, str],
) -> Context:
    """Make the parts that the whole engine shares: transport, stores, ... Collective.

    `told`: the errors of values that differ between ranks, by id of the parameter.
    """
    settings, policy = asked.settings, asked.settings.resolved_policy()
    precision = settings.resolved_precision()
    device = next(model.parameters()).device
    spec = CommSpec(
        asked.mesh,
        name=settings.comm.transport,
        two_level=settings.comm.hierarchical,
        columns=policy.keeps_columns,
        node_sums=policy.sums_nodes,
        hop_dtype=torch.bfloat16 if settings.comm.grad_codec == "bf16" else torch.float32,
        ordered=settings.comm.ordered,
        stall_timeout_s=settings.stall_timeout_s,
        pool_bytes=_pool_bytes(asked, ""),
    )
    with seat.axes.telling("shard()"):
        tiering = _make_tiering(settings, model, seat.group, device)
        transport = make_transport(seat.group, device, spec)
    axes = seat.axes.connected(spec, transport.traffic)
    context = Context(
        policy=policy,
        precision=precision,
        dtypes=asked.dtypes,
        transport=transport,
        mesh=asked.mesh,
        everyone=Everyone(transport.control, axes),
        holders=Holders.everyone(transport.size, transport.rank),
        streams=make_streams(device),
        meter=MemoryCounter(),
        memory=DeviceMemory(device, Pages(), tiering.link),
        faults=Faults(transport, active=bool(tiering.stores), differing=told),
        options=Options(
            strict=settings.strict,
            verify_every=settings.verify_every,
            broadcast_buffers=settings.broadcast_buffers,
            clip_norm=settings.gradient_clipping,
            loss_scaler=settings.loss_scaler(),
            trains=trains,
            codecs=settings.comm.codecs(),
        ),
        prepare=lambda tensors: _prepare(tensors, transport, sync_from),
        tiering=tiering,
    )
    own = {one.pattern: _own_context(one, context, asked, spec) for one in seat.own}
    return replace(context, own=own)


def _own_context(own: OwnMesh, whole: Context, asked: _Asked, spec: CommSpec) -> Context:
    """Return the context of parameters with a mesh of their own. Collective over that."""
    mesh, members = own.holders.mesh(whole.mesh), own.holders.members
    spec = replace(
        spec,
        mesh=mesh,
        name="auto" if len(members) == 1 else spec.name,
        pool_bytes=_pool_bytes(asked, own.pattern),
        # where hosts are several, groups inside one would gather without the memory of the others
        alias=whole.transport.one_sided,
        members=members,
    )
    transport = make_transport(own.group, whole.device, spec, whole.transport.traffic)
    return replace(whole, transport=transport, mesh=mesh, holders=own.holders)


def _pool_bytes(asked: _Asked, pattern: str) -> int:
    """Return the bytes of the gradient buffers of the units of `pattern`: twice the largest."""
    numel = max((plan.local_numel for plan in asked.plans if plan.pattern == pattern), default=0)
    return 2 * numel * asked.dtypes.widest(asked.settings.resolved_precision())


def _make_tiering(
    settings: Config, model: nn.Module, group: dist.ProcessGroup | None, device: torch.device
) -> Tiering:
    """Make the configured stores. An unusable disk raises StorageError on every rank."""
    offload = settings.offload
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    link = link_of(device) if offload.link is None else offload.link
    stores: dict[Tier, Store] = {}
    error: StorageError | None = None
    try:
        if Tier.HOST in offload.away.values():
            stores[Tier.HOST] = HostStore(device, link=link)
        if Tier.DISK in offload.away.values():
            assert offload.disk_path is not None
            directory = SwapDirectory(offload.disk_path, rank=rank)
            stores[Tier.DISK] = DiskStore(directory, device, verify=offload.verify, link=link)
    except StorageError as failed:
        error = failed
    if offload.away:
        try:
            agree(through(group), {}, call="shard()", error=error, refusal=StorageError)
        except StorageError:
            for store in stores.values():
                store.close()
            raise
    fractions, automatic, least = offload.fractions(), offload.fraction == "auto", 0.0
    if automatic:
        least = _no_room_for(model, device, world)
        fractions["optimizer"] = fractions["grad"] = first_fraction(device, link, least=least)
    return Tiering(
        stores=stores,
        fractions=fractions,
        least=least,
        link=link,
        staging_bytes=offload.staging_bytes or Tiering.staging_bytes,
        automatic=automatic,
        delayed_update=offload.delayed_update,
    )


def _no_room_for(model: nn.Module, device: torch.device, world: int) -> float:
    """Return the share of the optimizer's state that half of the free memory cannot hold."""
    if device.type == "cpu":
        return 0.0
    free, _ = torch.get_device_module(device).mem_get_info(device)
    numel = sum(local_of(p).numel() for p in model.parameters() if p.requires_grad)
    return max(0.0, 1.0 - 0.5 * float(free) / (12 * numel / world))


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}, not a torch.nn.Module: give shard() one module"
            " that holds all the others"
        )
    if model.__dict__.get(OWNED):
        raise ConfigError(f"{type(model).__name__} is sharded already: call engine.close() first")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel: give shard() the module inside"
            " (model.module)"
        )
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "the model is wrapped in DataParallel: give shard() the module inside (model.module),"
            " on one rank per device"
        )
    parameters = named_parameters_once(model)
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    _check_parameters(parameters)
    check_overlap(model)
    for name, module in model.named_modules():
        _check_module(name, module)
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    check_parameters(optimizer, parameters)
    check_elementwise(optimizer)


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
    check_device(next(iter(devices)))
    if any(device.type == "meta" for device in devices):
        raise ConfigError(
            "the model is on the meta device and has no values: build it inside"
            " zeroshard.deferred_init() instead"
        )


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
    if module._compiled_call_impl is not None:
        raise ConfigError(
            f"module {shown} was compiled with its hooks, module.compile():"
            " compile what they surround, module.forward = torch.compile(module.forward), for"
            " each block"
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


def _check_precision(model: nn.Module, precision: Precision) -> None:
    for name, parameter in named_parameters_once(model).items():
        fits = parameter.dtype in (torch.float32, precision.compute)
        if parameter.is_floating_point() and not fits:
            dtype = dtype_name(parameter.dtype)
            raise ConfigError(
                f"parameter {name!r} is {dtype} but precision computes in"
                f" {dtype_name(precision.compute)}: pass precision={dtype!r}, or call model.float()"
                " before building the optimizer"
            )


def _check_codecs(model: nn.Module, dtypes: Dtypes, settings: Config) -> None:
    """Raise ConfigError for parameters a codec cannot take, or a codec without any."""
    comm, named = settings.comm, named_parameters_once(model)
    all_train = all(parameter.requires_grad for parameter in named.values())
    if comm.frozen_codec is not None and all_train:
        raise ConfigError(
            f"comm.frozen_codec={comm.frozen_codec!r} has no effect: every parameter of this model"
            " is trained"
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


def _check_nodes(mesh: Mesh, settings: Config) -> None:
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


def _node_size(settings: Config, dims: Dims) -> int | None:
    """Return ranks per node: what the mesh's names say, or the settings; rows that keep columns
    default to the launcher's variable.
    """
    asked, policy = settings.comm.node_size, settings.resolved_policy()
    if dims.node_size is not None:
        if not policy.keeps_columns:
            raise ConfigError(
                f"policy={policy.name!r} does not shard over the inner data parallel dimension"
                " alone: take 'mics' (FSDP2's HSDP), 'hpz' or 'hfsdp', or a mesh with one, 'dp'"
            )
        if asked not in (None, dims.node_size):
            raise ConfigError(
                f"comm.node_size={asked} is not the mesh's nodes of {dims.node_size} ranks:"
                " leave it out"
            )
        return dims.node_size
    if asked is not None or not policy.keeps_columns:
        return asked
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


def _check_own_meshes(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    seat: Seat,
    mesh: Mesh,
    settings: Config,
    sync_from: int | None,
) -> None:
    """Raise ConfigError for what cannot be done beside meshes of parameters' own."""
    if not seat.own:
        return
    for own in seat.own:
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


def _mesh_report(seat: Seat) -> dict[str, str]:
    """Return that there is no mesh: ranks that have one have compared it before (seat_of)."""
    return {"mesh": "none"} if seat.mesh is None else {}


def _settings_report(settings: Config, node_size: int | None) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, in order of importance."""
    report = {
        "policy": settings.resolved_policy().name,
        "precision": settings.resolved_precision().describe(),
        "comm": settings.comm.model_dump_json(),
        "comm.node_size": str(node_size),
        "offload": settings.offload.model_dump_json(exclude={"disk_path"}),
    }
    return report | {name: str(getattr(settings, name)) for name in _COMPARED}


def _report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dtypes: Dtypes,
    plans: list[UnitPlan],
) -> dict[str, str]:
    """Return what of the model must be equal on all of its ranks, in order of importance."""
    report: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, parameter in named_parameters_once(model).items():
        names[id(parameter)] = name
        dtype = dtype_name(dtypes.of[id(parameter)])
        kind = "trained" if parameter.requires_grad else "frozen"
        report[f"parameter {name}"] = f"{whole_shape(parameter)} {dtype} {kind}"
    for plan in plans:
        report[f"unit {plan.name}"] = ", ".join(plan.parameters)
    report["optimizer"] = type(optimizer).__name__
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        params = [names[id(parameter)] for parameter in group["params"]]
        report[f"optimizer param group {index}"] = ", ".join(params)
        for key, value in group.items():
            if key not in ("params", "param_names"):
                report[f"optimizer param group {index}: {key}"] = repr(value)
    return report


def _initial_values(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter's values, or of how they will be computed."""
    values: dict[str, str] = {}
    for name, parameter in named_parameters_once(model).items():
        recipe = fingerprint_of(parameter)
        value = digest_of(local_of(parameter)) if recipe is None else f"deferred {recipe}"
        values[_initial(name)] = value
    return values


def _hash(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=8).hexdigest()


def _initial(name: str) -> str:
    """Return what reports call the initial value of a parameter."""
    return f"initial value of {name}"


def _told(model: nn.Module, differences: Mapping[str, str]) -> dict[int, str]:
    """Return, by parameter id, the error message for values that differ between ranks."""
    remedy = f"{REMEDY}, or give it values with zs.load_pretrained() before its first use"
    named = named_parameters_once(model).items()
    keys = {_initial(name): id(parameter) for name, parameter in named}
    return {
        keys[name]: f"the ranks disagree, first about {name!r}: {who}. {remedy}"
        for name, who in differences.items()
    }


def _prepare(tensors: Iterable[torch.Tensor], transport: Transport, source: int | None) -> None:
    """Give deferred `tensors` their values, and with `source` give all of them that rank's."""
    tensors = list(tensors)
    if source is None or transport.rank == source:
        materialize(*tensors)
    else:
        allocate(*tensors)
    if source is None:
        return
    with torch.no_grad():
        for tensor in tensors:
            dense = tensor.data.contiguous()
            transport.broadcast(dense, source)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(dense)
