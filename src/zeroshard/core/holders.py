"""Which data parallel ranks hold the same parameters: all of them, or, of experts, some.

    world 4, experts over ('dp' 2, 'ep' 2)      groups ((0, 2), (1, 3))
    rank 0  experts 0 1     rank 1  experts 2 3
    rank 2  experts 0 1     rank 3  experts 2 3

Invariant: the groups are disjoint, of one size, and hold every rank, in the order in which their
experts are counted. Pure: no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError


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
        """Which of how many groups holds this rank."""
        return self.groups.index(self.members), len(self.groups)

    @property
    def differ(self) -> bool:
        """Whether some ranks hold other parameters than others."""
        return len(self.groups) > 1

    def mesh(self, whole: Mesh) -> Mesh:
        """Return the nodes and local ranks of a group, where `whole` are those of all ranks.

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
