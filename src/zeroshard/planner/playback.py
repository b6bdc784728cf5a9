"""What the engine itself takes during a step beyond what rests: its schedule (core/schedule),
executed on bytes at the events of a pass (activation_trace.py).

    gathered      units in use and ahead of use, within the budget; what a row keeps between forward
                  and backward
    gradients     the pool of buckets (comm/cpu/slots.py), which keeps its memory
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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from zeroshard.core.policy import Policy
from zeroshard.core.schedule import (
    RELEASES,
    Commands,
    Op,
    Phase,
    Schedule,
)
from zeroshard.planner.activation_trace import ActivationTrace, Moment
from zeroshard.planner.buckets import PlannedMeter, Reduced
from zeroshard.planner.exact import LaidOut, cells_by_unit, made_once
from zeroshard.planner.held import (
    CODEC_SCRATCH_BYTES,
    TransportTraits,
    UnitBytes,
    group_bytes,
    pool_bytes,
)
from zeroshard.planner.training import Training


@dataclass(frozen=True)
class Instant:
    """What the engine holds from one event of a pass to the next, and the event."""

    moment: Moment
    gathered: int
    gradients: int
    staging: int
    resting: int  # of gradients, sums that no reduce has taken among them, on the device


class _Gathered:
    """The bytes of units that are gathered, or kept for their backward."""

    def __init__(
        self, units: list[UnitBytes], schedule: Schedule, meter: PlannedMeter, reduced: Reduced
    ) -> None:
        self._units, self._schedule, self._meter = units, schedule, meter
        self._reduced = reduced
        self._phase: Phase = "forward"
        self._gathered: dict[int, int] = {}  # unit -> equal units that it stands for
        self._columns: dict[int, int] = {}  # unit -> bytes kept of it
        self.decoding = 0  # bytes of the encoding of the unit that was needed last

    @property
    def num_bytes(self) -> int:
        """The bytes of all that is gathered or kept, and of what is not decoded yet."""
        whole = sum(self._units[unit].full * count for unit, count in self._gathered.items())
        encoded = sum(self._units[unit].encoded for unit in self._schedule.ahead)
        return whole + sum(self._columns.values()) + encoded

    def begin(self, phase: Phase) -> None:
        """Start a pass."""
        self._phase = phase
        self._run(self._schedule.begin(phase))

    def gather(self, unit: int) -> None:
        """A unit is needed."""
        self._run(self._schedule.need(self._schedule.units[unit], self._phase, keeps=True))

    def release(self, unit: int, repeats: int) -> None:
        """A unit, which stands for so many, is needed no longer."""
        residency = self._schedule.units[unit]
        if self._phase == "backward":
            self._run(self._schedule.after_backward(residency))
        else:
            self._run(self._schedule.after_forward(residency, keeps=True), repeats)

    def _run(self, commands: Commands, repeats: int = 1) -> None:
        """Execute `commands` on bytes; a unit that is kept stands for `repeats`."""
        for command in commands:
            op, unit = command.op, command.unit
            if op is Op.START:
                self._gathered[unit] = 1
                self._meter.add(self._units[unit].full)
            elif op is Op.USE:
                self.decoding = self._units[unit].encoded
            elif op in RELEASES:
                size = self._units[unit].full
                self._meter.live -= size
                self._meter.folded -= size * (self._gathered.pop(unit) - 1)
                if op is Op.RELEASE_FOR_BACKWARD:
                    self._columns[unit] = self._units[unit].column * repeats
                elif op is Op.RELEASE_ALL:
                    self._columns.pop(unit, None)
            elif op is Op.IDLE:
                self._meter.fold(self._units[unit].full * (repeats - self._gathered[unit]))
                self._gathered[unit] = repeats
            elif op is Op.WAIT_REDUCE:
                self._reduced.end((command.unit, command.segment))


class Playback:
    """The engine's memory over passes of one model in one row."""

    def __init__(
        self, laid_out: LaidOut, policy: Policy, training: Training, exchange: TransportTraits
    ) -> None:
        """Begin with an engine that holds no gradient, before its first pass."""
        sized = partial(
            group_bytes, training=training, exchange=exchange, node_sums=policy.sums_nodes
        )
        placed = cells_by_unit(laid_out, policy, training)
        units = made_once(placed, lambda unit: UnitBytes(tuple(map(sized, unit))))
        is_coded = any(unit.encoded for unit in units)
        sends_coded = any(group.is_encoded for unit in units for group in unit.groups)
        self.scratch = 0 if exchange.enqueues else CODEC_SCRATCH_BYTES * (is_coded or sends_coded)
        self._meter = PlannedMeter()
        schedule = exchange.schedule(units, policy.default, self._meter)
        room = pool_bytes(laid_out.model, training)
        self._reduced = Reduced(units, exchange, schedule, self._meter, room)
        self._gathered = _Gathered(units, schedule, self._meter, self._reduced)

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
