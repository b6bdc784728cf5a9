"""Up to 1,024 ranks: what a step costs one of them does not grow with their number, where theory
says so.

One process is rank 0 of a fake process group. Calls are counted, nothing is timed. What does grow:

    at the start    every rank's report is compared, and a layout knows every rank's range
    in a step       one exchange of every rank's answer, 16 bytes each (not counted here: the fake
                    control plane repeats this rank's)
    at rest         padding: a rank's share of a unit is at least 64 elements long
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.support.python_calls import count_calls
from zeroshard.comm import native_transport
from zeroshard.core.layout import ALIGN

UNITS, WIDTH = 4, 128
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}), ("zero1", {}), ("zero2", {}), ("zero3", {}), ("hpz", {"node_size": 8}),
]  # fmt: skip


def _counted(row: str, comm: dict[str, Any], world: int) -> dict[str, Any]:
    """Train one model as rank 0 of `world`; return what the start and a step take."""
    with fake_world(world):
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(UNITS))
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engines: list[zs.Engine] = []

        def start() -> None:
            comms = zs.Comm(transport="nccl", **comm)
            engines.append(
                zs.shard(model, optimizer, policy=row, units=[nn.Sequential], comm=comms)
            )

        def step() -> None:
            model(torch.ones(2, WIDTH)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        started = count_calls(start)
        step()
        step()
        (engine,) = engines
        engine.reset_traffic()
        step_calls = count_calls(step)
        return {
            "start": started,
            "step": step_calls,
            "collectives": engine.traffic().calls,
            "memory": engine.memory(),
        }


@pytest.mark.parametrize(("row", "comm"), ROWS, ids=[row for row, _ in ROWS])
def test_a_step_calls_as_much_on_1024_ranks_as_on_64(row: str, comm: dict[str, Any]) -> None:
    _counted(row, comm, 16)  # what is imported and compiled on first use
    few, many = (_counted(row, comm, world) for world in (64, 1024))
    assert many["step"] <= 1.02 * few["step"]
    assert many["collectives"] == few["collectives"]
    # of every rank: a few reports (with several nodes one more in each new group), and its range of
    # every unit
    per_rank = (many["start"] - few["start"]) / (1024 - 64)
    assert per_rank <= (60 if comm else 10) + 3 * UNITS
    rest = many["memory"].at_rest["optimizer"], few["memory"].at_rest["optimizer"]
    assert rest[0] == rest[1] if row == "ddp" else rest[0] < rest[1]
    if row == "zero3":  # 16 elements of a unit a rank, padded to 64, and two moments
        assert many["memory"].total <= 3 * UNITS * ALIGN * 4


def _started(comm: dict[str, Any], world: int) -> Counter[str]:
    """Return the collectives of a unit in a forward and a backward of stage 3 on `world` ranks."""
    count: Counter[str] = Counter()

    def counted(module: Any, name: str) -> Any:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            count[name.removeprefix("group_")] += 1
            return original(*args, **options)

        return mock.patch.object(module, name, call)

    with fake_world(world), ExitStack() as stack:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        optimizer = torch.optim.SGD(model.parameters())
        comms = zs.Comm(transport="nccl", **comm)
        zs.shard(model, optimizer, stage=3, units=[nn.Linear], comm=comms)
        for name in ("group_all_gather", "group_reduce_scatter"):
            stack.enter_context(counted(native_transport, name))
        for name in ("broadcast", "reduce"):
            stack.enter_context(counted(dist, name))
        model(torch.ones(2, WIDTH)).pow(2).mean().backward()  # of what a fake broadcast has left
    return Counter({name: round(number / UNITS) for name, number in count.items()})


def test_shares_by_column_that_go_flat_are_a_broadcast_and_a_reduce_for_each_rank() -> None:
    """As docs/zeropp.md counts them."""
    deep = {"all_gather": 4, "reduce_scatter": 2}
    for world in (64, 1024):
        flat = {"broadcast": 2 * world, "reduce": world}
        assert _started({"node_size": 8, "hierarchical": False}, world) == flat
        assert _started({"node_size": 8}, world) == deep
    assert _started({}, 64) == {"all_gather": 2, "reduce_scatter": 1}
