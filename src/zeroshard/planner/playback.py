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
from dataclasses import dataclass
from functools import partial

from zeroshard.core.order import Order, to_evict
from zeroshard.core.placement import Tier
from zeroshard.core.policy import Policy
from zeroshard.planner.buckets import Meter, Reduced, Rules
from zeroshard.planner.exact import LaidOut, cells_by_unit
from zeroshard.planner.held import CODEC_SCRATCH_BYTES, Exchange, UnitBytes, group_bytes
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


class _Gathered:
    """The units that are gathered, as runtime/weights.py and prefetch.py decide."""

    def __init__(
        self, units: list[UnitBytes], rules: Rules, meter: Meter, make_room: Callable[[int], None]
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
        rules = Rules(
            exchange,
            ordered=not (exchange.alone or exchange.maps_peers) or away or is_coded,
            sharded=cells.weight.is_sharded,
            keeps=cells.weight.is_sharded and not cells.between.is_sharded,
            budget=(3 + exchange.enqueues) * nominal,
            prefetch=nominal,
        )
        pool_bytes = 2 * max(unit.numel for unit in model.units) * round(widest)
        self._meter = Meter()
        self._reduced = Reduced(units, rules, self._meter, pool_bytes)
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
