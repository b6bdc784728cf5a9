"""A trace by events of a device, with events of a fake one: what is recorded while the host runs
ahead is read at the end, on one clock with the host's.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from zeroshard.core.timeline import Event
from zeroshard.core.work import DoneWork, Operation
from zeroshard.memory import MemoryCounter
from zeroshard.runtime.trace import DeviceClock, Trace

DEVICE = torch.device("cpu")


class _Device:
    """A device's module: its streams are reached `ms` after the origin, which tests move."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.host_waits = 0
        self.Event = lambda enable_timing: _Event(self)

    def current_stream(self, device: torch.device) -> str:
        return "compute"

    def synchronize(self, device: torch.device) -> None:
        self.host_waits += 1


class _Event:
    def __init__(self, device: _Device) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        self.ms = self.device.ms

    def synchronize(self) -> None:
        self.device.host_waits += 1

    def elapsed_time(self, other: _Event) -> float:
        return other.ms - self.ms


class _Accounts:
    def report(self) -> Any:
        return self

    tiers = {"weight": {"device": 8}}


def _trace(device: _Device) -> Trace:
    accounts: Any = _Accounts()
    return Trace(DeviceClock(DEVICE, device), [], accounts, MemoryCounter())


def test_lanes_and_the_wait_of_compute_are_events_that_the_host_reads_at_the_end() -> None:
    device = _Device()
    trace = _trace(device)
    waits_before = device.host_waits
    trace.enter("forward", "")
    since = trace.now()
    device.ms = 5.0
    gather = Operation("gather", "all_gather", "unit:float32", 64.0)
    work = trace.watch(DoneWork(), gather, since)
    assert isinstance(work, DoneWork)  # the lane orders what follows
    mark = object()
    trace.marked(mark)
    device.ms = 2.0  # compute is not as far as the lane
    join = trace.now()
    device.ms = 5.0
    trace.joined(mark, join)
    device.ms = 9.0
    trace.leave()
    assert device.host_waits == waits_before
    timeline = trace.finish(3, 1.5, {})
    assert device.host_waits > waits_before
    assert (timeline.rank, timeline.origin) == (3, 1.5)
    rounded = [
        Event(e.lane, e.name, e.unit, round(e.start, 6), round(e.duration, 6), e.num_bytes)
        for e in timeline.events
    ]
    assert rounded == [
        Event("compute", "forward", "", 0.0, 0.002),
        Event("compute", "wait for gather", "", 0.002, 0.003),
        Event("compute", "forward", "", 0.005, 0.004),
        Event("gather", "all_gather", "", 0.0, 0.005, 64.0),
    ]


def test_what_the_host_does_itself_is_on_the_same_clock() -> None:
    trace = _trace(_Device())
    since = time.perf_counter()
    trace.note(Operation("host", "step", "unit:float32"), since)
    (event,) = trace.finish(0, 0.0, {}).events
    assert event.lane == "host" and 0.0 <= event.start < 60.0


def test_reads_in_pieces_last_from_the_first_to_the_last() -> None:
    trace = _trace(_Device())
    calls: list[Any] = []
    run = trace.by_pieces(
        lambda *piece: calls.append(piece), 3, Operation("tier read", "read", "", 9)
    )
    for piece in range(3):
        assert not trace.finish(0, 0.0, {}).events
        run(piece, None)
    (event,) = trace.finish(0, 0.0, {}).events
    assert event.num_bytes == 9 and calls == [(0, None), (1, None), (2, None)]
