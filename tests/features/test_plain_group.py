"""Features under a default group that serves no tensors of CPUs, as ``init_process_group("nccl")``
makes it: what the library itself exchanges there goes over a group of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.device.programs import CASES, in_folder
from tests.support.harness import PLAIN, run_ranks
from tests.support.training import Run, make_model, two_groups

NAMES = (
    "zero3 bf16", "hpz", "two levels of 2, zero3", "over gloo", "ordered zero3",
    "codecs and no_sync",
    "frozen in int4", "accumulation budget", "clipped", "accumulate on the host",
    "checkpointed on the host",
    "off the device and back", "reset", "average", "repartition", "to the host and back", "edited",
    "save and load", "joined", "leaves zero3", "shares shift", "a fraction", "everything late",
    "everything on disk", "inference, then steps", "generate", "a rank leaves",
    "kept in memory, one goes on",
)  # fmt: skip


def _train(rank: int, world: int) -> dict[str, Run]:
    out: dict[str, Run] = {}
    for name in NAMES:
        out[name] = in_folder(replace(CASES[name].program, steps=2), "cpu", rank)
    return out


def test_every_feature_has_the_bits_that_it_has_under_gloo() -> None:
    """One test for all: two ranks of each group are started once."""
    runs = zip(
        run_ranks(2, _train, device=PLAIN, timeout=120),
        run_ranks(2, _train, timeout=120),
        strict=True,
    )
    for found, expected in runs:
        for name in NAMES:
            assert not found[name].differs_from(expected[name]), name


def _measured(rank: int, world: int) -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))  # the group is what it should be
    model = make_model()
    zs.shard(model, two_groups(model), stage=2, shares="auto", sync_from=0).close()


def test_ranks_are_measured_there() -> None:
    run_ranks(2, _measured, device=PLAIN)
