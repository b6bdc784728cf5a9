"""Execute a schedule's commands on the reduces of one engine.

A unit's buckets are handed over one after another; sums come back in any order. For which sums
somebody waits, and when, is the schedule's to say (core/schedule); when a unit is complete is
runtime/backward.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.comm.levels import Transports
from zeroshard.core.digest import Digest
from zeroshard.core.schedule import MAX_FLUSHING, Command, Op, Reduces
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.grad import Accumulator
from zeroshard.runtime.streams import Streams
from zeroshard.runtime.unit import Unit


class Reductions:
    """The reduces of all units' gradients."""

    def __init__(
        self,
        units: Sequence[Unit],
        reduces: Reduces,
        *,
        streams: Streams,
        digest: Digest,
        transports: Transports,
    ) -> None:
        self._reduces = reduces
        self._streams = streams
        self._digest = digest
        self._transports = transports
        self._buckets = {
            (unit.index, number): bucket
            for unit in units
            for number, bucket in enumerate(unit.buckets)
        }
        for bucket in self._buckets.values():
            bucket.follow(self.make_room)
        self._flushing: list[Bucket] = []  # whose sums go to another tier, oldest first

    def start(self, unit: Unit, *, sync: bool, with_earlier: bool) -> bool:
        """Start the reduces of `unit`; see Bucket.reduce. Return whether there was any:
        where not `sync`, some rows add micro-batches first.
        """
        any_started = False
        for number, bucket in enumerate(unit.buckets):
            if not sync and bucket.sums_micro_batches:
                continue
            any_started = True
            self._digest.enter("reduce", unit.name)
            self._digest.fold(
                "reduce",
                unit.name,
                bucket.wire,
                bucket.whole_numel,
                bucket.flat.context.holders.members,
                ordered=not bucket.flat.context.levels.keyed,
            )
            key = (unit.index, number)
            if key in self._reduces.under_way:
                for command in self._reduces.before(key):
                    self.finish(command)
            flight: Flight | None
            if bucket.sums_nodes and not sync:
                flight = bucket.reduce_inside()
            else:
                flight = bucket.reduce(with_earlier=with_earlier)
            if flight is not None:
                flight.go(fork=True)
                self._reduces.start(key, off_device=bucket.accumulator.off_device)
            if bucket.accumulator.tiered:
                self._flushing.append(bucket)
        return any_started

    def open_zeros(self, unit: Unit, *, sync: bool) -> None:
        """Lend buffers as ranks with gradients do: that decides which units are gathered ahead."""
        for bucket in unit.buckets:
            if sync or not bucket.sums_micro_batches:
                bucket.open_zeros()

    def finish(self, command: Command) -> None:
        """Execute WAIT_REDUCE or POLL_REDUCE."""
        key = (command.unit, command.segment)
        bucket = self._buckets[key]
        waits = command.op is Op.WAIT_REDUCE
        bucket.wait(block=waits)
        if bucket.reduction is None and not waits:  # which is over for the schedule
            self._reduces.over(key)

    def advance(self) -> None:
        """A unit has been handed over: note which sums are over, and bound those on their way to
        another tier.
        """
        for progress in self._transports.progress:
            progress()
        for command in self._reduces.handed_over():
            self.finish(command)
        if self._flushing:  # leave two of those, each held on the device until it is elsewhere
            self._flushing = [
                one for one in self._flushing if one.in_flight or one.accumulator.is_flushing
            ]
            landing = [bucket for bucket in self._flushing if not bucket.in_flight]
            for bucket in landing[:-MAX_FLUSHING]:
                bucket.accumulator.flush()

    def start_all(self) -> None:
        """A backward ends: every level of its sums has started. Peers may wait for them in theirs,
        and what comes next may be code in which ranks meet without us.
        """
        self._transports.start_all()

    def make_room(self, num_bytes: int) -> None:
        """Wait for reduces under way until `num_bytes` fit the budget."""
        if not self._reduces.under_way:
            return
        for command in self._reduces.make_room(num_bytes):
            self.finish(command)

    def wait(self) -> None:
        """Wait for every reduce under way."""
        for command in self._reduces.finish():
            self.finish(command)

    def flush(self) -> None:
        """Return when no sum is on its way to another tier."""
        for bucket in self._flushing:
            bucket.accumulator.flush()

    def gather_averages(self, accumulators: Sequence[Accumulator]) -> None:
        """Bring whole averages together where every rank steps everything: all at once, one fork
        and one wait for all.
        """
        if accumulators:
            routes = [accumulator.gather_averages() for accumulator in accumulators]
            flight = Flight(routes, self._streams, "reduce", self._transports.main)
            flight.go(fork=True)
            flight.wait()

    def abandon(self) -> None:
        """After an exception: nothing is under way."""
        self._flushing.clear()
