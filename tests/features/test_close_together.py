"""``close()`` beside what holds, moves or delays masters: it gives back the numbers that a run
without any of it has, and gathers masters alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import State, batch, differences, make_model, take_steps, two_groups
from zeroshard.optim.runner import TileRunner

STEPS = 3
STATES = ("weight", "grad", "optimizer")
LATE = {"grad": "host", "optimizer": "host", "delayed_update": 1}


def _freeze(model: Any, names: Sequence[str]) -> None:
    for name in names:
        model.get_parameter(name).requires_grad_(False)


BLOCK = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")


@dataclass(frozen=True)
class Way:
    """How a model is trained until it is closed."""

    options: dict[str, Any] = field(default_factory=lambda: {"policy": "zero3"})
    frozen: tuple[str, ...] = ()
    changes: tuple[dict[str, Any], ...] = ()  # of repartition(), after the first steps
    averaged: bool = False
    before: Callable[[zs.Engine], object] = lambda engine: None
    late: bool = False  # the reference steps a step late, too


def _tiers(tier: str, **more: Any) -> dict[str, Any]:
    return {"policy": "zero3", "offload": dict.fromkeys(STATES, tier) | more}


def _nodes(row: str) -> dict[str, Any]:
    return {"policy": row, "comm": {"transport": "gloo", "node_size": 1}}


WAYS = {
    "averaged": Way(averaged=True),
    "averaged, zero1": Way({"policy": "zero1"}, averaged=True),
    "late": Way({"policy": "zero3", "offload": LATE}, late=True),
    "late, weights too": Way({"policy": "zero3", "offload": LATE | {"weight": "host"}}, late=True),
    "late, zero1": Way({"policy": "zero1", "offload": LATE}, late=True),
    "host": Way(_tiers("host")),
    "half on the host": Way(_tiers("host", fraction=0.5)),
    "disk": Way(_tiers("disk")),
    "asleep": Way(before=zs.Engine.offload_states),
    "to the host": Way(changes=({"offload": dict.fromkeys(STATES, "host")},)),
    "to zero1 and to the host": Way(
        changes=({"policy": "zero1"}, {"policy": "zero3", "offload": {"weight": "host"}})
    ),
    "to uneven shares": Way(changes=({"shares": [0.25, 0.75]},)),
    "averaged, then moved": Way(averaged=True, changes=({"policy": "zero2"},)),
    "a frozen unit": Way(frozen=tuple(f"blocks.1.{name}" for name in BLOCK)),
    "frozen beside trained": Way(frozen=("blocks.1.up.bias", "blocks.2.norm.weight")),
    "frozen, on the host": Way(_tiers("host"), frozen=("blocks.1.up.bias", "embed.weight")),
    "frozen, then moved": Way(
        frozen=("blocks.1.up.bias",), changes=({"policy": "zero1"}, {"policy": "zero3"})
    ),
    **{row: Way(_nodes(row)) for row in ("hpz", "mics", "hfsdp")},
    "hfsdp, averaged": Way(_nodes("hfsdp"), averaged=True),
    "hpz, frozen": Way(_nodes("hpz"), frozen=("blocks.1.up.bias",)),
}


def _trained(way: Way, rank: int, precision: str, folder: Path) -> tuple[Any, zs.Engine, list[Any]]:
    """Return a model that has been trained in `way`, its engine, and what is kept of it."""
    model = make_model()
    _freeze(model, way.frozen)
    optimizer = two_groups(torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad))
    options = {"comm": {"transport": "gloo"}, **way.options}
    if "disk" in options.get("offload", {}).values():
        options["offload"] = options["offload"] | {"disk_path": str(folder)}
    engine = zs.shard(model, optimizer, precision=precision, **options)
    average = zs.EMA(engine, 0.5) if way.averaged else None
    for step in range(STEPS):
        take_steps(rank, [step], model, optimizer, engine)
        if average is not None:
            average.update()
            with average.swapped(), torch.no_grad():
                model(*batch(rank, step))
        if step < len(way.changes):
            engine.repartition(**way.changes[step])
    return model, engine, [optimizer, average]


def _masters(way: Way, rank: int, precision: str, folder: Path) -> State:
    """Return the masters, and frozen weights, of a run in ZeRO-3 that has nothing else."""
    plain = Way({"policy": "zero3"} | ({"offload": LATE} if way.late else {}), frozen=way.frozen)
    model, engine, _ = _trained(plain, rank, precision, folder)
    whole = engine.full_state_dict(rank0_only=False)
    out = {
        name: zs.ParameterStates(engine, one).master() if one.requires_grad else whole[name].float()
        for name, one in model.named_parameters()
    }
    engine.close()
    return out


@contextmanager
def _slow_host() -> Iterator[None]:
    """Let a step on the host be under way when the next call comes."""
    step = TileRunner._step

    def slowly(runner: TileRunner, *args: Any) -> None:
        time.sleep(0.005)
        step(runner, *args)

    with mock.patch.object(TileRunner, "_step", slowly):
        yield


@pytest.mark.parametrize("name", WAYS)
@on_ranks(2, timeout=60)
def test_close_gives_the_masters_of_a_plain_run_back_and_gathers_no_others(
    rank: int, name: str, tmp_path: Path
) -> None:
    gathered, way = [], WAYS[name]
    for precision in ("bf16", "fp32"):
        expected = _masters(way, rank, precision, tmp_path)
        with _slow_host():
            model, engine, kept = _trained(way, rank, precision, tmp_path)
            way.before(engine)
            engine.reset_traffic()
            engine.close()
        gathered.append(engine.traffic().bytes.get("all_gather", 0))
        found = {name: value.detach() for name, value in model.named_parameters()}
        assert all(value.dtype is torch.float32 for value in found.values())
        assert not (wrong := differences(found, expected, name)), (precision, wrong)
        assert not kept[0].state, "the optimizer's state is dropped"
        model(*batch(rank, 7)).backward()  # it is a plain model
    if engine.policy.name == "zero3" and not way.frozen:
        assert gathered[0] == gathered[1] > 0, "bf16 weights are gathered beside the masters"
