"""A step's schedule, replayed: one model in one row on one rank. Bytes (peak.py) and jobs
(simulate.py) are two readings of it.

The engine's own schedule (core/schedule) says at every event of a pass what is gathered, released
and waited for; `PlanReplay` asks it, and a reading executes its commands. Here are also the buffers
of a unit: what gathering takes, and buckets and what arrives for their sums, in the memory that
pools keep, until gradients rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zeroshard.core.layout import Layout
from zeroshard.core.placement import Cell, Cells, Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.residency import Residency, UnitTraits
from zeroshard.core.route import Axis, Hop, Kind, Route, Routes, routes
from zeroshard.core.schedule import RELEASES, Command, Commands, Op, Phase, Rules, Schedule
from zeroshard.core.schedule.rules import grad_pool_bytes, is_ordered
from zeroshard.core.wire import Formats, Wire
from zeroshard.planner.exact import LaidOut, LaidOutGroup, Placed, cells_by_unit, made_once
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import Training

# ---------------------------------------------------------------------------- the bytes of one unit
# In one row, on one rank; peak.py says when.
#
#     gathered      the full buffer; where weights travel encoded (comm/quantized.py), the encoding,
#                   until it is decoded
#     one sum       a bucket in the dtype of gradients; with a codec its encoding, which is what the
#                   transport has; slices of other ranks; over nodes, between the two levels, a
#                   column's sum (comm/levels.py)
#
# Invariant: sizes come from the routes' hops.

CODEC_SCRATCH_BYTES = 6 << 18  # of a host's thread that encodes, for ever: comm/codec.py


@dataclass(frozen=True)
class TransportTraits:
    """The properties of a transport that decide memory (comm/select.py)."""

    alone: bool  # one rank: nothing to exchange
    maps_peers: bool  # a gather of what rests sharded on the device moves nothing
    keyed: bool  # ranks may run their units in different order
    receives: bool  # slices of other ranks arrive in memory of this one
    near: bool  # ... but for slices of its node's ranks
    pages: bool  # buckets are whole pages
    enqueues: bool  # the host runs ahead of the device

    @classmethod
    def of(cls, machine: Machine, name: str = "auto") -> TransportTraits:
        """Return what `machine` takes, or a CPU's transport called `name`."""
        if machine.gpus == 1:
            return cls(True, True, True, False, False, False, machine.accelerator)
        if machine.accelerator:
            return cls(False, False, False, True, False, False, True)
        shared = name == "shared_memory" or (name == "auto" and machine.mesh.num_nodes == 1)
        return cls(False, shared, True, not shared, name != "gloo", True, False)


@dataclass(frozen=True)
class Sums:
    """The buffers of one reduce that transports lend."""

    sent: int = 0  # the bucket, or its encoding
    received: int = 0  # slices of other ranks; in two levels, of the node's
    column: int = 0  # in two levels: the node's sum, as it goes on
    received_after: int = 0  # ... and slices of it from other nodes
    decoded: int = 0  # ... and fp32, where it goes on encoded


@dataclass(frozen=True)
class PlannedGroup:
    """One group of one unit in a row: its cells, routes and formats, and its bytes on rank 0."""

    one: LaidOutGroup
    cells: Cells
    routes: Routes
    formats: Formats
    whole: int  # of the weights
    full: int  # that gathering takes beyond what rests
    encoded: int  # ... until it is decoded
    column: int  # kept of it for the backward
    bucket: int
    is_encoded: bool  # the bucket is memory of the engine's own, not of a transport
    lost: int  # while it is encoded, where errors are fed back
    sums: Sums
    rest: int  # of its gradient, on the device
    passing: int  # of its sum on the way to another tier
    partial: int  # of micro-batches or of a node, on the device
    waits: Scope | None  # ... where these wait, as a sum that ranks have not reduced

    @property
    def trained(self) -> bool:
        """Whether it has gradients."""
        return self.one.group.trained

    @property
    def resting(self) -> int:
        """The bytes of its gradient that rest on the device after a micro-batch."""
        return self.partial if self.waits else self.rest

    @property
    def is_mapped(self) -> bool:
        """Whether every rank maps its weights, so that a gather moves nothing."""
        return self.cells.weight.is_sharded and not self.full

    def bytes_of(self, cell: Cell, per_element: float) -> float:
        """Return the bytes of a trained group's state in `cell` on rank 0."""
        return self.one.held(cell, 0) * per_element if self.one.group.trained else 0.0

    def reduce(self, number: int, micro_batches: int) -> Route:
        """Return the reduce of micro-batch `number`: see Routes.step, inside no_sync."""
        routes, again = self.routes, number > 0
        route = routes.reduce if number == micro_batches - 1 else routes.reduce_partial
        return route.for_pass(held=routes.holds and again, again=not routes.holds and again)


@dataclass(frozen=True)
class PlannedUnit:
    """A unit's groups."""

    groups: tuple[PlannedGroup, ...]
    whole: int  # bytes of all groups: of the weights
    full: int  # ... that gathering takes beyond what rests
    encoded: int  # ... until it is decoded
    column: int  # ... that are kept for the backward

    @classmethod
    def of(cls, groups: tuple[PlannedGroup, ...]) -> PlannedUnit:
        """Return the unit of these groups."""
        names = ("whole", "full", "encoded", "column")
        return cls(groups, *(sum(getattr(one, name) for one in groups) for name in names))

    @cached_property
    def trained(self) -> tuple[PlannedGroup, ...]:
        """The groups that have gradients."""
        return tuple(group for group in self.groups if group.trained)


def planned_group(
    placed: Placed, training: Training, exchange: TransportTraits, *, node_sums: bool
) -> PlannedGroup:
    """Return one group as rank 0 has it; `node_sums`: see ``core.route.routes``."""
    (one, cut, cells), layout = placed, placed[0].layout
    formats = one.formats(training)
    weight, wire, grad = (
        round(form.bytes_per_element)
        for form in (formats.weight.plain, formats.reduce.plain, formats.grad)
    )
    group_routes = routes(cells, layout.mesh, formats, node_sums=node_sums)
    forward = group_routes.unshard_forward.hops
    whole, trained = layout.numel * weight, one.group.trained
    column = layout.span(0, Scope.NODE_SHARD)
    column_bytes = formats.gather.bytes_per_element * (column[1] - column[0])
    own = layout.ranges[0][1] - layout.ranges[0][0]
    on_device = cut.grad == one.held(cells.optim, 0)
    # one rank, and gradients rest as they come: there is nothing to sum; a sum of micro-batches is
    # rounded as it would be on the wire
    comes_exact = formats.reduce == formats.weight.plain and formats.grad == Wire.of("fp32")
    rounds = training.leaves is not None or (cells.grad.is_partial and training.micro_batches > 1)
    as_it_comes = formats.reduce == formats.grad or (comes_exact and not rounds)
    direct = exchange.alone and as_it_comes and on_device
    is_summed = trained and not direct
    is_encoded = is_summed and formats.reduce.codec is not None
    # a sum that waits is never cut, and of a node's ranks it stays on the device
    waits = layout.scope(cells.grad) if cells.grad.is_partial else None
    is_near = cells.grad.tier is Tier.DEVICE or waits is Scope.NODE_SHARD
    reduces = [hop for hop in group_routes.reduce.hops if hop.kind is Kind.REDUCE_SCATTER]
    # read as a whole without gathering: not what travels or rests encoded, which is decoded into
    # memory of its own
    scope = layout.scope(cells.weight)
    mapped = exchange.maps_peers and scope is Scope.SHARD
    in_place = cells.weight.tier is Tier.DEVICE and formats.gather.codec is None
    in_place = in_place and (scope is Scope.FULL or exchange.alone or mapped)
    return PlannedGroup(
        one,
        cells,
        group_routes,
        formats,
        whole=whole,
        full=0 if in_place else whole,
        encoded=sum(
            round(hop.held_bytes(hop.target, layout.numel))
            for hop in forward
            if hop.kind is Kind.ENCODE
            or (hop.kind is Kind.ALL_GATHER and hop.wire.codec is not None)
        ),
        column=round(column_bytes) if any(hop.kind is Kind.KEEP for hop in forward) else 0,
        bucket=layout.numel * wire if is_summed else 0,
        is_encoded=is_encoded,
        lost=4 * layout.numel if is_encoded and training.error_feedback else 0,
        sums=_sums(layout, formats, reduces, exchange) if is_summed else Sums(),
        rest=cut.grad * grad,
        passing=0 if on_device else own * 4,
        partial=one.held(cells.grad, 0) * grad if waits and is_near else 0,
        waits=waits,
    )


def _sums(
    layout: Layout, formats: Formats, reduces: Sequence[Hop], exchange: TransportTraits
) -> Sums:
    mesh, wire = layout.mesh, formats.reduce.bytes_per_element
    sent = round(layout.numel * wire)
    own = layout.ranges[0][1] - layout.ranges[0][0]
    others, inside, nodes = mesh.size - 1, mesh.node_size - 1, mesh.num_nodes - 1
    near = inside if exchange.near else 0
    if exchange.enqueues:  # the backend adds up what arrives
        others, inside, nodes, near = 1, 1, 1, 0
    if not exchange.receives:
        return Sums(sent)
    if all(hop.axis is Axis.FLAT for hop in reduces):
        return Sums(sent, round(own * wire) * (others - near))
    start, stop = layout.span(0, Scope.NODE_SHARD)
    hop = formats.node_sum.bytes_per_element
    return Sums(
        sent,
        received=round((stop - start) * wire) * (inside - near),
        column=round((stop - start) * hop),
        received_after=round(own * hop) * nodes,
        decoded=0 if formats.node_sum.codec is None else 4 * (stop - start),
    )


# -------------------------------------------------------------------------------- buckets and pools


@dataclass
class PlannedMeter:
    """The counts of ``memory.MemoryCounter``, planned."""

    live: int = 0
    twice: int = 0  # bytes of loans with memory that was lent again
    folded: int = 0  # bytes that wait for their backward, of units for which another one stands
    most: int = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes as live."""
        self.live += num_bytes
        self._note()

    def fold(self, num_bytes: int) -> None:
        """Count the bytes of units for which another one stands."""
        self.folded += num_bytes
        self._note()

    def _note(self) -> None:
        self.most = max(self.most, self.live + self.folded - self.twice)


class PlanReplay:
    """The schedule of one model's units in one row, asked at the events of passes (model.py)."""

    def __init__(
        self, laid_out: LaidOut, policy: Policy, training: Training, exchange: TransportTraits
    ) -> None:
        """Begin with an engine that holds nothing beside what rests."""

        def planned(unit: tuple[Placed, ...]) -> PlannedUnit:
            sums = policy.sums_nodes
            groups = (planned_group(one, training, exchange, node_sums=sums) for one in unit)
            return PlannedUnit.of(tuple(groups))

        units = self.planned = made_once(cells_by_unit(laid_out, policy, training), planned)
        cells, self.meter = policy.default, PlannedMeter()
        traits = made_once(units, lambda unit: UnitTraits.of(cells, unit.full, unit.whole))
        ordered = is_ordered(
            one_sided=exchange.alone or exchange.maps_peers,
            leave=cells.weight.tier is not Tier.DEVICE,
            coded=any(unit.encoded for unit in units),
        )
        rules = Rules.of(
            traits,
            ordered=ordered,
            keyed=exchange.keyed,
            enqueues=exchange.enqueues,
            alone=exchange.alone,
        )
        residencies = [Residency(at, one) for at, one in enumerate(traits)]
        self.schedule = Schedule(residencies, rules, self.meter)
        # of a transport's gradient buffers
        dtypes = {group.dtype for unit in laid_out.model.units for group in unit.groups}
        widest = max(training.formats(dtype).reduce.plain.bytes_per_element for dtype in dtypes)
        largest = max(unit.numel for unit in laid_out.model.units)
        self.pool_bytes = grad_pool_bytes(largest, round(widest))
        self._phase: Phase = "forward"

    def begin(self, phase: Phase) -> None:
        """A pass begins."""
        self._phase = phase
        self.run(self.schedule.begin(phase))

    def need(self, unit: int) -> None:
        """A unit is needed."""
        self.run(self.schedule.need(self.schedule.units[unit], self._phase, keeps=True))

    def release(self, unit: int, repeats: int = 1) -> None:
        """A unit, which stands for so many after a forward, is needed no longer."""
        residency = self.schedule.units[unit]
        if self._phase == "backward":
            self.run(self.schedule.after_backward(residency))
        else:
            self.run(self.schedule.after_forward(residency, keeps=True), repeats)

    def run(self, commands: Commands, repeats: int = 1) -> None:
        """Execute `commands`, which count for so many equal units."""
        for command in commands:
            if command.op is Op.START:
                self.meter.add(self.planned[command.unit].full)
            elif command.op in RELEASES:
                self.meter.live -= self.planned[command.unit].full
            self.execute(command, repeats)

    def execute(self, command: Command, repeats: int) -> None:
        """Read one command: as bytes, or as jobs."""
        raise NotImplementedError


@dataclass(eq=False)
class _PooledBuffer:
    num_bytes: int
    lent: bool = True
    loan: _Reduce | None = None  # the last reduce that it was lent for


@dataclass(eq=False)
class _Reduce:
    """A bucket, from its first gradient until the engine has waited for its sum."""

    key: tuple[int, int]  # unit, group
    num_bytes: int
    buffer: _PooledBuffer | None  # None: the gradient rests in it, or is encoded first
    others: list[_PooledBuffer] = field(default_factory=list)  # of what arrives
    twice: bool = False  # its memory has been lent again
    turn: int = 0  # number of the hand-over
    arrived: bool = False  # its sum is formed


class _PlannedPool:
    """Memory that is lent and comes back, as comm/cpu/slots.py and memory.py: Pool keep it.

    `limit` None: twice the largest buffer asked for.
    """

    def __init__(self, limit: int | None, page: int) -> None:
        self._given, self._page = limit, page
        self._buffers: list[_PooledBuffer] = []
        self._largest = 0
        self.num_bytes = 0

    @property
    def _limit(self) -> int:
        return 2 * self._largest if self._given is None else self._given

    def take(self, num_bytes: int, *, spill: bool = False) -> _PooledBuffer | None:
        """Lend a buffer; None where there is no room for one, unless it may `spill`."""
        wanted = max(-(-num_bytes // self._page), 1) * self._page
        self._largest = max(self._largest, wanted)
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
        made = _PooledBuffer(wanted)
        self._buffers.append(made)
        self.num_bytes += wanted
        return made


class Reduced:
    """Gradients from buckets to where they rest, as runtime/bucket.py brings them there; which
    reduces are waited for is the schedule's to say.
    """

    def __init__(self, replay: PlanReplay, exchange: TransportTraits) -> None:
        self._units, self._exchange, self._meter = replay.planned, exchange, replay.meter
        self._schedule, pool_bytes = replay.schedule, replay.pool_bytes
        page = 4096 if exchange.pages else 64
        self.pool = _PlannedPool(pool_bytes, page)
        # slices that arrive; of two levels the sums between them, slices of those, and decoded
        self._others = [
            _PlannedPool(pool_bytes, 64),
            *(_PlannedPool(None, of) for of in (page, 64, 64)),
        ]
        self.own = 0  # bytes of buckets that are encoded before they are sent
        self.passed = 0  # ... and of what came and went during the last event
        self._open: dict[tuple[int, int], _Reduce] = {}
        self._flights: dict[tuple[int, int], _Reduce] = {}
        self._passing: list[tuple[int, int]] = []  # the last reduces, in the order of their starts
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
        return sum(self._group(key).passing for key in self._passing[-3:])

    def drop(self) -> None:
        """Forget what rests."""
        self._rest.clear()

    def _group(self, key: tuple[int, int]) -> PlannedGroup:
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
        for command in self._schedule.reduces.make_room(group.bucket):
            self.end((command.unit, command.segment))
        made = self._open[key] = _Reduce(key, group.bucket, None)
        if group.is_encoded:
            self.own += group.bucket
        else:
            self._lend(made, group.sums.sent)
        self._meter.add(group.bucket)

    def _lend(self, reduce: _Reduce, num_bytes: int) -> None:
        """Give `reduce` a buffer of the pool, for which it may wait."""
        flights = self._flights.values()
        waiting = [one for one in flights if one.buffer is not None and one.buffer.lent]
        buffer = self.pool.take(num_bytes, spill=not waiting)
        while buffer is None:
            self._arrive(waiting.pop(0))
            buffer = self.pool.take(num_bytes, spill=not waiting)
        if buffer.loan is not None:
            buffer.loan.twice = True
            self._meter.twice += buffer.loan.num_bytes
        buffer.loan, reduce.buffer = reduce, buffer

    def reduce(self, unit: int, repeats: int, *, sync: bool) -> None:
        """All gradients of a unit, which stands for so many, are there."""
        for number, group in enumerate(self._units[unit].groups):
            if not group.trained:
                continue
            if sync or group.waits is not Scope.FULL:
                self._hand_over((unit, number), sync)
            # sums of the group, and of its like in the units after it, wait or rest
            key, alike = (unit, number), range(unit, unit + repeats)
            groups = [self._units[one].groups[number] for one in alike]
            waiting = [group for group in groups if group.waits and not sync]
            self._partial.pop(key, None)
            if waiting:
                self._partial[key] = sum(group.partial for group in waiting)
            if len(waiting) < repeats:
                self._rest[key] = sum(group.rest for group in groups if sync or not group.waits)
        self._turns += 1
        alone = self._exchange.alone  # with one rank, a reduce is over at once
        for one in self._flights.values():
            if alone or one.turn < self._turns - 1:
                self._arrive(one)
        for command in self._schedule.reduces.handed_over():
            key = (command.unit, command.segment)
            if command.op is Op.WAIT_REDUCE or self._flights[key].arrived:
                self.end(key)

    def _hand_over(self, key: tuple[int, int], sync: bool) -> None:
        group = self._group(key)
        for command in self._schedule.reduces.before(key):
            self.end((command.unit, command.segment))
        self._open_bucket(key)
        made = self._open.pop(key)
        if not group.bucket:
            return
        if group.is_encoded:
            # the engine's own bucket is encoded, and goes where nothing that was enqueued reads it
            self._lend(made, group.sums.sent)
            self.passed += group.lost
            if not self._exchange.enqueues:
                self._end_own(made)
                self.passed += group.bucket
        sums, inside = group.sums, group.waits is Scope.NODE_SHARD and not sync
        wanted = (sums.received, sums.column, sums.received_after, sums.decoded)
        for pool, num_bytes in zip(self._others, wanted[:1] if inside else wanted, strict=False):
            buffer = pool.take(num_bytes, spill=True) if num_bytes else None
            made.others += [] if buffer is None else [buffer]
        if sums.column and not sums.received:  # in a node of one rank, its sum is there at once
            self._give_bucket(made)
        made.turn = self._turns
        self._flights[key] = made
        self._passing = [*self._passing[-2:], key]
        self._schedule.reduces.start(key, off_device=group.passing > 0)

    def _end_own(self, reduce: _Reduce) -> None:
        self.own -= reduce.num_bytes
        self._meter.live -= reduce.num_bytes
        reduce.num_bytes = 0

    def _give_bucket(self, reduce: _Reduce) -> None:
        """The pool has its bucket back: all that was sent is read."""
        if reduce.buffer is not None and reduce.buffer.loan is reduce:
            reduce.buffer.lent = False

    def _arrive(self, reduce: _Reduce) -> None:
        """Its sum is formed: the pools have their memory back."""
        reduce.arrived = True
        self._give_bucket(reduce)
        for buffer in reduce.others:
            buffer.lent = False
        reduce.others.clear()

    def end(self, key: tuple[int, int]) -> None:
        """The engine has waited for the reduce `key`."""
        reduce = self._flights.pop(key)
        self._schedule.reduces.over(key)
        self._arrive(reduce)
        if self._group(key).is_encoded:
            self._end_own(reduce)
        self._meter.live -= reduce.num_bytes
        if reduce.twice:
            self._meter.twice -= reduce.num_bytes
        elif reduce.buffer is not None:
            reduce.buffer.loan = None

    def wait(self) -> None:
        """Wait for all that are under way."""
        for command in self._schedule.reduces.finish():
            self.end((command.unit, command.segment))
        self._passing.clear()
