"""Process groups that their members make, where the group that they are parts of is not the whole
job: ``dist.new_group`` as it is would wait for every rank of the job.

torch names such a group by its ranks and by how many groups this rank is in, and members that
name it otherwise wait for each other for ever. So they compare these numbers first. A group that is
destroyed leaves its name to the next of the same ranks, and its addresses in the job's store: the
members of each new group meet under a prefix of its own there.

Where the job's group is bound to a device (``init_process_group(device_id=)``), torch would split
its communicator for a new NCCL group, which takes every rank of the job. So these groups are made
as if it were not bound.

NCCL connects the ranks of a group at its first collective, which may be one of a backward. So a
group is connected as it is made, by a collective of a byte per rank: what cannot be connected is
told with the group's name, and the device memory that the connections take is there, and known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from zeroshard.comm.ranks import Ranks
from zeroshard.core.boxes import sends
from zeroshard.core.layout import Range
from zeroshard.errors import ConfigError, StallError, StateError
from zeroshard.system.device import Device

# ------------------------------------------------------------------------------ torch's collectives
# The two collectives that torch 2.13 renamed, under their new names on every torch, without a
# warning on any. Of a step's own gathers and sums the process group's methods are called: the
# functions of torch.distributed around them check their arguments first, in a dozen Python calls
# each. Everything else in torch.distributed is called where it is used. No patching.

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _method(name: str, older: str) -> Any:
    method = getattr(dist.ProcessGroup, name, None) or getattr(dist.ProcessGroup, older)
    return getattr(method, "__func__", method)  # torch 2.10's is one around it


# (group, out, own, AllgatherOptions) and (group, out, data, ReduceScatterOptions) -> Work | None
group_all_gather = _method("all_gather_single", "_allgather_base")
group_reduce_scatter = _method("reduce_scatter_single", "_reduce_scatter_base")


def has_timed_out(error: RuntimeError) -> bool:
    """Return whether a backend says, in its own words, that its limit of time has passed."""
    return any(words in str(error) for words in ("imed out", "timeout"))


# ------------------------------------------------------------------------------------------- groups

# bytes of device memory that connecting took; None: the device does not say what is free
_taken: WeakKeyDictionary[dist.ProcessGroup, int | None] = WeakKeyDictionary()


def connected(
    make: Callable[[], dist.ProcessGroup], device: torch.device, name: str, limit_s: float
) -> dist.ProcessGroup:
    """Return the group that `make` makes, or has made, with its ranks connected on `device`: by
    this call where that is an accelerator and no call before has. Collective.

    Raises ConfigError, with the `name` of the group, where the backend cannot connect them, and
    StallError where it does not within `limit_s`.
    """
    if device.type == "cpu":
        return make()
    own = Device.of(device)
    mine = torch.zeros(1, dtype=torch.uint8, device=device)  # and with it the driver's own memory
    own.synchronize()
    measures = hasattr(own.module, "mem_get_info")
    free = own.mem_get_info()[0] if measures else 0
    group = make()
    if group in _taken:
        return group
    try:
        rows = torch.empty(group.size(), dtype=torch.uint8, device=device)
        work = all_gather_single(rows, mine, group=group, async_op=True)
        work.wait(timedelta(seconds=limit_s))
        own.synchronize()
    except RuntimeError as error:
        ranks, text = dist.get_process_group_ranks(group), str(error).split("\n")[0]
        raised = StallError if has_timed_out(error) else ConfigError
        raise raised(
            f"{name}, ranks {ranks} of the job: their devices cannot be connected ({text[:160]});"
            " NCCL_DEBUG=INFO says what NCCL tries, and NCCL_SOCKET_IFNAME by which interface"
        ) from error
    _taken[group] = max(free - own.mem_get_info()[0], 0) if measures else None
    return group


def connection_bytes() -> int | None:
    """Return the bytes of device memory that the connections of all groups of this process took
    when they were made; None where there are none, or nobody counts.
    """
    counted = [taken for taken in _taken.values() if taken is not None]
    return sum(counted) if counted else None


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return after how long the backend of `group` for `device` ends a collective, if it does."""
    with suppress(RuntimeError):  # it has none
        options = getattr(group._get_backend(device), "options", None)  # some bind none
        timeout: timedelta | None = None if options is None else options._timeout
        return timeout
    return None


def job_timeout() -> timedelta | None:
    """Return the timeout of the job's group, which every other group would be made without."""
    job = dist.group.WORLD
    assert job is not None
    timeouts = [timeout_of(job, device) for device in job._device_types]
    return next(filter(None, timeouts), None)


def make_group(
    ranks: Sequence[int], exchange: Callable[[bytes], list[bytes]], *, backend: str | None = None
) -> dist.ProcessGroup:
    """Make the group of `ranks`, numbers in the job, on `backend` (None: the job's). Collective
    among those that `exchange`, a few bytes each, who are these ranks or more.

    Raises ConfigError, on all of them, where some have made other numbers of groups than others.
    """
    num_made = len(dist.distributed_c10d._world.pg_names)  # torch has no public way to ask
    mine = f"{num_made} {os.urandom(8).hex()}"
    answers = [answer.decode().split() for answer in exchange(mine.encode())]
    counts = [int(count) for count, _ in answers]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"ranks {list(ranks)} need a process group, and the ranks of this mesh have made"
            f" different numbers of groups before ({counts}), by which torch names it: make the"
            " same number on each, or call shard() before the others are made"
        )
    prefix = min(prefix for _, prefix in answers)
    with _unbound(), _stored_under(prefix), _counted_apart(int(prefix, 16)):
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), job_timeout(), backend, use_local_synchronization=True
        )
    return made


@contextmanager
def _unbound() -> Iterator[None]:
    """Let the job's group be bound to no device while the body runs."""
    job = dist.group.WORLD
    assert job is not None
    device, job.bound_device_id = job.bound_device_id, None
    try:
        yield
    finally:
        job.bound_device_id = device


@contextmanager
def _stored_under(prefix: str) -> Iterator[None]:
    """Let groups that are made while the body runs keep their keys of the job's store under
    `prefix` (torch has no public way to say so).
    """
    groups, job = dist.distributed_c10d._world.pg_map, dist.group.WORLD
    assert job is not None
    backend, store = groups[job]
    groups[job] = (backend, PrefixStore(prefix, store))
    try:
        yield
    finally:
        groups[job] = (backend, store)


@contextmanager
def _counted_apart(salt: int) -> Iterator[None]:
    """Let torch count the groups that are made while the body runs from `salt` on, and the job's go
    on as before: torch 2.14 names groups of the whole job by how many a rank has made, and ranks
    that are not in ours would name the next one otherwise, and wait for ever.
    """
    world = dist.distributed_c10d._world
    before, world.group_count = world.group_count, salt
    try:
        yield
    finally:
        world.group_count = before


# ---------------------------------------------------------------------------- bytes through a group
# Bytes of every rank to every rank through a process group, without pickle: ``all_gather_object``
# would execute what a peer sends.
#
# `GroupRanks` wait for each other by a limit of their own where they have one: the group's may be
# half an hour, and its error names nobody. A rank that waits says so in the job's store after a
# second, so that absent ranks can be named.
#
# Invariant: no device takes part. A group without a backend for CPU tensors (plain NCCL) gets a
# gloo group of the same ranks, once; only what these must compare before goes over the device.
# Cost: two collectives, of 8 bytes and of the longest payload per rank.


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


# -------------------------------------------------------------------------------------- a hand-over
# Numbers that change hands between two layouts: every rank gives what it alone holds, and takes
# what it will hold (core/boxes.py says which elements go from whom to whom).
#
# The ranks of the old and of the new layout take part. They send to each other through a process
# group, not over a transport: either layout knows only its own ranks.
#
# Before each state the ranks say that they have come so far. A rank that ends its part by an
# exception says that instead, so that the others do not wait for it.
#
# Invariant: what is held is each element at most once, what is wanted is a range per rank. Cost:
# the bytes of what crosses between ranks, one message per pair that shares elements. Numbers of an
# accelerator go through the host: this is done between two steps, and seldom.


_CALL = "engine.repartition()"


class HandOverError(StateError):
    """Another rank has ended a hand-over by an exception."""


class HandOver:
    """The ranks of an old and a new layout together, all of `group` (None: this rank alone)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks_through(group)
        self.rank = self.ranks.rank
        self._group = None if group is None or group.size() == 1 else on_cpu(group)
        self._members = [0] if group is None else dist.get_process_group_ranks(group)

    def move(
        self,
        held: Sequence[Range],
        wanted: Sequence[Range],
        mine: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Bring the elements that each rank has `wanted` there from the ranks that `held` them.

        `mine` holds this rank's own, `out` counts from element 0; both are on the host.
        Collective; every rank passes the same ranges, () being (0, 0). Raises HandOverError where
        another rank has come to its end by an exception.
        """
        first, members = held[self.rank][0], self._members
        operations: list[dist.P2POp] = []
        for part in sends(self.rank, held, wanted):
            given, taken = mine[part.start - first : part.stop - first], out[part.start : part.stop]
            if part.source == part.target:
                taken.copy_(given)
            elif part.source == self.rank:
                operation = dist.P2POp(dist.isend, given, members[part.target], self._group)
                operations.append(operation)
            else:
                operation = dist.P2POp(dist.irecv, taken, members[part.source], self._group)
                operations.append(operation)
        self.meet()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def meet(self, reason: str = "", *, ended: bool = False) -> None:
        """Come to the next state, or to the end because of an exception, for the `reason` ("" for
        another rank's exception). Collective; raises HandOverError where another rank has `ended`.
        """
        answers = self.ranks.share([ended, reason], _CALL)
        ranks = [rank for rank, (has_ended, _) in enumerate(answers) if has_ended]
        others = [rank for rank in ranks if rank != self.rank]
        if others:
            told = [rank for rank in others if answers[rank][1]] or others
            raise HandOverError(
                f"{_CALL}: rank {self._members[told[0]]} ended while states moved"
                f" ({answers[told[0]][1] or 'see its output'}): make model and engine anew, and"
                " call zs.load()"
            )

    def give(self, tensor: torch.Tensor, source: int) -> None:
        """Copy a `tensor` of rank `source` into every other rank's, in place. Collective."""
        self.meet()
        if self._group is None:
            return
        here = tensor.detach().cpu().contiguous()
        dist.broadcast(here, self._members[source], group=self._group)
        if self.rank != source:
            tensor.detach().copy_(here)
