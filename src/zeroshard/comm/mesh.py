"""The (node, local) axes of a world, and the comparison that comes before anything that must agree.

Eight ranks with ``node_size=4``::

                local 0  1  2  3
        node 0        0  1  2  3      local group of rank 5: 4 5 6 7    (short links)
        node 1        4  5  6  7      node group of rank 5:  1 5        (one rank per node)

Invariant: every rank computes the same axes. Cost of `compare`: one exchange of the names and digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from zeroshard.comm.transport import Transport
from zeroshard.errors import ConfigError, PlanMismatch

__all__ = ["Axes", "compare"]


@dataclass(frozen=True)
class Axes:
    """Where a rank stands in a world of `size` ranks, `node_size` to a node."""

    size: int
    node_size: int

    @classmethod
    def of(cls, size: int, node_size: int | None) -> Axes:
        """Return the axes; `node_size` None puts all ranks on one node. Raises ConfigError when it does not divide the world."""
        local = size if node_size is None else node_size
        if local < 1 or size % local:
            raise ConfigError(f"node_size {local} does not divide the {size} ranks")
        return cls(size, local)

    @property
    def num_nodes(self) -> int:
        return self.size // self.node_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return (node, local) of `rank`."""
        return divmod(rank, self.node_size)

    def local_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of `rank`'s node, in local order."""
        first = rank - rank % self.node_size
        return tuple(range(first, first + self.node_size))

    def node_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with `rank`'s place on every node, in node order."""
        return tuple(range(rank % self.node_size, self.size, self.node_size))


def compare(transport: Transport, named_digests: Mapping[str, str], *, remedy: str = "") -> None:
    """Return when every rank holds the same digests in the same order; collective.

    Else raise PlanMismatch on every rank, naming the first name that differs and who holds what, and the `remedy`.
    """
    everyone = [json.loads(text) for text in transport.exchange(json.dumps(list(named_digests.items())).encode())]
    for position in range(max(len(entries) for entries in everyone)):
        held: dict[tuple[str, str], list[int]] = {}
        for rank, entries in enumerate(everyone):
            entry = tuple(entries[position]) if position < len(entries) else ("nothing", "")
            held.setdefault(entry, []).append(rank)
        if len(held) > 1:
            name = next(iter(held))[0]
            shown = "; ".join(f"rank(s) {ranks}: {' = '.join(entry).removesuffix(' = ')}" for entry, ranks in held.items())
            raise PlanMismatch(f"the ranks disagree, first about {name!r} (number {position}): {shown}{'; ' if remedy else ''}{remedy}")
