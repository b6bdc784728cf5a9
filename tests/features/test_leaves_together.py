"""Leaves beside what else holds, moves or cuts the states of a step: a moving average, a save in
the background, offloaded fractions, other rows, tiers and ranks in the middle, tensor parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zeroshard as zs
from tests.features.test_leaves import Model, Run, Training, hashes, tokens_of
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.tensor_parallel import mesh_of
from zeroshard.core.digest import digest_of

HOST = {"weight": "host", "grad": "host", "optimizer": "host"}


@pytest.fixture(scope="module")
def expected() -> str:
    """The hash of three steps of one rank."""
    return hashes(1, [Run()])[0]


def _averaged(rank: int, world: int, rows: Sequence[str]) -> list[str]:
    """Return the hash of a moving average and of what is trained beside it, for each row."""
    out = []
    for row in rows:
        training = Training(Run({"policy": row}))
        ema = zs.EMA(training.engine, 0.7)
        for step in range(3):
            training.step(step)
            ema.update()
            with ema.swapped(), torch.no_grad():
                training.model.eval()(tokens_of(9, 9))
                training.model.train()
        with ema.swapped():
            state = training.engine.full_state_dict()
        average = digest_of(*(state[name] for name in sorted(state))) if state else ""
        out += [average, training.end()]
    return out


def test_a_moving_average_of_a_run_with_leaves_is_one_on_any_number_of_ranks(expected: str) -> None:
    average, trained = run_ranks(1, _averaged, ["ddp"])[0]
    assert average != trained == expected
    for world in (2, 3):
        found = run_ranks(world, _averaged, ["zero1", "zero3", "zero3-keep"])[0]
        assert found == [average, trained] * 3, world


def _saved_behind(rank: int, world: int, path: Path, stage: int, steps: range) -> str:
    """Go on from `path`, and save in the background after the first of `steps`."""
    training = Training(Run({"stage": stage}))
    states = {"scheduler": training.scheduler}
    if zs.latest_step(path) is not None:
        zs.load(path, training.engine, states=states)
    with zs.Saver(path, training.engine, states=states) as saver:
        write = saver._write

        def late(job: Any) -> Any:
            time.sleep(0.3)  # the next step has been taken then
            return write(job)

        saver._write = late  # type: ignore[method-assign]
        for step in steps:
            training.step(step)
            if step == steps.start:
                saver.save(step + 1)
    training.norms.clear()
    return training.end()


def test_a_save_behind_the_leaves_of_the_next_steps_goes_on_with_other_ranks(
    tmp_path: Path,
) -> None:
    whole = run_ranks(3, _saved_behind, tmp_path / "whole", 3, range(3))[0]
    for number, (world, stage, steps) in enumerate(
        [(3, 3, range(3)), (2, 1, range(1, 3)), (1, 0, range(2, 3))]
    ):
        found = run_ranks(world, _saved_behind, tmp_path / "parts", stage, steps)[0]
        assert found == whole, number


def _changed(rank: int, world: int, changes: Sequence[dict[str, Any]], accumulate: str) -> str:
    training = Training(Run(changes[0], accumulate=accumulate))
    for step, change in enumerate(changes):
        if step:
            training.engine.repartition(**change)
        training.step(step)
    return training.end()


CHANGES: dict[str, list[dict[str, Any]]] = {
    "fractions": [
        {"stage": 3, "offload": HOST | {"fraction": 0.2}},
        {"policy": "zero3", "offload": HOST | {"fraction": 0.9}},
        {"policy": "zero3", "offload": HOST | {"fraction": 0.5}},
    ],
    "tiers": [
        {"policy": "ddp"},
        {"policy": "zero2", "offload": {"grad": "host", "optimizer": "host"}},
        {"policy": "zero3"},
    ],
    "shares": [
        {"policy": "zero3"},
        {"policy": "zero3", "shares": [0.6, 0.3, 0.1]},
        {"policy": "zero1"},
    ],
}


@pytest.mark.parametrize("accumulate", ["", "device"])
def test_states_that_move_between_the_steps_change_no_bit(accumulate: str) -> None:
    alone = hashes(1, [Run(accumulate=accumulate)])[0]
    for name, changes in CHANGES.items():
        assert run_ranks(3, _changed, changes, accumulate)[0] == alone, name


def _by_itself(rank: int, world: int) -> tuple[str, bool]:
    """Train with a fraction that the engine moves."""
    offload = {"optimizer": "host", "fraction": "auto"}
    training = Training(Run({"stage": 2, "offload": offload}))
    before = training.engine.offload_fraction
    for step in range(12):
        training.step(step)
    moved = training.engine.offload_fraction != before
    return training.end(), moved or inside.is_balanced(training.engine)


def test_a_fraction_that_moves_by_itself_changes_no_bit() -> None:
    (alone,) = hashes(1, [Run(steps=12)])
    found = run_ranks(2, _by_itself)
    assert found[0][0] == alone
    assert all(moved for _, moved in found), "no fraction has moved"


def _fewer(rank: int, world: int, rows: Sequence[str]) -> str:
    """Train a step on all ranks, the next one on one fewer, and so on."""
    meshes = [
        DeviceMesh("cpu", list(range(size)), mesh_dim_names=("dp",)) for size in range(world, 0, -1)
    ]
    training = Training(Run({"policy": rows[0], "mesh": meshes[0]}))
    for step, (mesh, row) in enumerate(zip(meshes, rows, strict=True)):
        if step:
            training.engine.repartition(mesh=mesh, policy=row)
        if rank >= world - step:
            return ""
        training.step(step)
    return training.end()


def test_ranks_that_leave_between_the_steps_change_no_bit(expected: str) -> None:
    assert run_ranks(3, _fewer, ["zero3", "zero1", "zero2"])[0] == expected


class Boom(Exception):
    pass


def _interrupted(rank: int, world: int, options: dict[str, Any], where: str) -> str:
    """Rank 0 raises in step 1 where `where` says, the others wherever they hear of it; all reset
    and run the step again.
    """
    training = Training(Run(options, leaves=5, weighted=where == "weighted"))
    engine, model = training.engine, training.model
    training.step(0)
    kept = [engine.leaves(1)]  # a loop that somebody holds while the next one runs

    def boom(*args: Any) -> None:
        raise Boom

    def in_backward(block: Any) -> Any:  # some gradients of its unit have come
        return block[2].register_forward_hook(lambda *args: args[-1].register_hook(boom) and None)

    phases = {
        "forward": lambda block: block.register_forward_hook(boom),
        "backward": in_backward,
        "weighted": in_backward,
    }

    def fails() -> None:
        if where == "before":
            time.sleep(0.5)  # the others have reduced what they have, and wait
            boom()
        for leaf in kept[0] if where == "forward" else engine.leaves(1):
            hook = phases[where](model.blocks[1]) if leaf >= 2 and where in phases else None
            try:
                engine.backward(training.loss(1, leaf), weight=training.weight(leaf))
            finally:
                if hook is not None:
                    hook.remove()
        boom()  # before the step

    before = torch.get_rng_state()
    with pytest.raises((Boom, zs.StateError)):
        training.step(1) if rank else fails()
    engine.reset()
    assert torch.equal(torch.get_rng_state(), before)
    training.norms[1:] = []
    training.step(1)
    kept.clear()
    training.step(2)
    return training.end()


@pytest.mark.parametrize("where", ["before", "forward", "backward", "weighted", "after"])
def test_reset_in_any_phase_of_a_step_with_leaves_brings_its_curve_back(where: str) -> None:
    alone = hashes(1, [Run(leaves=5, weighted=where == "weighted")])[0]
    for options in (
        {"stage": 3},
        {"stage": 1},
        {"stage": 3, "comm": {"transport": "gloo"}},
        {"policy": "hpz", "comm": {"node_size": 1, "transport": "gloo"}},
    ):
        found = run_ranks(2, _interrupted, options, where)[0]
        assert found == alone, options


class _Two(nn.Module):
    """Two units, of which only the second is used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.used(hidden)


def _partly_used(rank: int, world: int, rows: Sequence[str]) -> str:
    """Train rows over sockets, where one rank shadows another one's last leaf; return the hash."""
    found = set()
    for row in rows:
        torch.manual_seed(0)
        model = _Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"policy": row, "units": [nn.Linear], "comm": {"transport": "gloo"}}
        engine = zs.shard(model, optimizer, leaves=3, **options)
        engine.reset()
        for step in range(2):
            for leaf in engine.leaves(step):
                engine.backward(model(torch.full((2, 4), float(leaf))).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        found.add(digest_of(*engine.full_state_dict().values()))
        engine.close()
    assert len(found) == 1
    return found.pop()


def test_a_rank_without_a_leaf_gathers_no_unit_that_the_step_does_not_use() -> None:
    rows = ["ddp", "zero1", "zero2", "zero3"]
    assert run_ranks(2, _partly_used, rows)[0] == run_ranks(1, _partly_used, rows)[0]


def _recounted(rank: int, world: int, path: Path, how: str) -> str:
    """Train three steps that the engine numbers, and between them do what `how` says."""
    run = Run({"stage": 3, "precision": "fp16"}, counted=True)
    training = Training(run)
    for step in range(3):
        if step and how == "reset":
            training.engine.reset()
        elif step and how == "abandoned":
            for leaf in training.engine.leaves():
                training.engine.backward(training.loss(step, leaf))
                break
            training.engine.reset()
        elif step and how in ("load", "resume", "back"):
            zs.save(path, training.engine, step=step, states={"scheduler": training.scheduler})
            if how == "back":
                training.step(step)
                training.norms.pop()
            elif how == "resume":
                norms = training.norms
                training.engine.close()
                training = Training(run)
                training.norms = norms
            zs.load(path, training.engine, states={"scheduler": training.scheduler})
        elif step and how == "repartition":
            training.engine.repartition(stage=step)
        training.step(step)
    return training.end()


def test_steps_that_the_engine_counts_are_numbered_on_after_a_load_and_a_reset(
    tmp_path: Path,
) -> None:
    whole = run_ranks(2, _recounted, tmp_path, "")[0]
    ways = ("reset", "abandoned", "load", "resume", "back", "repartition")
    for how in ways:
        assert run_ranks(2, _recounted, tmp_path / how, how)[0] == whole, how


def _beside_tp(rank: int, world: int, stage: int) -> str:
    """Train the blocks cut over two ranks along 'tp'."""
    mesh = mesh_of(dp=world // 2, tp=2)
    torch.manual_seed(0)
    model = Model()
    model.dropout.p = 0.0  # ranks along 'tp' draw alike, but parts of one tensor
    for block in model.blocks:
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = zs.shard(model, optimizer, mesh=mesh, stage=stage, leaves=8)
    norms = []
    for step in range(3):
        for leaf in engine.leaves(step):
            engine.backward(model(tokens_of(step, leaf)))
        norms.append(engine.clip_grad_norm_(0.5).reshape(1))
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict()
    engine.close()
    return digest_of(*(state[name] for name in sorted(state)), *norms) if state else ""


def test_with_tensor_parallel_ranks_fixed_the_data_parallel_ones_may_change() -> None:
    alone = run_ranks(2, _beside_tp, 0)[0]
    for stage in (1, 3):
        assert run_ranks(4, _beside_tp, stage)[0] == alone, stage


def _refused(rank: int, world: int) -> dict[str, str]:
    out = {}
    mesh = mesh_of(dp=1, ep=world)
    engine = zs.shard(Model(), leaves=8)
    calls = {
        "schedule": lambda: engine.follow(object()),
        "experts": lambda: zs.shard(Model(), leaves=8, mesh_of={"blocks.1": mesh}),
    }
    for name, call in calls.items():
        try:
            call()
        except zs.ConfigError as error:
            out[name] = str(error)
    engine.close()
    return out


def test_schedules_and_experts_are_refused_on_every_rank_in_one_line() -> None:
    for found in run_ranks(2, _refused):
        assert found["schedule"].startswith("engine.follow() does not run leaves=8")
        assert found["experts"].startswith("leaves=8 counts the micro-batches of data parallel")
        assert not any("\n" in line for line in found.values())
