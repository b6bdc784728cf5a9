"""Several optimizers over one model: ``zs.shard(model, [muon, adamw])`` has the bits of both in
plain torch, and ``[sgd(a), sgd(b)]`` the bits of one SGD with two param groups, whatever else is
used.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.fuzz.optimizers import Lamb
from tests.support.harness import run_ranks

STEPS, LEAVES, CLIP = 4, 12, 0.05
Optimizers = list[torch.optim.Optimizer]


class Tied(nn.Module):
    """A head that shares its weight with the embedding, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(24, 40)
        self.first, self.norm, self.last = nn.Linear(40, 72), nn.LayerNorm(72), nn.Linear(72, 40)
        self.frozen = nn.Linear(40, 40, bias=False).requires_grad_(False)
        self.head = nn.Linear(40, 24, bias=False)
        self.head.weight = self.emb.weight
        last = self.last.weight  # it lies column by column
        self.last.weight = nn.Parameter(last.detach().t().contiguous().t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.frozen(self.emb(tokens))
        out = self.last(self.norm(self.first(out)).tanh())
        return nn.functional.cross_entropy(self.head(out).flatten(0, -2), tokens.flatten())


def _model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def _parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, without the embedding that is the head, too, and the rest."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "emb" not in name]
    return matrices, [p for p in named.values() if not any(p is one for one in matrices)]


def _muon(model: nn.Module) -> Optimizers:
    matrices, rest = _parts(model)
    biases = [p for p in rest if p.ndim < 2]
    groups = [{"params": [p for p in rest if p.ndim == 2]}, {"params": biases, "weight_decay": 0.0}]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=0.01)]


def _sgd(model: nn.Module) -> Optimizers:
    matrices, rest = _parts(model)
    return [torch.optim.SGD(rest, lr=0.1, momentum=0.9), torch.optim.AdamW(matrices, lr=0.01)]


def _three(model: nn.Module) -> Optimizers:
    matrices, (emb, *rest) = _parts(model)
    return [Lamb([emb], lr=0.01), torch.optim.Muon(matrices), torch.optim.RAdam(rest, lr=0.01)]


MAKE: dict[str, Any] = {"muon": _muon, "sgd": _sgd, "three": _three}
WHOLE = ("muon", "three")


def _schedulers(optimizers: Optimizers) -> list[Any]:
    first, *others = optimizers
    return [
        torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5),
        *(torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (step + 1)) for one in others),
    ]


def _batch(step: int) -> torch.Tensor:
    return torch.randint(24, (LEAVES, 5), generator=torch.Generator().manual_seed(step))


@functools.cache
def _plain(kind: str, steps: int = STEPS) -> list[torch.Tensor]:
    """Return the weights after `steps` of torch alone, with the clipped gradients of an engine's
    leaves.
    """
    model, reference = _model(), _model()
    optimizers = MAKE[kind](model)
    schedulers = _schedulers(optimizers)
    engine = zs.shard(reference, stage=0, leaves=LEAVES, units=[nn.Linear])
    for step in range(steps):
        with torch.no_grad():
            for mine, its in zip(reference.parameters(), model.parameters(), strict=True):
                mine.copy_(its)
        for leaf in engine.leaves(step):
            engine.backward(reference(_batch(step)[leaf : leaf + 1]))
        norm = engine.clip_grad_norm_(CLIP)
        assert float(norm) > CLIP
        for mine, its in zip(reference.parameters(), model.parameters(), strict=True):
            its.grad = engine.full_grad(mine) if mine.requires_grad else None
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert float(total) == pytest.approx(CLIP, rel=1e-4)  # over the parameters of all
        engine.reset()
        for one in [*optimizers, *schedulers]:
            one.step()
    engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _train(
    rank: int,
    world: int,
    kind: str,
    row: str,
    steps: int = STEPS,
    folder: Path | None = None,
    given: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Train from what `folder` holds, and save there; return all weights."""
    model = _model()
    optimizers = MAKE[kind](model)
    options: Any = {"ownership": "whole" if kind in WHOLE else None} | (given or {})
    engine = zs.shard(model, optimizers, policy=row, leaves=LEAVES, units=[nn.Linear], **options)
    schedulers, begin = _schedulers(optimizers), 0
    states = {f"scheduler {index}": one for index, one in enumerate(schedulers)}
    if folder is not None and zs.latest_step(folder) is not None:
        begin = zs.load(folder, engine, states=states).step
    for step in range(begin, steps):
        for leaf in engine.leaves(step):
            engine.backward(model(_batch(step)[leaf : leaf + 1]))
        engine.clip_grad_norm_(CLIP)
        for one in reversed(optimizers) if step % 2 else optimizers:
            one.step()
        for one in schedulers:
            one.step()
        for one in optimizers:
            one.zero_grad()
    if folder is not None:
        zs.save(folder, engine, step=steps, states=states)
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    assert all(map(torch.equal, [full[name] for name, _ in model.named_parameters()],
                   model.parameters()))  # fmt: skip
    assert [id(p) for one in optimizers for g in one.param_groups for p in g["params"]] == [
        id(p) for one in MAKE[kind](model) for g in one.param_groups for p in g["params"]
    ]
    return [full[name] for name, _ in model.named_parameters()]


@pytest.mark.parametrize("kind", MAKE)
def test_several_optimizers_have_the_bits_of_plain_torch(kind: str) -> None:
    expected = _plain(kind)
    rows = ((1, "zero3"), (2, "ddp"), (2, "zero1"), (2, "zero3"), (3, "zero2"), (3, "zero3-keep"))
    for world, row in rows:
        for found in run_ranks(world, _train, kind, row):
            assert all(map(torch.equal, found, expected)), (world, row)
