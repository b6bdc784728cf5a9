"""Bytes per step and link class: the closed forms of docs/design/routes.md, and a count by
brute force.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.placement import Cell, Mesh, Scope
from zeroshard.core.policy import ROWS, row
from zeroshard.core.precision import PRECISIONS, Precision
from zeroshard.core.wire import LinkBytes, Wires, all_gather, cheapest, reduce_scatter

NUMEL = 1 << 20
TWO = Mesh(2, 2)
BF16 = Wires.of(PRECISIONS["bf16"])
PSI = 2 * NUMEL
INT8, INT4 = 1 + 4 / 256, 0.5 + 4 / 256


def leaving(name: str, wires: Wires = BF16, mesh: Mesh = TWO, **options: object) -> float:
    """Return the bytes that leave a node per step, in units of Psi."""
    return (
        row(name).wire_bytes(numel=NUMEL, mesh=mesh, wires=wires, **options).leaving_a_node(mesh)
        / PSI
    )  # type: ignore[arg-type]


def test_the_table_of_the_note() -> None:
    assert leaving("zero3", two_level=False) == 3
    assert leaving("zero3", two_level=True) == 2
    assert leaving("zero3", Wires.of(PRECISIONS["bf16"], hop=2), two_level=True) == 1.5
    # the cheapest of each transition: no better here, and the reduce goes flat
    assert leaving("zero3") == 2
    assert (leaving("hpz"), leaving("mics"), leaving("hfsdp")) == (1.5, 2, 1.5)


def test_zero_plus_plus_is_under_its_targets() -> None:
    eight = leaving("hpz", Wires.of(PRECISIONS["bf16"], weight=INT8, grad=INT8), two_level=True)
    four = leaving("hpz", Wires.of(PRECISIONS["bf16"], weight=INT8, grad=INT4), two_level=True)
    assert (eight, four) == pytest.approx((0.508, 0.383), abs=0.001)
    assert four <= 0.8 and four <= 0.3 * 1.5


@given(st.integers(1, 5), st.integers(1, 5))
def test_transitions_are_what_counting_shards_gives(nodes: int, local: int) -> None:
    mesh, shard = Mesh(nodes, local), 1.0
    whole = shard * mesh.size
    flat = LinkBytes(shard * (local - 1), shard * (nodes - 1) * local)
    column = LinkBytes(0.0, shard * (nodes - 1))
    rest = LinkBytes(shard * nodes * (local - 1))
    for got, expected in (
        (all_gather(mesh, Scope.SHARD, Scope.FULL, whole, two_level=False), flat),
        (all_gather(mesh, Scope.SHARD, Scope.FULL, whole, two_level=True), column + rest),
        (all_gather(mesh, Scope.SHARD, Scope.NODE_SHARD, whole, two_level=True), column),
        (all_gather(mesh, Scope.NODE_SHARD, Scope.FULL, whole, two_level=False), rest),
        (reduce_scatter(mesh, Scope.SHARD, whole, whole, two_level=False), flat),
        (reduce_scatter(mesh, Scope.SHARD, whole, whole, two_level=True), column + rest),
        (reduce_scatter(mesh, Scope.NODE_SHARD, whole, whole, two_level=False), rest),
    ):
        assert (got.inside, got.between) == pytest.approx((expected.inside, expected.between))


@given(st.integers(2, 9), st.integers(1, 9), st.sampled_from([2.0, 4.0]))
def test_sums_go_in_two_levels_where_a_node_has_more_ranks_than_its_sum_takes_bytes_more(
    nodes: int, local: int, wire: float
) -> None:
    mesh, whole, hop = Mesh(nodes, local), NUMEL * wire, NUMEL * 4.0
    flat, deep = (
        reduce_scatter(mesh, Scope.SHARD, whole, hop, two_level=levels) for levels in (False, True)
    )
    assert cheapest(flat, deep) == (local > hop / whole)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("no_sync", [False, True])
def test_on_one_node_nothing_leaves_it_and_lowerings_are_equal(
    name: str, k: int, no_sync: bool
) -> None:
    options = {
        "numel": NUMEL,
        "mesh": Mesh(1, 4),
        "wires": BF16,
        "micro_batches": k,
        "no_sync": no_sync,
    }
    seen = [row(name).wire_bytes(two_level=levels, **options) for levels in (None, False, True)]  # type: ignore[arg-type]
    assert seen[0] == seen[1] == seen[2] and seen[0].links.between == 0


def test_averages_travel_in_the_dtype_in_which_gradients_rest() -> None:
    fp32, bf16 = (Wires.of(Precision("bf16", accumulate=name)) for name in ("fp32", "bf16"))
    halved = row("mics").wire_bytes(numel=NUMEL, mesh=TWO, wires=bf16).publish
    assert halved * 2 == row("mics").wire_bytes(numel=NUMEL, mesh=TWO, wires=fp32).publish


def test_on_one_node_hybrid_rows_are_zero3() -> None:
    mesh = Mesh(1, 8)
    expected = row("zero3").wire_bytes(numel=NUMEL, mesh=mesh, wires=BF16)
    for name in ("hpz", "mics", "hfsdp"):
        assert row(name).wire_bytes(numel=NUMEL, mesh=mesh, wires=BF16) == expected, name


@pytest.mark.parametrize("name", ["mics", "hfsdp"])
def test_node_sums_cross_once_per_step_inside_no_sync(name: str) -> None:
    one = row(name).wire_bytes(numel=NUMEL, mesh=TWO, wires=BF16)
    inside = row(name).wire_bytes(numel=NUMEL, mesh=TWO, wires=BF16, micro_batches=4, no_sync=True)
    outside = row(name).wire_bytes(numel=NUMEL, mesh=TWO, wires=BF16, micro_batches=4)
    assert (
        inside.reduce.between == one.reduce.between
        and outside.reduce.between == 4 * one.reduce.between
    )
    assert inside.reduce.inside == outside.reduce.inside == 4 * one.reduce.inside


@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from(list(ROWS)), st.sampled_from([2.0, 4.0])
)
def test_the_cheapest_lowering_is_never_worse_than_one_lowering_for_all(
    nodes: int, local: int, name: str, hop: float
) -> None:
    mesh, wires = Mesh(nodes, local), Wires.of(PRECISIONS["bf16"], hop=hop)
    best, flat, deep = (
        row(name).wire_bytes(numel=NUMEL, mesh=mesh, wires=wires, two_level=levels).links.between
        for levels in (None, False, True)
    )
    assert best <= min(flat, deep) + 1e-6


def test_exact_reduces_in_bf16_go_in_two_levels_from_four_ranks_a_node() -> None:
    def pays(local: int) -> bool:
        mesh = Mesh(2, local)
        flat, deep = (
            reduce_scatter(mesh, Scope.SHARD, PSI, 2 * PSI, two_level=levels)
            for levels in (False, True)
        )
        return cheapest(flat, deep)

    assert [pays(local) for local in (1, 2, 3, 4, 8)] == [False, False, True, True, True]


def test_a_state_sharded_between_nodes_only_has_no_scope() -> None:
    assert [Cell.parse(text).scope for text in ("S S", "R S", "P S", "R R", "P P")] == [
        Scope.SHARD,
        Scope.NODE_SHARD,
        Scope.NODE_SHARD,
        Scope.FULL,
        Scope.FULL,
    ]
    with pytest.raises(ValueError, match="S R: sharded between nodes"):
        Cell.parse("S R").scope  # noqa: B018
