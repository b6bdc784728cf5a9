"""A flight: the hops of routes under way, from their start until their result may be used.

The hops of one group are a generator (``runtime/flat_weights.py: FlatWeights.unshard``,
``runtime/gradients.py: GradientPath.reduce``): it starts an operation of its route and yields it
where the next hop needs its result::

    start     every run up to its first operation, on the flight's lane, after a fork
    advance   runs that read this rank's tier first go on to their collective
    wait      to the end of every run; compute then waits for the lane's event

Reads of a tier may end in any order; collectives start in the same order on every rank. A run whose
first operation is this rank's alone therefore goes on only in `advance`, which is called at the
same places of the program on every rank, and never because its read has ended. The levels of one
collective are one operation: the transport starts each as soon as the one before is over.

Invariant: where streams are enqueued on (``Streams.enqueues``) no collective is yielded: the lane
orders it with the hops after it, and the host waits for nothing but disks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from zeroshard.core.route import Hop
from zeroshard.core.work import Work
from zeroshard.errors import StorageError
from zeroshard.runtime.streams import Event, Lane, Streams

__all__ = ["Flight", "Hops", "ended"]

# each operation that must end before the next hop, and the hop that it belongs to, if it is one
Hops = Iterator[tuple[Hop | None, Work]]


def ended(work: Work, streams: Streams, hop: Hop | None = None) -> Hops:
    """Go on after a collective: the lane orders what follows, or else the run waits for it."""
    if streams.enqueues:
        work.wait()
    else:
        yield hop, work


class _Run:
    """The hops of one group, as far as they have come."""

    __slots__ = ("_hops", "hop", "work")

    def __init__(self, hops: Hops) -> None:
        self._hops = hops
        self.step()

    def step(self) -> None:
        """Go on to the next operation; ``work`` is None at the end."""
        self.hop: Hop | None
        self.work: Work | None
        self.hop, self.work = next(self._hops, (None, None))

    @property
    def is_alone(self) -> bool:
        """Whether the operation under way is this rank's alone, before a collective."""
        return self.work is not None and self.hop is not None and self.hop.axis is None


class Flight:
    """Runs under way and the event after which compute may use their results."""

    __slots__ = ("_event", "_lane", "_runs", "_streams")

    def __init__(
        self, runs: Iterable[Hops], streams: Streams, lane: Lane | None, *, fork: bool = True
    ) -> None:
        """Start `runs` on `lane` (None: nothing is enqueued), after compute if `fork`."""
        self._streams = streams
        self._lane = lane
        self._event: Event = None
        if lane is None:
            self._runs = [_Run(run) for run in runs]
            return
        if fork:
            streams.fork(lane)
        with streams.on(lane):
            self._runs = [_Run(run) for run in runs]
            if not all(run.is_alone for run in self._runs):
                self._event = streams.mark(lane)

    def advance(self) -> None:
        """Start the collectives that come after a read of this rank's tier."""
        for run in self._runs:
            while run.is_alone:
                assert self._lane is not None and run.work is not None
                with self._streams.on(self._lane):
                    run.work.wait()
                    run.step()
                    self._event = self._streams.mark(self._lane)

    def wait(self) -> None:
        """Return when the results may be used on compute. Idempotent; a wait that raised may be
        tried again.
        """
        self.advance()
        for run in self._runs:
            while run.work is not None:
                run.work.wait()
                run.step()
        self._runs = []
        if self._event is not None:
            self._streams.join(self._event)
            self._event = None

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; may make progress."""
        return all(run.work is None or (not run.is_alone and run.work.done()) for run in self._runs)

    def abandon(self) -> None:
        """Return when nothing of this rank's own writes to the buffers any more; the transport has
        forgotten its part.
        """
        for run in self._runs:
            if run.is_alone and run.work is not None:
                with suppress(StorageError):
                    run.work.wait()
        self._runs = []
