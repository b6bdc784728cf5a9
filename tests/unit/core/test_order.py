"""The order of execution: pure functions over traces, and a simulated engine that must never
gather in vain.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.schedule.rules import Order, advance, fitting, to_evict

UNITS = "abcdef"
TRACES = st.lists(st.sampled_from(UNITS), min_size=1, max_size=20)
SIZES = st.fixed_dictionaries({unit: st.integers(0, 10) for unit in UNITS})
UNLIMITED = 10**9


def run_pass(order: Order[str], trace: list[str], *, phase: str = "forward") -> None:
    order.begin(phase)
    for unit in trace:
        order.record(phase, unit)


def next_predictions(
    order: Order[str], trace: list[str], *, phase: str = "forward"
) -> list[list[str]]:
    """Run a pass and return what is predicted after each unit, without a budget."""
    order.begin(phase)
    out = []
    for unit in trace:
        order.record(phase, unit)
        out.append(
            order.predict(
                phase, unit, sizes=dict.fromkeys(UNITS, 1), live_bytes=0, budget_bytes=UNLIMITED
            )
        )
    return out


# -- by example
# --------------------------------------------------------------------------------------------------


def test_the_first_pass_predicts_nothing() -> None:
    order: Order[str] = Order()
    assert next_predictions(order, list("abc")) == [[], [], []]
    assert order.upcoming("forward", "a") == []


def test_the_second_pass_predicts_what_follows() -> None:
    order: Order[str] = Order()
    run_pass(order, list("abcd"))
    assert next_predictions(order, list("abcd")) == [["b", "c", "d"], ["c", "d"], ["d"], []]


def test_phases_do_not_see_each_other() -> None:
    order: Order[str] = Order()
    run_pass(order, list("abc"), phase="forward")
    run_pass(order, list("cba"), phase="backward")
    assert next_predictions(order, list("cba"), phase="backward")[0] == ["b", "a"]
    assert next_predictions(order, list("abc"), phase="forward")[0] == ["b", "c"]


def test_a_unit_that_runs_twice_has_two_successors() -> None:
    order: Order[str] = Order()
    run_pass(order, list("abcbd"))
    assert next_predictions(order, list("abcbd")) == [
        ["b", "c", "d"],
        ["c", "d"],
        ["b", "d"],
        ["d"],
        [],
    ]


def test_skipped_units_are_skipped_at_once_and_unknown_units_predict_nothing() -> None:
    order: Order[str] = Order()
    run_pass(order, list("abcd"))
    assert next_predictions(order, list("acfd")) == [["b", "c", "d"], ["d"], [], []]


def test_a_changed_order_is_followed_from_the_next_pass_on() -> None:
    order: Order[str] = Order()
    run_pass(order, list("abcd"))
    run_pass(order, list("acbd"))
    assert next_predictions(order, list("acbd"))[0] == ["c", "b", "d"]


def test_a_pass_without_units_keeps_the_trace() -> None:
    order: Order[str] = Order()
    run_pass(order, list("ab"))
    order.begin("forward")
    assert next_predictions(order, list("ab"))[0] == ["b"]


def test_the_budget_counts_live_bytes_and_stops_at_the_first_unit_that_does_not_fit() -> None:
    order: Order[str] = Order()
    run_pass(order, list("abcd"))
    order.begin("forward")
    order.record("forward", "a")
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1}
    assert order.predict("forward", "a", sizes=sizes, live_bytes=4, budget_bytes=8) == ["b"]
    assert order.predict("forward", "a", sizes=sizes, live_bytes=4, budget_bytes=7) == []
    # d would fit, c comes first
    assert order.predict("forward", "a", sizes=sizes, live_bytes=4, budget_bytes=16) == ["b"]
    assert order.predict(
        "forward", "a", sizes=sizes, live_bytes=8, budget_bytes=17, is_live={"a", "b"}.__contains__
    ) == ["c"]


def test_a_prediction_may_be_asked_for_before_the_unit_is_recorded() -> None:
    order: Order[str] = Order()
    run_pass(order, list("abc"))
    order.begin("forward")
    assert order.predict(
        "forward", "a", sizes=dict.fromkeys(UNITS, 1), live_bytes=1, budget_bytes=2
    ) == ["b"]
    assert order.upcoming("forward", "a") == ["b", "c"]


def test_eviction_takes_what_is_not_expected_first_and_then_what_is_needed_last() -> None:
    sizes = dict.fromkeys(UNITS, 2)
    assert to_evict("abcf", list("abac"), sizes=sizes, excess_bytes=1) == ["f"]
    assert to_evict("abcf", list("abac"), sizes=sizes, excess_bytes=5) == ["f", "c", "b"]
    assert to_evict("abcf", list("abac"), sizes=sizes, excess_bytes=99) == ["f", "c", "b", "a"]
    assert to_evict("fe", list("abc"), sizes=sizes, excess_bytes=2) == ["f"]
    assert to_evict("abc", list("abc"), sizes=sizes, excess_bytes=0) == []


# -- properties
# --------------------------------------------------------------------------------------------------


@given(TRACES, st.integers(-1, 19), st.sampled_from(UNITS))
def test_advance_finds_the_next_run(trace: list[str], position: int, unit: str) -> None:
    later = [index for index, other in enumerate(trace) if index > position and other == unit]
    assert advance(trace, position, unit) == (later[0] if later else None)


@given(TRACES, st.integers(0, 20), SIZES, st.integers(-5, 40), st.sets(st.sampled_from(UNITS)))
def test_fitting_is_the_longest_prefix_within_the_budget(
    trace: list[str], start: int, sizes: dict[str, int], free_bytes: int, live: set[str]
) -> None:
    wanted = [unit for unit in dict.fromkeys(trace[start:]) if unit not in live]
    units = fitting(trace, start, sizes=sizes, free_bytes=free_bytes, is_live=live.__contains__)
    assert units == wanted[: len(units)]
    assert not units or sum(sizes[unit] for unit in units) <= free_bytes
    if len(units) < len(wanted):
        assert sum(sizes[unit] for unit in wanted[: len(units) + 1]) > free_bytes


@given(st.lists(st.sampled_from(UNITS), unique=True), TRACES, SIZES, st.integers(-5, 40))
def test_eviction_frees_enough_with_no_unit_too_many(
    prefetched: list[str], upcoming: list[str], sizes: dict[str, int], excess_bytes: int
) -> None:
    evicted = to_evict(prefetched, upcoming, sizes=sizes, excess_bytes=excess_bytes)
    kept = [unit for unit in prefetched if unit not in evicted]
    assert set(evicted) <= set(prefetched) and len(set(evicted)) == len(evicted)
    assert sum(sizes[unit] for unit in evicted) >= excess_bytes or not kept
    if evicted:
        assert sum(sizes[unit] for unit in evicted[:-1]) < excess_bytes

    def distance(unit: str) -> int:
        return upcoming.index(unit) if unit in upcoming else len(upcoming)

    assert all(distance(gone) >= distance(unit) for gone in evicted for unit in kept)


@given(st.lists(TRACES, min_size=1, max_size=4), TRACES, SIZES, st.integers(0, 40))
def test_a_repeated_pass_gathers_nothing_in_vain_and_keeps_the_budget(
    earlier: list[list[str]], trace: list[str], sizes: dict[str, int], budget_bytes: int
) -> None:
    """A small engine: gather what is missing, prefetch what is predicted, release what ran."""
    order: Order[str] = Order()
    for other in [*earlier, trace]:
        run_pass(order, other)
    order.begin("forward")
    live: set[str] = set()
    num_gathers = 0
    for index, unit in enumerate(trace):
        order.record("forward", unit)
        num_gathers += unit not in live
        live.add(unit)
        live_bytes = sum(sizes[other] for other in live)
        predicted = order.predict(
            "forward",
            unit,
            sizes=sizes,
            live_bytes=live_bytes,
            budget_bytes=budget_bytes,
            is_live=live.__contains__,
        )
        assert live.isdisjoint(predicted)
        assert set(predicted) <= set(trace[index + 1 :])
        assert (
            not predicted or live_bytes + sum(sizes[other] for other in predicted) <= budget_bytes
        )
        num_gathers += len(predicted)
        live.update(predicted)
        live.remove(unit)
    assert not live
    assert num_gathers <= len(trace)


@given(st.lists(TRACES, max_size=4), st.lists(st.sampled_from(UNITS), max_size=30), SIZES)
def test_any_sequence_of_calls_is_answered_with_known_units(
    earlier: list[list[str]], calls: list[str], sizes: dict[str, int]
) -> None:
    order: Order[str] = Order()
    for trace in earlier:
        run_pass(order, trace)
    order.begin("forward")
    known = set(earlier[-1]) if earlier else set()
    for unit in calls:
        order.record("forward", unit)
        predicted = order.predict(
            "forward", unit, sizes=sizes, live_bytes=0, budget_bytes=UNLIMITED
        )
        assert set(predicted) <= known - {unit}
        assert predicted == list(
            dict.fromkeys(other for other in order.upcoming("forward", unit) if other != unit)
        )
