"""Lanes that enqueue nothing and know, by vector clocks, what comes after what."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.runtime.streams import LANES, Event, Lane

Clock = Counter[str]  # per lane: how many of its accesses are known to have finished


class LaneClocks:
    """The order of lanes: fork, mark and join copy clocks as events do.

    `drop` leaves out one of these: forks and joins are counted together from 0 in the order of
    their calls.
    """

    def __init__(self, drop: int | None) -> None:
        self.clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self.syncs: list[str] = []  # what each synchronisation operation was, dropped or not
        self.drop = drop
        self._thread = threading.local()

    @property
    def lane(self) -> str:
        """The one in force in this thread."""
        return getattr(self._thread, "lane", "compute")

    def fork(self, lane: Lane) -> None:
        """Let `lane` come after everything on compute so far."""
        self._synchronise(f"fork({lane})", lane, self.reached("compute"))

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        """Run the body on `lane`."""
        outer, self._thread.lane = self.lane, lane
        try:
            yield
        finally:
            self._thread.lane = outer

    def reached(self, lane: str) -> Clock:
        """Return what comes before whatever `lane` is given next."""
        return self.clocks[lane].copy()

    def mark(self, lane: Lane) -> Event:
        """Return where `lane` is."""
        return lane, self.reached(lane)

    def join(self, event: Event, lane: Lane = "compute") -> None:
        """Let `lane` come after `event`."""
        of, clock = event
        self._synchronise(f"join({of})", lane, clock)

    def drain(self) -> None:
        """The host waits for all lanes."""
        for lane in LANES:
            for other in LANES:
                self.order(lane, self.clocks[other])

    def is_idle(self) -> bool:
        """Whether nothing is under way: it never is, since operations run as they are enqueued."""
        return True

    def order(self, lane: str, clock: Clock) -> None:
        """Let `lane` come after `clock`."""
        self.clocks[lane] |= clock

    def _synchronise(self, name: str, waiter: str, clock: Clock) -> None:
        dropped = len(self.syncs) == self.drop
        self.syncs.append(name)
        if not dropped:
            self.order(waiter, clock)
