"""Stream and event work, behind one small protocol, so that it can be checked without an
accelerator.

Three lanes: ``compute`` (the user's current stream), ``gather`` and ``reduce``. The engine follows
one discipline, FSDP2's without ``record_stream``: a buffer is allocated and freed in the compute
lane's order; another lane that uses it first waits for compute (``fork``), and compute waits for
the lane's event before it touches or frees the buffer (``join``).

    compute:  alloc(full) . fork ............... join . read(full) ... free(full)
    gather:                  \\_ write(full) _ mark _/

Invariant: any two accesses of one buffer, one of which writes (allocation and freeing count as
writes), are ordered by a chain of program order and events. CheckingStreams proves it with vector
clocks on CPU; NoStreams does nothing; AcceleratorStreams enqueues for real.

What it does not do: it never makes the host wait, and it knows nothing of what collectives do on
streams of their own (a transport's ``Work.wait()`` orders those with the lane it is called on).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch

from zeroshard.errors import ConfigError

__all__ = [
    "LANES",
    "AcceleratorStreams",
    "CheckingStreams",
    "Event",
    "Lane",
    "NoStreams",
    "StreamRace",
    "Streams",
    "make_streams",
]

Lane = Literal["compute", "gather", "reduce"]
Event = Any  # opaque to the engine

LANES: tuple[Lane, ...] = get_args(Lane)


class Streams(Protocol):
    """What the engine may say about streams. `buffer` is any hashable name of one piece of
    memory.
    """

    def fork(self, lane: Lane) -> None:
        """Let `lane` wait for everything enqueued on compute so far."""

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """Enqueue what the body does (and what it reports) on `lane`; outside, everything is on
        compute.
        """

    def mark(self, lane: Lane) -> Event:
        """Return an event that comes after everything enqueued on `lane` so far."""

    def join(self, event: Event) -> None:
        """Let compute wait for `event`."""

    def alloc(self, buffer: Hashable) -> None:
        """Report that `buffer`'s memory was taken, on the current lane."""

    def free(self, buffer: Hashable) -> None:
        """Report that `buffer`'s memory was given back, on the current lane."""

    def read(self, buffer: Hashable) -> None:
        """Report a read of `buffer` on the current lane."""

    def write(self, buffer: Hashable) -> None:
        """Report a write of `buffer` on the current lane."""


def make_streams(device: torch.device | str) -> Streams:
    """Return what `device` needs: real streams on CUDA, nothing on the CPU. Raises ConfigError
    for any other device type.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return NoStreams()
    if device.type == "cuda":
        return AcceleratorStreams(device)
    raise ConfigError(
        f"device {str(device)!r}: its streams are not supported; use a cpu or cuda device"
    )


class NoStreams:
    """One lane, in program order: nothing to wait for and nothing to check. Events are None."""

    # may be entered any number of times at once
    _here: AbstractContextManager[None] = nullcontext()

    def fork(self, lane: Lane) -> None: ...

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        return self._here

    def mark(self, lane: Lane) -> Event:
        return None

    def join(self, event: Event) -> None: ...

    def alloc(self, buffer: Hashable) -> None: ...

    def free(self, buffer: Hashable) -> None: ...

    def read(self, buffer: Hashable) -> None: ...

    def write(self, buffer: Hashable) -> None: ...


class AcceleratorStreams:
    """CUDA streams: one of ours for each lane but compute, which is whatever stream the user has
    made current.

    Autograd runs the backward of a node on the stream of its forward, in a thread of its own;
    compute is therefore asked for at each call, never remembered from construction. Work enqueued
    by other user streams is the user's to order, as with any PyTorch module.
    """

    device: torch.device
    _lanes: dict[Lane, torch.cuda.Stream]  # all but compute
    _user: torch.cuda.Stream | None  # the stream that was current when a lane was entered

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        # High priority: a gather that starts late delays the compute that waits for it, the reverse
        # costs little.
        self._lanes = {
            lane: torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            for lane in LANES
            if lane != "compute"
        }
        self._user = None

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        if lane != "compute":
            return self._lanes[lane]
        current = torch.cuda.current_stream(self.device)
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
            with torch.cuda.stream(self._stream(lane)):
                yield
        finally:
            self._user = outer

    def mark(self, lane: Lane) -> Event:
        return self._stream(lane).record_event()

    def join(self, event: Event) -> None:
        self._stream("compute").wait_event(event)

    def alloc(self, buffer: Hashable) -> None: ...

    def free(self, buffer: Hashable) -> None: ...

    def read(self, buffer: Hashable) -> None: ...

    def write(self, buffer: Hashable) -> None: ...


class StreamRace(AssertionError):
    """Two accesses of one buffer that nothing orders, or an access of freed memory."""

    def __init__(self, buffer: Hashable, first: _Access, second: _Access, reason: str) -> None:
        super().__init__(f"buffer {buffer!r}: {second} {reason} {first}")
        self.buffer = buffer
        self.first = first
        self.second = second


Clock = dict[Lane, int]  # per lane: how many of its accesses are known to have finished


@dataclass(frozen=True)
class _Access:
    operation: Literal["alloc", "free", "read", "write"]
    lane: Lane
    time: int  # how many accesses `lane` had made, this one included
    number: int  # how many accesses all lanes had made: where to look in a log

    def __str__(self) -> str:
        return f"{self.operation} on lane {self.lane} (access {self.number})"

    def before(self, clock: Clock) -> bool:
        return self.time <= clock[self.lane]


@dataclass
class _History:
    """What later accesses of one buffer must come after. One read per lane is enough: earlier
    ones precede it in program order.
    """

    write: _Access | None = None  # the last alloc, write or free
    reads: dict[Lane, _Access] = field(default_factory=dict)  # since then
    home: Lane | None = None  # the lane that allocated it


class CheckingStreams:
    """Vector clocks over what the engine reports: proves the module's invariant for the run it
    has seen, on any device.

    Each lane's clock says how many accesses of every lane it is known to come after; fork, mark and
    join copy clocks as events do. An access by a lane whose clock does not cover the conflicting
    one before it is a StreamRace. Memory returns to the lane that allocated it (that is how caching
    allocators reuse it), so a free must be ordered before that lane's next allocation too.

    `drop` leaves out one synchronisation operation: forks and joins are counted together from 0 in
    the order of their calls, and a run with ``drop=k`` that raises shows that the k-th is needed.
    With `collect`, races are appended to ``races`` instead of raised.

    For one thread at a time; it keeps one small record per buffer name, for ever.
    """

    drop: int | None
    collect: bool
    races: list[StreamRace]
    syncs: list[str]  # what each synchronisation operation was, dropped or not
    num_accesses: int

    def __init__(self, *, drop: int | None = None, collect: bool = False) -> None:
        self.drop = drop
        self.collect = collect
        self.races = []
        self.syncs = []
        self.num_accesses = 0
        self._clocks: dict[Lane, Clock] = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        self._lane: Lane = "compute"
        self._histories: dict[Hashable, _History] = {}

    @property
    def num_syncs(self) -> int:
        """The number of waits so far."""
        return len(self.syncs)

    def fork(self, lane: Lane) -> None:
        self._synchronise(f"fork({lane})", lane, self._clocks["compute"])

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        outer, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = outer

    def mark(self, lane: Lane) -> Event:
        return lane, dict(self._clocks[lane])

    def join(self, event: Event) -> None:
        lane, clock = event
        self._synchronise(f"join({lane})", "compute", clock)

    def alloc(self, buffer: Hashable) -> None:
        self._access("alloc", buffer)

    def free(self, buffer: Hashable) -> None:
        self._access("free", buffer)

    def read(self, buffer: Hashable) -> None:
        self._access("read", buffer)

    def write(self, buffer: Hashable) -> None:
        self._access("write", buffer)

    def _synchronise(self, name: str, waiter: Lane, clock: Clock) -> None:
        dropped = self.num_syncs == self.drop
        self.syncs.append(name)
        if not dropped:
            mine = self._clocks[waiter]
            mine.update({lane: max(mine[lane], clock[lane]) for lane in LANES})

    def _access(
        self, operation: Literal["alloc", "free", "read", "write"], buffer: Hashable
    ) -> None:
        lane, clock = self._lane, self._clocks[self._lane]
        clock[lane] += 1
        self.num_accesses += 1
        access = _Access(operation, lane, clock[lane], self.num_accesses)
        history = self._histories.setdefault(buffer, _History())
        last = history.write
        if last is not None:
            if last.operation == "free" and operation in ("read", "write"):
                self._report(StreamRace(buffer, last, access, "uses memory given back by"))
            self._require(buffer, last, access, clock)
        if operation == "read":
            history.reads[lane] = access
            return
        for read in history.reads.values():
            self._require(buffer, read, access, clock)
        if operation == "free" and history.home not in (None, lane):
            self._require_home(buffer, access, history)
        if operation == "alloc":
            history.home = lane
        history.write = access
        history.reads.clear()

    def _require(self, buffer: Hashable, first: _Access, second: _Access, clock: Clock) -> None:
        if not first.before(clock):
            self._report(StreamRace(buffer, first, second, "is not ordered after"))

    def _require_home(self, buffer: Hashable, access: _Access, history: _History) -> None:
        assert history.home is not None
        for used in (history.write, *history.reads.values()):
            if used is not None and not used.before(self._clocks[history.home]):
                self._report(
                    StreamRace(
                        buffer,
                        used,
                        access,
                        f"gives memory back to lane {history.home}, which is not ordered after",
                    )
                )

    def _report(self, race: StreamRace) -> None:
        if not self.collect:
            raise race
        self.races.append(race)
