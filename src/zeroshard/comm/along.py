"""The ranks along some dimensions of a DeviceMesh with this rank, and their process group.

Invariant: the group is one of the mesh's or the job's, but where several dimensions are not the
whole job: then one is made, by its members alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.groups import make_group
from zeroshard.comm.plain import ranks_through

__all__ = ["group_along", "ranks_along"]


def ranks_along(mesh: DeviceMesh, dims: Collection[int]) -> list[int]:
    """Return the ranks of the job along the dimensions `dims`, in mesh order."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if dim in dims else number for dim, number in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


def group_along(mesh: DeviceMesh, dims: Sequence[int]) -> dist.ProcessGroup:
    """Return the process group of `ranks_along`, which are in order. Collective among them."""
    groups: list[dist.ProcessGroup] = [mesh.get_group(dim) for dim in dims]
    if len(groups) == 1:
        return groups[0]
    ranks = ranks_along(mesh, dims)
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    # not DeviceMesh._flatten(), in which every rank of the job takes part; members agree along one
    # dimension after the other
    return make_group(ranks, ranks_through(*groups).exchange)
