"""The conditions of a schedule's decisions beside the order of events: rules, room, constants."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from zeroshard.core.residency import UnitTraits

STAGING_BYTES = 64 << 20  # of the streamed step of states off the device: Offload.staging_bytes
MAX_FLUSHING = 2  # sums bound for another tier that are under way; the oldest is waited for beyond
TILES_AHEAD = 2  # tiles of an optimizer step on disk that are read ahead
TILE_BUFFERS = TILES_AHEAD + 2  # sets of buffers for them: one is stepped, one written


class Meter(Protocol):
    """Counts the bytes of gathered weights and of buckets; the executor of commands moves it."""

    live: int


@dataclass(frozen=True)
class Rules:
    """The decisions that an engine's row, model and transport make for every step."""

    budget_bytes: int  # that gathered weights and buckets share
    prefetch_bytes: int
    ordered: bool = True  # gathers need every rank: all gather the same units in the same order
    waits_for_room: bool = True  # a gather or a bucket waits for reduces where the budget is full
    around: bool = False  # see `of`
    alone: bool = False  # one rank

    @classmethod
    def of(
        cls,
        units: Iterable[UnitTraits],
        *,
        ordered: bool,
        keyed: bool,
        enqueues: bool = False,
        around: bool = False,
        alone: bool = False,
        prefetch_bytes: int | None = None,
    ) -> Rules:
        """Return the rules for `units`.

        The budget is 2 x the largest unit + prefetch_bytes (default: the largest unit once more):
        the unit in use, the next one, and either what is gathered ahead or a bucket. Where the
        host runs ahead of the device (`enqueues`) it is the largest unit once more, so that two
        reduces are under way: with one, the backward of every unit would wait for the reduce of
        the one before.

        `keyed`: ranks may run their units in different order; the transport then bounds buckets by
        its own pool, since to wait for a sum could be to wait for ever, each rank with the part
        that the other lacks still to come.

        `around`: weights are read *around* the end of a forward without gradients (ZeRO-Inference):
        nothing rewrites them before the next one, which runs the same units. Two units are then
        gathered ahead: the second keeps a disk's queue filled while the first one arrives.
        """
        traits = list(units)
        largest = max((one.nominal_bytes for one in traits), default=0)
        prefetch = (1 + around) * largest if prefetch_bytes is None else prefetch_bytes
        return cls(
            budget_bytes=(2 + enqueues) * largest + prefetch,
            prefetch_bytes=prefetch,
            ordered=ordered,
            waits_for_room=ordered and (any(one.is_sharded for one in traits) or not keyed),
            around=around,
            alone=alone,
        )


class Allowance:
    """The bytes that gathered weights and buckets share.

    What a row keeps from the forward to the backward (``zero3-keep``), and what a pipeline's stages
    hold, comes on top: were it part of the budget, nothing would be gathered ahead once it is full,
    and every reduce would be waited for.
    """

    def __init__(self, rules: Rules, meter: Meter) -> None:
        self.budget_bytes = rules.budget_bytes
        self._meter = meter
        self._beside: dict[int, int] = {}  # bytes of units that come on top
        self._beside_bytes = 0

    @property
    def left(self) -> int:
        """The bytes that are not in use; below zero where one event needs more by itself."""
        return self.budget_bytes + self._beside_bytes - self._meter.live

    def set_beside(self, unit: int, num_bytes: int) -> None:
        """Count so many bytes of a gathered unit on top of the budget."""
        self._beside_bytes += num_bytes - self._beside.pop(unit, 0)
        if num_bytes:
            self._beside[unit] = num_bytes

    def reset(self) -> None:
        """Nothing is gathered."""
        self._beside.clear()
        self._beside_bytes = 0


def is_ordered(*, one_sided: bool, leave: bool, coded: bool) -> bool:
    """Whether gathers need every rank, so that all gather the same units in the same order: unless
    the memory of peers is mapped (`one_sided`) and holds the weights, and none of these `leave` the
    device, on any rank, or are `coded`.
    """
    return not one_sided or leave or coded


def grad_pool_bytes(largest_numel: int, bytes_per_element: int) -> int:
    """Return the bytes of a transport's gradient buffers: two of the largest unit."""
    return 2 * largest_numel * bytes_per_element
