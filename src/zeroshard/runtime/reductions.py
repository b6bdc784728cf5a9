"""The reduces of one engine: which are under way, and for which sums somebody waits.

A unit's buckets are handed over one after another; sums come back in any order. Those under way are
kept oldest first, so that nothing looks through all units for what is over.

Invariant: where all ranks run units in the same order, what is waited for follows from that order
and from sizes, never from timing: what is over decides what is gathered ahead, and two-sided
gathers must meet. It does not know when a unit is complete (runtime/backward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeroshard.comm.transports import Transports
from zeroshard.core.digest import Digest
from zeroshard.core.precision import dtype_name
from zeroshard.runtime.budget import Budget
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.gradients import GradientPath
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.streams import Streams
from zeroshard.runtime.summed import SummedGradient
from zeroshard.runtime.unit import Unit

__all__ = ["Reductions"]

_IN_FLIGHT = 2


class Reductions:
    """The reduces of all units' gradients."""

    def __init__(
        self,
        units: Sequence[Unit],
        budget: Budget,
        *,
        streams: Streams,
        digest: Digest,
        transports: Transports,
        ordered: bool,
    ) -> None:
        """`ordered`: all ranks gather the same units in the same order."""
        # tests look at the order of events through this
        self.trace: Callable[[str, str], None] | None = None
        self._budget = budget
        self._streams = streams
        self._digest = digest
        self._ordered = ordered
        self._transports = transports
        self._flights: dict[str, GradientPath] = {}  # reduces under way, oldest first
        self._flushing: list[GradientPath] = []  # whose sums go to another tier, oldest first
        sharded = any(unit.cells.weight.is_sharded for unit in units)
        # the ranks run units in the same order
        self._waits_for_room = ordered and (sharded or not transports.main.keyed)

    def start(self, unit: Unit, segment: Segment, *, sync: bool, with_earlier: bool) -> None:
        """Start the reduce of `segment`; see GradientPath.reduce."""
        path = segment.grad
        assert path is not None
        self._digest.enter("reduce", unit.name)
        self._digest.fold(
            "reduce",
            unit.name,
            dtype_name(path.precision.wire),
            path.whole_numel,
            ordered=False,
        )
        if self.trace is not None:
            self.trace("reduce", unit.name)
        if path.partial.of_nodes and not sync:
            path.reduce_inside(make_room=self.make_room)
        else:
            path.reduce(make_room=self.make_room, with_earlier=with_earlier)
        self._flights.pop(path.key, None)
        if path.in_flight:
            self._flights[path.key] = path
        if path.summed.tiered:
            self._flushing.append(path)

    def advance(self) -> None:
        """A unit has been handed over: note which sums are over, and bound those on their way to
        another tier.
        """
        self._transports.progress()
        if self._ordered:
            self._flush_oldest()
        else:
            for path in list(self._flights.values()):
                path.wait(block=False)
                if not path.in_flight:
                    del self._flights[path.key]
        if self._flushing:
            self._bound_flushing()

    def _flush_oldest(self) -> None:
        """Of sums that rest on another tier, leave two under way: the others would wait on the
        device for the end of the pass.

        Where ranks may run their units in different order (see `make_room`), those stay whose other
        parts have not come.
        """
        # not those that leave this rank's device: a wait gives a buffer back, and what fits beside
        # it is gathered ahead on every rank or on none
        waiting = [path for path in self._flights.values() if path.summed.leaves]
        for path in waiting[:-_IN_FLIGHT]:
            path.wait(block=self._waits_for_room)
            if path.in_flight:
                return
            del self._flights[path.key]

    def _bound_flushing(self) -> None:
        """Of sums on their way to another tier, leave two: each is held on the device until it
        is there. A matter of this rank alone.
        """
        self._flushing = [
            path for path in self._flushing if path.in_flight or path.summed.is_flushing
        ]
        landing = [path for path in self._flushing if not path.in_flight]
        for path in landing[:-_IN_FLIGHT]:
            path.summed.flush()

    def make_room(self, num_bytes: int) -> None:
        """Wait for reduces under way, oldest first, until `num_bytes` fit the budget.

        Where ranks may run their units in different order, the transport bounds the gradient
        buffers by its own pool: to wait for a sum could be to wait for ever, each rank with the
        part that the other lacks still to come.
        """
        budget = self._budget
        if not self._waits_for_room or not self._flights or not budget.num_bytes:
            return
        if num_bytes <= budget.left:
            return
        for key, path in list(self._flights.items()):
            path.wait()
            del self._flights[key]
            if num_bytes <= budget.left:
                return

    def wait(self) -> None:
        """Wait for every reduce under way, in the order in which they were started: the last
        wait then covers the ones before it.
        """
        for path in self._flights.values():
            path.wait()
        self._flights.clear()

    def flush(self) -> None:
        """Return when no sum is on its way to another tier."""
        for path in self._flushing:
            path.summed.flush()

    def gather_averages(self, sums: Sequence[SummedGradient]) -> None:
        """Bring whole averages together where every rank steps everything: all at once, one fork
        and one wait for all.
        """
        if sums:
            works = (summed.gather_averages() for summed in sums)
            Flight(works, self._streams, "reduce").wait()

    def abandon(self) -> None:
        """After an exception: nothing is under way."""
        self._flights.clear()
        self._flushing.clear()
