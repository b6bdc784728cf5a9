"""Bytes of every rank to every rank through a process group, without pickle:
``all_gather_object`` would execute what a peer sends.

Invariant: no device takes part. A group without a backend for CPU tensors (plain NCCL) gets a gloo
group of the same ranks, once; only what these must compare before goes over the device. Cost: two
collectives, of 8 bytes and of the longest payload per rank.
"""

from __future__ import annotations

import json
from functools import partial
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zeroshard.comm.compat import all_gather_single
from zeroshard.comm.groups import make_group
from zeroshard.comm.ranks import Ranks

__all__ = ["gather_bytes", "on_cpu", "ranks_through"]

_FEW = 32  # bytes of a payload that goes through the device
_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def ranks_through(*groups: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks along process `groups`, in the order of their mesh: each rank is in one of
    every axis. Without a group: this one rank.
    """
    known = [group for group in groups if group is not None]
    rank = 0
    for group in known:
        rank = rank * group.size() + group.rank()

    def exchange(payload: bytes, call: str) -> list[bytes]:
        parts = gather_bytes(known[-1], payload)
        for group in reversed(known[:-1]):
            text = json.dumps([part.decode("latin-1") for part in parts])
            rows = map(json.loads, gather_bytes(group, text.encode()))
            parts = [part.encode("latin-1") for row in rows for part in row]
        return parts

    size = prod(group.size() for group in known)
    return Ranks(rank, size, exchange if known else None)


def gather_bytes(group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
    """Return every rank's `payload`, of any size, in rank order. Collective."""
    served, size = on_cpu(group), group.size()
    lengths = torch.zeros(size, dtype=torch.int64)
    all_gather_single(lengths, torch.tensor([len(payload)], dtype=torch.int64), group=served)
    longest = max(1, *lengths.tolist())
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = torch.empty(size * longest, dtype=torch.uint8)
    all_gather_single(rows, padded, group=served)
    payloads = [
        row[:length].numpy().tobytes()
        for row, length in zip(rows.view(size, longest), lengths.tolist(), strict=True)
    ]
    if served is group:
        return payloads
    ranks = dist.get_process_group_ranks(group)
    by_rank = dict(zip(sorted(ranks), payloads, strict=True))  # new_group sorts its ranks
    return [by_rank[rank] for rank in ranks]


def on_cpu(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return `group`, or the gloo group beside it where it serves no CPU tensors."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        if group not in _beside:
            _beside[group] = _gloo_beside(group)
        return _beside[group]
    return group


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a gloo group of the same ranks. Collective."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        return make_group(ranks, partial(_gather_on_device, group), backend="gloo")
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo")
    return made


def _gather_on_device(group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
    """Return every rank's `payload` of a few bytes, padded with blanks, through the device."""
    assert len(payload) <= _FEW, payload
    served = sorted(group._device_types, key=lambda device: device.type != "cpu")
    device = group.bound_device_id or served[0]
    mine = torch.frombuffer(bytearray(payload.ljust(_FEW)), dtype=torch.uint8).to(device)
    rows = torch.empty(group.size() * _FEW, dtype=torch.uint8, device=device)
    all_gather_single(rows, mine, group=group)
    return [bytes(row) for row in rows.view(-1, _FEW).tolist()]
