"""The events of a step: who is called, and in which order."""

from __future__ import annotations

from functools import partial

import pytest

from zeroshard.runtime.events import StepEvents


def _call(events: StepEvents) -> None:
    for listener in (*events.before_step, *events.averaged, *events.after_step):
        listener()


def test_listeners_around_others_come_first_where_a_step_begins_and_last_where_it_ends() -> None:
    log: list[str] = []
    note = log.append
    events = StepEvents(
        before_step=[partial(note, "faults"), partial(note, "watch")],
        after_step=[partial(note, "heartbeat")],
    )
    trace = StepEvents(
        before_step=[partial(note, "enter")],
        averaged=[partial(note, "averaged")],
        after_step=[partial(note, "leave")],
    )
    with events.around(trace):
        _call(events)
    assert log == ["enter", "faults", "watch", "averaged", "heartbeat", "leave"]
    log.clear()
    _call(events)
    assert log == ["faults", "watch", "heartbeat"]


def test_a_listener_that_comes_while_others_are_around_stays() -> None:
    log: list[str] = []
    events = StepEvents(after_step=[partial(log.append, "first")])
    with (
        pytest.raises(ValueError, match="inside"),
        events.around(StepEvents(after_step=[partial(log.append, "trace")])),
    ):
        events.after_step.append(partial(log.append, "later"))
        raise ValueError("inside")
    _call(events)
    assert log == ["first", "later"]
