"""``gradient_reduction="sum"``: a step takes the sum of the ranks' gradients.

The mean is that sum, divided once, after it: so ``sum / ranks`` has the bits of the mean, at every
stage, and both those of a sum formed by hand.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.sums import sum_in_order, sum_of_micro_batches
from tests.support.training import (
    ROWS,
    State,
    batch,
    differences,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
)

HOST = {"grad": "host", "optimizer": "host"}
NODES = {"comm": zs.Comm(node_size=1)}
FP16: dict[str, Any] = {"precision": "fp16", "loss_scale": {"initial": 256.0}}
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    **{row: (row, {}) for row in ROWS},
    "mics": ("mics", NODES),
    "hpz": ("hpz", NODES),
    "host": ("zero2", {"offload": HOST}),
    "a part on the host": ("zero3", {"offload": {**HOST, "fraction": 0.5}}),
    "bf16": ("zero3", {"precision": "bf16"}),
    "fp16": ("zero1", FP16),
    "shares of states": ("zero3", {"shares": [0.2, 0.5, 0.3]}),
}


def _gradients(
    rank: int, row: str, options: dict[str, Any], *, assign: bool = False
) -> dict[str, torch.Tensor]:
    """Return the gradients of two micro-batches, the first inside ``no_sync()``."""
    model, optimizer, engine = make_sharded(row, **options)
    for micro in range(2):
        with engine.no_sync() if micro == 0 else contextlib.nullcontext():
            engine.backward(model(*batch(rank, micro)))
    if assign:
        model.norm.weight.grad = torch.ones_like(model.norm.weight)
    out = {}
    for name, parameter in model.named_parameters():
        whole = engine.full_grad(parameter)
        assert whole is not None
        out[name] = whole.clone()
    optimizer.zero_grad()
    engine.close()
    return out


def _by_hand(world: int, *, micro_batches_first: bool) -> dict[str, torch.Tensor]:
    """Return the sum of the gradients of all ranks, in rank order."""
    model = make_model()
    of = []
    for micro in range(2):
        losses = [model(*batch(rank, micro)) for rank in range(world)]
        of.append([torch.autograd.grad(loss, list(model.parameters())) for loss in losses])
    out = {}
    for index, (name, _) in enumerate(model.named_parameters()):
        parts = [[of[micro][rank][index] for rank in range(world)] for micro in range(2)]
        out[name] = sum_of_micro_batches(parts, micro_batches_first=micro_batches_first)
    return out


@on_ranks(3, timeout=100)
def test_the_sum_has_the_bits_of_one_by_hand_and_the_mean_is_that_divided(
    rank: int, world: int
) -> None:
    out = {}
    for name, (row, options) in PAIRS.items():
        added = _gradients(rank, row, {**options, "gradient_reduction": "sum"})
        mean = _gradients(rank, row, options)
        out[name] = differences({one: added[one] / world for one in added}, mean)
        if not options:
            first = row in ("ddp", "zero1")
            by_hand = _by_hand(world, micro_batches_first=first)
            out[f"{name}, by hand"] = differences(added, by_hand)
    assert len(out) == len(PAIRS) + len(ROWS) and not any(out.values()), out


def _train(
    rank: int, row: str, *, factor: float = 1.0, clip: float | None = None, **options: Any
) -> State:
    model, optimizer, engine = make_sharded(row, optimizer=_sgd, **options)
    for step in range(3):
        engine.backward(model(*batch(rank, step)) * factor)
        if clip is not None:
            engine.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.steps_skipped == 0
    return final_state(model, engine)


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps follow the size of gradients, as AdamW's do not."""
    return two_groups(model, torch.optim.SGD)


@on_ranks(2, timeout=100)
def test_steps_and_clips_take_the_sum(rank: int) -> None:
    """On two ranks the sum has the bits of a mean of losses times two."""
    out = {}
    for row in ROWS:
        by_loss = _train(rank, row, factor=2.0)
        out[row] = differences(_train(rank, row, gradient_reduction="sum"), by_loss)
        out[f"{row} differs"] = [] if differences(by_loss, _train(rank, row)) else ["no"]
    for option in ("clip", "gradient_clipping"):
        clipped: dict[str, Any] = {option: 0.1}
        by_loss = _train(rank, "zero2", factor=2.0, **clipped)
        out[option] = differences(
            _train(rank, "zero3", gradient_reduction="sum", **clipped), by_loss
        )
    assert not any(out.values()), out


@on_ranks(2)
def test_a_repartition_keeps_the_sum(rank: int) -> None:
    """An engine that is laid out anew goes on with sums."""
    states = []
    for changes in (True, False):
        model, optimizer, engine = make_sharded("zero2", optimizer=_sgd, gradient_reduction="sum")
        for step in range(2):
            take_steps(rank, [step], model, optimizer, engine)
            if changes and step == 0:
                engine.repartition(policy="zero3")
        states.append(final_state(model, engine))
    found = differences(states[0], states[1])
    assert found == []


def _sum_of(model: torch.nn.Module, step: int, ranks: int) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    of = [torch.autograd.grad(model(*batch(rank, step)), parameters) for rank in range(ranks)]
    return [sum_in_order(parts) for parts in zip(*of, strict=True)]


@on_ranks(2)
def test_a_rank_without_data_adds_nothing(rank: int) -> None:
    """In ``join()`` a rank without data adds nothing to the sum."""
    model, optimizer, engine = make_sharded("zero3", optimizer=_sgd, gradient_reduction="sum")
    with engine.join():
        take_steps(rank, 2 - rank, model, optimizer, engine)
    plain = make_model()
    sgd = _sgd(plain)
    for step in range(2):
        totals = _sum_of(plain, step, 2 - step)
        for parameter, total in zip(plain.parameters(), totals, strict=True):
            parameter.grad = total
        sgd.step()
    found = differences(final_state(model, engine), dict(plain.state_dict()))
    assert found == []


@on_ranks(2)
def test_an_assigned_gradient_is_taken_as_it_is(rank: int, world: int) -> None:
    """An assigned gradient is taken as it is; the others are sums."""
    added = _gradients(rank, "zero2", {"gradient_reduction": "sum"}, assign=True)
    mean = _gradients(rank, "zero2", {}, assign=True)
    ones = added.pop("norm.weight")
    assert torch.equal(ones, torch.ones_like(ones)) and torch.equal(mean.pop("norm.weight"), ones)
    found = differences({name: one / world for name, one in added.items()}, mean)
    assert found == []


@on_ranks(2)
def test_what_forms_a_mean_and_ranks_that_differ_are_refused(rank: int) -> None:
    model, _, engine = make_sharded("zero2", gradient_reduction="sum")
    with pytest.raises(zs.ConfigError, match="leave weight out and multiply the loss"):
        engine.backward(model(*batch(rank, 0)), weight=3)
    with pytest.raises(zs.PlanMismatch, match="gradient_reduction"):
        make_sharded("zero2", gradient_reduction="sum" if rank else "mean")


@pytest.mark.parametrize("options", [{"batch_shares": [0.5, 0.5]}, {"leaves": 4}])
def test_options_that_say_what_a_mean_is_over_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(zs.ConfigError, match=f"{next(iter(options))} says how many losses"):
        zs.Config(gradient_reduction="sum", **options).refuse_unsupported()
    with pytest.raises(zs.ConfigError, match="gradient_reduction"):
        zs.Config(gradient_reduction="max")
