"""Which part of a parameter a rank has, and where it counts."""

from __future__ import annotations

from zeroshard.core.placement import Part

CUT = Part((8, 6), (4, 0), (4, 6), frozenset({"tp"}))


def test_a_whole_parameter_begins_at_zero_and_has_every_element() -> None:
    part = Part.whole((8, 6))
    assert (part.start, part.sizes, part.numel, part.is_whole) == ((0, 0), (8, 6), 48, True)
    assert Part.whole(()).numel == 1


def test_a_part_has_the_elements_of_its_box() -> None:
    assert (CUT.numel, CUT.is_whole) == (24, False)
    assert Part((1, 6), (1, 0), (0, 6), frozenset({"tp"})).numel == 0


def test_of_ranks_with_the_same_part_the_first_along_every_axis_counts() -> None:
    whole = Part.whole((8, 6))
    assert whole.counts(["tp"], {"tp"}) and not whole.counts(["tp"], set())
    assert not whole.counts(["tp", "other"], {"tp"})
    # cut along tp: every rank there has other elements
    assert CUT.counts(["tp"], set())
    assert not CUT.counts(["tp", "other"], {"tp"}) and CUT.counts(["tp", "other"], {"other"})
    assert whole.counts([], set())
