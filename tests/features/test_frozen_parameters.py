"""Frozen parameters: in the optimizer, switched off and on again, switched on later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.cases import (
    WIDTH,
    Backward,
    Case,
    lora,
    seeded,
    train_case,
)
from tests.support.harness import run_ranks
from tests.support.training import (
    ROWS,
    batch,
    make_model,
    take_steps,
    two_groups,
)
from zeroshard.errors import ConfigError


def _frozen_in_optimizer(rank: int, world: int) -> None:
    """People write AdamW(model.parameters()) also when half of the model is frozen."""
    for row in ROWS:
        model = seeded(lora)()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = zs.shard(model, optimizer, policy=row)
        before = engine.full_state_dict(rank0_only=False)
        memory = engine.memory().at_rest
        take_steps(rank, 3, model, optimizer)
        after = engine.full_state_dict(rank0_only=False)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {
            name for name in before if name.endswith(("down.weight", "up.weight"))
        }, changed
        trainable = 3 * 2 * WIDTH * 3
        assert memory["grad"] == 0 and engine.memory().at_rest["optimizer"] <= 8 * trainable, (
            engine.memory()
        )
        engine.close()
        assert list(optimizer.param_groups[0]["params"]) == list(model.parameters())


def test_frozen_parameters_may_be_in_the_optimizer_and_take_no_state() -> None:
    run_ranks(2, _frozen_in_optimizer)


def _toggled(rank: int, world: int) -> list[str]:
    def run(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
        inner = getattr(module, "module", module)
        inner.blocks[1].requires_grad_(step % 3 != 1)
        inner.embed.requires_grad_(step < 4)
        loss = module(*batch(rank, step))
        backward(loss)
        return [loss.detach()]

    case = Case(make_model, run, ddp=None)
    reference = train_case(rank, "reference", case)
    kinds = [(row, "shared_memory") for row in ROWS] + [("zero3", "gloo")]
    return [
        f"{kind}: {name}"
        for kind in kinds
        for name in train_case(rank, kind[0], case, comm=zs.Comm(transport=kind[1])).differs_from(
            reference
        )
    ]


def test_requires_grad_switched_off_and_on_again_skips_the_gradient() -> None:
    for differences in run_ranks(2, _toggled):
        assert not differences, differences


def _thawed(rank: int, world: int) -> None:
    model = seeded(lora)()
    engine = zs.shard(
        model, two_groups(nn.ParameterList([p for p in model.parameters() if p.requires_grad]))
    )
    model.blocks[1].base.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"'blocks.1.base.weight' was frozen .* requires_grad"):
        model(*batch(rank, 0))
    model.blocks[1].base.requires_grad_(False)
    engine.reset()
    model(*batch(rank, 0)).backward()
    engine.close()


def test_a_frozen_parameter_that_is_switched_on_later_is_refused_by_name() -> None:
    run_ranks(2, _thawed)
