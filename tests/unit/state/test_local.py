"""The local tensors of DTensors: where they lie in the whole, and how their memory is swapped."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tests.support.harness import on_ranks
from zeroshard.core.placement import Part
from zeroshard.errors import ConfigError
from zeroshard.state.local import (
    gradient_taker,
    is_dtensor,
    local_of,
    part_of,
    part_within,
    point_at,
    retype,
    whole_of,
    whole_shape,
)


def test_a_plain_tensor_is_its_own_local_tensor_and_all_of_itself() -> None:
    plain = nn.Parameter(torch.ones(3, 2))
    assert not is_dtensor(plain) and local_of(plain) is plain
    assert part_of("weight", plain) == Part.whole((3, 2))
    assert gradient_taker(plain, "weight") is None
    assert whole_of(plain) is plain and part_within(plain, plain) is plain
    assert whole_shape(plain) == "(3, 2)"
    point_at(plain, torch.zeros(3, 2, dtype=torch.bfloat16))
    assert plain.dtype is torch.bfloat16


def test_dtensors_are_not_imported_where_there_are_none() -> None:
    code = (
        "import sys, torch; from zeroshard.state.local import is_dtensor, local_of;"
        " local_of(torch.ones(1)); assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def _swapped(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """The DTensor stays the object that it is, in another dtype and over other memory."""
    local = local_of(parameter)
    retype(parameter, torch.bfloat16)
    assert parameter.dtype is torch.bfloat16 and local.dtype is torch.float32
    memory = values.bfloat16()
    point_at(parameter, memory)
    assert local_of(parameter) is local and local.data_ptr() == memory.data_ptr()
    assert (parameter * 2).dtype is torch.bfloat16  # type: ignore[comparison-overlap]
    point_at(parameter, values.clone())
    assert parameter.dtype is torch.float32


def _gradients(parameter: nn.Parameter, value: torch.Tensor, own: torch.Tensor) -> None:
    """Whatever a gradient's placement is, its own is taken."""
    take = gradient_taker(parameter, "weight")
    assert take is not None and is_dtensor(parameter)
    mesh = parameter.device_mesh
    partial = DTensor.from_local(value / 2, mesh, [Partial()], run_check=False)
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    for grad in (partial, whole, whole.redistribute(placements=parameter.placements)):
        taken = take(grad)
        assert type(taken) is torch.Tensor and torch.equal(taken, own)
    with pytest.raises(ConfigError, match="its gradient is a plain tensor"):
        take(value)


@on_ranks(2)
def test_a_dtensor_has_a_box_of_the_whole_and_its_memory_can_be_swapped(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = torch.arange(15.0).view(5, 3)
    cases: list[tuple[Placement, Part]] = [
        (Shard(0), Part((5, 3), (3 * rank, 0), (3 - rank, 3), frozenset({"tp"}))),
        (Shard(1), Part((5, 3), (0, 2 * rank), (5, 2 - rank), frozenset({"tp"}))),
        (Replicate(), Part.whole((5, 3))),
    ]
    for placement, expected in cases:
        box = tuple(
            slice(at, at + size) for at, size in zip(expected.start, expected.sizes, strict=True)
        )
        parameter = nn.Parameter(
            DTensor.from_local(
                value[box].clone(), mesh, [placement], run_check=False, shape=(5, 3), stride=(3, 1)
            )
        )
        assert is_dtensor(parameter) and part_of("weight", parameter) == expected
        assert torch.equal(local_of(parameter), value[box])
        assert torch.equal(whole_of(parameter), value)
        assert torch.equal(whole_of(parameter, local_of(parameter) * 2), value * 2)
        assert torch.equal(local_of(part_within(parameter, value + 1)), value[box] + 1)
        assert whole_shape(parameter) == f"(5, 3) {placement} along 'tp'"
        _swapped(parameter, value[box])
        _gradients(parameter, value, value[box])
    odd = nn.Parameter(DTensor.from_local(value, mesh, [Partial()], run_check=False))
    with pytest.raises(ConfigError, match=r"'weight' is a DTensor placed as P\(sum\)"):
        part_of("weight", odd)
