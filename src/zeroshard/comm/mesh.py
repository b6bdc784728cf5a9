"""The (node, local) axes of a world.

Eight ranks with ``node_size=4``::

                local 0  1  2  3
        node 0        0  1  2  3      local group of rank 5: 4 5 6 7    (short links)
        node 1        4  5  6  7      node group of rank 5:  1 5        (one rank per node)

Invariant: every rank computes the same axes.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError

__all__ = ["Axes"]


@dataclass(frozen=True)
class Axes:
    """Where a rank stands in a world of `size` ranks, `node_size` to a node."""

    size: int
    node_size: int

    @classmethod
    def of(cls, size: int, node_size: int | None) -> Axes:
        """Return the axes; `node_size` None puts all ranks on one node. Raises ConfigError when
        it does not divide the world.
        """
        local = size if node_size is None else node_size
        if local < 1 or size % local:
            raise ConfigError(
                f"comm.node_size={local} does not divide the {size} ranks (0 to {size - 1})"
            )
        return cls(size, local)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.size // self.node_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (node, local) of `rank`."""
        return divmod(rank, self.node_size)

    def same_node(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one node."""
        return rank // self.node_size == other // self.node_size

    @property
    def mesh(self) -> Mesh:
        """The mesh of these axes, for the formulas of core."""
        return Mesh(self.num_nodes, self.node_size)

    def local_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of `rank`'s node, in local order."""
        first = rank - rank % self.node_size
        return tuple(range(first, first + self.node_size))

    def node_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with `rank`'s place on every node, in node order."""
        return self.mesh.column(rank)
