"""Execute a schedule's commands on the reduces of one engine.

A unit's buckets are handed over one after another; sums come back in any order. For which sums
somebody waits, and when, is the schedule's to say (core/schedule); when a unit is complete is
runtime/backward.py's.

[Note: one order of reduces] Where collectives meet in the order in which they begin and no pass
gathers (stages 0 to 2 on accelerators), ranks may complete their units in different orders: they
take other branches, or leave units out. So all start the reduces of a pass in one order, as DDP
does: a unit that is complete waits for those before it (a star: its reduce starts)::

    agreed: head b2 b1 stem     rank 0, without b1, completes    head* b2* stem  b1* stem*
                                rank 1, without b2               head* b1  stem  b2* b1* stem*

It is rank 0's order in the last pass before a step, which the exchange of finalize.py carries;
before that, the units from last to first. A pass ends with all of its units complete, so each gets
its turn. Cost: the buffers of those that wait; nothing where ranks run alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zeroshard.comm.levels import Transports
from zeroshard.core.digest import Digest
from zeroshard.core.schedule import MAX_FLUSHING, Command, Op, Reduces
from zeroshard.core.schedule.rules import Key
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.grad import Accumulator
from zeroshard.runtime.streams import Streams
from zeroshard.runtime.unit import Unit

# the name of its unit, its key in the schedule, and its flight, where there is anything to reduce
_Reduce = tuple[str, Key, Bucket, Flight | None]


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
        in_one_order: bool,
    ) -> None:
        """`in_one_order`: see [Note: one order of reduces]."""
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
        trained = [unit.index for unit in reversed(units) if unit.trainable]
        self._first_order = self._order = tuple(trained if in_one_order else ())
        # of this pass: what is complete, and the units that have not had their turn, the next last
        self._complete: dict[int, list[_Reduce]] = {}
        self._turns: list[int] = []

    def begin(self, units: Collection[Unit]) -> None:
        """A pass begins that completes `units`, in any order."""
        own = {unit.index for unit in units}
        self._turns = [index for index in reversed(self._order) if index in own]
        self._complete.clear()

    def news(self) -> tuple[int, ...]:
        """Return the order of the last pass, other units behind; () where it was the agreed one."""
        order = tuple(dict.fromkeys((*self._complete, *self._order)))
        return () if order == self._order else order

    def follow(self, order: tuple[int, ...]) -> None:
        """All ranks start their reduces in this `order` from here on, if there is one."""
        self._order = order or self._order

    def start(self, unit: Unit, *, sync: bool, with_earlier: bool) -> bool:
        """Start the reduces of `unit`, or let them wait for their turn; see Bucket.reduce. Return
        whether there was any: where not `sync`, some rows add micro-batches first.
        """
        reduces: list[_Reduce] = []
        for number, bucket in enumerate(unit.buckets):
            if not sync and bucket.sums_micro_batches:
                continue
            self._digest.enter("reduce", unit.name)
            key = (unit.index, number)
            if key in self._reduces.under_way:
                for command in self._reduces.before(key):
                    self.finish(command)
            flight: Flight | None
            if bucket.sums_nodes and not sync:
                flight = bucket.reduce_inside()
            else:
                flight = bucket.reduce(with_earlier=with_earlier)
            reduces.append((unit.name, key, bucket, flight))
            if bucket.accumulator.tiered:
                self._flushing.append(bucket)
        due = reduces
        if self._turns:
            self._complete[unit.index], due = reduces, []
            while self._turns and self._turns[-1] in self._complete:
                due += self._complete[self._turns.pop()]
        for name, key, bucket, flight in due:
            self._digest.fold(
                "reduce",
                name,
                bucket.wire,
                bucket.whole_numel,
                bucket.flat.context.holders.members,
                ordered=not bucket.flat.context.levels.keyed,
            )
            if flight is not None:
                flight.go(fork=True)
                self._reduces.start(key, off_device=bucket.accumulator.off_device)
        return bool(reduces)

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
        """After an exception, on every rank: nothing is under way."""
        self._flushing.clear()
        self._order = self._first_order
        self.begin(())
