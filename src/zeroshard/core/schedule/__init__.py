"""The schedule of a step: what is gathered, released and waited for at each event, decided once.

    event                          weights                       gradients
    begin(phase)                   release what is ahead
    need(unit)                     evict, START, WAIT, START ahead    make room: WAIT_REDUCE
    after_forward(unit)            RELEASE, or IDLE
    reduces.make_room(bytes)                                     WAIT_REDUCE
    after_backward(unit)           RELEASE
    reduces.handed_over()                                        WAIT_REDUCE, POLL_REDUCE
    hold_stage, release_stage      START, RELEASE                (a pipeline's stages)
    publish()                      START                         after a step, of whole weights

(ZeRO, section 5; prefetching by a trace: ZeRO-Infinity, section 6.2.) Every event is a method that
returns commands. Whoever iterates executes them, at once: the engine moves bytes
(runtime/weights.py, reductions.py), the planner adds bytes (planner/peak.py) or times jobs
(planner/simulate.py), and ``python -m zeroshard.core.schedule zero3`` prints them. A gather or a
wait that raises leaves the schedule as it was before.

The last pass says which unit comes next (`Order`, which is in rules.py with the other parts). Units
are gathered ahead up to ``prefetch_bytes``, and no more than the budget leaves (`Allowance`).
Weights make room by releasing, reduces by waiting; the executor counts both in one `Meter`.

Invariants (tests/unit/core/test_schedule.py): where `Rules.ordered`, decisions depend on the order
of events and on sizes alone, never on timing, so that the ranks' collectives meet; what is gathered
and in buckets stays within the budget, or is what a single event needs; everything that is used
was waited for; everything gathered is released. Torch is not imported. Cost: microseconds an event.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain

from zeroshard.core.residency import Residency, UnitState, Use
from zeroshard.core.schedule.rules import (
    MAX_FLUSHING,
    RELEASES,
    STAGING_BYTES,
    TILE_BUFFERS,
    TILES_AHEAD,
    Allowance,
    Command,
    Commands,
    Meter,
    Op,
    Order,
    Phase,
    Reduces,
    Rules,
    Until,
    to_evict,
)

__all__ = [
    "MAX_FLUSHING",
    "RELEASES",
    "STAGING_BYTES",
    "TILES_AHEAD",
    "TILE_BUFFERS",
    "Command",
    "Commands",
    "Meter",
    "Op",
    "Phase",
    "Reduces",
    "Rules",
    "Schedule",
    "Until",
]

RESTING, GATHERING, FULL = UnitState.RESTING, UnitState.GATHERING, UnitState.FULL


@cache
def _commands(unit: int) -> tuple[Command, ...]:
    """Return every command on the weights of a unit, by its `Op`: made once."""
    return tuple(Command(op, unit) for op in Op)


class Schedule:
    """Decides for the units of one engine."""

    def __init__(self, units: Sequence[Residency], rules: Rules, meter: Meter) -> None:
        self.units = tuple(units)
        self.rules = rules
        self.room = Allowance(rules, meter)
        self.reduces = Reduces(rules, self.room)
        self._sizes = {unit.index: unit.traits.full_bytes for unit in units}
        self._to = [_commands(unit.index) for unit in units]
        self._reads = any(unit.traits.reads_first for unit in units)
        self._order: Order[int] = Order()
        self._around = False  # in this pass
        self._looks_ahead = True
        self.num_gathered = 0  # gathers that this pass has needed
        self._num_ahead = 0  # gathers ahead of their use so far, which number Use.EARLY
        self.ahead_bytes = 0  # gathered, or under way, and not used yet
        self._idle: Residency | None = None  # the unit with Use.IDLE, looked for at every use
        self.running = 0  # forwards under way, of the model or of modules that units are needed for
        # units that a forward under way has whole: a module inside it needs nothing of these
        self.inside: set[Residency] = set()
        self.evaluates = False  # the forward of the model under way runs without gradients
        # forwards with gradients since the last step, less backwards: graphs that may still need
        # what is held
        self._graphs = 0
        if rules.around:
            self.expect("forward", [index for index, size in self._sizes.items() if size])

    # ------------------------------------------------------------------ what others ask

    @property
    def ahead(self) -> list[int]:
        """The units that are gathered and not used yet, oldest first."""
        numbered = [
            (number, unit.index) for unit in self.units if (number := unit.counts[Use.EARLY])
        ]
        return [index for _, index in sorted(numbered)]

    def last_pass(self, phase: Phase) -> list[int] | None:
        """Return the units that the last pass gathered, or found kept, in order; None before the
        first.
        """
        return self._order.last_uses(phase)

    def expect(self, phase: Phase, units: Sequence[int]) -> None:
        """Take `units` for the units of the last pass."""
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
        self.num_gathered = 0

    def end_pass(self, *, repeats: bool = False, keeps: bool = False) -> Commands:
        """A pass is over: nothing stays that was only expected or idle, unless the same forward may
        follow (`repeats`) and is read for already. `keeps`: see `after_forward`.
        """
        yield from self.release_idle(keeps)
        if not (repeats and self._around):
            yield from self.drop_ahead()

    def look_ahead(self, *, if_all_compute: bool) -> None:
        """Gather ahead from here on; where gathers need every rank, only `if_all_compute`: one that
        follows the others does not hold what they do, by which they decide.
        """
        self._looks_ahead = if_all_compute or not self.rules.ordered

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
        return self._end_holds(Until.FORWARD_ENDS)

    def end_backward(self) -> Commands:
        """A backward is over, and its graph is gone."""
        self._graphs = max(0, self._graphs - 1)
        return () if self._graphs else self._end_holds(Until.BACKWARD_ENDS)

    @property
    def has_graph(self) -> bool:
        """Whether a forward with gradients has run since the last step, and no backward of it."""
        return self._graphs > 0

    def end_step(self) -> Commands:
        """The weights have changed: no graph can need them."""
        self._graphs = 0
        for unit in self.units:
            unit.end_step()
        return self._end_holds(Until.STEP)

    def _end_holds(self, event: Until) -> Commands:
        """Release the units that were held until `event`, or less."""
        ended = [unit for unit in self.units if 0 < unit.counts[Use.DIRECT] <= event]
        for unit in ended:
            unit.release(Use.DIRECT)
        return chain.from_iterable(map(self.release_unused, ended)) if ended else ()

    # ------------------------------------------------------------------ weights

    def need(self, unit: Residency, phase: Phase, *, keeps: bool = False) -> Commands:
        """`unit` is used now: gather it, and those expected next. `keeps`: see `after_forward`."""
        if self._idle is None and unit.state is FULL and not unit.is_idle:
            return ()
        return self._gather(unit, phase, keeps)

    def _gather(self, unit: Residency, phase: Phase, keeps: bool) -> Commands:
        if self._idle is unit:
            self._idle = None
        elif self._idle is not None:
            yield from self.release_idle(keeps)
        if unit.state is FULL:
            if unit.is_idle:
                if unit.counts[Use.KEPT] and phase != "read":
                    self._order.resume(phase, unit.index)
                yield from self._resume(unit)
            return
        to, size = self._to[unit.index], unit.traits.full_bytes
        if unit.state is RESTING:
            if self.ahead_bytes:
                yield from self._evict(unit, phase)
            yield from self.reduces.make_room(size)
            yield to[Op.START]
            unit.state = GATHERING  # not where the start has raised
        if unit.counts[Use.EARLY]:  # it is ahead no longer
            unit.counts[Use.EARLY] = 0
            self.ahead_bytes -= size
        yield to[Op.WAIT]
        unit.state = FULL
        yield to[Op.USE]
        if phase != "read":
            self._order.record(phase, unit.index)
        self.num_gathered += 1
        if self._reads:
            yield from self._advance()
        if self.reduces.under_way and phase == "forward":  # left of a backward before
            yield from self.reduces.make_room(self.rules.prefetch_bytes - self.ahead_bytes)
        allowed = min(self.room.left, self.rules.prefetch_bytes - self.ahead_bytes) if size else 0
        if allowed <= 0 or not self._looks_ahead:
            return
        for index in self._order.predict(
            phase,
            unit.index,
            sizes=self._sizes,
            live_bytes=0,
            budget_bytes=allowed,
            is_live=lambda index: self.units[index].state is not RESTING,
            around=self._around,
        ):
            if size := self._sizes[index]:
                other = self.units[index]
                self._num_ahead += 1
                other.counts[Use.EARLY] = self._num_ahead
                self.ahead_bytes += size
                yield self._to[index][Op.START]
                other.state = GATHERING

    def _evict(self, unit: Residency, phase: Phase) -> Commands:
        """Release units that were gathered ahead, for another order, so that `unit` fits."""
        excess = unit.traits.full_bytes - self.room.left
        if excess <= 0:
            return
        upcoming = self._order.upcoming(phase, unit.index, around=self._around)
        for index in to_evict(self.ahead, upcoming, sizes=self._sizes, excess_bytes=excess):
            yield from self._drop(self.units[index])

    def _advance(self) -> Commands:
        """Let the gathers under way go on that began with reads. Where weights are read around the
        end of a pass, only the next one: the reads of the others keep the disk busy.
        """
        ahead = [self.units[index] for index in self.ahead]
        coming = [unit for unit in ahead if unit.traits.reads_first]
        coming += [
            unit
            for unit in self.units
            if unit.state is GATHERING and unit.has(Use.STAGE) and unit.traits.reads_first
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
        traits, counts = unit.traits, unit.counts
        if counts[Use.FORWARD] or any(counts[Use.DIRECT : Use.EARLY]):
            return ()
        if recomputed:
            unit.acquire(Use.BACKWARD)
            return ()
        if not traits.is_sharded or unit.state is not FULL:
            return ()
        if traits.is_kept and keeps:
            self.room.set_beside(unit.index, traits.full_bytes)
            return self._mark_idle(unit, Use.KEPT)
        if traits.spans_one_module:
            return self._release(unit, Op.RELEASE_FOR_BACKWARD if keeps else Op.RELEASE_GATHERED)
        if self._idle is unit:
            return ()
        released = self.release_idle(keeps)
        self._idle = unit
        self.inside.clear()  # the next module that begins needs another unit
        return (*released, *self._mark_idle(unit, Use.IDLE))

    def after_backward(self, unit: Residency) -> Commands:
        """The backward of `unit` is over."""
        unit.counts[Use.BACKWARD] = 0
        return self.release_unused(unit)

    def release_idle(self, keeps: bool) -> Commands:
        """Release the unit that was left because another use might follow at once."""
        unit, self._idle = self._idle, None
        if unit is None or unit.state is not FULL:
            return ()
        if not unit.in_use:
            return self._release(unit, Op.RELEASE_FOR_BACKWARD if keeps else Op.RELEASE_GATHERED)
        unit.release(Use.IDLE)
        return (self._to[unit.index][Op.RESUME],)

    def release_unused(self, unit: Residency, op: Op = Op.RELEASE_ALL) -> Commands:
        """Release a unit that rests sharded, where neither a forward, a backward nor the user
        has it in use.
        """
        if unit.state is not FULL or not unit.traits.is_sharded or any(unit.counts[: Use.EARLY]):
            return ()
        return self._release(unit, op)

    def bring_to_rest(self, unit: Residency) -> Commands:
        """Release a unit, whatever it is here for."""
        if unit.state is GATHERING:
            yield from self._drop(unit)
        elif unit.state is FULL:
            self._idle = None if self._idle is unit else self._idle
            yield from self._release(unit)

    def drop_ahead(self) -> Commands:
        """Release what was gathered ahead and not used."""
        for index in self.ahead if self.ahead_bytes else ():
            yield from self._drop(self.units[index])

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
        if unit.counts[Use.EARLY]:
            unit.counts[Use.EARLY] = 0
            self.ahead_bytes -= unit.traits.full_bytes

    def _release(self, unit: Residency, op: Op = Op.RELEASE_ALL) -> Commands:
        # moved at once: what raises at a release has released
        if unit.counts[Use.IDLE] or unit.counts[Use.KEPT]:
            self.room.set_beside(unit.index, 0)
        unit.rest()
        return (self._to[unit.index][op],)

    def _mark_idle(self, unit: Residency, why: Use) -> Commands:
        unit.acquire(why)
        return (self._to[unit.index][Op.IDLE],)

    def _resume(self, unit: Residency) -> Commands:
        self.room.set_beside(unit.index, 0)
        unit.release(Use.IDLE)
        unit.release(Use.KEPT)
        return (self._to[unit.index][Op.RESUME],)

    # ------------------------------------------------------------------ units that are held

    def hold(self, unit: Residency, phase: Phase, until: Until, *, keeps: bool = False) -> Commands:
        """Gather a unit that is used outside its modules, and keep it at least `until` then."""
        unit.acquire(Use.DIRECT)
        unit.counts[Use.DIRECT] = max(until, unit.counts[Use.DIRECT])
        return self.need(unit, phase, keeps=keeps)

    def hold_stage(self, units: Iterable[Residency], *, keeps: bool = False) -> Commands:
        """A pipeline's schedule computes with `units` from here on: start what is not here, and
        keep all. They give way to nothing, and their bytes are the schedule's.
        """
        for unit in units:
            if unit is self._idle:
                yield from self.release_idle(keeps)
            elif unit.is_idle:
                yield from self._resume(unit)
            unit.acquire(Use.STAGE)
            self._discard(unit)
            self.room.set_beside(unit.index, unit.traits.full_bytes)
            if unit.state is RESTING:
                yield self._to[unit.index][Op.START]
                unit.state = GATHERING

    def release_stage(self, units: Iterable[Residency]) -> Commands:
        """It does so no longer: release those that nothing else uses."""
        for unit in units:
            if unit.has(Use.STAGE):
                self.room.set_beside(unit.index, 0)
            unit.release(Use.STAGE)
            yield from self.finish(unit)
            yield from self.release_unused(unit, Op.RELEASE_GATHERED)

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
            if not unit.traits.is_sharded and unit.state is RESTING:
                yield self._to[unit.index][Op.START]
                unit.state = GATHERING

    def reset(self) -> None:
        """Release every unit and forget the recorded order, after an exception: ranks may have
        stopped at different points.
        """
        self._order = Order()
        self.ahead_bytes = 0
        self._idle = None
        self.inside.clear()
        self._looks_ahead = True
        self.room.reset()
        self.reduces.reset()
        self.running = self._graphs = 0
        self.evaluates = False
        for unit in self.units:
            unit.reset()
