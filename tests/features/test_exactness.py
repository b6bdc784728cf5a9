"""Correctness is bits: every row, transport and unit cut trains to the same parameters as plain
data parallel training.
"""

from __future__ import annotations

import functools

import pytest
import torch

import zeroshard as zs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, TRANSPORTS, Block, Run, train, two_groups

STEPS = 200


def _rows(rank: int, world: int, transport: str, fused: bool, steps: int) -> dict[str, list[str]]:
    """Train every row; return what differs from the ddp row, and at two ranks from torch's DDP."""
    make = functools.partial(two_groups, fused=fused, foreach=False)
    runs = {
        row: train(rank, row, steps, optimizer=make, comm=zs.Comm(transport=transport))
        for row in ROWS
    }
    if world == 2:
        runs["torch-ddp"] = train(rank, "torch-ddp", steps, optimizer=make)
    return {row: run.differs_from(runs["ddp"]) for row, run in runs.items()}


@pytest.mark.parametrize(
    ("world", "fused", "steps"),
    [
        (2, True, 12),
        pytest.param(2, True, STEPS, marks=pytest.mark.slow),
        pytest.param(2, False, STEPS, marks=pytest.mark.slow),
        pytest.param(4, True, STEPS, marks=pytest.mark.slow),
    ],
)
def test_all_rows_give_the_same_bits_after_many_steps(world: int, fused: bool, steps: int) -> None:
    for differences in run_ranks(world, _rows, "shared_memory", fused, steps, timeout=110):
        assert not any(differences.values()), differences


@pytest.mark.parametrize(
    ("world", "steps"),
    [
        pytest.param(2, 40, marks=pytest.mark.slow),
        (4, 5),
        pytest.param(4, 20, marks=pytest.mark.slow),
    ],
)
def test_sockets_give_the_same_bits(world: int, steps: int) -> None:
    for differences in run_ranks(world, _rows, "gloo", True, steps, timeout=110):
        assert not any(differences.values()), differences


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "single"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4])
def test_the_whole_matrix_over_200_steps(world: int, transport: str, fused: bool) -> None:
    for differences in run_ranks(world, _rows, transport, fused, STEPS, timeout=500):
        assert not any(differences.values()), differences


@on_ranks(3, timeout=100)
def test_sums_of_the_backend_keep_rows_equal_and_ordered_ones_have_the_bits_of_sockets(
    rank: int,
) -> None:
    """Train every row with sums of the backend's own; compare with the ddp row, a second time too,
    and, where they are ordered, from sockets.
    """
    comm = zs.Comm(transport="nccl")
    runs = {row: train(rank, row, 2, comm=comm) for row in ROWS}
    again = train(rank, "ddp", 2, comm=comm)
    sockets = train(rank, "zero3", 2, comm=zs.Comm(transport="gloo"))
    ordered = train(rank, "zero3", 2, comm=zs.Comm(transport="nccl", ordered=True))
    differing = {row: run.differs_from(again) for row, run in runs.items()}
    differences = differing | {"ordered": ordered.differs_from(sockets)}
    assert not any(differences.values()), differences


@pytest.mark.parametrize(
    ("world", "steps"),
    [(2, 8), *(pytest.param(world, 25, marks=pytest.mark.slow) for world in (2, 4))],
)
@on_ranks(timeout=100)
def test_any_unit_cut_gives_the_same_bits(rank: int, world: int, steps: int) -> None:
    cuts = {
        "automatic": None,
        "class": [Block],
        "names": ["blocks.1", "head"],
        "one": [""],
        "leaves": lambda name, module: name.endswith("up"),
    }
    runs: dict[str, Run] = {
        cut: train(rank, "zero3", steps, units=units, clip=0.1) for cut, units in cuts.items()
    }
    assert len({len(run.extra["units"]) for run in runs.values()}) >= 4
    differences = {cut: run.differs_from(runs["automatic"]) for cut, run in runs.items()}
    assert not any(differences.values()), differences


OPTIMIZERS = {
    "sgd-momentum": functools.partial(two_groups, make=torch.optim.SGD, momentum=0.9),
    "adam": functools.partial(two_groups, make=torch.optim.Adam),
    "adamw-foreach": functools.partial(two_groups, foreach=True),
    "adagrad": functools.partial(two_groups, make=torch.optim.Adagrad),
    "rmsprop": functools.partial(two_groups, make=torch.optim.RMSprop),
}


@pytest.mark.parametrize("steps", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2, timeout=100)
def test_other_elementwise_optimizers_give_ddps_bits(rank: int, name: str, steps: int) -> None:
    runs = {
        kind: train(rank, kind, steps, optimizer=OPTIMIZERS[name])
        for kind in ("zero1", "zero3", "torch-ddp")
    }
    differences = {kind: run.differs_from(runs["torch-ddp"]) for kind, run in runs.items()}
    assert not any(differences.values()), differences
