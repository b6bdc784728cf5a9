"""Optimizers with ``train()`` and ``eval()`` (schedule-free): the weights of the model follow
both, on every row, with the bits of one process.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.fuzz.optimizers import ScheduleFree
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, batch, leaf_loss, make_model, plainly_trained, take_steps

STEPS = 3


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


# ------------------------------------------------------------------------- as one of several

ALL_STEPS, LEAVES = 4, 12
MODES = {1: "looks", 2: "saved in eval", 3: "saved in train"}  # after how many steps


def _made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 16))


def _several(kind: str, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return one without modes, and one with them."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    if kind == "muon":
        return torch.optim.Muon(matrices, lr=0.02), ScheduleFree(rest)
    if kind == "sgd":
        return torch.optim.SGD(rest, lr=0.1, momentum=0.9), ScheduleFree(matrices)
    real = getattr(importlib.import_module("schedulefree"), kind)
    return torch.optim.AdamW(rest, lr=0.01), real(matrices, lr=0.02)


_loss = partial(leaf_loss, width=24)


def _changes(number: int, free: Any, seen: list[Any], look: Callable[[], Any]) -> None:
    """After `number` steps: evaluate, and train again."""
    if number in (1, 2):
        free.eval()
        seen.append(look())
        free.train()


@functools.cache
def _expected(kind: str) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return what plain torch evaluates with, and the weights at the end."""
    model, seen = _made(), list[Any]()
    first, free = _several(kind, model)
    free.train()
    count = iter(range(1, ALL_STEPS + 1))

    def take() -> None:
        first.step()
        free.step()
        look = lambda: [p.detach().clone() for p in model.parameters()]  # noqa: E731
        _changes(next(count), free, seen, look)

    return seen, plainly_trained(model, _made(), ALL_STEPS, LEAVES, _loss, take)


def _trained(
    rank: int, world: int, kind: str, stage: int, folder: Path | None, steps: int, in_eval: bool
) -> tuple[list[Any], list[torch.Tensor]]:
    """Train up to `steps` from what `folder` holds, and save there; return what it evaluates with,
    and all weights.
    """
    model, seen, begin = _made(), list[Any](), 0
    first, free = _several(kind, model)
    ownership: Any = "whole" if kind == "muon" else None
    engine = zs.shard(
        model, [first, free], stage=stage, leaves=LEAVES, units=[nn.Linear], ownership=ownership
    )

    def look() -> list[torch.Tensor]:
        full = engine.full_state_dict(rank0_only=False)
        return [full[name] for name, _ in model.named_parameters()]

    if folder is not None and zs.latest_step(folder) is not None:
        begin = zs.load(folder, engine).step
        ended = look()
        seen.append(ended)
    if begin in (0, 2):
        free.train()
    for step in range(begin, steps):
        for leaf in engine.leaves(step):
            engine.backward(_loss(model, step, leaf))
        for one in (first, free) if step % 2 else (free, first):
            one.step()
        for one in (first, free):
            one.zero_grad()
        if not (in_eval and step + 1 == steps):
            _changes(step + 1, free, seen, look)
    if in_eval:
        free.eval()
    if folder is not None:
        zs.save(folder, engine, step=steps)
    ended = look()
    engine.close()
    assert "eval" not in vars(free)
    return seen, ended


def _check_several(kind: str, tmp_path: Path) -> None:
    seen, expected = _expected(kind)
    for world, stage in ((1, 0), (2, 1), (3, 2), (3, 3), (2, 3)):
        for found, ended in run_ranks(world, _trained, kind, stage, None, ALL_STEPS, False):
            for one, other in zip([*found, ended], [*seen, expected], strict=True):
                assert all(map(torch.equal, one, other)), (world, stage)
    # saved while it evaluates, and while it trains; each time resumed on other ranks
    _, at_two = run_ranks(2, _trained, kind, 3, tmp_path, 2, True)[0]
    assert all(map(torch.equal, at_two, seen[1]))
    ranks = run_ranks(3, _trained, kind, 1, tmp_path, 3, False)
    for found, _ in ranks:
        assert all(map(torch.equal, found[0], seen[1])), "loaded as it evaluates"
    for found, ended in run_ranks(1, _trained, kind, 2, tmp_path, ALL_STEPS, False):
        assert all(map(torch.equal, found[0], ranks[0][1]))
        assert all(map(torch.equal, ended, expected))


@pytest.mark.parametrize("kind", ["muon", "sgd"])
def test_one_of_several_moves_its_own_parameters(kind: str, tmp_path: Path) -> None:
    _check_several(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_and_the_published_classes_do(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    _check_several(kind, tmp_path)


@on_ranks(2)
def test_which_of_several_moves_is_compared_and_comes_between_steps(rank: int) -> None:
    model = _made()
    free = [ScheduleFree([p]) for p in model.parameters()]
    engine = zs.shard(model, free, stage=1)
    told = r"call.*optimizer\.train\(\) of ScheduleFree \(optimizer (1|4)\)"
    with pytest.raises(zs.PlanMismatch, match=told):
        free[4 if rank else 1].train()
    for one in free:
        one.train()
    _loss(model, 0, 0).backward()
    free[0].step()
    with pytest.raises(zs.StateError, match=r"ScheduleFree \(optimizer 0\) stepped and .* did not"):
        free[0].eval()
    for one in free[1:]:
        one.step()
    engine.close()
    model = _made()
    both = _several("sgd", model)
    engine = zs.shard(model, [*both], stage=1, offload={"optimizer": "host"})
    with pytest.raises(zs.StateError, match=r"train\(\) of ScheduleFree \(optimizer 1\) moves all"):
        both[1].train()
    engine.close()
