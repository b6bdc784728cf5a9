"""Cells read and write as the table does, and know into how many parts they cut a state."""

from __future__ import annotations

from itertools import product

import pytest

from zeroshard.core.placement import Cell, Mesh, Placement, Tier
from zeroshard.errors import ConfigError

R, S, P = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL


@pytest.mark.parametrize(("node", "local"), list(product(Placement, Placement)))
def test_a_cell_reads_what_it_writes(node: Placement, local: Placement) -> None:
    cell = Cell(node, local, Tier.HOST)
    assert Cell.parse(str(cell), Tier.HOST) == cell
    assert cell.axes == (node, local)


@pytest.mark.parametrize("text", ["", "R", "R R R", "R X", "r r"])
def test_a_cell_that_is_not_of_the_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Cell.parse(text)


@pytest.mark.parametrize(
    ("text", "num_shards"),
    [("R R", 1), ("S S", 24), ("R S", 8), ("S R", 3), ("P P", 1), ("P S", 8)],
)
def test_a_state_is_cut_along_the_sharded_axes(text: str, num_shards: int) -> None:
    cell = Cell.parse(text)
    assert cell.num_shards(Mesh(num_nodes=3, node_size=8)) == num_shards
    assert (cell.is_sharded, cell.is_partial) == ("S" in text, "P" in text)


def test_a_mesh_counts_its_ranks_and_has_at_least_one() -> None:
    assert Mesh(2, 4).size == 8
    for axes in ((0, 4), (2, 0)):
        with pytest.raises(AssertionError):
            Mesh(*axes)


def test_a_mesh_knows_the_ranks_of_nodes_and_columns() -> None:
    mesh = Mesh.of(8, 4)
    assert mesh == Mesh(2, 4)
    assert mesh.node(5) == (4, 5, 6, 7) and mesh.column(5) == (1, 5)
    assert mesh.same_node(4, 7) and not mesh.same_node(3, 4)
    assert Mesh.of(3).node(2) == (0, 1, 2)
    with pytest.raises(ConfigError, match=r"comm.node_size=3 does not divide the 8 ranks"):
        Mesh.of(8, 3)
