"""Frozen parameters: in the optimizer, switched off and on again, switched on later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.cases import WIDTH, Backward, Case, lora, seeded, train_case
from tests.support.harness import on_ranks
from tests.support.training import ROWS, batch, final_state, make_model, take_steps, two_groups
from zeroshard.errors import CheckpointError, ConfigError


@on_ranks(2)
def test_frozen_parameters_may_be_in_the_optimizer_and_take_no_state(rank: int) -> None:
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


@on_ranks(2)
def test_requires_grad_switched_off_and_on_again_skips_the_gradient(rank: int) -> None:
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
    differences = [
        f"{kind}: {name}"
        for kind in kinds
        for name in train_case(rank, kind[0], case, comm=zs.Comm(transport=kind[1])).differs_from(
            reference
        )
    ]
    assert not differences, differences


@on_ranks(2)
def test_a_frozen_parameter_that_is_switched_on_later_is_refused_by_name(rank: int) -> None:
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


@on_ranks(2)
def test_a_checkpoint_without_frozen_parameters_resumes_in_every_row(
    rank: int, tmp_path: Path
) -> None:
    def sharded(row: str) -> tuple[nn.Module, torch.optim.Optimizer, zs.Engine]:
        model = seeded(lora)()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        return model, optimizer, zs.shard(model, optimizer, policy=row)

    model, optimizer, engine = sharded("zero3")
    take_steps(rank, 2, model, optimizer)
    path = zs.save(tmp_path / "adapter", engine, step=2, frozen=False)
    whole = zs.save(tmp_path / "whole", engine, step=2)
    sizes = [sum(file.stat().st_size for file in step.iterdir()) for step in (path, whole)]
    trained, every = (
        sum(p.numel() for p in model.parameters() if p.requires_grad or keep)
        for keep in (False, True)
    )
    assert sizes[1] - sizes[0] > 4 * (every - trained), sizes
    take_steps(rank, 2, model, optimizer)
    expected = final_state(model, engine)
    for row in ROWS:
        for saved in ("adapter", "whole"):
            model, optimizer, engine = sharded(row)
            if saved == "adapter":
                with pytest.raises(CheckpointError, match="is not in the checkpoint"):
                    zs.load(tmp_path / saved, engine)
            assert zs.load(tmp_path / saved, engine, frozen=False).skipped == []
            take_steps(rank, 2, model, optimizer)
            state = engine.full_state_dict(rank0_only=False)
            assert all(torch.equal(state[name], expected[name]) for name in expected), row
            engine.close()
