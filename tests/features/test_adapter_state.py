"""Part of a state dict: ``full_state_dict(names=..., trained=True)`` gives the numbers of the whole
one, and moves an adapter without the base beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.cases import seeded
from tests.support.endless_link import Endless
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, equal, take_steps
from zeroshard.errors import ConfigError, PlanMismatch

WIDTH = 48


class _Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.scale * self.up(self.down(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(_Lora() for _ in range(3))
        self.head = nn.Linear(WIDTH, 37, bias=False).requires_grad_(False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def _sharded(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, zs.Engine]:
    model = seeded(_Model)()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return model, optimizer, zs.shard(model, optimizer, **options)


def _step(rank: int, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    take_steps(rank, [number], model, optimizer)


def _check(engine: zs.Engine, label: str) -> None:
    # first: a step may still be on its way
    early = engine.full_state_dict(rank0_only=False, trained=True)
    whole = engine.full_state_dict(rank0_only=False)
    assert equal(early, {name: whole[name] for name in early}), label
    adapter = {name for name in whole if name.endswith(("down.weight", "up.weight"))}
    assert len(adapter) == 6 and "blocks.0.scale" in whole
    asked: dict[str, tuple[dict[str, Any], set[str]]] = {
        "trained": ({"trained": True}, adapter),
        "a pattern": ({"names": "*.up.*"}, {name for name in adapter if ".up." in name}),
        "both": ({"names": ["*.1.*"], "trained": True}, {n for n in adapter if ".1." in n}),
        "frozen": ({"names": ["blocks.2.base.weight"]}, {"blocks.2.base.weight"}),
        "a tie": ({"names": ("head.weight",)}, {"head.weight"}),
        "a buffer": ({"names": ["blocks.0.scale"]}, {"blocks.0.scale"}),
    }
    for what, (options, names) in asked.items():
        found = engine.full_state_dict(rank0_only=False, **options)
        assert equal(found, {name: whole[name] for name in whole if name in names}), (label, what)
    first = engine.full_state_dict(trained=True)
    assert set(first) == (adapter if engine.rank == 0 else set()), label


_OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"policy": "zero3", "precision": "bf16"},
    "over sockets": {"policy": "zero3", "comm": zs.Comm(transport="gloo")},
    "frozen int8": {"policy": "zero3", "comm": zs.Comm(frozen_codec="int8")},
    "int8 on the wire": {"policy": "zero3", "comm": zs.Comm(weight_codec="int8")},
}


def _states(rank: int, world: int, folder: str) -> None:
    disk = {"disk_path": folder}
    tiers: dict[str, dict[str, Any]] = {
        "host optimizer": {"offload": zs.Offload(optimizer="host")},
        "host weights": {"offload": zs.Offload(weight="host", grad="host", optimizer="host")},
        "half on host": {"offload": zs.Offload(optimizer="host", fraction=0.5)},
        "disk": {"offload": zs.Offload(weight="disk", grad="disk", optimizer="disk", **disk)},
        "a step late": {"offload": zs.Offload(grad="host", optimizer="host", delayed_update=1)},
    }
    runs: dict[str, dict[str, Any]] = {row: {"policy": row} for row in ROWS}
    runs |= _OPTIONS
    runs |= {name: {"policy": "zero3", **options} for name, options in tiers.items()}
    runs["zero2, host optimizer"] = {"policy": "zero2", **tiers["host optimizer"]}
    _train_and_check(rank, runs)


def _states_of_four(rank: int, world: int) -> None:
    rows = ("hpz", "mics", "hfsdp")
    runs: dict[str, dict[str, Any]]
    runs = {row: {"policy": row, "comm": zs.Comm(node_size=2)} for row in rows}
    runs["shares"] = {"policy": "zero3", "shares": [0.0, 1.0, 0.0, 0.0]}
    _train_and_check(rank, runs)


def _train_and_check(rank: int, runs: dict[str, dict[str, Any]]) -> None:
    for label, options in runs.items():
        model, optimizer, engine = _sharded(**options)
        for number in range(2):
            _step(rank, number, model, optimizer)
        _check(engine, label)
        engine.close()


def test_part_of_a_state_dict_has_the_numbers_of_the_whole_one(tmp_path: Path) -> None:
    run_ranks(2, _states, str(tmp_path))
    run_ranks(4, _states_of_four)


@on_ranks(2)
def test_part_of_a_state_dict_waits_for_a_step_on_the_host(rank: int) -> None:
    with inside.linked(Endless(overlaps=True)):  # copies end when somebody waits for them
        offload = zs.Offload(grad="host", optimizer="host")
        model, optimizer, engine = _sharded(
            stage=3, offload=offload, comm=zs.Comm(transport="gloo")
        )
    for number in range(2):
        _step(rank, number, model, optimizer)
        _check(engine, f"a step under way, {number}")
    engine.close()


@on_ranks(2)
def test_part_of_a_state_dict_follows_a_repartition(rank: int) -> None:
    model, optimizer, engine = _sharded(stage=3)
    runs: list[dict[str, Any]] = [
        {"offload": zs.Offload(weight="host", grad="host", optimizer="host")},
        {"stage": 2, "offload": zs.Offload(optimizer="host")},
        {"stage": 3, "offload": zs.Offload()},
    ]
    for number, change in enumerate(runs):
        _step(rank, number, model, optimizer)
        engine.repartition(**change)
        _check(engine, f"repartition {number}")
        _step(rank, number + 9, model, optimizer)
        _check(engine, f"a step after repartition {number}")
    engine.close()


@on_ranks(2)
def test_an_adapter_is_gathered_without_its_base(rank: int) -> None:
    model, optimizer, engine = _sharded(stage=3, comm=zs.Comm(transport="gloo"))
    _step(rank, 0, model, optimizer)
    received = []
    for options in ({"trained": True}, {}):
        engine.reset_traffic()
        engine.full_state_dict(**options)
        received.append(engine.traffic().total)
    engine.close()
    adapter = 3 * 2 * 2 * WIDTH * 4  # bytes in fp32
    part, whole = received[0], received[1]
    assert whole > 3 * WIDTH * WIDTH * 4 / 2
    assert adapter / 2 <= part < adapter + 1024 < whole / 5


@on_ranks(2)
def test_names_that_match_nothing_or_differ_between_ranks_are_refused_on_every_rank(
    rank: int,
) -> None:
    _, _, engine = _sharded(stage=3)
    with pytest.raises(ConfigError, match=r"'\*\.lora_\*' matches no name of the _Model's"):
        engine.full_state_dict(names="*.lora_*")
    with pytest.raises(ConfigError, match=r"'blocks.0.base.weight' matches no trained parameter"):
        engine.full_state_dict(names=["blocks.0.base.weight"], trained=True)
    with pytest.raises(PlanMismatch, match=r"names"):
        engine.full_state_dict(names=["*.up.*"] if rank else ["*.down.*"])
    assert len(engine.full_state_dict(rank0_only=False, trained=True)) == 6
    engine.close()
