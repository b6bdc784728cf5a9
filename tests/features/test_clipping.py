"""Gradient clipping: one norm over all ranks, the same in every row."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    batch,
    final_state,
    make_model,
    train,
    two_groups,
)


@pytest.mark.parametrize(
    ("world", "precision", "steps"),
    [
        *((2, precision, 6) for precision in ("fp32", "bf16", "fp16")),
        *(
            pytest.param(world, precision, 15, marks=pytest.mark.slow)
            for world, precision in [
                (2, "fp32"),
                (2, "bf16"),
                (2, "fp16"),
                (4, "fp32"),
                (4, "bf16"),
            ]
        ),
    ],
)
@on_ranks(timeout=100)
def test_clipping_and_precision_keep_the_rows_equal(
    rank: int, world: int, precision: str, steps: int
) -> None:
    runs = {row: train(rank, row, steps, clip=0.05, precision=precision) for row in ROWS}
    differences, norms = (
        {row: run.differs_from(runs["ddp"]) for row, run in runs.items()},
        [run.extra["norms"] for run in runs.values()],
    )
    assert not any(differences.values()), differences
    assert all(series == norms[0] for series in norms)
    assert max(norms[0]) > 0.05


class Branches(nn.Module):
    """Each rank runs a branch of its own, and nobody those that are left."""

    def __init__(self, num_branches: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 19)
        self.branches = nn.ModuleList(nn.Linear(19, 19) for _ in range(num_branches))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        h: torch.Tensor = self.branches[branch](self.stem(x))
        return h.square().mean()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_clipping_counts_and_keeps_gradients_that_only_other_ranks_have(
    rank: int, transport: str
) -> None:
    states = {}
    # two-sided gathers need the same units on every rank
    rows = ["ddp", "zero1", "zero2"] + ["zero3"] * (transport == "shared_memory")
    for kind in ["torch-ddp", *rows]:
        torch.manual_seed(0)
        model = Branches()
        optimizer = two_groups(model)
        engine = (
            None
            if kind == "torch-ddp"
            else zs.shard(
                model, optimizer, policy=kind, comm=zs.Comm.model_validate({"transport": transport})
            )
        )
        runs = (
            DistributedDataParallel(model, find_unused_parameters=True) if engine is None else model
        )
        for step in range(3):
            runs(torch.full((2, 7), 1.0 + rank + step), rank + step % 2).backward()
            if engine is None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2, error_if_nonfinite=True)
            else:
                norm = engine.clip_grad_norm_(1e-2)
            assert norm > 1e-2
            optimizer.step()
            optimizer.zero_grad()
        states[kind] = (
            model.state_dict() if engine is None else engine.full_state_dict(rank0_only=False)
        )
        if engine is not None:
            engine.close()
    for name, value in states["torch-ddp"].items():
        torch.testing.assert_close(states["ddp"][name], value)
        assert all(torch.equal(states[row][name], states["ddp"][name]) for row in rows), name


def test_clipping_a_gradient_that_is_not_finite_skips_the_step() -> None:
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer)
    (model(*batch(0, 0)) * float("nan")).backward()
    assert not engine.clip_grad_norm_(1.0).isfinite()
    before = engine.full_state_dict()
    optimizer.step()
    assert engine.steps_skipped == 1
    assert all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())
    engine.close()


@pytest.mark.parametrize("row", ["ddp", "zero2"])
@on_ranks(2)
def test_reading_the_norm_leaves_the_clip_of_the_step_to_the_option(rank: int, row: str) -> None:
    states, big = [], 1e9
    for reads in (False, True):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        engine = zs.shard(model, optimizer, policy=row, gradient_clipping=0.05)
        for step in range(2):
            model(*batch(rank, step)).backward()
            if reads:
                assert float(engine.clip_grad_norm_(float("inf"))) > 0.05
            if step:
                engine.clip_grad_norm_(big)  # this step's own, in the place of the option
            optimizer.step()
            optimizer.zero_grad()
        states.append(final_state(model, engine))
    read, plain = states[1], states[0]
    assert all(torch.equal(read[name], value) for name, value in plain.items())
