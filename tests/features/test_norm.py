"""The norm of a gradient is one number: for every row, world, unit cut and share of the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from zeroshard.core.layout import ALIGN
from zeroshard.state.norms import ExactSum

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
CUTS: tuple[Any, ...] = (None, [""], ["0", "3"], lambda name, module: name == "2")
SHARES: dict[int, tuple[Sequence[float] | None, ...]] = {
    1: (None,),
    2: (None, (0.1, 0.9), (1.0, 0.0)),
    3: (None, (0.2, 0.7, 0.1), (0.0, 0.5, 0.5)),
}


def _model() -> nn.Module:
    """Parameters that end inside a block, and one that several ranks share."""
    torch.manual_seed(0)
    sizes = [(7, 19), (19, 53), (53, 11), (11, 3)]
    return nn.Sequential(*(nn.Linear(*size) for size in sizes))


def _gradients() -> list[torch.Tensor]:
    """Return gradients of very different sizes, the same on every rank: no sum of their squares in
    fp64 is exact.
    """
    generator = torch.Generator().manual_seed(3)
    out = []
    for parameter in _model().parameters():
        exponents = torch.randint(-14, 14, parameter.shape, generator=generator)
        numbers = torch.randn(parameter.shape, generator=generator)
        out.append(numbers * torch.exp2(exponents.float()))
    return out


def _defined() -> ExactSum:
    """Return the sum of squares as it is defined (state/norms.py: order-free norm)."""
    total = ExactSum()
    for one in _gradients():
        for block in torch.split(one.double().reshape(-1).square(), ALIGN):
            sums = torch.cat([block, block.new_zeros(ALIGN - len(block))]).tolist()
            while len(sums) > 1:
                half = len(sums) // 2
                sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
            total += ExactSum.of(sums[0])
    return total


def _norms(rank: int, world: int) -> dict[str, tuple[float, ExactSum]]:
    """Return the norm in every case, and the sum of squares before it is rounded."""
    out = {}
    for row in ROWS:
        for cut, units in enumerate(CUTS):
            for shares in SHARES[world] if row != "ddp" else (None,):
                model = _model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                engine = zs.shard(model, optimizer, policy=row, units=units, shares=shares)
                for parameter, gradient in zip(model.parameters(), _gradients(), strict=True):
                    parameter.grad = gradient.clone()
                norm = float(engine.clip_grad_norm_(math.inf))
                out[f"{row}, units {cut}, shares {shares}"] = norm, inside.squares(engine)
                engine.close()
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_norm_is_one_number_for_any_world_row_cut_and_share(world: int) -> None:
    squares = _defined()
    norm = torch.tensor(float(squares), dtype=torch.float64).sqrt().float().item()
    for found in run_ranks(world, _norms, timeout=100):
        differing = [case for case, one in found.items() if one != (norm, squares)]
        assert len(found) >= 20 and not differing, differing
