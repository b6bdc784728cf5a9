"""Process groups that their members make, where the group that they are parts of is not the whole
job: ``dist.new_group`` as it is would wait for every rank of the job.

torch names such a group by its ranks and by how many groups this rank has made, and members that
name it otherwise wait for each other for ever. So they compare these numbers first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from zeroshard.errors import ConfigError

__all__ = ["make_group"]


def make_group(ranks: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> dist.ProcessGroup:
    """Make the group of `ranks`, numbers in the job. Collective among those that `exchange`, who
    are these ranks or more.

    Raises ConfigError, on all of them, where some have made other numbers of groups than others.
    """
    counts = [int(answer) for answer in exchange(str(_num_made()).encode())]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"ranks {list(ranks)} need a process group, and the ranks of this mesh have made"
            f" different numbers of groups before ({counts}), by which torch names it: make the"
            " same number on each, or call shard() before the others are made"
        )
    made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return made


def _num_made() -> int:
    """Return how many process groups this rank is in (torch has no public way to ask)."""
    return len(dist.distributed_c10d._world.pg_names)
