"""Which transport serves a group of ranks: the only place that looks at backends and devices.

Invariant: decided from what is the same on every rank. It does not downgrade silently: what was
asked for by name is made or refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from zeroshard.comm.gloo_peers import Subgroup
from zeroshard.comm.nccl import NcclTransport
from zeroshard.comm.one_process import OneProcess
from zeroshard.comm.paired import PairedTransport
from zeroshard.comm.shared_memory import make_gloo, make_paired
from zeroshard.comm.transport import Traffic, Transport
from zeroshard.comm.two_level import Lowering, TwoLevelTransport
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError

__all__ = ["make_transport"]

_NAMES = ("auto", "one_process", "shared_memory", "gloo", "mixed", "nccl")


def make_transport(
    group: dist.ProcessGroup | None,
    *,
    name: str = "auto",
    device: torch.device | None = None,
    node_size: int | None = None,
    ordered: bool | None = None,
    stall_timeout_s: float = 300.0,
    pool_bytes: int | None = None,
    alias: bool = True,
    two_level: bool | None = None,
    columns: bool = False,
    node_sums: bool = False,
    hop_dtype: torch.dtype = torch.float32,
) -> Transport:
    """Make the transport of `group` (None: the default group, or one process where there is
    none). Collective.

    `name` "auto" takes what fits `device`; "one_process", "shared_memory", "gloo", "mixed" and
    "nccl" are made or refused with ConfigError. `node_size` ranks form a node of the canonical sum;
    collectives go in two levels, inside nodes and between, where `two_level` says so (None: where
    that moves fewer bytes between hosts). `columns` says that a row keeps columns, `node_sums` sums
    of nodes, which travel in `hop_dtype`. `ordered` asks for that sum on backends that have a
    faster one of their own.
    `pool_bytes` bounds the gradient buffers (at least one is always given; None: twice the
    largest). `alias` lets sharded windows of one host be one mapping that is the full buffer.
    """
    device = torch.device("cpu") if device is None else device
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    _check_name(name, 1 if group is None else group.size(), has_group=group is not None)
    if group is None or (group.size() == 1 and name in ("auto", "one_process")):
        return OneProcess(stall_timeout_s=stall_timeout_s, pool_bytes=pool_bytes)
    mesh = Mesh.of(group.size(), node_size)
    lowering = Lowering(mesh, two_level, node_sums, hop_dtype)
    options: dict[str, Any] = {"stall_timeout_s": stall_timeout_s, "pool_bytes": pool_bytes}
    if name == "nccl" or (name == "auto" and device.type != "cpu" and _has_native(group, device)):
        return _make_native(
            group, mesh, lowering, columns=columns, device=device, ordered=bool(ordered), **options
        )
    if ordered is False:
        raise ConfigError(
            "ordered=False: on CPU ranks the ordered exchange is the only reduce (and the fast"
            " one); leave it out"
        )
    only_gloo = name == "gloo" or (name == "auto" and device.type != "cpu")
    if device.type != "cpu" and not only_gloo:
        raise ConfigError(
            f"transport {name!r} serves CPU tensors, not {device}: use 'auto', 'nccl' or 'gloo'"
        )

    def make(
        circle: Subgroup, node_size: int | None, traffic: Traffic | None = None
    ) -> PairedTransport:
        if only_gloo:
            return make_gloo(circle, node_size=node_size, traffic=traffic, **options)
        shared: dict[str, Any] = {"required": name != "auto", "alias": alias}
        return make_paired(circle, node_size=node_size, traffic=traffic, **shared, **options)

    circle = Subgroup.of(group)
    flat = make(circle, mesh.node_size)
    # one host has no slow wire to spare
    is_fast = flat.name == "shared_memory" and two_level is None
    if mesh.num_nodes == 1 or not (columns or (lowering.ever and not is_fast)):
        return flat
    inside = make(circle.part(mesh.node(circle.rank)), None, flat.traffic)
    between = make(circle.part(mesh.column(circle.rank)), 1, flat.traffic)
    return TwoLevelTransport(flat, inside, between, mesh=mesh, lowering=lowering)


def _check_name(name: str, world: int, *, has_group: bool) -> None:
    if name not in _NAMES:
        raise ConfigError(f"unknown transport {name!r}; one of: {', '.join(_NAMES)}")
    if not has_group and name not in ("auto", "one_process"):
        raise ConfigError(
            f"transport {name!r} needs torch.distributed: call zeroshard.init_distributed() first"
        )
    if name == "one_process" and world > 1:
        raise ConfigError(
            f"transport 'one_process' serves one rank, and there are {world}; use 'auto'"
        )


def _make_native(
    group: dist.ProcessGroup,
    mesh: Mesh,
    lowering: Lowering,
    *,
    columns: bool,
    device: torch.device,
    ordered: bool,
    **options: Any,
) -> Transport:
    flat = NcclTransport(group, device=device, ordered=ordered, node_size=mesh.node_size, **options)
    if mesh.num_nodes == 1 or not (columns or lowering.ever):
        return flat
    options |= {"device": device, "ordered": ordered, "traffic": flat.traffic}
    inside, between = (_subgroup(group, ranks) for ranks in _subsets(mesh))
    return TwoLevelTransport(
        flat,
        NcclTransport(inside, node_size=None, **options),
        NcclTransport(between, node_size=1, **options),
        mesh=mesh,
        lowering=lowering,
    )


def _subsets(mesh: Mesh) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the ranks of every node, and of every column."""
    nodes = [mesh.node(node * mesh.node_size) for node in range(mesh.num_nodes)]
    return nodes, [mesh.column(local) for local in range(mesh.node_size)]


def _subgroup(group: dist.ProcessGroup, subsets: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """Make a process group of each of `subsets`, ranks of `group`; return the one of this rank.
    Collective.
    """
    in_job = [[dist.get_global_rank(group, rank) for rank in ranks] for ranks in subsets]
    made = [dist.new_group(ranks) for ranks in in_job]
    mine: dist.ProcessGroup = next(
        made[index] for index, ranks in enumerate(subsets) if group.rank() in ranks
    )
    return mine


def _has_native(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` has a backend of `device`'s own, such as NCCL."""
    try:
        return dist.get_backend(group) != "gloo" and group._get_backend(device) is not None
    except RuntimeError:
        return False
