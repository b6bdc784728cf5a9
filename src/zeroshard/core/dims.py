"""The dimensions of a DeviceMesh by name: those that are data parallel, and how gradients lie along
the others (docs/design/mesh.md); and the ranks that hold the same parameters.

    name           gradients along it are
    dp             parts of one sum: reduced
    dp_replicate   the same, the outer of two: between nodes
    dp_shard       the same, the inner of two: inside a node
    cp             the same: ranks have parts of the sequences (context parallelism)
    tp             alike: plain parameters are replicas, which count once
    pp             of other parameters: they add to the norm

``shard(dp=)`` names the data parallel dimensions where they have other names; of several the first
runs over nodes. ``cp`` is one of them in any case. A mesh of one dimension is data parallel
whatever its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from zeroshard.core.placement import Mesh, MeshPlace, OtherAxis
from zeroshard.errors import ConfigError

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
