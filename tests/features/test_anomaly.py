"""``zs.detect_anomaly(engine)``: the module that made the first number that is not finite."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import ROWS, batch, equal, make_model, two_groups
from zeroshard.errors import StateError


class _Odd(nn.Module):
    """Divides by zero on one rank, in the forward or on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.breaks = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
            if self.breaks == "root":  # its derivative at 0 is infinite
                hidden = (hidden * 0).sqrt()
        if self.breaks == "zero":
            hidden = (hidden * 0) / (hidden * 0)
        return hidden.square().mean()


def _found(rank: int, world: int, row: str) -> list[str]:
    out = []

    def step(breaks: str) -> None:
        model.breaks = breaks if rank == 1 else ""
        with zs.detect_anomaly(engine):
            engine.backward(model(torch.randn(2, 8)))

    torch.manual_seed(0)
    model = _Odd()
    engine = zs.shard(model, two_groups(model), policy=row)
    step("")
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    for breaks in ("zero", "root"):
        with pytest.raises(StateError) as caught:
            step(breaks)
        out.append(str(caught.value))
        engine.optimizer.zero_grad()
        engine.reset()
    if row == "zero3":
        with torch.no_grad(), engine.gathered(writeback=True):
            model.blocks[1].bias[3] = float("nan")
        with pytest.raises(StateError) as caught:
            step("")
        out.append(str(caught.value))
    engine.reset()
    engine.close()
    return out


@pytest.mark.parametrize("row", ROWS)
def test_the_module_that_made_the_first_nan_is_named_on_every_rank(row: str) -> None:
    one, other = run_ranks(2, _found, row)
    assert one == other
    assert (
        "on rank 1, the output of module '(the model itself)' (_Odd) has nan; its inputs" in one[0]
    )
    assert (
        "the gradient of the output of module 'blocks.2' (Linear) is the first with nan" in one[1]
    )
    if row == "zero3":
        assert (
            "on rank 0, the output of module 'blocks.1' (Linear) has nan; its parameter 'bias'"
            in (one[2])
        )


def _unchanged(rank: int, world: int) -> None:
    states = []
    for looks in (False, True):
        model = make_model()
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, stage=3, precision="bf16")
        for number in range(2):
            with zs.detect_anomaly(engine) if looks else nullcontext():
                engine.backward(model(*batch(rank, number)))
            optimizer.step()
            optimizer.zero_grad()
        states.append(engine.full_state_dict(rank0_only=False))
        engine.close()
    assert equal(*states)


def test_looking_changes_no_bit() -> None:
    run_ranks(2, _unchanged)


def test_an_error_inside_carries_what_was_found_and_hooks_are_gone() -> None:
    model = _Odd()
    engine = zs.shard(model, two_groups(model))
    model.breaks = "zero"
    with pytest.raises(ValueError, match="mine") as caught, zs.detect_anomaly(engine):
        model(torch.randn(2, 8))
        raise ValueError("mine")
    assert "has nan" in caught.value.__notes__[0]
    assert not torch.nn.modules.module._global_forward_hooks
    engine.close()
    with pytest.raises(StateError, match="closed"), zs.detect_anomaly(engine):
        logging.error("not reached")


def test_infinity_in_a_mask_is_no_anomaly() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.ReLU()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = self.mask(torch.full((2, 8), float("inf")))
            return self.up(x).masked_fill(mask > 1e9, 0).square().mean() + self.up(x).sum()

    model = Masked()
    engine = zs.shard(model, two_groups(model))
    with zs.detect_anomaly(engine):
        model(torch.randn(2, 8)).backward()
    engine.close()
