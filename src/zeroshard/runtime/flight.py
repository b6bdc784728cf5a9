"""A flight: operations under way, from their start until compute may use their results.

A route of one hop is one Work, as the transport gives it. One of several hops is a `Run`: a
generator of hops (``runtime/flat_weights.py: FlatWeights.unshard``), which starts an operation and
yields it where the next hop needs its result::

    start     every run up to its first operation, on the flight's lane, after a fork
    advance   runs that read this rank's tier first go on to their collective
    wait      to the end of every run; compute then waits for the lane's event

Reads of a tier may end in any order; collectives start in the same order on every rank. A run whose
first operation is this rank's alone therefore goes on only in `advance`, which is called at the
same places of the program on every rank, and never because its read has ended. The levels of one
collective are one operation: the transport starts each as soon as the one before is over.

Invariant: where streams are enqueued on (``Streams.enqueues``) a collective is over for us once it
is enqueued (`ended`): the lane orders it with the hops after it, and the host waits for nothing but
disks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from zeroshard.core.route import Hop
from zeroshard.core.work import DoneWork, Work
from zeroshard.errors import StorageError
from zeroshard.runtime.streams import Event, Lane, Streams

__all__ = ["Flight", "Hops", "Run", "ended"]

# each operation that must end before the next hop, and the hop that it belongs to, if it is one
Hops = Iterator[tuple[Hop | None, Work]]


def ended(work: Work, streams: Streams) -> Work:
    """Return what is left to wait for of a collective that has been started: nothing where the lane
    orders what follows.
    """
    if not streams.enqueues:
        return work
    work.wait()
    return DoneWork()


class Run:
    """The Work of several hops, as far as they have come."""

    __slots__ = ("_hop", "_hops", "_work")

    def __init__(self, hops: Hops) -> None:
        self._hop: Hop | None = None
        self._work: Work | None = None  # None at the end
        self._hops = hops
        self._step()

    def _step(self) -> None:
        """Go on to the next operation that is not over yet."""
        while True:
            self._hop, self._work = next(self._hops, (None, None))
            if not isinstance(self._work, DoneWork):
                return

    @property
    def is_alone(self) -> bool:
        """Whether the operation under way is this rank's alone, before a collective."""
        return self._work is not None and self._hop is not None and self._hop.axis is None

    def advance(self) -> None:
        """Wait for what is this rank's alone, and start the collective after it."""
        while self.is_alone:
            assert self._work is not None
            self._work.wait()
            self._step()

    def wait(self) -> None:
        while self._work is not None:
            self._work.wait()
            self._step()

    def done(self) -> bool:
        return self._work is None or (not self.is_alone and self._work.done())

    def abandon(self) -> None:
        """Return when nothing of this rank's own is under way."""
        if self.is_alone and self._work is not None:
            with suppress(StorageError):
                self._work.wait()


class Flight:
    """Works under way and the event after which compute may use their results."""

    __slots__ = ("_event", "_lane", "_streams", "_works")

    def __init__(
        self, works: Iterable[Work], streams: Streams, lane: Lane | None, *, fork: bool = True
    ) -> None:
        """Start `works`, which start as they are iterated over, on `lane` (None: nothing is
        enqueued), after compute if `fork`.
        """
        self._streams = streams
        self._lane = lane
        self._event: Event = None
        if lane is None:
            self._works = list(works)
            return
        if fork:
            streams.fork(lane)
        with streams.on(lane):
            self._works = list(works)
            for work in self._works:
                if not (isinstance(work, Run) and work.is_alone):
                    self._event = streams.mark(lane)
                    break

    def advance(self) -> None:
        """Start the collectives that come after a read of this rank's tier."""
        for work in self._works:
            if isinstance(work, Run) and work.is_alone:
                assert self._lane is not None
                with self._streams.on(self._lane):
                    work.advance()
                    self._event = self._streams.mark(self._lane)

    def wait(self) -> None:
        """Return when the results may be used on compute. Idempotent; a wait that raised may be
        tried again.
        """
        if Run in map(type, self._works):
            self.advance()
        for work in self._works:
            work.wait()
        self._works = []
        if self._event is not None:
            self._streams.join(self._event)
            self._event = None

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; may make progress."""
        return all(work.done() for work in self._works)

    def abandon(self) -> None:
        """Return when nothing of this rank's own writes to the buffers any more; the transport has
        forgotten its part.
        """
        for work in self._works:
            if isinstance(work, Run):
                work.abandon()
        self._works = []
