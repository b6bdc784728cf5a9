"""The tree of additions that a step's gradient is: fixed by the leaves, not by the ranks.

A step's batch is V numbered micro-batches, the *leaves*. Their gradients are added in a binary
tree over the leaf numbers, so that the sum does not depend on who computes a leaf::

    8          ((0+1) + (2+3)) + ((4+5) + (6+7))
    6          ((0+1) + (2+3)) + (4+5)              split at the largest power of two below the size
    "3x2"      ((0+1) + (2+3)) + (4+5)              declared: three nodes of two, added in order
    "2x3"      ((0+1) + 2) + ((3+4) + 5)

What arrives in leaf order is added to a binary counter: partial sums of complete subtrees.
`Tree.cover` says which subtrees make up a range, and `Tree.merges` which two are added next. A
range of leaves that is one node of the tree is one partial sum, whoever computes it.

Everything here is pure. Cost: O(depth) per question, remembered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeAlias

from zeroshard.core.layout import Range
from zeroshard.core.placement import Mesh

# a position, or the sum of two, the left one first
Expression: TypeAlias = "int | tuple[Expression, Expression]"
Formed = tuple[tuple[Range, ...], tuple[Expression, ...]]


@dataclass(frozen=True)
class Tree:
    """The tree over leaves 0 to `leaves` - 1; `radix`: the sizes of its levels, from the root
    (empty: binary).
    """

    leaves: int
    radix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.leaves < 1 or (self.radix and math.prod(self.radix) != self.leaves):
            raise ValueError(f"no tree of {self.leaves} leaves and levels {self.radix}")

    @classmethod
    def parse(cls, declared: int | str) -> Tree:
        """Return the tree that `declared` stands for: 16, "16" or "3x2x2". Raises ValueError."""
        try:
            sizes = [int(size) for size in str(declared).lower().split("x")]
        except ValueError:
            sizes = []
        if isinstance(declared, bool) or not sizes or min(sizes) < 1:
            raise ValueError(f"a number of leaves or levels such as '3x2x2', not {declared!r}")
        return cls(math.prod(sizes), tuple(sizes) if len(sizes) > 1 else ())

    def __str__(self) -> str:
        return "x".join(map(str, self.radix or (self.leaves,)))

    def cover(self, start: int, stop: int) -> tuple[Range, ...]:
        """Return the largest nodes of the tree that make up leaves `start` to `stop`, in order."""
        return _cover(self, 0, self.leaves, start, stop)

    def is_node(self, start: int, stop: int) -> bool:
        """Whether the sum of leaves `start` to `stop` is a node of the tree."""
        return len(self.cover(start, stop)) == 1

    def merges(self, left: Range, right: Range) -> bool:
        """Whether the tree adds the nodes `left` and `right`, in this order, to one."""
        return left[1] == right[0] and self.is_node(left[0], right[1])

    def expression(self, start: int, stop: int) -> Expression:
        """Return how leaves `start` to `stop`, one node, are added, counted from `start`."""
        assert self.is_node(start, stop), (self, start, stop)
        return _expression(self, start, stop, start)

    def over(self, spans: Sequence[Range]) -> Expression:
        """Return how the sums of `spans`, nodes that make up all leaves, are added; positions are
        those in `spans`.
        """
        places = {span: place for place, span in enumerate(spans)}

        def node(low: int, high: int) -> Expression:
            if (low, high) in places:
                return places[low, high]
            middle = self.split(low, high)
            return node(low, middle), node(middle, high)

        return node(0, self.leaves)

    def split(self, start: int, stop: int) -> int:
        """Return where node [start, stop) of two or more leaves is cut in two."""
        size = stop - start
        if not self.radix:
            return start + (1 << (size - 1).bit_length() - 1)
        child = self.leaves
        for number in self.radix:
            child //= number
            if child < size:
                break
        return stop - child

    @property
    def most_partials(self) -> int:
        """The most partial sums that a binary counter holds beside the one that arrives."""
        return max(len(self.cover(0, stop)) for stop in range(1, self.leaves + 1))


@lru_cache(maxsize=1 << 14)
def _cover(tree: Tree, low: int, high: int, start: int, stop: int) -> tuple[Range, ...]:
    """Return the largest nodes inside node [low, high) that lie in [start, stop)."""
    if start >= high or stop <= low:
        return ()
    if start <= low and high <= stop:
        return ((low, high),)
    middle = tree.split(low, high)
    return _cover(tree, low, middle, start, stop) + _cover(tree, middle, high, start, stop)


@lru_cache(maxsize=1 << 12)
def _expression(tree: Tree, low: int, high: int, base: int) -> Expression:
    if high - low == 1:
        return low - base
    middle = tree.split(low, high)
    return _expression(tree, low, middle, base), _expression(tree, middle, high, base)


@lru_cache(maxsize=1 << 10)
def balanced(num_nodes: int, node_size: int = 1) -> Expression:
    """Return the tree over ranks: over the ranks of each node, and over the nodes. Where
    `node_size` is a power of two it is the tree over all ranks, however they form nodes.
    """
    assert num_nodes >= 1 and node_size >= 1, (num_nodes, node_size)
    if num_nodes == 1:
        return Tree(node_size).expression(0, node_size)
    middle = Tree(num_nodes).split(0, num_nodes)
    left, right = balanced(middle, node_size), balanced(num_nodes - middle, node_size)
    return left, placed(right, range(middle * node_size, num_nodes * node_size))


def placed(expression: Expression, positions: Sequence[int]) -> Expression:
    """Return `expression` with ``positions[i]`` in place of every i."""
    if isinstance(expression, int):
        return positions[expression]
    return placed(expression[0], positions), placed(expression[1], positions)


def deal(leaves: int, num_ranks: int) -> list[int]:
    """Return how many of the `leaves` each of `num_ranks` equal ranks computes."""
    each, left = divmod(leaves, num_ranks)
    return [each + (rank < left) for rank in range(num_ranks)]


def rounds(counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return, of each round, in which a rank computes one leaf at most, the (rank, leaf) pairs in
    leaf order; rank r computes ``counts[r]`` leaves. Every leaf is dealt once, in order.
    """
    out, leaf = [], 0
    for number in range(max(counts)):
        there = [rank for rank, count in enumerate(counts) if count > number]
        out.append([(rank, leaf + place) for place, rank in enumerate(there)])
        leaf += len(there)
    return out


@dataclass(frozen=True)
class Deal:
    """The leaves of `tree` that each rank of `mesh` computes in each round, and their addition.
    Rank r computes ``counts[r]``.
    """

    tree: Tree
    counts: tuple[int, ...]
    mesh: Mesh
    keeps_whole: bool  # whether all gradients may rest whole between micro-batches

    @cached_property
    def is_local(self) -> bool:
        """Whether each rank adds up its own leaves, a node of the tree, before it meets others."""
        nodes = (self.tree.is_node(*span) for span in self.of_ranks)
        return self.keeps_whole and max(self.counts) > 1 and all(nodes)

    @cached_property
    def of_ranks(self) -> list[Range]:
        """The leaves of each rank where they follow each other."""
        stops = list(accumulate(self.counts))
        return [(stop - count, stop) for stop, count in zip(stops, self.counts, strict=True)]

    @cached_property
    def rounds(self) -> list[list[tuple[int, int]]]:
        """The (rank, leaf) pairs of each round."""
        if not self.is_local:
            return rounds(self.counts)
        return [
            [(rank, first + number) for rank, (first, stop) in enumerate(self.of_ranks)
             if first + number < stop]
            for number in range(max(self.counts))
        ]  # fmt: skip

    @cached_property
    def sums(self) -> list[Formed]:
        """The nodes of the tree that the reduce of each round forms, and the order in which the
        ranks' parts add up to each; empty for one sum of all ranks as it is formed without leaves.
        """
        usual = (balanced(self.mesh.num_nodes, self.mesh.node_size),)
        formed = map(self._formed, self.rounds)
        return [(spans, () if sums == usual else sums) for spans, sums in formed]

    def _formed(self, dealt: Sequence[tuple[int, int]]) -> Formed:
        if self.is_local:
            return ((0, self.tree.leaves),), (self.tree.over(self.of_ranks),)
        first, ranks = dealt[0][1], [rank for rank, _ in dealt]
        spans = self.tree.cover(first, first + len(dealt))
        return spans, tuple(
            placed(self.tree.expression(*span), ranks[span[0] - first : span[1] - first])
            for span in spans
        )
