"""What data parallel groups tell each other: one answer everywhere, or one error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from zeroshard.comm.other_axes import OtherAxes, ThroughGroups
from zeroshard.core.dims import Dims
from zeroshard.errors import ConfigError, PlanMismatch, StallError

Body = Callable[[OtherAxes, int], Any]


class _Met(ThroughGroups):
    """Peers that are threads."""

    def __init__(self, number: int, table: list[bytes], barrier: threading.Barrier) -> None:
        super().__init__()
        self._number, self._table, self._barrier = number, table, barrier

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        self._table[self._number] = payload
        self._barrier.wait(10)
        answers = list(self._table)
        self._barrier.wait(10)
        return answers


def _run(body: Body, *, pp: int = 2, tp: int = 1) -> list[Any]:
    """Return what `body` returns or raises at each place of a mesh (pp, dp 1, tp)."""
    dims, size = Dims.of(("pp", "dp", "tp"), (pp, 1, tp)), pp * tp
    table, barrier = [b""] * size, threading.Barrier(size)

    def one(number: int) -> Any:
        place = dims.place((number // tp, 0, number % tp))
        try:
            return body(OtherAxes(place, size, _Met(number, table, barrier)), number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_without_other_axes_nobody_is_asked() -> None:
    axes = OtherAxes.none()
    assert axes.share(float("nan"), "call")[0] != 0.0
    assert axes.add(0.1, "call", common={"a": "1"}) == 0.1
    assert axes.name("shared_memory") == "shared_memory"
    with pytest.raises(ConfigError, match="mine"), axes.telling("call"):
        raise ConfigError("mine")


def test_what_groups_count_is_added_in_mesh_order() -> None:
    squares = [0.1, 0.7, 0.2, 0.0]  # of (pp, tp): (0, 0), (0, 1), (1, 0), (1, 1)
    sums = _run(lambda axes, n: axes.add(squares[n], "norm", common={}), pp=2, tp=2)
    assert sums == [0.1 + 0.7 + 0.2] * 4
    infinite = _run(lambda axes, n: axes.add(float("inf") if n else 1.0, "norm", common={}))
    assert infinite == [float("inf")] * 2


def test_values_come_in_mesh_order() -> None:
    assert (
        _run(lambda axes, n: axes.share([n, "é"], "call"), pp=3)
        == [[[0, "é"], [1, "é"], [2, "é"]]] * 3
    )


def _mismatches(answers: list[Any]) -> set[str]:
    assert all(type(answer) is PlanMismatch for answer in answers), answers
    return {str(answer) for answer in answers}


def test_what_is_common_is_compared_along_every_axis() -> None:
    answers = _run(lambda axes, n: axes.share(None, "call", common={"x": "1", "y": str(n)}))
    (message,) = _mismatches(answers)
    assert message.startswith("y differs along the mesh (pp=0: 0; pp=1: 1)")


def test_what_is_alike_is_compared_between_replicas_alone() -> None:
    stages = _run(lambda axes, n: axes.share(None, "call", alike={"x": str(n // 2)}), pp=2, tp=2)
    assert stages == [[None] * 4] * 4
    # replicas of the second stage differ: told in both
    one = _run(lambda axes, n: axes.share(None, "call", alike={"x": str(n // 3)}), pp=2, tp=2)
    (message,) = _mismatches(one)
    assert message.startswith("x differs between replicas")
    assert "(pp=1, tp=0: 0; pp=1, tp=1: 1)" in message


def test_an_error_of_one_group_is_told_to_the_others() -> None:
    def body(axes: OtherAxes, number: int) -> Any:
        with axes.telling("call"):
            if number == 1:
                raise ConfigError("no such thing")
        return axes.share(None, "call")

    answers = _run(body, pp=3)
    assert type(answers[1]) is ConfigError
    told = _mismatches([answers[0], answers[2]])
    assert told == {"at pp=1 of the mesh: no such thing"}


def test_a_stall_is_not_told_since_peers_wait_in_vain_as_well() -> None:
    with (
        pytest.raises(StallError),
        OtherAxes(Dims.of(None, (1,)).place((0,)), 2, _Dead()).telling("call"),
    ):
        raise StallError("late")


class _Dead(ThroughGroups):
    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        raise AssertionError("nobody is there")
