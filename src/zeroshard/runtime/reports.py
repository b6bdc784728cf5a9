"""What ``Engine.memory()`` and ``Engine.traffic()`` return."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MemoryReport", "TrafficReport"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank, by state and tier, at rest now; what is gathered or in buffers now; and the peak of the latter."""

    at_rest: dict[str, int]  # "weight", "master", "grad", "optimizer"
    temporary: int  # gathered weights and gradient buffers in use now
    peak: int  # the most that `temporary` ever was
    tiers: dict[str, str] = field(default_factory=dict)  # state -> tier

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

    @property
    def total(self) -> int:
        """All payload bytes together."""
        return sum(self.bytes.values())
