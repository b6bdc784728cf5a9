"""Bytes through a process group that serves no CPU tensors."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist

from tests.support.harness import run_ranks
from zeroshard.comm import plain


def _gather_without_cpu_backend(rank: int, world: int) -> list[bytes]:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(dist.ProcessGroup, "_get_backend", side_effect=RuntimeError):
        beside = plain._on_cpu(group)
        try:
            assert plain._on_cpu(group) is beside and beside is not group
            return plain.gather_bytes(group, bytes([rank]) * (rank + 1))
        finally:
            del plain._beside[group]
            dist.destroy_process_group(beside)


def test_a_group_without_a_cpu_backend_gets_a_gloo_group_beside_it() -> None:
    assert run_ranks(2, _gather_without_cpu_backend) == [[b"\0", b"\1\1"]] * 2
