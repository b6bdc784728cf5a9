"""Bytes through a process group that serves no CPU tensors."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.harness import run_ranks
from zeroshard.comm import groups
from zeroshard.errors import ConfigError


def _gather_without_cpu_backend(rank: int, world: int) -> list[bytes]:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(dist.ProcessGroup, "_get_backend", side_effect=RuntimeError):
        beside = groups.on_cpu(group)
        try:
            assert groups.on_cpu(group) is beside and beside is not group
            return groups.gather_bytes(group, bytes([rank]) * (rank + 1))
        finally:
            del groups._beside[group]
            dist.destroy_process_group(beside)


def test_a_group_without_a_cpu_backend_gets_a_gloo_group_beside_it() -> None:
    assert run_ranks(2, _gather_without_cpu_backend) == [[b"\0", b"\1\1"]] * 2


def _gather_in_a_part_of_the_job(rank: int, world: int) -> list[bytes] | None:
    parts = [dist.new_group([0, 2]) for _ in range(2)]
    if rank == 1:
        dist.new_group([0, 1])
        return None
    with mock.patch.object(dist.ProcessGroup, "_get_backend", side_effect=RuntimeError):
        payloads = groups.gather_bytes(parts[0], bytes([rank]) * 3)
    dist.new_group([0, 1])  # rank 0 is in a group more than rank 2 from here on
    with (
        mock.patch.object(dist.ProcessGroup, "_get_backend", side_effect=RuntimeError),
        pytest.raises(ConfigError, match=r"ranks \[0, 2\] .* different numbers of groups"),
    ):
        groups.gather_bytes(parts[1], b"")
    return payloads


def test_ranks_that_would_name_the_group_beside_theirs_otherwise_are_told_so() -> None:
    payloads = [b"\0" * 3, b"\2" * 3]
    assert run_ranks(3, _gather_in_a_part_of_the_job) == [payloads, None, payloads]
