"""Process groups that their members make, where the group that they are parts of is not the whole
job: ``dist.new_group`` as it is would wait for every rank of the job.

torch names such a group by its ranks and by how many groups this rank is in, and members that
name it otherwise wait for each other for ever. So they compare these numbers first. A group that is
destroyed leaves its name to the next of the same ranks, and its addresses in the job's store: the
members of each new group meet under a prefix of its own there.

Where the job's group is bound to a device (``init_process_group(device_id=)``), torch would split
its communicator for a new NCCL group, which takes every rank of the job. So these groups are made
as if it were not bound, and connect when they are first used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zeroshard.errors import ConfigError

__all__ = ["make_group"]


def make_group(
    ranks: Sequence[int], exchange: Callable[[bytes], list[bytes]], *, backend: str | None = None
) -> dist.ProcessGroup:
    """Make the group of `ranks`, numbers in the job, on `backend` (None: the job's). Collective
    among those that `exchange`, a few bytes each, who are these ranks or more.

    Raises ConfigError, on all of them, where some have made other numbers of groups than others.
    """
    mine = f"{_num_made()} {os.urandom(8).hex()}"
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
            list(ranks), backend=backend, use_local_synchronization=True
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


def _num_made() -> int:
    """Return how many process groups this rank is in (torch has no public way to ask)."""
    return len(dist.distributed_c10d._world.pg_names)
