"""What moves between two layouts: every element to each rank that wants it, once, whatever the
layouts are.
"""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.boxes import Send, sends
from zeroshard.core.layout import Range

LENGTH = 60
NOTHING = (0, 0)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Range], list[Range]]:
    """What each rank holds, disjoint and in any order, some nothing, and what each one wants."""
    edges = sorted(draw(st.lists(st.integers(0, LENGTH), min_size=1, max_size=8)))
    held = draw(st.permutations([*itertools.pairwise(edges), NOTHING]))
    element = st.integers(0, LENGTH)
    spans = st.tuples(element, element).map(sorted).map(lambda ends: (ends[0], ends[1]))
    return held, draw(st.lists(spans, min_size=len(held), max_size=len(held)))


@given(layouts())
def test_every_element_that_is_held_comes_to_each_rank_that_wants_it_once(
    both: tuple[list[Range], list[Range]],
) -> None:
    held, wanted = both
    somewhere = {element for span in held for element in range(*span)}
    for rank, span in enumerate(wanted):
        taken = [part for part in sends(rank, held, wanted) if part.target == rank]
        came = Counter(element for part in taken for element in range(part.start, part.stop))
        assert came == Counter(somewhere & set(range(*span)))


@given(layouts())
def test_a_send_lies_in_what_its_source_holds_and_its_target_wants_and_is_not_empty(
    both: tuple[list[Range], list[Range]],
) -> None:
    held, wanted = both
    for rank in range(len(held)):
        for part in sends(rank, held, wanted):
            assert part.start < part.stop and rank in (part.source, part.target)
            for span in (held[part.source], wanted[part.target]):
                assert span[0] <= part.start and part.stop <= span[1]


@given(layouts())
def test_both_ends_name_their_sends_in_the_same_order(
    both: tuple[list[Range], list[Range]],
) -> None:
    held, wanted = both
    found = [sends(rank, held, wanted) for rank in range(len(held))]
    for one, other in itertools.permutations(range(len(held)), 2):
        pair = [(one, other)]
        sent = [part for part in found[one] if (part.source, part.target) in pair]
        assert sent == [part for part in found[other] if (part.source, part.target) in pair]


@given(layouts())
def test_numbers_that_are_moved_there_and_back_are_the_same(
    both: tuple[list[Range], list[Range]],
) -> None:
    """All of them go to one rank, and from there to those that had them."""
    held, _ = both
    alone = [(0, LENGTH), *([NOTHING] * (len(held) - 1))]
    came = {
        element: part.source
        for part in sends(0, held, alone)
        for element in range(part.start, part.stop)
    }
    for rank, span in enumerate(held):
        back = [part for part in sends(rank, alone, held) if part.target == rank]
        elements = [element for part in back for element in range(part.start, part.stop)]
        assert elements == list(range(*span)) and {came[one] for one in elements} <= {rank}


def test_the_sends_of_the_docstring() -> None:
    held, wanted = [(0, 16), (16, 32), NOTHING], [(0, 10), (12, 22), (22, 32)]
    assert sends(0, held, wanted) == [Send(0, 0, 0, 10), Send(0, 1, 12, 16)]
    assert sends(1, held, wanted) == [
        Send(0, 1, 12, 16), Send(1, 1, 16, 22), Send(1, 2, 22, 32),
    ]  # fmt: skip
    assert sends(2, held, wanted) == [Send(1, 2, 22, 32)]
