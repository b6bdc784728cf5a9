"""Record for ``engine.trace(directory)``: the events and levels of core/timeline.py, measured.

A `Trace` is the Recording (core/work.py) that is put into the probes of one engine for as long
as the context lasts::

    what it listens to                               what becomes of it
    the events of a step (events.py)                 the parts of compute, by unit
    operations of flights (flight.py)                collectives, from start to end, with bytes
    tier/stores.py, tier/disk.py                       reads and writes, with bytes
    optim/runner.py                                  tiles stepped on the host
    a Work that is waited for, `Probe.waiting`       "wait for LANE"; it cuts the part of compute
    any of these                                     a level of memory, where it has changed

Times are of the host's clock on the CPU. The end of a collective that goes on by itself is taken
where it is seen first: at its wait, or at the next part of compute once the transport has noted
that it is over (nobody asks the transport to make progress for the trace's sake). On an accelerator
they are events recorded on the lanes' own streams and read when the trace ends; the host waits for
the device at the beginning and at the end of the trace, never inside. That part has run on the
pretended device of the tests, and on no other.

Operations of one lane that are under way together are written one after another, each from the end
of the one before: what a lane can do for the later one until then is wait, too.

Invariant: it changes neither what is done nor in which order. Cost: a few appends per unit and
direction; nothing while no trace is on but to see that none is. What it does not do: it does not
see what is not the engine's (data loading, other collectives), which stays a gap.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.cpu.control import PeerOperation as Collective
from zeroshard.core.placement import Tier
from zeroshard.core.timeline import LANES, WAIT, Event, Level, Timeline
from zeroshard.core.work import DoneWork, Operation, Probe, Stamp, Work
from zeroshard.errors import StateError, StorageError
from zeroshard.memory import MemoryCounter
from zeroshard.runtime.context import Context
from zeroshard.runtime.events import StepEvents, storing
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.reports import Accounts
from zeroshard.runtime.streams import AcceleratorStreams
from zeroshard.runtime.unit import Unit
from zeroshard.system.safe_files import replacing

# ------------------------------------------------------------------------------------ memory levels
# What rests is counted anew where a forward begins, a backward is over and a step is taken; in
# between, each gradient that begins to rest adds its own bytes, and what is gathered or in buffers
# is asked of its counter. States on another tier than the device are named so: "optimizer (host)".
#
# Cost: a level per change; the counts walk over all segments, three times a step.

# after the name of a state
_PLACES = {tier: f" ({tier.value})" for tier in Tier} | {Tier.DEVICE: ""}


class MemoryLevels:
    """The bytes of one rank by state over time, while a trace is on."""

    def __init__(
        self,
        units: Sequence[Unit],
        accounts: Accounts,
        meter: MemoryCounter,
        now: Callable[[], Stamp],
    ) -> None:
        """`meter` counts the bytes that are gathered or in buffers, `now` is the clock."""
        self._now = now
        self._accounts = accounts
        self._meter = meter
        self._buckets = {one.key: one for unit in units for one in unit.buckets}
        self._noted: list[tuple[Stamp, dict[str, float]]] = []
        self._resting: dict[str, float] = {}
        self._grads: dict[str, Mapping[Tier, int]] = {}  # at rest, by key
        self._used = -1  # in the last level
        self.count()

    def count(self) -> None:
        """Count anew what rests."""
        self._resting = {
            f"{state}{_PLACES[Tier(tier)]}": float(num_bytes)
            for state, by_tier in self._accounts.report().tiers.items()
            for tier, num_bytes in by_tier.items()
        }
        self._grads = {key: bucket.bytes_by_tier() for key, bucket in self._buckets.items()}
        self._note()

    def reduced(self, key: str) -> None:
        """A reduce of the gradient of `key` has been started: note the bytes that rest since."""
        before, by_tier = self._grads[key], self._buckets[key].bytes_by_tier()
        if by_tier == before:
            return
        self._grads[key] = by_tier
        for tier in {*before, *by_tier}:
            state = f"grad{_PLACES[tier]}"
            more = by_tier.get(tier, 0) - before.get(tier, 0)
            self._resting[state] = self._resting.get(state, 0.0) + more
        self._note()

    def look(self) -> None:
        """Note what is gathered and in buffers, where that has changed."""
        if self._meter.used != self._used:
            self._note()

    def _note(self) -> None:
        self._used = self._meter.used
        self._noted.append((self._now(), {**self._resting, "gathered": float(self._used)}))

    def read(self, seconds: Callable[[Stamp], float]) -> Iterator[Level]:
        """Yield every level, each with all the states there are; `seconds` reads a stamp."""
        states = sorted({state for _, level in self._noted for state in level})
        for stamp, level in self._noted:
            yield Level(max(0.0, seconds(stamp)), {one: level.get(one, 0.0) for one in states})


# -------------------------------------------------------------------------------------------- trace

_log = logging.getLogger("zeroshard")
_SHORTEST_S = 1e-6  # of a part of compute, or a wait, that is written down


class Clock:
    """The host's clock: stamps are seconds, which every clock understands."""

    by_events = False  # whether the lanes run by themselves, so that the host's waits mean nothing

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def now(self) -> Stamp:
        """Return the time on the lane that is current."""
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        """Return how long after the clock was made `stamp` was; may wait for the device."""
        return float(stamp) - self._begun


class DeviceClock(Clock):
    """Events on whatever stream of an accelerator is current."""

    by_events = True

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """`module`: torch's, for the device's type."""
        self._module = torch.get_device_module(device) if module is None else module
        self._device = device
        self._origin = self.now()
        self._module.synchronize(device)
        super().__init__()  # now that the device has reached the origin

    def now(self) -> Stamp:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return super().seconds(stamp)
        stamp.synchronize()
        return float(self._origin.elapsed_time(stamp)) / 1e3


class _Watched:
    """A Work; a trace notes its end, and the time that compute waits for it."""

    __slots__ = ("_operation", "_since", "_trace", "_work", "has_ended")

    def __init__(self, trace: Trace, work: Work, operation: Operation, since: Stamp) -> None:
        self.has_ended = False
        self._trace = trace
        self._work = work
        self._operation = operation
        self._since = since

    def wait(self) -> None:
        if self.has_ended:
            self._work.wait()
            return
        waits = not (self._trace.by_events or self._is_over())
        since = self._trace.now()
        self._work.wait()
        self.end()
        if waits:
            self._trace.waited(self._operation.lane, self._operation.key, since)

    def done(self) -> bool:
        if not self._work.done():
            return False
        self.end()
        return True

    def look(self) -> bool:
        """Note the end if it is known, without making progress; return whether it has ended."""
        if not self.has_ended and not self._trace.by_events and self._is_over():
            self.end()
        return self.has_ended

    def _is_over(self) -> bool:
        work = self._work
        if isinstance(work, Collective):
            return work.is_over()
        return self._operation.lane.startswith("tier") and work.done()

    def end(self) -> None:
        """Note that it ends now, unless its end is known."""
        if not self.has_ended:
            self.has_ended = True
            if self._operation.name:
                self._trace.note(self._operation, self._since)


class Trace:
    """A trace under way."""

    def __init__(
        self, clock: Clock, units: Sequence[Unit], accounts: Accounts, meter: MemoryCounter
    ) -> None:
        """`meter` counts the bytes that are gathered or in buffers."""
        self.num_steps = 0
        self.by_events, self.now = clock.by_events, clock.now
        self._clock = clock
        self._units = {segment.key: unit.name for unit in units for segment in unit.segments}
        # lane, name, unit, begin, end, bytes
        self._events: list[tuple[str, str, str, Stamp, Stamp, float]] = []
        self._under_way: list[_Watched] = []
        # what compute is doing, the innermost last, and since when
        self._parts: list[tuple[str, str]] = []
        self._since: Stamp = clock.now()
        self._marked: dict[int, tuple[object, Operation]] = {}
        self._last: Operation | None = None  # of the gather and reduce lanes
        self._levels = MemoryLevels(units, accounts, meter, clock.now)

    # ------------------------------------------------------------------ what lanes do

    def watch(self, work: Work, operation: Operation, since: Stamp) -> Work:
        self._last = operation
        if operation.lane == "reduce":
            self._levels.reduced(operation.key)
        self._levels.look()
        if isinstance(work, DoneWork):
            if operation.name:
                self.note(operation, since)
            return work
        watched = _Watched(self, work, operation, since)
        if not watched.look():
            self._under_way.append(watched)
        return watched

    def note(self, operation: Operation, since: Stamp) -> None:
        until = time.perf_counter() if isinstance(since, float) else self.now()
        lane, unit, num_bytes = operation.lane, self._unit(operation.key), operation.num_bytes
        self._events.append((lane, operation.name, unit, since, until, num_bytes))

    def by_pieces(
        self, run: Callable[..., None], num_pieces: int, operation: Operation
    ) -> Callable[..., None]:
        begun: list[float] = []
        lock, left = threading.Lock(), [num_pieces]

        def timed(piece: Any, scratch: Any) -> None:
            begun.append(time.perf_counter())
            try:
                run(piece, scratch)
            finally:
                with lock:
                    left[0] -= 1
                if not left[0]:
                    self.note(operation, begun[0])

        return timed

    def _unit(self, key: str) -> str:
        # of a state of a segment: "KEY master"
        return self._units.get(key) or self._units.get(key.rpartition(" ")[0], "")

    # ------------------------------------------------------------------ what compute waits for

    @contextmanager
    def waiting(self, lane: str, key: str) -> Iterator[None]:
        since = self.now()
        yield
        self.waited(lane, key, since)

    def waited(self, lane: str, key: str, since: Stamp) -> None:
        """Compute has waited since then, until now, for what `lane` does for `key`."""
        now = self.now()
        if isinstance(since, float) and isinstance(self._since, float):
            since = max(since, self._since)  # a wait inside it is noted already
        self._cut(since)
        self._events.append(("compute", f"{WAIT}{lane}", self._unit(key), since, now, 0.0))
        self._since = now
        self._levels.look()

    def marked(self, event: object) -> None:
        if self._last is not None:
            self._marked[id(event)] = (event, self._last)

    def joined(self, event: object, since: Stamp) -> None:
        _, operation = self._marked.pop(id(event), (None, None))
        if operation is not None:
            self.waited(operation.lane, operation.key, since)

    # ------------------------------------------------------------------ what compute does

    def listeners(self) -> StepEvents:
        """Return what listens to the events of a step."""
        at_its_end = torch.autograd.Variable._execution_engine.queue_callback
        return StepEvents(
            before_forward=[partial(self.enter, "forward")],
            after_forward=[self.leave],
            before_module=[lambda units: self.enter("forward", units[0].name)],
            after_module=[self.leave],
            before_backward=[lambda units: self.turn("backward", units[0].name)],
            # when the callback comes to its turn, the engine's own is over, too
            after_backward=[partial(at_its_end, self._end_backward)],
            before_step=[partial(self.enter, "step")],
            after_step=[self.leave],
        )

    def enter(self, name: str, unit: str = "") -> None:
        """Compute begins a part ("forward", "backward", "step") inside what it is doing."""
        part, parts = (name, unit), self._parts
        if parts and parts[-1] == part:  # a module inside the unit's own
            parts.append(part)
            return
        self._pass()
        if not unit and torch._C._current_graph_task_id() < 0:  # the model's forward, or the step
            parts.clear()
            if name == "forward":
                self._levels.count()
        parts.append(part)

    def turn(self, name: str, unit: str) -> None:
        """Compute goes on from one unit to another in part `name`, which begins if it is not the
        current one.
        """
        part, parts = (name, unit), self._parts
        if parts and parts[-1] == part:
            return
        self._pass()
        if parts and parts[-1][0] == name:
            parts.pop()
        parts.append(part)

    def leave(self) -> None:
        """Compute goes back to what it did before the last `enter`."""
        parts = self._parts
        if not parts:
            return  # begun before the trace
        if parts[-2:-1] == parts[-1:]:
            parts.pop()
            return
        self._pass()
        name, _ = parts.pop()
        if name == "step":
            self.num_steps += 1
            self._levels.count()

    def _end_backward(self) -> None:
        """Leave the part that `turn` has begun."""
        if self._parts and self._parts[-1][0] == "backward":
            self._pass()
            self._parts.pop()
            self._levels.count()

    def _pass(self) -> None:
        """Compute comes to another part: what is there to see is looked at."""
        now = self.now()
        self._cut(now)
        self._since = now
        if self._under_way:
            self._under_way = [watched for watched in self._under_way if not watched.look()]
        self._levels.look()

    def _cut(self, at: Stamp) -> None:
        """End the part of compute that goes on, which may go on afterwards."""
        if self._parts:
            self._events.append(("compute", *self._parts[-1], self._since, at, 0.0))

    # ------------------------------------------------------------------ the end

    def finish(self, rank: int, origin: float, labels: Mapping[str, str]) -> Timeline:
        """Return what has been recorded, times in seconds since `origin`, seconds of the epoch."""
        self._pass()
        for watched in self._under_way:  # they are counted from their start
            watched.end()
        seconds, events = self._clock.seconds, list[Event]()
        for lane in LANES:  # in order, and none before the one before has ended
            before = 0.0
            own = [
                (seconds(begin), seconds(end), name, unit, num_bytes)
                for of_lane, name, unit, begin, end, num_bytes in self._events
                if of_lane == lane
            ]
            for begin, end, name, unit, num_bytes in sorted(own, key=lambda event: event[1]):
                start, stop = max(begin, before), max(begin, before, end)
                if lane != "compute" or stop - start >= _SHORTEST_S:
                    events.append(Event(lane, name, unit, start, stop - start, num_bytes))
                    before = stop
        return Timeline(rank, origin, tuple(events), tuple(self._levels.read(seconds)), labels)


@contextmanager
def tracing(
    directory: str | Path,
    context: Context,
    loop: Loop,
    accounts: Accounts,
    labels: Mapping[str, str],
) -> Iterator[None]:
    """Record what one engine does inside; see ``Engine.trace``."""
    if context.streams.probe.recording is not None:
        raise StateError("this engine is being traced already: leave that trace first")
    rank = dist.get_rank() if dist.is_initialized() else context.transport.rank
    path = Path(directory) / f"rank-{rank:05d}.json"
    with storing(f"trace {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()  # before anything is traced
    streams, stores = context.streams, context.tiering.stores.values()
    by_events = isinstance(streams, AcceleratorStreams)
    clock = DeviceClock(context.device) if by_events else Clock()
    origin = time.time()
    trace = Trace(clock, loop.weights.units, accounts, context.meter)
    probes: list[Probe] = [streams.probe, *(store.probe for store in stores)]
    for probe in probes:
        probe.start(trace)
    failed = True
    try:
        with loop.events.around(trace.listeners()):
            yield
        failed = False
    finally:
        for probe in probes:
            probe.stop()
        timeline = trace.finish(rank, origin, {**labels, "steps": str(trace.num_steps)})
        try:
            with storing(f"trace {path}"), replacing(path) as file:  # as a whole or not at all
                file.write(json.dumps(timeline.to_chrome()).encode())
        except StorageError as error:
            if not failed:
                raise
            _log.warning("%s", error)  # the exception inside matters more
