"""core/resting.py: which part of a master is the weight, and which parameters make a unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.placement import Tier
from zeroshard.core.resting import AtRest, is_weight, num_shared, packed, unit_limit

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


@pytest.mark.parametrize(
    ("weight", "master", "same", "shared"),
    [
        (AtRest("fp32", 8, 8, DEVICE), AtRest("fp32", 8, 8, DEVICE), True, 8),
        (AtRest("bf16", 8, 8, DEVICE), AtRest("fp32", 8, 8, DEVICE), False, 0),
        (AtRest("fp32", 8, 8, DEVICE), AtRest("fp32", 8, 0, HOST), False, 0),
        (AtRest("fp32", 8, 8, DEVICE), AtRest("fp32", 8, 3, HOST), False, 3),
        (AtRest("fp32", 8, 3, HOST), AtRest("fp32", 8, 3, HOST), True, 8),
        (AtRest("fp32", 8, 3, HOST), AtRest("fp32", 8, 3, DISK), False, 3),
        (AtRest("fp32", 8, 2, HOST), AtRest("fp32", 8, 3, HOST), False, 0),
        (AtRest("fp32", 8, 8, HOST), AtRest("fp32", 8, 8, DISK), True, 8),  # nothing is away
        (AtRest("fp32", 0, 0, DEVICE), AtRest("fp32", 0, 0, HOST), True, 0),
    ],
)
def test_a_master_is_the_weight_where_both_rest_alike(
    weight: AtRest, master: AtRest, same: bool, shared: int
) -> None:
    assert (is_weight(weight, master), num_shared(weight, master)) == (same, shared)


_parameters = st.lists(
    st.tuples(st.integers(1, 9), st.none() | st.sampled_from("abc")), min_size=1, max_size=12
)


@given(_parameters, st.booleans())
def test_every_parameter_is_in_one_unit_and_none_of_leftovers_is_too_large(
    sizes: list[tuple[int, str | None]], whole: bool
) -> None:
    parameters = [(f"p{at}", numel, block) for at, (numel, block) in enumerate(sizes)]
    blocks = {b: sum(n for _, n, block in parameters if block == b) for _, _, b in parameters if b}
    limit = unit_limit(blocks.values(), [numel for _, numel, _ in parameters], whole=whole)
    units = packed(parameters, limit)
    assert [block for block, _ in units if block] == list(
        dict.fromkeys(block for _, _, block in parameters if block)
    )
    numel_of = {name: numel for name, numel, _ in parameters}
    leftovers = [name for name, _, block in parameters if block is None]
    assert [name for _, names in units for name in names] == leftovers
    assert all(sum(map(numel_of.__getitem__, names)) <= limit for _, names in units)


def test_a_block_between_leftovers_ends_their_unit() -> None:
    parameters = [("a", 1, None), ("b", 1, None), ("c", 5, "block"), ("d", 1, None)]
    assert packed(parameters, 9) == [(None, ["a", "b"]), ("block", []), (None, ["d"])]
    assert packed(parameters, 1) == [(None, ["a"]), (None, ["b"]), ("block", []), (None, ["d"])]
