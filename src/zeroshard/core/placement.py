"""The placement of a state along the mesh axes, its tier, and the collectives between placements.

R = replicated, S = sharded, P = partial: a sum over ranks not yet formed (DTensor's words; ZeRO,
section 5). The mesh has two axes, (node, local); one node is the mesh (1, N). Mesh(2, 4)::

                local 0  1  2  3
        node 0        0  1  2  3      node of rank 5:    4 5 6 7    (short links)
        node 1        4  5  6  7      column of rank 5:  1 5        (one rank per node)

`Cells` say where the states of one unit rest; invalid cells cannot be built.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from math import prod
from typing import Literal

from zeroshard.errors import ConfigError

# kinds of numbers that rest for a parameter: its values, and (before the key) optimizer states
VALUE, STATE = "value", "state."


class Placement(Enum):
    """A state as the ranks along one mesh axis hold it."""

    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"


class Tier(Enum):
    """The memory that a state rests in. ``tier/stores.py`` makes the store of each but DEVICE."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


# the values of Tier, in its order, for type checkers
TierName = Literal["device", "host", "disk"]


class Scope(IntEnum):
    """The part of a buffer that a rank holds, each within the next (docs/design/routes.md)."""

    SHARD = 0  # S S: 1/(nodes x local)
    # R S: 1/local, the shards of the ranks with one local index (a column); on one node SHARD
    NODE_SHARD = 1
    FULL = 2  # R R


@dataclass(frozen=True)
class Portion:
    """The share of a buffer, in one unit, of a rank, its column and the ranks of its node."""

    own: float
    column: float
    node: float
    whole: float

    def held(self, scope: Scope) -> float:
        """Return how much the rank holds in `scope`."""
        return {Scope.SHARD: self.own, Scope.NODE_SHARD: self.column, Scope.FULL: self.whole}[scope]


@dataclass(frozen=True)
class OtherAxis:
    """An axis of the mesh along which ranks are not data parallel."""

    name: str
    size: int
    alike: bool  # plain parameters are the same along it


@dataclass(frozen=True)
class MeshPlace:
    """The place of a rank along the other axes."""

    text: str = ""  # "pp=1, tp=0": one text per data parallel group
    stage: str = ""  # "pp=1": ranks of one stage have the same parameters
    # along which axes, by name, it is the first rank: what is replicated along an axis counts there
    first_along: frozenset[str] = frozenset()
    is_first: bool = True  # of the groups of its stage, which are replicas


@dataclass(frozen=True)
class Mesh:
    """The data parallel ranks: `num_nodes` groups of `node_size`. The same on every rank.

    There are as many of them at each place along the `others`, each with a model of its own, and
    they meet only to agree (comm/ranks.py).
    """

    num_nodes: int
    node_size: int
    others: tuple[OtherAxis, ...] = ()

    def __post_init__(self) -> None:
        assert self.num_nodes >= 1 and self.node_size >= 1, self

    @classmethod
    def of(
        cls, size: int, node_size: int | None = None, others: tuple[OtherAxis, ...] = ()
    ) -> Mesh:
        """Return the mesh of `size` data parallel ranks, `node_size` to a node (None: all on one).

        Raises ConfigError where `node_size` does not divide `size`.
        """
        local = size if node_size is None else node_size
        if local < 1 or size % local:
            raise ConfigError(
                f"comm.node_size={local} does not divide the {size} ranks (0 to {size - 1})"
            )
        return cls(size // local, local, others)

    @property
    def size(self) -> int:
        """The number of data parallel ranks."""
        return self.num_nodes * self.node_size

    def portion(self, whole: float) -> Portion:
        """Return what every rank has of `whole` that is cut equally."""
        return Portion(whole / self.size, whole / self.node_size, whole / self.num_nodes, whole)

    def same_node(self, rank: int, other: int) -> bool:
        """Whether two ranks are on one node."""
        return rank // self.node_size == other // self.node_size

    def node(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of `rank`'s node, in local order."""
        first = rank - rank % self.node_size
        return tuple(range(first, first + self.node_size))

    def column(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with `rank`'s place on every node, in node order."""
        return tuple(range(rank % self.node_size, self.size, self.node_size))

    @cached_property
    def column_order(self) -> tuple[int, ...]:
        """The ranks in the order in which their shares lie in a buffer: column by column."""
        return tuple(rank for local in range(self.node_size) for rank in self.column(local))


@dataclass(frozen=True)
class Cell:
    """The placement of one state along (node, local), and its tier."""

    node: Placement
    local: Placement
    tier: Tier = Tier.DEVICE

    @classmethod
    def parse(cls, text: str, tier: Tier = Tier.DEVICE) -> Cell:
        """Read a cell as the table writes it: ``"S S"`` is sharded along both axes."""
        node, local = text.split()
        return cls(Placement(node), Placement(local), tier)

    def __str__(self) -> str:
        return f"{self.node.value} {self.local.value}"

    @property
    def axes(self) -> tuple[Placement, Placement]:
        """The placements between nodes and inside them."""
        return (self.node, self.local)

    def num_shards(self, mesh: Mesh) -> int:
        """Return into how many parts the state is cut on `mesh`."""
        node = mesh.num_nodes if self.node is Placement.SHARD else 1
        local = mesh.node_size if self.local is Placement.SHARD else 1
        return node * local

    @property
    def scope(self) -> Scope:
        """The part of a state that a rank holds; a partial sum counts as whole.

        Raises ValueError for S R: no row has it.
        """
        if self.local is Placement.SHARD:
            return Scope.SHARD if self.node is Placement.SHARD else Scope.NODE_SHARD
        if self.node is Placement.SHARD:
            raise ValueError(f"{self}: sharded between nodes but not inside them")
        return Scope.FULL

    @cached_property
    def is_sharded(self) -> bool:
        """Whether the state is sharded over either axis."""
        return Placement.SHARD in self.axes

    @property
    def is_partial(self) -> bool:
        """Whether the state is a partial sum over either axis."""
        return Placement.PARTIAL in self.axes


@dataclass(frozen=True)
class Cells:
    """The resting places of the states of one unit."""

    weight: Cell
    between: Cell
    grad: Cell
    optim: Cell

    def __post_init__(self) -> None:
        for name in ("weight", "between", "optim"):
            cell = getattr(self, name)
            if cell.is_partial:
                raise ValueError(f"{name}={cell}: only a gradient can be a partial sum")
        if not self.weight.is_sharded and self.weight.tier is not Tier.DEVICE:
            raise ValueError(
                f"weight={self.weight} on {self.weight.tier.value}: every rank would keep and move"
                " the whole model; weights that leave the device rest sharded (zero3)"
            )
        if self.grad.local is Placement.REPLICATE:
            raise ValueError(
                f"grad={self.grad}: every rank would receive and keep the whole sum after each"
                " micro-batch; take P P (sums of its own, reduced once a step) or S S (its shard)"
            )
        if self.grad.is_partial and self.grad.tier is Tier.DISK:
            raise ValueError(
                f"grad={self.grad} on disk: a partial sum changes at every micro-batch and cannot"
                " rest on disk"
            )
        for axis in ("node", "local"):
            weight, between = getattr(self.weight, axis), getattr(self.between, axis)
            grad, optim = getattr(self.grad, axis), getattr(self.optim, axis)
            if grad is Placement.SHARD and optim is not Placement.SHARD:
                raise ValueError(
                    f"optim={self.optim} is sharded less finely than grad={self.grad} on the {axis}"
                    " axis, which it reads"
                )
            if weight is Placement.SHARD and optim is not Placement.SHARD:
                raise ValueError(
                    f"optim={self.optim} is sharded less finely than weight={self.weight} on the"
                    f" {axis} axis, which it writes"
                )
            if weight is Placement.REPLICATE and between is Placement.SHARD:
                raise ValueError(
                    f"between={self.between} is sharded more finely than weight={self.weight} on"
                    f" the {axis} axis"
                )
        for name, cell in vars(self).items():
            if cell.axes == (Placement.SHARD, Placement.REPLICATE):
                raise ValueError(
                    f"{name}={cell}: sharded between nodes but not inside them, where the links are"
                    " fast"
                )
        is_column = self.weight.scope is Scope.NODE_SHARD and self.optim.scope is Scope.SHARD
        if is_column and self.weight.tier is not Tier.DEVICE:
            raise ValueError(
                f"weight={self.weight} on {self.weight.tier.value} with optim={self.optim}: what"
                " other nodes have stepped would have to be written there after every step; take"
                " mics, or zero3"
            )


# --------------------------------------------------------------------- a rank's part of a parameter
# Tensor parallelism or experts cut a parameter: the part of a rank is a box of the whole parameter,
# all of a plain parameter, the local tensor of a DTensor. Layout, shards and optimizer know the box
# alone, flattened row by row; checkpoints and ``full_state_dict`` know where it lies in the whole::
#
#     weight [8, 6], Shard(0) over two ranks      Shard(1) over two ranks
#     rank 0  start (0, 0)  sizes (4, 6)          start (0, 0)  sizes (8, 3)
#     rank 1  start (4, 0)  sizes (4, 6)          start (0, 3)  sizes (8, 3)


@dataclass(frozen=True)
class Part:
    """A rank's box of one parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    start: tuple[int, ...]  # where the box begins, a number per dimension
    sizes: tuple[int, ...]  # of the box
    axes: frozenset[str] = frozenset()  # the axes of the mesh along which other ranks have others

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Part:
        """Return all of a parameter of `shape`."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.sizes)

    def counts(self, alike: Iterable[str], first_along: Container[str]) -> bool:
        """Whether its elements count on a rank that is the first along the axes `first_along`: of
        the ranks with the same part the first counts. `alike`: the axes along which what is not cut
        is the same.
        """
        return all(axis in self.axes or axis in first_along for axis in alike)
