"""Parameters that an optimizer of matrices steps as several (``matrix_parts``): q, k and v of one
matrix, and experts in one parameter, with the bits of plain torch on parameters of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import plainly_trained, resumed
from zeroshard.runtime import engine as engine_module
from zeroshard.runtime.engine import states_of

STEPS, LEAVES, WIDTH, EXPERTS = 4, 6, 32, 3
# Adafactor keeps a factor of one row in its shape
PARTS: dict[str, Any] = {"*.qkv.weight": (64, 16, 16), "*.experts": EXPERTS, "head": (1, 39)}
ROWS = {
    "weight": (64, 16, 16),
    "experts": (1,) * EXPERTS,
    "head": (1, 39),
}  # factors of one row have its shape


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 96, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 40, WIDTH) / 6)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).split((64, 16, 16), dim=-1)
        mixed = query[..., :16] * key + query[..., 16:32] * value
        found = torch.einsum("eow,bw->beo", self.experts, torch.cat([mixed, mixed], -1))
        return self.scale * (x + found.sum(1)[..., :WIDTH])


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Block(), Block())
        self.head = nn.Parameter(torch.randn(40, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.head.t()


def _muon(matrices: list[Any]) -> torch.optim.Optimizer:
    muon = torch.optim.Muon([one for one in matrices if one.dim() == 2], lr=0.02)
    if stacks := [one for one in matrices if one.dim() > 2]:
        muon.add_param_group({"params": stacks})  # Muon(stacks) refuses what is no matrix
    return muon


def _adafactor(matrices: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(matrices, lr=0.01)


RULES: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "muon": _muon,
    "adafactor": _adafactor,
}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.01)


def _loss(model: nn.Module, step: int, leaf: int) -> torch.Tensor:
    batch = torch.randn(LEAVES, WIDTH, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(batch[leaf : leaf + 1]).square().mean()
    return loss


def _plain(rule: str) -> list[torch.Tensor]:
    """Return the weights after all steps, each part a parameter of torch alone."""
    model, adamw, pairs = Model(), None, []
    for name, parameter in model.named_parameters():
        start = 0
        for rows in ROWS.get(name.rpartition(".")[2], ()):
            is_expert = parameter.dim() > 2
            at: Any = start if is_expert else slice(start, start + rows)
            pairs.append((parameter, at, nn.Parameter(parameter.detach()[at])))
            start += rows
    adamw, optimizer = _adamw(model), RULES[rule]([part for _, _, part in pairs])

    def step() -> None:
        for parameter, at, part in pairs:
            assert parameter.grad is not None
            part.grad = parameter.grad[at]
        optimizer.step()
        adamw.step()

    return plainly_trained(model, Model(), STEPS, LEAVES, _loss, step)


def _shard(rule: str, row: str, **options: Any) -> tuple[nn.Module, list[Any], zs.Engine]:
    model = Model()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    optimizers = [RULES[rule](matrices), _adamw(model)]
    options = {"ownership": "whole", "matrix_parts": PARTS, "leaves": LEAVES} | options
    engine = zs.shard(model, optimizers, policy=row, units=[Block], **options)
    return model, optimizers, engine


def _steps(engine: zs.Engine, optimizers: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        for leaf in engine.leaves(step):
            engine.backward(_loss(engine.module, step, leaf))
        for one in optimizers:
            one.step()
        for one in optimizers:
            one.zero_grad()


def _train(
    rank: int,
    world: int,
    rule: str,
    row: str,
    steps: int = STEPS,
    folder: Path | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[list[torch.Tensor], list[tuple[str, int, int]]]:
    """Train from what `folder` holds, and save there; return all weights, and what this rank steps
    in parts.
    """
    _, optimizers, engine = _shard(rule, row, **(options or {}))
    _steps(engine, optimizers, resumed(folder, engine), steps)
    if folder is not None:
        zs.save(folder, engine, step=steps)
    pieces = [one for one in states_of(engine).stepped_pieces() if one.parameter.dim() > 1]
    owned = [(one.name, one.piece.start, one.piece.stop) for one in pieces]
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    return [full[name] for name, _ in Model().named_parameters()], owned


@pytest.mark.parametrize("rule", RULES)
def test_parts_have_the_bits_of_parameters_of_their_own(rule: str) -> None:
    expected = _plain(rule)
    cases = ((1, "zero3", "whole"), (2, "zero1", "whole"), (2, "ddp", "whole_by_cost"))
    for world, row, ownership in (*cases, (3, "zero2", "whole_by_cost"), (4, "zero3", "whole")):
        ranks = run_ranks(world, _train, rule, row, STEPS, None, {"ownership": ownership})
        for found, _ in ranks:
            assert all(map(torch.equal, found, expected)), (world, row)
        owned = [set(one) for _, one in ranks]
        parts = sum(map(len, ROWS.values())) * 2 - len(ROWS["head"])
        assert len(set().union(*owned)) == parts, (world, row)
        if row != "ddp" and world > 1:  # one parameter of several owners
            names = [{name for name, _, _ in one} for one in owned]
            assert sum(map(len, names)) > len(set().union(*names)), (world, row)


@pytest.mark.parametrize("rule", RULES)
def test_parts_go_on_from_a_checkpoint_on_any_number_of_ranks(rule: str, tmp_path: Path) -> None:
    plan = ((2, "zero3", 1), (3, "zero1", 2), (1, "zero3", 3), (2, "ddp", STEPS))
    for world, row, steps in plan:
        ranks = run_ranks(world, _train, rule, row, steps, tmp_path)
    assert all(map(torch.equal, ranks[0][0], _plain(rule)))


@pytest.mark.parametrize("rule", RULES)
def test_parts_rest_on_other_tiers(rule: str, tmp_path: Path) -> None:
    expected = _plain(rule)
    for optimizer, fraction in (("host", 1.0), ("host", 0.5), ("disk", 1.0)):
        offload = {"optimizer": optimizer, "fraction": fraction}
        offload |= {"disk_path": str(tmp_path)} if optimizer == "disk" else {}
        options = {"offload": offload}
        for found, _ in run_ranks(2, _train, rule, "zero3", STEPS, None, options):
            assert all(map(torch.equal, found, expected)), (optimizer, fraction)


def _repartitioned(rank: int, world: int, rule: str) -> list[torch.Tensor]:
    _, optimizers, engine = _shard(rule, "zero3")
    _steps(engine, optimizers, 0, 2)
    engine.repartition(policy="zero1")
    _steps(engine, optimizers, 2, 3)
    engine.repartition(policy="zero3", offload={"optimizer": "host"})
    _steps(engine, optimizers, 3, STEPS)
    return [*engine.full_state_dict(rank0_only=False).values()]


@pytest.mark.parametrize("rule", RULES)
def test_parts_move_with_a_repartition(rule: str) -> None:
    for found in run_ranks(3, _repartitioned, rule):
        assert all(map(torch.equal, found, _plain(rule)))


def _refused(rank: int, world: int, options: dict[str, Any], like: str) -> None:
    with pytest.raises(zs.ConfigError, match=re.escape(like)):
        _shard("muon", "zero3", **options)


@pytest.mark.parametrize(
    ("options", "like"),
    [
        ({"ownership": None}, "give ownership='whole'"),
        ({"matrix_parts": {"*.kqv": 3}}, "no trained parameter has a name like '*.kqv'"),
        (
            {"matrix_parts": {"*.qkv.weight": 5}},
            "'0.qkv.weight' has shape (96, 32): parts are of the first",
        ),
        ({"matrix_parts": {"*.qkv.weight": (64, 16)}}, "have all its rows together"),
        ({"matrix_parts": {"*.qkv.weight": 3, "0.q*": 3}}, "another pattern has its name too"),
        ({"matrix_parts": {"*.scale": 2}}, "parts are of the first of two or more dimensions"),
        ({"matrix_parts": {"*.qkv.weight": 0}}, "matrix_parts"),
        ({"matrix_parts": {"*.qkv.weight": 3}}, "a trial step on parameters of 3 dimension(s)"),
    ],
)
def test_parts_that_do_not_fit_are_refused_on_every_rank(
    options: dict[str, Any], like: str
) -> None:
    run_ranks(2, _refused, options, like)


def _loaded_with_others(rank: int, world: int, folder: Path) -> str:
    _, optimizers, engine = _shard("adafactor", "zero3")
    _steps(engine, optimizers, 0, 1)
    zs.save(folder, engine, step=1)
    engine.close()
    *_, engine = _shard("adafactor", "zero3", matrix_parts={**PARTS, "*.qkv.weight": (48, 48)})
    with pytest.raises(zs.CheckpointError) as told:
        zs.load(folder, engine)
    return str(told.value)


def test_states_of_other_parts_are_told(tmp_path: Path) -> None:
    for told in run_ranks(2, _loaded_with_others, tmp_path):
        assert "cannot be cut" in told and "matrix_parts" in told, told


def _told(rank: int, world: int) -> str:
    parts = {**PARTS, "head": 2 + 2 * rank}
    with pytest.raises(zs.PlanMismatch) as told:
        _shard("muon", "zero3", matrix_parts=parts)
    return str(told.value)


def test_ranks_with_other_parts_are_told() -> None:
    for told in run_ranks(2, _told):
        assert "matrix_parts" in told or "head" in told, told


def _older(rank: int, world: int) -> list[torch.Tensor]:
    for rule in ("adafactor", "muon"):
        model, expected = Model(), Model()
        made = []
        for one in (model, expected):
            matrices = [p for p in one.parameters() if p.dim() == 2]
            others = [p for p in one.parameters() if p.dim() != 2]
            made.append([RULES[rule](matrices), torch.optim.AdamW(others, lr=0.01)])
            _loss(one, 0, 0).backward()
            for optimizer in made[-1]:
                optimizer.step()
                optimizer.zero_grad()
        options: Any = {"ownership": "whole", "matrix_parts": {"head": 2}}
        if rule == "adafactor":
            with pytest.raises(zs.ConfigError, match="'row_var' of 'head' was kept of the param"):
                zs.shard(model, made[0], **options)
            options.pop("matrix_parts")
        engine = zs.shard(model, made[0], **options)  # nothing had changed before
        if rule == "muon":
            kept = made[1][0].state[expected.head]["momentum_buffer"]
            for shard in states_of(engine).stepped_pieces():
                if shard.name == "head":
                    found = made[0][0].state[shard.tensor]["momentum_buffer"]
                    part = kept.flatten()[shard.piece.start : shard.piece.stop]
                    assert torch.equal(found.flatten(), part)
                    assert found.untyped_storage().nbytes() == 4 * part.numel()
        engine.close()
    return []


def test_states_older_than_shard_are_taken_or_refused_before_anything_changes() -> None:
    run_ranks(2, _older)


def _explained(rank: int, world: int) -> Any:
    *_, engine = _shard("muon", "zero3", ownership="whole_by_cost")
    found = engine.explain_optimizer().groups[1]  # the experts
    engine.close()
    return found


def test_a_report_weighs_parts() -> None:
    for found in run_ranks(2, _explained):
        assert sum(found.parameters) == 2 * EXPERTS
        assert max(found.largest) == 40 * WIDTH
        mean = sum(found.parameters) / 2
        assert found.cost_imbalance == pytest.approx(max(found.parameters) / mean)


def test_an_optimizer_that_cannot_be_attached_keeps_its_states() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    _loss(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {id(p): optimizer.state[p]["exp_avg"].clone() for p in model.parameters()}
    parameters = [*model.parameters()]
    engine = zs.shard(model, offload={"optimizer": "host"})
    failing = mock.patch.object(engine_module, "make_master", side_effect=zs.StorageError("full"))
    with failing, pytest.raises(zs.StorageError, match="full"):
        engine.attach(optimizer)
    assert optimizer.param_groups[0]["params"] == parameters
    assert all(torch.equal(optimizer.state[p]["exp_avg"], before[id(p)]) for p in parameters)
    engine.close()
