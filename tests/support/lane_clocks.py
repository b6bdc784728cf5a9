"""Lanes that enqueue nothing and know, by vector clocks, what comes after what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.runtime.streams import LANES, Event, Lane

__all__ = ["Clock", "LaneClocks"]

Clock = dict[Lane, int]  # per lane: how many of its accesses are known to have finished


class LaneClocks:
    """The order of three lanes: fork, mark and join copy clocks as events do.

    `drop` leaves out one of these: forks and joins are counted together from 0 in the order of
    their calls.
    """

    def __init__(self, drop: int | None) -> None:
        self.lane: Lane = "compute"  # the one in force
        self.clocks: dict[Lane, Clock] = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        self.syncs: list[str] = []  # what each synchronisation operation was, dropped or not
        self.drop = drop

    def fork(self, lane: Lane) -> None:
        """Let `lane` come after everything on compute so far."""
        self._synchronise(f"fork({lane})", lane, self.clocks["compute"])

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Run the body on `lane`."""
        outer, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = outer

    def mark(self, lane: Lane) -> Event:
        """Return where `lane` is."""
        return lane, dict(self.clocks[lane])

    def join(self, event: Event) -> None:
        """Let compute come after `event`."""
        lane, clock = event
        self._synchronise(f"join({lane})", "compute", clock)

    def drain(self) -> None:
        """The host waits for all lanes."""
        for lane in LANES:
            for other in LANES:
                self.order(lane, self.clocks[other])

    def order(self, lane: Lane, clock: Clock) -> None:
        """Let `lane` come after `clock`."""
        mine = self.clocks[lane]
        mine.update({other: max(mine[other], clock[other]) for other in LANES})

    def _synchronise(self, name: str, waiter: Lane, clock: Clock) -> None:
        dropped = len(self.syncs) == self.drop
        self.syncs.append(name)
        if not dropped:
            self.order(waiter, clock)
