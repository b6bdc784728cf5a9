"""States in fewer bits than usual: bf16 weights that are the masters, moments that rest in bf16,
and DeepSpeed's keys for both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import batch, differences, make_model, take_steps, two_groups
from zeroshard.config.native import build_config
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import ROWS as POLICIES
from zeroshard.planner.exact import LaidOut, rest_bytes
from zeroshard.planner.modules import shape_of_module
from zeroshard.runtime.engine import states_of

ROWS = ("ddp", "zero1", "zero2", "zero3")
LOW = zs.Precision("bf16", master="bf16", accumulate="bf16")  # type: ignore[arg-type]
State = dict[str, torch.Tensor]


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


RULES: tuple[Any, ...] = (two_groups, _momentum)


def _engine(
    row: str, precision: zs.Precision, rule: Any = two_groups, **options: Any
) -> tuple[Any, torch.optim.Optimizer, zs.Engine]:
    model = make_model(layers=1)
    optimizer = rule(model)
    return model, optimizer, zs.shard(model, optimizer, policy=row, precision=precision, **options)


def _moments(engine: zs.Engine, *, rounds: bool = False) -> dict[tuple[str, str, int], Any]:
    """Return all moments here, by kind, parameter and place; round them to bf16 first."""
    found = {}
    for table in states_of(engine).tables():
        for piece in table.pieces():
            if piece.kind != "value":
                with piece.borrowed(write=rounds) as there:
                    if rounds:
                        there.copy_(there.to(torch.bfloat16))
                    place = piece.kind, piece.name, piece.start
                    found[place] = there.to(torch.bfloat16, copy=True)
    return found


def _rounded(rank: int, world: int, row: str, remainder: bool) -> list[str]:
    """Return in what moments that rest in bf16 differ from those that are rounded by hand."""
    found = []
    for moments in (None, "bf16"):
        options: dict[str, Any] = {"moments": moments}
        if remainder:
            options["master"] = "remainder"
        compute = "fp32" if row == "zero2" else "bf16"
        precision = zs.Precision(compute, **options)  # type: ignore[arg-type]
        model, optimizer, engine = _engine(row, precision, RULES[world % 2])
        losses = []
        for step in range(30):
            losses += take_steps(rank, [step], model, optimizer, engine)
            if moments is None:
                _moments(engine, rounds=True)
            if step == 12:
                engine.repartition(policy="zero1" if row == "zero3" else "zero3")
            if step == 20:
                engine.offload_states()
                engine.reload_states()
        told = _moments(engine)
        state = engine.full_state_dict(rank0_only=False)
        found.append((losses, told, state))
        engine.close()
        state.update({f"closed {n}": p.detach() for n, p in model.named_parameters()})
    (losses, told, state), (ours, also, weights) = found
    lines = differences(weights, state) + ([] if losses == ours else ["losses"])
    return lines + [str(one) for one in told if not torch.equal(told[one], also[one])]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_moments_in_bf16_are_those_that_are_rounded_after_each_step(world: int) -> None:
    for row in ROWS:
        for found in run_ranks(world, _rounded, row, row in ("zero1", "zero3")):
            assert found == []


def _saved(
    rank: int, world: int, folder: Path, row: str, precision: zs.Precision, begin: int, steps: int
) -> State:
    model, optimizer, engine = _engine(row, precision)
    if begin:
        assert zs.load(folder, engine).step == begin
    for step in range(begin, steps):
        engine.backward(model(*batch(0, step)))  # the same on every rank
        optimizer.step()
        optimizer.zero_grad()
    zs.save(folder, engine, step=steps)
    engine.close()
    return {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize("option", ["moments", "master"])
def test_a_run_goes_on_from_a_checkpoint_on_any_ranks(option: str, tmp_path: Path) -> None:
    precision = zs.Precision("bf16", **{option: "bf16"})  # type: ignore[arg-type]
    plan = ((2, "zero3", 3), (3, "zero1", 5), (1, "zero2", 7), (2, "ddp", 9))
    begin = 0
    for world, row, steps in plan:
        found = run_ranks(world, _saved, tmp_path / "moves", row, precision, begin, steps)
        begin = steps
    (expected,) = run_ranks(1, _saved, tmp_path / "stays", "zero3", precision, 0, begin)
    assert differences(found[0], expected) == []


@on_ranks(2)
def test_bytes_are_those_of_the_plan(rank: int) -> None:
    cases: list[tuple[zs.Precision, dict[str, Any]]] = [
        (zs.Precision("bf16", moments="bf16"), {"moments": "bf16"}),  # type: ignore[arg-type]
        (LOW, {"master": "bf16", "moments": "bf16", "accumulate": "bf16"}),
        (
            zs.Precision("bf16", master="remainder", moments="bf16"),  # type: ignore[arg-type]
            {"master": "remainder", "moments": "bf16"},
        ),
    ]
    for row in ROWS:
        for precision, options in cases:
            training = zs.Training("bf16", micro_batches=2, **options)
            model, optimizer, engine = _engine(row, precision)
            laid_out = LaidOut(shape_of_module(model, training), Mesh.of(2), training.align)
            take_steps(rank, 1, model, optimizer)
            with engine.no_sync():
                engine.backward(model(*batch(rank, 1)))
            held = {name: tiers for name, tiers in engine.memory().tiers.items() if tiers}
            rest = rest_bytes(laid_out, POLICIES[row], training, rank)
            assert {s: {t.value: n for t, n in by.items()} for s, by in rest.items() if by} == held
            engine.close()


def test_bf16_masters_are_torchs_own_bf16_training() -> None:
    model, optimizer, engine = _engine("zero3", LOW)
    plain = make_model(layers=1).to(torch.bfloat16)
    own = two_groups(plain)
    for step in range(20):
        take_steps(0, [step], model, optimizer, engine)
        plain(*batch(0, step)).backward()
        own.step()
        own.zero_grad()
    found = engine.full_state_dict()
    engine.close()
    assert differences(found, {n: p.detach() for n, p in plain.named_parameters()}) == []


def test_inputs_are_cast_beside_bf16_masters() -> None:
    model = nn.Linear(4, 4)
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=LOW)
    assert model(torch.ones(2, 4)).dtype is torch.bfloat16
    engine.close()


def _low(rank: int, world: int) -> list[str]:
    out, expected = [], None
    for row in ROWS:
        model, optimizer, engine = _engine(row, LOW, _momentum)
        take_steps(rank, 4, model, optimizer, engine, clip=0.5)
        with engine.gathered(writeback=True), torch.no_grad():
            model.head.weight.mul_(2)
        engine.repartition(stage=1)
        take_steps(rank, range(4, 8), model, optimizer, engine, micro_batches=2, no_sync=True)
        found = engine.full_state_dict(rank0_only=False)
        engine.close()
        out += differences(found, expected or found, row, ROWS[0])
        expected = expected or found
    return out


def test_bf16_masters_have_the_same_bits_in_every_row() -> None:
    for found in run_ranks(2, _low):
        assert found == []


def test_what_has_no_low_states_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="fp32 masters, or bf16 weights"):
        zs.Precision("fp16", master="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="moments rest in bf16"):
        zs.Precision("bf16", moments="fp16")  # type: ignore[arg-type]
    model = nn.Linear(8, 8)
    precision = zs.Precision("bf16", moments="bf16")  # type: ignore[arg-type]
    with pytest.raises(zs.ConfigError, match="moments='bf16' is for states that rest on the dev"):
        optimizer = torch.optim.AdamW(model.parameters())
        zs.shard(model, optimizer, precision=precision, offload={"optimizer": "host"})
    model, _, engine = _engine("zero3", LOW)
    with pytest.raises(zs.ConfigError, match=r"zs\.EMA needs the fp32 masters"):
        zs.EMA(engine, decay=0.9)
    engine.close()


def test_deepspeeds_keys_say_bf16_masters_and_moments() -> None:
    keys = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = build_config({"zero_optimization": {"stage": 2}, "bf16": keys})
    assert config.resolved_precision() == LOW
    for key, told in (
        ("bf16_optimizer_states", "moments are of the masters' dtype: set bf16_optimizer_states"),
        ("bf16_master_weights_and_grads", "needs bf16_master_weights_and_grads"),
    ):
        with pytest.raises(zs.ConfigError, match=told):
            build_config({"zero_optimization": {"stage": 2}, "bf16": {**keys, key: False}})
    accumulates = {"data_types": {"grad_accum_dtype": "fp32"}}
    config = build_config({"zero_optimization": {"stage": 2}, "bf16": keys, **accumulates})
    assert config.resolved_precision() == zs.Precision("bf16", master="bf16")  # type: ignore[arg-type]
