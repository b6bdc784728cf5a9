"""Layouts: slots and shares cover the buffer, pieces cover every parameter exactly once,
whatever the shares.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.layout import ALIGN, Layout, Slot, equal_shares, round_up
from zeroshard.core.placement import Mesh

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6)
ALIGNS = st.sampled_from([1, 4, 16, 64])


def named(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{index}", shape) for index, shape in enumerate(shapes)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Equal shares, or any aligned ones that cover the slots, zeros among them."""
    shapes, align, num_shards = named(draw(SHAPES)), draw(ALIGNS), draw(st.integers(1, 5))
    equal = Layout.build(shapes, Mesh(1, num_shards), align=align)
    if draw(st.booleans()):
        return equal
    blocks = equal.slots[-1].stop if equal.slots else 0
    blocks = round_up(blocks, align) // align + draw(st.integers(0, 3))
    cuts = sorted(
        draw(st.lists(st.integers(0, blocks), min_size=num_shards - 1, max_size=num_shards - 1))
    )
    shares = [
        (stop - start) * align for start, stop in zip([0, *cuts], [*cuts, blocks], strict=True)
    ]
    return Layout.build(shapes, Mesh(1, num_shards), align=align, shares=shares)


# -- by example
# --------------------------------------------------------------------------------------------------


def test_the_drawing_of_the_docstring() -> None:
    layout = Layout.build([("a", (2, 3)), ("b", (3,)), ("c", (5,))], Mesh(1, 3), align=4)
    assert [slot.offset for slot in layout.slots] == [0, 8, 12]
    assert layout.shares == (8, 8, 8)
    assert layout.ranges == ((0, 8), (8, 16), (16, 24))
    assert [
        (piece.name, piece.start, piece.stop, piece.shard_start) for piece in layout.pieces(1)
    ] == [("b", 0, 3, 0), ("c", 0, 4, 4)]
    assert [
        (piece.name, piece.start, piece.stop, piece.shard_start) for piece in layout.pieces(2)
    ] == [("c", 4, 5, 0)]
    assert layout.padding == 24 - 14


def test_unequal_shares_with_an_empty_one() -> None:
    layout = Layout.build([("a", (100,))], Mesh(1, 3), shares=(128, 0, 64))
    assert layout.ranges == ((0, 128), (128, 128), (128, 192))
    assert [len(layout.pieces(rank)) for rank in range(3)] == [1, 0, 0]


def test_a_scalar_takes_one_element_and_an_empty_parameter_none() -> None:
    layout = Layout.build([("scalar", ()), ("empty", (0, 3)), ("vector", (5,))], Mesh(1, 2))
    assert [(slot.numel, slot.offset) for slot in layout.slots] == [(1, 0), (0, 64), (5, 64)]
    assert [piece.name for rank in range(2) for piece in layout.pieces(rank)] == [
        "scalar",
        "vector",
    ]


def test_a_layout_without_parameters_is_empty() -> None:
    layout = Layout.build([], Mesh(1, 3))
    assert (layout.numel, layout.padding, layout.ranges) == (0, 0, ((0, 0), (0, 0), (0, 0)))


@pytest.mark.parametrize("shares", [(63, 65), (64, -64, 128), (64,), (64, 32, 32)])
def test_shares_that_are_unaligned_negative_or_too_short_are_refused(
    shares: tuple[int, ...],
) -> None:
    with pytest.raises(AssertionError):
        Layout.build([("a", (100,))], Mesh(1, len(shares)), shares=shares)


@pytest.mark.parametrize(
    "slots",
    [
        (Slot("a", (4,), 2),),
        (Slot("a", (65,), 0), Slot("b", (1,), 64)),
        (Slot("b", (1,), 64), Slot("a", (1,), 0)),
    ],
)
def test_slots_that_are_unaligned_overlapping_or_out_of_order_are_refused(
    slots: tuple[Slot, ...],
) -> None:
    with pytest.raises(AssertionError):
        Layout(slots, (128,), Mesh(1, 1))


# -- properties
# --------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_round_up_is_the_smallest_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0 and 0 <= rounded - value < multiple


@given(st.integers(0, 10**6), st.integers(1, 64), ALIGNS)
def test_equal_shares_are_equal_aligned_and_no_larger_than_needed(
    numel: int, num_shards: int, align: int
) -> None:
    shares = equal_shares(numel, num_shards, align)
    assert len(shares) == num_shards and len(set(shares)) == 1
    assert shares[0] % align == 0
    assert sum(shares) >= numel and (shares[0] - align) * num_shards < max(numel, 1)


@given(layouts())
def test_slots_are_aligned_and_in_order_and_shares_cover_them(layout: Layout) -> None:
    end = 0
    for slot in layout.slots:
        assert slot.offset % layout.align == 0 and slot.offset >= end
        assert slot.numel == math.prod(slot.shape)
        end = slot.stop
    assert end <= layout.numel == sum(layout.shares)


@given(layouts())
def test_ranges_follow_one_another_from_end_to_end(layout: Layout) -> None:
    assert len(layout.ranges) == layout.num_shards
    end = 0
    for (start, stop), share in zip(layout.ranges, layout.shares, strict=True):
        assert (start, stop - start) == (end, share)
        end = stop
    assert end == layout.numel


@given(layouts())
def test_pieces_cover_each_parameter_exactly_once_in_order(layout: Layout) -> None:
    covered = [0] * len(layout.slots)
    for rank in range(layout.num_shards):
        for piece in layout.pieces(rank):
            slot = layout.slots[piece.index]
            assert piece.name == slot.name and piece.numel > 0
            assert piece.start == covered[piece.index]
            covered[piece.index] = piece.stop
    assert covered == [slot.numel for slot in layout.slots]


@given(layouts())
def test_pieces_lie_in_their_shard_where_they_say(layout: Layout) -> None:
    for rank, (start, stop) in enumerate(layout.ranges):
        end = 0
        for piece in layout.pieces(rank):
            assert end <= piece.shard_start < piece.shard_stop <= stop - start
            assert start + piece.shard_start == layout.slots[piece.index].offset + piece.start
            assert piece.shard_start % layout.align == 0
            end = piece.shard_stop


@given(layouts())
def test_cuts_inside_a_parameter_fall_on_the_alignment(layout: Layout) -> None:
    for rank in range(layout.num_shards):
        for piece in layout.pieces(rank):
            assert piece.start % layout.align == 0
            assert piece.stop % layout.align == 0 or piece.stop == layout.slots[piece.index].numel


@given(layouts(), st.data())
def test_pieces_of_any_span_are_those_elements(layout: Layout, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, layout.numel))
    high = data.draw(st.integers(low, layout.numel))
    expected = [
        (slot.name, element - slot.offset, element - low)
        for slot in layout.slots
        for element in range(max(slot.offset, low), min(slot.stop, high))
    ]
    found = [
        (piece.name, piece.start + offset, piece.shard_start + offset)
        for piece in layout.pieces_in((low, high))
        for offset in range(piece.numel)
    ]
    assert found == expected


@given(SHAPES, st.integers(1, 8), ALIGNS)
def test_padding_is_at_most_the_alignment_per_parameter_and_rank(
    shapes: list[tuple[int, ...]], num_shards: int, align: int
) -> None:
    layout = Layout.build(named(shapes), Mesh(1, num_shards), align=align)
    assert 0 <= layout.padding <= align * (len(shapes) + num_shards)
    assert sum(stop - start for start, stop in layout.gaps) == layout.padding
    for share in layout.shares:  # what one rank keeps at rest
        assert share <= sum(slot.numel for slot in layout.slots) / num_shards + align * (
            len(shapes) / num_shards + 1
        )


@given(layouts())
def test_replicated_is_the_same_buffer_owned_by_one(layout: Layout) -> None:
    whole = layout.replicated()
    assert (whole.slots, whole.numel, whole.num_shards, whole.align) == (
        layout.slots,
        layout.numel,
        1,
        layout.align,
    )
    assert [(piece.start, piece.stop) for piece in whole.pieces(0)] == [
        (0, slot.numel) for slot in layout.slots if slot.numel
    ]


@given(layouts())
def test_layouts_are_values(layout: Layout) -> None:
    assert layout == replace(layout) and hash(layout) == hash(replace(layout))


def test_the_default_alignment_is_a_multiple_of_every_vector_length() -> None:
    assert ALIGN % 16 == 0  # 64 bytes of fp32: one AVX-512 register, one cache line
