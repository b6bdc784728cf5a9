"""Ranks that act together: one answer on every rank, or one error on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from zeroshard.comm.device_mesh import Dims
from zeroshard.comm.ranks import AlongAxes, Exchange, Ranks
from zeroshard.errors import (
    CheckpointError,
    ConfigError,
    PeerLostError,
    PlanMismatch,
    StallError,
    StorageError,
)

R = TypeVar("R", bound=Ranks)


def _together(size: int, make: Callable[[int, Exchange], R], body: Callable[[R], Any]) -> list[Any]:
    """Return what `body` returns or raises on each of `size` ranks, which are threads."""
    table, barrier = [b""] * size, threading.Barrier(size)

    def one(rank: int) -> Any:
        def exchange(payload: bytes, call: str) -> list[bytes]:
            table[rank] = payload
            barrier.wait(300)
            answers = list(table)
            barrier.wait(300)
            return answers

        try:
            return body(make(rank, exchange))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def _run(body: Callable[[Ranks], Any], size: int = 3) -> list[Any]:
    return _together(size, lambda rank, exchange: Ranks(rank, size, exchange), body)


def _run_along(body: Callable[[AlongAxes, int], Any], *, pp: int = 2, tp: int = 1) -> list[Any]:
    """Return what `body` returns or raises at each place of a mesh (pp, dp 1, tp)."""
    dims, size = Dims.of(("pp", "dp", "tp"), (pp, 1, tp)), pp * tp

    def make(number: int, exchange: Exchange) -> AlongAxes:
        place = dims.place((number // tp, 0, number % tp))
        return AlongAxes(dims.places, place, Ranks(number, size, exchange))

    return _together(size, make, lambda axes: body(axes, axes.rank))


def _nobody(payload: bytes, call: str) -> list[bytes]:
    raise AssertionError("nobody is asked")


def _mismatches(answers: list[Any]) -> set[str]:
    assert all(type(answer) is PlanMismatch for answer in answers), answers
    return {str(answer) for answer in answers}


# ------------------------------------------------------------------------------ agree and share


def test_every_rank_has_every_value_in_rank_order() -> None:
    assert (
        _run(lambda ranks: ranks.share([ranks.rank, "é"], "call"))
        == [[[0, "é"], [1, "é"], [2, "é"]]] * 3
    )
    assert _run(lambda ranks: ranks.agree({"a": "1"}, "call", value=ranks.rank)) == [[0, 1, 2]] * 3
    assert Ranks().share(7, "call") == Ranks().agree({"a": "1"}, "call", value=7) == [7]


def test_the_first_difference_is_named_with_who_holds_what() -> None:
    def body(ranks: Ranks) -> None:
        report = {"same": "1", "x": str(ranks.rank // 2), "y": str(ranks.rank)}
        ranks.agree(report, "call", remedy="Set it alike")

    assert _mismatches(_run(body)) == {
        "the ranks disagree, first about 'x': ranks 0, 1: x = 0; rank 2: x = 1. Set it alike"
    }


def test_an_entry_that_a_rank_lacks_is_a_difference() -> None:
    (message,) = _mismatches(_run(lambda ranks: ranks.agree({"x": "1"} if ranks.rank else {}, "c")))
    assert message.endswith("rank 0: nothing; ranks 1, 2: x = 1")


def test_entries_within_groups_are_compared_inside_each() -> None:
    groups = ((0, 2), (1, 3))

    def body(ranks: Ranks, wrong: int) -> Any:
        report = {"x": str(ranks.rank % 2 if ranks.rank != wrong else 7), "y": "1"}
        return ranks.agree(report, "call", within={"x": groups})

    assert _run(lambda ranks: body(ranks, -1), 4) == [[None] * 4] * 4
    (message,) = _mismatches(_run(lambda ranks: body(ranks, 3), 4))
    assert message == "the ranks disagree, first about 'x': rank 1: x = 1; rank 3: x = 7"


def test_an_error_of_one_rank_is_told_before_any_difference() -> None:
    def body(ranks: Ranks, refusal: type[Any]) -> None:
        error = ConfigError("no such row") if ranks.rank == 1 else None
        ranks.agree({"x": str(ranks.rank)}, "call", error=error, refusal=refusal)

    told = _run(lambda ranks: body(ranks, PlanMismatch))
    assert type(told[1]) is ConfigError and str(told[1]) == "no such row"
    assert _mismatches([told[0], told[2]]) == {"rank 1 refused: no such row"}
    told = _run(lambda ranks: body(ranks, StorageError))
    assert [(type(one), str(one)) for one in (told[0], told[2])] == [
        (StorageError, "rank 1: no such row")
    ] * 2


# ------------------------------------------------------------------------------ together


def test_what_is_done_together_gives_all_values_at_its_end() -> None:
    def body(ranks: Ranks) -> list[Any]:
        with ranks.together("call") as meeting:
            meeting.give(ranks.rank)
            assert meeting.answers == []
        return meeting.answers

    assert _run(body) == [[0, 1, 2]] * 3


def test_what_fails_on_one_rank_fails_on_all_and_keeps_its_cause_there() -> None:
    def body(ranks: Ranks) -> None:
        with ranks.together("call", "step 3 cannot be read", refusal=CheckpointError):
            if ranks.rank == 1:
                raise OSError("disk on fire")

    told = _run(body)
    assert {type(one) for one in told} == {CheckpointError}
    assert str(told[1]) == "step 3 cannot be read: OSError: disk on fire"
    assert type(told[1].__cause__) is OSError
    assert [str(told[0]), str(told[2])] == [f"rank 1: {told[1]}"] * 2


def test_errors_of_several_ranks_are_their_own_and_the_first_elsewhere() -> None:
    def body(ranks: Ranks) -> None:
        with ranks.together("call", remedy="not shown"):
            if ranks.rank:
                raise ConfigError(f"mine is {ranks.rank}")

    told = _run(body)
    assert _mismatches(told[:1]) == {"rank 1 refused: mine is 1"}
    assert [str(one) for one in told[1:]] == ["mine is 1", "mine is 2"]


def test_a_difference_at_the_end_is_an_error_on_every_rank() -> None:
    def body(ranks: Ranks) -> None:
        with ranks.together("call", remedy="Set it alike") as meeting:
            meeting.compare({"x": "1"})
            meeting.compare({"y": str(ranks.rank)}, ((0, 1), (2,)))

    assert _mismatches(_run(body)) == {
        "the ranks disagree, first about 'y': rank 0: y = 0; rank 1: y = 1. Set it alike"
    }


@pytest.mark.parametrize("error", [PeerLostError("gone"), StallError("late"), ValueError("odd")])
def test_of_a_lost_peer_and_of_no_zeroshard_error_nobody_is_told(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, Ranks(0, 2, _nobody).together("call"):
        raise error
    assert raised.value is error


def test_its_own_error_counts_where_the_others_cannot_be_told() -> None:
    def refused(payload: bytes, call: str) -> list[bytes]:
        raise PlanMismatch("different calls")

    with pytest.raises(ConfigError, match="mine"), Ranks(0, 2, refused).together("call"):
        raise ConfigError("mine")


# ------------------------------------------------------------------------------ along the axes


def test_without_other_axes_nobody_is_asked() -> None:
    axes = AlongAxes(ranks=Ranks(0, 2, _nobody))
    with axes.together("call") as meeting:
        meeting.give(float("nan"))
        meeting.compare({"a": "1"}, axes.replicas)
    assert meeting.answers[0] != 0.0
    assert axes.name("shared_memory") == "shared_memory"
    with pytest.raises(ConfigError, match="mine"), axes.together("call"):
        raise ConfigError("mine")


def test_what_is_common_is_compared_along_every_axis() -> None:
    answers = _run_along(lambda axes, n: axes.agree({"x": "1", "y": str(n)}, "call"))
    assert _mismatches(answers) == {
        "y differs along the mesh (pp=0: 0; pp=1: 1): set it alike on every rank"
    }


def test_what_is_alike_is_compared_between_replicas_alone() -> None:
    def body(axes: AlongAxes, text: int) -> Any:
        return axes.agree({"x": str(text)}, "call", within={"x": axes.replicas})

    assert _run_along(lambda axes, n: body(axes, n // 2), pp=2, tp=2) == [[None] * 4] * 4
    # replicas of the second stage differ: told in both
    (message,) = _mismatches(_run_along(lambda axes, n: body(axes, n // 3), pp=2, tp=2))
    assert message.startswith("x differs between replicas")
    assert "(pp=1, tp=0: 0; pp=1, tp=1: 1)" in message


def test_groups_may_have_entries_that_others_have_not() -> None:
    def body(axes: AlongAxes, pp: int, wrong: bool) -> Any:
        report = {"settings": "1"} | {f"stage {pp}, unit {unit}": "2" for unit in range(pp + 1)}
        report[f"stage {pp}, unit 0"] = "3" if wrong else "2"
        return axes.agree(report, "call", within=dict.fromkeys(list(report)[1:], axes.replicas))

    assert _run_along(lambda axes, n: body(axes, n // 2, False), tp=2) == [[None] * 4] * 4
    (message,) = _mismatches(_run_along(lambda axes, n: body(axes, n // 2, n == 3), tp=2))
    assert message.startswith("stage 1, unit 0 differs between replicas")


def test_an_error_of_one_group_is_told_to_the_others() -> None:
    def body(axes: AlongAxes, number: int) -> Any:
        with axes.together("call"):
            if number == 1:
                raise ConfigError("no such thing")

    answers = _run_along(body, pp=3)
    assert type(answers[1]) is ConfigError
    told = _mismatches([answers[0], answers[2]])
    assert told == {"at pp=1 of the mesh: no such thing"}
