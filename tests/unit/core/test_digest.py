"""Equal histories give equal digests; another unit, shape, dtype, order or step does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zeroshard.core.digest import Digest, first_difference, holders

ALL, SOME = (0, 1, 2, 3), (0, 2)


@dataclass(frozen=True)
class Call:
    operation: str = "gather"
    unit: str = "blocks.0"
    dtype: str = "bf16"
    numel: int = 640
    ordered: bool = True


CALLS = st.lists(
    st.builds(
        Call,
        operation=st.sampled_from(["gather", "reduce"]),
        unit=st.sampled_from([f"blocks.{index}" for index in range(12)]),
        numel=st.sampled_from([64, 128, 640]),
        ordered=st.booleans(),
    ),
    max_size=12,
)


def digest(calls: list[Call], *, step: int = 0) -> Digest:
    out = Digest()
    for _ in range(step):
        out.advance()
    for call in calls:
        out.fold(call.operation, call.unit, call.dtype, call.numel, ALL, ordered=call.ordered)
    return out


@given(CALLS, st.integers(0, 3))
def test_equal_histories_give_equal_digests_of_64_bits(calls: list[Call], step: int) -> None:
    value = digest(calls, step=step).value(ALL)
    assert value == digest(calls, step=step).value(ALL)
    assert 0 <= value < 1 << 64


@pytest.mark.parametrize(
    "change",
    [
        {"operation": "reduce"},
        {"unit": "blocks.1"},
        {"dtype": "fp32"},
        {"numel": 704},
        {"ordered": False},
    ],
    ids=str,
)
def test_every_field_counts(change: dict[str, object]) -> None:
    call = Call()
    assert digest([call]).value(ALL) != digest([replace(call, **change)]).value(ALL)  # type: ignore[arg-type]


def test_reduces_in_order_are_part_of_the_set_as_well() -> None:
    calls = [Call(operation="reduce", unit=f"blocks.{number}") for number in range(2)]
    forth, back = digest(calls), digest(calls[::-1])
    assert forth.value(ALL) != back.value(ALL)
    assert forth.reduced() == back.reduced() != digest(calls[:1]).reduced()


def test_an_order_is_that_of_the_collectives_among_the_same_ranks() -> None:
    of_all, of_some = Call(), [Call(unit="experts.0"), Call(unit="experts.1")]

    def folded(calls: list[Call]) -> Digest:
        out = Digest()
        for call in calls:
            among = SOME if "experts" in call.unit else ALL
            out.fold(call.operation, call.unit, call.dtype, call.numel, among, ordered=True)
        return out

    one, other = folded([of_all, *of_some]), folded([*of_some[::-1], of_all])
    assert one.value(ALL) == other.value(ALL)
    assert one.value(SOME) != other.value(SOME)
    assert one.log(ALL) == ["gather blocks.0 bf16 640"] and len(one.log(SOME)) == 2


def test_the_step_counts_and_starts_anew() -> None:
    assert digest([Call()], step=1).value(ALL) != digest([Call()]).value(ALL)
    run = digest([Call()])
    run.advance()
    assert (run.log(ALL), run.value(ALL)) == ([], digest([], step=1).value(ALL))


def test_what_is_entered_last_is_known_with_its_step_and_changes_no_digest() -> None:
    run = digest([Call()], step=2)
    run.enter("backward", "blocks.1")
    event, unit, step, at = run.entered
    assert (event, unit, step) == ("backward", "blocks.1", 2) and at <= monotonic()
    run.advance()
    assert run.entered[2] == 2 and run.value(ALL) == digest([], step=3).value(ALL)


@given(CALLS, CALLS)
def test_histories_differ_as_their_logs_do(first: list[Call], second: list[Call]) -> None:
    one, other = digest(first), digest(second)
    assume(one.log(ALL) != other.log(ALL))
    assert one.value(ALL) != other.value(ALL)


@given(CALLS, st.randoms(use_true_random=False))
def test_what_is_folded_as_a_set_may_come_in_any_order(calls: list[Call], random: object) -> None:
    calls = [replace(call, ordered=False) for call in calls]
    shuffled = list(calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert digest(calls).value(ALL) == digest(shuffled).value(ALL)
    assert digest(calls).log(ALL) == digest(shuffled).log(ALL)


def test_what_is_folded_in_order_may_not() -> None:
    calls = [Call(unit="blocks.0"), Call(unit="blocks.1")]
    assert digest(calls).value(ALL) != digest(calls[::-1]).value(ALL)


def test_a_unit_that_comes_twice_is_not_one_that_never_comes() -> None:
    call = Call(ordered=False)
    assert len({digest([call] * count).value(ALL) for count in range(4)}) == 4


def test_a_history_without_end_keeps_a_log_of_bounded_length_and_still_tells_differences() -> None:
    long, other = digest([Call()]), digest([Call(unit="blocks.1")])
    for _ in range(1 << 16):
        long.fold("gather", "blocks.2", "bf16", 64, ALL, ordered=True)
        other.fold("gather", "blocks.2", "bf16", 64, ALL, ordered=True)
    assert len(long.log(ALL)) == 1 << 16
    assert long.value(ALL) != other.value(ALL)


def test_the_first_difference_is_found_and_a_log_that_ended_is_said() -> None:
    assert first_difference([["a", "b"], ["a", "c"]]) == (1, ["b", "c"])
    assert first_difference([["a", "b"], ["a"], ["a", "b"]]) == (1, ["b", "nothing", "b"])
    assert first_difference([["a"], ["a"]]) == (1, ["the same", "the same"])


def test_who_holds_what_is_said_once_per_entry() -> None:
    assert holders(["a", "b", "a"]) == "ranks 0, 2: a; rank 1: b"
