"""Which transport serves a group of ranks: the only place that looks at backends and devices.

Invariant: decided from what is the same on every rank. It does not downgrade silently: what was asked for by name is made or refused.
"""

from __future__ import annotations

import torch
from torch import distributed as dist

from zeroshard.comm.nccl import NcclTransport
from zeroshard.comm.one_process import OneProcess
from zeroshard.comm.shared_memory import make_gloo, make_paired
from zeroshard.comm.transport import Transport
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
    host_id: str | None = None,
) -> Transport:
    """Make the transport of `group` (None: the default group, or one process where there is none). Collective.

    `name` "auto" takes what fits `device`; "one_process", "shared_memory", "gloo", "mixed" and "nccl" are made or refused with ConfigError.
    `node_size` ranks form a node of the canonical sum. `ordered` asks for that sum on backends that have a faster one of their own.
    `pool_bytes` bounds the gradient buffers (at least one is always given; None: twice the largest). `alias` lets sharded
    windows of one host be one mapping that is the full buffer. `host_id` lets tests pretend that ranks live on different hosts.
    """
    device = torch.device("cpu") if device is None else device
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or (group.size() == 1 and name in ("auto", "one_process")):
        if name not in ("auto", "one_process"):
            raise ConfigError(f"transport {name!r} needs torch.distributed: call zeroshard.init_distributed() first")
        return OneProcess(stall_timeout_s=stall_timeout_s, pool_bytes=pool_bytes)
    if name not in _NAMES:
        raise ConfigError(f"unknown transport {name!r}; one of: {', '.join(_NAMES)}")
    if name == "one_process":
        raise ConfigError(f"transport 'one_process' serves one rank, and there are {group.size()}; use 'auto'")
    if name == "nccl" or (name == "auto" and device.type != "cpu" and _has_native(group, device)):
        return NcclTransport(
            group, device=device, ordered=bool(ordered), node_size=node_size, stall_timeout_s=stall_timeout_s, pool_bytes=pool_bytes
        )
    if ordered is False:
        raise ConfigError("ordered=False: on CPU ranks the ordered exchange is the only reduce (and the fast one); leave it out")
    if name == "gloo" or (name == "auto" and device.type != "cpu"):
        return make_gloo(group, node_size=node_size, stall_timeout_s=stall_timeout_s, pool_bytes=pool_bytes)
    if device.type != "cpu":
        raise ConfigError(f"transport {name!r} serves CPU tensors, not {device}: use 'auto', 'nccl' or 'gloo'")
    return make_paired(
        group,
        required=name != "auto",
        host_id=host_id,
        node_size=node_size,
        stall_timeout_s=stall_timeout_s,
        pool_bytes=pool_bytes,
        alias=alias,
    )


def _has_native(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` has a backend of `device`'s own, such as NCCL."""
    try:
        return dist.get_backend(group) != "gloo" and group._get_backend(device) is not None
    except RuntimeError:
        return False
