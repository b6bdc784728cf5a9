"""The tree of additions: that it depends on the leaves alone, whoever adds which of them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.tree import Expression, Tree, balanced, deal, rounds

TREES = st.one_of(
    st.integers(1, 70).map(Tree),
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(
        lambda sizes: Tree.parse("x".join(map(str, sizes)))
    ),
)


def _evaluate(expression: Expression, values: list[str]) -> str:
    if isinstance(expression, int):
        return values[expression]
    left, right = (_evaluate(part, values) for part in expression)
    return f"({left}+{right})"


def _counted(tree: Tree, pieces: list[tuple[int, int]]) -> tuple[str, int]:
    """Add `pieces`, ranges in leaf order, in a binary counter; return the sum as text, and the most
    partial sums that were held.
    """
    names = [str(leaf) for leaf in range(tree.leaves)]
    held: list[tuple[tuple[int, int], str]] = []
    most = 0
    for piece in pieces:
        for span in tree.cover(*piece):
            text = _evaluate(tree.expression(*span), names[span[0] : span[1]])
            while held and tree.merges(held[-1][0], span):
                left, before = held.pop()
                span, text = (left[0], span[1]), f"({before}+{text})"
            held.append((span, text))
            most = max(most, len(held))
    assert len(held) == 1, held
    return held[0][1], most


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
        ("3x2", "(((0+1)+(2+3))+(4+5))"),
        ("2x3", "(((0+1)+2)+((3+4)+5))"),
        ("4x1x2", "((((0+1)+(2+3))+(4+5))+(6+7))"),
    ],
)
def test_the_tree_is_that_of_the_definition(declared: int | str, text: str) -> None:
    tree = Tree.parse(declared)
    names = [str(leaf) for leaf in range(tree.leaves)]
    assert _evaluate(tree.expression(0, tree.leaves), names) == text
    assert Tree.parse(str(tree)) == tree


@given(TREES, st.randoms(use_true_random=False))
def test_any_cut_into_ranges_gives_the_same_sum(tree: Tree, chance: random.Random) -> None:
    cuts = sorted({0, tree.leaves, *(chance.randrange(tree.leaves + 1) for _ in range(5))})
    pieces = list(pairwise(cuts))
    whole, _ = _counted(tree, [(0, tree.leaves)])
    by_leaf, most = _counted(tree, [(leaf, leaf + 1) for leaf in range(tree.leaves)])
    assert _counted(tree, pieces)[0] == by_leaf == whole
    assert most <= tree.most_partials + 1


@given(TREES)
def test_a_counter_of_a_binary_tree_holds_the_logarithm_of_the_leaves(tree: Tree) -> None:
    if not tree.radix:
        assert tree.most_partials <= tree.leaves.bit_length()


@given(TREES, st.integers(0, 80), st.integers(0, 80))
def test_a_range_is_made_up_of_nodes_without_gap(tree: Tree, one: int, other: int) -> None:
    start, stop = sorted((min(one, tree.leaves), min(other, tree.leaves)))
    spans = tree.cover(start, stop)
    assert [leaf for span in spans for leaf in range(*span)] == list(range(start, stop))
    assert all(tree.is_node(*span) for span in spans)
    assert not any(tree.merges(*pair) for pair in pairwise(spans)), "they are the largest"


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 6))
def test_nodes_of_a_power_of_two_do_not_change_the_tree_over_ranks(
    many: int, few: int, nodes: int
) -> None:
    assert balanced(1 << many, 1 << few) == balanced(1, 1 << many + few)
    assert balanced(nodes, 1 << few) == balanced(1, nodes << few)


def test_the_tree_over_nodes_of_three_is_that_of_each_node_first() -> None:
    assert balanced(2, 3) == (((0, 1), 2), ((3, 4), 5))
    assert balanced(1, 6) == (((0, 1), (2, 3)), (4, 5))


@given(TREES, st.randoms(use_true_random=False))
def test_sums_of_nodes_add_up_to_the_same_sum(tree: Tree, chance: random.Random) -> None:
    spans = [(0, tree.leaves)]
    for _ in range(4):  # cut some nodes in two
        spans = [
            part
            for low, high in spans
            for part in (
                [(low, tree.split(low, high)), (tree.split(low, high), high)]
                if high - low > 1 and chance.random() < 0.5
                else [(low, high)]
            )
        ]
    names = [str(leaf) for leaf in range(tree.leaves)]
    of_spans = [_evaluate(tree.expression(*span), names[slice(*span)]) for span in spans]
    whole = _evaluate(tree.expression(0, tree.leaves), names)
    assert _evaluate(tree.over(spans), of_spans) == whole


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_every_leaf_is_dealt_once_in_order_and_every_rank_has_its_count(counts: list[int]) -> None:
    dealt = rounds(counts)
    assert [leaf for one in dealt for _, leaf in one] == list(range(sum(counts)))
    for one in dealt:
        ranks = [rank for rank, _ in one]
        assert ranks == sorted(set(ranks))
    for rank, count in enumerate(counts):
        assert sum(rank == other for one in dealt for other, _ in one) == count


def test_leaves_are_dealt_in_turn() -> None:
    assert deal(8, 3) == [3, 3, 2]
    assert rounds(deal(8, 3)) == [
        [(0, 0), (1, 1), (2, 2)],
        [(0, 3), (1, 4), (2, 5)],
        [(0, 6), (1, 7)],
    ]
    assert rounds([2, 1]) == [[(0, 0), (1, 1)], [(0, 2)]]


@pytest.mark.parametrize("declared", [0, -1, True, "3x", "3x0", "a", "", 2.5])
def test_what_is_no_tree_is_refused(declared: object) -> None:
    with pytest.raises(ValueError, match="leaves"):
        Tree.parse(declared)  # type: ignore[arg-type]
