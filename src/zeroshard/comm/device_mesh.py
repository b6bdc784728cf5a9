"""The axes of a job's mesh: its dimensions by name, and as one rank sees them: its data parallel
group, its peers, and the meshes of experts.

Invariant: every rank of the mesh reads the same dimensions. The process groups are the mesh's own;
one is made only of two data parallel dimensions that are not the whole job, and by its members
alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.groups import GroupRanks, make_group, ranks_through
from zeroshard.comm.ranks import AlongAxes, Ranks
from zeroshard.core.placement import Mesh, MeshPlace, OtherAxis
from zeroshard.errors import ConfigError
from zeroshard.system.this_host import rank_variables

# ------------------------------------------------------------------------------- dimensions by name
# The dimensions that are data parallel, and how gradients lie along the others
# (docs/design/composition.md); and ranks that hold the same parameters. No process group is asked.
#
#     name           gradients along it are
#     dp             parts of one sum: reduced
#     dp_replicate   the same, the outer of two: between nodes
#     dp_shard       the same, the inner of two: inside a node
#     cp             the same: ranks have parts of the sequences (context parallelism)
#     tp             alike: plain parameters are replicas, which count once
#     pp             of other parameters: they add to the norm
#
# ``shard(dp=)`` names the data parallel dimensions where they have other names; of several the
# first runs over nodes. ``cp`` is one of them in any case. A mesh of one dimension is data parallel
# whatever its name.

_FLAT, _OUTER, _INNER, _CONTEXT = "dp", "dp_replicate", "dp_shard", "cp"
_EXPERT = "ep"
_USUAL = ([_FLAT], [_OUTER], [_INNER], [_OUTER, _INNER])
_ALIKE = {"tp": True, "pp": False}  # by name: whether plain parameters are alike along it
_KNOWN = "'dp', or 'dp_replicate' and 'dp_shard', are data parallel, as is 'cp'; 'tp' and 'pp'"
_OTHERS = f"{_KNOWN} are not"


@dataclass(frozen=True)
class Dims:
    """The named dimensions of a mesh."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dp: tuple[str, ...]  # the data parallel ones, in mesh order
    nodes: str | None = None  # the one of these that runs over nodes

    @classmethod
    def of(
        cls,
        names: Sequence[str] | None,
        sizes: Sequence[int],
        dp: Sequence[str] | str | None = None,
    ) -> Dims:
        """Return the dimensions of a mesh; `dp` are data parallel (default: the usual names).

        Raises ConfigError for several dimensions that do not say which of them are data parallel,
        and for `dp` that the mesh does not have.
        """
        asked = None if dp is None else _checked(dp, names)
        if len(sizes) == 1:
            name = names[0] if names else _FLAT
            return cls((name,), tuple(sizes), (name,))
        if not names:
            raise ConfigError(
                f"mesh has {len(sizes)} dimensions without names: give it mesh_dim_names"
                f" ({_OTHERS})"
            )
        for name in names:
            if list(names).count(name) > 1:
                raise ConfigError(f"mesh has several dimensions {name!r}: give each its own name")
        data = _usual(names) if asked is None else [name for name in names if name in asked]
        if asked is not None and data != list(asked):
            raise ConfigError(f"dp={list(asked)} names dimensions in another order than the mesh:"
                              f" {list(names)}")  # fmt: skip
        every = tuple(name for name in names if name in data or name == _CONTEXT)
        for name in names:
            if name not in (*every, *_ALIKE):
                raise ConfigError(
                    f"mesh dimension {name!r} is not known: {_OTHERS}; rename it, name it in dp="
                    " if it is data parallel, or give shard() a slice without it"
                )
        return cls(tuple(names), tuple(sizes), every, data[0] if len(data) > 1 else None)

    @property
    def data(self) -> tuple[int, ...]:
        """The data parallel dimensions of more than one rank, or else the first."""
        every = [index for index, name in enumerate(self.names) if name in self.dp]
        return tuple(index for index in every if self.sizes[index] > 1) or tuple(every[:1])

    @property
    def beside(self) -> tuple[int, ...]:
        """The other dimensions of more than one rank."""
        return tuple(
            index
            for index, name in enumerate(self.names)
            if name not in self.dp and self.sizes[index] > 1
        )

    @property
    def places(self) -> tuple[MeshPlace, ...]:
        """The places of all data parallel groups, in mesh order."""
        along = [size if i in self.beside else 1 for i, size in enumerate(self.sizes)]
        return tuple(self.place(coordinate) for coordinate in product(*map(range, along)))

    @property
    def node_size(self) -> int | None:
        """The ranks of a node, where the names say so."""
        inside = [self.sizes[index] for index in self.data if self.names[index] != self.nodes]
        between = len(inside) < len(self.data)
        return prod(inside) if between and inside else None

    @property
    def others(self) -> tuple[OtherAxis, ...]:
        """The other axes of more than one rank."""
        return tuple(
            OtherAxis(self.names[index], self.sizes[index], alike=_ALIKE[self.names[index]])
            for index in self.beside
        )

    def describe(self) -> str:
        """Return the dimensions and which are data parallel, as text that ranks compare."""
        pairs = zip(self.names, self.sizes, strict=True)
        shown = ", ".join(f"{name} of {size}" for name, size in pairs)
        return f"({shown}), data parallel: {', '.join(self.dp)}"

    def place(self, coordinate: Sequence[int]) -> MeshPlace:
        """Return where the rank at `coordinate`, a number per dimension, is."""
        along = [(self.names[index], coordinate[index]) for index in self.beside]
        return MeshPlace(
            ", ".join(f"{name}={number}" for name, number in along),
            ", ".join(f"{name}={number}" for name, number in along if not _ALIKE[name]),
            frozenset(name for name, number in along if not number),
            not any(number for name, number in along if _ALIKE[name]),
        )


def shared_dims(names: Sequence[str] | None, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a mesh of ``shard(mesh_of=)`` along which ranks hold the same
    parameters: those with the usual names. Along all others, whatever their names, ranks hold other
    parameters (experts).

    Raises ConfigError for a mesh without any.
    """
    if len(sizes) > 1 and not names:
        raise ConfigError(
            f"the mesh has {len(sizes)} dimensions without names: give it mesh_dim_names, 'dp' for"
            " the ranks with the same parameters"
        )
    known = (_FLAT, _OUTER, _INNER, _CONTEXT)
    every = [
        index
        for index, name in enumerate(names or (_FLAT,))
        if name in known or (len(sizes) == 1 and name not in (*_ALIKE, _EXPERT))
    ]
    if not every:
        raise ConfigError(
            f"the mesh has no data parallel dimension, only {list(names or ())}: name 'dp' the one"
            " along which ranks hold the same parameters, of size 1 where each rank has its own"
        )
    return tuple(index for index in every if sizes[index] > 1) or tuple(every[:1])


def _checked(dp: Sequence[str] | str, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in `dp`, all of them in the mesh. Raises ConfigError."""
    asked = (dp,) if isinstance(dp, str) else tuple(dp)
    if not asked:
        raise ConfigError("dp=() names no dimension: leave it out, or name the data parallel ones")
    for name in asked:
        if name not in (names or ()):
            raise ConfigError(f"dp={list(asked)}: mesh has no dimension {name!r}, only"
                              f" {list(names or ())}")  # fmt: skip
        if name in _ALIKE:
            raise ConfigError(f"dp={list(asked)}: {name!r} is the name of an axis along which"
                              " nothing is reduced: rename the dimension")  # fmt: skip
    return asked


def _usual(names: Sequence[str]) -> list[str]:
    """Return the data parallel dimensions with the usual names. Raises ConfigError."""
    data = [name for name in names if name in (_FLAT, _OUTER, _INNER)]
    if not data:
        raise ConfigError(
            f"mesh has no data parallel dimension, only {list(names)}: {_OTHERS}; name another in"
            " dp="
        )
    if data not in _USUAL:
        raise ConfigError(
            f"mesh has the data parallel dimensions {data}: name one 'dp', or two"
            " 'dp_replicate' and 'dp_shard', in this order"
        )
    return data


# ------------------------------------------------------------------------------- holders of experts
# All data parallel ranks hold the same parameters; of experts, some do.
#
#     world 4, experts over ('dp' 2, 'ep' 2)      groups ((0, 2), (1, 3))
#     rank 0  experts 0 1     rank 1  experts 2 3
#     rank 2  experts 0 1     rank 3  experts 2 3
#
# Invariant: the groups are disjoint, of one size, and hold every rank, in the order in which their
# experts are counted. Pure: no torch.


@dataclass(frozen=True)
class Holders:
    """The groups of ranks that hold the same parameters, and this `rank`."""

    groups: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def everyone(cls, size: int, rank: int) -> Holders:
        """Return the one group of `size` ranks."""
        return cls((tuple(range(size)),), rank)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The ranks that hold what this rank holds."""
        return next(group for group in self.groups if self.rank in group)

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank's group, and the number of groups."""
        return self.groups.index(self.members), len(self.groups)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each rank in its group."""
        every = {rank: place for group in self.groups for place, rank in enumerate(group)}
        return tuple(every[rank] for rank in range(len(every)))

    @property
    def differ(self) -> bool:
        """Whether some ranks hold other parameters than others."""
        return len(self.groups) > 1

    def mesh(self, whole: Mesh) -> Mesh:
        """Return the nodes and local ranks of a group; `whole` is the mesh of all ranks.

        Raises ConfigError where groups lie unevenly on the nodes.
        """
        shapes = {
            tuple(Counter(rank // whole.node_size for rank in group).values())
            for group in self.groups
        }
        (first, *_), *others = sorted(shapes)
        if others or len(set(next(iter(shapes)))) > 1:
            raise ConfigError(
                f"the ranks with the same parameters, {list(map(list, self.groups))}, lie unevenly"
                f" on nodes of {whole.node_size} ranks: give each node as many of every group"
            )
        return Mesh.of(len(self.groups[0]), first)


# -------------------------------------------------------------------------------- meshes of experts
# A mesh of ``shard(mesh_of=)`` says which ranks hold the same parameters below the modules of a
# pattern.
#
#     mesh_of={"*.experts": mesh}, mesh ('dp' 2, 'ep' 2) of ranks 0 to 3:
#     groups ((0, 2), (1, 3)), along 'dp'; each reduces its own experts
#
# Every rank tells its group to all data parallel ranks, so that all know every group.
#
# Invariant: a group is a part of the data parallel ranks. A process group is one of the mesh's or
# the job's, but where several dimensions are not the whole job: then one is made, by its members
# alone.


@dataclass(frozen=True)
class MeshRequest:
    """A mesh for the modules of a pattern, checked on this rank alone."""

    pattern: str
    mesh: DeviceMesh
    dims: tuple[int, ...]  # along which ranks hold the same parameters

    @property
    def name(self) -> str:
        """The name in errors."""
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
    """Return the meshes that every one of `ranks` has `requests` for: the data parallel ranks, all
    of `group`. Collective.

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


# --------------------------------------------------------------------------- axes of the job's mesh

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
    """Return the axes of `mesh` (None: all ranks are data parallel) with the data parallel
    dimensions `dp`, and in the meshes of parameters, `mesh_of`. Collective; the ranks wait for each
    other for `limit_s` (None: as their groups do).

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
        data = ranks_along(mesh, dims.data)
        if len(dims.data) > 1 and data != sorted(data):
            raise ConfigError(
                f"mesh has the data parallel ranks {data} out of order: process groups order"
                " theirs, and nodes are consecutive ranks"
            )
        group = group_along(mesh, dims.data)
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
        task = "a rank of mpirun's, Slurm's or SkyPilot's"
        name = "WORLD_SIZE" if "WORLD_SIZE" in os.environ else task
        raise ConfigError(
            f"{name} is set but there is no process group: call zeroshard.init_distributed()"
            " before shard()"
        )
    return None
