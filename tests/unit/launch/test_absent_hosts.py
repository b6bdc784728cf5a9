"""Hosts that were lost are asked whether they are back."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from zeroshard.launch import hosts
from zeroshard.launch.connection import Connection
from zeroshard.launch.hosts import AbsentHosts
from zeroshard.launch.options import Host
from zeroshard.terminal import UsageError

ONE, TWO = Host("one", (0,), 1), Host("two", (0, 1), 2)


class _Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(hosts, "time", clock)
    return clock


class _Asked:
    """A connection that a test lets answer."""

    def __init__(self, host: Host, begun_at: float) -> None:
        self.host, self.begun_at = host, begun_at
        self.is_open, self.has_greeted = True, False

    @property
    def is_silent(self) -> bool:
        return self.is_open and not self.has_greeted

    def close(self) -> None:
        self.is_open = False


class _Network:
    """The connections that were started."""

    def __init__(self, clock: _Clock) -> None:
        self.clock, self.started = clock, list[_Asked]()

    def connect(self, host: Host) -> Connection:
        self.started.append(_Asked(host, self.clock.now))
        return cast(Any, self.started[-1])

    @property
    def names(self) -> list[str]:
        return [one.host.name for one in self.started]


def test_a_lost_host_is_asked_until_it_answers_and_over_one_connection_at_a_time(
    clock: _Clock,
) -> None:
    network = _Network(clock)
    absent = AbsentHosts(10, 90, network.connect)
    assert absent.ask() == math.inf
    absent.add(ONE)
    assert absent.ask() == 110 and not network.started
    clock.now = 110
    assert absent.ask() == 120 and network.names == ["one"]
    clock.now = 120
    absent.ask()
    assert network.names == ["one"] and not absent.back  # it may still answer
    network.started[0].close()  # refused
    clock.now = 130
    absent.ask()
    assert network.names == ["one", "one"]
    network.started[1].has_greeted = True
    clock.now = 300
    absent.ask()
    assert network.names == ["one", "one"]
    assert absent.back == [network.started[1]]
    network.started[1].close()  # lost again, while it waited
    clock.now = 310
    absent.ask()
    assert network.names == ["one"] * 3 and not absent.back


def test_one_that_runs_ssh_and_does_not_answer_is_given_up_and_asked_again(clock: _Clock) -> None:
    network = _Network(clock)
    absent = AbsentHosts(60, 90, network.connect)
    absent.add(ONE)
    for clock.now in (160, 220, 249):
        absent.ask()
    assert network.names == ["one"] and network.started[0].is_open
    assert absent.ask() == 250
    clock.now = 250
    absent.ask()
    assert not network.started[0].is_open
    clock.now = 280
    absent.ask()
    assert network.names == ["one", "one"]


def test_one_that_takes_part_is_asked_no_more_and_lost_again_half_as_often(clock: _Clock) -> None:
    network = _Network(clock)
    absent = AbsentHosts(10, 90, network.connect)
    absent.add(ONE)
    absent.add(TWO)
    clock.now = 110
    absent.ask()
    network.started[0].has_greeted = True
    absent.take(absent.back)
    network.started[1].close()
    clock.now = 120
    absent.ask()
    assert network.names == ["one", "two", "two"] and not absent.back
    absent.add(ONE)
    assert absent.ask() == 140
    absent.close()
    assert not network.started[2].is_open and network.started[0].is_open


def test_with_0_nobody_is_asked_and_no_ssh_is_no_answer(clock: _Clock) -> None:
    network = _Network(clock)
    never = AbsentHosts(0, 90, network.connect)
    never.add(ONE)
    assert never.ask() == math.inf

    def connect(host: Host) -> Connection:
        raise UsageError("--ssh: not found")

    absent = AbsentHosts(10, 90, connect)
    absent.add(ONE)
    clock.now = 110
    assert absent.ask() == 120 and not absent.back
