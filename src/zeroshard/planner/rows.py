"""One line of a plan: a row of the policy table on one mix of tiers, in bytes and seconds; of ranks
that are not alike, in bytes of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.shares import shares_of
from zeroshard.core.wire import LinkBytes
from zeroshard.errors import ConfigError
from zeroshard.planner.durations import checkpoint_bytes, checkpoint_times
from zeroshard.planner.exact import (
    LaidOut,
    StateBytes,
    rest_bytes,
    sum_by_tier,
    traffic_bytes,
    with_budget,
)
from zeroshard.planner.grid import GridPlan, RankPlan, StepSeconds
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape, Training, fitted
from zeroshard.planner.peak import peak_bytes
from zeroshard.planner.pipeline_time import PipelineTime
from zeroshard.planner.simulate import step_time

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
    """Whether `policy` runs with the codecs of `training`: config/native.py refuses the others."""
    encodes_weights = training.weight_codec is not None or training.frozen_codec is not None
    return not encodes_weights or policy.default.weight.scope is Scope.SHARD


def bytes_of(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> RankPlan:
    """Return the bytes of one rank at rest, and the most during a step."""
    training = training.on(laid_out.mesh.size)
    policy = with_budget(laid_out, policy, training)
    rest = rest_bytes(laid_out, policy, training)
    return RankPlan(0, laid_out, rest, peak_bytes(laid_out, policy, machine, training, rest))


def plan_row(
    laid_out: LaidOut,
    policy: Policy,
    machine: Machine,
    training: Training,
    sizes: RankPlan | None = None,
) -> PlannedRow:
    """Plan one row on one mix of tiers; `sizes`, where `bytes_of` it is known."""
    training = training.on(laid_out.mesh.size)
    found = bytes_of(laid_out, policy, machine, training) if sizes is None else sizes
    policy = with_budget(laid_out, policy, training)
    links = traffic_bytes(laid_out, policy, training)
    time = step_time(laid_out, policy, machine, training)
    row = _row(policy, machine, training, found, links, time)
    saved = {"all": checkpoint_bytes(laid_out, training), **row.checkpoint_bytes}
    return replace(row, checkpoint_bytes=saved)


def plan_on_grid(
    plan: GridPlan, policy: Policy, sizes: RankPlan | None = None, time: StepSeconds | None = None
) -> PlannedRow:
    """Plan one row on one mix of tiers on a grid of ranks; `sizes` and `time`, where they are
    known.
    """
    found = plan.worst(policy) if sizes is None else sizes
    taken, grid = plan.step(policy) if time is None else time, plan.grid
    links = plan.traffic(found.rank, policy)
    row = _row(policy, plan.share, plan.training, found, links, taken)
    spread = replace(
        row.spread,
        tp=grid.tp,
        pp=grid.pp,
        stage=found.rank,
        axis_bytes=plan.axis_bytes(found.rank, links),
        bubble=taken.bubble if isinstance(taken, PipelineTime) and row.time.computes else 0.0,
        budget=plan.budget(policy),
    )
    saved = {"all": plan.saved_bytes(), **row.checkpoint_bytes}
    return replace(row, checkpoint_bytes=saved, spread=spread)


def _row(
    policy: Policy,
    machine: Machine,
    training: Training,
    sizes: RankPlan,
    links: LinkBytes,
    time: StepSeconds,
) -> PlannedRow:
    """Return the line of data parallel ranks on `machine`."""
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
        checkpoint_bytes={"rank": checkpoint_bytes(sizes.laid_out, training, 0)},
        load_s=files.load,
        save_s={"foreground": files.save, "background": files.background},
        whole_gradients=len(policy.units),
        spread=Spread(
            dp=machine.gpus,
            micro_batches=training.micro_batches,
            axis_bytes={"dp": round(links.total), "tp": 0, "pp": 0},
        ),
    )


def short_of(peak: dict[str, int], machine: Machine) -> tuple[str, float, float] | None:
    """Return the first memory that is too small (device, host, disk), the bytes needed and the
    bytes there are (on a host, beside its allowance); None where all fits. Hosts and disks are
    shared by the ranks of a node.
    """
    device, ranks = peak["device"], machine.node_size
    on_host = peak["host"] + (0 if machine.accelerator else device)
    memories = (
        ("device memory", device, machine.gpu_memory),
        ("host memory", on_host * ranks, machine.host_room),
        ("disk space", peak["disk"] * ranks, machine.disk),
    )
    return next((one for one in memories if one[1] > one[2]), None)


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
# needs whatever it owns (gathered units, buffers, activations); other shares for every row.
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
    room = tuple(gpu_memory) or (machine.gpu_memory,) * machine.gpus
    if gpu_memory and not machine.accelerator:
        raise ConfigError(f"gpu_memory per rank has no effect on {machine.name}, which is a host")
    _check_shares(shares, room, machine.gpus)
    rows = [
        policy
        for policy in candidates(machine)
        if takes(policy, training) and policy.default.optim.is_sharded
    ]
    return tuple(_uneven_row(model, policy, machine, training, shares, room) for policy in rows)


def _check_shares(shares: Sequence[float] | str | None, room: Sequence[int], gpus: int) -> None:
    if len(room) != gpus:
        raise ConfigError(f"gpu_memory is given for {len(room)} GPUs, and there are {gpus}")
    if isinstance(shares, str):
        if shares not in ("memory", "auto"):
            raise ConfigError(
                f"shares={shares!r} is not a list of a number per GPU, 'memory' or 'auto'"
            )
        return
    if shares is None:
        return
    if len(shares) != gpus:
        raise ConfigError(f"shares is given for {len(shares)} GPUs, and there are {gpus}")
    if min(shares) < 0 or abs(sum(shares) - 1) > _SLACK:
        raise ConfigError(
            f"shares={list(shares)} sum to {sum(shares):.7g}: shares are 0 or more and sum to 1"
        )


def _uneven_row(
    model: ModelShape,
    policy: Policy,
    machine: Machine,
    training: Training,
    shares: Sequence[float] | str | None,
    room: Sequence[int],
) -> UnevenRow:
    numbers: Sequence[float] = [1 / machine.gpus] * machine.gpus
    if shares == "memory":
        numbers = _rounded(room)
    elif shares == "auto":
        numbers = _beside(model, policy, machine, training, room)
    elif shares is not None:
        assert not isinstance(shares, str)
        numbers = shares
    known: dict[object, UnevenRank] = {}
    ranks = []
    for rank in range(machine.gpus):
        # the ranks in an order in which this one comes first, and nodes and columns remain
        node, local = divmod(rank, machine.mesh.node_size)
        nodes, locals_ = list(range(machine.mesh.num_nodes)), list(range(machine.mesh.node_size))
        nodes[0], nodes[node] = nodes[node], nodes[0]
        locals_[0], locals_[local] = locals_[local], locals_[0]
        order = [one * machine.mesh.node_size + place for one in nodes for place in locals_]
        mine = [numbers[other] for other in order]
        key = (tuple(mine), room[rank])
        if key not in known:
            known[key] = _uneven_rank(model, policy, machine, training, mine, room[rank])
        ranks.append(known[key])
    return UnevenRow(
        policy.name, tiers_of(policy), tuple(ranks), tuple(_short_of_ranks(ranks, machine))
    )


def _uneven_rank(
    model: ModelShape,
    policy: Policy,
    machine: Machine,
    training: Training,
    numbers: Sequence[float],
    memory: int,
) -> UnevenRank:
    """Plan the first of ranks with the shares `numbers`."""
    laid_out = LaidOut(model, machine.mesh, training.align, shares_of(numbers))
    sizes = bytes_of(laid_out, policy, machine, training)
    rest = sum_by_tier(sizes.rest.values())
    at_rest = {tier.value: num_bytes for tier, num_bytes in rest.items()}
    links = traffic_bytes(laid_out, with_budget(laid_out, policy, training), training)
    return UnevenRank(numbers[0], at_rest, sizes.peak.by_tier, round(links.total), memory)


def _beside(
    model: ModelShape,
    policy: Policy,
    machine: Machine,
    training: Training,
    room: Sequence[int],
) -> Sequence[float]:
    """Return shares in proportion to what memories have left beside a rank that owns nothing."""
    nothing = [0.0] + [1 / (machine.gpus - 1)] * (machine.gpus - 1) if machine.gpus > 1 else [1.0]
    needed = _uneven_rank(model, policy, machine, training, nothing, room[0]).peak_bytes["device"]
    left = [max(0, memory - needed) for memory in room]
    return _rounded(left if any(left) else room)


def _rounded(numbers: Sequence[int]) -> list[float]:
    """Return shares in proportion to `numbers`, of a few digits."""
    out = [round(number / sum(numbers), _DIGITS) for number in numbers]
    if len(set(numbers)) > 1:
        most = out.index(max(out))
        out[most] = round(out[most] + 1 - sum(out), _DIGITS)
    return out


def _short_of_ranks(ranks: Sequence[UnevenRank], machine: Machine) -> Iterator[str]:
    """Yield the ranks and nodes where something does not fit."""
    if machine.accelerator:
        for number, rank in enumerate(ranks):
            if rank.peak_bytes["device"] > rank.memory:
                yield f"device memory of rank {number}"
    size = machine.node_size
    for node in range(len(ranks) // size):
        mine = ranks[node * size : (node + 1) * size]
        on_host = [
            rank.peak_bytes["host"] + (0 if machine.accelerator else rank.peak_bytes["device"])
            for rank in mine
        ]
        for what, needs, there in (
            ("host memory", sum(on_host), machine.host_room),
            ("disk space", sum(rank.peak_bytes["disk"] for rank in mine), machine.disk),
        ):
            if needs > there:
                yield f"{what} of node {node}"
