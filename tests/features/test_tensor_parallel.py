"""Tensor parallelism first, sharding after: the same training as in one process, and the same
bits in every row.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.tensor_parallel import (
    CASES,
    alone,
    difference,
    llama_plan,
    mesh_of,
    micro_batches,
    train,
)
from zeroshard import ConfigError, StateError

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
SMALL = 0.05  # what clips every step

# ------------------------------------------------------------------------------------ the same bits


def _as_alone(rank: int, world: int, name: str, rows: tuple[str, ...], dp: int, steps: int) -> None:
    mesh = mesh_of(dp=dp, tp=world // dp)
    case = CASES[name]
    expected = alone(case, dp, steps, clip=SMALL)[mesh.get_local_rank("dp")]
    first = None
    for row in rows:
        run = train(case, mesh, steps, clip=SMALL, policy=row)
        assert run.losses == pytest.approx(expected.losses, rel=1e-5), row
        assert run.norms == pytest.approx(expected.norms, rel=1e-5), row
        assert difference(run.state, expected.state) < 1e-5, row
        first = first or run
        assert not run.same_bits(first), (row, run.same_bits(first))


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process_and_rows_have_the_same_bits(name: str) -> None:
    run_ranks(4, _as_alone, name, ("ddp", "zero2", "zero3"), 2, 3, timeout=100)


# --------------------------------------------------------------------------------------- bad inputs


def _refusals(rank: int, world: int) -> list[str]:
    """Parameters that shard() cannot take, each with what it says of them."""
    mesh = mesh_of(dp=2, tp=2)
    unnamed = init_device_mesh("cpu", (4,))
    turned = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("dp", "tp"))
    given: list[tuple[DeviceMesh, Placement, DeviceMesh | None]] = [
        (mesh["tp"], Shard(0), mesh["dp"]),
        (mesh["tp"], Shard(0), None),
        (mesh["dp"], Shard(0), mesh),
        (unnamed, Shard(0), mesh),
        (mesh["tp"], Partial(), mesh),
        (turned["tp"], Shard(0), mesh),
    ]
    told = []
    for where, placement, over in given:
        model = nn.Linear(4, 4)
        local = torch.full((4 if placement.is_partial() else 2, 4), 7.0)
        tensor = DTensor.from_local(local, where, [placement], run_check=False)
        model.weight = nn.Parameter(tensor)
        with pytest.raises(ConfigError) as refused:
            zs.shard(model, torch.optim.AdamW(model.parameters()), mesh=over)
        assert model.weight.to_local()[0, 0] == 7 and type(model.bias) is nn.Parameter
        told.append(str(refused.value))
    return told


def test_dtensors_that_do_not_fit_the_mesh_are_refused_in_one_line() -> None:
    for told in run_ranks(4, _refusals):
        assert [one.removeprefix("parameter 'weight' is a DTensor ") for one in told] == [
            "along 'tp', and shard() was given a mesh of ['dp']: pass mesh= with that axis, too",
            "along 'tp', and shard() was given no mesh: pass mesh= with that axis, too",
            "along 'dp', a data parallel axis of the mesh given to shard(), which cuts parameters"
            " along it itself: give it the model before fully_shard() or distribute_tensor()",
            "on a mesh without names: make it with mesh_dim_names",
            "placed as P(sum): give shard() parameters that are Shard or Replicate, as"
            " parallelize_module() makes them",
            "along 'tp', there over the ranks [0, 2], and in the mesh given to shard() over"
            " [0, 1]: use one mesh for both",
        ]


def _too_late(rank: int, world: int, row: str) -> None:
    """Tensor parallelism after shard() changes nothing, and training goes on."""
    mesh, case = mesh_of(dp=2, tp=2), CASES["llama"]
    model = case.model()
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), policy=row, mesh=mesh)
    kinds = [type(parameter) for parameter in model.parameters()]
    for module, plan in ((model, llama_plan()), (model.get_submodule("head"), ColwiseParallel())):
        with pytest.raises(StateError, match=r"call parallelize_module\(\) before shard\(\)"):
            parallelize_module(module, mesh["tp"], plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    engine.backward(model(*next(micro_batches(engine.rank, 0, case.vocabulary))))
    assert engine.optimizer is not None
    engine.optimizer.step()
    assert [type(parameter) for parameter in model.parameters()] == kinds


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_tensor_parallelism_after_shard_is_refused_and_changes_nothing(row: str) -> None:
    run_ranks(4, _too_late, row)
