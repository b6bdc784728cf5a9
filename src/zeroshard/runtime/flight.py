"""A flight: the hops of one route of each segment of a unit, from their start until compute may use
the results.

    go(START)     every route up to its first operation that is not over, on the flight's lane
    go(ADVANCE)   routes that read this rank's tier first go on to their collective
    go(SERVE)     the next level of a collective starts when the one before is over
    go(LAST)      the last level of every collective has started
    wait          to the end of every route; compute then waits for the lane's event

Reads of a tier may end in any order; collectives start in the same order on every rank. A route
that begins with an operation of this rank alone therefore goes on only in ADVANCE, which comes at
the same places of the program on every rank, and never because its read has ended. The levels of
one collective meet by key: each starts as soon as the one before is over, whatever this rank waits
for then (comm/levels.py); where operations meet in the order in which they begin, at once.

A hop between nodes has a lane of its own, as it has a wire: it follows the hops before it on the
flight's lane, and those after it follow it.

Invariant: where streams are enqueued on (``Streams.enqueues``) a collective is over for us once it
is enqueued: the lane orders it with the hops after it, and the host waits for nothing but disks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum

from zeroshard.comm.levels import Levels, ReadyHop
from zeroshard.core.work import DoneWork, Work
from zeroshard.errors import StorageError
from zeroshard.runtime.streams import BETWEEN, Event, Lane, Streams


class Go(Enum):
    """The point up to which a flight goes on."""

    START = "to operations that are not over"
    ADVANCE = "beyond reads"
    SERVE = "beyond collectives that are over, to other collectives"
    LAST = "beyond collectives, to the last one"
    WAIT = "to the end"


_OVER = DoneWork()


class Flight:
    """Routes under way, and the event after which compute may use their results."""

    __slots__ = ("__weakref__", "_arrived", "_at", "_event", "_is_going", "_lane", "_levels",
                 "_routes", "_streams", "_works", "is_over")  # fmt: skip

    def __init__(
        self,
        routes: Iterable[Sequence[ReadyHop]],
        streams: Streams,
        lane: Lane | None,
        levels: Levels | None = None,
    ) -> None:
        """Nothing has started. `lane` None: nothing is enqueued. `levels`: of its collectives."""
        self._routes = tuple(routes)
        self._levels = levels
        self._streams = streams
        self._lane = lane
        self._at = [0] * len(self._routes)  # the hop that comes next
        self._works: list[Work | None] = [None] * len(self._routes)  # of the hop before
        self._event: Event = None
        self._arrived: Event = None  # of the last hop between nodes, until a hop comes after it
        self._is_going = False
        self.is_over = False  # whether it was waited for to its end

    def go(self, how: Go = Go.START, *, fork: bool = False) -> None:
        """Go on as far as `how` says; START after what compute was given so far if `fork`."""
        if self._is_going:
            return  # a hop that is being started waits, and serves us meanwhile
        self._is_going = True
        # what has been read is used by compute as well where no collective follows
        streams, marks, has_levels = self._streams, how in (Go.ADVANCE, Go.WAIT), False
        lane = self._lane if streams.has_lanes else None
        recording = streams.probe.recording
        if fork and lane is not None:
            for hops in self._routes:
                if hops and not hops[0].between:  # those fork their own lane
                    streams.fork(lane)
                    break
        there, far = None if lane is None else streams.on(lane), None
        if there is not None:
            there.__enter__()
        try:
            for number, hops in enumerate(self._routes):
                at, work = self._at[number], self._works[number]
                while at < len(hops) or work is not None:
                    if work is not None:
                        if how is Go.START and at == len(hops):
                            break  # the usual case: of one collective
                        if not self._goes_on(work, hops, at, how):
                            has_levels = has_levels or at < len(hops)
                            break
                        work.wait()
                    if at == len(hops):
                        self._works[number] = work = None
                        break
                    hop = hops[at]
                    if lane is not None and (hop.between or self._arrived is not None):
                        far = self._change_lane(hops, at, lane)
                        marks = marks and (not far or at == 0 or hops[at - 1].between)
                    since = None if recording is None else recording.now()
                    work = hop.start()
                    marks = marks or (hop.kind != "read" and far is None)
                    if hop.kind == "wire" and streams.enqueues and work is not None:
                        work.wait()
                        work = _OVER
                    if recording is not None and hop.describe is not None and work is not None:
                        work = recording.watch(work, hop.describe(), since)
                    if far is not None and lane is not None:
                        far.__exit__(None, None, None)
                        far, self._arrived = None, streams.mark(BETWEEN[lane])
                    at += 1
                    self._at[number] = at
                    self._works[number] = work = None if type(work) is DoneWork else work
            if marks and lane is not None:
                self._event = streams.mark(lane)
        finally:
            self._is_going = False
            if far is not None:
                far.__exit__(*sys.exc_info())
            if there is not None:
                there.__exit__(*sys.exc_info())
        if has_levels and how in (Go.START, Go.ADVANCE) and self._has_levels:
            assert self._levels is not None
            self._levels.follow(self)

    def _change_lane(
        self, hops: Sequence[ReadyHop], at: int, lane: Lane
    ) -> AbstractContextManager[None] | None:
        """Let the next hop follow those before; where it is between nodes, enter that lane."""
        streams, between = self._streams, BETWEEN[lane]
        was_between = at > 0 and hops[at - 1].between
        if not hops[at].between:
            if was_between:
                streams.join(self._arrived, lane)
                self._arrived = None
            return None
        if at == 0:
            streams.fork(between)
        elif not was_between:
            streams.join(streams.mark(lane), between)
        there = streams.on(between)
        there.__enter__()
        return there

    def _goes_on(self, work: Work, hops: Sequence[ReadyHop], at: int, how: Go) -> bool:
        """Whether to wait for the hop before `at`, under way as `work`, and go on."""
        is_read = hops[at - 1].kind == "read"
        follows = at < len(hops) and hops[at].kind == "wire"
        if how is Go.WAIT or (how is Go.ADVANCE and is_read):
            return True
        if is_read or not follows:
            return False
        if how is Go.LAST:
            return True
        if self._levels is None or self._levels.keyed:
            return how is Go.SERVE and work.done()
        return True

    @property
    def _reads_first(self) -> bool:
        """Whether a read of this rank's tier is under way, before a collective."""
        return any(
            work is not None and hops[at - 1].kind == "read"
            for hops, at, work in zip(self._routes, self._at, self._works, strict=True)
        )

    @property
    def _has_levels(self) -> bool:
        """Whether collectives follow one that is under way."""
        for hops, at, work in zip(self._routes, self._at, self._works, strict=True):
            is_wire = work is not None and hops[at - 1].kind == "wire"
            if is_wire and [hop for hop in hops[at:] if hop.kind == "wire"]:
                return True
        return False

    def advance(self) -> None:
        """Start the collectives that come after a read of this rank's tier."""
        if self._reads_first:
            self.go(Go.ADVANCE)

    def wait(self, lane: Lane = "compute") -> None:
        """Return when the results may be used on `lane`. Idempotent; a wait that raised may be
        tried again.
        """
        for number, work in enumerate(self._works):
            if work is None:
                continue
            hops = self._routes[number]
            if self._at[number] == len(hops) and hops[-1].kind != "read":
                work.wait()  # the usual case: of one collective
                self._works[number] = None
            else:
                self.advance()
                self.go(Go.WAIT)
        self._routes, self._at, self._works, self.is_over = (), [], [], True
        if self._event is not None:
            self._streams.join(self._event, lane)
            self._event = None
        if self._arrived is not None:
            self._streams.join(self._arrived, lane)
            self._arrived = None

    def start_all(self) -> None:
        """Start the last level of every collective, once those before are over."""
        self.go(Go.LAST)

    def serve(self) -> bool:
        """Start the next level of collectives that are over; return whether any is left."""
        self.go(Go.SERVE)
        return self._has_levels

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; may make progress."""
        self.go(Go.SERVE)
        return (
            all(
                work is None or (hops[at - 1].kind != "read" and work.done())
                for hops, at, work in zip(self._routes, self._at, self._works, strict=True)
            )
            and not self._has_levels
        )

    def leave(self) -> None:
        """Start nothing any more, and give back what the other hops would have used."""
        routes, self._routes = self._routes, ()
        for hops, at in zip(routes, self._at, strict=True):
            for hop in hops[at:]:
                if hop.unused is not None:
                    hop.unused()
        self._routes = tuple(hops[:at] for hops, at in zip(routes, self._at, strict=True))

    def abandon(self) -> None:
        """Return when nothing of this rank's own writes to the buffers any more; the transport has
        forgotten its part.
        """
        self.leave()
        for hops, at, work in zip(self._routes, self._at, self._works, strict=True):
            if work is not None and hops[at - 1].kind == "read":
                with suppress(StorageError):
                    work.wait()
        self._routes, self._at, self._works = (), [], []
