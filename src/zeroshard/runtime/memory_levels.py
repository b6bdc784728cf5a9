"""The bytes of one rank by state over time, while a trace is on.

What rests is counted anew where a forward begins, a backward is over and a step is taken; in
between, each gradient that begins to rest adds its own bytes, and what is gathered or in buffers is
asked of its counter. States on another tier than the device are named so: "optimizer (host)".

Cost: a level per change; the counts walk over all segments, three times a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zeroshard.core.placement import Tier
from zeroshard.core.recording import Stamp
from zeroshard.core.timeline import Level
from zeroshard.memory import MemoryCounter
from zeroshard.runtime.reports import Accounts
from zeroshard.runtime.unit import Unit

# after the name of a state
_PLACES = {tier: f" ({tier.value})" for tier in Tier} | {Tier.DEVICE: ""}


class MemoryLevels:
    """The bytes of each state over time."""

    def __init__(
        self,
        units: Sequence[Unit],
        accounts: Accounts,
        meter: MemoryCounter,
        now: Callable[[], Stamp],
    ) -> None:
        """`meter` counts the bytes that are gathered or in buffers, `now` is the clock."""
        self._now = now
        self._accounts = accounts
        self._meter = meter
        self._buckets = {one.key: one for unit in units for one in unit.buckets}
        self._noted: list[tuple[Stamp, dict[str, float]]] = []
        self._resting: dict[str, float] = {}
        self._grads: dict[str, Mapping[Tier, int]] = {}  # at rest, by key
        self._used = -1  # in the last level
        self.count()

    def count(self) -> None:
        """Count anew what rests."""
        self._resting = {
            f"{state}{_PLACES[Tier(tier)]}": float(num_bytes)
            for state, by_tier in self._accounts.report().tiers.items()
            for tier, num_bytes in by_tier.items()
        }
        self._grads = {key: bucket.bytes_by_tier() for key, bucket in self._buckets.items()}
        self._note()

    def reduced(self, key: str) -> None:
        """A reduce of the gradient of `key` has been started: note the bytes that rest since."""
        before, by_tier = self._grads[key], self._buckets[key].bytes_by_tier()
        if by_tier == before:
            return
        self._grads[key] = by_tier
        for tier in {*before, *by_tier}:
            state = f"grad{_PLACES[tier]}"
            more = by_tier.get(tier, 0) - before.get(tier, 0)
            self._resting[state] = self._resting.get(state, 0.0) + more
        self._note()

    def look(self) -> None:
        """Note what is gathered and in buffers, where that has changed."""
        if self._meter.used != self._used:
            self._note()

    def _note(self) -> None:
        self._used = self._meter.used
        self._noted.append((self._now(), {**self._resting, "gathered": float(self._used)}))

    def read(self) -> list[tuple[Stamp, Level]]:
        """Return every level with its stamp, at second 0, each with all the states there are."""
        states = sorted({state for _, level in self._noted for state in level})
        return [
            (stamp, Level(0.0, {state: level.get(state, 0.0) for state in states}))
            for stamp, level in self._noted
        ]
