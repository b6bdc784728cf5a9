"""Bring the states of an engine from one layout into another, between two steps: another row, other
tiers, other shares, other ranks.

    old layout     master | moments        of segment 0, then of segment 1, ...
        each rank reads its own share      every element is one rank's (core/layout.py: ranges)
        it goes to the ranks that want it  comm/groups.py
        its memory is given back
    new layout     weights, master | moments      built as shard() builds it (build.py), with these
                                                  values

The unit of transport is one state of one segment: values (the master of a trained segment, the
weights of a frozen one), then each of the optimizer's states, then each average (ema.py). A rank of
the old layout alone gives and takes nothing, one of the new layout alone takes and has nothing to
give.

Invariant: the numbers are those that a checkpoint of the old layout, loaded into the new one, would
give, bit for bit; the old memory of a state of a segment is given back before the new one is taken.
Cost: this rank's share of every state once over the wire per rank that wants it; memory for one
state of one segment, whole where it is wanted whole, and for this rank's share of it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch

from zeroshard.comm.groups import HandOver
from zeroshard.comm.levels import Transports
from zeroshard.core.layout import Layout, Range
from zeroshard.core.placement import VALUE, Cells
from zeroshard.core.values import decode, encode
from zeroshard.errors import ConfigError, StorageError
from zeroshard.memory import placeholder, placeholder_value, return_freed_memory
from zeroshard.optim.copies import KEPT_STATES, flatten, plain_tensors
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import Tile
from zeroshard.optim.tiles import is_apart
from zeroshard.runtime.build import Parts, PlannedUnits
from zeroshard.runtime.context import SegmentPlan
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.segment_states import SegmentStates, states_at_rest
from zeroshard.runtime.step_tiles import cut_tiles
from zeroshard.runtime.weights import Weights
from zeroshard.state.local import leave_hollow
from zeroshard.state.remainder import RemainderStorage
from zeroshard.state.state import State, move
from zeroshard.tier.stores import HostStore

_OFFLOADED = "the states are off the device: call engine.reload_states() on every rank first"

# ----------------------------------------------------------------------------------- offload states
# Empty the device between phases: every state to the host and back, bit for bit.
#
#     engine.offload_states()     weights, masters, moments, gradients --> host memory; nothing of
#                                 them is left on the device
#     ... another model generates, evaluates, trains ...
#     engine.reload_states()      back to where they were, the same bits
#
# Whoever needs a state in between gets a StateError that says so. Views stay views: weights and
# masters come back into the storages that they left, so that what refers to them (peers' mappings,
# views of a flat buffer) is right again; pieces, moments and gradients stand as one NaN meanwhile.
#
# Cost: the bytes at rest on the device, once each way, and as many on the host meanwhile. What
# rests on another tier already is not touched.


_PAGE = mmap.PAGESIZE


class OffloadedStates:
    """The states of one engine while they are off the device."""

    def __init__(
        self,
        weights: Weights,
        sharded: ShardedOptimizer | None,
        transports: Transports,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._sharded = sharded
        self._transports = transports
        self._store = HostStore(device)
        self._returns: list[Callable[[], object]] = []  # each brings one state back

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return self._store.account.live

    def begin(self) -> None:
        """Bring everything to the host. Collective: peers may read our memory until all have
        come here.
        """
        bring_to_rest(self._weights)
        self._transports.begin_write()
        for segment in self._weights.segments:
            resting = None if segment.bucket is None else segment.bucket.accumulator.resting()
            if resting is not None and resting.on_device:
                self._put(f"{segment.key} gradient", resting.numbers.whole, resting.replace)
        if self._sharded is not None:
            for shard in self._sharded.pieces():
                here = {} if shard.method.off_device else self._sharded.states.of(shard)
                for value in here.values():
                    for one in plain_tensors(value):
                        if one.dim() and one.numel() and 0 not in one.stride():
                            self._put(f"{shard.name} state", one, partial(setattr, one, "data"))
                shard.leave_memory()
        for segment in self._weights.segments:
            flat, master = segment.flat, segment.master
            full = None if flat.window is None else flat.window.full
            if full is not None and full.untyped_storage().resizable():
                self._put_memory(segment.key, full)
            elif flat.coded_rest is not None:
                self._put_memory(segment.key, flat.coded_rest.encoded)
            elif flat.rest.tensor is not None:
                self._put_memory(segment.key, flat.rest.tensor)
            if master is not None and master.tensor is not None and segment.aliased < master.split:
                self._put_memory(segment.key, master.tensor)
            elif master is not None and isinstance(master.away, RemainderStorage):
                self._put_memory(segment.key, master.away.low)
        self._weights.availability.pause(_OFFLOADED)

    def end(self) -> None:
        """Bring everything back. Collective."""
        for bring_back in reversed(self._returns):
            bring_back()
        if self._sharded is not None:
            for shard in self._sharded.pieces():
                shard.repoint()
        for segment in self._weights.segments:
            segment.flat.publish_everywhere()
        self._store.close()
        self._weights.availability.pause(None)
        self._weights.run(self._weights.schedule.publish())

    def _copy_out(self, name: str, tensor: torch.Tensor) -> State:
        out = State(None, self._store.allocate(name, tensor.numel(), tensor.dtype))
        move(State(tensor.detach().reshape(-1)), out)
        return out

    def _put(
        self, name: str, tensor: torch.Tensor, replace: Callable[[torch.Tensor], object]
    ) -> None:
        """Take away a tensor that the user may see: a placeholder is put in its place."""
        stride = torch.empty_like(tensor, device="meta").stride()  # of what is dense its own
        away, device = self._copy_out(name, flatten(tensor, stride)), tensor.device
        shape = tensor.shape

        def bring_back() -> None:
            out = torch.empty(away.numel, dtype=away.dtype, device=device)
            move(away, State(out))
            replace(out.as_strided(shape, stride))

        replace(placeholder(tensor.shape, tensor.dtype, device))
        self._returns.append(bring_back)

    def _put_memory(self, key: str, tensor: torch.Tensor) -> None:
        """Take away the memory of a tensor, which stays where it is: views refer to it."""
        if not tensor.numel():
            return
        away, memory = self._copy_out(key, tensor), tensor.untyped_storage()
        num_bytes = memory.nbytes()

        def bring_back() -> None:
            if memory.nbytes() < num_bytes:
                memory.resize_(num_bytes)
            move(away, State(tensor))

        memory.resize_(0) if memory.resizable() else _release_pages(tensor)
        self._returns.append(bring_back)


def bring_to_rest(weights: Weights) -> None:
    """Bring all units to rest, whatever rows they are."""
    for unit in weights.units:
        weights.bring_to_rest(unit)
        for segment in unit.segments:
            segment.flat.release_column()
            segment.wait_uploads()


def _release_pages(tensor: torch.Tensor) -> None:
    """Let the system have the whole pages of a tensor that cannot be resized, a mapping or one
    that numpy has seen: they read as zeros until they are written.
    """
    start = -(-tensor.data_ptr() // _PAGE) * _PAGE
    stop = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _PAGE * _PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    if stop > start:
        # of a shared mapping, of a private one
        advice = (getattr(mmap, "MADV_REMOVE", 9), mmap.MADV_DONTNEED)
        any(
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), how) == 0
            for how in advice
        )


# ----------------------------------------------------------------------------------------- relayout

_NOTHING = (0, 0)


@dataclass
class Facts:
    """The facts that one rank of either layout tells the others."""

    # by segment: the elements of the flat buffer that are this rank's alone, in the old layout
    held: dict[str, Range] = field(default_factory=dict)
    # by segment: the elements that rest here in the new layout, of values and of other states
    wanted: dict[str, tuple[Range, Range]] = field(default_factory=dict)
    # by segment: its states, the dtype of each, and the parts that have one of the optimizer's
    states: dict[str, dict[str, tuple[str, list[str]]]] = field(default_factory=dict)
    # by parameter: ranges of it with the optimizer's states that are no moments, `_number` of each
    numbers: dict[str, list[tuple[Range, dict[str, Any]]]] = field(default_factory=dict)


def facts_of(segments: Mapping[str, SegmentStates]) -> Facts:
    """Return what rests in `segments`. Raises ConfigError for a state that cannot be cut."""
    facts = Facts()
    for key, states in segments.items():
        facts.held[key] = states.segment.flat.own_span
        facts.states[key] = {
            name: (_name(dtype), sorted(parameters))
            for name, (dtype, parameters) in states.found().items()
        }
        for parameter, by_range in states.numbers().items():
            for span, numbers in by_range.items():
                found = dict[str, Any]()
                facts.numbers.setdefault(parameter, []).append((span, found))
                for name, value in numbers.items():
                    what = f"optimizer state {name!r} of {parameter!r}"
                    if any(states.by_shape) and is_apart(value):
                        encoded, tensors = _taken_apart(value, what)
                        kinds = [[_name(t.dtype), list(t.shape), t.device.type] for t in tensors]
                        found[name] = {"value": encoded, "tensors": kinds}
                    else:
                        found[name] = _number(value, what)
    return facts


def release_parameters(parts: Parts) -> None:
    """Let another layout take over the parameters, which hold no memory until then and are of the
    dtypes and strides that shard() found. They answer as released ones, and the old hooks stay:
    these refuse a use of them or of the module, for good where the move does not come to its end.
    """
    for segment in parts.weights.segments:
        members = zip(segment.parameters, segment.flat.strides, segment.given, strict=True)
        segment.user_view.answer(released=True)
        for parameter, stride, dtype in members:
            leave_hollow(parameter, stride, dtype)


class Move:
    """The states of all segments on their way from an old layout to a new one, in one order on
    every rank. On a rank of the new layout it is the Source (build.py) of that.
    """

    def __init__(
        self,
        hand_over: HandOver,
        parts: Parts,
        averages: Mapping[str, list[torch.Tensor]],
        *,
        has_states: bool,
    ) -> None:
        """`parts`: of this rank's engine, in which (`has_states`) the old layout rests;
        `averages`: see SegmentStates.
        """
        self.error: StorageError | None = None  # the first read that has failed
        self.cut: list[list[Tile]] = []  # by trained segment of the new layout
        self._hand_over = hand_over
        self._parts = parts
        self._sharded = parts.sharded  # the tie to the optimizer, if there is one
        self._averages = averages
        self._segments = (
            states_at_rest(parts.weights, parts.sharded, averages) if has_states else {}
        )
        self._all_facts: Sequence[Facts] = ()  # by rank
        # as in Facts, of all ranks together
        self._states: dict[str, dict[str, tuple[torch.dtype, set[str]]]] = {}
        self._numbers: dict[str, dict[Range, dict[str, Any]]] = {}
        # and other shapes: by name "value" as JSON, and dtype, shape, device of its "tensors"
        self._apart: dict[str, dict[Range, dict[str, Any]]] = {}

    def facts(self, planned: PlannedUnits | None) -> Facts:
        """Return what rests here, and what is to rest here as `planned`. Raises ConfigError for a
        state that cannot be cut.
        """
        facts = facts_of(self._segments)
        for plan in () if planned is None else chain.from_iterable(planned.segments):
            layout, rank, cells = plan.layout, plan.rank, plan.cells
            values, stepped = layout.span(rank, layout.scope(cells.weight)), _NOTHING
            if plan.trainable and self._sharded is not None:
                stepped = layout.span(rank, layout.scope(cells.optim))
                values = (min(values[0], stepped[0]), max(values[1], stepped[1]))
            facts.wanted[plan.key] = (values, stepped)
        return facts

    def begin(self, all_facts: Sequence[Facts]) -> None:
        """Bring the old layout to rest, and wait until no rank reads another's memory; `all_facts`:
        each rank's facts. Collective over the old layout.
        """
        self._all_facts = all_facts
        for facts in all_facts:
            for key, states in facts.states.items():
                known = self._states.setdefault(key, {})
                for state, (dtype, parameters) in states.items():
                    known.setdefault(state, (getattr(torch, dtype), set()))[1].update(parameters)
            for name, by_range in facts.numbers.items():
                for (start, stop), numbers in by_range:
                    span = (start, stop)
                    if not self._numbers.setdefault(name, {}).get(span):
                        device = self._parts.context.device
                        self._numbers[name][span] = {
                            key: _tensor(device, *number)
                            for key, number in numbers.items()
                            if not isinstance(number, dict)
                        }
                    apart = {key: one for key, one in numbers.items() if isinstance(one, dict)}
                    if apart:
                        self._apart.setdefault(name, {})[span] = apart
        if self._segments:
            parts = self._parts
            parts.backward.abandon()
            bring_to_rest(parts.weights)
            parts.context.transports.begin_write()
            parts.context.memory.release_idle()

    def end(self, *, stays: bool) -> None:
        """Everything has left the old layout: close what it rested in. A rank that does not stay
        keeps nothing.
        """
        if self._segments:
            if not stays:
                for average in self._averages.values():
                    average.clear()
                if self._sharded is not None:
                    self._sharded.leave()
            self._parts.context.close()
            self._parts.context.memory.release_idle()

    def _bring(self, key: str, kind: str, numel: int) -> torch.Tensor:
        """Move a state of a segment: read this rank's own share, give back the memory in which it
        rested, and send it. Return its buffer [numel] on the host with everything that this rank
        wants of it, zero elsewhere. Collective.
        """
        dtype, _ = self._states[key][kind]
        mine = torch.empty(0, dtype=dtype)
        if self._segments:
            states = self._segments[key]
            start, stop = own = states.segment.flat.own_span
            try:
                mine = states.read(kind, own, dtype)
            except StorageError as error:
                self.error = self.error or error
                mine = torch.full((stop - start,), placeholder_value(dtype), dtype=dtype)
            states.drop(kind)
            return_freed_memory()  # of this state, and of what the one before has travelled in
        held = [facts.held.get(key, _NOTHING) for facts in self._all_facts]
        spans = [facts.wanted.get(key, (_NOTHING, _NOTHING)) for facts in self._all_facts]
        out = torch.zeros(numel, dtype=dtype)
        self._hand_over.move(held, [span[kind != VALUE] for span in spans], mine, out)
        return out

    def _bring_apart(self, key: str, layout: Layout) -> dict[str, dict[Range, dict[str, Any]]]:
        """Move the optimizer's states of other shapes of a segment, as bytes and a parameter, or a
        part, at a time, from the rank that owns it to those that will own some of it. Return, by
        parameter and range, what this rank wants: numbers beside them. Collective.
        """
        found, here = dict[str, dict[Range, dict[str, Any]]](), self._hand_over.rank
        held = [facts.held.get(key, _NOTHING) for facts in self._all_facts]
        wanted = [facts.wanted.get(key, (_NOTHING, _NOTHING))[1] for facts in self._all_facts]
        for slot in layout.slots:
            numbers = self._numbers.get(slot.name, {})
            found[slot.name] = {span: dict(of_part) for span, of_part in numbers.items()}
            for (start, stop), apart in sorted(self._apart.get(slot.name, {}).items()):
                begin, end = slot.offset + start, slot.offset + stop
                gives = [low <= begin < high for low, high in held]
                takes = [max(low, begin) < min(high, end) for low, high in wanted]
                mine = list[torch.Tensor]()  # bytes
                for shard in self._segments[key].shards if self._segments else ():
                    if shard.name == slot.name and shard.piece.start == start:
                        assert self._sharded is not None, key
                        state = self._sharded.states.numbers(shard)
                        for name in apart if gives[here] else ():
                            mine += map(_as_bytes, _taken_apart(state[name], name)[1])
                        for name in apart:
                            del self._sharded.states.of(shard)[name], state[name]
                kinds = [kind for each in apart.values() for kind in each["tensors"]]
                sizes = [prod(shape) * getattr(torch, dtype).itemsize for dtype, shape, _ in kinds]
                total = sum(sizes)
                out = torch.empty(total * takes[here], dtype=torch.uint8)
                given, taken = ([(0, total * one) for one in ranks] for ranks in (gives, takes))
                self._hand_over.move(given, taken, torch.cat(mine) if mine else out[:0], out)
                blocks = iter(torch.split(out, sizes) if takes[here] else ())
                for name, each in apart.items() if takes[here] else ():
                    tensors = {
                        str(index): self._placed(next(blocks), *kind)
                        for index, kind in enumerate(each["tensors"])
                    }
                    found[slot.name][start, stop][name] = decode(each["value"], tensors.__getitem__)
        return found

    def _placed(
        self, block: torch.Tensor, dtype: str, shape: list[int], kept_on: str
    ) -> torch.Tensor:
        """Return the tensor that has the bytes in `block`."""
        place = torch.device("cpu") if kept_on == "cpu" else self._parts.context.device
        return block.clone().view(getattr(torch, dtype)).view(shape).to(place)

    def give_all(self) -> None:
        """Move everything without a part in the new layout. Collective."""
        for key, kinds in self._states.items():
            self._bring(key, VALUE, 0)
            self._bring_apart(key, self._segments[key].segment.flat.layout)
            for kind in sorted(kinds.keys() - {VALUE}):
                self._bring(key, kind, 0)

    def values(self, plan: SegmentPlan) -> Sequence[torch.Tensor]:
        out = self._bring(plan.key, VALUE, plan.layout.numel)
        return [
            out.as_strided(slot.shape, stride, slot.offset)
            for slot, stride in zip(plan.layout.slots, plan.strides, strict=True)
        ]

    def built(self, segment: Segment, cells: Cells) -> None:
        flat, tiles = segment.flat, list[Tile]()
        if segment.master is not None and self._sharded is not None:
            whole = self._sharded.states.whole
            tiles = cut_tiles(segment, cells, flat.context, whole=whole)
            self.cut.append(tiles)
        here = SegmentStates(segment, tiles, self._sharded, self._averages, len(self.cut) - 1)
        here.set_numbers(self._bring_apart(segment.key, flat.layout))
        kinds = self._states[segment.key]
        for kind in sorted(kinds.keys() - {VALUE}):
            numbers = self._bring(segment.key, kind, flat.layout.numel)[slice(*flat.stepped)]
            with flat.context.faults.noted(lost=True):
                here.write(kind, numbers, kinds[kind][1])
            del numbers  # the host holds nothing of it when the next one comes


def _tensor(where: torch.device, value: Any, dtype: str = "", kept_on: str = "cpu") -> Any:
    """Return what `_number` has made JSON of; it was kept on a device of type `kept_on`."""
    if not dtype:
        return value
    place = where if kept_on != "cpu" else torch.device("cpu")
    return torch.tensor(value, dtype=getattr(torch, dtype), device=place)


def _taken_apart(value: object, what: str) -> tuple[Any, list[torch.Tensor]]:
    """Return a state as JSON, and the tensors in it, to which the JSON refers by their index."""
    tensors = list[torch.Tensor]()

    def store(path: str, tensor: torch.Tensor) -> str:
        tensors.append(tensor.detach())
        return str(len(tensors) - 1)

    return encode(value, what, store), tensors


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _number(value: object, what: str) -> list[Any]:
    """Return a number of the optimizer's as JSON. Raises ConfigError, saying `what` it is, for
    another object.
    """
    if isinstance(value, torch.Tensor) and value.dim():
        raise ConfigError(
            f"{what} has shape {list(value.shape)}, not the parameter's, and cannot be cut"
            f" anew: {KEPT_STATES}"
        )
    if isinstance(value, torch.Tensor):
        return [value.item(), _name(value.dtype), value.device.type]
    if value is None or isinstance(value, (bool, int, float, str)):
        return [value]
    raise ConfigError(
        f"{what} is a {type(value).__name__}, neither a tensor nor a number: it cannot be given to"
        " other ranks"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
