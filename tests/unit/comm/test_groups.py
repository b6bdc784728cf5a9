"""Groups that their members make: torch names them by a number that ranks may disagree about."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.harness import on_ranks, run_ranks, spawn_ranks
from zeroshard.comm.groups import gather_bytes, make_group, ranks_through
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


@on_ranks(2)
def test_a_group_that_was_destroyed_is_made_again(rank: int) -> None:
    def exchange(payload: bytes) -> list[bytes]:
        assert dist.group.WORLD is not None
        answers = gather_bytes(dist.group.WORLD, payload)
        time.sleep(0.3 * (1 - rank))  # rank 1 is first to look for the other's address
        return answers

    total = torch.tensor(1.0)
    for _ in range(2):
        group = make_group([0, 1], exchange)
        dist.all_reduce(total, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
    found = total.item()
    assert found == 4.0


def _make_bound(rank: int, world: int) -> None:
    job = dist.group.WORLD
    assert job is not None
    job.bound_device_id = torch.device("cuda", rank)
    new_group, seen = dist.new_group, []

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append((job.bound_device_id, options["use_local_synchronization"]))
        return new_group(*arguments, **options)

    store = dist.distributed_c10d._get_default_store()

    def exchange(payload: bytes) -> list[bytes]:
        store.set(f"from {rank}", payload)
        return [store.get("from 1"), store.get("from 2")]

    dist.new_group = watched
    if rank:  # rank 0 takes no part
        group = make_group([1, 2], exchange)
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        assert total.item() == 3.0 and seen == [(None, True)]
    assert job.bound_device_id == torch.device("cuda", rank)


def test_members_alone_make_no_group_that_would_be_split_off_the_job_s() -> None:
    results = spawn_ranks(3, _make_bound)
    assert [result.exitcode for result in results] == [0] * 3, results


def _through_two_groups(rank: int, world: int) -> tuple[int, int, list[Any]]:
    mesh = init_device_mesh("cpu", (2, 2))
    ranks = ranks_through(mesh.get_group(0), mesh.get_group(1))
    return ranks.rank, ranks.size, ranks.share("é" * rank, "call")


def test_process_groups_of_several_axes_make_ranks_in_the_order_of_the_mesh() -> None:
    everyone = ["", "é", "éé", "ééé"]
    assert run_ranks(4, _through_two_groups) == [(rank, 4, everyone) for rank in range(4)]
    assert ranks_through(None).share("alone", "call") == ["alone"]
