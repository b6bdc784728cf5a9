"""One line of a plan: a row of the policy table on one mix of tiers, in bytes and seconds; of ranks
that are not alike, in bytes of each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, get_args

from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.shares import (
    Ownership,
    WholeParameters,
    has_blocks,
    newton_schulz,
    shares_of,
)
from zeroshard.errors import ConfigError
from zeroshard.planner.durations import checkpoint_bytes, checkpoint_times
from zeroshard.planner.exact import LaidOut, StateBytes, sum_by_tier
from zeroshard.planner.grid import RankPlan, RanksPlan
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape, Training, fitted
from zeroshard.planner.simulate import StepTime

_DEVICE, _HOST, _DISK = Tier.DEVICE, Tier.HOST, Tier.DISK

# tiers of weight, grad and optimizer -> the rows for which they are planned
_MIXES: dict[tuple[Tier, Tier, Tier], tuple[str, ...]] = {
    (_DEVICE, _DEVICE, _DEVICE): tuple(ROWS),
    (_DEVICE, _DEVICE, _HOST): ("zero1", "zero2", "zero3"),
    (_DEVICE, _HOST, _HOST): ("zero2", "zero3"),
    (_HOST, _HOST, _HOST): ("zero3",),
    (_DEVICE, _HOST, _DISK): ("zero3",),
    (_DISK, _DISK, _DISK): ("zero3",),
}


@dataclass(frozen=True)
class Spread:
    """The ranks of a row along each axis, and the bytes that travel along it."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1  # of a step of one pipeline, or of one data parallel rank
    stage: int = 0  # rank of the pipeline that needs most: the row has its bytes
    axis_bytes: dict[str, int] = field(default_factory=dict)  # "dp", "tp", "pp": received per step
    bubble: float = 0.0  # part of the step for which ranks wait for other stages, on average
    budget: int = 0  # that engine.follow() is planned with; 0: none has an effect


@dataclass(frozen=True)
class SimulatedStep:
    """Seconds by which rows are compared: of a step, or of all in it but computations."""

    seconds: float
    computes: bool  # computations are among them


@dataclass(frozen=True)
class PlannedRow:
    """One row on one mix of tiers; bytes count one rank."""

    row: str
    tiers: dict[str, str]  # "weight", "grad", "optimizer" -> tier
    rest_bytes: dict[str, int]  # by tier: model states between micro-batches, exact
    peak_bytes: dict[str, int]  # by tier, modelled
    parts: dict[str, int]  # what the device's peak is made of: peak.Peak
    traffic_bytes: dict[str, int]  # "local", "node": received per step, exact
    time: SimulatedStep
    tokens_per_s: float | None  # of all GPUs together; None where a model takes none
    fits: bool
    bound_by: str  # what takes longest ("not known" without times), or what there is too little of
    checkpoint_bytes: dict[str, int]  # "all", "rank": what a save writes, exact
    # seconds of files are None on a machine without a disk
    load_s: float | None
    save_s: dict[str, float | None]  # "foreground" (zs.save), "background" (what Saver holds up)
    whole_gradients: int = 0  # units that keep whole gradients, by accumulation_budget
    spread: Spread = field(default_factory=lambda: Spread())

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where the model's FLOPs are not known."""
        return self.time.seconds if self.time.computes else None

    @property
    def gpus(self) -> int:
        """The GPUs of all axes."""
        return self.spread.tp * self.spread.pp * self.spread.dp

    @property
    def gpu_hours_per_billion_tokens(self) -> float | None:
        """Hours of one GPU that a billion tokens take; None where that is not known."""
        if self.tokens_per_s is None:
            return None
        return self.gpus * 1e9 / self.tokens_per_s / 3600

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``zeroshard plan --json`` prints it."""
        out = asdict(self)
        spread, _ = out.pop("spread"), out.pop("time")
        hours = self.gpu_hours_per_billion_tokens
        return {
            **out, "step_s": self.step_s, "gpu_hours_per_billion_tokens": hours, **spread,
        }  # fmt: skip


def tiers_of(policy: Policy) -> dict[str, str]:
    """Return the tier of each state of a row, by the names that a plan prints."""
    cells = policy.default
    states = {"weight": cells.weight, "grad": cells.grad, "optimizer": cells.optim}
    return {state: cell.tier.value for state, cell in states.items()}


def candidates(machine: Machine) -> Iterator[Policy]:
    """Yield the rows of the table on the tiers that make sense on `machine`."""
    for tiers, names in _MIXES.items():
        if (_HOST in tiers and not machine.accelerator) or (_DISK in tiers and not machine.disk):
            continue
        for name in names:
            yield ROWS[name].tiered(*tiers)


def takes(policy: Policy, training: Training) -> bool:
    """Whether `policy` is planned with the codecs and masters of `training` (config/native.py
    refuses the others), and with its optimizer.
    """
    if training.decodes and {*tiers_of(policy).values()} != {Tier.DEVICE.value}:
        return False
    if training.optimizer == "muon" and policy.default.optim.tier is not Tier.DEVICE:
        return False  # the products' time on a host is not known
    encodes_weights = training.weight_codec is not None or training.frozen_codec is not None
    return not encodes_weights or policy.default.weight.scope is Scope.SHARD


def plan_row(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> PlannedRow:
    """Plan one row on one mix of tiers, on data parallel ranks alone."""
    return plan_on(RanksPlan(laid_out, machine, training), policy)


def plan_on(
    plan: RanksPlan, policy: Policy, sizes: RankPlan | None = None, time: StepTime | None = None
) -> PlannedRow:
    """Plan one row on one mix of tiers on the ranks of `plan`; `sizes` and `time`, where they are
    known.
    """
    policy, machine, training, grid = plan.as_run(policy), plan.share, plan.training, plan.grid
    sizes = plan.worst(policy) if sizes is None else sizes
    time = plan.step(policy) if time is None else time
    links = plan.traffic(sizes.rank, policy)
    peak = sizes.peak
    files = checkpoint_times(sizes.laid_out, policy, machine, training)
    short = short_of(peak.by_tier, machine)
    model, tree = sizes.laid_out.model, training.tree
    micro_batches = training.micro_batches * machine.gpus if tree is None else tree.leaves
    tokens = training.tokens * micro_batches
    bound_by = time.bound_by if model.is_timed else "not known"
    rest = sum_by_tier(sizes.rest.values())
    return PlannedRow(
        row=policy.name,
        tiers=tiers_of(policy),
        rest_bytes={tier.value: num_bytes for tier, num_bytes in rest.items()},
        peak_bytes=peak.by_tier,
        parts=peak.parts,
        traffic_bytes={"local": round(links.inside), "node": round(links.between)},
        time=SimulatedStep(time.total, model.is_timed),
        tokens_per_s=tokens / time.total if model.is_timed and model.takes_tokens else None,
        fits=short is None,
        bound_by=bound_by if short is None else short[0],
        checkpoint_bytes={
            "all": plan.saved_bytes(),
            "rank": checkpoint_bytes(sizes.laid_out, training, 0),
        },
        load_s=files.load,
        save_s={"foreground": files.save, "background": files.background},
        whole_gradients=len(policy.units),
        spread=Spread(
            tp=grid.tp,
            pp=grid.pp,
            dp=machine.gpus,
            micro_batches=training.micro_batches,
            stage=sizes.rank,
            axis_bytes=plan.axis_bytes(sizes.rank, links),
            bubble=time.bubble if model.is_timed else 0.0,
            budget=plan.budget(policy),
        ),
    )


def short_of(peak: dict[str, int], machine: Machine) -> tuple[str, float, float] | None:
    """Return the first memory that is too small (device, host, disk), the bytes needed and the
    bytes there are (on a host, beside its allowance); None where all fits.
    """
    device = ("device memory", peak["device"], machine.gpu_memory)
    memories = (device, *_of_node([peak] * machine.node_size, machine))
    return next((one for one in memories if one[1] > one[2]), None)


def _of_node(peaks: Sequence[dict[str, int]], machine: Machine) -> list[tuple[str, int, int]]:
    """Return the memories that the ranks of a node share: the bytes needed and those there are. A
    tier that is not the disk is memory of the host, as the times of a step have it.
    """
    elsewhere = {"disk", *(["device"] if machine.accelerator else [])}
    on_host = sum(size for one in peaks for tier, size in one.items() if tier not in elsewhere)
    on_disk = sum(peak["disk"] for peak in peaks)
    return [
        ("host memory", on_host, machine.host_room),
        ("disk space", on_disk, machine.disk),
    ]


def rest_fits(rests: Iterable[StateBytes], machine: Machine) -> bool:
    """Whether `machine` has room for what rests on any of some ranks, which rules most rows out
    before their peaks are played: without gradients, since a step may hold less than rests between
    micro-batches.
    """
    states = [[by for name, by in one.items() if name != "grad"] for one in rests]
    sums = [sum_by_tier(one) for one in states]
    least = {tier.value: max(one[tier] for one in sums) for tier in Tier}
    return short_of(least, machine) is None


def describe_row(row: PlannedRow) -> str:
    """Return the row with its grid, if it is one of several axes, and the states that leave the
    device: "tp 4 x pp 2 x dp 16, zero3, optimizer on host".
    """
    one = row.spread
    grid = [] if one.tp == one.pp == 1 else [f"tp {one.tp} x pp {one.pp} x dp {one.dp}"]
    if len(set(row.tiers.values())) == 1:
        tier = row.tiers["weight"]
        return ", ".join([*grid, row.row, *([] if tier == _DEVICE.value else [f"all on {tier}"])])
    by_tier: dict[str, list[str]] = {}
    for state, tier in row.tiers.items():
        if tier != _DEVICE.value:
            by_tier.setdefault(tier, []).append(state)
    parts = [f"{' and '.join(states)} on {tier}" for tier, states in by_tier.items()]
    return ", ".join([*grid, row.row, *parts])


# ------------------------------------------------------------------------------------- uneven ranks
#     plan_uneven(model, machine, training, shares=..., gpu_memory=...)   a line per row and tiers
#
# `shares` are numbers per rank, "memory" (in proportion to the memories, as ``zs.shard`` takes it)
# or "auto": in proportion to what each memory has left beside all that is no share, which a rank
# needs whatever it owns (gathered units, buffers, activations); other shares for every row; or
# "whole" or "whole_by_cost": ranks own whole parameters (``ownership=``), with Muon but for what
# AdamW steps.
#
# Bytes at rest and on the wire are exact, as in exact.py; a rank's peak is rank 0's on the same
# mesh with the ranks renamed so that it comes first. Times are not planned: every rank gathers and
# reduces as much as with equal shares, and the slowest decides.

_SLACK = 1e-6
_DIGITS = 4


@dataclass(frozen=True)
class UnevenRank:
    """Bytes of one rank in one row."""

    share: float
    rest_bytes: dict[str, int]  # by tier, exact
    peak_bytes: dict[str, int]  # by tier, modelled
    traffic_bytes: int  # received per step, exact
    memory: int  # of its device


@dataclass(frozen=True)
class UnevenRow:
    """One row of the table on one mix of tiers, rank by rank."""

    row: str
    tiers: dict[str, str]
    ranks: tuple[UnevenRank, ...]
    short: tuple[str, ...]  # ranks and nodes where something does not fit

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return not self.short

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``zeroshard plan --json`` prints it."""
        return {**asdict(self), "fits": self.fits}


def _owned(model: ModelShape, training: Training, *, by_cost: bool) -> WholeParameters:
    """Return which parameters ranks own whole, and what they are dealt by."""
    groups = [group for unit in model.units for group in unit.groups]
    if training.optimizer == "adam-8bit":
        sizes = {name: prod(shape) for group in groups for name, shape in group.shapes}
        return WholeParameters(blocks=frozenset(name for name in sizes if has_blocks(sizes[name])))
    if training.optimizer != "muon":
        return WholeParameters()
    names = frozenset(name for group in groups for name, _ in group.shapes)
    matrices = frozenset[str]().union(*(group.matrices for group in groups))
    return WholeParameters(names - matrices, matrices if by_cost else frozenset())


def imbalance(
    model: ModelShape, machine: Machine, training: Training, *, by_cost: bool
) -> tuple[float, float]:
    """Return the largest rank's elements, and its products of Newton and Schulz, as multiples of
    the mean, where ranks own whole parameters.
    """
    owned = _owned(model, training, by_cost=by_cost)
    laid_out = LaidOut(model, machine.mesh, training.align, owned)
    loads = [0] * machine.gpus, [0] * machine.gpus
    for one in laid_out.groups:
        starts = [start for start, _ in sorted(one.layout.ranges)]
        owners = sorted(range(machine.gpus), key=lambda rank: one.layout.ranges[rank])
        for rank, share in enumerate(one.layout.shares):
            loads[0][rank] += share
        for slot in one.layout.slots:
            if slot.name in one.group.matrices:
                rank = owners[bisect_right(starts, slot.offset) - 1]
                loads[1][rank] += newton_schulz(slot.shape)
    elements, products = (max(each) * machine.gpus / max(sum(each), 1) for each in loads)
    return elements, products


def plan_uneven(
    model: ModelShape,
    machine: Machine,
    training: Training,
    *,
    shares: Sequence[float] | str | None = None,
    gpu_memory: Sequence[int] = (),
) -> tuple[UnevenRow, ...]:
    """Plan every row of the table that shards anything; `gpu_memory`: of each rank's device
    (default: the machine's).

    Raises ConfigError for numbers that are not one per GPU, or shares that do not sum to 1.
    """
    model, training = fitted(model, training)
    gpus, room = machine.gpus, tuple(gpu_memory) or (machine.gpu_memory,) * machine.gpus
    if gpu_memory and not machine.accelerator:
        raise ConfigError(f"gpu_memory per rank has no effect on {machine.name}, which is a host")
    if len(room) != gpus:
        raise ConfigError(f"gpu_memory is given for {len(room)} GPUs, and there are {gpus}")
    if isinstance(shares, str) and shares not in ("memory", "auto", *get_args(Ownership)):
        raise ConfigError(
            f"shares={shares!r} is not a list of a number per GPU, 'memory', 'auto', 'whole' or"
            " 'whole_by_cost'"
        )
    if shares is not None and not isinstance(shares, str):
        if len(shares) != gpus:
            raise ConfigError(f"shares is given for {len(shares)} GPUs, and there are {gpus}")
        if min(shares) < 0 or abs(sum(shares) - 1) > _SLACK:
            raise ConfigError(
                f"shares={list(shares)} sum to {sum(shares):.7g}: shares are 0 or more and sum to 1"
            )

    def first_rank(
        policy: Policy, numbers: Sequence[float], memory: int, order: tuple[int, ...] = ()
    ) -> UnevenRank:
        """Plan the first of ranks with the shares `numbers`, or that own whole parameters, in this
        `order`.
        """
        laid_out = LaidOut(model, machine.mesh, training.align, shares_of(numbers))
        if shares in get_args(Ownership):
            owned = _owned(model, training, by_cost=shares == "whole_by_cost")
            laid_out = replace(laid_out, shares=owned, order=order)
            whole = sum(one.layout.numel for one in laid_out.groups)
            own = sum(one.layout.shares[0] for one in laid_out.groups)
            numbers = [round(own / whole, _DIGITS)]
        plan = RanksPlan(laid_out, machine, training)
        row, links = plan.worst(policy), plan.traffic(0, policy)
        at_rest = {tier.value: size for tier, size in sum_by_tier(row.rest.values()).items()}
        return UnevenRank(numbers[0], at_rest, row.peak.by_tier, round(links.total), memory)

    def row_of(policy: Policy) -> UnevenRow:
        numbers: Sequence[float] = [1 / gpus] * gpus
        if shares == "memory":
            numbers = _rounded(room)
        elif shares == "auto":  # of what memories have left beside a rank that owns nothing
            nothing = [0.0] + [1 / (gpus - 1)] * (gpus - 1) if gpus > 1 else [1.0]
            needed = first_rank(policy, nothing, room[0]).peak_bytes["device"]
            left = [max(0, memory - needed) for memory in room]
            numbers = _rounded(left if any(left) else room)
        elif shares is not None and not isinstance(shares, str):
            numbers = shares
        known: dict[object, UnevenRank] = {}
        ranks, size = [], machine.mesh.node_size
        for rank in range(gpus):
            # the ranks in an order in which this one comes first, and nodes and columns remain
            node, local = divmod(rank, size)
            nodes, locals_ = list(range(machine.mesh.num_nodes)), list(range(size))
            nodes[0], nodes[node] = nodes[node], nodes[0]
            locals_[0], locals_[local] = locals_[local], locals_[0]
            order = tuple(one * size + place for one in nodes for place in locals_)
            mine = [numbers[other] for other in order]
            key = (tuple(mine), room[rank], rank if shares in get_args(Ownership) else 0)
            if key not in known:
                known[key] = first_rank(policy, mine, room[rank], order)
            ranks.append(known[key])
        peaks = [rank.peak_bytes for rank in ranks]
        short = [
            f"device memory of rank {number}"
            for number, rank in enumerate(ranks)
            if machine.accelerator and rank.peak_bytes["device"] > rank.memory
        ]
        short += [
            f"{what} of node {node}"
            for node in range(gpus // size)
            for what, needs, there in _of_node(peaks[node * size : (node + 1) * size], machine)
            if needs > there
        ]
        return UnevenRow(policy.name, tiers_of(policy), tuple(ranks), tuple(short))

    return tuple(
        row_of(policy)
        for policy in candidates(machine)
        if takes(policy, training) and policy.default.optim.is_sharded
    )


def _rounded(numbers: Sequence[int]) -> list[float]:
    """Return shares in proportion to `numbers`, of a few digits."""
    out = [round(number / sum(numbers), _DIGITS) for number in numbers]
    if len(set(numbers)) > 1:
        most = out.index(max(out))
        out[most] = round(out[most] + 1 - sum(out), _DIGITS)
    return out
