"""What rests of one segment on this rank, state by state: its values, the optimizer's, averages.

    flat buffer       |     |<------- what this rank steps ------->|    |
    "value"                 | device ......... | host, disk ...... |          one State
    "state exp_avg"         | a | b .. | c ... | host, disk ...... |          tensors, one Storage
    "average 0"             | device ............................ |          one tensor

Every move of states from one layout to another takes the same steps, one state of one segment after
another. Elements count from the start of the flat buffer, which is the same in every layout::

    a repartition (relayout.py)            read    drop    comm/hand_over.py    write
    a fraction that moves (step_tiles.py)  read    drop                         write

Invariant: what is read is what is written, bit for bit; a state is not read once it is dropped.
Cost: one state of one segment on the host.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch

from zeroshard.core.layout import Range
from zeroshard.core.overlaps import overlap
from zeroshard.optim.shards import ParamShard, Tile
from zeroshard.optim.tiles import TileStates
from zeroshard.runtime.rest import values_of
from zeroshard.runtime.segment import Segment
from zeroshard.state.state import State

VALUE, STATE, AVERAGE = "value", "state ", "average "


class SegmentStates:
    """The states of one segment at rest on this rank."""

    def __init__(
        self,
        segment: Segment,
        tiles: Sequence[Tile],
        optimizer: TileStates | None,
        averages: Sequence[list[torch.Tensor]] = (),
        number: int = 0,
    ) -> None:
        """`averages`: of each moving average (ema.py) its tensors by trained segment, of which this
        is the one with that `number`.
        """
        self.segment = segment
        self.shards: list[ParamShard] = [shard for tile in tiles for shard in tile.shards]
        self._tiles = tiles
        self._optimizer = optimizer
        self._averages = averages if segment.master is not None else ()
        self._number = number

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return, by parameter, the optimizer's states of one number."""
        states = self._optimizer
        return {} if states is None else {one.name: states.numbers(one) for one in self.shards}

    def found(self) -> dict[str, tuple[torch.dtype, set[str]]]:
        """Return the states, the dtype of each, and the parameters that have one of the
        optimizer's.
        """
        out: dict[str, tuple[torch.dtype, set[str]]] = {
            VALUE: (values_of(self.segment)[0].dtype, set())
        }
        for index, average in enumerate(self._averages):
            out[f"{AVERAGE}{index}"] = average[self._number].dtype, set()
        for shard in self.shards:
            assert self._optimizer is not None, self.segment.key
            for key, moment in self._optimizer.moments(shard).items():
                out.setdefault(f"{STATE}{key}", (moment.dtype, set()))[1].add(shard.name)
        return out

    def _held(self, name: str) -> Iterator[tuple[Range, State, int]]:
        """Yield where the numbers of a state rest: elements of the flat buffer, the State that they
        lie in, and from where on.
        """
        stepped = self.segment.flat.stepped
        if name == VALUE:
            state, span = values_of(self.segment)
            yield span, state, 0
        elif name.startswith(AVERAGE):
            average = self._averages[int(name.removeprefix(AVERAGE))]
            yield stepped, State.of(average[self._number]), 0
        else:
            key = name.removeprefix(STATE)
            assert self._optimizer is not None, name
            for shard in self.shards:
                if key in self._optimizer.of(shard):
                    span = (stepped[0] + shard.start, stepped[0] + shard.stop)
                    yield span, *self._optimizer.at_rest(shard, key)

    def read(self, name: str, span: Range, dtype: torch.dtype) -> torch.Tensor:
        """Return elements `span` of a state on the host, zero where nothing rests. Raises
        StorageError.
        """
        out = torch.zeros(span[1] - span[0], dtype=dtype)
        for held, state, first in self._held(name):
            common = overlap(held, span)
            if common is not None:
                low, high = (first + element - held[0] for element in common)
                with state.borrowed(low, high, write=False) as numbers:
                    out[common[0] - span[0] : common[1] - span[0]].copy_(numbers)
        return out

    def write(self, name: str, numbers: torch.Tensor, parameters: Container[str]) -> None:
        """Let a state beside the values rest as `numbers` [what this rank steps] say, one of the
        optimizer's for these `parameters` alone. Raises StorageError.
        """
        if name.startswith(AVERAGE):
            here = numbers.to(self.segment.flat.full.device, copy=True)
            average = self._averages[int(name.removeprefix(AVERAGE))]
            average[self._number : self._number + 1] = [here]
            return
        assert self._optimizer is not None, name
        for tile in self._tiles:
            shards = [shard for shard in tile.shards if shard.name in parameters]
            if shards:
                found = numbers[tile.start : tile.stop]
                self._optimizer.put(tile, name.removeprefix(STATE), found, shards)

    def drop(self, name: str) -> None:
        """Give the memory of a state back. An average stays until another one is written."""
        if name == VALUE:
            for shard in self.shards:
                shard.leave_memory()
            self.segment.close()
        elif name.startswith(STATE) and self._optimizer is not None:
            self._optimizer.drop(self._tiles, name.removeprefix(STATE))
