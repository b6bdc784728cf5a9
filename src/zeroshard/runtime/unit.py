"""A unit: parameters that are gathered together, and the states they go through.

Its parameters lie in one flat segment per (dtype, trainable); what they are while the unit rests is
runtime/parameters.py's.

    RESTING --unshard--> GATHERING --wait--> FULL --reshard--> RESTING

Invariant: any other transition raises StateError naming the unit. Cost: a gather moves the weights
once; pointing the parameters at their views costs no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter

import torch

from zeroshard.core.placement import Cells
from zeroshard.core.residency import Residency, UnitState, UnitTraits, Use
from zeroshard.errors import StateError
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.streams import Lane, Streams

_REQUIRES_GRAD = attrgetter("requires_grad")


class Unit:
    """Parameters that are gathered together."""

    def __init__(
        self,
        index: int,
        name: str,
        segments: Sequence[Segment],
        cells: Cells,
        *,
        spans_one_module: bool,
        holds_others: bool,
        strict: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.segments = tuple(segments)
        self.cells = cells
        self._context = self.segments[0].flat.context
        moves = not all(segment.flat.is_local for segment in segments)
        self._lane: Lane | None = "gather" if moves else None
        frozen = [segment for segment in segments if segment.bucket is None]
        # whether its backward may need weights after its last trainable gradient has come
        self.has_frozen = bool(frozen)
        # whether a gather may leave segments out: frozen ones that every rank keeps whole
        self.may_have_no_news = any(segment.flat.replicated for segment in frozen)
        # whether weights may be on their way here from a step on another tier
        self.steps_elsewhere = any(segment.steps_elsewhere for segment in segments)
        self.residency = Residency(index, self._traits(spans_one_module))
        # other units' modules lie inside its own, so that its backward goes on around theirs
        self.holds_others = holds_others
        # parameters with a gradient that has come in this backward, by id, and the last graph task
        # that brought it
        self.arrived: dict[int, int] = {}
        self.expected = 0  # how many parameters get a gradient in this backward
        self._flight: Flight | None = None
        self._strict = strict

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.residency.state.value})"

    def _traits(self, spans_one_module: bool) -> UnitTraits:
        flats = [segment.flat for segment in self.segments]
        return UnitTraits.of(
            self.cells,
            self.full_bytes,
            sum(flat.layout.numel * flat.dtype.itemsize for flat in flats),
            reads_first=any(flat.reads_first for flat in flats),
            spans_one_module=spans_one_module,
        )

    @cached_property
    def full_bytes(self) -> int:
        """Bytes that gathering this unit takes beyond what rests, and a release gives back."""
        return sum(segment.flat.full_bytes for segment in self.segments)

    @cached_property
    def trainable(self) -> list[Segment]:
        """The segments with parameters that have gradients."""
        return [segment for segment in self.segments if segment.bucket is not None]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The gradients of each of the `trainable` segments."""
        return [segment.bucket for segment in self.segments if segment.bucket is not None]

    # ------------------------------------------------------------------ its gradients

    def expect_gradients(self) -> None:
        """A backward begins: no gradient has come."""
        self.arrived.clear()
        self.expected = 0
        for segment in self.trainable:
            self.expected += sum(map(_REQUIRES_GRAD, segment.parameters))

    @property
    def has_all(self) -> bool:
        """Whether every gradient that is expected has come."""
        return len(self.arrived) >= self.expected

    def expect_no_more(self) -> None:
        """The gradients that have come are handed over."""
        self.expected = 0

    # ------------------------------------------------------------------ where its weights are

    def _cannot(self, what: str) -> StateError:
        return StateError(f"unit {self.name!r} cannot {what}: it is {self.residency.state.value}")

    @property
    def is_coded(self) -> bool:
        """Whether its weights travel encoded, so that what is computed with is not quite what
        rests.
        """
        return any(segment.flat.codec is not None for segment in self.segments)

    @property
    def gathered_segments(self) -> Sequence[Segment]:
        """The segments with weights that a gather moves; all, unless it `may_have_no_news`."""
        return [segment for segment in self.segments if segment.has_news]

    def unshard(self, streams: Streams, *, raw: bool = False) -> Flight:
        """Return a flight that brings the weights together, to be started; `raw`: as they rest,
        without a codec.
        """
        for segment in self.segments:
            if self.steps_elsewhere and not segment.flat.is_local:
                segment.wait_uploads()
            user_view = segment.user_view
            name = user_view.lost()
            if name is None and (self._strict or user_view.has_no_nan):
                name = user_view.lost_by_value()
            if name is not None:
                self._release_anew()  # it is told once
                raise _lost(name, "while it was released")
        if self.residency.state is not UnitState.RESTING:
            raise self._cannot("start a gather")
        context, routes = self._context, []
        if self.full_bytes:
            context.meter.add(self.full_bytes)
        for segment in self.segments:
            if not self.may_have_no_news or segment.take_news():
                routes.append(segment.flat.gather(raw))
        self._flight = Flight(routes, streams, self._lane, context.levels)
        return self._flight

    def advance(self) -> None:
        """Go on with a gather that began with a read of another tier."""
        if self._flight is not None:
            self._flight.advance()

    def forget_writes(self) -> str | None:
        """Release parameters anew that were written to while they were released; return the name
        of one, if any.
        """
        name = None
        if self.residency.state is not UnitState.FULL:
            name = next(filter(None, (one.user_view.lost() for one in self.segments)), None)
        if name is not None:
            self._release_anew()
        return name

    def _release_anew(self) -> None:
        for segment in self.segments:
            segment.heal()
            segment.user_view.detach()

    def landing(self) -> Flight:
        """Return the flight under way, to be waited for; peers wait here for this rank's part."""
        assert self._flight is not None, self
        # a view that was kept since before the step leads to memory that others are writing
        if not self.residency.traits.is_sharded and (name := self.forget_writes()) is not None:
            raise _lost(name, "while it was released")
        for segment in self.segments if self.steps_elsewhere else ():
            segment.wait_uploads()
        return self._flight

    def attach(self) -> None:
        """The weights are here: point the parameters at them."""
        assert self._flight is None or self._flight.is_over, f"{self} is used too early"
        self._flight = None
        for segment in self.segments:
            segment.user_view.attach(segment.flat.buffer.views)

    def reshard(self, *, for_backward: bool | None = False) -> int:
        """Give the gathered memory back (replicated rows keep theirs, and only unpoint the
        parameters) and return the bytes that the allocator has got; see FlatWeights.keep.
        """
        name, num_bytes = None, 0
        for segment in self.segments:
            flat, user_view = segment.flat, segment.user_view
            if segment.keeps_writes:
                user_view.adopt()
            lost = user_view.detach(writes=not segment.is_whole)
            name = name or lost
            if flat.keeps_column:
                flat.keep(for_backward=for_backward)
            num_bytes += flat.buffer.release()
        if self.full_bytes:
            self._context.meter.remove(self.full_bytes)
        if name is not None:
            raise _lost(name, "while it was gathered for computing")
        return num_bytes

    def mark_idle(self) -> None:
        """Let the parameters of a FULL unit that no module is using answer as released ones:
        another use of them must be noticed.
        """
        for segment in self.segments:
            segment.user_view.answer(released=True)

    def resume(self) -> None:
        """End `mark_idle`: a module uses the unit again."""
        for segment in self.segments:
            segment.user_view.answer(released=False)

    def check_memory(self) -> None:
        """Raise StateError where ``param.data`` of a FULL unit leads elsewhere: no step would
        change such a parameter. What the user keeps whole by himself is taken over.
        """
        for segment in self.segments:
            if segment.keeps_writes:
                segment.user_view.adopt()
        name = next(
            filter(None, (segment.user_view.lost(writes=False) for segment in self.segments)), None
        )
        if name is not None:
            raise _lost(name, "(its .data leads elsewhere)")

    def abandon(self) -> None:
        """After an exception: back to rest. The transport has abandoned its flights."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abandon()  # a tier may still be reading into memory that is about to go
        for segment in self.segments:
            segment.heal()
            segment.user_view.detach()
            segment.flat.abandon()
        self.expected = 0
        self.arrived = {}

    @property
    def is_forgotten(self) -> bool:
        """Whether nobody finds what is gathered next, once it is released: nothing rests there,
        and no backward is to come.
        """
        is_resting = self.residency.state is UnitState.RESTING
        return is_resting and all(segment.flat.buffer.is_forgotten for segment in self.segments)

    @property
    def is_lent(self) -> bool:
        """Whether its parameters are at copies that the user may edit."""
        return any(segment.user_view.lent is not None for segment in self.segments)

    @contextmanager
    def writable(
        self, use: Use = Use.EDIT, *, is_private: bool = False
    ) -> Iterator[list[torch.Tensor]]:
        """Point the parameters of a FULL unit at private copies that may be edited; yields the
        copies, one flat tensor per segment. `is_private`: what was gathered is released at the end,
        and edited itself.
        """
        if self.residency.state is not UnitState.FULL:
            raise self._cannot("be edited")
        whole = [segment.flat.full for segment in self.segments]
        copies = whole if is_private else [tensor.clone() for tensor in whole]
        for segment, copy in zip(self.segments, copies, strict=True):
            segment.user_view.lend(segment.flat.buffer.views_of(copy))
        self.residency.acquire(use)
        try:
            yield copies
        finally:
            self.residency.release(use)
            for segment in self.segments:
                segment.user_view.attach(segment.flat.buffer.views)


def _lost(name: str, when: str) -> StateError:
    return StateError(
        f"parameter {name!r} was written to {when}, and the write is lost: edit it inside"
        " engine.gathered(writeback=True)"
    )
