"""The schedule of a step: what is gathered, released and waited for at each event, decided once.

    event                          weights                       gradients
    begin(phase)                   release what is ahead
    need(unit)                     evict, START, WAIT, START ahead    make room: WAIT_REDUCE
    after_forward(unit)            RELEASE, or doze
    open_bucket(bytes)                                           make room: WAIT_REDUCE
    after_backward(unit)           RELEASE
    handed_over()                                                WAIT_REDUCE, POLL_REDUCE
    hold_stage, release_stage      START, RELEASE                (a pipeline's stages)
    publish()                      START                         after a step, of whole weights

(ZeRO, section 5; prefetching by a trace: ZeRO-Infinity, section 6.2.) Every event is a method that
returns commands. Whoever iterates executes them, at once: the engine moves bytes
(runtime/weights.py, reductions.py), the planner adds bytes (planner/playback.py) or times jobs
(planner/program.py), and ``python -m zeroshard.core.schedule zero3`` prints them. A gather or a
wait whose execution raises leaves the schedule as it was before.

The last pass says which unit comes next (core/order.py). Units are gathered ahead up to
``prefetch_bytes``, and no more than the budget leaves. What a row keeps from the forward to the
backward (``zero3-keep``) comes on top of the budget: were it part of it, nothing would be gathered
ahead once it is full, and every reduce would be waited for. Weights make room by releasing,
reductions by waiting; the executor counts what both hold in one `Meter`.

Invariants (tests/unit/core/test_schedule.py): where `Rules.ordered`, decisions depend on the order
of events and on sizes alone, never on timing, so that the ranks' collectives meet; what is gathered
and in buckets stays within the budget, or is what a single event needs; everything that is used
was waited for; everything gathered is released. Torch is not imported. Cost: microseconds an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Literal, NamedTuple, Protocol

from zeroshard.core.order import Order, to_evict
from zeroshard.core.residency import Residency, Traits, UnitState, Use

__all__ = [
    "MAX_FLUSHING",
    "TILES_AHEAD",
    "TILE_BUFFERS",
    "Command",
    "Commands",
    "Meter",
    "Op",
    "Phase",
    "Rules",
    "Schedule",
    "Until",
    "grad_pool_bytes",
]

Phase = Literal["forward", "backward"]
Key = tuple[int, int]  # of a reduce: unit, segment of the unit

MAX_FLUSHING = 2  # sums bound for another tier that are under way; the oldest is waited for beyond
TILES_AHEAD = 2  # tiles of an optimizer step on disk that are read ahead
TILE_BUFFERS = TILES_AHEAD + 2  # sets of buffers for them: one is stepped, one written

RESTING, GATHERING, FULL = UnitState.RESTING, UnitState.GATHERING, UnitState.FULL


class Op(IntEnum):
    """What is done, to a unit's weights or (the last two) to the reduce of one of its segments."""

    START = 0  # start gathering
    WAIT = 1  # wait for the gather
    USE = 2  # compute reads the weights from here on
    ADVANCE = 3  # start the collective of a gather that began with a read of another tier
    RELEASE = 4  # give the gathered memory back, and what is kept for a backward
    KEEP = 5  # give it back, but for what the row keeps for a backward
    SHRINK = 6  # give it back; what an earlier forward has kept for its backward stays
    DOZE = 7  # no use is known, and another one may follow at once: it has to be noticed
    WAKE = 8  # the next use has come
    WAIT_REDUCE = 9
    POLL_REDUCE = 10  # take note where it is over


class Command(NamedTuple):
    """One entry of a schedule."""

    op: Op
    unit: int
    segment: int = 0  # of the unit: which reduce


Commands = Iterable[Command]  # some are decided as one iterates


class Until(IntEnum):
    """How long a unit is held that is used outside its modules, where no hook tells its end."""

    FORWARD_ENDS = 0  # used without gradients
    BACKWARD_ENDS = 1  # used with gradients: until as many backwards as forwards have run
    STEP = 2  # left the model; a graph may refer to the weights that no hook announces


class Meter(Protocol):
    """Counts the bytes of gathered weights and of buckets; the executor of commands moves it."""

    live: int


@dataclass(frozen=True)
class Rules:
    """What an engine's row, model and transport decide for every step."""

    budget_bytes: int  # that gathered weights and buckets share
    prefetch_bytes: int
    ordered: bool = True  # gathers need every rank: all gather the same units in the same order
    waits_for_room: bool = True  # a gather or a bucket waits for reduces where the budget is full
    around: bool = False  # see `of`
    alone: bool = False  # one rank

    @classmethod
    def of(
        cls,
        units: Iterable[Traits],
        *,
        one_sided: bool,
        leave: bool,
        coded: bool,
        keyed: bool,
        enqueues: bool = False,
        around: bool = False,
        alone: bool = False,
        prefetch_bytes: int | None = None,
    ) -> Rules:
        """Return the rules for `units`.

        The budget is 2 x the largest unit + prefetch_bytes (default: the largest unit once more):
        the unit in use, the next one, and either what is gathered ahead or a bucket. Where the
        host runs ahead of the device (`enqueues`) it is the largest unit once more, so that two
        reduces are under way: with one, the backward of every unit would wait for the reduce of
        the one before.

        Gathers need every rank (they are `ordered`) unless the memory of peers is mapped
        (`one_sided`) and holds the weights: none `leave` the device, on any rank, or are `coded`.

        `keyed`: ranks may run their units in different order; the transport then bounds buckets by
        its own pool, since to wait for a sum could be to wait for ever, each rank with the part
        that the other lacks still to come.

        `around`: weights are read *around* the end of a forward without gradients (ZeRO-Inference):
        nothing rewrites them before the next one, which runs the same units. Two units are then
        gathered ahead: the second keeps a disk's queue filled while the first one arrives.
        """
        traits = list(units)
        ordered = not one_sided or leave or coded
        largest = max((one.nominal_bytes for one in traits), default=0)
        prefetch = (1 + around) * largest if prefetch_bytes is None else prefetch_bytes
        return cls(
            budget_bytes=(2 + enqueues) * largest + prefetch,
            prefetch_bytes=prefetch,
            ordered=ordered,
            waits_for_room=ordered and (any(one.is_sharded for one in traits) or not keyed),
            around=around,
            alone=alone,
        )


def grad_pool_bytes(largest_numel: int, bytes_per_element: int) -> int:
    """Return the bytes of a transport's gradient buffers: two of the largest unit."""
    return 2 * largest_numel * bytes_per_element


@cache
def _commands(unit: int) -> tuple[Command, ...]:
    """Return every command on the weights of a unit, by its `Op`: made once."""
    return tuple(Command(op, unit) for op in Op)


class Schedule:
    """Decides for the units of one engine."""

    def __init__(self, units: Sequence[Residency], rules: Rules, meter: Meter) -> None:
        self.units = tuple(units)
        self.rules = rules
        self._meter = meter
        self._sizes = {unit.index: unit.traits.full_bytes for unit in units}
        self._to = [_commands(unit.index) for unit in units]
        self._reads = any(unit.traits.reads_first for unit in units)
        self._order: Order[int] = Order()
        self._around = False  # in this pass
        # units that do not rest, by index
        self._here = {unit.index for unit in units if unit.state is not RESTING}
        self._ahead: dict[int, Residency] = {}  # gathered, and not used yet; oldest first
        self._ahead_bytes = 0
        self._held: dict[int, Residency] = {}  # by a schedule of a pipeline, beyond the budget
        self._idle: Residency | None = None  # forward over, kept until another unit is needed
        self._kept: dict[int, int] = {}  # bytes that wait whole for a backward, beside the budget
        self._kept_bytes = 0
        # under way, oldest first; whether the sum leaves the device
        self._reduces: dict[Key, bool] = {}
        self.running = 0  # forwards under way, of the model or of any module that needs a unit
        self.evaluates = False  # the forward of the model under way runs without gradients
        # forwards with gradients since the last step, less backwards: graphs that may still need
        # what is held
        self._graphs = 0
        self._until: dict[int, Until] = {}  # units used outside their modules
        if rules.around:
            self.expect("forward", [index for index, size in self._sizes.items() if size])

    # ------------------------------------------------------------------ what others ask

    @property
    def left(self) -> int:
        """The bytes that are not in use; below zero where one event needs more by itself."""
        return self.rules.budget_bytes + self._kept_bytes - self._meter.live

    @property
    def ahead(self) -> list[int]:
        """The units that are gathered and not used yet, oldest first."""
        return list(self._ahead)

    @property
    def reduces(self) -> list[Key]:
        """The reduces under way, oldest first."""
        return list(self._reduces)

    def serves(self, unit: Residency) -> bool:
        """Whether `unit` is gathered for a backward, so that a further need brings no command."""
        return unit.state is FULL and not unit.is_dozing and self._idle is None and unit.in_backward

    def last_pass(self, phase: Phase) -> list[int]:
        """Return the units of the last pass, in order; empty before the first."""
        return self._order.trace(phase)

    def expect(self, phase: Phase, units: Sequence[int]) -> None:
        """Take `units` for those of the last pass."""
        self._order.seed(phase, units)

    # ------------------------------------------------------------------ passes

    def begin(self, phase: Phase, *, repeats: bool = False) -> Commands:
        """A pass over the model begins; `repeats`: the next one may be the same, with the same
        weights.
        """
        if not repeats:  # a backward needs last what is ahead for a forward
            yield from self.drop_ahead()
        self._around = repeats and self.rules.around
        self._order.begin(phase)

    def end_pass(self, *, repeats: bool = False, keeps: bool = False) -> Commands:
        """A pass is over: nothing stays that was only expected or idle, unless the same forward may
        follow (`repeats`) and is read for already. `keeps`: see `after_forward`.
        """
        yield from self.release_idle(keeps)
        if not (repeats and self._around):
            yield from self.drop_ahead()

    def enter(self, evaluates: bool | None = None) -> None:
        """A forward begins; `evaluates`: whether it runs without gradients, where it is the
        model's own.
        """
        self.running += 1
        self.evaluates = self.evaluates if evaluates is None else evaluates

    def leave(self, evaluates: bool | None = None, *, graph: bool) -> Commands:
        """A forward ends, and leaves a `graph` for a backward."""
        self.evaluates = self.evaluates if evaluates is None else evaluates
        self.running = max(0, self.running - 1)
        if self.running:
            return ()
        self._graphs += graph
        return self._end_holds(Until.FORWARD_ENDS) if self._until else ()

    def end_backward(self) -> Commands:
        """A backward is over, and its graph is gone."""
        self._graphs = max(0, self._graphs - 1)
        return () if self._graphs else self._end_holds(Until.BACKWARD_ENDS)

    def end_step(self) -> Commands:
        """The weights have changed: no graph can need them."""
        self._graphs = 0
        return self._end_holds(Until.STEP)

    def _end_holds(self, event: Until) -> Commands:
        """Release the units that were held until `event`, or less."""
        ended = [index for index, until in self._until.items() if until <= event]
        for index in ended:
            del self._until[index]
            self.units[index].release(Use.DIRECT)
        for index in ended:
            yield from self.release_unused(self.units[index])

    # ------------------------------------------------------------------ weights

    def need(self, unit: Residency, phase: Phase, *, keeps: bool = False) -> Commands:
        """`unit` is used now: gather it, and those expected next. `keeps`: see `after_forward`."""
        if self._idle is None and unit.state is FULL and not unit.is_dozing:
            return ()
        return self._gather(unit, phase, keeps)

    def _gather(self, unit: Residency, phase: Phase, keeps: bool) -> Commands:
        if self._idle is unit:
            self._idle = None
        elif self._idle is not None:
            yield from self.release_idle(keeps)
        if unit.state is FULL:
            if unit.is_dozing:
                yield from self._wake(unit)
            return
        to, size = self._to[unit.index], unit.traits.full_bytes
        if unit.state is RESTING:
            if self._ahead:
                yield from self._evict(unit, phase)
            if self._reduces:
                yield from self.make_room(size)
            yield to[Op.START]
            self._started(unit)
        self._discard(unit)
        yield to[Op.WAIT]
        unit.state = FULL
        yield to[Op.USE]
        self._order.record(phase, unit.index)
        if self._reads:
            yield from self._advance()
        if size:
            yield from self._gather_ahead(unit, phase)

    def _evict(self, unit: Residency, phase: Phase) -> Commands:
        """Release units that were gathered ahead, for another order, so that `unit` fits."""
        excess = unit.traits.full_bytes - self.left
        if excess <= 0:
            return
        upcoming = self._order.upcoming(phase, unit.index, around=self._around)
        for index in to_evict(self._ahead, upcoming, sizes=self._sizes, excess_bytes=excess):
            yield from self._drop(self.units[index])

    def _gather_ahead(self, unit: Residency, phase: Phase) -> Commands:
        allowed = min(self.left, self.rules.prefetch_bytes - self._ahead_bytes)
        if allowed <= 0:
            return
        predicted = self._order.predict(
            phase,
            unit.index,
            sizes=self._sizes,
            live_bytes=0,
            budget_bytes=allowed,
            live=self._here,
            around=self._around,
        )
        for index in predicted:
            if size := self._sizes[index]:
                self._ahead[index] = other = self.units[index]
                self._ahead_bytes += size
                yield self._to[index][Op.START]
                self._started(other)

    def _started(self, unit: Residency) -> None:
        """A gather is under way: what raised at its start has not come here."""
        unit.state = GATHERING
        self._here.add(unit.index)

    def _advance(self) -> Commands:
        """Let the gathers under way go on that began with reads. Where weights are read around the
        end of a pass, only the next one: the reads of the others keep the disk busy.
        """
        coming = [unit for unit in self._ahead.values() if unit.traits.reads_first]
        coming += [
            unit
            for unit in self._held.values()
            if unit.state is GATHERING and unit.traits.reads_first
        ]
        if self._around:
            coming = [] if self.rules.alone else coming[:1]
        for unit in coming:
            yield self._to[unit.index][Op.ADVANCE]

    def after_forward(self, unit: Residency, *, keeps: bool, recomputed: bool = False) -> Commands:
        """A module of `unit` has run: release the unit now if nothing else of it can follow, else
        when another one is needed. `keeps`: gradients are enabled, so that a backward may follow;
        `recomputed`: it does follow, at once.
        """
        traits = unit.traits
        if unit.is_held:
            return ()
        if recomputed:
            unit.acquire(Use.BACKWARD)
            return ()
        if not traits.is_sharded or unit.state is not FULL:
            return ()
        if traits.is_kept and keeps:
            self._keep(unit)
            return self._doze(unit)
        if traits.spans_one_module:
            return self._release(unit, Op.KEEP if keeps else Op.SHRINK)
        if self._idle is unit:
            return ()
        released = self.release_idle(keeps)
        self._idle = unit
        return (*released, *self._doze(unit))

    def after_backward(self, unit: Residency) -> Commands:
        """The backward of `unit` is over."""
        unit.release(Use.BACKWARD)
        return self.release_unused(unit)

    def release_idle(self, keeps: bool) -> Commands:
        """Release the unit that was left because another use might follow at once."""
        unit, self._idle = self._idle, None
        if unit is None or unit.state is not FULL:
            return ()
        if not unit.in_use:
            return self._release(unit, Op.KEEP if keeps else Op.SHRINK)
        unit.is_dozing = False
        return (self._to[unit.index][Op.WAKE],)

    def release_unused(self, unit: Residency) -> Commands:
        """Release a unit that rests sharded, where neither a forward, a backward nor the user
        has it in use.
        """
        if unit.state is not FULL or not unit.traits.is_sharded or unit.in_use:
            return ()
        return self._release(unit)

    def bring_to_rest(self, unit: Residency) -> Commands:
        """Release a unit, whatever it is here for."""
        if unit.state is GATHERING:
            yield from self._drop(unit)
        elif unit.state is FULL:
            self._idle = None if self._idle is unit else self._idle
            yield from self._release(unit)

    def drop_ahead(self) -> Commands:
        """Release what was gathered ahead and not used."""
        for unit in list(self._ahead.values()):
            yield from self._drop(unit)

    def finish(self, unit: Residency) -> Commands:
        """Wait for the gather of `unit`, if one is under way."""
        if unit.state is GATHERING:
            yield self._to[unit.index][Op.WAIT]
            unit.state = FULL

    def _drop(self, unit: Residency) -> Commands:
        self._discard(unit)
        yield from self.finish(unit)
        yield from self._release(unit)

    def _discard(self, unit: Residency) -> None:
        """`unit` is ahead no longer: it is used, or released."""
        if self._ahead.pop(unit.index, None) is not None:
            self._ahead_bytes -= unit.traits.full_bytes

    def _release(self, unit: Residency, op: Op = Op.RELEASE) -> Commands:
        # moved at once: what raises at a release has released
        self._here.discard(unit.index)
        if unit.is_dozing:
            self._keep(unit, kept=False)
            unit.is_dozing = False
        unit.state = RESTING
        return (self._to[unit.index][op],)

    def _doze(self, unit: Residency) -> Commands:
        unit.is_dozing = True
        return (self._to[unit.index][Op.DOZE],)

    def _wake(self, unit: Residency) -> Commands:
        self._keep(unit, kept=False)
        unit.is_dozing = False
        return (self._to[unit.index][Op.WAKE],)

    def _keep(self, unit: Residency, *, kept: bool = True) -> None:
        """Count the bytes of a gathered `unit` beside the budget, or in it."""
        self._kept_bytes -= self._kept.pop(unit.index, 0)
        if kept:
            self._kept[unit.index] = unit.traits.full_bytes
            self._kept_bytes += unit.traits.full_bytes

    # ------------------------------------------------------------------ units that are held

    def hold(self, unit: Residency, phase: Phase, until: Until, *, keeps: bool = False) -> Commands:
        """Gather a unit that is used outside its modules, and keep it at least `until` then."""
        before = self._until.get(unit.index)
        if before is None:
            unit.acquire(Use.DIRECT)
        self._until[unit.index] = until if before is None else max(until, before)
        return self.need(unit, phase, keeps=keeps)

    def hold_stage(self, units: Iterable[Residency], *, keeps: bool = False) -> Commands:
        """A pipeline's schedule computes with `units` from here on: start what is not here, and
        keep all. They give way to nothing, and their bytes are the schedule's.
        """
        for unit in units:
            if unit is self._idle:
                yield from self.release_idle(keeps)
            elif unit.is_dozing:
                yield from self._wake(unit)
            unit.acquire(Use.SCHEDULE)
            self._discard(unit)
            self._held[unit.index] = unit
            self._keep(unit)
            if unit.state is RESTING:
                yield self._to[unit.index][Op.START]
                self._started(unit)

    def release_stage(self, units: Iterable[Residency]) -> Commands:
        """It does so no longer: release those that nothing else uses."""
        for unit in units:
            if self._held.pop(unit.index, None) is not None:
                self._keep(unit, kept=False)
            unit.release(Use.SCHEDULE)
            yield from self.finish(unit)
            if unit.state is FULL and unit.traits.is_sharded and not unit.in_use:
                yield from self._release(unit, Op.SHRINK)

    # ------------------------------------------------------------------ gradients

    def make_room(self, num_bytes: int) -> Commands:
        """Wait for reduces under way, oldest first, until `num_bytes` fit the budget."""
        rules = self.rules
        if self._reduces and rules.waits_for_room and rules.budget_bytes:
            return self._oldest_until_fits(num_bytes)
        return ()

    def _oldest_until_fits(self, num_bytes: int) -> Commands:
        for key in list(self._reduces):
            if num_bytes <= self.left:
                return
            yield Command(Op.WAIT_REDUCE, *key)
            self.reduced(key)

    def before_reduce(self, key: Key) -> Commands:
        """Wait for the reduce of the same segment that is under way: they complete in order."""
        if key in self._reduces:
            yield Command(Op.WAIT_REDUCE, *key)
            self.reduced(key)

    def reduce(self, key: Key, *, leaves: bool = False) -> None:
        """A reduce has been started; `leaves`: its sum rests on another tier."""
        self._reduces.pop(key, None)
        self._reduces[key] = leaves

    def reduced(self, key: Key) -> None:
        """A reduce is over, and its bucket is free."""
        self._reduces.pop(key, None)

    def handed_over(self) -> Commands:
        """The gradients of a unit have been handed over: note which sums are over.

        Where gathers are ordered, of sums that rest on another tier two stay under way: the others
        would wait on the device for the end of the pass. Not those that stay on the device: a wait
        gives a buffer back, and what fits beside it is gathered ahead on every rank or on none.
        """
        if not self.rules.ordered:
            for key in list(self._reduces):
                yield Command(Op.POLL_REDUCE, *key)
            return
        op = Op.WAIT_REDUCE if self.rules.waits_for_room else Op.POLL_REDUCE
        leaving = [key for key, leaves in self._reduces.items() if leaves]
        for key in leaving[:-MAX_FLUSHING]:
            yield Command(op, *key)
            if op is Op.WAIT_REDUCE:
                self.reduced(key)
            elif key in self._reduces:
                return  # its other parts have not come, perhaps, and nobody waits for them

    def wait_for_reduces(self) -> Commands:
        """Wait for every reduce under way, in the order in which they were started: the last wait
        then covers those before it.
        """
        for key in list(self._reduces):
            yield Command(Op.WAIT_REDUCE, *key)
            self.reduced(key)

    # ------------------------------------------------------------------ between steps

    def publish(self) -> Commands:
        """The weights have changed: what is gathered of them is stale. Release it, and bring
        together anew what rests whole.
        """
        for unit in self.units:
            is_stale = unit.traits.is_sharded or unit.traits.is_published
            if unit.state is FULL and is_stale and not unit.is_held:
                yield from self._release(unit)
        for unit in self.units:
            if unit.traits.is_published and unit.state is RESTING:
                yield self._to[unit.index][Op.START]
                self._started(unit)

    def reset(self) -> None:
        """After an exception: every unit at rest, nothing under way, and no expectation, since the
        ranks may have come to different places.
        """
        self._order = Order()
        self._here.clear()
        self._ahead.clear()
        self._ahead_bytes = 0
        self._held.clear()
        self._idle = None
        self._kept.clear()
        self._kept_bytes = 0
        self._reduces.clear()
        self.running = self._graphs = 0
        self.evaluates = False
        self._until.clear()
        for unit in self.units:
            unit.reset()
