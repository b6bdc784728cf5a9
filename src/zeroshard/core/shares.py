"""Unequal shares: how many elements of each segment every rank owns, dealt out in whole blocks.

Shares are exact fractions of one, one per rank. A segment is cut into blocks of `align` elements,
and blocks go to the ranks so that after every segment each rank has been dealt its share of all
blocks so far, rounded down or up::

    shares 0.5 0.3 0.2     segment 1: 3 blocks     2: 3 blocks     3: 4 blocks
    dealt so far           2 1 0                   3 2 1           5 3 2
    its share of all       1.5 .9 .6               3 1.8 1.2       5 3 2

That is the chairman assignment problem (Tijdeman, Discrete Math. 32, 1980; apportionment with
quota, Balinski and Young, 1975). Every block of a rank has a deadline, the count of blocks by which
its share rounded down includes it. A segment first hands out the blocks that are due, and then the
others to the ranks in the order of their next deadlines. No set of blocks that respects the shares
rounded up serves more of the deadlines to come, so that none is ever missed.

Invariants (tests/unit/core/test_shares.py): dealt blocks sum to the segment's; over any run of
segments from the first, every rank is less than one block from its share; a share of 0 gets
nothing; equal shares are ``layout.equal_shares``, padded as ever. Deterministic, in exact
arithmetic: the same on every rank. Cost: O(ranks) per segment, no table of blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from zeroshard.core.layout import ALIGN, Layout, Piece, Range, Slot, round_up
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError

# ------------------------------------------------------------------------------------- batch shares
# Batches cut by shares: how many samples of a global batch each rank takes, and what its loss
# counts.
#
#     split_batch(10, [0.25, 0.25, 0.5])    [3, 2, 5]: 2.5, 2.5 and 5 rounded down, and the samples
#                                           left over by largest remainder, lower ranks first
#
# Pure arithmetic, in fractions: the same on every rank.


_TOLERANCE = 1e-6


def check_batch_shares(shares: Sequence[float]) -> None:
    """Raise ConfigError for `shares` that are not numbers >= 0 with the sum 1."""
    shown = ", ".join(f"{share:g}" for share in shares)
    if not shares or not all(0.0 <= share < math.inf for share in shares):
        raise ConfigError(f"batch_shares [{shown}] must be one number >= 0 per data parallel rank")
    if abs(math.fsum(shares) - 1.0) > _TOLERANCE:
        raise ConfigError(
            f"batch_shares [{shown}] add up to {math.fsum(shares):g}, not to 1: divide each by that"
        )


def unequal(shares: Sequence[float]) -> tuple[float, ...]:
    """Return `shares` with the sum 1, empty where all are the same."""
    if len(set(shares)) <= 1:
        return ()
    total = math.fsum(shares)
    return tuple(share / total for share in shares)


def split_batch(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Return how many of `batch_size` samples each rank takes, which may be none: its share of
    them, rounded so that all add up to `batch_size` (largest remainder).

    Raises ConfigError for shares that are not numbers >= 0 with the sum 1.
    """
    check_batch_shares(shares)
    total = sum(map(Fraction, shares))
    exact = [batch_size * Fraction(share) / total for share in shares]
    sizes = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in by_remainder[: batch_size - sum(sizes)]:
        sizes[rank] += 1
    return sizes


# ------------------------------------------------------------------------------------------- shares

Shares = tuple[Fraction, ...]  # of one, one per rank; they sum to 1
Ownership = Literal["whole", "whole_by_cost"]  # in their place, as users name it


BLOCKS = 4096  # elements: whole blocks of optimizers of 8 bits, which leave fewer in 32 bits


def has_blocks(numel: int) -> bool:
    """Whether a parameter of so many elements may be cut between blocks: it ends where one does."""
    return numel > BLOCKS and not numel % BLOCKS


# What ranks own together, one after another in a segment: the shape in which it is stepped, and the
# multiple of elements on which it may be cut after all, 0: nowhere.
Grain = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class WholeParameters:
    """In the place of shares: ranks own parameters whole, but for those with a name in `cut`, which
    may be cut where that evens the ranks, and in `blocks`, on multiples of `BLOCKS` elements. Ranks
    get as many elements, or as much of the products with which Muon orthogonalizes `matrices`.

    `parts`: parameters that are stepped as several of fewer rows, by name. A part of one row has no
    first dimension where there are two more: it is an expert's matrix.
    """

    cut: frozenset[str] = frozenset()
    matrices: frozenset[str] = frozenset()
    blocks: frozenset[str] = frozenset()
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @cached_property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """The rows of each of the `parts`, by name."""
        return dict(self.parts)

    def shapes(self, name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes in which a parameter is stepped, one after another."""
        all_rows, is_stack = self.rows.get(name, ()), len(shape) > 2
        parts = [shape[1:] if rows == 1 and is_stack else (rows, *shape[1:]) for rows in all_rows]
        return parts or [shape]

    def grains(self, name: str, shape: tuple[int, ...], align: int) -> list[Grain]:
        """Return the grains of a parameter, one where its parts begin off multiples of `align`."""
        if name in self.cut or name in self.blocks:
            return [(shape, align if name in self.cut else math.lcm(align, BLOCKS))]
        parts = self.shapes(name, shape)
        is_aligned = all(math.prod(part) % align == 0 for part in parts[:-1])
        return [(part, 0) for part in (parts if is_aligned else [shape])]

    def stepped(self, piece: Piece, slot: Slot) -> list[tuple[Piece, tuple[int, ...]]]:
        """Return what a rank that owns a `piece` of a parameter steps one by one, and in which
        shapes.
        """
        if slot.name in self.cut or slot.name in self.blocks:
            return [(piece, (piece.numel,))]
        shapes = self.shapes(slot.name, slot.shape)
        out, ends = list[tuple[Piece, tuple[int, ...]]](), accumulate(map(math.prod, shapes))
        for shape, stop in zip(shapes, ends, strict=True):
            start = stop - math.prod(shape)
            if piece.start <= start < piece.stop:
                place = piece.shard_start + start - piece.start
                out.append((replace(piece, start=start, stop=stop, shard_start=place), shape))
        return out

    def weight(self, segments: Iterable[Sequence[tuple[str, tuple[int, ...]]]]) -> Fraction:
        """Return how many elements a multiplication of the products of `matrices` counts: as many
        in all as these matrices have.
        """
        shapes = [
            shape
            for segment in segments
            for name, whole in segment
            if name in self.matrices
            for shape in self.shapes(name, whole)
        ]
        return Fraction(sum(map(math.prod, shapes)), sum(map(newton_schulz, shapes)) or 1)

    def uncut(self, span: Range, layout: Layout) -> list[Range]:
        """Return the ranges of `span` of a buffer, from its start on, that hold a grain each which
        is not cut off the device: blocks neither.
        """
        (low, high), out = span, list[Range]()
        for slot in layout.slots:
            start = slot.offset
            grains = self.grains(slot.name, slot.shape, layout.align)
            for shape, _ in () if slot.name in self.cut else grains:
                stop = round_up(start + math.prod(shape), layout.align)
                if max(start, low) < min(stop, high):
                    out.append((max(start, low) - low, min(stop, high) - low))
                start = stop
        return out

    def nearest(self, split: int, span: Range, layout: Layout) -> int:
        """Return the place nearest to `split` at which the first elements of `span` may end, so
        that each parameter rests whole on one tier.
        """
        for start, stop in self.uncut(span, layout):
            if start < split < stop:
                return start if split - start <= stop - split else stop
        return split


_SMALLEST = 10**9  # parts of one that numbers are rounded to: 0.1 is a tenth
_SLACK = 1e-6  # of the sum of numbers that are written with a few digits


def check_shares(shares: Any) -> Any:
    """Return `Config.shares` as they were given, before the ranks are known: numbers, "memory",
    "auto", or None. Raises ValueError naming the first thing that is wrong.
    """
    if shares is None or shares in ("memory", "auto"):
        return shares
    if isinstance(shares, str) or not isinstance(shares, (list, tuple)):
        raise ValueError(
            f"shares={shares!r} is not a list of a number per data parallel rank, 'memory' or"
            " 'auto'"
        )
    for rank, share in enumerate(shares):
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise ValueError(f"shares[{rank}]={share!r} is not a number")
        if not math.isfinite(share) or share < 0:
            raise ValueError(f"shares[{rank}]={share} is not a share: give 0 or more")
    total = math.fsum(shares)
    if not shares or abs(total - 1) > _SLACK:
        raise ValueError(
            f"shares={list(shares)} sum to {total:.7g}: the shares of all ranks must sum to 1"
        )
    return tuple(map(float, shares))


def shares_of(numbers: Sequence[float]) -> Shares | None:
    """Return `numbers` (at least 0, not all of them 0; any sum) as shares; None where all are
    equal.
    """
    parts = [Fraction(number).limit_denominator(_SMALLEST) for number in numbers]
    total = sum(parts)
    assert total > 0 and min(parts) >= 0, numbers
    return None if len(set(parts)) == 1 else tuple(part / total for part in parts)


def deal(shares: Shares, dealt: Sequence[int], num_blocks: int) -> tuple[int, ...]:
    """Return how many blocks of the next segment, of `num_blocks`, each rank gets; `dealt`: of all
    segments before.
    """
    total = sum(dealt) + num_blocks
    quotas = [share * total for share in shares]
    goal = [max(have, quota.__floor__()) for have, quota in zip(dealt, quotas, strict=True)]
    open_to = [
        rank for rank, quota in enumerate(quotas) if shares[rank] and goal[rank] < quota.__ceil__()
    ]
    # the block by which the next one of a rank is due
    due = {rank: ((goal[rank] + 1) / shares[rank]).__ceil__() for rank in open_to}
    left = total - sum(goal)
    assert 0 <= left <= len(open_to), (shares, dealt, num_blocks)
    for rank in sorted(open_to, key=lambda rank: (due[rank], rank))[:left]:
        goal[rank] += 1
    return tuple(after - before for after, before in zip(goal, dealt, strict=True))


def newton_schulz(shape: Sequence[int]) -> int:
    """Return the multiplications of an iteration of Newton and Schulz on a matrix: of it by two
    squares of its smaller side, and of these by each other (Jordan et al., Muon, 2024).
    """
    side = min(shape)
    return side * (2 * math.prod(shape) + side**2)


def whole_shares(
    segments: Sequence[Sequence[tuple[int, int]]],
    order: Sequence[int],
    *,
    weights: Sequence[Sequence[int]] | None = None,
) -> list[tuple[int, ...]]:
    """Return how much of each of `segments` every rank gets where ranks own parameters whole.

    A segment is given by its parameters (or grains), in order: the size, and the multiple on which
    it may be cut after all, 0: nowhere. `order`: of the ranks' ranges in a segment. Every
    rank gets neighbours of a segment, perhaps none, so that all ranks have much the same of the
    `weights` in the end (default: the sizes, which are also the weights of what may be cut): the
    segments with the heaviest whole parameters are dealt out first (longest processing time, Graham
    1969), and a segment is poured over the ranks that have least, up to one level. A whole
    parameter goes to the rank with the part of it that its middle lies in.
    """
    loads, shares = [0] * len(order), [tuple[int, ...]()] * len(segments)
    weighed = weights or [[size for size, _ in segment] for segment in segments]

    def first(at: int) -> tuple[int, int]:
        pairs = zip(weighed[at], segments[at], strict=True)
        return -max((weight for weight, (_, multiple) in pairs if not multiple), default=0), at

    for at in sorted(range(len(segments)), key=first):
        places = [0, *accumulate(size for size, _ in segments[at])]
        starts = [0, *accumulate(weighed[at])]
        whole = starts[-1]
        filled, sums = sorted(loads), [0, *accumulate(sorted(loads))]
        # the most ranks that are all filled to one level by it
        num = max(n for n in range(1, len(order) + 1) if filled[n - 1] * n - sums[n] <= whole)
        level = -(-(whole + sums[num]) // num)
        dues = list(accumulate(max(level - loads[rank], 0) for rank in order))
        got, begin, before = [0] * len(order), 0, 0
        for rank, due in zip(order, dues, strict=True):
            end = due * whole // dues[-1] if whole else 0
            index, inside = bisect_right(starts, end) - 1, 0
            if end < whole and (multiple := segments[at][index][1]):
                inside = (end - starts[index]) // multiple * multiple
            elif end < whole:
                start, stop = starts[index : index + 2]
                index += 2 * due * whole > (start + stop) * dues[-1]
            place, end = places[index] + inside, starts[index] + inside
            loads[rank] += end - before
            got[rank], begin, before = place - begin, place, end
        shares[at] = tuple(got)
    return shares


def whole_tiles(split: int, numel: int, tile_numel: int, uncut: Sequence[Range]) -> list[Range]:
    """Return [split, numel) in ranges of at most `tile_numel` elements, none of which ends inside
    one of `uncut`: larger ones, where these are larger.
    """
    out, start = list[Range](), split
    while start < numel:
        stop = min(start + tile_numel, numel)
        for low, high in uncut:
            if low < stop < high:
                stop = low if low > start else high
                break
        out.append((start, stop))
        start = stop
    return out


@dataclass
class Dealer:
    """Lays out the segments of a model, one after another, over ranks with `shares`, None: equal
    ones. Segments of one kind (dtype, trained or not) share a count, so that the bytes of every
    state follow the shares. Ranks that own parameters whole get `cuts`: experts with a mesh of
    their own are dealt out among its ranks, by themselves.
    """

    shares: Shares | None = None
    # elements, by kind and mesh, last one first
    cuts: dict[tuple[Hashable, Mesh], list[tuple[int, ...]]] | None = None
    _dealt: dict[Hashable, list[int]] = field(default_factory=dict)  # blocks, by kind

    @classmethod
    def of(
        cls,
        shares: Shares | WholeParameters | None,
        segments: Iterable[tuple[Hashable, Mesh, Sequence[tuple[str, tuple[int, ...]]]]],
        *,
        align: int = ALIGN,
        order: Sequence[int] = (),
    ) -> Dealer:
        """Return the dealer of `segments`, all of them, by kind, in order. A rank that owns whole
        parameters gets as much as the one of its place in `order` would (default: itself).
        """
        if not isinstance(shares, WholeParameters):
            return cls(shares)
        by_kind: dict[tuple[Hashable, Mesh], list[Sequence[tuple[str, tuple[int, ...]]]]] = {}
        for kind, mesh, named_shapes in segments:
            by_kind.setdefault((kind, mesh), []).append(named_shapes)
        cuts: dict[tuple[Hashable, Mesh], list[tuple[int, ...]]] = {}
        for (kind, mesh), every in by_kind.items():
            named = [
                [
                    (name, *grain)
                    for name, shape in segment
                    for grain in shares.grains(name, shape, align)
                ]
                for segment in every
            ]
            sizes = [
                [(round_up(math.prod(shape), align), at) for _, shape, at in one] for one in named
            ]
            each = shares.weight(every)
            weights = [
                [
                    max(int(newton_schulz(shape) * each), 1) if name in shares.matrices else size
                    for (name, shape, _), (size, _) in zip(*pair, strict=True)
                ]
                for pair in zip(named, sizes, strict=True)
            ]
            dealt = whole_shares(sizes, mesh.column_order, weights=weights)
            cuts[kind, mesh] = [
                tuple(one[rank] for rank in order or range(mesh.size)) for one in reversed(dealt)
            ]
        return cls(None, cuts)

    def layout(
        self,
        named_shapes: Sequence[tuple[str, tuple[int, ...]]],
        mesh: Mesh,
        *,
        kind: Hashable,
        align: int = ALIGN,
    ) -> Layout:
        """Return the layout of the next segment, which is of `kind`."""
        if self.cuts is not None:
            return Layout.build(named_shapes, mesh, align=align, shares=self.cuts[kind, mesh].pop())
        if self.shares is None:
            return Layout.build(named_shapes, mesh, align=align)
        dealt = self._dealt.setdefault(kind, [0] * mesh.size)
        num_blocks = Layout.num_blocks(named_shapes, align)
        blocks = deal(self.shares, dealt, num_blocks)
        self._dealt[kind] = [have + more for have, more in zip(dealt, blocks, strict=True)]
        return Layout.build(named_shapes, mesh, align=align, shares=[one * align for one in blocks])
