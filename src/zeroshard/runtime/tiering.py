"""The stores of one engine, and what share of each state rests there.

ZeRO-Offload (section 4), ZeRO-Infinity (section 5) and Offload++ are rows of the policy table whose
cells carry another tier than DEVICE; this is the memory behind those cells. A fraction below 1
leaves the first elements of a state on the device (core/resting.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zeroshard.core.layout import ALIGN
from zeroshard.core.placement import Tier
from zeroshard.core.resting import splits
from zeroshard.core.schedule import STAGING_BYTES
from zeroshard.memory.heap import Trimmer
from zeroshard.tier.store import Direct, Link, Store

STATES = ("weight", "grad", "optimizer")


@dataclass(frozen=True)
class Tiering:
    """Where states rest beyond the device: nowhere, by default."""

    stores: Mapping[Tier, Store] = field(default_factory=dict)  # of this rank
    # the states that leave the device on any rank: their tier, or one per rank where ranks differ
    away: Mapping[str, tuple[Tier, ...]] = field(default_factory=dict)
    # of "weight", "grad", "optimizer"; 1.0 where nothing is said
    fractions: Mapping[str, float] = field(default_factory=dict)
    link: Link = field(default_factory=Direct)
    staging_bytes: int = STAGING_BYTES
    automatic: bool = False  # the optimizer's fraction follows what is measured
    least: float = 0.0  # of that fraction: what the device has no room for
    delayed_update: int | None = None  # steps before updates are applied one step late; None: never

    @cached_property
    def trimmer(self) -> Trimmer:
        """What keeps the allocator from holding on to temporaries: where state rests on disk,
        memory is what is short.
        """
        return Trimmer(self.staging_bytes if Tier.DISK in self.stores else None)

    def store(self, tier: Tier) -> Store | None:
        """Return the store of `tier`, None for the device."""
        return None if tier is Tier.DEVICE else self.stores[tier]

    def differs(self, state: str) -> bool:
        """Whether ranks rest `state` on different tiers."""
        return len(self.away.get(state, ())) > 1

    def splits(
        self, state: str, tiers: Sequence[Tier], numels: Sequence[int], *, align: int = ALIGN
    ) -> list[int]:
        """Return, per segment of `numels` elements on this rank, how many of `state` rest on the
        device, given the tiers of their cells; cuts fall on multiples of `align`.
        """
        away = [index for index, tier in enumerate(tiers) if tier is not Tier.DEVICE]
        out, held = list(numels), [numels[index] for index in away]
        cuts = splits(held, self.fractions.get(state, 1.0), align)
        for index, split in zip(away, cuts, strict=True):
            out[index] = split
        return out

    def close(self) -> None:
        """Give every store back."""
        for store in self.stores.values():
            store.close()
        self.link.close()
