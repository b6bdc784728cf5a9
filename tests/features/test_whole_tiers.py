"""Optimizers that go by whole parameters (``ownership="whole"``) with states on the host and on
disk: the bits of the device, of plain torch and, one step late, of a plain loop that is as late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.features.test_ownership import LEAVES, RULES, STEPS, Raises, _batch, _make, _plain
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import leaf_loss
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import ROWS
from zeroshard.core.shares import WholeParameters
from zeroshard.planner.exact import LaidOut, rest_bytes
from zeroshard.planner.modules import shape_of_module
from zeroshard.runtime.context import Tiering

HOST: dict[str, Any] = {"optimizer": "host"}
BOTH: dict[str, Any] = {"grad": "host", "optimizer": "host"}
ALL: dict[str, Any] = {"weight": "host", "grad": "host", "optimizer": "host"}
DISK: dict[str, Any] = {"weight": "disk", "grad": "disk", "optimizer": "disk"}
# on disk a tile has room for the largest matrix, and for no other one beside it
TILES: dict[str, Any] = {"staging_bytes": 72 * 72 * 64 + 65_536}


@dataclass(frozen=True)
class Case:
    """One run: a row and its tiers."""

    row: str
    tiers: dict[str, Any] = field(default_factory=dict)
    one_unit: bool = False  # all parameters are one segment
    ownership: str = "whole"
    node_size: int | None = None

    @property
    def late(self) -> int | None:
        """The step from which on updates are late."""
        return self.tiers.get("delayed_update")

    def shard(self, model: Any, optimizer: Any, path: Path, **options: Any) -> zs.Engine:
        """Return the engine of the case."""
        disk = {"disk_path": str(path)} if "disk" in self.tiers.values() else {}
        return zs.shard(
            model,
            optimizer,
            policy=self.row,
            offload=zs.Offload(**self.tiers, **disk) if self.tiers else None,
            ownership=self.ownership,
            units=[nn.Sequential if self.one_unit else nn.Linear],
            comm=zs.Comm(node_size=self.node_size),
            **options,
        )


# every state of a rank, row and tier beside each other: the others follow
CASES: dict[int, list[Case]] = {
    1: [Case("zero3", ALL), Case("zero1", {**HOST, "fraction": 0.5}), Case("ddp", HOST)],
    2: [
        Case("zero1", {**HOST, "fraction": 0.5}),
        Case("zero1", {**BOTH, "staging_bytes": 1 << 17}, one_unit=True),
        Case("zero2", {"grad": "host"}),
        Case("zero2", {**BOTH, "fraction": 0.5}, one_unit=True),
        Case("zero3", {**ALL, "fraction": 0.4}),
        Case("zero3", {**DISK, **TILES}, one_unit=True),
        Case("zero3", {**DISK, "delayed_update": 2}),
        Case("zero3-keep", {"optimizer": "disk", "fraction": {"optimizer": 0.5}}),
        Case("zero2", {**BOTH, "delayed_update": 0}),
        Case("zero3", {**BOTH, "step_in_backward": True}),
        Case("zero3", {**HOST, "fraction": 0.5}, ownership="whole_by_cost"),
        Case("zero1", ownership="whole_by_cost"),
    ],
    3: [
        Case("zero2", {**BOTH, "grad": "disk", "optimizer": "disk", **TILES}, one_unit=True),
        Case("zero3", {**HOST, "delayed_update": 1}),
        Case("zero3", {**ALL, "fraction": {"weight": 0.7, "optimizer": 0.3}}),
    ],
}


def _steps(
    engine: zs.Engine, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]
) -> None:
    for step in steps:
        for leaf in engine.leaves(step):
            engine.backward(leaf_loss(model, step, leaf))
        optimizer.step()
        optimizer.zero_grad()


def _weights(engine: zs.Engine, rule: str) -> list[torch.Tensor]:
    full = engine.full_state_dict(rank0_only=False)
    return [full[name] for name, _ in _make(rule)[0].named_parameters()]


def _train(
    rank: int, world: int, rule: str, cases: Sequence[Case], path: Path
) -> list[tuple[list[torch.Tensor], dict[str, dict[str, int]]]]:
    """Return the weights after each case's steps, and what rested where before the last one."""
    out = []
    for case in cases:
        model, optimizer = _make(rule)
        engine = case.shard(model, optimizer, path, leaves=LEAVES)
        _steps(engine, model, optimizer, range(STEPS - 1))
        inside.wait_published(engine)
        tiers = {state: dict(by_tier) for state, by_tier in engine.memory().tiers.items()}
        _steps(engine, model, optimizer, [STEPS - 1])
        out.append((_weights(engine, rule), tiers))
        engine.close()
    return out


def _check(rule: str, world: int, cases: Sequence[Case], path: Path) -> None:
    expected = {late: _plain(rule, late=late) for late in {case.late for case in cases}}
    ranks = run_ranks(world, _train, rule, cases, path, timeout=120)
    for index, case in enumerate(cases):
        for rank, (found, tiers) in enumerate(one[index] for one in ranks):
            assert all(map(torch.equal, found, expected[case.late])), (case, rank)
            if "optimizer" in case.tiers and "fraction" not in case.tiers:
                assert not tiers["optimizer"].get("device"), (case, tiers)


@pytest.mark.parametrize("world", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_states_off_the_device_have_the_bits_of_plain_torch(
    rule: str, world: int, tmp_path: Path
) -> None:
    _check(rule, world, CASES[world], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_they_have_in_every_row_on_four_ranks(rule: str, tmp_path: Path) -> None:
    tiers = ({**HOST, "fraction": 0.5}, {"optimizer": "disk"}, {**BOTH, "delayed_update": 1})
    rows = [(row, None) for row in ("zero1", "zero2", "zero3", "zero3-keep")]
    rows += [(row, 2) for row in ("hpz", "mics", "hfsdp")]
    cases = [
        Case(row, away, node_size=nodes)
        for row, nodes in rows
        for away in tiers
        if not (row in ("mics", "hfsdp") and "grad" in away)
    ]
    _check(rule, 4, cases, tmp_path)


def _large(rank: int, world: int, path: Path) -> list[torch.Tensor]:
    model, optimizer = _make("lamb")
    case = Case("zero3", {**BOTH, "optimizer": "disk"}, one_unit=True)
    with mock.patch.object(Tiering, "staging_bytes", 1 << 16):
        engine = case.shard(model, optimizer, path, leaves=LEAVES)
        _steps(engine, model, optimizer, range(STEPS))
    full = _weights(engine, "lamb")
    engine.close()
    return full


def test_a_parameter_that_is_larger_than_a_tile_is_one(tmp_path: Path) -> None:
    for found in run_ranks(2, _large, tmp_path):
        assert all(map(torch.equal, found, _plain("lamb")))


def _resumed(
    rank: int, world: int, rule: str, case: Case, stop: int, path: Path
) -> list[torch.Tensor]:
    model, optimizer = _make(rule)
    engine = case.shard(model, optimizer, path / "swap", leaves=LEAVES)
    begin = 0 if zs.latest_step(path / "saved") is None else zs.load(path / "saved", engine).step
    _steps(engine, model, optimizer, range(begin, stop))
    zs.save(path / "saved", engine, step=stop)
    full = _weights(engine, rule)
    engine.close()
    return full


@pytest.mark.parametrize("rule", RULES)
def test_they_go_on_from_a_checkpoint_of_another_world_on_other_tiers(
    rule: str, tmp_path: Path
) -> None:
    (tmp_path / "swap").mkdir()
    plan = (
        (2, Case("zero3", {**HOST, "fraction": 0.5}, one_unit=True), 1),
        (3, Case("zero1", {"optimizer": "disk"}), 2),
        (1, Case("zero3"), 3),
        (2, Case("zero3", ALL), STEPS),
    )
    for world, case, stop in plan:
        ranks = run_ranks(world, _resumed, rule, case, stop, tmp_path)
    assert all(map(torch.equal, ranks[0], _plain(rule)))


@pytest.mark.parametrize("rule", RULES)
def test_an_engine_takes_them_to_other_tiers_between_steps(rule: str, tmp_path: Path) -> None:
    for found in run_ranks(2, _moved, rule, tmp_path):
        assert all(map(torch.equal, found, _plain(rule)))


def _moved(rank: int, world: int, rule: str, path: Path) -> list[torch.Tensor]:
    model, optimizer = _make(rule)
    engine = Case("zero3").shard(model, optimizer, path, leaves=LEAVES)
    moves: list[dict[str, Any]] = [
        {"offload": {**HOST, "fraction": 0.5}},
        {"offload": {"optimizer": "disk", "grad": "host", "disk_path": str(path)}, "stage": 1},
        {"offload": {**ALL, "fraction": 0.5}, "stage": 3},
        {"offload": {}, "stage": 2},
    ]
    for step, move in enumerate(moves):
        _steps(engine, model, optimizer, [step])
        if step == 1:
            with pytest.raises(zs.ConfigError, match=r"staging_bytes=65536: give as many"):
                engine.repartition(offload={**HOST, "staging_bytes": 1 << 16})
        engine.repartition(**move)
        if step == 0:
            with pytest.raises(zs.ConfigError, match=r"leave offload\.optimizer on"):
                zs.EMA(engine, decay=0.9)
    full = _weights(engine, rule)
    engine.close()
    return full


@on_ranks(2)
@pytest.mark.parametrize("tiers", [{**HOST, "fraction": 0.5}, BOTH, {"grad": "host"}])
def test_a_step_that_raises_is_given_up_and_a_load_goes_on(
    rank: int, tiers: dict[str, Any], tmp_path: Path
) -> None:
    model, _ = _make("lamb")
    optimizer = Raises(model.parameters(), lr=0.01)
    engine = Case("zero3", tiers).shard(model, optimizer, tmp_path, leaves=LEAVES)
    _steps(engine, model, optimizer, range(2))
    zs.save(tmp_path, engine, step=2)
    optimizer.fails = True
    with pytest.raises(ZeroDivisionError):
        _steps(engine, model, optimizer, [2])
    engine.reset()
    optimizer.fails = False
    _steps(engine, model, optimizer, [7])  # what the failed step has left is written over
    zs.load(tmp_path, engine)
    _steps(engine, model, optimizer, range(2, STEPS))
    full = _weights(engine, "lamb")
    engine.close()
    assert all(map(torch.equal, full, _plain("lamb")))


def _bytes(rank: int, world: int, cases: Sequence[Case], path: Path) -> list[Any]:
    """Return what the plan of each case and the engine say of the bytes at rest."""
    out: list[Any] = []
    training = zs.Training("fp32", optimizer="muon")
    for case in cases:
        model, optimizer = _make("muon")
        shape = shape_of_module(model, training)
        engine = case.shard(model, optimizer, path)
        for step in range(2):
            model(_batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        inside.wait_published(engine)
        found = engine.memory().tiers
        mesh = Mesh.of(world, case.node_size)
        tiers = [Tier(case.tiers.get(state, "device")) for state in ("weight", "grad", "optimizer")]
        matrices = [name for name, _ in model.named_parameters()]
        owned = WholeParameters(
            matrices=frozenset(matrices if case.ownership == "whole_by_cost" else ())
        )
        planned = rest_bytes(
            LaidOut(shape, mesh, shares=owned),
            ROWS[case.row].tiered(*tiers),
            zs.Training("fp32", optimizer="muon", fraction=case.tiers.get("fraction", 1.0)),
            rank,
        )
        for state in ("weight", "master", "optimizer"):
            plan = {tier.value: size for tier, size in planned[state].items() if size}
            engine_says = {tier: size for tier, size in found.get(state, {}).items() if size}
            out.append((case, state, plan, engine_says))
        engine.close()
    return out


def test_the_plan_says_the_bytes_of_every_tier(tmp_path: Path) -> None:
    cases = [
        Case(row, {**tiers, "fraction": fraction})
        for row in ("zero1", "zero3")
        for tiers in (HOST, BOTH, ALL, {"optimizer": "disk"})
        for fraction in (0.2, 0.5, 0.8, 1.0)
        if row == "zero3" or "weight" not in tiers
    ]
    cases += [Case("zero3", {**HOST, "fraction": 0.5}, ownership="whole_by_cost")]
    for rank in run_ranks(2, _bytes, cases, tmp_path, timeout=120):
        for case, state, planned, found in rank:
            assert planned == found, (case, state)


@pytest.mark.parametrize("rule", ["muon", "lamb"])
def test_buffers_that_are_too_small_for_a_parameter_are_one_clear_line(
    rule: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = _make(rule)
    small = Case("zero3", {"optimizer": "disk", "staging_bytes": 1 << 16})
    told = r"'2.weight' of 5184 elements, takes 331776 bytes .*staging_bytes=65536: give as many"
    with pytest.raises(zs.ConfigError, match=told) as error:
        small.shard(model, optimizer, tmp_path)
    assert "\n" not in str(error.value)
    with mock.patch("zeroshard.sharding.checks.STAGING_BYTES", 1 << 16):
        engine = Case("zero3", {"optimizer": "disk"}).shard(model, optimizer, tmp_path)
    engine.close()
    lines = [one for one in caplog.messages if "takes 331776 bytes of buffers" in one]
    assert len(lines) == 1
