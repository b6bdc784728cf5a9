"""From a model and a policy to units at rest, and from these to the parts of an engine: lay out,
take the weights in, let go of the originals.

One unit after another, so that beyond the shards at most one unit exists twice (deferred parameters
get their values here). Segments hold parameters of one dtype and one trainability (LoRA's frozen
base and its adapters are two segments of one unit). Collective: windows are made on every rank in
unit order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zeroshard.core.digest import Digest
from zeroshard.core.placement import Cell, Cells, Mesh, Tier
from zeroshard.core.precision import Precision, dtype_name
from zeroshard.core.resting import AtRest, is_weight
from zeroshard.core.schedule import Rules, Schedule
from zeroshard.core.schedule.rules import is_ordered
from zeroshard.core.shares import Dealer, Shares, WholeParameters
from zeroshard.core.sizes import UnitGradient
from zeroshard.errors import StateError
from zeroshard.memory import Trimmer, return_freed_memory
from zeroshard.optim.runner import StepOptions
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.tiles import PartialState
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.context import Context, Dtypes, SegmentPlan
from zeroshard.runtime.decisions import Decisions
from zeroshard.runtime.drafts import DraftingReductions, DraftRunner
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.grad import Accumulator
from zeroshard.runtime.guards import Watch
from zeroshard.runtime.leaf_bucket import LeafBucket, OwnLeafBucket
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.reductions import Reductions
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.units import UnitPlan, holding_others
from zeroshard.runtime.weights import Weights
from zeroshard.state.local import local_of
from zeroshard.state.remainder import RemainderStorage
from zeroshard.state.state import DeviceStorage, State
from zeroshard.tier.store import EncodedStorage, Storage, Store


@dataclass(frozen=True)
class Splits:
    """The number of first elements of each of a segment's states rest on the device of this
    rank.
    """

    weight: int
    grad: int
    optim: int
    # whether they rest on the device as a whole, on every rank
    weights_stay: bool = True
    grads_stay: bool = True


def compute_dtypes(model: nn.Module, precision: Precision) -> Dtypes:
    """Return the dtypes in which the parameters of `model` compute; those that are not
    floating-point in their own.
    """
    given = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    as_given = len(given) > 1
    of = {
        id(p): precision.compute if p.is_floating_point() and not as_given else p.dtype
        for p in model.parameters()
    }
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            of |= {id(parameter): parameter.dtype for parameter in module.parameters(recurse=False)}
    return Dtypes(of, as_given)


class Source(Protocol):
    """The source of the numbers of segments when they are built, one after another."""

    def values(self, plan: SegmentPlan) -> Sequence[torch.Tensor]:
        """Return the values of a segment's parameters, of any float dtype."""

    def built(self, segment: Segment, cells: Cells) -> None:
        """The segment rests, with these values."""


class GivenValues:
    """The parameters' own values, or those that they are prepared with."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def values(self, plan: SegmentPlan) -> Sequence[torch.Tensor]:
        values = [local_of(parameter) for parameter in plan.members.values()]
        self._context.prepare(values)
        return [value.data for value in values]

    def built(self, segment: Segment, cells: Cells) -> None: ...


@dataclass(frozen=True)
class PlannedUnits:
    """The place of every segment at rest, by unit, with the memory on other tiers that it needs."""

    segments: list[list[SegmentPlan]]
    splits: dict[str, Splits]  # by segment
    reserved: Mapping[Tier, Store]


def plan_units(plans: Sequence[UnitPlan], context: Context) -> PlannedUnits:
    """Return where the segments of `plans` are to rest. Nothing is changed; raises StorageError, on
    every rank, where another tier has no room for weights and masters.
    """
    shares, align = context.options.shares, context.options.codecs.align
    meshes = {"": context.mesh} | {pattern: own.mesh for pattern, own in context.own.items()}
    dealer = dealer_of(plans, meshes, context.dtypes, shares, align)
    groups: list[list[SegmentPlan]] = []
    for plan in plans:
        own, cells = context.of(plan.pattern), context.policy.cells(plan.name)
        at = own.transport.rank, own.holders.places
        groups.append([])
        for kind, members in _groups(plan, context.dtypes).items():
            key = f"{plan.name}:{dtype_name(kind[0])}{'' if kind[1] else ':frozen'}"
            layout = dealer.layout(_shapes(members), own.mesh, kind=kind, align=align)
            groups[-1].append(SegmentPlan(key, plan.name, members, *kind, cells, layout, *at))
    segments = [segment for group in groups for segment in group]
    found = _split(segments, context)
    splits = {segment.key: split for segment, split in zip(segments, found, strict=True)}
    return PlannedUnits(groups, splits, _reserve(segments, splits, context))


def build_units(
    plans: Sequence[UnitPlan], context: Context, planned: PlannedUnits, source: Source
) -> list[Unit]:
    """Take every planned unit's parameters over, with values of `source`; afterwards they rest as
    the policy says.
    """
    around = holding_others(plans)
    units = []
    for index, (plan, group) in enumerate(zip(plans, planned.segments, strict=True)):
        cells = context.policy.cells(plan.name)
        segments = [
            _build_segment(segment, planned, context.of(plan.pattern), source) for segment in group
        ]
        unit = Unit(
            index,
            plan.name,
            segments,
            cells,
            spans_one_module=plan.spans_one_module,
            holds_others=index in around,
            strict=context.options.strict,
        )
        for segment in segments:
            views = segment.flat.buffer.views
            view = segment.user_view
            view.detach() if cells.weight.is_sharded else view.attach(views)
            segment.flat.publish_everywhere()
        units.append(unit)
        return_freed_memory()  # of the original parameters
    return units


def dealer_of(
    plans: Sequence[UnitPlan],
    meshes: Mapping[str, Mesh],
    dtypes: Dtypes,
    shares: Shares | WholeParameters | None,
    align: int,
) -> Dealer:
    """Return the dealer of the segments of `plans`, in order, over ranks with `shares`; `meshes`:
    by pattern.
    """
    groups = (
        (meshes[plan.pattern], *one) for plan in plans for one in _groups(plan, dtypes).items()
    )
    segments = ((kind, mesh, _shapes(members)) for mesh, kind, members in groups)
    return Dealer.of(shares, segments, align=align)


def _shapes(members: Mapping[str, nn.Parameter]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(local_of(parameter).shape)) for name, parameter in members.items()]


def _groups(
    plan: UnitPlan, dtypes: Dtypes
) -> dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]]:
    """Return the parameters of each segment, by dtype and whether it is trained."""
    groups: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in plan.parameters.items():
        groups.setdefault((dtypes.of[id(parameter)], parameter.requires_grad), {})[name] = parameter
    return groups


def gradient_bytes(
    plan: UnitPlan,
    cell: Cell,
    mesh: Mesh,
    *,
    dtypes: Dtypes,
    precision: Precision,
    dealer: Dealer,
    align: int,
) -> UnitGradient:
    """Return the bytes of a unit's gradient between micro-batches: whole, and as `cell` says, on
    the rank where they are most. `dealer` has laid out the units before.
    """
    whole = part = 0
    for (dtype, trainable), members in _groups(plan, dtypes).items():
        if trainable:
            layout = dealer.layout(_shapes(members), mesh, kind=(dtype, trainable), align=align)
            itemsize = precision.at(dtype).accumulate.itemsize
            whole += layout.numel * itemsize
            part += max(layout.held(rank, cell) for rank in range(mesh.size)) * itemsize
    return UnitGradient(plan.name, whole, part)


def _split(plans: Sequence[SegmentPlan], context: Context) -> list[Splits]:
    """Return where each segment's states are cut between the device and other tiers."""
    trained = [p for p in plans if p.trainable]
    held = [(p, p.cells.weight, p.rank) for p in plans]
    weights = _cut("weight", [p.cells.weight.tier for p in plans], held, context)
    held = [(p, p.cells.optim, p.rank) for p in trained]
    grads = _cut("grad", [p.cells.grad.tier for p in trained], held, context)
    optims = _cut("optimizer", [p.cells.optim.tier for p in trained], held, context)
    stepped = {p.key: (grad, optim) for p, grad, optim in zip(trained, grads, optims, strict=True)}
    # only these have a window, which all ranks make together
    stay = _stay_everywhere("weight", [(p, p.cells.weight) for p in plans], context)
    # sums that leave are waited for, which all ranks do at the same places
    sums = _stay_everywhere("grad", [(p, p.cells.optim) for p in trained], context)
    return [
        Splits(weight, *stepped.get(p.key, (0, 0)), p.key in stay, p.key in sums)
        for p, weight in zip(plans, weights, strict=True)
    ]


def _cut(
    state: str,
    tiers: Sequence[Tier],
    held: Sequence[tuple[SegmentPlan, Cell, int]],
    context: Context,
) -> list[int]:
    """Return how much of `state` rests on the device of what is `held` of segments: as much as a
    rank holds in a cell.
    """
    spans = [p.layout.span(rank, p.layout.scope(cell)) for p, cell, rank in held]
    # an encoding is cut between two of its blocks
    align, numels = context.options.codecs.align, [stop - start for start, stop in spans]
    cuts, shares = context.tiering.splits(state, tiers, numels, align=align), context.options.shares
    if not isinstance(shares, WholeParameters):
        return cuts
    return list(map(shares.nearest, cuts, spans, [p.layout for p, _, _ in held]))


def _stay_everywhere(
    state: str, plans: Sequence[tuple[SegmentPlan, Cell]], context: Context
) -> set[str]:
    """Return the segments that have their `state` on the device on every rank; the cell beside a
    segment says how much of it a rank holds.
    """
    tiering, out = context.tiering, {plan.key for plan, _ in plans}
    alike = context.options.shares is None and not tiering.differs(state)
    for rank in range(context.mesh.size):
        # where ranks are alike, each speaks for all, also of parameters with a mesh of their own
        held = [(p, cell, p.rank if alike else p.places[rank]) for p, cell in plans]
        by_rank = tiering.away.get(state, (Tier.DEVICE,))
        tiers = [by_rank[rank % len(by_rank)]] * len(plans)
        for (p, cell, of), split in zip(held, _cut(state, tiers, held, context), strict=True):
            if split < p.layout.held(of, cell):
                out.discard(p.key)
        if alike:
            break
    return out


class _Reserved:
    """A store that hands out storages that were made before, by key."""

    def __init__(self, store: Store, storages: dict[str, Storage]) -> None:
        self.tier, self.account, self.probe = store.tier, store.account, store.probe
        self._storages = storages

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> Storage:
        storage = self._storages.pop(key)
        found = (storage.numel, storage.dtype)
        assert found == (numel, dtype), (key, numel, dtype, found)
        return storage

    def close(self) -> None: ...


def _reserve(
    plans: Sequence[SegmentPlan], splits: Mapping[str, Splits], context: Context
) -> dict[Tier, _Reserved]:
    """Make the storages of all weights and masters before anything is touched: a shortage on one
    rank is then a StorageError on every one.
    """
    made: dict[Tier, dict[str, Storage]] = {tier: {} for tier in context.tiering.stores}
    with context.faults.together():
        for plan in plans:
            for key, numel, dtype, tier in _storages_of(plan, splits[plan.key], context):
                made[tier][key] = context.tiering.stores[tier].allocate(key, numel, dtype)
    return {
        tier: _Reserved(context.tiering.stores[tier], storages) for tier, storages in made.items()
    }


def _storages_of(
    plan: SegmentPlan, splits: Splits, context: Context
) -> list[tuple[str, int, torch.dtype, Tier]]:
    """Return key, elements, dtype and tier of the storages that the weights and the master of a
    segment need.
    """
    share, cells, master = plan.num_weights, plan.cells, context.precision.stepped
    out = []
    if weight_away := splits.weight < share:
        numel, dtype = _form_of_weights(plan, share - splits.weight, context)
        out.append((f"{plan.key} weights", numel, dtype, cells.weight.tier))
    if (
        plan.trainable
        and context.options.trains
        and cells.optim.tier is not Tier.DEVICE
        and splits.optim < plan.num_stepped
    ):
        apart = context.tiering.delayed_update is not None
        weight = AtRest(plan.dtype, share, splits.weight, cells.weight.tier)
        rests = AtRest(master, plan.num_stepped, splits.optim, cells.optim.tier)
        if not weight_away or apart or not is_weight(weight, rests):
            out.append(
                (f"{plan.key} master", plan.num_stepped - splits.optim, master, cells.optim.tier)
            )
    return out


def _build_segment(
    plan: SegmentPlan, planned: PlannedUnits, context: Context, source: Source
) -> Segment:
    cells, splits, reserved = plan.cells, planned.splits[plan.key], planned.reserved
    values = source.values(plan)
    rest = _rest_of_weights(plan, splits, reserved, context)
    flat = FlatWeights(plan, context, rest, reads_first=not splits.weights_stay)
    grad = None
    if plan.trainable:
        store = context.tiering.store(cells.grad.tier)
        # where fractions move, no rank knows the fractions of the others
        away = not splits.grads_stay or context.tiering.automatic
        sums = Accumulator(plan, flat, context, store=store, split=splits.grad, off_device=away)
        kind = Bucket
        if context.leaves is not None:
            kind = OwnLeafBucket if context.leaves.is_local else LeafBucket
        grad = kind(plan, flat, context, accumulator=sums, store=store)
    segment = Segment(plan, flat, grad, split=splits.optim)
    if plan.trainable and context.options.trains:
        make_master(segment, cells, context, reserved)
    segment.watch(strict=context.options.strict)
    with context.faults.noted(lost=True):
        segment.store(values)
    del values
    source.built(segment, cells)
    return segment


def make_master(
    segment: Segment, cells: Cells, context: Context, stores: Mapping[Tier, Store] | None = None
) -> State:
    """Give a trained segment its master, without its numbers where it is not the weights
    themselves, and return it. `stores`: the context's.
    """
    precision, remainder = context.precision.at(segment.flat.dtype), None
    if precision.has_remainders:
        remainder = RemainderStorage(f"{segment.key} master", segment.weight, context.memory)
    segment.make_master(
        context.memory,
        dtype=precision.stepped,
        store=(context.tiering.stores if stores is None else stores).get(cells.optim.tier),
        apart=context.tiering.delayed_update is not None,
        remainder=remainder,
    )
    assert segment.master is not None, segment.key
    return segment.master


def _form_of_weights(plan: SegmentPlan, numel: int, context: Context) -> tuple[int, torch.dtype]:
    """Return the number of elements and the dtype that `numel` weights have at rest: encoded as
    bytes.
    """
    codec = plan.rest_codec(context)
    return (numel, plan.dtype) if codec is None else (codec.encoded_bytes(numel), torch.uint8)


def _rest_of_weights(
    plan: SegmentPlan, splits: Splits, reserved: Mapping[Tier, Store], context: Context
) -> State | None:
    """Return where this rank's weights rest, None for a window on the device."""
    codec, split = plan.rest_codec(context), splits.weight
    if codec is None and splits.weights_stay:
        return None
    near, there = None, None
    if split or split == plan.num_weights:  # zeros decode to zeros
        numel, dtype = _form_of_weights(plan, split, context)
        near = torch.zeros(numel, dtype=dtype, device=context.device)
    if left := plan.num_weights - split:
        numel, dtype = _form_of_weights(plan, left, context)
        there = reserved[plan.cells.weight.tier].allocate(f"{plan.key} weights", numel, dtype)
    if codec is None:
        return State(near, there, link=context.tiering.link)
    parts = [] if near is None else [EncodedStorage(split, plan.dtype, codec, DeviceStorage(near))]
    parts += [] if there is None else [EncodedStorage(left, plan.dtype, codec, there)]
    return State(None, *parts)


# --------------------------------------------------------------------------- the parts of an engine


@dataclass(frozen=True)
class Parts:
    """The parts of one engine that hold its states, and the tie to its optimizer."""

    context: Context
    loop: Loop
    finalizer: Finalizer
    watch: Watch
    sharded: ShardedOptimizer | None

    @property
    def weights(self) -> Weights:
        """The weights of all units."""
        return self.loop.weights

    @property
    def backward(self) -> Backward:
        """Their gradients."""
        return self.loop.backward

    def check_at_rest(self, call: str) -> None:
        """Raise StateError, naming the `call`, where something is under way that goes on with
        the layout as it is, or where the model is not the one that was sharded.
        """
        self.weights.availability.check_trained()
        if (unsaved := self.context.faults.unsaved) is not None:
            raise StateError(f"{call}: what rests here is not whole: {unsaved}")
        if self.sharded is not None:
            self.sharded.check_finished()
        if self.context.streams.probe.recording is not None:
            raise StateError(f"{call} inside engine.trace(): leave that first")
        if not self.backward.runs_plainly:
            raise StateError(
                f"{call} inside no_sync(), join() or a schedule that the engine follows: call it"
                " outside"
            )
        self.watch.check()
        self.watch.check_frozen()
        for leaf in self.backward.parameters:
            if not leaf.parameter.requires_grad:
                raise StateError(
                    f"parameter {leaf.name!r} was trained when the model was sharded and is frozen"
                    f" now: set requires_grad=True before {call}"
                )


def make_weights_and_gradients(
    units: Sequence[Unit], context: Context, digest: Digest, *, prefetch_bytes: int | None
) -> tuple[Weights, Backward]:
    """Make what gathers `units`, and what takes their gradients."""
    residencies, transport = [unit.residency for unit in units], context.transport
    rules = Rules.of(
        [residency.traits for residency in residencies],
        ordered=is_ordered(
            one_sided=context.levels.one_sided,
            leave=context.weights_leave,
            coded=any(unit.is_coded for unit in units),
        ),
        keyed=context.levels.keyed,
        enqueues=context.streams.enqueues,
        around=context.policy.weights_leave_the_device and not context.options.trains,
        alone=transport.size == 1,
        prefetch_bytes=prefetch_bytes,
    )
    schedule = Schedule(residencies, rules, context.meter)
    streams = context.streams
    reductions = (DraftingReductions if context.tiering.step_in_backward else Reductions)(
        units,
        schedule.reduces,
        streams=streams,
        digest=digest,
        transports=context.transports,
        in_one_order=rules.reduces_in_one_order,
    )
    weights = Weights(
        units,
        schedule,
        reductions.finish,
        streams=streams,
        digest=digest,
        trimmer=context.tiering.trimmer if context.device.type == "cpu" else Trimmer(None),
    )
    shares, leaves = context.options.batch_shares, context.leaves
    share = shares[context.transport.rank] if shares and leaves is None else None
    sums = context.options.sums_ranks
    return weights, Backward(weights, reductions, share=share, leaves=leaves, sums_ranks=sums)


def step_settings(
    context: Context, units: Sequence[Unit], decisions: Decisions
) -> tuple[PartialState, StepOptions]:
    """Return what the optimizer's step knows of the engine."""
    transport, tiering = context.transport, context.tiering
    precision = context.precision
    is_part = transport.size > 1 and any(unit.cells.optim.is_sharded for unit in units)
    part = PartialState(transport.rank, transport.size, is_part=is_part, note=decisions.note)
    return part, StepOptions(
        context.device,
        enqueues=context.streams.enqueues,
        into_forward=context.steps_into_forward,
        delayed_update=tiering.delayed_update,
        timed=tiering.automatic,
        moments=precision.moments,
        whole=isinstance(context.options.shares, WholeParameters),
        trimmer=tiering.trimmer,
        probe=context.streams.probe,
        runner=DraftRunner if tiering.step_in_backward else None,
    )
