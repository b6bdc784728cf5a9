"""Optimizers with ``train()`` and ``eval()`` (schedule-free): the weights of the model follow
both, on every row, with the bits of one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import ROWS, batch, make_model, take_steps

STEPS = 3


class ScheduleFree(torch.optim.Optimizer):
    """The rule of "The Road Less Scheduled", section 2, for SGD: gradients at y, steps of z, and x,
    the average of z, to evaluate.
    """

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.75) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if not state:
                    state["x"], state["z"] = y.clone(), y.clone()
                state["z"].sub_(y.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1.0 / group["k"])
                torch.lerp(state["z"], state["x"], group["beta"], out=y)

    def train(self) -> None:
        self._move(training=True)

    def eval(self) -> None:
        self._move(training=False)

    @torch.no_grad()
    def _move(self, *, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state and training != group["training"]:
                    x, z = state["x"], state["z"]
                    p.copy_(torch.lerp(z, x, group["beta"]) if training else x)
            group["training"] = training


def _seen(model: nn.Module, optimizer: Any, state: Any) -> list[Any]:
    """Train, look at the averages, and train on; the same batches on every rank."""
    seen: list[Any] = []
    number = 0
    for _ in range(2):
        optimizer.train()
        for _ in range(STEPS):
            take_steps(0, [number], model, optimizer)
            number += 1
        optimizer.eval()
        with torch.no_grad():
            seen.append((model(*batch(0, 99)).item(), state()))
    return seen


@on_ranks(2)
def test_the_averages_are_what_the_model_evaluates_with_and_training_goes_on() -> None:
    plain = make_model()
    wanted = _seen(
        plain,
        ScheduleFree(plain.parameters()),
        lambda: {name: value.clone() for name, value in plain.state_dict().items()},
    )
    for row in ROWS:
        model = make_model()
        optimizer = ScheduleFree(model.parameters())
        engine = zs.shard(model, optimizer, policy=row)
        told = _seen(model, optimizer, partial(engine.full_state_dict, rank0_only=False))
        for (loss, state), (wanted_loss, wanted_state) in zip(told, wanted, strict=True):
            assert loss == wanted_loss, row
            for name, value in wanted_state.items():
                assert torch.equal(state[name], value), (row, name)
        engine.close()
        assert "eval" not in vars(optimizer) and "train" not in vars(optimizer)


@on_ranks(2)
def test_calls_that_cannot_be_followed_are_one_line_on_every_rank(rank: int) -> None:
    model = make_model()
    optimizer = ScheduleFree(model.parameters())
    engine = zs.shard(model, optimizer, stage=3)
    with pytest.raises(zs.PlanMismatch, match=r"call.*optimizer\.(train|eval)\(\)"):
        optimizer.train() if rank else optimizer.eval()
    optimizer.train()
    with engine.gathered(), pytest.raises(zs.StateError, match=r"eval\(\) inside .*gathered"):
        optimizer.eval()
    engine.close()
    model = make_model()
    optimizer = ScheduleFree(model.parameters())
    engine = zs.shard(model, optimizer, stage=3, offload=zs.Offload(optimizer="host"))
    with pytest.raises(zs.StateError, match=r"train\(\) of ScheduleFree .*leave the optimizer out"):
        optimizer.train()
    engine.close()
