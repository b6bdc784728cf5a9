"""Ranks that are not alike: what each rests and takes at its peak, and whether all of them fit.

    plan_uneven(model, machine, training, shares=..., gpu_memory=...)   a line per row and tier mix

`shares` are numbers per rank, "memory" (in proportion to the memories, as ``zs.shard`` takes it) or
"auto": in proportion to what each memory has left beside all that is no share, which a rank needs
whatever it owns (gathered units, buffers, activations); other shares for every row.

Bytes at rest and on the wire are exact, as in exact.py; a rank's peak is that of rank 0 on the same
mesh with the ranks renamed so that it comes first. Times are not planned: every rank gathers and
reduces as much as with equal shares, and the slowest decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zeroshard.core.placement import Mesh
from zeroshard.core.policy import Policy
from zeroshard.core.shares import shares_of
from zeroshard.errors import ConfigError
from zeroshard.planner.exact import LaidOut, sum_by_tier, traffic_bytes
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape, fitted
from zeroshard.planner.rows import bytes_of, candidates, takes, tiers_of
from zeroshard.planner.training import Training
from zeroshard.planner.whole_gradients import with_budget

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
    short: tuple[str, ...]  # of which rank or node something does not fit

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
    _check(shares, room, machine.gpus)
    rows = [
        policy
        for policy in candidates(machine)
        if takes(policy, training) and policy.default.optim.is_sharded
    ]
    return tuple(_row(model, policy, machine, training, shares, room) for policy in rows)


def _check(shares: Sequence[float] | str | None, room: Sequence[int], gpus: int) -> None:
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


def _row(
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
        order = _renamed(machine.mesh, rank)
        mine = [numbers[other] for other in order]
        key = (tuple(mine), room[rank])
        if key not in known:
            known[key] = _rank(model, policy, machine, training, mine, room[rank])
        ranks.append(known[key])
    return UnevenRow(policy.name, tiers_of(policy), tuple(ranks), tuple(_short(ranks, machine)))


def _rank(
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
    needed = _rank(model, policy, machine, training, nothing, room[0]).peak_bytes["device"]
    left = [max(0, memory - needed) for memory in room]
    return _rounded(left if any(left) else room)


def _rounded(numbers: Sequence[int]) -> list[float]:
    """Return shares in proportion to `numbers`, of a few digits."""
    out = [round(number / sum(numbers), _DIGITS) for number in numbers]
    if len(set(numbers)) > 1:
        most = out.index(max(out))
        out[most] = round(out[most] + 1 - sum(out), _DIGITS)
    return out


def _renamed(mesh: Mesh, rank: int) -> list[int]:
    """Return the ranks in an order in which `rank` comes first, and nodes and columns remain."""
    node, local = divmod(rank, mesh.node_size)
    nodes, locals_ = list(range(mesh.num_nodes)), list(range(mesh.node_size))
    nodes[0], nodes[node] = nodes[node], nodes[0]
    locals_[0], locals_[local] = locals_[local], locals_[0]
    return [one * mesh.node_size + place for one in nodes for place in locals_]


def _short(ranks: Sequence[UnevenRank], machine: Machine) -> Iterator[str]:
    """Yield of which ranks and nodes something does not fit."""
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
