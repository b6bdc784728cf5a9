"""A unit: parameters that are gathered together, and the states they go through.

Its parameters lie in one flat segment per (dtype, trainable). While the unit rests, ``param.data`` of each is a one-element NaN expanded to
the parameter's shape: shape, dtype and device stay right, reading gives NaN instead of stale numbers, most in-place writes raise.

    RESTING --start--> GATHERING --finish--> FULL --release--> RESTING

Invariant: any other transition raises StateError naming the unit. Cost: a gather moves the weights once; pointing the parameters at
their views costs no copy.

[Note: writes to released parameters] ``zero_``, ``fill_``, element assignment and writes to one-element parameters do not raise on an
expanded tensor. Release therefore records ``param._version``; a changed version at the next gather raises StateError naming the parameter.
Writes through ``.data`` do not count versions: strict mode compares the scalar itself, and so is done always for dtypes without a NaN.
``param.data = tensor`` is seen by its address.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property

import torch
from torch import nn

from zeroshard.buffer import FlatBuffer, Flight, Lanes, PagePool, gather, poison_value
from zeroshard.core.layout import Piece
from zeroshard.core.policy import Cells
from zeroshard.errors import StateError
from zeroshard.runtime.gradients import GradientPath
from zeroshard.runtime.released import release_class, restore_class

__all__ = ["Segment", "Unit", "UnitState", "flatten", "memory_stride"]


class UnitState(Enum):
    """Where the unit's weights are."""

    RESTING = "resting"
    GATHERING = "gathering"
    FULL = "full"


_TRANSITIONS = {
    (UnitState.RESTING, UnitState.GATHERING),
    (UnitState.GATHERING, UnitState.FULL),
    (UnitState.FULL, UnitState.RESTING),
}


def memory_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride `tensor` keeps in a flat buffer: its own where it is dense (channels_last), else contiguous."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`'s elements [numel] in the order in which a flat buffer holds them; a view where it is dense."""
    if memory_stride(tensor) == tensor.stride():
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


class Segment:
    """The parameters of one unit that share dtype and trainability."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], flat: FlatBuffer, rank: int) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.given = tuple(parameter.dtype for parameter in parameters)  # before shard()
        self.flat = flat
        self.rank = rank
        self.grad: GradientPath | None = None  # trainable segments only
        self.master: torch.Tensor | None = None  # what the optimizer steps; flat's own memory where the weight is the master
        self._poison = [torch.full((), poison_value(flat.dtype), dtype=flat.dtype, device=p.device) for p in parameters]
        self._released = [poison.expand(p.shape) for poison, p in zip(self._poison, parameters, strict=True)]
        self.versions: list[int] = [p._version for p in parameters]
        self.detached = False

    @property
    def key(self) -> str:
        return self.flat.key

    @property
    def master_is_weight(self) -> bool:
        """Whether the optimizer steps the weights themselves."""
        return self.master is not None and self.master.untyped_storage().data_ptr() == self.flat.window.local.untyped_storage().data_ptr()

    def owned_pieces(self, *, whole: bool) -> tuple[Piece, ...]:
        """Return the pieces that this rank's optimizer steps: all of them (`whole`), or those of its share."""
        layout = self.flat.layout
        return layout.pieces_in((0, layout.numel)) if whole else layout.pieces(self.rank)

    def make_master(self, *, whole: bool, dtype: torch.dtype, pages: PagePool) -> None:
        """Take the weights as master where they have its dtype; else allocate one and fill it from the weights at rest."""
        weight = self.flat.full if whole else self.flat.window.local
        if self.flat.dtype is dtype:
            self.master = weight
            return
        self.master = pages.empty(weight.numel(), dtype, weight.device)
        self.master.copy_(weight)

    def store(self, values: Sequence[torch.Tensor], *, whole_master: bool) -> None:
        """Write `values` (one per parameter, any float dtype) into the weights at rest and the master."""
        with torch.no_grad():
            for piece in self.flat.layout.pieces(self.rank):
                source = flatten(values[piece.index])[piece.start : piece.stop]
                self.flat.window.local[piece.shard_start : piece.shard_stop].copy_(source)
            if self.flat.replicated:
                for view, value in zip(self.flat.views, values, strict=True):
                    view.copy_(value)
            if self.master is not None and not self.master_is_weight:
                for piece in self.owned_pieces(whole=whole_master):
                    source = flatten(values[piece.index])[piece.start : piece.stop]
                    self.master[piece.shard_start : piece.shard_stop].copy_(source)

    def publish(self, *, whole_master: bool) -> None:
        """After a step: cast the master into the weights at rest and let the peers read them."""
        if self.master is not None and not self.master_is_weight:
            target = self.flat.full if whole_master else self.flat.window.local
            target.copy_(self.master)
        self.flat.window.publish()

    def attach(self) -> None:
        """Point the parameters at the gathered buffer."""
        for parameter, view in zip(self.parameters, self.flat.views, strict=True):
            restore_class(parameter)
            parameter.data = view
        self.versions = [parameter._version for parameter in self.parameters]
        self.detached = False

    def detach(self) -> None:
        """Point the parameters at their NaN."""
        for parameter, released in zip(self.parameters, self._released, strict=True):
            restore_class(parameter)
            parameter.data = released
        self.versions = [parameter._version for parameter in self.parameters]
        self.detached = True
        for parameter in self.parameters:
            release_class(parameter)

    def heal(self) -> None:
        """Make released parameters read as NaN again, whatever was written there."""
        for poison in self._poison:
            poison.fill_(poison_value(self.flat.dtype))

    def repointed(self) -> str | None:
        """Return the name of a parameter whose ``data`` has been given other memory since attach or detach, if any."""
        there = self._released if self.detached else self.flat.views
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, tensor in zip(self.names, self.parameters, there, strict=True):
                if parameter.data_ptr() != tensor.data_ptr():
                    return name
        return None

    def written(self, *, scalar: bool = False) -> str | None:
        """Return the name of a parameter that was written since attach or detach, if any; `scalar`: through ``.data`` too, at rest."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, version in zip(self.names, self.parameters, self.versions, strict=True):
                if parameter._version != version:
                    return name
        if scalar:
            expected = poison_value(self.flat.dtype)
            for name, poison in zip(self.names, self._poison, strict=True):
                value = poison.item()
                if value != expected and not (expected != expected and value != value):
                    return name
        return None


class Unit:
    """Parameters that are gathered together."""

    def __init__(
        self, index: int, name: str, segments: Sequence[Segment], cells: Cells, *, spans_one_module: bool, strict: bool = False
    ) -> None:
        self.index = index
        self.name = name
        self.segments = tuple(segments)
        self.cells = cells
        self.state = UnitState.FULL
        self.depth = 0  # forwards of its modules under way
        self.spans_one_module = spans_one_module  # one module's forward is all that needs it
        self.in_backward = False
        self.arrived: set[int] = set()  # parameters whose gradient has come in this backward
        self.pending = 0  # trainable parameters whose gradient has not come in this backward
        self._flight: Flight | None = None
        self._strict = strict

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.state.value})"

    @property
    def full_bytes(self) -> int:
        """Bytes that gathering this unit takes beyond what rests."""
        return sum(segment.flat.full_bytes for segment in self.segments)

    @property
    def nominal_bytes(self) -> int:
        """Bytes of all of this unit's weights, wherever they are."""
        return sum(segment.flat.layout.numel * segment.flat.dtype.itemsize for segment in self.segments)

    @cached_property
    def trainable(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.grad is not None]

    @cached_property
    def has_frozen(self) -> bool:
        """Whether the backward of this unit may need weights after its last trainable gradient has come."""
        return any(segment.grad is None for segment in self.segments)

    def _move(self, state: UnitState) -> None:
        if (self.state, state) not in _TRANSITIONS:
            raise StateError(f"unit {self.name!r} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def start_gather(self, streams: Lanes, *, fork: bool = True) -> None:
        """Start bringing the weights together (`fork`: see buffer.gather)."""
        for segment in self.segments:
            always = not (segment.flat.dtype.is_floating_point or segment.flat.dtype.is_complex)
            name = segment.repointed() or segment.written(scalar=self._strict or always)
            if name is not None:
                raise _lost(name, "while it was released")
        self._move(UnitState.GATHERING)
        self._flight = gather([segment.flat for segment in self.segments], streams, fork=fork)

    def finish_gather(self) -> None:
        """Wait for the weights and point the parameters at them."""
        assert self._flight is not None, self
        self._flight.wait()
        self._flight = None
        self._move(UnitState.FULL)
        for segment in self.segments:
            segment.attach()

    def release(self) -> None:
        """Give the gathered memory back (replicated rows keep theirs, and only unpoint the parameters)."""
        self._move(UnitState.RESTING)
        name = None
        for segment in self.segments:
            keeps_writes = segment.flat.replicated and (segment.master is None or segment.master_is_weight)
            name = name or segment.repointed() or (None if keeps_writes else segment.written())
            segment.detach()
            segment.flat.release()
        if name is not None:
            raise _lost(name, "while it was gathered for computing")

    def doze(self) -> None:
        """Let the parameters of a FULL unit that no module is using answer as released ones: another use of them must be noticed."""
        for segment in self.segments:
            for parameter in segment.parameters:
                release_class(parameter)

    def wake(self) -> None:
        """End `doze`."""
        for segment in self.segments:
            for parameter in segment.parameters:
                restore_class(parameter)

    def check_memory(self) -> None:
        """Raise StateError where ``param.data`` of a FULL unit leads elsewhere: no step would change such a parameter."""
        name = next(filter(None, (segment.repointed() for segment in self.segments)), None)
        if name is not None:
            raise _lost(name, "(its .data leads elsewhere)")

    def abandon(self) -> None:
        """After an exception: back to rest from whatever state. Flights under way have been abandoned by the transport."""
        rests = self.state is UnitState.RESTING
        self._flight = None
        self.state = UnitState.RESTING
        for segment in self.segments:
            segment.heal()
            segment.detach()
            if not rests:
                segment.flat.release()
        self.depth = 0
        self.pending = 0
        self.arrived = set()

    @contextmanager
    def writable(self) -> Iterator[list[torch.Tensor]]:
        """Point the parameters of a FULL unit at private copies that may be edited; yields the copies, one flat tensor per segment."""
        assert self.state is UnitState.FULL, self
        copies = [segment.flat.full.clone() for segment in self.segments]
        for segment, copy in zip(self.segments, copies, strict=True):
            for parameter, view in zip(segment.parameters, segment.flat.views_of(copy), strict=True):
                parameter.data = view
        try:
            yield copies
        finally:
            for segment in self.segments:
                segment.attach()


def _lost(name: str, when: str) -> StateError:
    return StateError(f"parameter {name!r} was written to {when}, and the write is lost: edit it inside engine.gathered(writeback=True)")
