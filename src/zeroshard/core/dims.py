"""Which dimensions of a DeviceMesh are data parallel, and how gradients lie along the others: by
name (docs/design/mesh.md).

    name           gradients along it are
    dp             parts of one sum: reduced
    dp_replicate   the same, the outer of two: between nodes
    dp_shard       the same, the inner of two: inside a node
    tp             alike: plain parameters are replicas, which count once
    pp             of other parameters: they add to the norm

A mesh of one dimension is data parallel whatever its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from zeroshard.core.placement import OtherAxis
from zeroshard.errors import ConfigError

__all__ = ["Dims", "Place"]

_FLAT, _OUTER, _INNER = "dp", "dp_replicate", "dp_shard"
_ALIKE = {"tp": True, "pp": False}  # by name: whether plain parameters are alike along it
_KNOWN = "'dp', or 'dp_replicate' and 'dp_shard', are data parallel; 'tp' and 'pp' are not"


@dataclass(frozen=True)
class Place:
    """Where a rank is along the other axes."""

    text: str = ""  # "pp=1, tp=0": one text per data parallel group
    stage: str = ""  # "pp=1": ranks of one stage have the same parameters
    is_first: bool = True  # of the groups of its stage, which are replicas


@dataclass(frozen=True)
class Dims:
    """The named dimensions of a mesh."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str] | None, sizes: Sequence[int]) -> Dims:
        """Return the dimensions of a mesh.

        Raises ConfigError for several dimensions that do not say which of them are data parallel.
        """
        if len(sizes) == 1:
            return cls((_FLAT,), tuple(sizes))
        if not names:
            raise ConfigError(
                f"mesh has {len(sizes)} dimensions without names: give it mesh_dim_names ({_KNOWN})"
            )
        for name in names:
            if list(names).count(name) > 1:
                raise ConfigError(f"mesh has several dimensions {name!r}: give each its own name")
            if name not in (_FLAT, _OUTER, _INNER, *_ALIKE):
                raise ConfigError(
                    f"mesh dimension {name!r} is not known: {_KNOWN}; rename it, or give"
                    " shard() a slice without it"
                )
        data = [name for name in names if name not in _ALIKE]
        if not data:
            raise ConfigError(f"mesh has no data parallel dimension, only {list(names)}: {_KNOWN}")
        if data not in ([_FLAT], [_OUTER], [_INNER], [_OUTER, _INNER]):
            raise ConfigError(
                f"mesh has the data parallel dimensions {data}: name one 'dp', or two"
                " 'dp_replicate' and 'dp_shard', in this order"
            )
        return cls(tuple(names), tuple(sizes))

    @property
    def data(self) -> tuple[int, ...]:
        """The data parallel dimensions: those of more than one rank, or else the first."""
        every = [index for index, name in enumerate(self.names) if name not in _ALIKE]
        return tuple(index for index in every if self.sizes[index] > 1) or tuple(every[:1])

    @property
    def beside(self) -> tuple[int, ...]:
        """The other dimensions of more than one rank."""
        return tuple(
            index
            for index, name in enumerate(self.names)
            if name in _ALIKE and self.sizes[index] > 1
        )

    @property
    def num_groups(self) -> int:
        """The number of data parallel groups."""
        return prod(self.sizes[index] for index in self.beside)

    @property
    def node_size(self) -> int | None:
        """The ranks of a node, where the names say so."""
        return self.sizes[self.data[1]] if len(self.data) == 2 else None

    @property
    def others(self) -> tuple[OtherAxis, ...]:
        """The other axes of more than one rank."""
        return tuple(
            OtherAxis(self.names[index], self.sizes[index], alike=_ALIKE[self.names[index]])
            for index in self.beside
        )

    def place(self, coordinate: Sequence[int]) -> Place:
        """Return where the rank at `coordinate`, a number per dimension, is."""
        along = [(self.names[index], coordinate[index]) for index in self.beside]
        return Place(
            ", ".join(f"{name}={number}" for name, number in along),
            ", ".join(f"{name}={number}" for name, number in along if not _ALIKE[name]),
            not any(number for name, number in along if _ALIKE[name]),
        )
