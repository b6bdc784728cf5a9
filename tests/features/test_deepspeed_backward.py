"""Backward and step of DeepSpeed's engine where gradients of several micro-batches add up: a plain
``loss.backward()``, forwards that follow each other, and steps that the caller counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from zeroshard.integrations import deepspeed

MICRO = 2
Model = Callable[..., Any]


@dataclass
class Outputs:
    loss: torch.Tensor
    logits: torch.Tensor


class Small(nn.Module):
    """Returns the square of a layer, in the `form` that is asked for, or a loss and its logits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, form: str = "tensor") -> Any:
        logits = self.layer(torch.tanh(x))
        if form == "tensor":
            return logits
        loss = logits.square().mean()
        if form == "dict":
            return {"loss": loss, "logits": [logits]}
        return (SimpleNamespace if form == "object" else Outputs)(loss=loss, logits=logits)


def _keys(stage: int, micro: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    } | more


@contextlib.contextmanager
def made(stage: int, micro: int = MICRO, seed: int = 0, **more: Any) -> Iterator[Any]:
    model = Small(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    keys = _keys(stage, micro, **more)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=keys)
    yield engine
    engine.destroy()


def inputs(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * micro + rank))


def gradient_of(engine: Any, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one step of SGD with rate 1 took away."""
    after = engine.module_state_dict()
    return {name: before[name] - after[name] for name in after}


def by_torch(
    loss_of: Callable[..., torch.Tensor], world: int, seeds: tuple[int, ...], by: int = MICRO
) -> list[dict[str, torch.Tensor]]:
    """The mean over ranks and micro-batches, of each model."""
    models = [Small(seed) for seed in seeds]
    for rank in range(world):
        for micro in range(MICRO):
            (loss_of(inputs(rank, micro), *models) / (by * world)).backward()
    return [{name: one.grad for name, one in model.named_parameters()} for model in models]  # type: ignore[misc]


# ---------------------------------------------------------------------- what a program does


def _chained(x: torch.Tensor, model: Model) -> torch.Tensor:
    return model(model(x)).sum()


def _recurrent(x: torch.Tensor, model: Model) -> torch.Tensor:
    """Each state is used by the next forward, by a function between them, and by the loss."""
    first = model(x)
    second = model(torch.sin(first) + x)
    return second.sum() + (first * second).sum() + first.square().sum()


def _loss_and_logits(x: torch.Tensor, model: Model) -> torch.Tensor:
    outputs = model(x, "dict")
    return outputs["loss"] + outputs["logits"][0].exp().mean()


def _dataclass(x: torch.Tensor, model: Model) -> torch.Tensor:
    outputs = model(x, "dataclass")
    return outputs.loss + outputs.logits.exp().mean()


def _changed_in_place(x: torch.Tensor, model: Model) -> torch.Tensor:
    logits = model(x, "dict")["logits"][0]
    logits.mul_(3.0)
    return logits.square().sum()


def _penalty(x: torch.Tensor, model: Model) -> torch.Tensor:
    """The loss contains the gradient of the model's input."""
    x = x.requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.sum() + (slope.norm() - 1).square()


ONE_MODEL = (_chained, _recurrent, _loss_and_logits, _dataclass, _changed_in_place, _penalty)


def _divides_once(rank: int, world: int) -> None:
    for loss_of in ONE_MODEL:
        (expected,) = by_torch(loss_of, world, (0,))
        for stage in (1, 3):
            for plain in (True, False):
                with made(stage) as engine:
                    before = engine.module_state_dict()
                    engine.train(loss_of is not _chained)  # a mode is not what divides
                    for micro in range(MICRO):
                        loss = loss_of(inputs(rank, micro), engine)
                        loss.backward() if plain else engine.backward(loss)
                        engine.step()
                    found = gradient_of(engine, before)
                for name, value in expected.items():
                    message = f"{loss_of.__name__}, {stage=}, {plain=}, {name}"
                    torch.testing.assert_close(
                        found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, at=message: at + m
                    )


def test_a_plain_backward_divides_each_gradient_once_whatever_leads_to_it() -> None:
    run_ranks(2, _divides_once)


def _two_engines(rank: int, world: int) -> None:
    def loss_of(x: torch.Tensor, one: Model, other: Model) -> torch.Tensor:
        return other(one(x)).sum() + one(x).square().sum()

    # by another number of micro-batches in each engine; engine.backward divides by its engine's
    for steps, plain in (((2, 2), True), ((2, 1), True), ((1, 2), True), ((2, 2), False)):
        expected = [by_torch(loss_of, world, (0, 1), by)[at] for at, by in enumerate(steps)]
        with made(2, steps[0]) as one, made(2, steps[1], seed=1) as other:
            before = [engine.module_state_dict() for engine in (one, other)]
            for micro in range(MICRO):
                loss = loss_of(inputs(rank, micro), one, other)
                loss.backward() if plain else other.backward(loss)
                for engine in (one, other):
                    engine.set_gradient_accumulation_boundary(micro == MICRO - 1)
                    engine.step()
            found = [gradient_of(*pair) for pair in zip((one, other), before, strict=True)]
        for ours, theirs in zip(found, expected, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_each_of_two_engines_in_one_graph_divides_by_its_own_micro_batches() -> None:
    run_ranks(2, _two_engines)


def _kept_inside(rank: int, world: int) -> None:
    with made(1) as engine:
        for use in ("plain", "engine"):
            loss = engine(inputs(rank, 0), "object").loss
            if use == "engine":
                engine.backward(loss)
                continue
            with pytest.raises(zs.ConfigError, match=r"SimpleNamespace.*engine\.backward"):
                loss.backward()
            engine.engine.reset()


def test_outputs_in_an_object_that_cannot_be_divided_are_refused_in_a_plain_backward() -> None:
    run_ranks(2, _kept_inside)


# ---------------------------------------------------------------------- the sum over the ranks


def _stepped(
    rank: int, stage: int, *, plain: bool, factor: float = 1.0, **keys: Any
) -> dict[str, torch.Tensor]:
    with made(stage, **keys) as engine:
        for micro in range(MICRO):
            loss = engine(inputs(rank, micro)).square().sum() * factor
            loss.backward() if plain else engine.backward(loss)
            engine.step()
        assert engine.global_steps == 1
        return dict(engine.module_state_dict())


def _sums_ranks(rank: int, world: int) -> None:
    (gradients,) = by_torch(lambda x, model: model(x).square().sum() * world, world, (0,))
    for stage in (0, 1, 2, 3):
        for plain, op in ((True, "sum"), (False, "sum"), (False, "SUM")):
            found = _stepped(rank, stage, plain=plain, gradient_allreduce_op=op,
                             gradient_predivide_factor=2.0)  # fmt: skip
            doubled = _stepped(rank, stage, plain=plain, factor=world)
            for name, before in Small().state_dict().items():
                assert torch.equal(found[name], doubled[name]), (stage, plain, op, name)
                torch.testing.assert_close(before - found[name], gradients[name])


def test_gradient_allreduce_op_sum_adds_the_ranks_and_divides_micro_batches_alone() -> None:
    """Two ranks: the sum has the bits of the mean of a loss times two."""
    run_ranks(2, _sums_ranks)


# ---------------------------------------------------------------------- steps that a program counts


def _unmanaged(rank: int, world: int) -> None:
    for stage in (0, 1, 2, 3):
        with made(stage, 4, managed_gradient_accumulation=False) as engine:
            seen = 0
            for counts in (1, 3, 2):  # micro-batches of a step, whatever the configuration counts
                model = Small()
                model.load_state_dict(engine.module_state_dict())
                before = engine.module_state_dict()
                for micro in range(counts):
                    assert not engine.is_gradient_accumulation_boundary()
                    engine.backward(engine(inputs(rank, micro)).square().sum())
                    for other in range(world):
                        x = inputs(other, micro)
                        (model(x).square().sum() / 4 / world).backward()
                engine.step()
                seen += counts
                assert engine.was_step_applied() and engine.global_samples == seen * world
                for name, value in gradient_of(engine, before).items():
                    expected = model.get_parameter(name).grad
                    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
            assert engine.global_steps == 3
            for call in (
                lambda engine=engine: engine.set_gradient_accumulation_boundary(True),
                lambda engine=engine: engine.coalesce_grad_reduction(),
            ):
                with pytest.raises(zs.ConfigError, match=r"every engine\.step\(\) is a boundary"):
                    call()


def test_without_managed_accumulation_every_step_steps() -> None:
    run_ranks(2, _unmanaged)


def _resumed(rank: int, world: int, path: str) -> None:
    with made(2, 2) as engine:
        for micro in range(3):  # the caller's own boundary: an odd number of micro-batches
            engine.set_gradient_accumulation_boundary(micro == 2)
            engine.backward(engine(inputs(rank, micro)).sum())
            engine.step()
        engine.save_checkpoint(path)
    for steps in (2, 4):
        with made(1, steps) as engine:
            engine.load_checkpoint(path)
            boundaries = []
            for micro in range(steps):
                boundaries.append(engine.is_gradient_accumulation_boundary())
                engine.backward(engine(inputs(rank, micro)).sum())
                engine.step()
            assert boundaries == [False] * (steps - 1) + [True] and engine.global_steps == 2


def test_a_loaded_run_begins_a_step_of_as_many_micro_batches_as_it_has(tmp_path: Any) -> None:
    run_ranks(2, _resumed, str(tmp_path))
