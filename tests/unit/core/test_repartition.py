"""Intersections of two cuts: every shared element once, in order, whatever the cuts."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.layout import Range
from zeroshard.core.overlaps import Overlap, overlap, overlaps


@st.composite
def cuts(draw: st.DrawFn) -> list[Range]:
    """Ranges in order and disjoint, some empty, some with a gap before them."""
    edges = sorted(draw(st.lists(st.integers(0, 60), max_size=16)))
    ranges = list(itertools.pairwise(edges))
    return ranges if draw(st.booleans()) else ranges[::2]


def elements(cut: list[Range]) -> list[int]:
    return [element for start, stop in cut for element in range(start, stop)]


@given(cuts(), cuts())
def test_every_element_that_both_cuts_hold_is_in_one_overlap(
    old: list[Range], new: list[Range]
) -> None:
    found = overlaps(old, new)
    shared = [element for part in found for element in range(part.start, part.stop)]
    assert shared == sorted(set(elements(old)) & set(elements(new)))


@given(cuts(), cuts())
def test_an_overlap_lies_inside_both_of_its_ranges_and_is_not_empty(
    old: list[Range], new: list[Range]
) -> None:
    for part in overlaps(old, new):
        assert part.start < part.stop
        assert old[part.old][0] <= part.start and part.stop <= old[part.old][1]
        assert new[part.new][0] <= part.start and part.stop <= new[part.new][1]


@given(cuts(), cuts())
def test_the_other_way_round_the_same_ranges_overlap(old: list[Range], new: list[Range]) -> None:
    turned = [Overlap(part.new, part.old, part.start, part.stop) for part in overlaps(new, old)]
    assert turned == overlaps(old, new)


@given(cuts(), cuts(), st.integers(0, 60), st.integers(0, 60))
def test_numbers_that_are_moved_by_overlaps_there_and_back_are_the_same(
    old: list[Range], new: list[Range], start: int, stop: int
) -> None:
    old = [part for part in (overlap(span, (start, stop)) for span in old) if part is not None]
    there = dict.fromkeys(elements(new), -1)
    for part in overlaps(old, new):
        there |= {element: element for element in range(part.start, part.stop)}
    back = {
        element: there[element]
        for part in overlaps(new, old)
        for element in range(part.start, part.stop)
    }
    assert back == {element: element for element in elements(old) if element in there}


def test_a_cut_that_moves_by_one_range_is_drawn_in_the_docstring() -> None:
    assert overlaps([(0, 5), (5, 12)], [(0, 3), (3, 8), (8, 12)]) == [
        Overlap(0, 0, 0, 3),
        Overlap(0, 1, 3, 5),
        Overlap(1, 1, 5, 8),
        Overlap(1, 2, 8, 12),
    ]
