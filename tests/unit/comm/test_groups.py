"""Groups that their members make: torch names them by a number that ranks may disagree about."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import spawn_ranks
from zeroshard.comm.groups import make_group
from zeroshard.comm.plain import gather_bytes
from zeroshard.errors import ConfigError


def _make(rank: int, world: int) -> None:
    def exchange(payload: bytes) -> list[bytes]:
        assert dist.group.WORLD is not None
        return gather_bytes(dist.group.WORLD, payload)

    ranks = [1, 2] if rank in (1, 2) else [0, 3]
    group = make_group(ranks, exchange)
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=group)
    assert total.item() == 3.0
    dist.new_group([0, 1])  # these two are in a group more from here on
    with pytest.raises(ConfigError, match=r"ranks \[(1, 2|0, 3)\] .* different numbers of groups"):
        make_group(ranks, exchange)


def test_members_make_their_group_alone_or_are_told_why_not_instead_of_waiting() -> None:
    results = spawn_ranks(4, _make)
    assert [result.exitcode for result in results] == [0] * 4, results
