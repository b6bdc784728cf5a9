"""The accumulator of one segment: to which numbers its reduces add, and where these lie.

    Bucket --reduce--> `open`: a Gradient [elements that this rank steps] --> sealed gradients, step
                               (state/gradient.py: a sum, then an average)

The next gradient may begin before a step has read this one, so each sum is a Gradient of its own,
and what lasts is here: where they rest, which parameter lies where in them, which rank averages
what, and memory of another tier, kept for the next one.

Invariant: a Gradient is held here from the reduce that makes it until the user drops it
(``release``, ``reset``), and by a step that reads it, and ends with the last of these. Cost: memory
of another tier stays for the next gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from functools import cached_property, partial

import torch

from zeroshard.comm.levels import ReadyHop
from zeroshard.core.layout import Range
from zeroshard.core.route import Axis, Hop, Kind
from zeroshard.core.work import Operation
from zeroshard.errors import StorageError
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.state.gradient import Gradient
from zeroshard.state.norms import SquaresRequest, SquaresSum
from zeroshard.state.state import State
from zeroshard.tier.store import Storage, Store


class Accumulator:
    """The resting gradient of one trainable segment, and this rank's slice of it. Ranges count
    the elements that rest here: this rank's share, or the whole where every rank steps everything.
    """

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        context: Context,
        *,
        store: Store | None,
        split: int,
        off_device: bool,
    ) -> None:
        """It rests on the device up to element `split`, and then in `store`. `off_device`: on some
        rank it may rest, in part, on another tier.
        """
        self.off_device = off_device
        rank, layout = context.transport.rank, flat.layout
        self.key = flat.key  # the segment's key in collectives
        (low, high), (first, _) = flat.own_span, flat.stepped
        # where this rank's slice lies in what rests here
        self.own = (low - first, high - first)
        # ranks that bring their sums here
        self.members = layout.members(rank, layout.scope(plan.cells.optim))
        self.rank = rank  # among the ranks that have these parameters
        # whether all that rests here is padding: no shard of it carries a sealed gradient
        self.pads = plan.num_stepped > 0 and not layout.pieces_in(flat.stepped)
        self._flat = flat
        self._streams = context.streams
        self._memory, self._note = context.memory, context.faults.note
        self._numel, self._split, self._store = plan.num_stepped, split, store
        self.tiered = split < self._numel  # whether it rests, in part or as a whole, elsewhere
        self._dtype = plan.precision(context).accumulate
        # memory of the other tier that came back, and whether it may serve again: no lost one
        self._idle: list[tuple[Storage, bool]] = []
        self.reset()

    # ------------------------------------------------------------------ which numbers rest

    def reset(self) -> None:
        """Forget them: there is no gradient."""
        self._held: Gradient | None = None
        # returns the numbers at rest, if there is a gradient; a weak reference, no call of Python
        self.resting: Callable[[], Gradient | None] = type(None)

    def open(self) -> tuple[Gradient, bool]:
        """Return the sum to which more is added, and whether it was made just now: its contents are
        undefined then.
        """
        resting = self.resting()
        fresh = resting is None
        if resting is not None:  # an average, where no zero_grad() came since the last step
            resting.reopen()
        else:
            near, away, lost, memory = None, None, None, self._memory
            if self.tiered or self._idle:
                away, lost = self._take_away()
            if self._split or away is None:
                near = memory.empty(self._split, self._dtype)
            resting = Gradient(
                self.key,
                State(near, away, link=memory.link),
                own=self.own,
                memory=memory,
                idle=self._idle,
                note=self._note,
            )
            if lost is not None:
                resting.lose(lost)
            self.resting = weakref.ref(resting)
        self._held = resting
        return resting, fresh

    def open_empty(self) -> None:
        """Let zeros rest here where nothing does."""
        if self.resting() is None:
            resting, _ = self.open()
            resting.zero_range(0, resting.numbers.numel)

    def release(self) -> None:
        """Stop holding the numbers: the user has dropped them, and a step may still read them."""
        self._held = None

    def move(self, split: int) -> None:
        """Let the gradients to come rest on the device up to element `split`."""
        self._split = split
        self.tiered = split < self._numel
        self.release_idle()

    def release_idle(self) -> None:
        """Close memory on other tiers that is kept for the next gradient."""
        while self._idle:
            self._idle.pop()[0].close()

    def _take_away(self) -> tuple[Storage | None, StorageError | None]:
        """Return memory of the other tier for a gradient, if any of it rests there: what is kept,
        or new memory, or the reason why there is none.
        """
        rest, numel = None, self._numel - self._split
        try:
            while self._idle and rest is None:
                storage, usable = self._idle.pop()
                if usable and storage.numel == numel:  # another size: it came back after a move
                    rest = storage
                else:
                    storage.close()
            if numel and rest is None:
                assert self._store is not None, self.key
                rest = self._store.allocate(f"{self.key} gradient", numel, self._dtype)
        except StorageError as error:
            self._note(error)
            return rest, error
        return rest, None

    # ------------------------------------------------------------------ sums on their way here

    @property
    def is_flushing(self) -> bool:
        """Whether a sum is on its way to another tier, and so held on the device, too."""
        resting = self.resting()
        return resting is not None and resting.is_flushing

    def flush(self) -> None:
        """Return when it is there."""
        resting = self.resting()
        if resting is not None:
            with self._flat.probe.waiting("tier write", self.key), resting.losing():
                resting.wait_writes()

    # ------------------------------------------------------------------ averages of other ranks

    def gather_averages(self) -> Sequence[ReadyHop]:
        """Return what brings the other ranks' averaged slices here, hop by hop; no reduce is under
        way.
        """
        resting = self.resting()
        assert resting is not None, self.key
        if not resting.on_device:  # through the device, a segment at a time
            return (ReadyHop(partial(self._exchange, resting), "here"),)
        return self._meeting(resting.fetch(*self.own), resting.numbers.whole)

    def _exchange(self, resting: Gradient) -> None:
        """Let every rank's slice of the average rest here, by way of the device."""
        start, stop = self._flat.stepped  # a lost gradient has fewer elements
        whole = self._memory.empty(stop - start, resting.dtype)
        mine = whole[slice(*self.own)]
        with resting.losing():
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
        with resting.losing():
            numbers = None if resting.lost is not None else resting.numbers
            for work in () if numbers is None else numbers.write(0, whole.numel(), whole):
                work.wait()
        resting.pending.clear()

    def _meeting(self, mine: torch.Tensor, whole: torch.Tensor) -> Sequence[ReadyHop]:
        """Return what brings together what every rank that steps the same has averaged."""
        flat = self._flat
        hops = [hop for hop in flat.routes.average if hop.axis is not None]
        axes = [hop.axis for hop in hops if hop.axis is not None]
        starts = flat.context.levels.gathers(axes, self.key, mine, flat.layout.ranges, whole)
        return [
            ReadyHop(start, describe=partial(self._gathering, hop), between=hop.axis is Axis.NODE)
            for hop, start in zip(hops, starts, strict=True)
        ]

    def _gathering(self, hop: Hop) -> Operation:
        received = hop.link_bytes(self._flat.portion).total
        return Operation("reduce", Kind.ALL_GATHER.value, self.key, received)

    # ------------------------------------------------------------------ where parameters lie

    def unread(self, used: Sequence[bool], *, squares: bool = True) -> list[SquaresRequest]:
        """Return what the host has yet to read of an accelerator to know their squares, and whether
        the averages are finite; nothing of the CPU. Where all parameters are `used`, a rank's
        averages are one request.
        """
        resting = self.resting()
        if resting is None:
            return []
        every = self._groups.values() if all(used) else [(span,) for _, _, span in self._spans]
        return resting.unread(every, squares=squares)

    def add_squares(self, used: Sequence[bool], to: SquaresSum, *, of_all: bool) -> None:
        """Add the squares of this rank's averages (`of_all`: of all that are here) `to` a sum; not
        of parameters that are not `used`: their gradients were cleared elsewhere.
        """
        resting = self.resting()
        if resting is None:
            return
        resting.add_squares(self._chosen(used, self.members if of_all else [self.rank]), to)

    def own_averages(self, used: Sequence[bool]) -> list[torch.Tensor]:
        """Return this rank's averages of parameters that are `used`, which rest on the device: one
        slice where all are.
        """
        resting, groups = self.resting(), self._chosen(used, [self.rank])
        return [] if resting is None else [resting.fetch(one[0][0], one[-1][1]) for one in groups]

    def _chosen(self, used: Sequence[bool], ranks: Sequence[int]) -> list[tuple[Range, ...]]:
        """Return the groups of ranges in which the averages of `ranks` lie, of what is `used`."""
        if all(used):
            return [self._groups[rank] for rank in ranks if rank in self._groups]
        return [(span,) for rank, index, span in self._spans if used[index] and rank in ranks]

    @cached_property
    def _groups(self) -> dict[int, tuple[Range, ...]]:
        """The places of each rank's averages; the padding between them is zero."""
        groups: dict[int, tuple[Range, ...]] = {}
        for rank, _, span in self._spans:
            groups[rank] = (*groups.get(rank, ()), span)
        return groups

    @cached_property
    def _spans(self) -> list[tuple[int, int, Range]]:
        """The ranks with averages that rest here, the parameters that each averages a part of, and
        where that part is.
        """
        spans = []
        for rank in self.members:
            base = self._flat.layout.ranges[rank][0] - self._flat.stepped[0]
            for piece in self._flat.layout.pieces(rank):
                span = (base + piece.shard_start, base + piece.shard_stop)
                spans.append((rank, piece.index, span))
        return spans

    def first_bad(self) -> str | None:
        """Return the name of the first parameter here with a non-finite averaged gradient."""
        resting = self.resting()
        if resting is None:
            return None
        for piece in self._flat.layout.pieces_in(self._flat.stepped):
            if not resting.is_finite(piece.shard_start, piece.shard_stop):
                return piece.name
        return None

    def store(self, index: int, average: torch.Tensor) -> None:
        """Let `average` [numel, as the buffer holds it] be the average of parameter `index`."""
        resting = self.resting()
        assert resting is not None, self.key
        for piece in self._flat.layout.pieces_in(self._flat.stepped):
            if piece.index == index:
                numbers = average[piece.start : piece.stop]
                resting.store_range(piece.shard_start, piece.shard_stop, numbers)

    def zero(self, indices: Container[int]) -> None:
        """Set the gradients of parameters `indices` to zero, where there are any."""
        resting = self.resting()
        if resting is None:
            return
        for piece in self._flat.layout.pieces_in(self._flat.stepped):
            if piece.index in indices:
                resting.zero_range(piece.shard_start, piece.shard_stop)
