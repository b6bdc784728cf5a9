"""Sizes, comparisons and blocks, as lists."""

from __future__ import annotations

import pytest

from benchmarks.model import GPT
from benchmarks.plan import (
    COMPARISONS,
    CONTENDERS,
    MUON_COMPARISONS,
    NAMED_COMPARISONS,
    OVERHEAD_SIZE,
    SIZES,
    Size,
    blocks,
    comparisons_for,
    fake_ranks,
)


@pytest.mark.parametrize(
    "size", [SIZES["tiny"], SIZES["small"], OVERHEAD_SIZE], ids=lambda size: size.name
)
def test_the_formula_counts_the_models_parameters(size: Size) -> None:
    assert sum(parameter.numel() for parameter in GPT(size).parameters()) == size.num_parameters


def test_the_sizes_are_those_of_the_targets() -> None:
    assert [
        round(SIZES[name].num_parameters / 1e6, 1) for name in ("small", "medium", "large")
    ] == [11.4, 49.9, 209.9]
    assert SIZES["medium"].tokens == 256
    assert (round(SIZES["1.3b"].num_parameters / 1e6), SIZES["1.3b"].tokens) == (1313, 2048)


def test_every_comparison_names_known_contenders_once() -> None:
    every = [*COMPARISONS, *NAMED_COMPARISONS]
    for known in (every, MUON_COMPARISONS):
        assert len({(c.contender, c.reference) for c in known}) == len(known)
    compared = {name for c in (*every, *MUON_COMPARISONS) for name in (c.contender, c.reference)}
    assert compared == set(CONTENDERS)
    unasked = {name for c in COMPARISONS for name in (c.contender, c.reference)}
    assert not any(fake_ranks(name) for name in unasked), "only where they are named"


@pytest.mark.parametrize("alive", [2, 3, 4, 8, 100])
def test_blocks_hold_every_comparison_once_and_no_more_contenders_than_may_live(alive: int) -> None:
    made = blocks(COMPARISONS, alive=alive)
    assert sorted((c.contender, c.reference) for _, inside in made for c in inside) == sorted(
        (c.contender, c.reference) for c in COMPARISONS
    )
    for members, inside in made:
        assert len(members) <= alive and len(set(members)) == len(members)
        assert {name for c in inside for name in (c.contender, c.reference)} == set(members)


def test_one_block_serves_all_when_memory_allows_it() -> None:
    assert len(blocks(COMPARISONS, alive=len(CONTENDERS))) == 1


def test_two_at_a_time_is_strictly_a_b() -> None:
    assert [members for members, _ in blocks(COMPARISONS, alive=2)] == [
        (c.contender, c.reference) for c in COMPARISONS
    ]
    with pytest.raises(ValueError, match="two contenders"):
        blocks(COMPARISONS, alive=1)


def test_a_contender_without_a_comparison_of_its_own_is_put_beside_ddp() -> None:
    chosen = comparisons_for(["fsdp2", "torch-ddp"])
    assert [(c.contender, c.reference, c.target) for c in chosen] == [("fsdp2", "torch-ddp", None)]
    assert comparisons_for(["fsdp2"]) == []
