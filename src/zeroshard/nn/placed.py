"""Whether DTensor parameters fit the mesh that a model is sharded over: what `shard()` refuses.

Tensor parallelism goes first, over an axis of the same mesh along which nothing is reduced
(docs/design/composition.md). Cost: nothing without DTensors. It changes and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.core.dims import Dims
from zeroshard.errors import ConfigError
from zeroshard.state.local import is_dtensor, part_of

__all__ = ["check_dtensors"]


def check_dtensors(
    parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None, dims: Dims
) -> None:
    """Raise ConfigError where one of `parameters`, by name, is a DTensor that does not lie along
    the axes of `mesh`, of `dims`, that are not data parallel.
    """
    for name, parameter in parameters.items():
        if not is_dtensor(parameter):
            continue
        part_of(name, parameter)  # refuses placements, and meshes without names
        where = parameter.device_mesh
        for axis in where.mesh_dim_names or ():
            why = _misplaced(axis, where, mesh, dims)
            if why:
                raise ConfigError(f"parameter {name!r} is a DTensor along {axis!r}, {why}")


def _misplaced(axis: str, where: DeviceMesh, mesh: DeviceMesh | None, dims: Dims) -> str:
    """Return why a DTensor of mesh `where` must not lie along `axis`, or ""."""
    if axis in dims.dp:
        return (
            "a data parallel axis of the mesh given to shard(), which cuts parameters along it"
            " itself: give it the model before fully_shard() or distribute_tensor()"
        )
    if mesh is None or axis not in dims.names:
        given = "no mesh" if mesh is None else f"a mesh of {list(dims.names)}"
        return f"and shard() was given {given}: pass mesh= with that axis, too"
    if any(other.name == axis and not other.alike for other in dims.others):
        return "along which ranks have other parameters: use an axis named 'tp'"
    ranks, expected = (dist.get_process_group_ranks(one.get_group(axis)) for one in (where, mesh))
    if ranks != expected:
        return (
            f"there over the ranks {ranks}, and in the mesh given to shard() over {expected}: use"
            " one mesh for both"
        )
    return ""
