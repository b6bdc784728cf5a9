"""The parts of a schedule: the commands that it returns, the rules and the room by which it
decides, the reduces under way, and the order of the last pass, by which it gathers ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from zeroshard.core.residency import UnitTraits

# ----------------------------------------------------------------------------------------- commands

Phase = Literal["forward", "backward", "read"]  # a read, outside a pass, is in no order
Key = tuple[int, int]  # of a reduce: unit, trained segment of the unit


class Op(IntEnum):
    """Operations on a unit's weights and (the last two) on the reduce of one of its segments."""

    START = 0  # start gathering
    WAIT = 1  # wait for the gather
    USE = 2  # compute reads the weights from here on
    ADVANCE = 3  # start the collective of a gather that began with a read of another tier
    RELEASE_ALL = 4  # give the gathered memory back, and what is kept for a backward
    RELEASE_FOR_BACKWARD = 5  # give it back, but for what the row keeps for a backward
    RELEASE_GATHERED = 6  # give it back; what an earlier forward has kept for its backward stays
    IDLE = 7  # no use is known, and another one may follow at once: it has to be noticed
    RESUME = 8  # the next use has come
    WAIT_REDUCE = 9
    POLL_REDUCE = 10  # take note where it is over


RELEASES = frozenset((Op.RELEASE_ALL, Op.RELEASE_FOR_BACKWARD, Op.RELEASE_GATHERED))


class Command(NamedTuple):
    """One entry of a schedule."""

    op: Op
    unit: int
    segment: int = 0  # of the unit: which reduce


Commands = Iterable[Command]  # some are decided as one iterates


class Until(IntEnum):
    """The time for which a unit is held that is used outside its modules, where no hook tells its
    end; the count of ``Use.DIRECT``.
    """

    FORWARD_ENDS = 1  # used without gradients
    BACKWARD_ENDS = 2  # used with gradients: until as many backwards as forwards have run
    STEP = 3  # left the model; a graph may refer to the weights that no hook announces


# ----------------------------------------------------------------------------------- rules and room

STAGING_BYTES = 64 << 20  # of the streamed step of states off the device: Offload.staging_bytes
MAX_FLUSHING = 2  # sums bound for another tier that are under way; the oldest is waited for beyond
TILES_AHEAD = 2  # tiles of an optimizer step on disk that are read ahead
TILE_BUFFERS = TILES_AHEAD + 2  # sets of buffers for them: one is stepped, one written


class Meter(Protocol):
    """Counts the bytes of gathered weights and of buckets; the executor of commands moves it."""

    live: int


@dataclass(frozen=True)
class Rules:
    """The decisions that an engine's row, model and transport make for every step."""

    budget_bytes: int  # that gathered weights and buckets share
    prefetch_bytes: int
    ordered: bool = True  # gathers need every rank: all gather the same units in the same order
    waits_for_room: bool = True  # a gather or a bucket waits for reduces where the budget is full
    # ranks may complete their units in different orders, and collectives meet by theirs alone
    reduces_in_one_order: bool = False
    around: bool = False  # see `of`
    alone: bool = False  # one rank

    @classmethod
    def of(
        cls,
        units: Iterable[UnitTraits],
        *,
        ordered: bool,
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

        `keyed`: ranks may run their units in different order; the transport then bounds buckets by
        its own pool, since to wait for a sum could be to wait for ever, each rank with the part
        that the other lacks still to come.

        `around`: weights are read *around* the end of a forward without gradients (ZeRO-Inference):
        nothing rewrites them before the next one, which runs the same units. Two units are then
        gathered ahead: the second keeps a disk's queue filled while the first one arrives.
        """
        traits = list(units)
        gathers = any(one.is_sharded for one in traits)
        largest = max((one.nominal_bytes for one in traits), default=0)
        prefetch = (1 + around) * largest if prefetch_bytes is None else prefetch_bytes
        return cls(
            budget_bytes=(2 + enqueues) * largest + prefetch,
            prefetch_bytes=prefetch,
            ordered=ordered,
            waits_for_room=ordered and (gathers or not keyed),
            reduces_in_one_order=not (gathers or keyed),
            around=around,
            alone=alone,
        )


class Allowance:
    """The bytes that gathered weights and buckets share.

    What a row keeps from the forward to the backward (``zero3-keep``), and what a pipeline's stages
    hold, comes on top: were it part of the budget, nothing would be gathered ahead once it is full,
    and every reduce would be waited for.
    """

    def __init__(self, rules: Rules, meter: Meter) -> None:
        self.budget_bytes = rules.budget_bytes
        self._meter = meter
        self._beside: dict[int, int] = {}  # bytes of units that come on top
        self._beside_bytes = 0

    @property
    def left(self) -> int:
        """The bytes that are not in use; below zero where one event needs more by itself."""
        return self.budget_bytes + self._beside_bytes - self._meter.live

    def set_beside(self, unit: int, num_bytes: int) -> None:
        """Count so many bytes of a gathered unit on top of the budget."""
        self._beside_bytes += num_bytes - self._beside.pop(unit, 0)
        if num_bytes:
            self._beside[unit] = num_bytes

    def reset(self) -> None:
        """Nothing is gathered."""
        self._beside.clear()
        self._beside_bytes = 0


def is_ordered(*, one_sided: bool, leave: bool, coded: bool) -> bool:
    """Whether gathers need every rank, so that all gather the same units in the same order: unless
    the memory of peers is mapped (`one_sided`) and holds the weights, and none of these `leave` the
    device, on any rank, or are `coded`.
    """
    return not one_sided or leave or coded


def grad_pool_bytes(largest_numel: int, bytes_per_element: int) -> int:
    """Return the bytes of a transport's gradient buffers: two of the largest unit."""
    return 2 * largest_numel * bytes_per_element


# ------------------------------------------------------------------------------------------ reduces


class Reduces:
    """The reduces of one engine that are under way, oldest first: nothing looks through all units
    for what is over.
    """

    def __init__(self, rules: Rules, room: Allowance) -> None:
        self._rules, self._room = rules, room
        # oldest first; whether the sum rests on another tier
        self.under_way: dict[Key, bool] = {}

    def make_room(self, num_bytes: int) -> Commands:
        """Wait for reduces under way, oldest first, until `num_bytes` fit the budget."""
        rules = self._rules
        for key in list(self.under_way) if rules.waits_for_room and rules.budget_bytes else ():
            if num_bytes <= self._room.left:
                return
            yield Command(Op.WAIT_REDUCE, *key)
            self.over(key)

    def before(self, key: Key) -> Commands:
        """Wait for the reduce of the same segment that is under way: they complete in order."""
        if key in self.under_way:
            yield Command(Op.WAIT_REDUCE, *key)
            self.over(key)

    def start(self, key: Key, *, off_device: bool = False) -> None:
        """A reduce has been started; `off_device`: its sum rests on another tier."""
        self.under_way[key] = off_device

    def over(self, key: Key) -> None:
        """A reduce is over, and its bucket is free."""
        self.under_way.pop(key, None)

    def handed_over(self) -> Commands:
        """The gradients of a unit have been handed over: note which sums are over.

        Where gathers are ordered, of sums that rest on another tier two stay under way: the others
        would wait on the device for the end of the pass. Not those that stay on the device: a wait
        gives a buffer back, and what fits beside it is gathered ahead on every rank or on none.
        """
        if not self._rules.ordered:
            for key in list(self.under_way):
                yield Command(Op.POLL_REDUCE, *key)
            return
        op = Op.WAIT_REDUCE if self._rules.waits_for_room else Op.POLL_REDUCE
        if True not in self.under_way.values():
            return
        leaving = [key for key, off_device in self.under_way.items() if off_device]
        for key in leaving[:-MAX_FLUSHING]:
            yield Command(op, *key)
            if op is Op.WAIT_REDUCE:
                self.over(key)
            elif key in self.under_way:
                return  # its other parts have not come, perhaps, and nobody waits for them

    def finish(self) -> Commands:
        """Wait for every reduce under way, in the order in which they were started: the last wait
        then covers those before it.
        """
        for key in list(self.under_way):
            yield Command(Op.WAIT_REDUCE, *key)
            self.over(key)

    def reset(self) -> None:
        """Nothing is under way."""
        self.under_way.clear()


# -------------------------------------------------------------------------------------------- order
# Which units to prefetch and which to evict, from the order in which units ran in the last pass.
#
# ZeRO-Infinity, section 6.2, prefetches by a trace of operators; here by a trace of units, one per
# phase ("forward", "backward")::
#
#     recorded by the last pass   a  b  c  b  head
#     this pass                   a  b .
#                                    ^ position: predicts c, then head (b is live), up to the budget
#
# It is a whole trace because a unit that runs twice (b above) has two successors, and a wrong
# gather costs bytes on the wire. A unit that the trace does not contain predicts nothing.
#
# Invariants: a prediction names no unit twice, no live unit, and no more bytes than the budget. It
# is right if this pass repeats the last one; skipped units are followed at once. Traces may differ
# between ranks: compare before a two-sided collective for a predicted unit.
#
# Cost: one or two microseconds per unit and phase. Units and phases are any hashable names.

U = TypeVar("U", bound=Hashable)  # unit


def advance(trace: Sequence[U], position: int, unit: U) -> int | None:
    """Return the index of `unit`'s next run in `trace` after `position`, or None.

    Units between the two were skipped by this pass. ``advance("abcb", 0, "b") == 1``,
    ``advance("abcb", 1, "b") == 3``.
    """
    following = position + 1
    if following < len(trace) and trace[following] == unit:
        return following
    try:
        return trace.index(unit, following)
    except ValueError:
        return None


def fitting(
    trace: Sequence[U],
    start: int,
    *,
    sizes: Mapping[U, int],
    free_bytes: int,
    is_live: Callable[[U], bool],
) -> list[U]:
    """Return the units of ``trace[start:]`` to gather, up to the first too large for the rest.

    Units that are `is_live` are gathered already: left out and not counted.
    """
    units: list[U] = []
    for index in range(start, len(trace)):
        unit = trace[index]
        if is_live(unit) or unit in units:
            continue
        free_bytes -= sizes[unit]
        if free_bytes < 0:
            break
        units.append(unit)
    return units


def to_evict(
    prefetched: Iterable[U], upcoming: Sequence[U], *, sizes: Mapping[U, int], excess_bytes: int
) -> list[U]:
    """Return which `prefetched` units, none in use, to release for `excess_bytes`.

    First those that are not `upcoming` at all, oldest first; then those needed last (Belady's
    rule). Returns all of them when that is not enough: a needed unit is gathered in any case.
    """
    if excess_bytes <= 0:
        return []
    next_run = {unit: index for index, unit in reversed(list(enumerate(upcoming)))}
    evicted: list[U] = []
    last_first = sorted(prefetched, key=lambda unit: -next_run.get(unit, len(upcoming)))
    for unit in last_first:
        evicted.append(unit)
        excess_bytes -= sizes[unit]
        if excess_bytes <= 0:
            break
    return evicted


@dataclass
class _Pass(Generic[U]):
    """One phase: the last pass's trace, this pass's position in it, and its units so far."""

    trace: list[U] = field(default_factory=list)
    position: int = -1
    so_far: list[U] = field(default_factory=list)
    # the same two with the units that were kept for a backward; None before any pass
    last_uses: list[U] | None = None
    uses: list[U] = field(default_factory=list)


class Order(Generic[U]):
    """The traces of all phases: ``begin`` a pass, ``record`` its units, ``predict``."""

    def __init__(self) -> None:
        self._passes: dict[Hashable, _Pass[U]] = {}

    def begin(self, phase: Hashable) -> None:
        """Start a pass: the last pass becomes the trace."""
        current = self._passes.get(phase)
        if current is None:
            self._passes[phase] = _Pass()
        else:
            last_uses = current.uses or current.last_uses or []
            self._passes[phase] = _Pass(current.so_far or current.trace, last_uses=last_uses)

    def last_uses(self, phase: Hashable) -> list[U] | None:
        """Return the units of the last complete pass that gathered any, in order, kept ones
        included: none where no pass has, and None before any pass.
        """
        current = self._passes.get(phase)
        return None if current is None else list(current.uses) or current.last_uses

    def seed(self, phase: Hashable, trace: Sequence[U]) -> None:
        """Take `trace` for the pass before the first."""
        self._passes[phase] = _Pass(trace=list(trace), last_uses=list(trace))

    def record(self, phase: Hashable, unit: U) -> None:
        """Say that `unit` runs now. The first call for a phase starts its first pass."""
        current = self._passes.get(phase)
        if current is None:
            current = self._passes[phase] = _Pass()
        current.so_far.append(unit)
        current.uses.append(unit)
        trace, following = current.trace, current.position + 1
        if following < len(trace) and trace[following] == unit:
            current.position = following  # as in the last pass
        elif (position := advance(trace, current.position, unit)) is not None:
            current.position = position

    def resume(self, phase: Hashable, unit: U) -> None:
        """Say that `unit` runs now, which was kept: that predicts no gather."""
        self._passes.setdefault(phase, _Pass()).uses.append(unit)

    def predict(
        self,
        phase: Hashable,
        unit: U,
        *,
        sizes: Mapping[U, int],
        live_bytes: int,
        budget_bytes: int,
        is_live: Callable[[U], bool] | None = None,
        around: bool = False,
    ) -> list[U]:
        """Return the units to prefetch after `unit`, in the order in which they are needed;
        `around`: after the last unit come the units of a next pass like this one.

        `sizes` are gathered bytes. `is_live` says of a unit whether it is gathered now, as `unit`
        is (default: it alone), with `live_bytes` in all; live and predicted units together never
        exceed `budget_bytes`.
        """
        start = self._after(phase, unit)
        if start is None:
            return []
        trace = self._passes[phase].trace
        return fitting(
            trace[start:] + trace[:start] if around else trace,
            0 if around else start,
            sizes=sizes,
            free_bytes=budget_bytes - live_bytes,
            is_live=unit.__eq__ if is_live is None else is_live,
        )

    def upcoming(self, phase: Hashable, unit: U, *, around: bool = False) -> list[U]:
        """Return the units expected after `unit` in this pass, repeats included; `around`: and the
        units of a next pass like this one, up to `unit`.
        """
        start = self._after(phase, unit)
        if start is None:
            return []
        trace = self._passes[phase].trace
        return trace[start:] + trace[:start] if around else trace[start:]

    def _after(self, phase: Hashable, unit: U) -> int | None:
        current = self._passes.get(phase)
        if current is None:
            return None
        trace, position = current.trace, current.position
        is_there = position >= 0 and trace[position] == unit
        found = position if is_there else advance(trace, position, unit)
        return None if found is None else found + 1
