"""The results of ``Engine.memory()``, ``Engine.traffic()`` and ``Engine.explain_optimizer()``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from zeroshard.comm.transport import Traffic
from zeroshard.core.placement import Tier
from zeroshard.core.shares import WholeParameters, newton_schulz
from zeroshard.errors import StateError
from zeroshard.optim.copies import (
    MATRIX,
    elementwise_rule,
    known_rule,
    state_after_trial,
    tried_rule,
)
from zeroshard.optim.several import each_of
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.context import Context
from zeroshard.runtime.unit import Unit


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank, by state and tier, at rest now; what is gathered or in buffers now;
    and the peak of the latter.
    """

    at_rest: dict[str, int]  # "weight", "master", "grad", "optimizer"
    temporary: int  # gathered weights and gradient buffers in use now
    peak: int  # the most that `temporary` ever was
    # state -> tier -> bytes at rest now
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    # "host", "disk" -> the most bytes that ever rested there
    tier_peaks: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes at rest, all states together."""
        return sum(self.at_rest.values())

    def __str__(self) -> str:
        """Return a table: a state per line, a tier per column, then the sums and what is gathered
        or in buffers.
        """
        tiers = sorted({tier for by_tier in self.tiers.values() for tier in by_tier})
        rows: list[tuple[str, ...]] = [("memory of this rank", *tiers, "total")]
        rows += [
            (state, *(_size(by_tier.get(tier, 0)) for tier in tiers), _size(self.at_rest[state]))
            for state, by_tier in self.tiers.items()
            if by_tier
        ]
        sums = self.by_tier
        rows.append(("at rest", *(_size(sums[tier]) for tier in tiers), _size(self.total)))
        beside = {"gathered or in buffers": self.temporary, "the most of that": self.peak}
        rows += [(name, *[""] * len(tiers), _size(count)) for name, count in beside.items()]
        return "\n".join(_columns(rows))

    @property
    def by_tier(self) -> dict[str, int]:
        """Bytes at rest on each tier, all states together."""
        states = self.tiers.values()
        return {tier.value: sum(one.get(tier.value, 0) for one in states) for tier in Tier}


@dataclass(frozen=True)
class TrafficReport:
    """Payload bytes that this rank received (and sent) since ``reset_traffic()``."""

    bytes: dict[str, int]  # per collective
    calls: dict[str, int]  # per collective
    links: dict[str, int]  # bytes per link class
    # per collective: of these bytes, those that came from other nodes (`comm.node_size`)
    between_nodes: dict[str, int]

    @classmethod
    def of(cls, counted: Traffic) -> TrafficReport:
        """Sum what a transport has `counted`, by collective and by link class."""
        by_operation: dict[str, int] = {}
        by_link: dict[str, int] = {}
        calls: dict[str, int] = {}
        for (operation, link), num_bytes in counted.bytes.items():
            by_operation[operation] = by_operation.get(operation, 0) + num_bytes
            by_link[link] = by_link.get(link, 0) + num_bytes
            calls[operation] = calls.get(operation, 0) + counted.calls[operation, link]
        return cls(by_operation, calls, by_link, dict(counted.between))

    def __str__(self) -> str:
        """Return a table: a collective per line, then the sum, and the bytes by link class."""
        rows: list[tuple[str, ...]] = [("collective", "calls", "received", "between nodes")]
        sizes = (self.bytes, self.between_nodes)
        for name in self.bytes:
            received, between = (_size(count.get(name, 0)) for count in sizes)
            rows.append((name, f"{self.calls.get(name, 0):,}", received, between))
        received, between = (_size(sum(count.values())) for count in sizes)
        rows.append(("total", f"{sum(self.calls.values()):,}", received, between))
        links = [f"over {link}: {_size(count)}" for link, count in self.links.items()]
        return "\n".join([*_columns(rows), *links])

    @property
    def total(self) -> int:
        """All payload bytes together."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class SteppedGroup:
    """One param group, as its optimizer steps it, and what every rank owns of it."""

    optimizer: str  # its class, with the module
    group: int
    kind: str
    known_by: str  # "table" of classes, or "probe": trial steps
    why: str
    needs: str
    # by rank
    parameters: tuple[int, ...]  # how many are stepped there, whole or in part
    elements: tuple[int, ...]
    largest: tuple[int, ...]  # the most elements of one of them
    # of the optimizer's state, each element: what rests, before the first step of a trial
    state_bytes: float | None  # None: a trial step has failed
    step_bytes: int  # what travels inside step()
    imbalance: float  # elements of the rank with most, of the mean
    # of a rule of matrices the same for the products of Newton and Schulz
    cost_imbalance: float | None


@dataclass(frozen=True)
class OptimizerReport:
    """The rule of each param group, and how it is shared out."""

    rank: int
    groups: tuple[SteppedGroup, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a table: a param group per line, with the numbers of this rank; then why."""
        rows: list[tuple[str, ...]] = [
            (
                "param group", "kind", "known by", "parameters", "elements", "the largest",
                "state bytes each", "bytes in step()", "most / mean", "by Newton-Schulz",
            )
        ]  # fmt: skip
        names, notes = [], []
        for one in self.groups:
            names.append(f"{one.optimizer} {one.group}")
            counts = (one.parameters, one.elements, one.largest)
            mine = (count[self.rank] if self.rank < len(count) else 0 for count in counts)
            state = "unknown" if one.state_bytes is None else f"{one.state_bytes:.3g}"
            cost = "" if one.cost_imbalance is None else f"{one.cost_imbalance:.2f}"
            rows.append(
                (
                    names[-1], one.kind, one.known_by, *(f"{number:,}" for number in mine), state,
                    str(one.step_bytes), f"{one.imbalance:.2f}", cost,
                )
            )  # fmt: skip
            notes.append(f"{names[-1]} needs {one.needs}: {one.why}")
        return "\n".join([*_columns(rows), *dict.fromkeys(notes)])


class Accounts:
    """The memory of one engine on this rank, counted."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self.device_type = context.device.type  # of the model
        self._units = units
        self._context = context
        self._meter = context.meter
        self._stores = context.tiering.stores
        self._optimizer: ShardedOptimizer | None = None

    def attach(self, optimizer: ShardedOptimizer) -> None:
        """Count the state of `optimizer`, too."""
        self._optimizer = optimizer

    def report(self) -> MemoryReport:
        """Return what is there now, and the peaks."""
        optimizer = {} if self._optimizer is None else self._optimizer.state_bytes()
        tiers = _resting(self._units, optimizer)
        peaks = {tier.value: store.account.peak for tier, store in self._stores.items()}
        at_rest = {state: sum(by_tier.values()) for state, by_tier in tiers.items()}
        return MemoryReport(at_rest, self._meter.live, self._meter.peak, tiers, peaks)

    def by_unit(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the bytes at rest by unit, state and tier."""
        out: dict[str, dict[str, dict[str, int]]] = {}
        for unit in self._units:
            optimizer: dict[Tier, int] = {}
            if self._optimizer is not None:
                optimizer = self._optimizer.state_bytes({one.key for one in unit.segments})
            out[unit.name] = _resting([unit], optimizer)
        return out

    def optimizer(self) -> OptimizerReport:
        """Return how the optimizer steps what each rank owns. Raises StateError without one."""
        if self._optimizer is None:
            raise StateError("engine.explain_optimizer(): zs.shard() was given no optimizer")
        self._optimizer.join()  # a step in a thread changes states
        sharded, found = self._optimizer, list[SteppedGroup]()
        for one in each_of(sharded.optimizer):
            for group in range(len(one.param_groups)):
                found.append(self._stepped_group(sharded, one, group, len(found)))
        return OptimizerReport(self._context.transport.rank, tuple(found))

    def _stepped_group(
        self, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer, group: int, index: int
    ) -> SteppedGroup:
        """Describe param group `group` of `optimizer`, which is number `index` of all groups."""
        rule = known = known_rule(optimizer)
        if rule is None:  # zs.shard() has found it elementwise, or good for whole parameters
            rule = (
                tried_rule(optimizer, group)
                if sharded.states.by_shape[index]
                else elementwise_rule(optimizer)
            )
        members = {id(parameter) for parameter in sharded.parameters[index]}
        owned: list[list[tuple[int, int]]]  # by rank: elements and cost of each parameter
        owned = [[] for _ in range(self._context.mesh.size)]
        pairs = ((unit.cells.optim, one) for unit in self._units for one in unit.trainable)
        shares = self._context.options.shares
        for cell, segment in pairs:
            layout = segment.flat.layout
            for rank, place in enumerate(segment.flat.context.holders.places):
                for piece in layout.pieces_in(layout.span(place, layout.scope(cell))):
                    if id(segment.parameters[piece.index]) not in members:
                        continue
                    slot = layout.slots[piece.index]
                    stepped = [(piece, slot.shape)]
                    if isinstance(shares, WholeParameters):
                        stepped = shares.stepped(piece, slot)
                    for part, shape in stepped:
                        cost = newton_schulz(shape) if len(shape) == 2 else 0
                        owned[rank].append((part.numel, cost))
        elements = tuple(sum(numel for numel, _ in mine) for mine in owned)
        costs = [sum(cost for _, cost in mine) for mine in owned]
        cls = type(optimizer)
        return SteppedGroup(
            optimizer=f"{cls.__module__}.{cls.__qualname__}",
            group=group,
            kind=rule.kind.name,
            known_by="probe" if known is None else "table",
            why=rule.why,
            needs=rule.kind.needs,
            parameters=tuple(map(len, owned)),
            elements=elements,
            largest=tuple(max((numel for numel, _ in mine), default=0) for mine in owned),
            state_bytes=self._state_bytes(sharded, optimizer, group, index),
            step_bytes=0,  # every rank has what it steps: pieces, or whole parameters
            imbalance=_imbalance(elements),
            cost_imbalance=_imbalance(costs) if rule.kind is MATRIX else None,
        )

    def _state_bytes(
        self, sharded: ShardedOptimizer, optimizer: torch.optim.Optimizer, group: int, index: int
    ) -> float | None:
        """Return the bytes of state for each element of a param group."""
        shards = [one for one in sharded.pieces() if one.group == index]
        states = [sharded.states.of(shard) for shard in shards]
        numel = sum(shard.piece.numel for shard, state in zip(shards, states, strict=True) if state)
        if not numel:
            options, device = optimizer.param_groups[group], self._context.device
            dtype, shape = shards[0].tensor.dtype if shards else torch.float32, (256, 256)
            try:
                trial = state_after_trial(optimizer, options, dtype, device, device, shape)
            except Exception:  # a rule for parameters of other shapes
                return None
            states, numel = [trial], math.prod(shape)
        values = [value for state in states for value in state.values()]
        return sum(map(_stored_bytes, values)) / numel

    def unreleased(self) -> dict[str, int]:
        """Return what is in use beyond what rests ("temporary"), and what is in stores, by tier:
        empty after ``close()`` where everything was given back.
        """
        counted = {"temporary": self._meter.live}
        counted |= {tier.value: store.account.live for tier, store in self._stores.items()}
        return {name: num_bytes for name, num_bytes in counted.items() if num_bytes}


def _imbalance(counts: Sequence[float]) -> float:
    """Return the largest of `counts` by their mean."""
    return max(counts) * len(counts) / sum(counts) if any(counts) else 1.0


def _stored_bytes(value: Any) -> int:
    """Return the bytes of a state with more than one number, of the tensors inside it (torchao)."""
    if not isinstance(value, torch.Tensor) or value.numel() <= 1:
        return 0
    if not hasattr(value, "__tensor_flatten__"):
        return value.numel() * value.element_size()
    return sum(_stored_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])


def _size(num_bytes: int) -> str:
    """Return bytes as `zs.memory_table` prints them: "66.6 kB"."""
    from rich.filesize import decimal

    return decimal(num_bytes)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows of text as lines: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]


def describe_bytes(by_name: Mapping[str, int]) -> str:
    """Return what `Accounts.unreleased` counts in words: "4,096 bytes of temporary"."""
    return ", ".join(f"{num_bytes:,} bytes of {name}" for name, num_bytes in by_name.items())


def _resting(units: Sequence[Unit], optimizer: dict[Tier, int]) -> dict[str, dict[str, int]]:
    """Return the bytes at rest of `units`, and of the `optimizer`, by state and tier."""
    tiers: dict[str, dict[str, int]] = {
        state: {} for state in ("weight", "master", "grad", "residual", "optimizer")
    }

    def add(state: str, by_tier: dict[Tier, int]) -> None:
        for tier, num_bytes in by_tier.items():
            tiers[state][tier.value] = tiers[state].get(tier.value, 0) + num_bytes

    for unit in units:
        for segment in unit.segments:
            flat, master = segment.flat, segment.master
            add("weight", flat.rest.bytes_by_tier())
            add("weight", {Tier.DEVICE: flat.column_bytes})
            if master is not None and not segment.master_is_weight:
                add("master", master.bytes_by_tier())
                add("master", {Tier.DEVICE: -segment.aliased * master.dtype.itemsize})
            if segment.bucket is not None:
                add("grad", segment.bucket.bytes_by_tier())
                add("residual", {Tier.DEVICE: segment.bucket.residual_bytes})
    add("optimizer", optimizer)
    return {
        state: {tier: num_bytes for tier, num_bytes in by_tier.items() if num_bytes}
        for state, by_tier in tiers.items()
    }
