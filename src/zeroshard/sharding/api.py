"""``zeroshard.shard`` and ``zeroshard.init_distributed``: from a plain model to an Engine.

Everything that can be refused is refused, and everything that could differ between ranks is
compared, before the first parameter is changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.checkpoint.kept import tell_keepers
from zeroshard.comm.device_mesh import Holders, MeshAxes, OwnMesh, mesh_axes_of
from zeroshard.comm.job import init_distributed
from zeroshard.comm.ranks import MeshRanks, Ranks
from zeroshard.comm.select import (
    FIRST_STALL_TIMEOUT_S,
    STALL_TIMEOUT_S,
    connect_axes,
    first_stall_timeout_s,
    make_levels,
)
from zeroshard.comm.transport import CommSpec, Transport
from zeroshard.config import Config, ShardOptions, build_config
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.precision import dtype_name
from zeroshard.core.schedule.rules import grad_pool_bytes
from zeroshard.core.tree import Deal, Tree
from zeroshard.errors import CheckpointError, StorageError
from zeroshard.memory import MemoryCounter, Pages
from zeroshard.nn.deferred import allocate, deferred_init, materialize
from zeroshard.optim.several import joined
from zeroshard.runtime.context import Context, Faults, Options, Tiering
from zeroshard.runtime.engine import Engine, attach
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.step_tiles import first_fraction
from zeroshard.runtime.streams import make_streams
from zeroshard.runtime.units import UnitSpec, model_of
from zeroshard.sharding.repartition import Repartition
from zeroshard.sharding.request import Call, ShardRequest, requested
from zeroshard.state.local import local_of
from zeroshard.state.state import DeviceMemory
from zeroshard.system.device import Device
from zeroshard.tier.store import Store, link_of
from zeroshard.tier.stores import make_store

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["deferred_init", "init_distributed", "materialize", "shard"]

_log = logging.getLogger("zeroshard")
_MANY = 16  # ranks from which it is told that a backend rounds their sum at each hop


def shard(
    model: nn.Module | PipelineStage | Sequence[PipelineStage],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    stage: int | None = None,
    *,
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

    Both stay the objects they were; a list of several optimizers steps one model, each its own
    parameters (docs/optimizers.md). `model` may be this rank's stage, or list of stages, of
    torch.distributed.pipelining (``engine.follow``). `stage` 0 to 3 or `policy` (a row's name, a
    Policy, or "auto": the fastest row that the planner finds to fit here) says where each state
    rests (default: stage 3); `config` is a Config, a dict or a path to JSON, of our form or
    DeepSpeed's, and keywords go before it; `units` are module classes, qualified names or a
    callable(name, module) -> bool (default: found automatically); `mesh` a DeviceMesh (default: all
    ranks), sharded over its data parallel dimensions: what `dp` names, else the only one, or "dp",
    or "dp_replicate" x "dp_shard", the nodes and local ranks of hpz, mics and hfsdp, and "cp".
    Beside them "pp" (other parameters) and "tp" (plain parameters are the same, DTensors are parts)
    may be there: norm, clip and steps count for the whole mesh (docs/composition.md). `mesh_of`
    gives modules with names that match a pattern a mesh of their own; its "dp" or "cp" runs over
    the ranks with the same parameters: ``{"*.experts": mesh}``. All ranks take the weights and
    buffers of the data parallel rank `sync_from` (default: they are compared). See
    ``help(zs.Config)``.

    Raises ConfigError for what cannot be done, and PlanMismatch where the ranks disagree, on every
    rank, before anything is changed.
    """

    @cache
    def settings() -> Config:
        return build_config(config, stage=stage, policy=policy, units=units, **overrides)

    def read() -> tuple[Call, Config]:
        joint = None if optimizer is None else joined(optimizer)
        return Call(model_of(model), joint, mesh_axes, sync_from), settings()

    limit_s = None
    with suppress(Exception):  # `read` raises it, where all ranks hear of it
        limit_s = settings().stall_timeout_s
    mesh_axes = mesh_axes_of(mesh, dp, mesh_of, limit_s=limit_s or FIRST_STALL_TIMEOUT_S)
    request = requested(mesh_axes, read)
    context = _make_context(request, mesh_axes, sync_from, trains=optimizer is not None)
    context.prepare([local_of(buffer) for buffer in request.model.buffers()])
    again = Repartition(request, mesh_axes, _make_context)
    prefetch_bytes = request.settings.prefetch_bytes
    engine = None
    try:
        engine = Engine(
            request.model, request.plans, context, prefetch_bytes=prefetch_bytes, repartition=again
        )
        if optimizer is not None:
            attach(engine, joined(optimizer))
        tell_keepers(context.everyone)
    except (CheckpointError, StorageError):
        (context if engine is None else engine).close()
        raise
    context.faults.end_shard()
    return engine


def _make_context(
    request: ShardRequest, mesh_axes: MeshAxes, sync_from: int | None = None, *, trains: bool
) -> Context:
    """Make the parts that the whole engine shares: transport, stores, ... Collective."""
    settings, policy = request.settings, request.policy
    precision = settings.resolved_precision()
    device = next(request.model.parameters()).device
    controls: list[Any] = []
    first_s = settings.stall_timeout_s or first_stall_timeout_s(mesh_axes.group, device)
    spec = CommSpec(
        request.mesh,
        name=settings.comm.transport,
        two_level=settings.comm.hierarchical,
        columns=policy.keeps_columns,
        node_sums=policy.sums_nodes,
        hop_dtype=torch.bfloat16 if settings.comm.grad_codec == "bf16" else torch.float32,
        separate_reduce_group=settings.comm.separate_reduce_group,
        ordered=settings.comm.ordered if settings.leaves is None else True,
        stall_timeout_s=first_s,
        pool_bytes=_pool_bytes(request, ""),
        made=controls.append,
    )
    one_queue = f"{device.type.upper()}_DEVICE_MAX_CONNECTIONS"
    if os.environ.get(one_queue) == "1" and mesh_axes.rank == 0:
        _log.warning(
            "%s=1 puts all streams of a device into one queue: gathers and reduces wait for what is"
            " computed, and nothing overlaps; unset it (other libraries set it for their tensor"
            " parallelism)",
            one_queue,
        )
    with mesh_axes.along.together("shard()"):
        tiering = _make_tiering(request, mesh_axes, device)
        levels = make_levels(mesh_axes.group, device, spec)
    transport = levels.flat
    axes = connect_axes(mesh_axes.along, spec, transport.traffic)
    is_native = transport.name == "nccl" and not (spec.ordered or settings.comm.grad_codec)
    is_half, many = precision.wire.itemsize < 4, levels.inside.size >= _MANY
    if is_native and is_half and many and transport.rank == 0:
        _log.warning(
            "gradients of %d ranks are summed in %s, rounded at each hop of the backend's sum:"
            " precision=zs.Precision(%r, reduce='fp32') sends fp32, comm=zs.Comm(ordered=True) adds"
            " in fp32 (docs/mixed-precision.md)",
            levels.inside.size,
            dtype_name(precision.wire),
            dtype_name(precision.compute),
        )

    def first_step_over() -> None:
        for control in controls:
            control.limit_waits(settings.stall_timeout_s or STALL_TIMEOUT_S)

    context = Context(
        policy=policy,
        precision=precision,
        dtypes=request.dtypes,
        levels=levels,
        mesh=request.mesh,
        everyone=MeshRanks(transport.control, axes),
        holders=Holders.everyone(transport.size, transport.rank),
        streams=make_streams(device),
        meter=MemoryCounter(),
        memory=DeviceMemory(device, Pages(), tiering.link),
        faults=Faults(transport, active=bool(tiering.away), differing=request.differing),
        options=Options(
            strict=settings.strict,
            verify_every=settings.verify_every,
            broadcast_buffers=settings.broadcast_buffers,
            clip_norm=settings.gradient_clipping,
            loss_scaler=settings.loss_scaler(),
            trains=trains,
            codecs=settings.comm.codecs(),
            batch_shares=settings.unequal_shares(request.mesh.size),
            shares=request.shares,
            sums_ranks=settings.gradient_reduction == "sum",
        ),
        prepare=lambda tensors: _prepare(tensors, transport, sync_from),
        tiering=tiering,
        leaves=_leaves_of(request, transport.rank),
        first_step_over=first_step_over,
    )
    own = {one.pattern: _own_context(one, context, request, spec) for one in mesh_axes.own}
    return replace(context, own=own)


def _leaves_of(request: ShardRequest, rank: int) -> Leaves | None:
    leaves = request.settings.leaves
    counts = request.settings.leaves_of(request.mesh.size)
    if leaves is None or counts is None:
        return None
    cells = request.policy.all_cells
    whole = all(one.grad.is_partial and one.grad.scope is Scope.FULL for one in cells)
    return Leaves(Deal(Tree.parse(leaves), tuple(counts), request.mesh, whole), rank)


def _own_context(own: OwnMesh, whole: Context, request: ShardRequest, spec: CommSpec) -> Context:
    """Return the context of parameters with a mesh of their own. Collective over that."""
    mesh, members = own.holders.mesh(whole.mesh), own.holders.members
    spec = replace(
        spec,
        mesh=mesh,
        name="auto" if len(members) == 1 else spec.name,
        pool_bytes=_pool_bytes(request, own.pattern),
        # where hosts are several, groups inside one would gather without the memory of the others
        alias=whole.levels.one_sided,
        members=members,
    )
    levels = make_levels(own.group, whole.device, spec, whole.transport.traffic)
    return replace(whole, levels=levels, mesh=mesh, holders=own.holders)


def _pool_bytes(request: ShardRequest, pattern: str) -> int:
    """Return the bytes of the gradient buffers of the units of `pattern`: twice the largest."""
    numel = max((plan.local_numel for plan in request.plans if plan.pattern == pattern), default=0)
    return grad_pool_bytes(numel, request.dtypes.widest(request.settings.resolved_precision()))


def _make_tiering(request: ShardRequest, mesh_axes: MeshAxes, device: torch.device) -> Tiering:
    """Make the configured stores. An unusable disk raises StorageError on every rank."""
    offload, leaving = request.settings.offload, request.common.offload.leaving
    link = link_of(device)
    stores: dict[Tier, Store] = {}
    ranks = mesh_axes.ranks if leaving else Ranks()  # leaving on any rank
    with ExitStack() as stack:
        with ranks.together("shard()", refusal=StorageError):
            for tier in {*offload.away.values()} - {Tier.DEVICE}:
                stores[tier] = make_store(
                    tier,
                    device,
                    disk_path=offload.disk_path,
                    rank=mesh_axes.rank,
                    verify=offload.verify,
                    link=link,
                )
                stack.callback(stores[tier].close)
        stack.pop_all()
    fractions, automatic, least = offload.fractions(), offload.fraction == "auto", 0.0
    if automatic:
        share = (
            float(request.shares[mesh_axes.rank])
            if isinstance(request.shares, tuple)
            else 1 / mesh_axes.size
        )
        if device.type != "cpu" and share:  # what half of the free memory cannot hold
            free, _ = Device.of(device).mem_get_info()
            trained = [p for p in request.model.parameters() if p.requires_grad]
            numel = sum(local_of(p).numel() for p in trained)
            least = max(0.0, 1.0 - 0.5 * free / (12 * numel * share))
        fractions["optimizer"] = fractions["grad"] = first_fraction(device, link, least=least)
    return Tiering(
        stores=stores,
        away=leaving,
        fractions=fractions,
        least=least,
        link=link,
        staging_bytes=offload.staging_bytes or Tiering.staging_bytes,
        automatic=automatic,
        delayed_update=offload.delayed_update,
        step_in_backward=offload.step_in_backward,
    )


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
