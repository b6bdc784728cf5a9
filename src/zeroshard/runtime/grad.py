"""The gradient of one segment at rest: the sum that its reduces add to, and the average that a step
reads.

    reduce --(+=)--> sum over ranks and micro-batches     [own)  of what this rank steps
           average   / ranks / loss scale                 [own)
           gather_averages                                all of it, where every rank steps it all
           divide    / weights, where backwards had any   all of it
           scale     x clip                               all of it

It is a *sum* until ``average`` divides it, once, and one again where a reduce follows without
``zero_grad()``. Where it rests, and what is done there: state/gradient.py.

One that could not be read or written is *lost*: it says so once (runtime/faults.py), reads as NaN
from then on, and takes what comes without a word.

Invariants: the numbers are held here from the reduce that makes them until ``release``, then by
their sealed gradients and by a step that reads them; they end with the last of these, and do not
change before that step has read them. Cost: memory of another tier stays for the next gradient.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from zeroshard.comm.levels import Step
from zeroshard.core.layout import Range
from zeroshard.core.recording import Operation
from zeroshard.core.route import Hop, Kind
from zeroshard.errors import StorageError
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.state.gradient import GradientState
from zeroshard.state.reduction import SquaresRequest
from zeroshard.state.state import DeviceStorage
from zeroshard.tier.store import Storage, Store

__all__ = ["Gradient"]


class Gradient:
    """The gradient of one trainable segment at rest, and this rank's slice of it. Ranges count the
    elements that rest here: this rank's share, or the whole where every rank steps everything.

    The accumulator is one running sum: `open` says to which numbers the next reduce adds, `take`
    adds a sum that arrives elsewhere, `average` closes it. A binary counter of partial sums would
    be chosen there, and nowhere else: `open` would return the partial sum of the leaf's level, and
    `average` would add the levels up first.
    """

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        context: Context,
        *,
        store: Store | None,
        split: int,
        leaves: bool,
    ) -> None:
        """It rests on the device up to element `split`, and then in `store`. `leaves`: on some rank
        it may rest, in part, on another tier.
        """
        self.leaves = leaves
        rank, layout = context.transport.rank, flat.layout
        self.key = flat.key  # the segment's key in collectives
        (low, high), (first, _) = flat.own_span, flat.stepped
        # where this rank's slice lies in what rests here
        self.own = (low - first, high - first)
        # ranks whose sums come here
        self.members = layout.members(rank, layout.scope(plan.cells.optim))
        self.rank = rank  # among the ranks that have these parameters
        self._flat = flat
        self._streams = context.streams
        self._memory, self._note = context.memory, context.faults.note
        self._numel, self._split, self._store = plan.num_stepped, split, store
        self._dtype = plan.precision(context).accumulate
        self._idle: list[Storage] = []  # memory of the other tier, kept for the next gradient
        self.reset()

    # ------------------------------------------------------------------ where it rests

    def reset(self) -> None:
        """Forget it: there is no gradient."""
        self._held: GradientState | None = None
        self._alive: weakref.ref[GradientState] | None = None
        self._divided_by = 0.0  # the ranks and the loss scale, once averaged; 0 while it is a sum
        self._weight = 0.0  # part of that: the sum of weights, once divided by it
        # of slices on an accelerator: sums of squares that the host has read
        self._squares: dict[Range, float] = {}

    def resting(self) -> GradientState | None:
        """Return the numbers at rest, if there is a gradient."""
        if self._held is not None:
            return self._held
        return None if self._alive is None else self._alive()

    def open(self) -> tuple[GradientState, bool]:
        """Return the sum to which more is added, and whether it was made just now."""
        resting = self.resting()
        fresh = resting is None
        if resting is None:
            self.reset()
            resting = self._allocate()
            self._alive = weakref.ref(resting)
        elif self._divided_by:  # no zero_grad() since the last step
            self._reopen()
        self._held = resting
        return resting, fresh

    def open_empty(self) -> bool:
        """Let zeros rest here where nothing does; return whether that was so."""
        if self.resting() is not None:
            return False
        resting, _ = self.open()
        self.zero_range(0, resting.numel)
        return True

    def release(self) -> None:
        """Stop holding the numbers: the sealed gradients do."""
        self._held = None

    @property
    def tiered(self) -> bool:
        """Whether it rests, in part or as a whole, on another tier."""
        return self._split < self._numel

    def move(self, split: int) -> None:
        """Let the gradients to come rest on the device up to element `split`."""
        self._split = split
        self.release_idle()

    def release_idle(self) -> None:
        """Close memory on other tiers that is kept for the next gradient."""
        while self._idle:
            self._idle.pop().close()

    def _allocate(self) -> GradientState:
        """Return memory for a gradient, its contents undefined."""
        parts, lost = [], None
        try:
            parts = self._away()
        except StorageError as error:
            lost = error
            self._note(error)
        if self._split or not parts:
            near = self._memory.empty(self._split, self._dtype)
            parts = [DeviceStorage(near, self._memory.link), *parts]
        return GradientState(*parts, own=self.own, memory=self._memory, idle=self._idle, lost=lost)

    def _away(self) -> list[Storage]:
        """Return memory of the other tier, if any rests there: kept, or new."""
        numel = self._numel - self._split
        while self._idle:
            storage = self._idle.pop()
            if storage.numel == numel:
                return [storage]
            storage.close()  # it came back after a move
        if not numel:
            return []
        assert self._store is not None, self.key
        return [self._store.allocate(f"{self.key} gradient", numel, self._dtype)]

    @contextmanager
    def _losing(self, resting: GradientState) -> Iterator[None]:
        """Lose the numbers where the body raises StorageError."""
        try:
            yield
        except StorageError as error:
            self._lose(resting, error)

    def _lose(self, resting: GradientState, error: StorageError) -> None:
        resting.lose(error)
        self._note(error)

    def _changing(self) -> GradientState | None:
        """Return the numbers, if there are any, to change them: a step under way has read them."""
        resting = self.resting()
        if resting is not None:
            resting.wait_for_reader()
            self._squares.clear()
        return resting

    # ------------------------------------------------------------------ what arrives

    def room(self) -> torch.Tensor:
        """Return memory on the device for our slice of a sum, which `take` takes over."""
        return self._memory.empty(self.own[1] - self.own[0])

    def take(self, total: torch.Tensor, fresh: bool) -> None:
        """Hand our slice of a finished sum over to the tier where the gradient rests; `fresh`: it
        is the first. Not of one on the device, where a reduce adds by itself.
        """
        resting = self.resting()
        if resting is not None and resting.lost is None:
            with self._losing(resting):
                resting.take(total, fresh=fresh)

    @property
    def is_flushing(self) -> bool:
        """Whether a sum is on its way to another tier, and so held on the device, too."""
        resting, flushing = self.resting(), False
        if resting is not None:
            with self._losing(resting):
                flushing = resting.is_flushing
        return flushing

    def flush(self) -> None:
        """Return when it is there."""
        resting = self.resting()
        if resting is not None:
            with self._flat.probe.waiting("tier write", self.key), self._losing(resting):
                resting.wait_writes()

    def _reopen(self) -> None:
        """Turn our slice of the average back into a sum, to which more is added."""
        resting, divided_by = self._changing(), self._divided_by
        assert resting is not None, self.key
        with self._losing(resting):
            resting.wait_writes()
            changes = resting.pending or divided_by != 1.0
            for _, there in resting.blocks(*self.own, write=True) if changes else ():
                resting.apply_to(there)
                there.mul_(divided_by)
        resting.pending.clear()
        self._divided_by = self._weight = 0.0

    # ------------------------------------------------------------------ from sum to average

    def average(self, divisor: float) -> bool:
        """Divide our slice of the sum by `divisor`, once; return whether all of it is finite, as
        far as the host knows: of numbers on an accelerator once it has read what is `asked` for.
        """
        if (resting := self.resting()) is None:
            return True
        if not self._divided_by:
            self._divided_by = divisor
            if divisor != 1.0:
                resting.pending.append(("div", divisor))
        try:
            return resting.settle() and all(map(math.isfinite, self._squares.values()))
        except StorageError as error:
            self._lose(resting, error)
            return False

    def divide(self, weight: float) -> None:
        """Divide all that rests here by the sum of weights, after `gather_averages`, once."""
        resting = self._changing()
        if resting is not None and not self._weight:
            self._weight = weight
            self._divided_by *= weight
            resting.change("div", weight)

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
            return (Step(partial(self._exchange, resting), "here"),)
        return self._meeting(resting.fetch(*self.own), resting.whole)

    def _exchange(self, resting: GradientState) -> None:
        """Let every rank's slice of the average rest here, by way of the device."""
        start, stop = self._flat.stepped  # a lost gradient has fewer elements
        whole = self._memory.empty(stop - start, resting.dtype)
        mine = whole[slice(*self.own)]
        with self._losing(resting):
            resting.wait_writes()
            for work in resting.read(*self.own, mine) if resting.lost is None else ():
                work.wait()
            resting.apply_to(mine)
        if resting.lost is not None:
            mine.fill_(float("nan"))
        levels = self._flat.context.levels
        flight = Flight([self._meeting(mine, whole)], self._streams, None, levels)
        flight.go()
        flight.wait()
        with self._losing(resting):
            for work in resting.write(0, whole.numel(), whole) if resting.lost is None else ():
                work.wait()
        resting.pending.clear()

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

    def asked(self) -> list[SquaresRequest]:
        """Return what the host has yet to read of an accelerator (state/reduction.py) to know
        `squares`, and whether the averages are finite; nothing of the CPU.
        """
        if (resting := self.resting()) is None:
            return []
        if not resting.is_read_late:
            return resting.passed.asked()
        return [
            SquaresRequest(resting.whole[slice(*span)], partial(self._squares.__setitem__, span))
            for rank in self.members
            for _, span in self._spans(rank)
            if span not in self._squares
        ]

    def squares(self, used: Sequence[bool]) -> dict[int, float]:
        """Return, for every rank whose averages are here, the sum of squares of its own in fp64;
        not of parameters that are not `used`: their gradients were cleared elsewhere.
        """
        out = {}
        for rank in self.members:
            total = 0.0
            for index, span in self._spans(rank):
                if used[index]:
                    total += self.squares_in(*span)
            out[rank] = total
        return out

    def _spans(self, rank: int) -> Iterator[tuple[int, Range]]:
        """Yield the parameters of which `rank` averages a part, and where that rests here."""
        base = self._flat.layout.ranges[rank][0] - self._flat.stepped[0]
        for piece in self._flat.layout.pieces(rank):
            yield piece.index, (base + piece.shard_start, base + piece.shard_stop)

    def squares_in(self, start: int, stop: int) -> float:
        """Return the sum of squares of a range in fp64: 0 without a gradient, NaN of a lost one."""
        if (resting := self.resting()) is None:
            return 0.0
        if (start, stop) in self._squares:
            return self._squares[start, stop]
        try:
            return resting.squares(start, stop)
        except StorageError as error:
            self._lose(resting, error)
            return float("nan")

    def is_finite(self, start: int, stop: int) -> bool:
        """Whether a range holds neither NaN nor infinity."""
        if (resting := self.resting()) is None:
            return True
        if (start, stop) in self._squares:
            return math.isfinite(self._squares[start, stop])
        try:
            return resting.is_finite(start, stop)
        except StorageError as error:
            self._lose(resting, error)
            return False

    def first_bad(self) -> str | None:
        """Return the name of the first parameter here whose averaged gradient is not finite."""
        pieces = self._flat.layout.pieces_in(self._flat.stepped)
        bad = (one.name for one in pieces if not self.is_finite(one.shard_start, one.shard_stop))
        return next(bad, None)

    def scale(self, factor: float) -> None:
        """Multiply the averaged gradient by `factor`."""
        resting = self._changing()
        if resting is not None:
            resting.change("mul", factor)

    def store(self, index: int, average: torch.Tensor) -> None:
        """Let `average` [numel, as the buffer holds it] be that of parameter `index`."""
        for piece in self._flat.layout.pieces_in(self._flat.stepped):
            if piece.index == index:
                numbers = average[piece.start : piece.stop]
                self.store_range(piece.shard_start, piece.shard_stop, numbers)

    def store_range(self, start: int, stop: int, numbers: torch.Tensor) -> None:
        """Set a range of the average to `numbers` [stop - start], of any dtype and device."""
        resting = self._changing()
        assert resting is not None, self.key
        with self._losing(resting):
            resting.wait_writes()
            for _, there in resting.blocks(0, resting.numel, write=True) if resting.pending else ():
                resting.apply_to(there)
            resting.pending.clear()
            for low, there in resting.blocks(start, stop, write=True):
                there.copy_(numbers[low - start :][: there.numel()])

    def zero(self, indices: Container[int]) -> None:
        """Set the gradients of parameters `indices` to zero."""
        for piece in self._flat.layout.pieces_in(self._flat.stepped):
            if piece.index in indices:
                self.zero_range(piece.shard_start, piece.shard_stop)

    def zero_range(self, start: int, stop: int) -> None:
        """Set a range to zero, if there is a gradient."""
        resting = self._changing()
        if resting is not None:
            with self._losing(resting):
                resting.wait_writes()
                for _, there in resting.blocks(start, stop, write=True):
                    there.zero_()
