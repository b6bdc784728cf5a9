"""Ranges of boxes: where two of them have the same elements, against numbering all elements."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.core.boxes import (
    Box,
    Span,
    box_of,
    boxes_of,
    check_boxes,
    common,
    dense_stride,
    part_at,
)
from zeroshard.core.placement import Part

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def spans(draw: st.DrawFn, shape: tuple[int, ...]) -> Span:
    """Any range of any box of a parameter of `shape`, in any memory order."""
    start, sizes = [], []
    for size in shape:
        first = draw(st.integers(0, size - 1))
        start.append(first)
        sizes.append(draw(st.integers(1, size - first)))
    stride, step = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim], step = step, step * sizes[dim]
    first, last = sorted(draw(st.tuples(*[st.integers(0, prod(sizes))] * 2)))
    return Span(Part(shape, tuple(start), tuple(sizes)), tuple(stride), first, last)


def _numbers(span: Span) -> torch.Tensor:
    """The elements of `span`, each as its number in the whole parameter."""
    part = span.part
    whole = torch.arange(prod(part.shape)).view(part.shape)
    for dim, (first, size) in enumerate(zip(part.start, part.sizes, strict=True)):
        whole = whole.narrow(dim, first, size)
    held = torch.empty_strided(part.sizes, span.stride, dtype=torch.int64).copy_(whole)
    return held.as_strided((part.numel,), (1,))[span.start : span.stop].clone()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_what_two_ranges_have_in_common_is_copied_once_and_in_place(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    wanted, stored = data.draw(spans(shape)), data.draw(spans(shape))
    numbers = _numbers(stored)
    out = torch.full((wanted.numel,), -1)
    copied = 0
    for shared in common(wanted, stored):
        assert 0 <= shared.stored < shared.stored_stop <= stored.numel
        target = out.as_strided(shared.sizes, shared.wanted_stride, shared.wanted)
        assert bool((target == -1).all())
        target.copy_(numbers.as_strided(shared.sizes, shared.stored_stride, shared.stored))
        copied += shared.numel
    expected = _numbers(wanted)
    there = set(numbers.tolist())
    assert copied == len(there & set(expected.tolist()))
    assert out.tolist() == [number if number in there else -1 for number in expected.tolist()]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_range_is_few_boxes_in_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=4))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(sizes))] * 2)))
    boxes = list(boxes_of(sizes, start, stop))
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)
    places = [index for box in boxes for index in product(*(range(a, b) for a, b in box))]
    assert places == list(product(*(range(size) for size in sizes)))[start:stop]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ({()}, ""),
        ({((0, 4), (0, 6))}, ""),
        ({((0, 4), (0, 3)), ((0, 4), (3, 6))}, ""),
        ({((0, 1), (0, 6)), ((1, 4), (0, 6))}, ""),
        ({((0, 4), (0, 3))}, "they leave a hole at 3:6 of dimension 1"),
        ({((0, 4), (0, 3)), ((0, 4), (4, 6))}, "they leave a hole at 4:6 of dimension 1 of 6"),
        ({((0, 4), (0, 3)), ((0, 4), (2, 6))}, "they overlap at 2:6 of dimension 1 of 6"),
        ({((0, 4), (0, 7))}, "they go beyond at 0:7 of dimension 1 of 6"),
        ({((0, 2), (0, 3)), ((2, 4), (3, 6))}, "they leave a hole: there are 2 of a grid of 2 x 2"),
        ({(), ((0, 4), (0, 6))}, "they: one of 0 dimensions, in"),
        ({((0, 4),)}, "they: one of 1 dimensions, in"),
    ],
    ids=repr,
)
def test_boxes_are_all_of_a_shape_once_or_it_is_said_where_not(
    boxes: set[Box], message: str
) -> None:
    if not message:
        check_boxes((4, 6), boxes, "they")
        return
    with pytest.raises(ValueError, match=message):
        check_boxes((4, 6), boxes, "they")


def test_shards_of_rows_are_one_copy_and_of_columns_one_too() -> None:
    whole = Span.of_all(Part.whole((1000, 600)), (600, 1))
    for part in (Part((1000, 600), (500, 0), (500, 600)), Part((1000, 600), (0, 300), (1000, 300))):
        (shared,) = common(Span.of_all(part, (part.sizes[1], 1)), whole)
        assert shared.numel == part.numel


@given(SHAPES, st.data())
def test_parts_and_boxes_say_the_same(shape: tuple[int, ...], data: st.DataObject) -> None:
    part = data.draw(spans(shape)).part
    assert part_at(shape, box_of(part)) == part
    assert (box_of(part) == ()) == part.is_whole


@given(SHAPES, st.data())
def test_a_stride_is_that_of_other_sizes_in_the_same_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """A part's stride, brought to the whole and back, numbers the elements as before."""
    span = data.draw(spans(shape))
    sizes = span.part.sizes
    whole = dense_stride(span.stride, sizes, shape)
    assert sorted(whole) == sorted(dense_stride(whole, shape, shape)) or 1 in shape
    again = dense_stride(whole, shape, sizes)
    counted = [dim for dim, size in enumerate(sizes) if size != 1]
    assert [again[dim] for dim in counted] == [span.stride[dim] for dim in counted]
    for one, other in pairwise(sorted((whole[dim], shape[dim]) for dim in range(len(shape)))):
        assert other[0] == one[0] * one[1] or 1 in (one[1], other[1])


def test_a_part_in_row_order_belongs_to_a_parameter_in_row_order() -> None:
    assert dense_stride((1, 1), (4, 1), (4, 6)) == (6, 1)
    assert dense_stride((12, 1, 6, 3), (1, 3, 2, 2), (8, 3, 2, 2)) == (12, 1, 6, 3)
