"""Of one unit in one row, in bytes of one rank: the buffers that the engine takes to gather it and
to sum its gradients. peak.py says when.

    gathered      the full buffer; where weights travel encoded (comm/quantized.py), the encoding,
                  until it is decoded
    one sum       a bucket in the dtype of gradients; with a codec its encoding, which is what the
                  transport has; slices of other ranks; over nodes, between the two levels, a
                  column's sum (comm/levels.py)

Nothing here knows an order or a pool. Invariant: sizes are those of the routes' hops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroshard.core.layout import Layout
from zeroshard.core.placement import Cells, Scope, Tier
from zeroshard.core.residency import Residency, UnitTraits
from zeroshard.core.route import Axis, Hop, Kind, routes
from zeroshard.core.schedule import Meter, Rules, Schedule, grad_pool_bytes, is_ordered
from zeroshard.core.wire import Formats
from zeroshard.planner.exact import Placed, made_once
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape
from zeroshard.planner.training import Training

CODEC_SCRATCH_BYTES = 6 << 18  # of a host's thread that encodes, for ever: comm/codec.py


@dataclass(frozen=True)
class TransportTraits:
    """How ranks meet, as far as memory goes (comm/select.py)."""

    alone: bool  # one rank: nothing to exchange
    maps_peers: bool  # a gather of what rests sharded on the device moves nothing
    keyed: bool  # ranks may run their units in different order
    receives: bool  # slices of other ranks arrive in memory of this one
    near: bool  # ... but for those of the ranks of its node
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

    def schedule(self, units: Sequence[UnitBytes], cells: Cells, meter: Meter) -> Schedule:
        """Return the schedule of `units` in a row of `cells`."""
        traits = made_once(units, lambda unit: UnitTraits.of(cells, unit.full, unit.whole))
        leave, coded = cells.weight.tier is not Tier.DEVICE, any(unit.encoded for unit in units)
        one_sided = self.alone or self.maps_peers
        rules = Rules.of(
            traits,
            ordered=is_ordered(one_sided=one_sided, leave=leave, coded=coded),
            keyed=self.keyed,
            enqueues=self.enqueues,
            alone=self.alone,
        )
        return Schedule([Residency(at, one) for at, one in enumerate(traits)], rules, meter)


def pool_bytes(model: ModelShape, training: Training) -> int:
    """Return the bytes of a transport's gradient buffers."""
    dtypes = {group.dtype for unit in model.units for group in unit.groups}
    widest = max(training.formats(dtype).reduce.plain.bytes_per_element for dtype in dtypes)
    return grad_pool_bytes(max(unit.numel for unit in model.units), round(widest))


@dataclass(frozen=True)
class Sums:
    """The buffers of one reduce that transports lend."""

    sent: int = 0  # the bucket, or its encoding
    received: int = 0  # slices of other ranks; in two levels, of those of the node
    column: int = 0  # in two levels: the node's sum, as it goes on
    received_after: int = 0  # ... and slices of it from other nodes
    decoded: int = 0  # ... and fp32, where it goes on encoded


@dataclass(frozen=True)
class GroupBytes:
    """One group of one unit."""

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
    waits: Scope | None  # ... of which, as a sum that no reduce between ranks has taken
    trained: bool

    @property
    def resting(self) -> int:
        """The bytes of its gradient that rest on the device after a micro-batch."""
        return self.partial if self.waits else self.rest


@dataclass(frozen=True)
class UnitBytes:
    """A unit's groups."""

    groups: tuple[GroupBytes, ...]

    @cached_property
    def whole(self) -> int:
        """The bytes of the weights."""
        return sum(group.whole for group in self.groups)

    @cached_property
    def full(self) -> int:
        """What gathering takes beyond what rests."""
        return sum(group.full for group in self.groups)

    @cached_property
    def encoded(self) -> int:
        """What gathering takes until it is decoded."""
        return sum(group.encoded for group in self.groups)

    @cached_property
    def column(self) -> int:
        """What is kept for the backward."""
        return sum(group.column for group in self.groups)


def group_bytes(
    placed: Placed, training: Training, exchange: TransportTraits, *, node_sums: bool
) -> GroupBytes:
    """Return the bytes of one group on rank 0; `node_sums`: see ``core.route.routes``."""
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
    # one rank whose gradients rest as they come: there is nothing to sum
    direct = exchange.alone and formats.reduce == formats.grad and on_device
    is_summed = trained and not direct
    is_encoded = is_summed and formats.reduce.codec is not None
    # a sum that waits is never cut, and of a node's ranks it stays on the device
    waits = layout.scope(cells.grad) if cells.grad.is_partial else None
    is_near = cells.grad.tier is Tier.DEVICE or waits is Scope.NODE_SHARD
    reduces = [hop for hop in group_routes.reduce.hops if hop.kind is Kind.REDUCE_SCATTER]
    return GroupBytes(
        whole=whole,
        full=0 if _reads_in_place(layout, cells, formats, exchange) else whole,
        encoded=sum(_encoding(hop, layout.numel) for hop in forward),
        column=round(column_bytes) if any(hop.kind is Kind.KEEP for hop in forward) else 0,
        bucket=layout.numel * wire if is_summed else 0,
        is_encoded=is_encoded,
        lost=4 * layout.numel if is_encoded and training.error_feedback else 0,
        sums=_sums(layout, formats, reduces, exchange) if is_summed else Sums(),
        rest=cut.grad * grad,
        passing=0 if on_device else own * 4,
        partial=one.held(cells.grad, 0) * grad if waits and is_near else 0,
        waits=waits,
        trained=trained,
    )


def _reads_in_place(
    layout: Layout, cells: Cells, formats: Formats, exchange: TransportTraits
) -> bool:
    """Whether what rests is read as a whole without gathering: not what travels or rests encoded,
    which is decoded into memory of its own.
    """
    if cells.weight.tier is not Tier.DEVICE or formats.gather.codec is not None:
        return False
    scope = layout.scope(cells.weight)
    return scope is Scope.FULL or exchange.alone or (exchange.maps_peers and scope is Scope.SHARD)


def _encoding(hop: Hop, numel: int) -> int:
    """Return the bytes of the encoding that `hop` of a gather fills."""
    is_new = hop.kind is Kind.ENCODE or (hop.kind is Kind.ALL_GATHER and hop.wire.codec is not None)
    return round(hop.held_bytes(hop.target, numel)) if is_new else 0


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
