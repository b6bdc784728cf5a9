"""Bytes of every rank to every rank through a process group, without pickle:
``all_gather_object`` would execute what a peer sends.

`GroupRanks` wait for each other by a limit of their own where they have one: the group's may be
half an hour, and its error names nobody. A rank that waits says so in the job's store after a
second, so that those which are not there can be named.

Invariant: no device takes part. A group without a backend for CPU tensors (plain NCCL) gets a gloo
group of the same ranks, once; only what these must compare before goes over the device. Cost: two
collectives, of 8 bytes and of the longest payload per rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zeroshard.comm.compat import all_gather_single
from zeroshard.comm.groups import job_timeout, make_group
from zeroshard.comm.ranks import Ranks
from zeroshard.errors import StallError

_FEW = 32  # bytes of a payload that goes through the device
_SAYS_AFTER_S = 1.0  # when a rank that waits says that it is there
_num_gathers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # of this rank
_beside: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class GroupRanks(Ranks):
    """The ranks along process groups; see `ranks_through`."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], limit_s: float | None) -> None:
        rank = 0
        for group in groups:
            rank = rank * group.size() + group.rank()
        exchange = self._gather if groups else None
        super().__init__(rank, prod(group.size() for group in groups), exchange)
        self._limit_s = limit_s  # how long it waits for others; None: as the group does
        self._groups = groups

    def _gather(self, payload: bytes, call: str) -> list[bytes]:
        gather = partial(gather_bytes, call=call, limit_s=self._limit_s)
        parts = gather(self._groups[-1], payload)
        for group in reversed(self._groups[:-1]):
            text = json.dumps([part.decode("latin-1") for part in parts])
            rows = map(json.loads, gather(group, text.encode()))
            parts = [part.encode("latin-1") for row in rows for part in row]
        return parts


def ranks_through(*groups: dist.ProcessGroup | None, limit_s: float | None = None) -> GroupRanks:
    """Return the ranks along process `groups`, in the order of their mesh: each rank is in one of
    every axis. Without a group: this one rank. They wait for each other for `limit_s`.
    """
    return GroupRanks([group for group in groups if group is not None], limit_s)


def gather_bytes(
    group: dist.ProcessGroup, payload: bytes, *, call: str = "", limit_s: float | None = None
) -> list[bytes]:
    """Return every rank's `payload`, of any size, in rank order. Collective. Raises StallError,
    which names those that have not come to `call`, after `limit_s`.
    """
    served, size = on_cpu(group), group.size()
    lengths = torch.zeros(size, dtype=torch.int64)
    own = torch.tensor([len(payload)], dtype=torch.int64)
    work = all_gather_single(lengths, own, group=served, async_op=True)
    _wait(work, group, call, limit_s)
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


def _wait(work: dist.Work, group: dist.ProcessGroup, call: str, limit_s: float | None) -> None:
    """Wait for `work` of all ranks of `group`. Raises StallError."""
    _num_gathers[group] = number = _num_gathers.get(group, 0) + 1
    if limit_s is None:
        work.wait()
        return
    store, ranks = _get_default_store(), dist.get_process_group_ranks(group)
    keys = [f"zeroshard/{group.group_name}/{number}/{rank}" for rank in ranks]
    soon = min(_SAYS_AFTER_S, limit_s / 2)
    for seconds in (soon, limit_s - soon):
        try:
            work.wait(timedelta(seconds=seconds))
            return
        except RuntimeError:
            if work.is_completed():
                raise
        store.set(keys[group.rank()], "waits")
    absent = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
    raise StallError(
        f"{call}: rank(s) {absent} did not come within {limit_s:g} s; see what they are doing, or"
        " raise stall_timeout_s if they are only slow"
    )


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
    made: dist.ProcessGroup = dist.new_group(ranks, job_timeout(), "gloo")
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
