"""What the engine itself takes during a step beyond what rests: its own rules, played to the events
of a pass (trace.py), in bytes.

    gathered      units in use and ahead of use, within the budget (runtime/budget.py, prefetch.py);
                  what a row keeps between forward and backward
    gradients     the pool of buckets (comm/slots.py), which keeps its memory
    staging       slices of other ranks on their way into a sum, and sums between two levels, which
                  keep their memory, too; sums on their way to another tier
    resting       gradients that rest on the device so far, with the sums of micro-batches that no
                  reduce has taken

Invariant: a reduce that was handed over with one unit has ended when the next one has been: CPU
ranks look after their messages then, and an accelerator has two under way. What the engine counts
(``engine.memory().peak``) is `metered`. Cost: microseconds per event. What it does not know: how
long anything takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from zeroshard.core.order import Order, to_evict
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.planner.exact import LaidOut, cells_by_unit
from zeroshard.planner.held import CODEC_SCRATCH_BYTES, Exchange, GroupBytes, UnitBytes, group_bytes
from zeroshard.planner.trace import ActivationTrace, Moment
from zeroshard.planner.training import Training

__all__ = ["Instant", "Playback"]


@dataclass(frozen=True)
class Instant:
    """What the engine holds from one event of a pass to the next, and the event."""

    moment: Moment
    gathered: int
    gradients: int
    staging: int
    resting: int  # of gradients, sums that no reduce has taken among them, on the device


@dataclass(eq=False)
class _Buffer:
    num_bytes: int
    lent: bool = True
    loan: _Reduce | None = None  # the last reduce that it was lent for


@dataclass(eq=False)
class _Reduce:
    """A bucket, from its first gradient until the engine has waited for its sum."""

    key: tuple[int, int]  # unit, group
    num_bytes: int
    buffer: _Buffer | None  # None: the gradient rests in it, or is encoded first
    others: list[_Buffer] = field(default_factory=list)  # of what arrives
    twice: bool = False  # its memory has been lent again
    turn: int = 0  # number of the hand-over


class _Pool:
    """Memory that is lent and comes back, as comm/slots.py and memory.py: Pool keep it."""

    def __init__(self, limit: int, page: int) -> None:
        self._limit, self._page = limit, page
        self._buffers: list[_Buffer] = []
        self.num_bytes = 0

    def take(self, num_bytes: int, *, spill: bool = False) -> _Buffer | None:
        """Lend a buffer; None where there is no room for one, unless it may `spill`."""
        wanted = max(-(-num_bytes // self._page), 1) * self._page
        idle = [buffer for buffer in self._buffers if not buffer.lent]
        fits = [buffer for buffer in idle if buffer.num_bytes >= wanted]
        if fits:
            best = min(fits, key=lambda buffer: buffer.num_bytes)
            best.lent = True
            return best
        for buffer in idle:
            if self.num_bytes + wanted <= self._limit:
                break
            self._buffers.remove(buffer)
            self.num_bytes -= buffer.num_bytes
        if self._buffers and self.num_bytes + wanted > self._limit and not spill:
            return None
        made = _Buffer(wanted)
        self._buffers.append(made)
        self.num_bytes += wanted
        return made


@dataclass(frozen=True)
class _Rules:
    """What the row and the way of meeting decide."""

    exchange: Exchange
    ordered: bool  # all ranks gather the same units in the same order
    sharded: bool  # weights rest sharded
    keeps: bool  # ... and stay whole between forward and backward
    budget: int
    prefetch: int

    @property
    def waits_for_room(self) -> bool:
        """Whether a gather or a bucket waits for reduces when the budget is full."""
        return self.ordered and (self.sharded or not self.exchange.keyed)


@dataclass
class _Meter:
    """What memory.py: MemoryCounter counts."""

    live: int = 0
    twice: int = 0  # bytes of loans whose memory has been lent again
    kept: int = 0  # of live ones, bytes of weights that wait for their backward
    most: int = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes as live."""
        self.live += num_bytes
        self.most = max(self.most, self.live - self.twice)


class _Gathered:
    """The units that are gathered, as runtime/weights.py and prefetch.py decide."""

    def __init__(
        self, units: list[UnitBytes], rules: _Rules, meter: _Meter, make_room: Callable[[int], None]
    ) -> None:
        self._units, self._rules, self._meter = units, rules, meter
        self._make_room = make_room
        self._sizes = {index: unit.full for index, unit in enumerate(units)}
        self._phase = "forward"
        self._order: Order[int] = Order()
        self._here: dict[int, int] = {}  # unit -> equal units that it stands for
        self._ahead: dict[int, None] = {}
        self._columns: dict[int, int] = {}  # unit -> bytes kept of it
        self._kept: dict[int, int] = {}  # unit -> bytes that wait whole for its backward
        self.decoding = 0  # bytes of the encoding of the unit that was needed last

    @property
    def num_bytes(self) -> int:
        """The bytes of all that is gathered or kept, and of what is not decoded yet."""
        whole = sum(self._sizes[unit] * count for unit, count in self._here.items())
        encoded = sum(self._units[unit].encoded for unit in self._ahead)
        return whole + sum(self._columns.values()) + encoded

    def begin(self, phase: str) -> None:
        """Start a pass; what was gathered ahead in the last one goes."""
        for unit in list(self._ahead):
            self._give_back(unit)
        self._phase = phase
        self._order.begin(phase)

    @property
    def _left(self) -> int:
        return self._rules.budget + self._meter.kept - self._meter.live

    def _keep(self, unit: int, num_bytes: int) -> None:
        self._meter.kept += num_bytes - self._kept.pop(unit, 0)
        if num_bytes:
            self._kept[unit] = num_bytes

    def gather(self, unit: int) -> None:
        """A unit is needed."""
        if not self._rules.sharded:
            return
        size = self._sizes[unit]
        if unit not in self._here:
            if self._ahead and size > self._left:
                upcoming = self._order.upcoming(self._phase, unit)
                excess = size - self._left
                for other in to_evict(
                    self._ahead, upcoming, sizes=self._sizes, excess_bytes=excess
                ):
                    self._give_back(other)
            self._make_room(size)
            self._take(unit)
        elif unit not in self._ahead and self._phase == "backward" and self._rules.keeps:
            self._keep(unit, self._sizes[unit] * (self._here[unit] - 1))
            return  # it was kept
        self._ahead.pop(unit, None)
        self.decoding = self._units[unit].encoded
        self._order.record(self._phase, unit)
        if size:
            self._gather_ahead(unit)

    def _take(self, unit: int) -> None:
        self._here[unit] = 1
        self._meter.add(self._sizes[unit])

    def _gather_ahead(self, unit: int) -> None:
        under_way = sum(self._sizes[other] for other in self._ahead)
        allowed = min(self._left, self._rules.prefetch - under_way)
        if allowed <= 0:
            return
        following = self._order.predict(
            self._phase,
            unit,
            sizes=self._sizes,
            live_bytes=0,
            budget_bytes=allowed,
            live=self._here,
        )
        for other in following:
            if self._sizes[other]:
                self._ahead[other] = None
                self._take(other)

    def release(self, unit: int, repeats: int) -> None:
        """A unit, which stands for so many, is needed no longer."""
        if unit not in self._here:
            return
        if self._phase == "backward":
            self._columns.pop(unit, None)
            self._give_back(unit)
        elif self._rules.keeps:
            self._meter.add(self._sizes[unit] * (repeats - self._here[unit]))
            self._here[unit] = repeats
            self._keep(unit, self._sizes[unit] * repeats)
        else:
            self._columns[unit] = self._units[unit].column * repeats
            self._give_back(unit)

    def _give_back(self, unit: int) -> None:
        self._ahead.pop(unit, None)
        self._keep(unit, 0)
        self._meter.live -= self._sizes[unit] * self._here.pop(unit)


class _Reduced:
    """Gradients from buckets to where they rest, as runtime/gradients.py and reductions.py bring
    them there.
    """

    def __init__(
        self, units: list[UnitBytes], rules: _Rules, meter: _Meter, pool_bytes: int
    ) -> None:
        self._units, self._rules, self._meter = units, rules, meter
        page = 4096 if rules.exchange.pages else 64
        self.pool = _Pool(pool_bytes, page)
        # slices that arrive; of two levels the sums between them, slices of those, and decoded
        self._others = [_Pool(pool_bytes, of) for of in (64, page, 64, 64)]
        self.own = 0  # bytes of buckets that are encoded before they are sent
        self.passed = 0  # ... and of what came and went during the last event
        self._open: dict[tuple[int, int], _Reduce] = {}
        self._flights: list[_Reduce] = []
        self._partial: dict[tuple[int, int], int] = {}
        self._rest: dict[tuple[int, int], int] = {}
        self._turns = 0

    @property
    def arriving(self) -> int:
        """The bytes that pools keep for what arrives."""
        return sum(pool.num_bytes for pool in self._others)

    @property
    def resting(self) -> int:
        """The bytes of gradients that rest on the device."""
        return sum(self._rest.values()) + sum(self._partial.values())

    @property
    def passing(self) -> int:
        """Bytes of sums on their way to another tier: of the last reduces, two and one more."""
        return sum(self._group(one.key).passing for one in self._flights[-3:])

    def drop(self) -> None:
        """Forget what rests."""
        self._rest.clear()

    def _group(self, key: tuple[int, int]) -> GroupBytes:
        return self._units[key[0]].groups[key[1]]

    def take(self, key: tuple[int, int], *, sync: bool) -> None:
        """The first gradient of a group is there."""
        group = self._group(key)
        if group.waits is Scope.FULL and (key in self._partial or not sync):
            self._partial.setdefault(key, group.partial)
            return
        self._open_bucket(key)

    def _open_bucket(self, key: tuple[int, int]) -> None:
        if key in self._open:
            return
        group = self._group(key)
        if not group.bucket:  # it fills the resting gradient
            self._rest[key] = group.rest
            self._open[key] = _Reduce(key, 0, None)
            return
        self.make_room(group.bucket)
        made = self._open[key] = _Reduce(key, group.bucket, None)
        if group.is_encoded:
            self.own += group.bucket
        else:
            self._lend(made, group.sums.sent)
        self._meter.add(group.bucket)

    def _lend(self, reduce: _Reduce, num_bytes: int) -> None:
        """Give `reduce` a buffer of the pool, for which it may wait."""
        waiting = [one for one in self._flights if one.buffer is not None and one.buffer.lent]
        buffer = self.pool.take(num_bytes, spill=not waiting)
        while buffer is None:
            self._arrive(waiting.pop(0))
            buffer = self.pool.take(num_bytes, spill=not waiting)
        if buffer.loan is not None:
            buffer.loan.twice = True
            self._meter.twice += buffer.loan.num_bytes
        buffer.loan, reduce.buffer = reduce, buffer

    def make_room(self, num_bytes: int) -> None:
        """Wait for reduces until so much fits the budget."""
        rules, meter = self._rules, self._meter
        while (
            rules.waits_for_room
            and self._flights
            and num_bytes > rules.budget + meter.kept - meter.live
        ):
            self._end(self._flights[0])

    def reduce(self, unit: int, repeats: int, *, sync: bool) -> None:
        """All gradients of a unit, which stands for so many, are there."""
        for number, group in enumerate(self._units[unit].groups):
            if not group.trained:
                continue
            if sync or group.waits is not Scope.FULL:
                self._hand_over((unit, number), sync)
            self._come_to_rest((unit, number), repeats, sync)
        self._turns += 1
        alone = self._rules.exchange.alone  # with one rank, a reduce is over at once
        for one in [one for one in self._flights if alone or one.turn < self._turns - 1]:
            self._arrive(one)
            if not self._rules.ordered:
                self._end(one)

    def _come_to_rest(self, key: tuple[int, int], repeats: int, sync: bool) -> None:
        """Sums of the group, and of those of the `repeats` - 1 units after it, wait or rest."""
        unit, number = key
        groups = [self._units[unit + more].groups[number] for more in range(repeats)]
        waiting = [group for group in groups if group.waits and not sync]
        self._partial.pop(key, None)
        if waiting:
            self._partial[key] = sum(group.partial for group in waiting)
        if len(waiting) < repeats:
            self._rest[key] = sum(group.rest for group in groups if sync or not group.waits)

    def _hand_over(self, key: tuple[int, int], sync: bool) -> None:
        group = self._group(key)
        for before in [one for one in self._flights if one.key == key]:
            self._end(before)
        self._open_bucket(key)
        made = self._open.pop(key)
        if not group.bucket:
            return
        if group.is_encoded:
            self._encode(made, group)
        sums, inside = group.sums, group.waits is Scope.NODE_SHARD and not sync
        wanted = (sums.received, sums.column, sums.received_after, sums.decoded)
        for pool, num_bytes in zip(self._others, wanted[:1] if inside else wanted, strict=False):
            buffer = pool.take(num_bytes, spill=True) if num_bytes else None
            made.others += [] if buffer is None else [buffer]
        made.turn = self._turns
        self._flights.append(made)

    def _encode(self, reduce: _Reduce, group: GroupBytes) -> None:
        """The engine's own bucket is encoded, and goes where nothing that was enqueued reads it."""
        self._lend(reduce, group.sums.sent)
        self.passed += group.lost
        if not self._rules.exchange.enqueues:
            self._end_own(reduce)
            self.passed += group.bucket

    def _end_own(self, reduce: _Reduce) -> None:
        self.own -= reduce.num_bytes
        self._meter.live -= reduce.num_bytes
        reduce.num_bytes = 0

    def _arrive(self, reduce: _Reduce) -> None:
        """Its sum is formed: the pools have their memory back."""
        if reduce.buffer is not None and reduce.buffer.loan is reduce:
            reduce.buffer.lent = False
        for buffer in reduce.others:
            buffer.lent = False
        reduce.others.clear()

    def _end(self, reduce: _Reduce) -> None:
        """The engine has waited for it."""
        self._arrive(reduce)
        self._flights.remove(reduce)
        if self._group(reduce.key).is_encoded:
            self._end_own(reduce)
        self._meter.live -= reduce.num_bytes
        if reduce.twice:
            self._meter.twice -= reduce.num_bytes
        elif reduce.buffer is not None:
            reduce.buffer.loan = None

    def wait(self) -> None:
        """Wait for all that are under way."""
        while self._flights:
            self._end(self._flights[0])


class Playback:
    """The engine's memory over passes of one model in one row."""

    def __init__(
        self, laid_out: LaidOut, policy: Policy, training: Training, exchange: Exchange
    ) -> None:
        """Begin with an engine that holds no gradient, before its first pass."""
        cells, model = policy.default, laid_out.model
        placed = list(cells_by_unit(laid_out, policy, training))
        sized = partial(
            group_bytes, training=training, exchange=exchange, node_sums=policy.sums_nodes
        )
        known = {id(unit): unit for unit in placed}
        made = {key: UnitBytes(tuple(map(sized, unit))) for key, unit in known.items()}
        units = [made[id(unit)] for unit in placed]
        nominal = max(sum(group.whole for group in unit.groups) for unit in units)
        dtypes = {group.dtype for unit in model.units for group in unit.groups}
        widest = max(training.formats(dtype).reduce.plain.bytes_per_element for dtype in dtypes)
        away = cells.weight.tier is not Tier.DEVICE
        is_coded = any(unit.encoded for unit in units)
        sends_coded = any(group.is_encoded for unit in units for group in unit.groups)
        self.scratch = 0 if exchange.enqueues else CODEC_SCRATCH_BYTES * (is_coded or sends_coded)
        rules = _Rules(
            exchange,
            ordered=not (exchange.alone or exchange.maps_peers) or away or is_coded,
            sharded=cells.weight.is_sharded,
            keeps=cells.weight.is_sharded and not cells.between.is_sharded,
            budget=(3 + exchange.enqueues) * nominal,
            prefetch=nominal,
        )
        pool_bytes = 2 * max(unit.numel for unit in model.units) * round(widest)
        self._meter = _Meter()
        self._reduced = _Reduced(units, rules, self._meter, pool_bytes)
        self._gathered = _Gathered(units, rules, self._meter, self._reduced.make_room)

    @property
    def metered(self) -> int:
        """The most bytes that the engine's own meter has counted: ``engine.memory().peak``."""
        return self._meter.most

    @property
    def resting(self) -> int:
        """The bytes of gradients that rest on the device now."""
        return self._reduced.resting

    @property
    def pooled(self) -> tuple[int, int]:
        """The bytes that pools keep now: of buckets, and of what arrives."""
        return self._reduced.pool.num_bytes, self._reduced.arriving

    def drop_gradients(self) -> None:
        """``zero_grad()``: no gradient rests."""
        self._reduced.drop()

    def wait(self) -> None:
        """``optimizer.step()`` begins: no reduce is under way."""
        self._reduced.wait()

    def run(self, trace: ActivationTrace, *, sync: bool) -> Iterator[Instant]:
        """Yield what is held at every event of a pass; `sync` False: inside ``no_sync()``."""
        gathered, reduced = self._gathered, self._reduced
        gathered.begin("forward")
        for moment in trace.moments:
            unit = moment.unit
            gathered.decoding = reduced.passed = 0
            if moment.event == "gather":
                gathered.gather(unit)
            elif moment.event == "release":
                gathered.release(unit, moment.repeats)
            elif moment.event == "gradient":
                reduced.take((unit, moment.group), sync=sync)
            elif moment.event == "reduce":
                reduced.reduce(unit, moment.repeats, sync=sync)
            else:
                gathered.begin("backward" if moment.event == "turn" else "forward")
            buckets, arrivals = self.pooled
            yield Instant(
                moment,
                gathered.num_bytes + gathered.decoding,
                buckets + reduced.own,
                arrivals + reduced.passing + reduced.passed,
                reduced.resting,
            )
