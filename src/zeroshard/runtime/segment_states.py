"""The table of what rests of one segment on this rank: a row for its values, one for each average,
and one for each optimizer state of each shard.

    flat buffer       |     |<------- what this rank steps ------->|    |
    "value"                 | device ......... | host, disk ...... |          one State
    an average              | device ............................. |          one tensor
    "state.exp_avg"         | a | b .. | c ... | host, disk ...... |          tensors, one Storage

Elements count from the start of the flat buffer, which is the same in every layout. A move from
one layout to another takes a kind at a time (`read`, `drop`, `write`); saves, loads and whatever
shows states take pieces of parameters.

Invariant: what is read is what is written, bit for bit; a state is not read once it is dropped.
Cost: one state of one segment on the host.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zeroshard.core.boxes import overlap
from zeroshard.core.layout import Range
from zeroshard.core.placement import STATE, VALUE
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, Tile
from zeroshard.optim.tiles import TileStates
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.weights import Weights
from zeroshard.state.state import State


@dataclass(frozen=True)
class RestingPiece:
    """Elements ``start`` to ``stop`` of one `kind` of numbers of a parameter, in the order in which
    its memory holds them, at rest on this rank, on whatever tier.
    """

    kind: str
    name: str
    parameter: nn.Parameter
    stride: tuple[int, ...]
    start: int
    stop: int
    state: State
    place: slice  # in the state

    @property
    def tensor(self) -> torch.Tensor:
        """The numbers [stop - start] of a state that lies on the device."""
        return self.state.whole[self.place]

    def borrowed(self, *, write: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Lend the numbers [stop - start]; written only inside ``Engine.states.rewriting()``."""
        return self.state.borrowed(self.place.start, self.place.stop, write=write)

    def write(self, numbers: torch.Tensor) -> None:
        """Write `numbers` [stop - start], of any dtype, here; only inside
        ``Engine.states.rewriting()``. What was there is not read.
        """
        self.state.put(self.place.start, self.place.stop, numbers)


@dataclass(frozen=True)
class Row:
    """Elements `span` of the flat buffer, in `state` from its element `first` on."""

    kind: str
    span: Range
    state: State
    first: int = 0
    of: ParamShard | None = None  # the shard of an optimizer's state


class SegmentStates:
    """The states of one segment at rest on this rank."""

    def __init__(
        self,
        segment: Segment,
        tiles: Sequence[Tile],
        sharded: ShardedOptimizer | None,
        averages: Mapping[str, list[torch.Tensor]] = MappingProxyType({}),
        number: int = 0,
    ) -> None:
        """`averages`: by kind, the tensors of a moving average (ema.py) by trained segment; this
        segment has that `number`.
        """
        self.segment = segment
        self.shards: list[ParamShard] = [shard for tile in tiles for shard in tile.shards]
        self._tiles = tiles
        self._sharded = sharded
        self._averages = averages if segment.master is not None else {}
        self._number = number

    @property
    def tile_states(self) -> TileStates | None:
        """The states of the optimizer, None without one."""
        return None if self._sharded is None else self._sharded.states

    @property
    def by_shape(self) -> Sequence[bool]:
        """Whether the optimizer steps whole parameters in their shapes, with states of any, by
        param group.
        """
        return () if self._sharded is None else self._sharded.states.by_shape

    def rows(self, kinds: Container[str] | None = None) -> Iterator[Row]:
        """Yield the rows of these `kinds`, or of all: values, averages, the optimizer's states."""
        segment = self.segment
        flat, master = segment.flat, segment.master
        stepped, span = flat.stepped, flat.rest_span if master is None else flat.stepped
        if kinds is None or VALUE in kinds:
            yield Row(VALUE, span, flat.rest if master is None else master)
        for kind, average in self._averages.items():
            if kinds is None or kind in kinds:
                yield Row(kind, stepped, State(average[self._number]))
        for shard in self.shards:
            assert self._sharded is not None, segment.key
            states = self._sharded.states
            for key in states.moments(shard):
                if kinds is None or f"{STATE}{key}" in kinds:
                    span = (stepped[0] + shard.start, stepped[0] + shard.stop)
                    yield Row(f"{STATE}{key}", span, *states.at_rest(shard, key), shard)

    def pieces(
        self, kinds: Container[str] | None = None, *, share: bool = False
    ) -> Iterator[RestingPiece]:
        """Yield what rests here of every parameter, of these `kinds` or of all.

        With `share`, of what rests on every rank only this rank's share: all ranks' pieces together
        are then every element once.
        """
        segment, flat, master = self.segment, self.segment.flat, self.segment.master
        # the rest comes from them
        by_peers = master is None and not (flat.replicated and flat.stepped == flat.rest_span)
        mine = flat.own_span if share or by_peers else flat.stepped
        of: dict[str | None, list[Row]] = {}
        for row in self.rows(kinds):
            of.setdefault(None if row.of is None else row.of.name, []).append(row)
        for piece in flat.layout.pieces_in(mine):
            begin = mine[0] + piece.shard_start
            for row in (*of.get(None, ()), *of.get(piece.name, ())):
                common = overlap((begin, begin + piece.numel), row.span)
                if common is not None:
                    low, high = (row.first + element - row.span[0] for element in common)
                    yield RestingPiece(
                        row.kind,
                        piece.name,
                        segment.parameters[piece.index],
                        flat.strides[piece.index],
                        piece.start + common[0] - begin,
                        piece.start + common[1] - begin,
                        row.state,
                        slice(low, high),
                    )

    def numbers(self) -> dict[str, dict[Range, dict[str, Any]]]:
        """Return, by parameter, the optimizer's states that are no moments, by the elements of it
        that they were kept of: all of them, but for rules of matrices or blocks.
        """
        out = dict[str, dict[Range, dict[str, Any]]]()
        for shard in self.shards:
            assert self._sharded is not None, self.segment.key
            span = (0, self.segment.flat.layout.slots[shard.piece.index].numel)
            if self.by_shape[shard.group]:
                span = (shard.piece.start, shard.piece.stop)
            out.setdefault(shard.name, {})[span] = self._sharded.states.numbers(shard)
        return out

    def set_numbers(self, numbers: Mapping[str, Mapping[Range, Mapping[str, Any]]]) -> None:
        """Give every shard its part of the optimizer's states that are no moments, by parameter and
        range.
        """
        sharded = self._sharded
        groups = enumerate(() if sharded is None else sharded.parameters)
        group_of = {id(one): index for index, group in groups for one in group}
        for shard in self.shards:
            assert sharded is not None, self.segment.key
            if any(numbers.get(shard.name, {}).values()):
                group = group_of[id(shard.parameter)]
                placed = sharded.states.placed(shard, group, numbers[shard.name])
                sharded.states.entries(shard)[shard.tensor] = placed

    def found(self) -> dict[str, tuple[torch.dtype, set[str]]]:
        """Return the kinds, the dtype of each, and the parts that have one of the optimizer's."""
        out: dict[str, tuple[torch.dtype, set[str]]] = {}
        for row in self.rows():
            _, names = out.setdefault(row.kind, (row.state.dtype, set()))
            names.update(() if row.of is None else [_part(row.of)])
        return out

    def read(self, kind: str, span: Range, dtype: torch.dtype) -> torch.Tensor:
        """Return elements `span` of the flat buffer on the host, zero where nothing rests. Raises
        StorageError.
        """
        out = torch.zeros(span[1] - span[0], dtype=dtype)
        for row in self.rows((kind,)):
            common = overlap(row.span, span)
            if common is not None:
                low, high = (row.first + element - row.span[0] for element in common)
                with row.state.borrowed(low, high, write=False) as numbers:
                    out[common[0] - span[0] : common[1] - span[0]].copy_(numbers)
        return out

    def write(self, kind: str, numbers: torch.Tensor, parts: Container[str]) -> None:
        """Let a state beside the values rest as `numbers` [what this rank steps] say, one of the
        optimizer's for these `parts` alone. Raises StorageError.
        """
        if kind in self._averages:
            here = numbers.to(self.segment.flat.full.device, copy=True)
            self._averages[kind][self._number : self._number + 1] = [here]
            return
        assert self._sharded is not None, kind
        for tile in self._tiles:
            shards = [shard for shard in tile.shards if _part(shard) in parts]
            if shards:
                found = numbers[tile.start : tile.stop]
                self._sharded.states.put(tile, kind.removeprefix(STATE), found, shards)

    def drop(self, kind: str) -> None:
        """Give the memory of a state back. An average stays until another one is written."""
        if kind == VALUE:
            for shard in self.shards:
                shard.leave_memory()
            self.segment.close()
        elif kind not in self._averages and self._sharded is not None:
            self._sharded.states.drop(self._tiles, kind.removeprefix(STATE))


def _part(shard: ParamShard) -> str:
    """Return a name of what is stepped in a shape: parts of a parameter may have other states."""
    return f"{shard.name}@{shard.piece.start}" if len(shard.shape) > 1 else shard.name


def states_at_rest(
    weights: Weights,
    sharded: ShardedOptimizer | None,
    averages: Mapping[str, list[torch.Tensor]] = MappingProxyType({}),
) -> dict[str, SegmentStates]:
    """Return what rests on this rank, by segment; `averages`: see SegmentStates."""
    out, number = dict[str, SegmentStates](), 0
    tiles: dict[str, list[Tile]] = {}
    for tile in () if sharded is None else sharded.tiles:
        tiles.setdefault(tile.segment.key, []).append(tile)
    for segment in weights.segments:
        cut = tiles.get(segment.key, ())
        out[segment.key] = SegmentStates(segment, cut, sharded, averages, number)
        number += segment.master is not None
    return out
