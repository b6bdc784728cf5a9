"""The meshes of ``shard(mesh_of=)``: which ranks hold the same parameters below the modules of a
pattern.

    mesh_of={"*.experts": mesh}, mesh ('dp' 2, 'ep' 2) of ranks 0 to 3:
    groups ((0, 2), (1, 3)), along 'dp'; each reduces its own experts

Every rank tells its group to all data parallel ranks, so that all know every group.

Invariant: a group is a part of the data parallel ranks. A process group is one of the mesh's or the
job's, but where several dimensions are not the whole job: then one is made, by its members alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.groups import make_group
from zeroshard.comm.plain import ranks_through
from zeroshard.comm.ranks import Ranks
from zeroshard.core.dims import Holders, shared_dims
from zeroshard.errors import ConfigError


@dataclass(frozen=True)
class MeshRequest:
    """A mesh for the modules of a pattern, checked on this rank alone."""

    pattern: str
    mesh: DeviceMesh
    dims: tuple[int, ...]  # along which ranks hold the same parameters

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"mesh_of[{self.pattern!r}]"

    def describe(self) -> str:
        """Return it as text that ranks compare."""
        names = self.mesh.mesh_dim_names or ("dp",)
        pairs = zip(names, self.mesh.shape, strict=True)
        return f"{self.pattern}: ({', '.join(f'{name} of {size}' for name, size in pairs)})"

    def place(self) -> int:
        """Return the number of this rank among those that hold something else."""
        place, own = 0, self.mesh.get_coordinate() or ()
        for dim, (size, at) in enumerate(zip(self.mesh.shape, own, strict=True)):
            place = place if dim in self.dims else place * size + at
        return place

    def ranks(self) -> list[int]:
        """Return the ranks of the job that hold what this one holds. Raises ConfigError."""
        ranks = ranks_along(self.mesh, self.dims)
        if ranks != sorted(ranks):
            raise ConfigError(
                f"{self.name} has the data parallel ranks {ranks} out of order: process groups"
                " order theirs"
            )
        return ranks


@dataclass(frozen=True)
class OwnMesh:
    """The data parallel ranks of the parameters below the modules of one pattern."""

    pattern: str
    group: dist.ProcessGroup  # of the ranks that hold what this one holds
    holders: Holders


def check_meshes(mesh_of: Any) -> list[MeshRequest]:
    """Return what ``shard(mesh_of=)`` asks for. Raises ConfigError."""
    if mesh_of is None:
        return []
    if not isinstance(mesh_of, Mapping) or not mesh_of:
        raise ConfigError(
            f"mesh_of is {mesh_of!r}: give a dict of patterns of module names and the DeviceMesh of"
            " each, or leave it out"
        )
    requests = []
    for pattern, mesh in mesh_of.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"mesh_of has the key {pattern!r}: keys are patterns of module names")
        name = f"mesh_of[{pattern!r}]"
        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"{name} is a {type(mesh).__name__}, not a DeviceMesh: make one with"
                " torch.distributed.init_device_mesh()"
            )
        if mesh.get_coordinate() is None:
            raise ConfigError(f"{name} does not contain rank {dist.get_rank()}: every data parallel"
                              " rank has a place in it")  # fmt: skip
        try:
            dims = shared_dims(mesh.mesh_dim_names, mesh.shape)
        except ConfigError as refused:
            raise ConfigError(f"{name}: {refused}") from None
        requests.append(MeshRequest(pattern, mesh, dims))
        requests[-1].ranks()
    return requests


def own_meshes(
    requests: Sequence[MeshRequest], ranks: Ranks, group: dist.ProcessGroup | None
) -> tuple[OwnMesh, ...]:
    """Return the meshes that every one of `ranks`, the data parallel ones, which are those of
    `group`, has `requests` for. Collective.

    Raises ConfigError, on all of them, where a mesh has ranks that are none of them.
    """
    if not requests:
        return ()
    everyone = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    mine = [(one.place(), one.ranks()) for one in requests]
    answers = ranks.share(mine, "shard()")
    own = []
    for index, one in enumerate(requests):
        placed = sorted({(answer[index][0], tuple(answer[index][1])) for answer in answers})
        groups = list(dict.fromkeys(members for _, members in placed))
        outside = {rank for members in groups for rank in members}.difference(everyone)
        if outside:
            raise ConfigError(
                f"{one.name} has rank(s) {sorted(outside)} among those with the same parameters,"
                f" which are no data parallel ranks of mesh= ({everyone}): give it a mesh of these"
            )
        if sum(map(len, groups)) != len(everyone):
            raise ConfigError(
                f"{one.name} has groups of ranks that overlap, {list(map(list, groups))}: pass the"
                " same mesh on every rank"
            )
        places = tuple(tuple(everyone.index(rank) for rank in members) for members in groups)
        holders = Holders(places, everyone.index(dist.get_rank()))
        own.append(OwnMesh(one.pattern, group_along(one.mesh, one.dims), holders))
    return tuple(own)


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
