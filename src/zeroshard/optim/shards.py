"""The parts of parameters that this rank steps: shards, in tiles.

    share of this rank   |  shard a  |  shard b  |  shard c ..|..... shard c ....|  shard d  |
    tiles                |<------------ BY_USER ------------->|<--- ON_HOST ---->|<- ON_HOST ->

A *tile* is a range of what this rank steps of one segment, a *shard* the part of one parameter that
lies in one tile. Each tile is stepped in one way (``StepMethod``), settled when it is cut
(runtime/step_tiles.py); nothing else asks where states rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from zeroshard.core.layout import Piece
from zeroshard.core.work import Work
from zeroshard.memory import placeholder
from zeroshard.optim.sealed import SealedGrad
from zeroshard.state.gradient import Gradient
from zeroshard.state.state import State
from zeroshard.tier.store import Storage, Store


class StepMethod(Enum):
    """The way in which a tile is stepped, and the place of its numbers meanwhile."""

    BY_USER = "by the user's own step(), on the device"
    DECODED = "before it, on the device: master or moments rest in fewer bits"
    ON_DEVICE = "beside it, on the device: its gradient rests on another tier"
    ON_HOST = "on the host, where it rests"
    THROUGH_RING = "on the host, from disk and back through a ring of buffers"

    @property
    def off_device(self) -> bool:
        """Whether masters and moments rest on another tier."""
        return self in (StepMethod.ON_HOST, StepMethod.THROUGH_RING)


class RestingSums(Protocol):
    """The holder of a segment's gradient."""

    resting: Callable[[], Gradient | None]  # returns the one that rests there now

    def release(self) -> None:
        """Stop holding it: the user has dropped it."""


@dataclass(eq=False)
class SteppedSegment:
    """One segment in a step. Ranges count the elements that this rank steps of it."""

    key: str
    split: int  # the first elements; their optimizer state rests on the device
    master: State
    store: Store | None  # where the state of the others rests; None: there are no others
    sums: RestingSums
    used: Callable[[int], bool]  # whether any rank has a gradient of this parameter
    # start casting stepped masters into the weights; do they stay meanwhile?
    bring: Callable[[int, int, torch.Tensor, bool, object], list[Work]]
    can_bring_from_rest: Callable[[int, int], bool]  # whether that needs no cast
    bring_from_rest: Callable[[int, int], list[Work]]  # the same from where the master rests
    stepped: threading.Event  # set while no step of it is under way
    # the optimizer's state of elements [split, numel), by key
    moments: dict[str, Storage] = field(default_factory=dict)

    def resting(self) -> Gradient:
        """Return its gradient, which some rank has."""
        resting = self.sums.resting()
        assert resting is not None, f"{self.key} is used and has no gradient"
        return resting

    def moment(self, key: str, dtype: torch.dtype) -> Storage:
        """Return where state `key` rests, allocated when it is asked for first."""
        if key not in self.moments:
            assert self.store is not None, self.key
            numel = self.master.numel - self.split
            self.moments[key] = self.store.allocate(f"{self.key} {key}", numel, dtype)
        return self.moments[key]


@dataclass(eq=False)
class Tile:
    """Elements [start, stop) of what this rank steps of one segment."""

    segment: SteppedSegment
    start: int
    stop: int
    method: StepMethod
    shards: list[ParamShard] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def moments_range(self) -> tuple[int, int]:
        """The range of the tile in the moments of its segment."""
        return self.start - self.segment.split, self.stop - self.segment.split

    def gradients(self) -> list[torch.Tensor | None]:
        """Return each shard's slice of the averaged gradient, in the dtype of the master; None
        where no rank used the parameter.
        """
        used = [self.segment.used(shard.piece.index) for shard in self.shards]
        if True not in used:
            return [None] * len(used)
        resting = self.segment.sums.resting()
        assert resting is not None, f"{self.segment.key} is used and has no gradient"
        grad, dtype = resting.fetch(self.start, self.stop), self.segment.master.dtype
        grad = grad if grad.dtype is dtype else grad.to(dtype)
        pairs = zip(self.shards, used, strict=True)
        return [grad[shard.span] if is_used else None for shard, is_used in pairs]


@dataclass(eq=False)
class ParamShard:
    """The part of one parameter that lies in one tile, as the optimizer sees it."""

    name: str  # of the parameter
    parameter: nn.Parameter
    piece: Piece  # of the parameter
    stride: tuple[int, ...]  # of the parameter in the flat buffer
    shape: tuple[int, ...]  # in which a rule steps it that does not go element by element
    shape_stride: tuple[int, ...]  # of its flat numbers in that shape
    # [piece.numel]: a view of the master, or of one NaN while it rests on another tier
    tensor: nn.Parameter
    segment: SteppedSegment  # not the tile: a cycle would keep masters alive
    method: StepMethod
    low: int  # where it begins in its tile
    start: int  # where it lies in what this rank steps of the segment
    stop: int
    group: int = 0  # the optimizer's param group
    sealed: SealedGrad | None = None  # its ``.grad`` between steps

    @cached_property
    def span(self) -> slice:
        """Its range in its tile."""
        return slice(self.low, self.low + self.stop - self.start)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the `flat` numbers of it in its shape."""
        return flat.as_strided(self.shape, self.shape_stride, flat.storage_offset())

    def is_used(self) -> bool:
        """Whether any rank used the parameter since the gradients were cleared."""
        return self.segment.used(self.piece.index)

    def grad(self) -> torch.Tensor | None:
        """Return its slice of the averaged gradient, or None where no rank used the parameter."""
        return self.segment.resting().fetch(self.start, self.stop) if self.is_used() else None

    def set_grad(self, numbers: torch.Tensor) -> None:
        """Set its slice of the averaged gradient, which some rank used, to `numbers`."""
        self.segment.resting().store_range(self.start, self.stop, numbers)

    def leave_memory(self) -> None:
        """Let go of its master on the device: its memory is about to be released."""
        tensor = self.tensor
        if not self.method.off_device:
            tensor.data = placeholder(tensor.shape, tensor.dtype, tensor.device)

    def repoint(self) -> None:
        """Point it at its master on the device: its memory has come back."""
        master = self.segment.master.tensor
        if master is not None and not self.method.off_device:
            self.tensor.data = master[self.start : self.stop]
