"""Bytes at rest and on the wire, to the byte: those that ``engine.memory()`` and
``engine.traffic()`` report.

Every number comes from what the engine itself runs on: ``core/layout`` (padding and ranges),
``core/policy`` (cells), ``core/resting`` (fractions), ``core/wire`` (codecs) and ``core/route``
(hops). Here they are only added up. Units of the same shapes are laid out once.

At rest means between the micro-batches of a step, where the gradient rests, too: the count of ZeRO
(arXiv 1910.02054, section 3.1 and figure 1). Every parameter is taken to be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from zeroshard.core.layout import ALIGN, Layout, Piece
from zeroshard.core.placement import Cell, Cells, Mesh, Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.resting import AtRest, is_weight, num_shared, splits
from zeroshard.core.route import Axis, Kind, Route, Routes, routes
from zeroshard.core.shares import Dealer, Shares, WholeParameters
from zeroshard.core.sizes import UnitGradient, resting_whole
from zeroshard.core.tree import Deal
from zeroshard.core.wire import Formats, LinkBytes, Wire, reduce_scatter
from zeroshard.planner.model import GroupShape, ModelShape, Training

StateBytes = dict[str, dict[Tier, int]]  # state -> tier -> bytes
T = TypeVar("T")
R = TypeVar("R")

_RESIDUAL_BYTES = 2  # per element of an encoded gradient: bf16


def sum_by_tier(states: Iterable[Mapping[Tier, int]]) -> dict[Tier, int]:
    """Return the bytes of several states together on each tier."""
    every = list(states)
    return {tier: sum(by_tier.get(tier, 0) for by_tier in every) for tier in Tier}


def made_once(things: Iterable[T], make: Callable[[T], R]) -> list[R]:
    """Return what `make` makes of each of `things`: of those that are one object, once."""
    made: dict[int, R] = {}
    every = list(things)
    for one in every:
        if id(one) not in made:
            made[id(one)] = make(one)
    return [made[id(one)] for one in every]


@dataclass(frozen=True)
class LaidOutGroup:
    """A group of one unit in its flat buffer; `count` units have one of the same shapes."""

    group: GroupShape
    layout: Layout
    count: int
    unit: int  # number of the first such unit

    def held(self, cell: Cell, rank: int) -> int:
        """Return the elements of a state in `cell` that `rank` holds, padding included."""
        return self.layout.held(rank, cell)

    def pieces(self, cell: Cell, rank: int) -> Sequence[Piece]:
        """Return the parts of parameters in what `rank` holds of a state in `cell`: none where that
        is padding alone.
        """
        return self.layout.pieces_in(self.layout.span(rank, self.layout.scope(cell)))

    def formats(self, training: Training) -> Formats:
        """Return the formats of the group's states: frozen weights may rest packed."""
        trained = self.group.trained
        packed = not trained and training.frozen_codec is not None
        return training.formats(self.group.dtype, trained=trained, rests_packed=packed)


@dataclass(frozen=True)
class DeviceCut:
    """The number of first elements of a group's states that rest on the device of a rank: of the
    weights that it rests, and of what it steps.
    """

    weight: int
    grad: int
    optim: int


Placed = tuple[LaidOutGroup, DeviceCut, Cells]


@dataclass(frozen=True)
class LaidOut:
    """A model's units on a mesh; ranks own `shares` (None: equal ones), cut on multiples of
    `align` elements. Where they own whole parameters, each owns what that of its place in `order`
    does on the mesh (default: itself).
    """

    model: ModelShape
    mesh: Mesh
    align: int = ALIGN
    shares: Shares | WholeParameters | None = None
    order: tuple[int, ...] = ()

    @cached_property
    def groups(self) -> tuple[LaidOutGroup, ...]:
        """The groups of all units, one set for equal units."""
        counts, every = (
            Counter(self.alike),
            (one for unit in self.model.units for one in unit.groups),
        )
        segments = (((one.dtype, one.trained), self.mesh, one.shapes) for one in every)
        dealer = Dealer.of(self.shares, segments, align=self.align, order=self.order)
        return tuple(
            LaidOutGroup(group, layout, counts[number], number)
            for number in dict.fromkeys(self.alike)
            for group in self.model.units[number].groups
            for kind in [(group.dtype, group.trained)]
            for layout in [dealer.layout(group.shapes, self.mesh, kind=kind, align=self.align)]
        )

    @cached_property
    def by_unit(self) -> tuple[tuple[LaidOutGroup, ...], ...]:
        """The groups of each unit, in order; equal units have the same ones."""
        first: dict[int, list[LaidOutGroup]] = {}
        for one in self.groups:
            first.setdefault(one.unit, []).append(one)
        return tuple(tuple(first[number]) for number in self.alike)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """The number of the first unit of the same shapes, passes and counted FLOPs, by unit;
        unequal shares are rounded otherwise from unit to unit.
        """
        if self.shares is not None:
            return tuple(range(len(self.model.units)))
        first: dict[object, int] = {}
        out = []
        for at, unit in enumerate(self.model.units):
            groups = (
                (tuple(shape for _, shape in one.shapes), one.dtype, one.trained, one.looked_up)
                for one in unit.groups
            )
            key = (unit.uses, *groups, self.is_reached(at), self.model.counted(at))
            out.append(first.setdefault(key, at))
        return tuple(out)

    def is_reached(self, unit: int) -> bool:
        """Whether a backward comes to unit number `unit`: not to frozen ones before all that is
        trained, but for a tied one.
        """
        return unit >= self._first_trained or self.model.units[unit].uses > 1

    @cached_property
    def _first_trained(self) -> int:
        units = enumerate(self.model.units)
        return next((at for at, unit in units if any(g.trained for g in unit.groups)), 0)


def placed(laid_out: LaidOut, policy: Policy, training: Training, rank: int = 0) -> list[Placed]:
    """Return the groups, where `rank`'s states of them are cut, and their cells; groups of equal
    units that are placed alike once, in the order of the first.
    """
    units = zip(laid_out.model.units, laid_out.by_unit, strict=True)
    groups = [(one, policy.cells(unit.name)) for unit, of in units for one in of]
    count: Counter[tuple[object, DeviceCut, Cells]] = Counter()
    first: dict[tuple[object, DeviceCut, Cells], LaidOutGroup] = {}
    cuts = _cuts([one for one, _ in groups], policy.default, training, rank, laid_out.shares)
    for (one, cells), cut in zip(groups, cuts, strict=True):
        key = ((one.unit, one.group.dtype, one.group.trained), cut, cells)
        first.setdefault(key, one)
        count[key] += 1
    return [(replace(one, count=count[key]), *key[1:]) for key, one in first.items()]


def cells_by_unit(
    laid_out: LaidOut, policy: Policy, training: Training
) -> Iterator[tuple[Placed, ...]]:
    """Yield the groups of every unit, in order, with where rank 0's states of them are cut and the
    cells between which they then move (`step_routes`): one tuple for all that are placed alike.
    """
    groups = [one for unit in laid_out.by_unit for one in unit]
    cuts = iter(_cuts(groups, policy.default, training, 0, laid_out.shares))
    made: dict[tuple[int, tuple[DeviceCut, ...], str], tuple[Placed, ...]] = {}
    kinds = zip(laid_out.alike, laid_out.model.units, laid_out.by_unit, strict=True)
    for kind, unit, of in kinds:
        own = tuple(next(cuts) for _ in of)
        key = kind, own, unit.name if unit.name in policy.units else ""
        if key not in made:
            cells, pairs = policy.cells(unit.name), zip(of, own, strict=True)
            made[key] = tuple((one, cut, _whole_cells(one, cut, cells)) for one, cut in pairs)
        yield made[key]


def _cuts(
    groups: Sequence[LaidOutGroup],
    cells: Cells,
    training: Training,
    rank: int,
    shares: Shares | WholeParameters | None,
) -> Iterator[DeviceCut]:
    """Yield where `rank`'s states of `groups` are cut: the groups of all units, in order."""
    trained = [one for one in groups if one.group.trained]

    def split(tier: Tier, of: Sequence[LaidOutGroup], cell: Cell) -> list[int]:
        held = [one.held(cell, rank) for one in of]
        if tier is Tier.DEVICE:
            return held
        cuts = splits(held, training.fraction, training.align)
        if not isinstance(shares, WholeParameters):
            return cuts
        layouts = [one.layout for one in of]
        spans = [layout.span(rank, layout.scope(cell)) for layout in layouts]
        return list(map(shares.nearest, cuts, spans, layouts))

    weights = split(cells.weight.tier, groups, cells.weight)
    grads = split(cells.grad.tier, trained, cells.optim)
    pairs = iter(zip(grads, split(cells.optim.tier, trained, cells.optim), strict=True))
    for one, weight in zip(groups, weights, strict=True):
        yield DeviceCut(weight, *(next(pairs) if one.group.trained else (0, 0)))


def rest_bytes(laid_out: LaidOut, policy: Policy, training: Training, rank: int = 0) -> StateBytes:
    """Return the bytes that rest on `rank` between micro-batches, by state and tier: "weight",
    "master" (where it is not the weight), "grad", "residual" (of encoded gradients), "optimizer".
    """
    states = ("weight", "master", "grad", "residual", "optimizer")
    out: StateBytes = {state: {} for state in states}
    leaves = training.deal(policy, laid_out.mesh)
    for one, cut, cells in placed(laid_out, policy, training, rank):
        group = _group_bytes(one, cut, cells, training, rank)
        tier = cells.grad.tier
        if leaves is not None and one.group.trained:
            # where most sums rest: of this rank's own leaves, or the gradient and slices beside it
            # (runtime/grad.py)
            each = _one_sum(one, leaves, rank)
            beside = each * (most_held(leaves, rank) - 1)
            if leaves.is_local:
                group["grad"] = {tier: each + beside}
            elif one.pieces(cells.optim, rank):
                stepped = one.held(cells.optim, rank)
                grad = _in_two(cut.grad, stepped, tier, Wire.of("fp32"))
                group["grad"] = grad | {tier: grad.get(tier, 0) + beside}
            else:
                group["grad"] = {}
        scopes = (cells.weight.scope, cells.between.scope)
        is_column = scopes == (Scope.SHARD, Scope.NODE_SHARD) and laid_out.mesh.num_nodes > 1
        if is_column and not laid_out.is_reached(one.unit):
            # what a forward keeps for a backward that never comes: a column, as it travels
            column = _bytes(one.held(cells.between, rank), one.formats(training).gather)
            group["weight"][Tier.DEVICE] = group["weight"].get(Tier.DEVICE, 0) + column
        for state, by_tier in group.items():
            for tier, num_bytes in by_tier.items():
                if num_bytes:
                    out[state][tier] = out[state].get(tier, 0) + one.count * num_bytes
    return out


def _group_bytes(
    one: LaidOutGroup, cut: DeviceCut, cells: Cells, training: Training, rank: int
) -> StateBytes:
    """Return the bytes of one group, by state and tier."""
    formats = one.formats(training)
    weights, stepped = one.held(cells.weight, rank), one.held(cells.optim, rank)
    out = {"weight": _in_two(cut.weight, weights, cells.weight.tier, formats.weight)}
    if not one.group.trained:
        return out

    # the weights that follow from masters, and where they are cut
    followed = cut.weight if weights == stepped else stepped
    weight = AtRest(formats.weight, stepped, followed, cells.weight.tier)
    master = AtRest(formats.master, stepped, cut.optim, cells.optim.tier)
    if not is_weight(weight, master):
        here = _bytes(cut.optim - num_shared(weight, master), formats.master)
        by_tier = _in_two(cut.optim, stepped, cells.optim.tier, formats.master)
        out["master"] = by_tier | {Tier.DEVICE: here}

    scope = one.layout.scope(cells.grad)
    if cells.grad.is_partial and scope is not Scope.SHARD:  # a sum that waits is never cut
        # one of a node's ranks stays on the device, where they add to it
        tier = Tier.DEVICE if scope is Scope.NODE_SHARD else cells.grad.tier
        out["grad"] = {tier: _bytes(one.held(cells.grad, rank), formats.grad)}
    elif one.pieces(cells.optim, rank):
        # held by the pieces: a gradient of padding alone is gone at once
        out["grad"] = _in_two(cut.grad, stepped, cells.grad.tier, formats.grad)
    # a single rank never encodes gradients where autograd's first go straight to where they rest,
    # and no second sum follows in a step (runtime/bucket.py)
    in_place = one.layout.mesh.size == 1 and formats.reduce.dtype == formats.grad.dtype
    waits = cells.grad.is_partial and scope is Scope.FULL
    in_place = in_place and cut.grad == one.held(cells.optim, 0)
    in_place = in_place and (waits or training.micro_batches == 1)
    if training.error_feedback and not in_place:
        out["residual"] = {Tier.DEVICE: one.layout.numel * _RESIDUAL_BYTES}
    # On the device moments are tensors of the optimizer's own, one per piece of a parameter and
    # without padding (``engine.memory()`` counts none of a single element); elsewhere they are
    # flat, where there is any parameter.
    start, stop = one.layout.span(rank, one.layout.scope(cells.optim))
    pieces = one.layout.pieces_in((start, start + cut.optim))
    matrices = one.group.matrices
    here = sum(
        training.state_bytes(piece.numel, is_matrix=piece.name in matrices)
        for piece in pieces
        if piece.numel > 1
    )
    out["optimizer"] = {Tier.DEVICE: here}
    pieces = one.layout.pieces_in((start + cut.optim, stop))
    if training.optimizer == "adam-8bit":
        away = sum(training.state_bytes(piece.numel) for piece in pieces)
    else:  # a state of any of them is there for all
        kinds = {piece.name in matrices for piece in pieces}
        numel = stop - start - cut.optim
        every = {training.state_bytes(numel, is_matrix=is_matrix) for is_matrix in kinds}
        away = sum(every)
    if away:
        out["optimizer"][cells.optim.tier] = away
    beside = out.get("master", {}).get(cells.optim.tier, 0)
    alone = len(one.layout.members(rank, one.layout.scope(cells.optim))) == 1
    if training.step_in_backward and pieces and beside and alone and cells.optim.tier is Tier.HOST:
        out["optimizer"][Tier.HOST] = 2 * away + beside  # the copies that are stepped
    return out


def _one_sum(one: LaidOutGroup, leaves: Deal, rank: int) -> int:
    """Return the bytes of one sum of leaves: whole, or of `rank`'s slice."""
    low, high = (0, one.layout.numel) if leaves.is_local else one.layout.ranges[rank]
    return _bytes(high - low, Wire.of("fp32"))


def most_held(leaves: Deal, rank: int) -> int:
    """Return the most sums that rest between the leaves of a step: of whole gradients where each
    rank adds up its own, else of slices, the gradient among them.
    """
    cover = leaves.tree.cover
    if leaves.is_local:
        start, stop = leaves.of_ranks[rank]
        last = min(stop, start + len(leaves.rounds) - 1)
        return max(len(cover(start, each)) for each in range(start + 1, last + 1))
    ends = [dealt[-1][1] + 1 for dealt in leaves.rounds[:-1]]
    return max((len(cover(0, end)) for end in ends), default=1)


def beside_bytes(laid_out: LaidOut, policy: Policy, training: Training) -> int:
    """Return the bytes of sums of leaves that rank 0 holds on the device beside the first, at
    most.
    """
    leaves = training.deal(policy, laid_out.mesh)
    if leaves is None:
        return 0
    groups = placed(laid_out, policy, training)
    here = [one for one, _, cells in groups if cells.grad.tier is Tier.DEVICE and one.group.trained]
    return sum(one.count * _one_sum(one, leaves, 0) for one in here) * (most_held(leaves, 0) - 1)


def step_routes(
    laid_out: LaidOut, policy: Policy, training: Training, rank: int = 0
) -> Iterator[tuple[LaidOutGroup, Routes, Route]]:
    """Yield `rank`'s routes of one step in order, group by group, each with all of its group's.

    A group takes the routes of the device where a fraction leaves nothing on another tier; one that
    is cut in two is taken to rest there as a whole.
    """
    for one, of in _routed(laid_out, policy, training, rank):
        for route in _unit_routes(laid_out, one, of, training.micro_batches):
            yield one, of, route


def _routed(
    laid_out: LaidOut, policy: Policy, training: Training, rank: int
) -> Iterator[tuple[LaidOutGroup, Routes]]:
    """Yield the groups with `rank`'s routes of them; of padding alone there is no average."""
    for one, cut, cells in placed(laid_out, policy, training, rank):
        here, formats = _whole_cells(one, cut, cells, rank), one.formats(training)
        of = routes(here, laid_out.mesh, formats, node_sums=policy.sums_nodes)
        if not one.pieces(cells.optim, rank):
            of = replace(of, average=Route(of.average.name, ()))
        yield one, of


def _unit_routes(
    laid_out: LaidOut, one: LaidOutGroup, of: Routes, micro_batches: int
) -> Iterator[Route]:
    """Yield the routes of one group in a step; it comes back to a unit that is tied from where a
    backward would, and so do later micro-batches where no backward has released the unit.
    """
    again = laid_out.model.units[one.unit].uses - 1
    if one.group.trained:
        for route in of.step(micro_batches=micro_batches, no_sync=True):
            yield route
            yield from [of.unshard_backward] * (again if route is of.unshard_forward else 0)
        return
    is_reached = laid_out.is_reached(one.unit)
    for number in range(micro_batches):
        yield of.unshard_forward if is_reached or not number else of.unshard_backward
        yield from [of.unshard_backward] * (again + is_reached)


def _whole_cells(one: LaidOutGroup, cut: DeviceCut, cells: Cells, rank: int = 0) -> Cells:
    """Return the cells with the device as the tier of each state that rests there as a whole on
    `rank`.
    """

    def here(cell: Cell, split: int, numel: int) -> Cell:
        return replace(cell, tier=Tier.DEVICE) if split == numel else cell

    stepped = one.held(cells.optim, rank)
    return replace(
        cells,
        weight=here(cells.weight, cut.weight, one.held(cells.weight, rank)),
        grad=cells.grad if cells.grad.is_partial else here(cells.grad, cut.grad, stepped),
        optim=here(cells.optim, cut.optim, stepped),
    )


def staged_routes(
    laid_out: LaidOut,
    policy: Policy,
    training: Training,
    gathers: tuple[int, int],
    rank: int = 0,
) -> Iterator[tuple[LaidOutGroup, Routes, Route]]:
    """Yield `rank`'s routes of one step of a stage in a pipeline, group by group: it is gathered
    as often before forwards and before backwards as `gathers` says, reduced as in `step_routes`.
    """
    for one, of in _routed(laid_out, policy, training, rank):
        ahead, back = gathers
        for route in (*[of.unshard_forward] * ahead, *[of.unshard_backward] * back):
            yield one, of, route
        left = of.step(micro_batches=training.micro_batches, no_sync=True)
        unshard = (of.unshard_forward, of.unshard_backward)
        for route in left if one.group.trained else ():
            if not any(route is other for other in unshard):
                yield one, of, route


def traffic_bytes(
    laid_out: LaidOut,
    policy: Policy,
    training: Training,
    gathers: tuple[int, int] | None = None,
    rank: int = 0,
) -> LinkBytes:
    """Return the payload that `rank` receives per step, inside its node and from others;
    `gathers`: of a stage in a pipeline, see `staged_routes`.
    """
    leaves = training.deal(policy, laid_out.mesh)
    if leaves is None:
        if gathers is None:
            steps = step_routes(laid_out, policy, training, rank)
        else:
            steps = staged_routes(laid_out, policy, training, gathers, rank)
        moved = (route.bytes(one.layout.portion(rank)) * one.count for one, _, route in steps)
        return sum(moved, LinkBytes())

    # With leaves every round gathers, and reduces unless ranks add up their own leaves first: flat
    # where its sums are none of all ranks.
    total = LinkBytes()
    formed = [sums for _, sums in (leaves.sums[-1:] if leaves.is_local else leaves.sums)]
    for one, of in _routed(laid_out, policy, training, rank):
        portion = one.layout.portion(rank)
        wire = Wire.of("fp32") if leaves.is_local else one.formats(training).reduce
        whole = portion.whole * wire.bytes_per_element
        others = (of.unshard_forward, of.unshard_backward, of.average, of.publish)
        each = [
            route.bytes(portion)
            for route in _unit_routes(laid_out, one, of, len(leaves.rounds))
            if any(route is other for other in others)
        ]
        for is_flat in map(bool, formed) if one.group.trained else ():
            if is_flat:
                each.append(
                    reduce_scatter(
                        leaves.mesh, Scope.SHARD, whole, 0.0, two_level=False, has=portion
                    )
                )
            else:
                each += [
                    replace(hop, wire=hop.wire if hop.axis is Axis.NODE else wire).link_bytes(
                        portion
                    )
                    for hop in of.reduce.for_pass()
                    if hop.kind is Kind.REDUCE_SCATTER
                ]
        total = total + sum(each, LinkBytes()) * one.count
    return total


def _in_two(split: int, numel: int, tier: Tier, wire: Wire) -> dict[Tier, int]:
    """Return the bytes of `numel` elements by tier; the first `split` rest on the device."""
    if tier is Tier.DEVICE:
        return {tier: _bytes(numel, wire)}
    return {Tier.DEVICE: _bytes(split, wire), tier: _bytes(numel - split, wire)}


def _bytes(numel: int, wire: Wire) -> int:
    return round(numel * wire.bytes_per_element)


# ------------------------------------------------------------ gradients whole between micro-batches
# Which units keep whole gradients is the engine's choice (core/sizes.py), from the bytes of each;
# the row then has cells of single units, which everything else reads.


def with_budget(laid_out: LaidOut, policy: Policy, training: Training) -> Policy:
    """Return `policy` with whole gradients where the budget of `training` holds them; `policy`
    itself where it holds none, or has no effect: in rows that keep whole gradients anyway, or with
    gradients on disk, which ``zs.shard`` refuses.
    """
    budget, cell = training.accumulation_bytes, policy.default.grad
    if budget is None or not cell.is_sharded or cell.tier is Tier.DISK:
        return policy
    units = zip(laid_out.model.units, laid_out.by_unit, strict=True)
    ranks = range(1 if laid_out.shares is None else laid_out.mesh.size)
    sizes = []
    for unit, groups in units:  # whole, and in `cell` on the rank that holds most
        whole = shard = 0
        for one in groups:
            if one.group.trained:
                each = round(one.formats(training).grad.bytes_per_element)
                whole += one.layout.numel * each
                shard += max(one.held(cell, rank) for rank in ranks) * each
        sizes.append(UnitGradient(unit.name, whole, shard))
    resting = resting_whole(sizes, budget)
    return policy.with_whole_gradients(resting) if resting else policy
