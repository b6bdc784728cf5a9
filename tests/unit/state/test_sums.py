"""Sums on their way to a gradient: bits do not depend on how numbers were cut, nor on the tier."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from tests.support.sums import sum_in_tree
from zeroshard.core.tree import Tree
from zeroshard.errors import StorageError
from zeroshard.memory import Pages
from zeroshard.state.state import DeviceMemory
from zeroshard.state.sums import TreeSums
from zeroshard.tier.store import Direct
from zeroshard.tier.stores import HostStore

CPU = torch.device("cpu")
MEMORY = DeviceMemory(CPU, Pages(), Direct())
LEAVES = [torch.randn(64, generator=torch.Generator().manual_seed(leaf)) for leaf in range(13)]
on_each_tier = pytest.mark.parametrize("tier", ["device", "host"])


def _sums(tree: Tree | None, tier: str) -> TreeSums:
    store = HostStore(CPU, link=Direct()) if tier == "host" else None
    return TreeSums("p", MEMORY, note=lambda error: None, tree=tree, store=store)


@on_each_tier
@pytest.mark.parametrize("first_apart", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 13])
def test_a_tree_gives_the_same_bits_for_every_cut(tier: str, first_apart: bool, step: int) -> None:
    tree, first = Tree(13), torch.zeros(64)
    sums = _sums(tree, tier)

    def add_first(total: torch.Tensor, is_new: bool) -> None:
        first.copy_(total) if is_new else first.add_(total)

    for start in range(0, 13, step):
        for span in tree.cover(start, min(start + step, 13)):
            total = sum_in_tree(LEAVES[slice(*span)]).clone()
            sums.add(span, total, add_first if first_apart else None)
            assert len(sums.held) <= tree.most_partials
    if first_apart:
        assert sums.held == [] and sums.first == (0, 13)
    else:
        assert [span for span, _ in sums.held] == [(0, 13)]
        sums.merge((13, 13), first)
    assert torch.equal(first, sum_in_tree(LEAVES))
    assert sums.bytes_by_tier() == {}


@on_each_tier
def test_without_a_tree_each_number_is_added_to_the_sum_before(tier: str) -> None:
    sums = _sums(None, tier)
    for leaf, numbers in enumerate(LEAVES):
        sums.add((leaf, leaf + 1), numbers.clone())
    [(span, state)] = sums.held
    assert span == (0, 13) and sum(sums.bytes_by_tier().values()) == 64 * 4
    with state.borrowed(0, 64, write=False) as there:
        assert torch.equal(there, reduce(torch.add, LEAVES))
    assert sums.chain(64, torch.float32) is state, "a chain goes on with the sum that is held"
    sums.reset()
    assert sums.held == [] and sums.bytes_by_tier() == {}


def test_a_sum_that_cannot_be_read_is_lost_until_the_next_begins() -> None:
    noted = list[StorageError]()
    sums = TreeSums("p", MEMORY, note=noted.append)
    with sums.losing():
        raise StorageError("gone")
    assert sums.lost and len(noted) == 1
    sums.reset()
    assert not sums.lost
