"""A unit: parameters that are gathered together, and the states they go through.

Its parameters lie in one flat segment per (dtype, trainable); what they are while the unit rests is
runtime/parameters.py's.

    RESTING --unshard--> GATHERING --wait_for_unshard--> FULL --reshard--> RESTING

Invariant: any other transition raises StateError naming the unit. Cost: a gather moves the weights
once; pointing the parameters at their views costs no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, IntEnum
from functools import cached_property
from itertools import repeat

import torch
from torch import nn

from zeroshard.core.placement import Cells
from zeroshard.errors import StateError
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.forwards import Forwards
from zeroshard.runtime.gradients import GradientPath
from zeroshard.runtime.released import release_class, restore_class
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.streams import Lane, Streams
from zeroshard.state.local import local_of

__all__ = ["Unit", "UnitState", "Use"]


class UnitState(Enum):
    """Where the unit's weights are."""

    RESTING = "resting"
    GATHERING = "gathering"
    FULL = "full"


class Use(IntEnum):
    """Why a unit has to be here."""

    FORWARD = 0  # forwards of its modules are under way
    BACKWARD = 1  # the backward of a forward has come to it; counted once
    DIRECT = 2  # something outside its modules has used it
    USER = 3  # gathered(), or a load
    SCHEDULE = 4  # a pipeline's schedule holds its stage, or accumulate() a section


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
        self.state = UnitState.RESTING if cells.weight.is_sharded else UnitState.FULL
        self._uses = [0] * len(Use)
        self.spans_one_module = spans_one_module  # one module's forward is all that needs it
        # other units' modules lie inside its own, so that its backward goes on around theirs
        self.holds_others = holds_others
        self.dozing = False
        self.is_lent = False  # its parameters are copies that the user may edit
        # parameters whose gradient has come in this backward, by id, and the last graph task that
        # brought it
        self.arrived: dict[int, int] = {}
        self.pending = 0  # trainable parameters whose gradient has not come in this backward
        self.forwards = Forwards()
        self._flight: Flight | None = None
        self._strict = strict

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.state.value})"

    @cached_property
    def full_bytes(self) -> int:
        """Bytes that gathering this unit takes beyond what rests, and a release gives back."""
        return sum(segment.flat.full_bytes for segment in self.segments)

    @property
    def nominal_bytes(self) -> int:
        """Bytes of all of this unit's weights, wherever they are."""
        return sum(
            segment.flat.layout.numel * segment.flat.dtype.itemsize for segment in self.segments
        )

    @cached_property
    def trainable(self) -> list[Segment]:
        """The segments whose parameters have gradients."""
        return [segment for segment in self.segments if segment.grad is not None]

    @cached_property
    def has_frozen(self) -> bool:
        """Whether the backward of this unit may need weights after its last trainable gradient
        has come.
        """
        return any(segment.grad is None for segment in self.segments)

    @cached_property
    def paths(self) -> list[GradientPath]:
        """The way of the gradients of each of the `trainable` segments."""
        return [segment.grad for segment in self.segments if segment.grad is not None]

    # ------------------------------------------------------------------ who uses it

    def acquire(self, use: Use) -> None:
        """Note a use of the weights; the caller has them gathered."""
        if use is not Use.BACKWARD or not self._uses[use]:
            self._uses[use] += 1

    def release(self, use: Use) -> None:
        """Note the end of a use; see `reshard`."""
        self._uses[use] = max(0, self._uses[use] - 1)

    @property
    def in_use(self) -> bool:
        """Whether anything uses the weights."""
        return any(self._uses)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has come to it and is not over."""
        return self._uses[Use.BACKWARD] > 0

    @property
    def is_held(self) -> bool:
        """Whether anything but a backward uses the weights."""
        uses = self._uses
        return bool(uses[Use.FORWARD] or uses[Use.DIRECT] or uses[Use.USER] or uses[Use.SCHEDULE])

    @property
    def is_used_directly(self) -> bool:
        """Whether something outside its modules has used it, and it is held for that."""
        return self._uses[Use.DIRECT] > 0

    # ------------------------------------------------------------------ its gradients

    def expect_gradients(self) -> None:
        """A backward begins: no gradient has come."""
        self.arrived.clear()
        self.pending = sum(
            parameter.requires_grad
            for segment in self.trainable
            for parameter in segment.parameters
        )

    def took(self, parameter: int, task: int) -> None:
        """The gradient of a parameter, by id, has come in graph task `task`."""
        self.pending -= parameter not in self.arrived
        self.arrived[parameter] = task

    def expect_no_more(self) -> None:
        """What has come is handed over."""
        self.pending = 0

    # ------------------------------------------------------------------ where its weights are

    def _move(self, before: UnitState, after: UnitState) -> None:
        if self.state is not before:
            raise StateError(
                f"unit {self.name!r} cannot go from {self.state.value} to {after.value}"
            )
        self.state = after

    @property
    def is_coded(self) -> bool:
        """Whether its weights travel encoded, so that what is computed with is not quite what
        rests.
        """
        return any(segment.flat.codec is not None for segment in self.segments)

    @property
    def gathered_segments(self) -> list[Segment]:
        """The segments whose weights a gather moves."""
        return [segment for segment in self.segments if segment.has_news]

    def unshard(self, streams: Streams, *, fork: bool = True, raw: bool = False) -> None:
        """Start bringing the weights together, after what compute was given if `fork`; `raw`: as
        they rest, without a codec.
        """
        for segment in self.segments:
            if not segment.flat.is_local:
                segment.wait_uploads()
            name = segment.seen.lost_at_rest(strict=self._strict)
            if name is not None:
                raise _lost(name, "while it was released")
        self._move(UnitState.RESTING, UnitState.GATHERING)
        flats = [segment.outgoing() for segment in self.gathered_segments]
        for flat in flats:
            flat.take_memory()
        lane: Lane | None = None if all(flat.is_local for flat in flats) else "gather"
        works = map(FlatWeights.unshard, flats, repeat(raw))
        self._flight = Flight(works, streams, lane, fork=fork)

    def advance(self) -> None:
        """Go on with a gather that began with a read of another tier."""
        if self._flight is not None:
            self._flight.advance()

    def wait_for_unshard(self) -> None:
        """Wait for the weights and point the parameters at them."""
        assert self._flight is not None, self
        for segment in self.segments:
            segment.wait_uploads()
        self._flight.wait()
        self._flight = None
        self._move(UnitState.GATHERING, UnitState.FULL)
        for segment in self.segments:
            segment.attach()

    def reshard(self, *, for_backward: bool | None = False) -> int:
        """Give the gathered memory back (replicated rows keep theirs, and only unpoint the
        parameters) and return the bytes that the allocator has got; see FlatWeights.release.
        """
        self._move(UnitState.FULL, UnitState.RESTING)
        self.dozing = False
        name, num_bytes = None, 0
        for segment in self.segments:
            keeps_writes = segment.flat.replicated and (
                segment.master is None or segment.master_is_weight
            )
            if segment.keeps_writes:
                segment.seen.adopt()
            name = name or segment.seen.lost(writes=not keeps_writes)
            segment.seen.detach()
            num_bytes += segment.flat.release(for_backward=for_backward)
        if name is not None:
            raise _lost(name, "while it was gathered for computing")
        return num_bytes

    def leave_views(self, tensor: torch.Tensor) -> None:
        """Where `tensor` is a view of the gathered weights, let it keep their memory; see
        [Note: views that leave] in state/full.py.
        """
        # those are guarded themselves
        if self.full_bytes and not isinstance(tensor, nn.Parameter):
            address = local_of(tensor).data_ptr()
            for segment in self.segments:
                segment.flat.buffer.leave(address)

    def parameter_at(self, address: int) -> str | None:
        """Return the name of the parameter whose gathered memory holds `address`, if any."""
        for segment in self.segments:
            place = (address - segment.flat.full.data_ptr()) // segment.flat.dtype.itemsize
            for name, slot in zip(segment.names, segment.flat.layout.slots, strict=True):
                if slot.offset <= place < slot.stop:
                    return name
        return None

    def doze(self) -> None:
        """Let the parameters of a FULL unit that no module is using answer as released ones:
        another use of them must be noticed.
        """
        self.dozing = True
        for segment in self.segments:
            for parameter in segment.parameters:
                release_class(parameter)

    def wake(self) -> None:
        """End `doze`."""
        self.dozing = False
        for segment in self.segments:
            for parameter in segment.parameters:
                restore_class(parameter)

    def check_memory(self) -> None:
        """Raise StateError where ``param.data`` of a FULL unit leads elsewhere: no step would
        change such a parameter. What the user keeps whole by himself is taken over.
        """
        for segment in self.segments:
            if segment.keeps_writes:
                segment.seen.adopt()
        name = next(
            filter(None, (segment.seen.lost(writes=False) for segment in self.segments)), None
        )
        if name is not None:
            raise _lost(name, "(its .data leads elsewhere)")

    def abandon(self) -> None:
        """After an exception: back to rest from whatever state. The transport has abandoned its
        part of flights under way.
        """
        rests = self.state is UnitState.RESTING
        if self._flight is not None:
            self._flight.abandon()  # a tier may still be reading into memory that is about to go
        self._flight = None
        self.state = UnitState.RESTING
        self.dozing = False
        for segment in self.segments:
            segment.heal()
            segment.seen.detach()
            segment.flat.column.release()
            if not rests:
                segment.flat.release()
        self._uses = [0] * len(Use)
        self.pending = 0
        self.arrived = {}
        self.forwards.reset()

    @contextmanager
    def writable(self) -> Iterator[list[torch.Tensor]]:
        """Point the parameters of a FULL unit at private copies that may be edited; yields the
        copies, one flat tensor per segment.
        """
        assert self.state is UnitState.FULL, self
        copies = [segment.flat.full.clone() for segment in self.segments]
        for segment, copy in zip(self.segments, copies, strict=True):
            segment.seen.lend(segment.flat.buffer.views_of(copy))
        self.is_lent = True
        try:
            yield copies
        finally:
            self.is_lent = False
            for segment in self.segments:
                segment.attach()


def _lost(name: str, when: str) -> StateError:
    return StateError(
        f"parameter {name!r} was written to {when}, and the write is lost: edit it inside"
        " engine.gathered(writeback=True)"
    )
