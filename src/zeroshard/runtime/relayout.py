"""Bring the states of an engine from one layout into another, between two steps: another row, other
tiers, other shares, other ranks.

    old layout     master | moments        of segment 0, then of segment 1, ...
        each rank reads its own share      every element is one rank's (core/layout.py: ranges)
        it goes to the ranks that want it  comm/hand_over.py
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

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from zeroshard.comm.hand_over import HandOver
from zeroshard.core.layout import Range
from zeroshard.core.overlaps import overlap
from zeroshard.core.placement import Cells
from zeroshard.errors import ConfigError, StorageError
from zeroshard.memory import placeholder_value
from zeroshard.optim.copies import state_after_trial
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, Tile
from zeroshard.runtime.build import PlannedUnits
from zeroshard.runtime.context import Context, SegmentPlan
from zeroshard.runtime.offload_states import bring_to_rest
from zeroshard.runtime.parts import Parts
from zeroshard.runtime.released import restore_classes
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.tile_cuts import cut_tiles
from zeroshard.state.local import leave_hollow

__all__ = ["Arrival", "Departure", "Facts", "StateTransfer", "let_go", "wanted"]

VALUE, STATE, AVERAGE = "value", "state ", "average "
_NOTHING = (0, 0)


@dataclass
class Facts:
    """What one rank of either layout tells the others."""

    # by segment: the elements of the flat buffer that are this rank's alone, in the old layout
    held: dict[str, Range] = field(default_factory=dict)
    # by segment: the elements that rest here in the new layout, of values and of other states
    wanted: dict[str, tuple[Range, Range]] = field(default_factory=dict)
    # by segment: its states, and the dtype of each
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    # by parameter: the names of the optimizer's states of its size, and those of one number
    moments: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


def wanted(planned: PlannedUnits, *, trains: bool) -> dict[str, tuple[Range, Range]]:
    """Return, by segment, the elements of values and of other states that will rest here."""
    out = {}
    for plan in (plan for group in planned.segments for plan in group):
        layout, rank = plan.layout, plan.rank
        weight = layout.span(rank, layout.scope(plan.cells.weight))
        if not plan.trainable:
            out[plan.key] = (weight, _NOTHING)
            continue
        stepped = layout.span(rank, layout.scope(plan.cells.optim))
        values = (min(weight[0], stepped[0]), max(weight[1], stepped[1])) if trains else weight
        out[plan.key] = (values, stepped if trains else _NOTHING)
    return out


class Departure:
    """What rests on this rank in the old layout, and leaves it state by state."""

    def __init__(self, parts: Parts, averages: Sequence[list[torch.Tensor]]) -> None:
        """`averages`: of each moving average, its tensors by segment (ema.py)."""
        self.error: StorageError | None = None  # the first read that has failed
        self._parts = parts
        self._averages = averages
        self._segments = {s.key: s for unit in parts.weights.units for s in unit.segments}
        self._tiles: dict[str, list[Tile]] = {key: [] for key in self._segments}
        for tile in () if parts.sharded is None else parts.sharded.tiles:
            self._tiles[tile.segment.key].append(tile)
        with_master = [key for key, one in self._segments.items() if one.master is not None]
        self._numbers = {key: number for number, key in enumerate(with_master)}

    def facts(self) -> Facts:
        """Return what rests here. Raises ConfigError for a state that cannot be cut."""
        facts = Facts()
        for key, segment in self._segments.items():
            facts.held[key] = segment.flat.own_span
            states = facts.states[key] = {}
            source = segment.flat.rest if segment.master is None else segment.master
            states[VALUE] = _name(source.dtype)
            for shard in self._shards(key):
                self._add_states(shard, states, facts)
            for number, average in enumerate(self._averages if key in self._numbers else ()):
                states[f"{AVERAGE}{number}"] = _name(average[self._numbers[key]].dtype)
        return facts

    def _add_states(self, shard: ParamShard, states: dict[str, str], facts: Facts) -> None:
        assert self._parts.sharded is not None
        moments = facts.moments.setdefault(shard.name, [])
        numbers = facts.numbers.setdefault(shard.name, {})
        for key, value in self._parts.sharded.states.of(shard).items():
            where = f"optimizer state {key!r} of {shard.name!r}"
            if isinstance(value, torch.Tensor) and value.dim():
                if value.shape != shard.tensor.shape:
                    raise ConfigError(
                        f"{where} has shape {list(value.shape)}, not that of the parameter: it"
                        " cannot be cut anew"
                    )
                states[f"{STATE}{key}"] = _name(value.dtype)
                if key not in moments:
                    moments.append(key)
            elif isinstance(value, torch.Tensor):
                numbers[key] = [value.item(), _name(value.dtype), value.device.type]
            elif value is None or isinstance(value, (bool, int, float, str)):
                numbers[key] = [value]
            else:
                raise ConfigError(
                    f"{where} is a {type(value).__name__}, neither a tensor nor a number: it cannot"
                    " be given to other ranks"
                )

    def _shards(self, key: str) -> Iterator[ParamShard]:
        return (shard for tile in self._tiles[key] for shard in tile.shards)

    def begin(self) -> None:
        """Bring everything to rest, and wait until no rank reads another's memory. Collective over
        the old layout.
        """
        parts = self._parts
        parts.backward.abandon()
        for unit in parts.weights.units:
            bring_to_rest(unit, parts.weights)
        parts.context.transports.begin_write()
        parts.context.memory.release_idle()

    def read(self, key: str, state: str, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's own share of a state of a segment, on the host."""
        segment = self._segments[key]
        start, stop = segment.flat.own_span
        try:
            if state == VALUE:
                return self._read_values(segment)
            if state.startswith(AVERAGE):
                average = self._averages[int(state.removeprefix(AVERAGE))][self._numbers[key]]
                base = segment.flat.stepped[0]
                return average[start - base : stop - base].cpu()
            out = torch.zeros(stop - start, dtype=dtype)
            self._read_moments(segment, state.removeprefix(STATE), out)
            return out
        except StorageError as error:
            self.error = self.error or error
            return torch.full((stop - start,), placeholder_value(dtype), dtype=dtype)

    def _read_values(self, segment: Segment) -> torch.Tensor:
        flat, (start, stop) = segment.flat, segment.flat.own_span
        source, base = (
            (flat.rest, flat.rest_span[0])
            if segment.master is None
            else (segment.master, flat.stepped[0])
        )
        out = torch.empty(stop - start, dtype=source.dtype)
        if start < stop:
            with source.borrowed(start - base, stop - base, write=False) as numbers:
                out.copy_(numbers)
        return out

    def _read_moments(self, segment: Segment, key: str, out: torch.Tensor) -> None:
        assert self._parts.sharded is not None
        states, own, base = self._parts.sharded.states, segment.flat.own_span, segment.flat.stepped
        for shard in self._shards(segment.key):
            common = overlap(own, (base[0] + shard.start, base[0] + shard.stop))
            if common is None or key not in states.of(shard):
                continue
            first = shard.piece.start - shard.start - base[0]  # from the buffer to the parameter
            target = out[common[0] - own[0] : common[1] - own[0]]
            numbers = states.numbers(shard, key, common[0] + first, common[1] + first)
            if isinstance(numbers, torch.Tensor):
                target.copy_(numbers)
                continue
            with numbers() as lent:
                target.copy_(lent)

    def drop(self, key: str, state: str) -> None:
        """Give the memory of a state of a segment back: every rank has what it wants of it."""
        if state == VALUE:
            for shard in self._shards(key):
                shard.leave_memory()
            self._segments[key].close()
        elif state.startswith(STATE) and self._parts.sharded is not None:
            tiles = self._tiles[key]
            self._parts.sharded.states.drop(tiles, state.removeprefix(STATE))

    def end(self, *, stays: bool) -> None:
        """Everything has left: close what it rested in. A rank that does not stay keeps nothing."""
        parts = self._parts
        if not stays:
            for average in self._averages:
                average.clear()
            if parts.sharded is not None:
                parts.sharded.leave()
        parts.context.close()
        parts.context.memory.release_idle()

    def forget(self, key: str) -> None:
        """The optimizer knows the old shards of a segment no longer."""
        if self._parts.sharded is not None:
            for shard in self._shards(key):
                self._parts.sharded.optimizer.state.pop(shard.tensor, None)


def let_go(parts: Parts) -> None:
    """Let another layout take over the parameters, which hold no memory until then and are of the
    dtypes and strides that shard() found. The old hooks stay: where the move does not come to its
    end they refuse a use of the module.
    """
    for segment in (segment for unit in parts.weights.units for segment in unit.segments):
        members = zip(segment.parameters, segment.flat.strides, segment.given, strict=True)
        for parameter, stride, dtype in members:
            restore_classes((parameter,))
            leave_hollow(parameter, stride, dtype)


class StateTransfer:
    """The states of all segments on their way, in one order on every rank."""

    def __init__(
        self, hand_over: HandOver, told: Sequence[Facts], departure: Departure | None
    ) -> None:
        """`told` by rank; `departure`: of a rank of the old layout."""
        self._hand_over = hand_over
        self._told = told
        self._departure = departure
        self._states: dict[str, dict[str, torch.dtype]] = {}
        self.moments: dict[str, list[str]] = {}  # by parameter: the optimizer's states of its size
        self.numbers: dict[str, dict[str, Any]] = {}  # and those of one number
        for facts in told:
            for key, states in facts.states.items():
                known = self._states.setdefault(key, {})
                known.update({name: getattr(torch, dtype) for name, dtype in states.items()})
            for name in facts.moments:
                if not self.moments.get(name):
                    self.moments[name] = facts.moments[name]
                if not self.numbers.get(name):
                    self.numbers[name] = facts.numbers[name]

    def states(self, key: str) -> list[str]:
        """Return the states of a segment beside its values, in the order in which they travel."""
        return sorted(state for state in self._states[key] if state != VALUE)

    def bring(self, key: str, state: str, numel: int) -> torch.Tensor:
        """Move a state of a segment; return its buffer [numel] on the host with everything that
        this rank wants of it, zero elsewhere. Collective.
        """
        dtype = self._states[key][state]
        held = [facts.held.get(key, _NOTHING) for facts in self._told]
        spans = [facts.wanted.get(key, (_NOTHING, _NOTHING)) for facts in self._told]
        wanted = [span[state != VALUE] for span in spans]
        mine = torch.empty(0, dtype=dtype)
        if self._departure is not None:
            mine = self._departure.read(key, state, dtype)
            self._departure.drop(key, state)
        out = torch.zeros(numel, dtype=dtype)
        self._hand_over.move(held, wanted, mine, out)
        return out

    def give_all(self) -> None:
        """Move everything without a part in the new layout. Collective."""
        for key in self._states:
            for state in (VALUE, *self.states(key)):
                self.bring(key, state, 0)


class Arrival:
    """The Source (build.py) of a new layout: numbers of an old one."""

    def __init__(
        self,
        transfer: StateTransfer,
        context: Context,
        departure: Departure | None,
        sharded: ShardedOptimizer | None,
        averages: Sequence[list[torch.Tensor]],
    ) -> None:
        """`sharded`: the tie to the optimizer, if there is one; `averages`: see Departure."""
        self.cut: list[list[Tile]] = []  # by trained segment
        self._transfer = transfer
        self._context = context
        self._departure = departure
        self._sharded = sharded
        self._averages = averages
        self._trials: dict[int, dict[str, Any]] = {}  # by param group

    def values(self, plan: SegmentPlan) -> Sequence[torch.Tensor]:
        out = self._transfer.bring(plan.key, VALUE, plan.layout.numel)
        return [
            out.as_strided(slot.shape, stride, slot.offset)
            for slot, stride in zip(plan.layout.slots, plan.strides, strict=True)
        ]

    def built(self, segment: Segment, cells: Cells) -> None:
        tiles: list[Tile] = []
        if segment.master is not None and self._sharded is not None:
            tiles = cut_tiles(segment, cells, self._context)
            self.cut.append(tiles)
            self._set_numbers(tiles)
        for state in self._transfer.states(segment.key):
            out = self._transfer.bring(segment.key, state, segment.flat.layout.numel)
            if state.startswith(AVERAGE):
                self._set_average(segment, int(state.removeprefix(AVERAGE)), out)
            else:
                self._set_moments(segment, tiles, state.removeprefix(STATE), out)
        if self._departure is not None:
            self._departure.forget(segment.key)

    def _set_average(self, segment: Segment, number: int, whole: torch.Tensor) -> None:
        assert segment.master is not None
        average, index = self._averages[number], len(self.cut) - 1
        here = whole[slice(*segment.flat.stepped)].to(segment.flat.full.device, copy=True)
        average[index:] = [here, *average[index + 1 :]]

    def _set_numbers(self, tiles: Sequence[Tile]) -> None:
        assert self._sharded is not None
        optimizer = self._sharded.optimizer
        for shard in (shard for tile in tiles for shard in tile.shards):
            found = self._transfer.numbers.get(shard.name)
            if found:
                optimizer.state[shard.tensor] = {
                    key: self._placed(shard, key, *number) for key, number in found.items()
                }

    def _placed(
        self, shard: ParamShard, key: str, value: Any, dtype: str = "", kept_on: str = "cpu"
    ) -> Any:
        """Return a number of the optimizer's, as it keeps it of a shard where that rests."""
        if not dtype:
            return value
        where = shard.tensor.device
        if where.type == "cpu":
            return torch.tensor(value, dtype=getattr(torch, dtype))
        kept = self._trial(shard).get(key)
        place = where if kept_on != "cpu" else torch.device("cpu")
        return torch.tensor(
            value,
            dtype=getattr(torch, dtype),
            device=kept.device if isinstance(kept, torch.Tensor) else place,
        )

    def _trial(self, shard: ParamShard) -> dict[str, Any]:
        """Return the state that the optimizer keeps of a tensor like a shard."""
        assert self._sharded is not None
        groups = self._sharded.parameters
        index = next(
            index
            for index, members in enumerate(groups)
            if any(parameter is shard.parameter for parameter in members)
        )
        if index not in self._trials:
            optimizer, tensor = self._sharded.optimizer, shard.tensor
            group = {k: v for k, v in optimizer.param_groups[index].items() if k != "params"}
            self._trials[index] = state_after_trial(optimizer, group, tensor.dtype, tensor.device)
        return self._trials[index]

    def _set_moments(
        self, segment: Segment, tiles: Sequence[Tile], key: str, whole: torch.Tensor
    ) -> None:
        assert self._sharded is not None
        base = segment.flat.stepped[0]
        for tile in tiles:
            with_state = [
                one for one in tile.shards if key in self._transfer.moments.get(one.name, ())
            ]
            if with_state:
                numbers = whole[base + tile.start : base + tile.stop]
                with self._context.faults.noted(lost=True):
                    self._sharded.states.put(tile, key, numbers, with_state)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
