"""Elements that two parts of a parameter (core/placement.py) share, and moves between two layouts
of the same elements: pure arithmetic.

A rank's shard is a range of its flattened part, a box, and so no box itself. But it consists of at
most ``2 * dims - 1`` boxes (the rest of a row, whole rows, the begin of a row), and two boxes meet
in a box. So `common` says in a few strided copies where two ranges of two parts have the same
elements, whatever the sizes::

    elements 4 to 15 of a part [4, 6]      ....XX      3 boxes
                                           XXXXXX
                                           XXX...
                                           ......

Invariant: the copies hold every element that both have, and none twice. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from zeroshard.core.layout import Range
from zeroshard.core.placement import Part

Box = tuple[tuple[int, int], ...]  # [start, stop) in each dimension


def box_of(part: Part) -> Box:
    """Return the box of `part`; () where it is all of the parameter."""
    ends = zip(part.start, part.sizes, strict=True)
    return () if part.is_whole else tuple((start, start + size) for start, size in ends)


def part_at(shape: tuple[int, ...], box: Box) -> Part:
    """Return the part of a parameter of `shape` that `box` is; () is all of it."""
    if not box:
        return Part.whole(shape)
    return Part(shape, tuple(start for start, _ in box), tuple(stop - start for start, stop in box))


def check_boxes(shape: tuple[int, ...], boxes: Set[Box], what: str) -> None:
    """Raise ValueError, saying `what` they are, for boxes that are not all of `shape`, once.

    They are a grid, as placements along axes of a mesh cut a tensor: each dimension is cut in
    ranges, and every combination of these is there. So it takes no comparison of each with each.
    """
    if boxes <= {()}:
        return
    cuts: list[set[tuple[int, int]]] = [set() for _ in shape]
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError(f"{what}: one of {len(box)} dimensions, in {list(shape)}")
        for ranges, ends in zip(cuts, box, strict=True):
            ranges.add(ends)
    for dim, (ranges, size) in enumerate(zip(cuts, shape, strict=True)):
        end = 0
        for start, stop in sorted(ranges):
            if start != end or stop > size:
                fault = "overlap" if start < end else "leave a hole" if start > end else "go beyond"
                raise ValueError(f"{what} {fault} at {start}:{stop} of dimension {dim} of {size}")
            end = stop
        if end != size:
            raise ValueError(f"{what} leave a hole at {end}:{size} of dimension {dim}")
    if len(boxes) != prod(len(ranges) for ranges in cuts):
        raise ValueError(f"{what} leave a hole: there are {len(boxes)} of a grid of"
                         f" {' x '.join(str(len(ranges)) for ranges in cuts)}")  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a part, in the order in which memory of `stride` holds them."""

    part: Part
    stride: tuple[int, ...]  # dense: of a tensor of the part's sizes
    start: int
    stop: int

    @classmethod
    def of_all(cls, part: Part, stride: tuple[int, ...]) -> Span:
        """Return all elements of `part`."""
        return cls(part, stride, 0, part.numel)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return self.stop - self.start

    @property
    def bounds(self) -> Box:
        """The box of its part."""
        ends = zip(self.part.start, self.part.sizes, strict=True)
        return tuple((start, start + size) for start, size in ends)

    @property
    def order(self) -> list[int]:
        """The strides that count: of dimensions of more than one element."""
        return [step for step, size in zip(self.stride, self.part.sizes, strict=True) if size != 1]

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the whole parameter that it consists of."""
        # the dimension with the elements that lie farthest apart comes first
        places = zip(self.stride, self.part.sizes, range(len(self.stride)), strict=True)
        order = [dim for _, _, dim in sorted(places, key=lambda at: (-at[0], -at[1], at[2]))]
        inside = [self.part.sizes[dim] for dim in order]
        for box in boxes_of(inside, self.start, self.stop):
            by_dim = dict(zip(order, box, strict=True))
            yield tuple(
                (by_dim[dim][0] + first, by_dim[dim][1] + first)
                for dim, first in enumerate(self.part.start)
            )

    def offset(self, box: Box) -> int:
        """Return where the first element of `box` is, counted from `start`."""
        steps = zip(box, self.part.start, self.stride, strict=True)
        return sum((first - begin) * step for (first, _), begin, step in steps) - self.start


@dataclass(frozen=True)
class Shared:
    """Elements that two spans have in common: a strided tensor in the memory of either."""

    sizes: tuple[int, ...]
    wanted: int  # where it begins in the first span
    wanted_stride: tuple[int, ...]
    stored: int  # where it begins in the second
    stored_stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether the elements lie one after another in both spans."""
        return self.wanted_stride == self.stored_stride == (1,)

    def touches(self, run: Shared) -> bool:
        """Whether this run ends in both spans where `run` begins."""
        here, there = self.wanted + self.numel, self.stored + self.numel
        return (here, there) == (run.wanted, run.stored)

    @property
    def stored_stop(self) -> int:
        """The place after its last element in the second span."""
        steps = zip(self.sizes, self.stored_stride, strict=True)
        return self.stored + sum((size - 1) * step for size, step in steps) + 1


def boxes_of(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements [start, stop) of a box of `sizes`, row by row, consist of, in
    their order: at most ``2 * len(sizes) - 1``.
    """
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    inner = prod(sizes[1:])
    row, last = start // inner, (stop - 1) // inner
    if row == last:
        for box in boxes_of(sizes[1:], start - row * inner, stop - row * inner):
            yield ((row, row + 1), *box)
        return
    whole = tuple((0, size) for size in sizes[1:])
    if start > row * inner:  # the rest of a row
        for box in boxes_of(sizes[1:], start - row * inner, inner):
            yield ((row, row + 1), *box)
        row += 1
    after = stop // inner
    if row < after:
        yield ((row, after), *whole)
    if after * inner < stop:
        for box in boxes_of(sizes[1:], 0, stop - after * inner):
            yield ((after, after + 1), *box)


def common(wanted: Span, stored: Span) -> list[Shared]:
    """Return which elements of `wanted` are where in `stored`: no element twice, and neighbours in
    both as one run.
    """
    if _meet(wanted.bounds, stored.bounds) is None:
        return []
    if wanted.bounds == stored.bounds and wanted.order == stored.order:  # of one part
        start, stop = max(wanted.start, stored.start), min(wanted.stop, stored.stop)
        run = Shared((stop - start,), start - wanted.start, (1,), start - stored.start, (1,))
        return [run] if start < stop else []
    theirs = list(stored.boxes())
    out: list[Shared] = []
    for mine in wanted.boxes():
        for other in theirs:
            box = _meet(mine, other)
            if box is None:
                continue
            found = _flattened(wanted, stored, box)
            if out and out[-1].is_run and found.is_run and out[-1].touches(found):
                before = out.pop()
                found = replace(before, sizes=(before.numel + found.numel,))
            out.append(found)
    return out


def _meet(one: Box, other: Box) -> Box | None:
    """Return the box that both hold, None where there is none."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def _flattened(wanted: Span, stored: Span, box: Box) -> Shared:
    """Return the elements of `box`, with dimensions that are one run in both spans as one."""
    rows: list[tuple[int, int, int]] = []  # size, stride in either; the farthest apart first
    dims = zip(box, wanted.stride, stored.stride, strict=True)
    counted = [(stop - start, a, b) for (start, stop), a, b in dims if stop - start > 1]
    for size, a, b in sorted(counted, key=lambda row: -row[1]):
        if rows and rows[-1][1] == size * a and rows[-1][2] == size * b:
            size *= rows.pop()[0]
        rows.append((size, a, b))
    sizes, first, second = zip(*(rows or [(1, 1, 1)]), strict=True)
    return Shared(sizes, wanted.offset(box), first, stored.offset(box), second)


def dense_stride(like: Sequence[int], sizes: Sequence[int], of: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a dense tensor of the sizes `of`; its dimensions lie in memory as in a
    tensor of `sizes` with the stride `like`. Dimensions of one element have no place: row order
    holds where it fits.
    """
    dims = range(len(sizes))
    counted = [dim for dim in dims if sizes[dim] != 1]
    if all(like[a] >= like[b] for a, b in pairwise(counted)):
        order = list(dims)
    else:
        order = sorted(dims, key=lambda dim: (-like[dim], dim))
    stride, step = [0] * len(sizes), 1
    for dim in reversed(order):
        stride[dim], step = step, step * of[dim]
    return tuple(stride)


# ------------------------------------------------------------------------ moves between two layouts
#     held     rank 0 |---------------|  rank 1 |---------------|            each element once
#     wanted   rank 0 |---------|  rank 1 |---------|  rank 2 |----------|   or more than once
#     sent              0 -> 0, 0 -> 1        1 -> 1, 1 -> 2
#
# Invariant: every element that one rank holds comes to each rank that wants it, once; both ends
# name their sends in the same order. Cost: the ranks, once. comm/groups.py moves the bytes.


@dataclass(frozen=True)
class Send:
    """Elements [start, stop), which rank `source` holds and rank `target` wants."""

    source: int
    target: int
    start: int
    stop: int


def overlap(first: Range, second: Range) -> Range | None:
    """Return the elements that both ranges hold, None where there are none."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def sends(rank: int, held: Sequence[Range], wanted: Sequence[Range]) -> list[Send]:
    """Return what `rank` sends and is sent, other ranks in order; `held` and `wanted` by rank."""
    out = []
    for other in range(len(held)):
        for source, target in dict.fromkeys([(rank, other), (other, rank)]):
            common = overlap(held[source], wanted[target])
            if common is not None:
                out.append(Send(source, target, *common))
    return out
