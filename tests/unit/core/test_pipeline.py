"""Where gathers, releases and reduces go between the computations of a pipeline: a pure function
over lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.core.pipeline_orders import (
    BACKWARDS,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    Action,
    num_gathers,
    place,
)

STAGES = range(4)
PLACED = {UNSHARD, RESHARD, REDUCE_GRAD}
SIMPLE = [Action(stage, kind, number) for stage in STAGES for kind in "FIWB" for number in (0, 1)]
SENDS = [Action(stage, kind, 0) for stage in STAGES for kind in ("SEND_F", "RECV_B")]
OVERLAPS = [
    Action(-1, "OVERLAP_F_B", None, (Action(stage, "F", 0), Action(other, "B", 0)))
    for stage in STAGES
    for other in STAGES
]
LISTS = st.lists(st.sampled_from(SIMPLE + SENDS + OVERLAPS), max_size=20)
SIZES = st.fixed_dictionaries({stage: st.integers(1, 10) for stage in STAGES})


def parse(text: str) -> list[Action]:
    """Return a list like ``"0F0 2UNSHARD"``."""
    out = []
    for word in text.split():
        kind = word.lstrip("0123456789").rstrip("0123456789")
        stage, _, micro_batch = word.partition(kind)
        out.append(Action(int(stage), kind, int(micro_batch) if micro_batch else None))
    return out


def shown(actions: Sequence[Action]) -> str:
    """Return the list as text."""
    return " ".join(
        f"{one.stage}{one.kind}{'' if one.micro_batch is None else one.micro_batch}"
        for one in actions
    )


def held_at(actions: Sequence[Action]) -> Iterator[tuple[Action, set[int]]]:
    """Yield each action and what is gathered after it; two gathers of one stage in a row, or
    releases of what is not there, fail.
    """
    held: set[int] = set()
    for action in actions:
        if action.kind == UNSHARD:
            assert action.stage not in held, action
            held.add(action.stage)
        elif action.kind == RESHARD:
            held.remove(action.stage)
        yield action, set(held)
    assert not held, "all is released in the end: a step writes the weights"


# ------------------------------------------------------------------------------------- by example


def test_one_stage_is_gathered_once_and_reduced_after_its_last_backward() -> None:
    placed = place(parse("1F0 1F1 1B0 1F2 1B1 1B2"), {1: 8}, 8)
    assert shown(placed) == "1UNSHARD 1F0 1F1 1B0 1F2 1B1 1B2 1RESHARD 1REDUCE_GRAD"


def test_with_room_for_one_stage_the_other_one_waits() -> None:
    placed = place(parse("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"), {0: 5, 2: 5}, 5)
    assert shown(placed) == (
        "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 2REDUCE_GRAD"
        " 0UNSHARD 0B0 0B1 0RESHARD 0REDUCE_GRAD"
    )


def test_a_gather_starts_one_computation_early_where_there_is_room() -> None:
    placed = place(parse("0F0 0F1 2F0 2B0 0B0 0B1"), {0: 5, 2: 5}, 10)
    assert shown(placed).startswith("0UNSHARD 0F0 2UNSHARD 0F1 2F0 2B0 2RESHARD 2REDUCE_GRAD 0B0")


def test_what_is_needed_last_goes_first() -> None:
    placed = place(parse("0F0 1F0 2F0 0F1 1F1 2F1"), {0: 1, 1: 1, 2: 1}, 2)
    assert shown(placed).startswith("0UNSHARD 1UNSHARD 0F0 1F0 1RESHARD 2UNSHARD 2F0 0F1")


def test_without_a_budget_only_reduces_are_placed() -> None:
    placed = place(parse("0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD"), {0: 5}, None)
    assert shown(placed) == "0F0 0B0 0REDUCE_GRAD"


def test_zero_bubbles_reduce_after_the_last_weights() -> None:
    placed = place(parse("0F0 0F1 0I0 0I1 0W0 0W1"), {0: 5}, 5)
    assert shown(placed) == "0UNSHARD 0F0 0F1 0I0 0I1 0W0 0W1 0RESHARD 0REDUCE_GRAD"


def test_what_is_placed_already_is_placed_anew() -> None:
    once = place(parse("0F0 2F0 2B0 0B0"), {0: 5, 2: 5}, 5)
    assert place(once, {0: 5, 2: 5}, 5) == once


# ----------------------------------------------------------------------------------- for all lists


@given(LISTS, SIZES, st.integers(0, 50))
def test_the_list_computes_the_same_in_the_same_order(
    actions: list[Action], sizes: dict[int, int], budget: int
) -> None:
    for given_budget in (budget, None):
        placed = place(actions, sizes, given_budget)
        assert [one for one in placed if one.kind not in PLACED] == actions


@given(LISTS, SIZES, st.integers(0, 50))
def test_every_computation_finds_its_stages_and_no_more_than_the_budget(
    actions: list[Action], sizes: dict[int, int], budget: int
) -> None:
    placed = place(actions, sizes, budget)
    computations = [one for one in placed if one.stages]
    for action, held in held_at(placed):
        assert action.stages <= held
        needed = computations[0].stages if computations else frozenset()
        if sum(sizes[stage] for stage in held) > budget:
            assert held <= needed or action.kind == RESHARD  # of several that one needed
        if action.stages:
            computations.pop(0)


@given(LISTS, SIZES, st.integers(0, 50))
def test_gradients_are_reduced_once_after_the_last_backward_of_their_stage(
    actions: list[Action], sizes: dict[int, int], budget: int
) -> None:
    backwards = [
        one.stage for action in actions for one in action.computations if one.kind in BACKWARDS
    ]
    seen: Counter[int] = Counter()
    for action in place(actions, sizes, budget):
        if action.kind == REDUCE_GRAD:
            assert seen[action.stage] == backwards.count(action.stage)
            seen[action.stage] = -1
        for one in action.computations:
            assert seen[one.stage] >= 0 or one.kind not in BACKWARDS
            seen[one.stage] += one.kind in BACKWARDS
    assert all(seen[stage] == -1 for stage in set(backwards))


@given(LISTS, SIZES, st.integers(0, 50))
def test_a_stage_is_gathered_at_most_once_for_each_run_of_its_computations(
    actions: list[Action], sizes: dict[int, int], budget: int
) -> None:
    gathers = num_gathers(place(actions, sizes, budget))
    in_use = [action.stages for action in actions if action.stages]
    for stage in STAGES:
        runs = sum(here for here, _ in groupby(stage in stages for stages in in_use))
        assert gathers.get(stage, 0) <= runs
        if sum(sizes.values()) <= budget:
            assert gathers.get(stage, 0) == (runs > 0)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(STAGES), max_size=9), st.integers(1, 3))
def test_stages_of_one_size_are_gathered_as_seldom_as_can_be(order: list[int], room: int) -> None:
    actions = [Action(stage, "F", 0) for stage in order]
    placed = place(actions, dict.fromkeys(STAGES, 1), room)
    assert sum(num_gathers(placed).values()) == _fewest(tuple(order), frozenset(), room)


@cache
def _fewest(order: tuple[int, ...], held: frozenset[int], room: int) -> int:
    """Return the fewest gathers of any way to run `order`, by trying all."""
    if not order:
        return 0
    first, rest = order[0], order[1:]
    if first in held:
        return _fewest(rest, held, room)
    if len(held) < room:
        return 1 + _fewest(rest, held | {first}, room)
    kept = combinations(sorted(held), room - 1)
    return 1 + min(_fewest(rest, frozenset(some) | {first}, room) for some in kept)


# ----------------------------------------------------------------------------- schedules of torch's


def _loops(num_micro_batches: int, stages: Sequence[int]) -> list[Action]:
    """Breadth first: all forwards of one stage after another, then all backwards."""
    numbers = range(num_micro_batches)
    forwards = [Action(stage, "F", number) for stage in stages for number in numbers]
    backwards = [Action(stage, "B", number) for stage in reversed(stages) for number in numbers]
    return forwards + backwards


@given(st.integers(1, 8), st.integers(1, 4), SIZES)
def test_breadth_first_gathers_a_stage_at_most_twice_with_room_for_one(
    num_micro_batches: int, num_stages: int, sizes: Mapping[int, int]
) -> None:
    actions = _loops(num_micro_batches, range(num_stages))
    gathers = num_gathers(place(actions, sizes, max(sizes.values())))
    assert set(gathers.values()) <= {1, 2}
