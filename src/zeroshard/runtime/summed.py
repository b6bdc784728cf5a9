"""The gradient of one segment at rest: the sum that its reduces add to, and the average that a step
reads.

    reduce --(+=)--> sum over ranks and micro-batches     [own)  of what this rank steps
           average   / ranks / loss scale                 [own)
           gather_averages                                all of it, where every rank steps it all
           divide    / weights, where backwards had any   all of it
           scale     x clip                               all of it

It is a *sum* until ``average`` divides it, once, and one again where a reduce follows without
``zero_grad()``. Where it rests, and what is done there: state/gradient.py.

Invariant: a resting gradient is held here from the reduce that makes it until ``release``; after
that its sealed gradients hold it, and it ends with the last of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence
from functools import partial

import torch

from zeroshard.comm.levels import Step
from zeroshard.core.layout import Range
from zeroshard.core.recording import Operation
from zeroshard.core.route import Hop, Kind
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.state.allocator import GradientAllocator
from zeroshard.state.gradient import RestingGradient
from zeroshard.state.reduction import Asked

__all__ = ["SummedGradient"]


class SummedGradient:
    """The resting gradient of one trainable segment, and this rank's slice of it."""

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        context: Context,
        place: GradientAllocator,
        *,
        leaves: bool,
    ) -> None:
        """`place` makes the resting gradients. `leaves`: on some rank they may rest, in part, on
        another tier.
        """
        self.leaves = leaves
        rank, layout = context.transport.rank, flat.layout
        self.key = flat.key  # the segment's key in collectives
        (low, high), (first, _) = flat.own_span, flat.stepped
        # where this rank's slice lies in what rests here
        self.own = (low - first, high - first)
        # ranks whose sums come here
        self.members = layout.members(rank, layout.scope(plan.cells.optim))
        self._flat = flat
        self._place = place
        self.rank = rank  # among the ranks that have these parameters
        self._streams = context.streams
        self._memory = context.memory
        self._held: RestingGradient | None = None
        self._alive: weakref.ref[RestingGradient] | None = None

    # ------------------------------------------------------------------ where it rests

    def resting(self) -> RestingGradient | None:
        """Return the resting gradient, if one is alive."""
        if self._held is not None:
            return self._held
        return None if self._alive is None else self._alive()

    def open(self) -> tuple[RestingGradient, bool]:
        """Return the sum to which more is added, and whether it was made just now."""
        resting = self.resting()
        fresh = resting is None
        if resting is None:
            resting = self._place.open()
            self._alive = weakref.ref(resting)
        elif resting.is_average:  # no zero_grad() since the last step
            resting.reopen(self.own)
        self._held = resting
        return resting, fresh

    def open_empty(self) -> bool:
        """Let zeros rest here where nothing does; return whether that was so."""
        if self.resting() is not None:
            return False
        resting, _ = self.open()
        resting.zero(0, resting.state.numel)
        return True

    def release(self) -> None:
        """Stop holding the resting gradient: its sealed gradients do."""
        self._held = None

    def reset(self) -> None:
        """Forget it: there is no gradient."""
        self._held, self._alive = None, None

    @property
    def tiered(self) -> bool:
        """Whether it rests, in part or as a whole, on another tier."""
        return self._place.tiered

    def move(self, split: int) -> None:
        """Let the gradients to come rest on the device up to element `split`."""
        self._place.move(split)

    def release_idle(self) -> None:
        """Close memory on other tiers that is kept for the next gradient."""
        self._place.release_idle()

    # ------------------------------------------------------------------ on its way to another tier

    def room(self) -> torch.Tensor:
        """Return memory on the device for our slice of a sum, which `take` takes over."""
        return self._memory.empty(self.own[1] - self.own[0])

    def take(self, total: torch.Tensor, fresh: bool) -> None:
        """Hand our slice of a finished sum over to the tier where the gradient rests."""
        resting = self.resting()
        if resting is not None:
            resting.take(self.own, total, fresh=fresh)

    @property
    def is_flushing(self) -> bool:
        """Whether a sum is on its way to another tier, and so held on the device, too."""
        resting = self.resting()
        return resting is not None and resting.is_flushing

    def flush(self) -> None:
        """Return when it is there."""
        resting = self.resting()
        recording = self._flat.recording
        since = None if recording is None else recording.now()
        if resting is not None:
            resting.flush()
        if recording is not None:
            recording.waited("tier write", self.key, since)

    # ------------------------------------------------------------------ from sum to average

    def average(self, divisor: float) -> bool:
        """Divide our slice of the sum by `divisor`; return whether all of it is finite, as far as
        the host knows.
        """
        resting = self.resting()
        if resting is None:
            return True
        return resting.average(self.own, divisor)

    def divide(self, weight: float) -> None:
        """Divide all that rests here by the sum of weights, after `gather_averages`."""
        resting = self.resting()
        if resting is not None:
            resting.divide(weight)

    @property
    def gathers_averages(self) -> bool:
        """Whether the other ranks' averages have to come here."""
        return len(self.members) > 1 and self.resting() is not None

    def gather_averages(self) -> Sequence[Step]:
        """Return what brings the other ranks' averaged slices here, where `gathers_averages`, step
        by step; no reduce is under way.
        """
        resting = self.resting()
        assert resting is not None, self.key
        if not resting.on_device:  # through the device, a segment at a time
            return (Step(self._exchange_averages, "here"),)
        return self._meeting(resting.fetch(*self.own), resting.state.whole)

    def _exchange_averages(self) -> None:
        """Bring the other ranks' averaged slices to where the gradient rests, off the device."""
        resting = self.resting()
        assert resting is not None, self.key
        start, stop = self._flat.stepped  # a lost gradient has fewer elements
        whole = self._memory.empty(stop - start, resting.state.dtype)

        def meet(mine: torch.Tensor) -> None:
            levels = self._flat.context.levels
            flight = Flight([self._meeting(mine, whole)], self._streams, None, levels)
            flight.go()
            flight.wait()

        resting.exchange(self.own, whole, meet)

    def _meeting(self, mine: torch.Tensor, whole: torch.Tensor) -> Sequence[Step]:
        """Return what brings together what every rank that steps the same has averaged."""
        flat = self._flat
        hops = [hop for hop in flat.routes.average if hop.axis is not None]
        axes = [hop.axis for hop in hops if hop.axis is not None]
        starts = flat.context.levels.gathers(axes, self.key, mine, flat.layout.ranges, whole)
        return [
            Step(start, told=partial(self._gathering, hop))
            for hop, start in zip(hops, starts, strict=True)
        ]

    def _gathering(self, hop: Hop) -> Operation:
        received = hop.link_bytes(self._flat.portion).total
        return Operation("reduce", Kind.ALL_GATHER.value, self.key, received)

    # ------------------------------------------------------------------ what is asked and done then

    def asked(self) -> list[Asked]:
        """Return what the host has yet to read of an accelerator to know `squares`, and whether
        the averages are finite.
        """
        resting = self.resting()
        if resting is None:
            return []
        return resting.asked(span for rank in self.members for _, span in self._spans(rank))

    def squares(self, used: Sequence[bool]) -> dict[int, float]:
        """Return, for every rank whose averages are here, the sum of squares of its own in fp64;
        not of parameters that are not `used`: their gradients were cleared elsewhere.
        """
        resting, out = self.resting(), {}
        for rank in self.members:
            total = 0.0
            for index, span in self._spans(rank):
                if resting is not None and used[index]:
                    total += resting.squares(*span)
            out[rank] = total
        return out

    def _spans(self, rank: int) -> Iterator[tuple[int, Range]]:
        """Yield the parameters of which `rank` averages a part, and where that rests here."""
        base = self._flat.layout.ranges[rank][0] - self._flat.stepped[0]
        for piece in self._flat.layout.pieces(rank):
            yield piece.index, (base + piece.shard_start, base + piece.shard_stop)

    def first_bad(self) -> str | None:
        """Return the name of the first parameter here whose averaged gradient is not finite."""
        resting = self.resting()
        if resting is None:
            return None
        for piece in self._flat.layout.pieces_in(self._flat.stepped):
            if not resting.is_finite(piece.shard_start, piece.shard_stop):
                return piece.name
        return None

    def scale(self, factor: float) -> None:
        """Multiply the averaged gradient by `factor`."""
        resting = self.resting()
        if resting is not None:
            resting.scale(factor)

    def store(self, index: int, average: torch.Tensor) -> None:
        """Let `average` [numel, as the buffer holds it] be that of parameter `index`."""
        resting = self.resting()
        assert resting is not None, self.key
        for piece in self._flat.layout.pieces_in(self._flat.stepped):
            if piece.index == index:
                numbers = average[piece.start : piece.stop]
                resting.store(piece.shard_start, piece.shard_stop, numbers)

    def zero(self, indices: Container[int]) -> None:
        """Set the gradients of parameters `indices` to zero."""
        resting = self.resting()
        if resting is not None:
            for piece in self._flat.layout.pieces_in(self._flat.stepped):
                if piece.index in indices:
                    resting.zero(piece.shard_start, piece.shard_stop)
