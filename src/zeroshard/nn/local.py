"""The local tensor of a parameter: of a DTensor this rank's part, of a plain parameter itself.

Whoever tensor parallelism gives DTensors sees DTensors: only their local tensors are laid out,
gathered and released.

Invariant: torch.distributed.tensor is imported where there are DTensors, and nowhere else (it takes
a second).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

from zeroshard.core.part import Part
from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "local_of", "part_of"]


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    return type(tensor).__module__.startswith("torch.distributed.tensor")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is here of a DTensor; any other tensor itself. No copy."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """Return which part of parameter `name` is here.

    Raises ConfigError for placements that do not say where an element lies once.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Part.whole(shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    odd = [str(one) for one in placements if one.is_partial() or "Strided" in repr(one)]
    if odd:
        raise ConfigError(
            f"parameter {name!r} is a DTensor placed as {odd[0]}: give shard() parameters that are"
            " Shard or Replicate, as parallelize_module() makes them"
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError(
            f"parameter {name!r} is a DTensor on a mesh without names: make it with mesh_dim_names"
        )
    sizes, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    cut = [axis for axis, one in zip(names, placements, strict=True) if one.is_shard()]
    return Part(shape, tuple(start), tuple(sizes), frozenset(cut))
