"""What ``Engine.memory()`` and ``Engine.traffic()`` return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroshard.core.placement import Tier
from zeroshard.memory import MemoryCounter
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.tiering import Tiering
from zeroshard.runtime.unit import Unit

__all__ = ["MemoryReport", "TrafficReport", "memory_report"]


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


@dataclass(frozen=True)
class TrafficReport:
    """Payload bytes that this rank received (and sent) since ``reset_traffic()``."""

    bytes: dict[str, int]  # per collective
    calls: dict[str, int]  # per collective
    links: dict[str, int]  # bytes per link class
    # per collective: of these bytes, those that came from other nodes (`comm.node_size`)
    between_nodes: dict[str, int]

    @property
    def total(self) -> int:
        """All payload bytes together."""
        return sum(self.bytes.values())


def memory_report(
    units: Sequence[Unit],
    optimizer: ShardedOptimizer | None,
    meter: MemoryCounter,
    tiering: Tiering,
) -> MemoryReport:
    """Count what rests on this rank."""
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
            add("weight", {Tier.DEVICE: flat.column.num_bytes})
            if master is not None and not segment.master_is_weight:
                add("master", master.bytes_by_tier())
                add("master", {Tier.DEVICE: -segment.aliased * master.dtype.itemsize})
            if segment.grad is not None:
                add("grad", segment.grad.bytes_by_tier())
                add("residual", {Tier.DEVICE: segment.grad.bucket.residual_bytes})
    if optimizer is not None:
        add("optimizer", optimizer.state_bytes())
    tiers = {
        state: {tier: num_bytes for tier, num_bytes in by_tier.items() if num_bytes}
        for state, by_tier in tiers.items()
    }
    peaks = {tier.value: store.account.peak for tier, store in tiering.stores.items()}
    at_rest = {state: sum(by_tier.values()) for state, by_tier in tiers.items()}
    return MemoryReport(at_rest, meter.live, meter.peak, tiers, peaks)
