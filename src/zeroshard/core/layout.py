"""The place of each parameter of a segment in its flat buffer, and the range that each rank owns.

A segment's parameters lie one after another in one buffer, each starting on a multiple of ``align``
elements; the end is padded so that every share is a multiple of ``align`` too (ZeRO, section 5.2:
equal partitions; here any contiguous aligned shares, core/shares.py)::

      slot 0         slot 1      slot 2                 align = 4
    | a a a a | a a . . | b b b . | c c c c | c . . . | . . . . |
    |<------ rank 0 ------->|<------ rank 1 ------->|<- rank 2 ->|

On a mesh of several nodes shares lie in another order of ranks, column by column
(docs/design/routes.md), so that a rank's SHARD, NODE_SHARD and FULL are nested ranges.

Invariants, checked on construction: slots are aligned, ordered and disjoint; shares are aligned,
contiguous, cover the buffer, and may be empty. Cost: at most ``align * (num parameters + num
ranks)`` elements of padding.

[Note: align] Vectorised kernels treat the last ``numel % vector`` elements of a tensor by another
instruction sequence, which may round differently. With every cut inside a parameter on a multiple
of 64 of its elements, those last elements are the same ones whether the parameter is stepped whole
or in pieces, and so are the bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from zeroshard.core.placement import Cell, Mesh, Portion, Scope

ALIGN = 64

Range = tuple[int, int]  # [start, stop) in elements of the flat buffer


def end_of(ranges: Sequence[Range]) -> int:
    """Return the elements of the buffer that `ranges`, in any order, cover."""
    end: int = max(map(itemgetter(1), ranges))  # in C: every reduce asks, of thousands of ranks
    return end


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def equal_shares(numel: int, num_shards: int, align: int = ALIGN) -> tuple[int, ...]:
    """Cut `numel` elements into `num_shards` equal aligned shares, padded at the end."""
    share = round_up(math.ceil(numel / num_shards), align)
    return (share,) * num_shards


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer: elements ``[offset, offset + numel)``."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """The element of the buffer after the last one."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns.

    ``[start, stop)`` counts elements of the flattened parameter; ``shard_start`` is where it begins
    in the rank's shard.
    """

    name: str
    index: int  # of the slot in the layout
    start: int
    stop: int
    shard_start: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def shard_stop(self) -> int:
        """The element of the shard after the last one."""
        return self.shard_start + self.numel


@dataclass(frozen=True)
class Layout:
    """The flat buffer of one segment: its slots and its shares.

    Raises AssertionError when an invariant of the module docstring does not hold.
    """

    slots: tuple[Slot, ...]
    shares: tuple[int, ...]  # elements per rank
    mesh: Mesh
    align: int = ALIGN

    @classmethod
    def build(
        cls,
        named_shapes: Sequence[tuple[str, tuple[int, ...]]],
        mesh: Mesh,
        *,
        align: int = ALIGN,
        shares: Sequence[int] | None = None,
    ) -> Layout:
        """Lay `named_shapes` out in order over the ranks of `mesh`; `shares` are elements per rank
        (default: equal).
        """
        slots, offset = _laid_out(named_shapes, align)
        cut = equal_shares(offset, mesh.size, align) if shares is None else tuple(shares)
        return cls(slots, cut, mesh, align)

    @staticmethod
    def num_blocks(named_shapes: Sequence[tuple[str, tuple[int, ...]]], align: int = ALIGN) -> int:
        """Return how many blocks of `align` elements `named_shapes` take."""
        return _laid_out(named_shapes, align)[1] // align

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            assert slot.offset % self.align == 0, (slot, self.align)
            assert slot.offset >= end, (slot, end)
            end = slot.stop
        aligned = all(share >= 0 and share % self.align == 0 for share in self.shares)
        assert aligned, (self.shares, self.align)
        assert self.numel >= end, (self.numel, end)
        assert self.mesh.size == self.num_shards, (self.mesh, self.num_shards)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return sum(self.shares)

    @property
    def num_shards(self) -> int:
        """The number of shards, one per rank."""
        return len(self.shares)

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """The range of the buffer that each rank owns."""
        out, start = {}, 0
        for rank in self.mesh.column_order:
            out[rank] = (start, start + self.shares[rank])
            start += self.shares[rank]
        return tuple(out[rank] for rank in range(self.num_shards))

    def scope(self, cell: Cell) -> Scope:
        """Return the scope of `cell`; on one node NODE_SHARD is SHARD."""
        one_node = self.mesh.num_nodes == 1
        return Scope.SHARD if cell.scope is Scope.NODE_SHARD and one_node else cell.scope

    def members(self, rank: int, scope: Scope) -> tuple[int, ...]:
        """Return the ranks that hold `rank`'s `scope` together, in buffer order."""
        if scope is Scope.SHARD:
            return (rank,)
        return self.mesh.column(rank) if scope is Scope.NODE_SHARD else self.mesh.column_order

    def span(self, rank: int, scope: Scope) -> Range:
        """Return the range of the buffer that `rank` holds in `scope`."""
        members = self.members(rank, scope)
        return self.ranges[members[0]][0], self.ranges[members[-1]][1]

    def held(self, rank: int, cell: Cell) -> int:
        """Return the elements of a state in `cell` that `rank` holds, padding included."""
        start, stop = self.span(rank, self.scope(cell))
        return stop - start

    @cached_property
    def gaps(self) -> tuple[Range, ...]:
        """The ranges of the buffer between and after the parameters."""
        ends = (0, *(slot.stop for slot in self.slots))
        starts = (*(slot.offset for slot in self.slots), self.numel)
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    @cached_property
    def padding(self) -> int:
        """Elements of the buffer that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the non-empty parameter pieces in `rank`'s share, in order."""
        return self.pieces_in(self.ranges[rank])

    def pieces_in(self, span: Range) -> tuple[Piece, ...]:
        """Return the parameter pieces in `span`; ``shard_start`` counts from its start."""
        low, high = span
        out = []
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.offset, low), min(slot.stop, high)
            if start < stop:
                inside = (start - slot.offset, stop - slot.offset)
                out.append(Piece(slot.name, index, *inside, start - low))
        return tuple(out)

    def portion(self, rank: int) -> Portion:
        """Return the elements that `rank`, its column and its node own."""
        start, stop = self.span(rank, Scope.NODE_SHARD)
        node = sum(self.shares[other] for other in self.mesh.node(rank))
        return Portion(self.shares[rank], stop - start, node, self.numel)

    def replicated(self) -> Layout:
        """Return the same slots with one share, as one rank that owns everything sees them."""
        return Layout(self.slots, (self.numel,), Mesh(1, 1), self.align)


def _laid_out(
    named_shapes: Sequence[tuple[str, tuple[int, ...]]], align: int
) -> tuple[tuple[Slot, ...], int]:
    """Return `named_shapes` one after another, and where the next one would begin."""
    slots, offset = [], 0
    for name, shape in named_shapes:
        slot = Slot(name, tuple(shape), offset)
        slots.append(slot)
        offset = round_up(slot.stop, align)
    return tuple(slots), offset
