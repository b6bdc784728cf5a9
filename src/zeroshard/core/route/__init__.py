"""The table compiles: what leads from one cell of a row to another, as a list of hops.

    unshard_forward   weights at rest -> FULL           raw             the same, as they rest
    unshard_backward  between        -> FULL            average         averages -> who steps them
    reduce            gradients -> where they rest      publish         stepped masters -> weights
    reduce_partial    inside no_sync: as far as each micro-batch goes before the last

A hop says what is done (`Kind`), over which ranks (`Axis`), from where to where (`Place`), in which
format (`Wire`) and on which lane; it counts its own bytes. ``routes`` works a group's routes out
from its cells, the mesh, the formats and the lowering. ZeRO++'s secondary shard (``hpz``), its
quantized gathers and reduces, MiCS and collectives in two levels differ by hops only.
``python -m zeroshard.core.route zero3 --nodes 2 --local 4`` prints them.

Invariants (tests/unit/core/test_route.py): each hop starts where the one before ended; no hop runs
over a single rank; the bytes of a step equal ``core/wire.py: step_bytes``, and neither
module knows the other. docs/design/routes.md has the decisions. Nothing here moves a byte, and
torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from zeroshard.core.placement import Cell, Cells, Mesh, Portion, Scope, Tier
from zeroshard.core.wire import Formats, LinkBytes, Wire, cheapest
from zeroshard.core.work import Axis, Hop, Kind, Lane, Place, TierBytes, When

__all__ = [
    "Axis",
    "Hop",
    "Kind",
    "Lane",
    "Place",
    "Route",
    "Routes",
    "TierBytes",
    "When",
    "routes",
]


@dataclass(frozen=True)
class Route:
    """The hops of one transition, in order; none where nothing has to be done."""

    name: str
    hops: tuple[Hop, ...] = ()

    def __iter__(self) -> Iterator[Hop]:
        return iter(self.hops)

    def __len__(self) -> int:
        return len(self.hops)

    @cached_property
    def levels(self) -> tuple[tuple[Hop, tuple[Axis, ...]], ...]:
        """The hops, each with the axes that it runs over; gathers that follow each other are one,
        in as many levels.
        """
        out: list[tuple[Hop, tuple[Axis, ...]]] = []
        for hop in self.hops:
            axes = () if hop.axis is None else (hop.axis,)
            if hop.kind is Kind.ALL_GATHER and out and out[-1][0].kind is Kind.ALL_GATHER:
                out[-1] = (out[-1][0], out[-1][1] + axes)
            else:
                out.append((hop, axes))
        return tuple(out)

    def for_pass(self, *, held: bool = False, again: bool = False) -> Route:
        """Return the route of one pass: are sums `held` here, does a sum rest already (`again`)?"""
        whens = {When.ALWAYS, When.AGAIN if again else When.FIRST}
        if held:
            whens.add(When.HELD)
        return Route(self.name, tuple(hop for hop in self.hops if hop.when in whens))

    def bytes(self, buffer: float | Portion) -> LinkBytes:
        """Return what one rank receives for `buffer`: as many elements, shared equally, or its
        portion of them.
        """
        return sum((hop.link_bytes(buffer) for hop in self.hops), LinkBytes())

    def tier_bytes(self, buffer: float | Portion) -> TierBytes:
        """Return what one rank reads from other tiers and writes to them; of a reduce, ask the
        route of `for_pass`.
        """
        return sum((hop.tier_bytes(buffer) for hop in self.hops), TierBytes())

    def __str__(self) -> str:
        return ", ".join([str(self.hops[0].source), *map(str, self.hops)]) if self.hops else "-"


@dataclass(frozen=True)
class Routes:
    """Every route of one group; an untrained group takes the routes of its weights alone."""

    unshard_forward: Route
    unshard_backward: Route
    raw: Route  # the weights as they rest: without codec, and not from what a forward kept
    reduce: Route  # the sum over all ranks, to where gradients rest for the step
    reduce_partial: Route  # inside no_sync
    average: Route  # before the step, where several ranks step the same
    publish: Route  # after it, from where the masters were stepped
    holds: bool  # whether sums over ranks wait, inside no_sync, for the last micro-batch

    @cached_property
    def regather(self) -> Route:
        """The gathers of `publish`: whole weights that rest stale come together where they rest."""
        return Route("publish", tuple(hop for hop in self.publish if hop.axis is not None))

    def __iter__(self) -> Iterator[Route]:
        values = (getattr(self, field.name) for field in fields(self))
        return (value for value in values if isinstance(value, Route))

    def step(self, *, micro_batches: int = 1, no_sync: bool = False) -> Iterator[Route]:
        """Yield the routes of one step in order; `no_sync`: all but the last of the
        `micro_batches` run inside ``engine.no_sync()``.
        """
        holds = no_sync and self.holds
        for number in range(micro_batches):
            yield self.unshard_forward
            yield self.unshard_backward
            is_last = number == micro_batches - 1
            reduce = self.reduce if is_last or not no_sync else self.reduce_partial
            yield reduce.for_pass(held=holds and number > 0, again=not holds and number > 0)
        yield self.average
        yield self.publish


def routes(
    cells: Cells,
    mesh: Mesh,
    formats: Formats,
    *,
    two_level: bool | None = None,
    node_sums: bool = False,
) -> Routes:
    """Return the routes of a group with states that rest as `cells` says.

    `two_level` False runs collectives over all ranks at once, True between nodes and inside them in
    turn, None as is cheaper for each; `node_sums`: the row keeps sums of nodes, perhaps of other
    groups, so that every reduce goes in two levels. States that rest on another tier are taken to
    rest there as a whole (a fraction's part on the device skips the tier's hops), and updates not
    to be delayed.
    Raises ValueError for a weight codec where weights do not rest sharded over all ranks.
    """
    if formats.gather.codec is not None and cells.weight.scope is not Scope.SHARD:
        raise ValueError(
            f"weight codec {formats.gather.codec}: weight={cells.weight} is not sharded over all"
            " ranks, and only such weights are gathered encoded (zero3, hpz)"
        )
    return _Compiler(cells, mesh, formats, two_level, node_sums).routes()


@dataclass(frozen=True)
class _Compiler:
    """The arguments of `routes`; methods return hops."""

    cells: Cells
    mesh: Mesh
    formats: Formats
    two_level: bool | None
    node_sums: bool

    def routes(self) -> Routes:
        """Return all of them."""
        forward = self._unshard(self._place(self.cells.weight), keeps=self._keeps_column)
        summed = [*self._sum(), *self._rest()]
        return Routes(
            Route("unshard_forward", tuple(forward)),
            Route("unshard_backward", tuple(self._unshard_backward())),
            Route("raw", tuple(self._unshard(self._place(self.cells.weight), exact=True))),
            Route("reduce", tuple(summed)),
            Route("reduce_partial", tuple(self._partial() if self._holds else summed)),
            Route("average", tuple(self._average())),
            Route("publish", tuple(self._publish())),
            self._holds,
        )

    # ------------------------------------------------------------------------------------ places

    def _scope(self, scope: Scope) -> Scope:
        """Return one name for each part of a buffer: where an axis has one rank, two scopes are
        the same part.
        """
        if self.mesh.size == 1:
            return Scope.FULL
        if scope is Scope.NODE_SHARD and self.mesh.node_size == 1:
            return Scope.FULL
        return Scope.SHARD if scope is Scope.NODE_SHARD and self.mesh.num_nodes == 1 else scope

    def _place(self, cell: Cell) -> Place:
        return Place(self._scope(cell.scope), cell.tier)

    @property
    def _keeps_column(self) -> bool:
        """Whether a forward leaves this rank's column for the backward (ZeRO++, section 3.2)."""
        scopes = (self.cells.weight.scope, self.cells.between.scope)
        return self.mesh.num_nodes > 1 and scopes == (Scope.SHARD, Scope.NODE_SHARD)

    @property
    def _sums_nodes(self) -> bool:
        """Whether gradients rest between micro-batches as sums of one node's ranks (MiCS)."""
        grad = self.cells.grad
        return self.mesh.num_nodes > 1 and grad.is_partial and grad.scope is Scope.NODE_SHARD

    @property
    def _holds(self) -> bool:
        grad = self.cells.grad
        return self._sums_nodes or (grad.is_partial and grad.scope is Scope.FULL)

    # -------------------------------------------------------------------------------------- hops

    def _hop(
        self,
        kind: Kind,
        source: Place | Scope,
        target: Place | Scope,
        wire: Wire,
        lane: Lane,
        when: When = When.ALWAYS,
    ) -> Hop:
        """Return a hop of this rank alone; a scope is one on the device."""
        source, target = (Place(end) if isinstance(end, Scope) else end for end in (source, target))
        return Hop(kind, source, target, wire, lane, self.mesh, when=when)

    def _collective(
        self, kind: Kind, axis: Axis, source: Scope, target: Scope, wire: Wire, lane: Lane
    ) -> list[Hop]:
        """Return a collective between two scopes; nothing where the axis has one rank."""
        if axis.num_ranks(self.mesh) == 1:
            return []
        start, stop = (Place(self._scope(scope)) for scope in (source, target))
        return [Hop(kind, start, stop, wire, lane, self.mesh, axis)]

    def _lowered(self, flat: Sequence[Hop], deep: Sequence[Hop]) -> Sequence[Hop]:
        """Return the hops over all ranks at once, or those in two levels."""
        if self.mesh.num_nodes == 1:
            return flat
        if self.two_level is None:
            return deep if cheapest(_link_bytes(flat), _link_bytes(deep)) else flat
        return deep if self.two_level else flat

    def _gather(self, source: Scope, target: Scope, wire: Wire, lane: Lane) -> Sequence[Hop]:
        """Return the gather from one scope to another."""

        def over(axis: Axis, start: Scope, stop: Scope) -> list[Hop]:
            return self._collective(Kind.ALL_GATHER, axis, start, stop, wire, lane)

        if source >= target:
            return []
        if source is Scope.NODE_SHARD:
            return over(Axis.LOCAL, source, target)
        between = over(Axis.NODE, source, Scope.NODE_SHARD)
        if target is Scope.NODE_SHARD:
            return between
        inside = over(Axis.LOCAL, Scope.NODE_SHARD, target)
        return self._lowered(over(Axis.FLAT, source, target), [*between, *inside])

    # ----------------------------------------------------------------------------------- weights

    def _unshard(self, rest: Place, *, keeps: bool = False, exact: bool = False) -> Iterator[Hop]:
        """Yield the way from `rest` to whole weights; `exact`: in the format in which they rest."""
        weight = self.formats.weight
        wire = weight if exact else self.formats.gather
        if rest.tier is not Tier.DEVICE:
            yield self._hop(Kind.READ, rest, rest.scope, weight, "tier read")
        if wire.codec is not None and weight.codec is None:
            yield self._hop(Kind.ENCODE, rest.scope, rest.scope, wire, "gather")
        yield from self._gathered(rest.scope, wire, keeps=keeps)

    def _gathered(self, source: Scope, wire: Wire, *, keeps: bool = False) -> Iterator[Hop]:
        """Yield the gather of weights in `wire`; `keeps` this rank's column, as it travelled."""
        column = self._scope(Scope.NODE_SHARD)
        yield from self._gather(source, Scope.FULL, wire, "gather")
        if keeps:
            lane: Lane = "compute" if wire.codec is None else "gather"
            yield self._hop(Kind.KEEP, Scope.FULL, column, wire, lane)
        if wire.codec is not None:
            yield self._hop(Kind.DECODE, Scope.FULL, Scope.FULL, wire.plain, "gather")

    def _unshard_backward(self) -> Iterable[Hop]:
        if not self.cells.between.is_sharded:
            return []  # the forward has not released them
        if self._keeps_column:
            return self._gathered(self._scope(Scope.NODE_SHARD), self.formats.gather)
        return self._unshard(self._place(self.cells.weight))

    def _publish(self) -> Iterator[Hop]:
        """Yield the way of stepped masters into the weights, and to the ranks that rest them."""
        weight, master, tier = self.formats.weight, self.formats.master, self.cells.optim.tier
        scope, goal = self._scope(self.cells.optim.scope), self._place(self.cells.weight)
        is_master = weight == master and goal.tier is tier
        # a tile of a state on disk is stepped in the host's memory
        on_device = tier is Tier.DEVICE
        here = Place(scope, Tier.HOST if tier is Tier.DISK else tier)
        if weight != master:
            yield self._hop(Kind.CAST, here, here, weight, "compute" if on_device else "host")
        if not is_master and goal.tier is not here.tier:
            there = Place(scope, goal.tier)
            if there.tier is Tier.DEVICE:
                yield self._hop(Kind.READ, here, there, weight, "tier read")
            else:
                yield self._hop(Kind.WRITE, here, there, weight, "tier write")
        # columns are gathered where a step publishes them, not on a lane of their own
        lane: Lane = "compute" if self.cells.weight.scope is Scope.NODE_SHARD else "gather"
        yield from self._gather(scope, goal.scope, weight, lane)

    # --------------------------------------------------------------------------------- gradients

    def _summed(self, axis: Axis, source: Scope, target: Scope, wire: Wire) -> Iterator[Hop]:
        """Yield one level of a sum over ranks."""
        start, stop = (self._scope(scope) for scope in (source, target))
        if wire.codec is not None:
            yield self._hop(Kind.ENCODE, start, start, wire, "reduce")
        yield from self._collective(Kind.REDUCE_SCATTER, axis, source, target, wire, "reduce")
        if wire.codec is not None:
            yield self._hop(Kind.DECODE, stop, stop, Wire.of("fp32"), "reduce")

    def _bucket(self) -> Iterator[Hop]:
        """Yield the way of gradients from autograd into the buffer that is summed."""
        compute, wire = self.formats.weight.dtype, self.formats.reduce.plain
        sums_here = self._holds and not self._sums_nodes
        if sums_here and self.cells.grad.tier is not Tier.DEVICE:
            there = Place(Scope.FULL, self.cells.grad.tier)
            for hop in self._add_up(there):
                yield replace(hop, when=When.HELD)
            yield self._hop(Kind.READ, there, Scope.FULL, self.formats.grad, "tier read", When.HELD)
        if compute != wire.dtype:
            yield self._hop(Kind.CAST, Scope.FULL, Scope.FULL, wire, "compute")
        elif sums_here and self.formats.grad.dtype != wire.dtype:
            yield self._hop(Kind.CAST, Scope.FULL, Scope.FULL, wire, "compute", When.HELD)

    def _sum(self) -> Iterator[Hop]:
        """Yield the sum over all ranks, in fp32 on the device."""
        wire, node_sum = self.formats.reduce, self.formats.node_sum
        flat = list(self._summed(Axis.FLAT, Scope.FULL, Scope.SHARD, wire))
        deep = list(self._summed(Axis.LOCAL, Scope.FULL, Scope.NODE_SHARD, wire))
        if self._sums_nodes:
            column = self._scope(Scope.NODE_SHARD)
            deep.append(self._hop(Kind.ADD, column, column, self.formats.grad, "reduce", When.HELD))
        deep += self._summed(Axis.NODE, Scope.NODE_SHARD, Scope.SHARD, node_sum)
        yield from self._bucket()
        is_deep = self.mesh.num_nodes > 1 and self.node_sums
        yield from deep if is_deep or self._sums_nodes else self._lowered(flat, deep)
        sum_wire = self.formats.grad if self.cells.grad.tier is Tier.DEVICE else Wire.of("fp32")
        if self.mesh.size == 1 and wire.codec is None and wire != sum_wire:
            yield self._hop(Kind.CAST, Scope.FULL, Scope.FULL, sum_wire, "reduce")

    def _partial(self) -> Iterator[Hop]:
        """Yield what a micro-batch inside no_sync does before the last, where sums wait."""
        if self._sums_nodes:
            yield from self._bucket()
            yield from self._summed(Axis.LOCAL, Scope.FULL, Scope.NODE_SHARD, self.formats.reduce)
        elif self.cells.grad.tier is not Tier.DEVICE:
            yield from self._add_up(Place(Scope.FULL, self.cells.grad.tier))

    def _add_up(self, there: Place) -> Iterator[Hop]:
        """Yield the way of a micro-batch's gradients to their sum on another tier."""
        made = self.formats.weight.plain
        yield self._hop(Kind.WRITE, Scope.FULL, there, made, "tier write")
        yield self._hop(Kind.ADD, there, there, self.formats.grad, "host", When.HELD)

    def _rest(self) -> Iterator[Hop]:
        """Yield the way of a sum to where it rests: the first is stored, others are added."""
        grad, fp32, tier = self.formats.grad, Wire.of("fp32"), self.cells.grad.tier
        if tier is Tier.DEVICE:
            return  # the reduce has put it there
        own = self._scope(Scope.SHARD)
        here, there, host = (Place(own, t) for t in (Tier.DEVICE, tier, Tier.HOST))
        if grad != fp32:
            yield self._hop(Kind.CAST, here, here, grad, "reduce", When.FIRST)
        yield self._hop(Kind.WRITE, here, there, grad, "tier write", When.FIRST)
        yield self._hop(Kind.WRITE, here, host, fp32, "tier write", When.AGAIN)
        yield self._hop(Kind.ADD, host, there, grad, "host", When.AGAIN)

    def _average(self) -> Iterator[Hop]:
        """Yield the way of averages to the ranks that step the same."""
        grad, tier = self.formats.grad, self.cells.grad.tier
        mine, shared = (
            Place(self._scope(scope), tier) for scope in (Scope.SHARD, self.cells.optim.scope)
        )
        if mine.scope >= shared.scope:
            return
        if tier is Tier.DEVICE:
            yield from self._gather(mine.scope, shared.scope, grad, "reduce")
            return
        # through the device, a group at a time
        yield self._hop(Kind.READ, mine, mine.scope, grad, "tier read")
        yield from self._gather(mine.scope, shared.scope, grad, "reduce")
        yield self._hop(Kind.WRITE, shared.scope, shared, grad, "tier write")


def _link_bytes(hops: Sequence[Hop]) -> LinkBytes:
    return sum((hop.link_bytes(1) for hop in hops), LinkBytes())
