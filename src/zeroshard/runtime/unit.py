"""A unit: parameters that are gathered together, and the states they go through.

Its parameters lie in one flat segment per (dtype, trainable). While the unit rests, ``param.data``
of each is a one-element NaN expanded to the parameter's shape: shape, dtype and device stay right,
reading gives NaN instead of stale numbers, most in-place writes raise.

    RESTING --start--> GATHERING --finish--> FULL --release--> RESTING

Invariant: any other transition raises StateError naming the unit. Cost: a gather moves the weights
once; pointing the parameters at their views costs no copy.

[Note: writes to released parameters] ``zero_``, ``fill_``, element assignment and writes to
one-element parameters do not raise on an expanded tensor. Release therefore records
``param._version``; a changed version at the next gather raises StateError naming the parameter.
Writes through ``.data`` do not count versions: strict mode compares the scalar itself, and so is
done always for dtypes without a NaN. ``param.data = tensor`` is seen by its address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property

import torch
from torch import nn

from zeroshard.buffer import FlatBuffer, Flight, Lanes, gather
from zeroshard.core.layout import Piece
from zeroshard.core.placement import Cells, Tier
from zeroshard.core.split import tiles
from zeroshard.core.work import DoneWork, Work
from zeroshard.errors import StateError, StorageError
from zeroshard.memory import Pages, placeholder_value
from zeroshard.runtime.gradients import GradientPath
from zeroshard.runtime.released import release_class, restore_class
from zeroshard.state.state import State
from zeroshard.tier.link import Link
from zeroshard.tier.store import Store

__all__ = ["Segment", "Unit", "UnitState", "flatten", "memory_stride"]


_TILE = 1 << 20  # elements that pass from one tier to another at a time


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
    """Return the stride `tensor` keeps in a flat buffer: its own where it is dense
    (channels_last), else contiguous.
    """
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`'s elements [numel] in the order in which a flat buffer holds them; a view
    where it is dense.
    """
    if memory_stride(tensor) == tensor.stride():
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


class Segment:
    """The parameters of one unit that share dtype and trainability."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], flat: FlatBuffer, rank: int
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.given = tuple(parameter.dtype for parameter in parameters)  # before shard()
        self.flat = flat
        self.rank = rank
        self.grad: GradientPath | None = None  # trainable segments only
        self.master: State | None = None  # what the optimizer steps
        self.weight = flat.weight  # the weights that follow from it
        self.split = 0  # how many elements of the master rest on the device
        # how many elements of the master, from its start, are those weights themselves
        self.aliased = 0
        self.lags = False  # whether the weights may be a step behind the master
        self.step: threading.Event | None = None  # set while no step on another tier is under way
        # weights on their way back from a step on another tier, and what they are copied from
        self.uploads: list[tuple[Work, object]] = []
        self._poison = [
            torch.full((), placeholder_value(flat.dtype), dtype=flat.dtype, device=p.device)
            for p in parameters
        ]
        self._released = [
            poison.expand(p.shape) for poison, p in zip(self._poison, parameters, strict=True)
        ]
        self.versions: list[int] = [p._version for p in parameters]
        self.detached = False
        self.rewritten = True  # frozen weights: since they were gathered last

    @property
    def has_news(self) -> bool:
        """Whether a gather brings anything: frozen weights that every rank keeps whole stay as they
        are when others are stepped.
        """
        return self.grad is not None or not self.flat.replicated or self.rewritten

    @property
    def key(self) -> str:
        """The segment's key in collectives."""
        return self.flat.key

    @property
    def master_is_weight(self) -> bool:
        """Whether the optimizer steps the weights themselves."""
        return self.master is not None and self.aliased == self.master.numel

    @property
    def stepped_pieces(self) -> tuple[Piece, ...]:
        """The pieces that this rank's optimizer steps."""
        return self.flat.layout.pieces_in(self.flat.stepped)

    def make_master(
        self,
        *,
        dtype: torch.dtype,
        pages: Pages,
        store: Store | None,
        link: Link,
        apart: bool = False,
    ) -> None:
        """Take the weights as master where they have its dtype and lie where it rests; else
        allocate one, zeros on the device, undefined elsewhere.

        The first `split` elements rest on the device, the others in `store`. `apart`: never the
        weights themselves, which are to lag behind.
        """
        flat, split = self.flat, self.split
        self.lags = apart
        weight = self.weight
        alike = flat.dtype is dtype and not apart
        there = None if weight.away is None else weight.away.tier
        if (
            alike
            and weight.split == split
            and there is (None if store is None or split == weight.numel else store.tier)
        ):
            self.master, self.aliased = weight, weight.numel
            return
        storage = (
            None
            if store is None or split == weight.numel
            else store.allocate(f"{self.key} master", weight.numel - split, dtype)
        )
        shares_device_part = alike and weight.tensor is not None and weight.split >= split
        if shares_device_part:
            assert weight.tensor is not None
            near, self.aliased = weight.tensor[:split], split
        else:
            # padding is published, too
            near, self.aliased = pages.empty(split, dtype, flat.full.device).zero_(), 0
        self.master = State.of(near, storage, link=link)

    def fill_master(self) -> None:
        """Take the master's numbers from the weights."""
        assert self.master is not None
        for start, stop in tiles(self.aliased, self.master.numel, _TILE):
            with (
                self.weight.borrowed(start, stop, write=False) as weight,
                self.master.borrowed(start, stop, write=True) as master,
            ):
                master.copy_(weight)

    def store(
        self, values: Sequence[torch.Tensor], *, masters: Sequence[bool] | None = None
    ) -> None:
        """Write `values` (one per parameter, any float dtype) into the weights at rest and the
        master; `masters`: which of them into the master.
        """
        with torch.no_grad():
            if self.flat.replicated:
                for view, value in zip(self.flat.views, values, strict=True):
                    view.copy_(value)
            else:
                _fill(self.flat.rest, self.flat.layout.pieces_in(self.flat.rest_span), values)
            if self.master is not None and not self.master_is_weight:
                pieces = (
                    self.stepped_pieces
                    if masters is None
                    else [piece for piece in self.stepped_pieces if masters[piece.index]]
                )
                _fill(self.master, pieces, values, keeps=len(pieces) < len(self.stepped_pieces))

    def publish(self, *, everything: bool = True) -> None:
        """Cast the master into the weights at rest and let the peers read them.

        A step leaves out (`everything` False) what was stepped in tiles: each has brought its
        weights itself, or still will.
        """
        master = self.master
        if master is not None and not self.master_is_weight:
            in_tiles = self.grad is not None and self.grad.tiered
            spans = [] if in_tiles and not everything else [(self.aliased, master.split)]
            if everything:
                spans += tiles(master.split, master.numel, _TILE)
            with self._noting():
                for start, end in spans:
                    if start < end:
                        with master.borrowed(start, end, write=False) as numbers:
                            self._bring(start, end, numbers)
        if not self.is_coming:
            self.flat.publish()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note that weights could not be written, instead of raising it: the peers wait for what
        follows.
        """
        try:
            yield
        except StorageError as error:
            self.flat.note(error, lost=True)

    @property
    def is_coming(self) -> bool:
        """Whether weights are on their way here from a step on another tier."""
        return bool(self.uploads) or (self.step is not None and not self.step.is_set())

    def _bring(self, start: int, stop: int, master: torch.Tensor) -> None:
        """Cast `master`, elements [start, stop), into the weights."""
        if self.weight.tensor is not None and stop <= self.weight.split:
            self.weight.tensor[start:stop].copy_(master)
            return
        for work in self.weight.write(start, stop, master.to(self.flat.dtype)):
            work.wait()

    def bring(self, start: int, stop: int, master: torch.Tensor, stays: bool) -> list[Work]:
        """Start casting stepped masters (do they stay as they are meanwhile?) into the weights;
        `settle` waits for it.
        """
        if stop <= self.aliased:
            return []
        source = master.to(self.flat.dtype, copy=not stays)
        return self._sent(self.weight.write(start, stop, source), source)

    def can_bring_from_rest(self, start: int, stop: int) -> bool:
        """Whether stepped masters may go into the weights as they are, from where they rest."""
        return self.master_is_weight or (
            self.flat.dtype is self.weight.dtype is self._master.dtype and stop <= self.weight.split
        )

    def bring_from_rest(self, start: int, stop: int) -> list[Work]:
        """Start copying stepped masters into the weights from where they rest."""
        if self.master_is_weight:
            return []
        assert self.weight.tensor is not None
        return self._sent(self._master.read(start, stop, self.weight.tensor[start:stop]), None)

    @property
    def _master(self) -> State:
        assert self.master is not None, self.key
        return self.master

    def _sent(self, works: list[Work], source: object) -> list[Work]:
        self.uploads += [(work, source) for work in works if not isinstance(work, DoneWork)]
        return works

    def settle(self) -> None:
        """Return when the weights that a step has sent here are here."""
        if not self.is_coming:
            return
        if self.step is not None:
            self.step.wait()
        uploads, self.uploads = self.uploads, []
        for work, _ in uploads:
            with self._noting():
                work.wait()
        self.flat.publish()

    def renew(self, store_of: Callable[[Tier], Store | None]) -> None:
        """Let what rests here on other tiers rest in memory of its own again, its contents
        undefined. Raises StorageError.
        """
        for state in (
            [self.weight]
            if self._master_or_weight is self.weight
            else [self.weight, self._master_or_weight]
        ):
            store = None if state.away is None else store_of(state.away.tier)
            if store is not None:
                state.renew(store)

    @property
    def _master_or_weight(self) -> State:
        return self.weight if self.master is None else self.master

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

    def outgoing(self) -> FlatBuffer:
        """Return the buffer that a gather is about to fill."""
        self.rewritten = False
        return self.flat

    def invalidate(self, *, frozen: bool) -> None:
        """Trained weights have been rewritten, and `frozen` ones."""
        self.flat.forget_column()
        self.rewritten |= frozen

    def heal(self) -> None:
        """Make released parameters read as NaN again, whatever was written there; what was on its
        way is lost.
        """
        self.rewritten = True
        for poison in self._poison:
            poison.fill_(placeholder_value(self.flat.dtype))

    def repointed(self) -> str | None:
        """Return the name of a parameter whose ``data`` has been given other memory since attach
        or detach, if any.
        """
        there = self._released if self.detached else self.flat.views
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, tensor in zip(self.names, self.parameters, there, strict=True):
                if parameter.data_ptr() != tensor.data_ptr():
                    return name
        return None

    def written(self, *, scalar: bool = False) -> str | None:
        """Return the name of a parameter that was written since attach or detach, if any;
        `scalar`: through ``.data`` too, at rest.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, version in zip(
                self.names, self.parameters, self.versions, strict=True
            ):
                if parameter._version != version:
                    return name
        if scalar:
            expected = placeholder_value(self.flat.dtype)
            for name, poison in zip(self.names, self._poison, strict=True):
                value = poison.item()
                if value != expected and not (expected != expected and value != value):
                    return name
        return None


def _fill(
    state: State, pieces: Sequence[Piece], values: Sequence[torch.Tensor], *, keeps: bool = False
) -> None:
    """Write the `pieces` of `values` into a state at rest, a tile at a time where that is
    another tier; `keeps` what lies beside them.
    """
    if state.on_device:
        for piece in pieces:
            state.whole[piece.shard_start : piece.shard_stop].copy_(
                flatten(values[piece.index])[piece.start : piece.stop]
            )
        return
    for start, stop in tiles(0, state.numel, _TILE):
        target = torch.zeros(stop - start, dtype=state.dtype)
        if keeps:
            with state.borrowed(start, stop, write=False) as numbers:
                target.copy_(numbers)
        for piece in pieces:
            low, high = max(piece.shard_start, start), min(piece.shard_stop, stop)
            if low < high:
                first = piece.start - piece.shard_start
                target[low - start : high - start].copy_(
                    flatten(values[piece.index])[first + low : first + high]
                )
        for work in state.write(start, stop, target):
            getattr(work, "synchronize", work.wait)()


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
        strict: bool = False,
    ) -> None:
        self.index = index
        self.name = name
        self.segments = tuple(segments)
        self.cells = cells
        self.state = UnitState.FULL
        self.depth = 0  # forwards of its modules under way
        self.spans_one_module = spans_one_module  # one module's forward is all that needs it
        # other units' modules lie inside its own, so that its backward goes on around theirs
        self.holds_others = False
        self.dozing = False
        self.in_backward = False
        # parameters whose gradient has come in this backward, by id, and the last graph task that
        # brought it
        self.arrived: dict[int, int] = {}
        self.pending = 0  # trainable parameters whose gradient has not come in this backward
        self.forwards = 0  # of its module, whose backward is not over
        # forwards of its modules to come in a backward: they ran inside reentrant checkpoints
        self.recomputations = 0
        self._flight: Flight | None = None
        self._strict = strict

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.state.value})"

    @property
    def full_bytes(self) -> int:
        """Bytes that gathering this unit takes beyond what rests."""
        return sum(segment.flat.full_bytes for segment in self.segments)

    @cached_property
    def gives_memory_back(self) -> bool:
        """Whether gathering takes memory that a release gives back."""
        return self.full_bytes > 0

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

    def _move(self, state: UnitState) -> None:
        if (self.state, state) not in _TRANSITIONS:
            raise StateError(
                f"unit {self.name!r} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

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

    def start_gather(self, streams: Lanes, *, fork: bool = True, exact: bool = False) -> None:
        """Start bringing the weights together (`fork`: see buffer.gather), `exact`: as they
        rest, without a codec.
        """
        gathered = self.gathered_segments
        for segment in self.segments:
            segment.flat.exact = exact
            if not segment.flat.is_local:
                segment.settle()
            always = not (segment.flat.dtype.is_floating_point or segment.flat.dtype.is_complex)
            name = segment.repointed() or segment.written(scalar=self._strict or always)
            if name is not None:
                raise _lost(name, "while it was released")
        self._move(UnitState.GATHERING)
        self._flight = gather([segment.outgoing() for segment in gathered], streams, fork=fork)

    def push(self) -> None:
        """Go on with a gather that has a second stage."""
        if self._flight is not None:
            self._flight.push()

    def finish_gather(self) -> None:
        """Wait for the weights and point the parameters at them."""
        assert self._flight is not None, self
        for segment in self.segments:
            segment.settle()
        self._flight.wait()
        self._flight = None
        self._move(UnitState.FULL)
        for segment in self.segments:
            segment.attach()

    def release(self, *, for_backward: bool | None = False) -> None:
        """Give the gathered memory back (replicated rows keep theirs, and only unpoint the
        parameters); see FlatBuffer.release.
        """
        self._move(UnitState.RESTING)
        self.dozing = False
        name = None
        for segment in self.segments:
            keeps_writes = segment.flat.replicated and (
                segment.master is None or segment.master_is_weight
            )
            name = name or segment.repointed() or (None if keeps_writes else segment.written())
            segment.detach()
            segment.flat.release(for_backward=for_backward)
        if name is not None:
            raise _lost(name, "while it was gathered for computing")

    def leave_views(self, tensor: torch.Tensor) -> None:
        """Where `tensor` is a view of the gathered weights, let it keep their memory; see
        [Note: views that leave] in buffer.py.
        """
        # those are guarded themselves
        if self.gives_memory_back and not isinstance(tensor, nn.Parameter):
            address = tensor.data_ptr()
            for segment in self.segments:
                segment.flat.leave(address)

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
        change such a parameter.
        """
        name = next(filter(None, (segment.repointed() for segment in self.segments)), None)
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
            segment.detach()
            segment.flat.forget_column()
            if not rests:
                segment.flat.release()
        self.depth = 0
        self.pending = 0
        self.arrived = {}
        self.forget_forwards()

    def forget_forwards(self) -> None:
        """No backward of an earlier forward can follow."""
        self.forwards = self.recomputations = 0

    @contextmanager
    def writable(self) -> Iterator[list[torch.Tensor]]:
        """Point the parameters of a FULL unit at private copies that may be edited; yields the
        copies, one flat tensor per segment.
        """
        assert self.state is UnitState.FULL, self
        copies = [segment.flat.full.clone() for segment in self.segments]
        for segment, copy in zip(self.segments, copies, strict=True):
            for parameter, view in zip(
                segment.parameters, segment.flat.views_of(copy), strict=True
            ):
                parameter.data = view
        try:
            yield copies
        finally:
            for segment in self.segments:
                segment.attach()


def _lost(name: str, when: str) -> StateError:
    return StateError(
        f"parameter {name!r} was written to {when}, and the write is lost: edit it inside"
        " engine.gathered(writeback=True)"
    )
