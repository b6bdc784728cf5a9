"""Stream and event work, behind one small class, so that it can be checked without an
accelerator.

Lanes: ``compute`` (the user's current stream), ``gather`` and ``reduce``, and one beside each for
what goes between nodes. One discipline, FSDP2's without ``record_stream``: a buffer is allocated
and freed in the compute lane's order; another lane that uses it first waits for compute (``fork``),
and compute waits for the lane's event before it touches or frees the buffer (``join``).

    compute:  alloc(full) . fork ............... join . read(full) ... free(full)
    gather:                  \\_ write(full) _ mark _/

Invariant: two accesses of one buffer, if one writes (allocation and freeing count as writes), are
ordered by a chain of program order and events. Streams does nothing; AcceleratorStreams enqueues
for real; tests prove the invariant on CPU, with vector clocks (tests/support/lane_sanitizer.py) and
by value (tests/device).

What it does not do: it never makes the host wait, but in `drain`, and it knows nothing of what
collectives do on streams of their own (a transport's ``Work.wait()`` orders those with the lane it
is called on).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch

from zeroshard.core.work import Probe
from zeroshard.system.device import Device

Lane = Literal["compute", "gather", "reduce", "gather between", "reduce between"]
Event = Any  # opaque to the engine

LANES: tuple[Lane, ...] = get_args(Lane)
# the lane of hops between nodes, on another wire than the lane beside it
BETWEEN: Mapping[Lane, Lane] = {"gather": "gather between", "reduce": "reduce between"}


class Streams:
    """The operations on streams that the engine uses, on a device without any: one lane, in program
    order, where there is nothing to wait for, and events are None.
    """

    # whether what follows on a lane comes after what was started there; else the host waits
    enqueues: bool = False
    has_lanes: bool = False  # False: everything is in program order, and no call does anything
    # may be entered any number of times at once
    _no_context: AbstractContextManager[None] = nullcontext()

    def __init__(self) -> None:
        self.probe = Probe()  # where a trace is told of what the engine does once per unit

    def fork(self, lane: Lane) -> None:
        """Let `lane` wait for everything enqueued on compute so far."""

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """Enqueue what the body does (and what it reports) on `lane`; outside, everything is on
        compute.
        """
        return self._no_context

    def mark(self, lane: Lane) -> Event:
        """Return an event that comes after everything enqueued on `lane` so far."""

    def join(self, event: Event, lane: Lane = "compute") -> None:
        """Let `lane` wait for `event`."""

    def drain(self) -> None:
        """Return when nothing is under way on any lane: the host waits. After an exception."""

    def is_idle(self) -> bool:
        """Whether nothing is under way on any lane but compute. Any thread may ask."""
        return True


def make_streams(device: torch.device | str) -> Streams:
    """Return what `device` needs: streams where its type has them, nothing on the CPU. Raises
    ConfigError for a device that torch has no module for.
    """
    return AcceleratorStreams(device) if Device.of(device).has_streams else Streams()


class AcceleratorStreams(Streams):
    """Streams of a device: one of ours for each lane but compute, which is whatever stream the user
    has made current.

    Autograd runs the backward of a node on the stream of its forward, in a thread of its own;
    compute is therefore asked for at each call, never remembered from construction. Work enqueued
    by other user streams is the user's to order, as with any PyTorch module.
    """

    enqueues = has_lanes = True
    device: Device
    _lanes: dict[Lane, Any]  # all but compute
    _user: Any  # the stream that was current when a lane was entered

    def __init__(self, device: torch.device | str) -> None:
        self.device = Device.of(device)
        # High priority: a gather that starts late delays the compute that waits for it, the reverse
        # costs little.
        self._lanes = {
            lane: self.device.make_stream(priority=-1) for lane in LANES if lane != "compute"
        }
        self._user = None
        super().__init__()

    def _stream(self, lane: Lane) -> Any:
        if lane != "compute":
            return self._lanes[lane]
        current = self.device.current_stream()
        # called from inside on(lane)
        if self._user is not None and current in self._lanes.values():
            return self._user
        return current

    def fork(self, lane: Lane) -> None:
        self._stream(lane).wait_event(self._stream("compute").record_event())

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        outer, self._user = self._user, self._stream("compute")
        try:
            with self.device.stream(self._stream(lane)):
                yield
        finally:
            self._user = outer

    def mark(self, lane: Lane) -> Event:
        event = self._stream(lane).record_event()
        if self.probe.recording is not None:
            self.probe.recording.marked(event)
        return event

    def join(self, event: Event, lane: Lane = "compute") -> None:
        recording = self.probe.recording if lane == "compute" else None
        since = None if recording is None else recording.now()
        self._stream(lane).wait_event(event)
        if recording is not None:
            recording.joined(event, since)

    def drain(self) -> None:
        self.device.synchronize()

    def is_idle(self) -> bool:
        return all(stream.query() for stream in self._lanes.values())
