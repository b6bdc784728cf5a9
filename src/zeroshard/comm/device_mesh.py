"""The axes of a job's mesh, as one rank sees them: its data parallel group and its peers.

Invariant: every rank of the mesh reads the same dimensions. The process groups are those of the
mesh; one is made only of two data parallel dimensions that are not the whole job, and by its
members alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.mesh_ranks import AlongAxes
from zeroshard.comm.own_mesh import OwnMesh, check_meshes, group_along, own_meshes, ranks_along
from zeroshard.comm.plain import GroupRanks, ranks_through
from zeroshard.comm.ranks import Ranks
from zeroshard.core.dims import Dims
from zeroshard.errors import ConfigError
from zeroshard.system.tasks import rank_variables

_ALL = "Pass the same mesh=, dp= and mesh_of= on every rank"


@dataclass(frozen=True)
class MeshAxes:
    """The axes of the job's mesh, and where this rank is along them."""

    group: dist.ProcessGroup | None  # its data parallel ranks; None: it is the only one
    dims: Dims
    along: AlongAxes
    mesh: DeviceMesh | None = None  # as it was given
    own: tuple[OwnMesh, ...] = ()  # of parameters that some of these ranks hold
    limit_s: float | None = None  # how long they wait for each other before there is a transport

    @property
    def rank(self) -> int:
        """This rank's number among its data parallel ranks."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """The number of these ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def ranks(self) -> GroupRanks:
        """These ranks, before there is a transport."""
        return ranks_through(self.group, limit_s=self.limit_s)


def mesh_axes_of(
    mesh: Any,
    dp: Sequence[str] | str | None = None,
    mesh_of: Any = None,
    *,
    limit_s: float | None = None,
) -> MeshAxes:
    """Return the axes of `mesh` (None: all ranks are data parallel), of which the
    dimensions `dp` are data parallel, and in the meshes of parameters, `mesh_of`. Collective; the
    ranks wait for each other for `limit_s` (None: as their groups do).

    Raises ConfigError for what is no mesh of named dimensions with this rank in it, and
    PlanMismatch where the ranks name other dimensions, before any of their groups is used.
    """
    # without a mesh on any rank, the comparison of settings that follows tells
    ranks = Ranks() if mesh is None and mesh_of is None else _members(mesh, limit_s)
    with ranks.together("shard()", remedy=_ALL) as meeting:
        dims, requests = _dims_of(mesh, dp), check_meshes(mesh_of)
        described = "none" if mesh is None else dims.describe()
        report = {"mesh": described, "mesh_of": "; ".join(one.describe() for one in requests)}
        meeting.compare(report)
    if mesh is None:
        group, axes = _everyone(), AlongAxes()
    else:
        beside = [mesh.get_group(index) for index in dims.beside]
        peers = ranks_through(*beside, limit_s=limit_s)
        axes = AlongAxes(dims.places, dims.place(mesh.get_coordinate()), peers)
        group = _data_group(mesh, dims)
    with axes.together("shard()"):
        own = own_meshes(requests, ranks_through(group, limit_s=limit_s), group)
        return MeshAxes(group, dims, axes, mesh, own, limit_s)


def _dims_of(mesh: Any, dp: Sequence[str] | str | None) -> Dims:
    """Return the dimensions of `mesh`. Raises ConfigError."""
    if mesh is None:
        if dp is not None:
            raise ConfigError(
                f"dp={dp!r} names dimensions of a mesh, and there is none: pass mesh="
            )
        group = _everyone()
        return Dims.of(None, (1 if group is None else group.size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}, not a DeviceMesh: make one with"
            " torch.distributed.init_device_mesh()"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"mesh does not contain rank {dist.get_rank()}: call shard() on its ranks"
            f" {mesh.mesh.flatten().tolist()} alone"
        )
    return Dims.of(mesh.mesh_dim_names, mesh.shape, dp)


def _members(mesh: Any, limit_s: float | None) -> Ranks:
    """Return all ranks of `mesh`, along groups that do not depend on its names: of the whole job
    those without a mesh; of a mesh that this rank is not in, itself.
    """
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        return Ranks()
    if not isinstance(mesh, DeviceMesh) or mesh.size() == dist.get_world_size():
        return ranks_through(_everyone(), limit_s=limit_s)
    return ranks_through(*(mesh.get_group(dim) for dim in range(mesh.ndim)), limit_s=limit_s)


def _everyone() -> dist.ProcessGroup | None:
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or rank_variables(os.environ):
        name = "WORLD_SIZE" if "WORLD_SIZE" in os.environ else "a rank of mpirun's or Slurm's"
        raise ConfigError(
            f"{name} is set but there is no process group: call zeroshard.init_distributed()"
            " before shard()"
        )
    return None


def _data_group(mesh: DeviceMesh, dims: Dims) -> dist.ProcessGroup:
    """Return the process group of this rank's data parallel ranks."""
    ranks = ranks_along(mesh, dims.data)
    if len(dims.data) > 1 and ranks != sorted(ranks):
        raise ConfigError(
            f"mesh has the data parallel ranks {ranks} out of order: process groups order theirs,"
            " and nodes are consecutive ranks"
        )
    return group_along(mesh, dims.data)
