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

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zeroshard.comm.compat import all_gather_single, has_timed_out
from zeroshard.errors import ConfigError, StallError
from zeroshard.system.device import Device

# bytes of device memory that connecting took; None: the device does not say what is free
_taken: WeakKeyDictionary[dist.ProcessGroup, int | None] = WeakKeyDictionary()


def connected(
    make: Callable[[], dist.ProcessGroup], device: torch.device, name: str, limit_s: float
) -> dist.ProcessGroup:
    """Return the group that `make` makes, or has made, whose ranks are connected on `device`: by
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
