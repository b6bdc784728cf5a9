"""Move States from one cut to another: between the device and another tier while training.

    before   |  device          |  host         |        masters and moments between the two cuts
    after    |  device      |  host             |        cross over; shards are cut anew there

``fraction="auto"`` (runtime/step_tiles.py) decides where the cut goes; `StepTiles` puts it there.

Invariant: no number changes; cuts fall on multiples of the layout's align, so no later step changes
a bit either. Cost: one state of a segment on the host, and its master once more, while they cross;
segments on which the cut does not fall are not touched.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroshard.core.boxes import overlap
from zeroshard.core.layout import Range
from zeroshard.core.placement import Cells, Tier
from zeroshard.core.resting import balanced, splits, tiles
from zeroshard.memory import bounce_buffer, placeholder, synchronize
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, StepMethod, SteppedSegment, Tile
from zeroshard.optim.tiles import TileStates
from zeroshard.runtime.build import make_master
from zeroshard.runtime.context import Context
from zeroshard.runtime.rest import values_of
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.state.state import State, move
from zeroshard.tier.store import Link

# ------------------------------------------------------------------------------------------ balance
# ``fraction="auto"``: the share of the optimizer on the host at which host and device finish a
# step together (Offload++, Twin-Flow).
#
# It starts from what a short probe says of the link and of both memories, and from the memory that
# the device has left; then every step is measured, and the cut between the two parts
# (core/resting.py) moves to where both would have taken the same time::
#
#     step        1      2      3      4      5 ...
#     device    ======  ====   ====
#     host      ==      ====   ====                 the cut stays once a move would be less than two
#                                                   hundredths
#
# Moving the cut re-cuts pieces, masters and moments where they lie, and changes no bit. Each rank
# decides by itself: what rests where is its own affair. Cost: what crosses over is copied once;
# nothing once the cut stays.


_log = logging.getLogger("zeroshard")
_PROBE_BYTES = 4 << 20  # of a link that takes a sixty-fourth of it within a millisecond
_ADAM_BYTES = 28  # that a step of one element moves through memory: four numbers in, three out
_SETTLED = 0.02
_MOVES = 3  # at most: what is measured is never the same twice
_PATIENCE = 3  # measurements that one move takes
CHOSE = (
    "offload.fraction='auto' chose %.3f: the device's part of the step takes %.1f ms, the host's"
    " %.1f ms"
)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the least of a few timings of `action`."""
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        action()
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return max(best, 1e-9)


def first_fraction(device: torch.device, link: Link, *, least: float) -> float:
    """Return where to begin: from the bandwidths of the link and of both memories, at least
    `least`.
    """
    near = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    host = bounce_buffer(_PROBE_BYTES, torch.uint8, device).zero_()
    device_s = _seconds(lambda: near.add_(1), device) / _PROBE_BYTES * _ADAM_BYTES / 2
    host_s = _seconds(lambda: host.add_(1), torch.device("cpu")) / _PROBE_BYTES * _ADAM_BYTES / 2

    def copy_s(num_bytes: int) -> float:
        return (
            _seconds(
                lambda: link.copy(near[:num_bytes], host[:num_bytes], "to_device").wait(), device
            )
            / num_bytes
        )

    link_s = copy_s(_PROBE_BYTES // 64)
    if link_s * _PROBE_BYTES < 64e-3:
        link_s = copy_s(_PROBE_BYTES)
    link_s *= 4  # fp32 weights back
    return balanced(0.5, device_s, max(host_s, link_s), least=least)


@dataclass
class Balance:
    """The place of the cut, and the times of the steps since it moved."""

    fraction: float
    least: float = 0.0
    settled: bool = False

    def __post_init__(self) -> None:
        self._targets: list[float] = []
        self._moves = 0
        self._skip = 1  # the first step makes the moments

    def after_step(self, device_s: float, other_s: float) -> float | None:
        """Take note of a step; return the fraction to move to, if it should move."""
        if self.settled or device_s <= 0 or other_s <= 0:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._targets.append(balanced(self.fraction, device_s, other_s, least=self.least))
        if len(self._targets) < _PATIENCE:
            return None
        target, self._targets = statistics.median(self._targets), []
        if abs(target - self.fraction) < _SETTLED or self._moves == _MOVES:
            self.settled = True
            _log.info(CHOSE, self.fraction, device_s * 1e3, other_s * 1e3)
            return None
        self.fraction = target
        self._moves += 1
        self._skip = 1
        return target


# ---------------------------------------------------------------------------------------- tile cuts
# Cut what this rank steps of a segment into tiles.
#
#     share of this rank   |  shard a  |  shard b   |  shard c .....|..... shard c ....|
#                          |<--- the first `split`: device --->|<- tile ->|<- tile ->|<-|
#
# The device's part is one tile, which the user's own ``optimizer.step()`` takes, unless its
# gradient rests on another tier: then it is cut like the rest. A cut between tiles falls on a
# multiple of the layout's align, so it changes no bit. How a tile is stepped is settled here, and
# nowhere else.


# the tiers that do not step tiles where they rest, and the tensors that a tile may need beside it:
# on disk four sets of master, gradient and two moments
_WAYS, _TENSORS = {Tier.DISK: StepMethod.THROUGH_RING}, {Tier.DISK: 16}
_ALIGN = 1024  # elements: a tile of fp32 begins on a page


def cut_tiles(segment: Segment, cells: Cells, context: Context) -> list[Tile]:
    """Return the tiles of `segment` on this rank, each with at least one shard."""
    bucket, master, split = segment.grad, segment.master, segment.split
    assert bucket is not None and master is not None
    tier = cells.optim.tier
    stepped = SteppedSegment(
        segment.key,
        split,
        master,
        context.tiering.store(tier),
        bucket.accumulator,
        used=bucket.used.__getitem__,
        bring=segment.bring,
        can_bring_from_rest=segment.can_bring_from_rest,
        bring_from_rest=segment.bring_from_rest,
        stepped=segment.step,
    )
    share = max(context.tiering.staging_bytes // (_TENSORS.get(tier, 4) * 4) // _ALIGN, 1) * _ALIGN
    cuts: list[tuple[Range, StepMethod]] = []
    if bucket.accumulator.tiered:
        cuts += [(span, StepMethod.ON_DEVICE) for span in tiles(0, split, share)]
    elif split:
        cuts.append(((0, split), StepMethod.BY_USER))
    if split < master.numel:
        cuts += [
            (span, _WAYS.get(tier, StepMethod.ON_HOST))
            for span in tiles(split, master.numel, share)
        ]
    made = [_tile(segment, stepped, span, method) for span, method in cuts]
    return [tile for tile in made if tile.shards]


def _tile(segment: Segment, stepped: SteppedSegment, span: Range, method: StepMethod) -> Tile:
    base, (start, stop) = segment.flat.stepped[0], span
    master, dtype = stepped.master.tensor, stepped.master.dtype
    tile = Tile(stepped, start, stop, method)
    for found in segment.flat.layout.pieces_in((base + start, base + stop)):
        piece = replace(found, shard_start=found.shard_start + start)
        if method.off_device or master is None:
            numbers = placeholder((piece.numel,), dtype)
        else:
            numbers = master[piece.shard_start : piece.shard_stop]
        shard = ParamShard(
            piece.name,
            segment.parameters[piece.index],
            piece,
            segment.flat.strides[piece.index],
            nn.Parameter(numbers),
            stepped,
            method,
            low=found.shard_start,
            start=piece.shard_start,
            stop=piece.shard_stop,
        )
        tile.shards.append(shard)
    return tile


# ----------------------------------------------------------------------------------- segment states
# What rests of one segment on this rank, state by state: its values, the optimizer's, averages.
#
#     flat buffer       |     |<------- what this rank steps ------->|    |
#     "value"                 | device ......... | host, disk ...... |          one State
#     "state exp_avg"         | a | b .. | c ... | host, disk ...... |          tensors, one Storage
#     "average 0"             | device ............................ |          one tensor
#
# Every move of states from one layout to another takes the same steps, one state of one segment
# after another. Elements count from the start of the flat buffer, which is the same in every
# layout::
#
#     a repartition (relayout.py)            read    drop    comm/groups.py    write
#     a fraction that moves (step_tiles.py)  read    drop                         write
#
# Invariant: what is read is what is written, bit for bit; a state is not read once it is dropped.
# Cost: one state of one segment on the host.


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
        """`averages`: of each moving average (ema.py) its tensors by trained segment; this segment
        has that `number`.
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
            yield stepped, State(average[self._number]), 0
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


# --------------------------------------------------------------------------------------- step tiles


class StepTiles:
    """The tiles that one rank steps, and the cut between the device's and the others."""

    def __init__(
        self,
        units: Sequence[Unit],
        context: Context,
        cut: Sequence[list[Tile]] | None = None,
    ) -> None:
        """`cut`: the tiles of each trained segment, where they have been cut before."""
        self._trained = [(unit, segment) for unit in units for segment in unit.trainable]
        self._context = context
        self._tiles = (
            [cut_tiles(segment, unit.cells, context) for unit, segment in self._trained]
            if cut is None
            else list(cut)
        )
        beside = any(tile.method is not StepMethod.BY_USER for tile in self.all)
        tiering = context.tiering
        self.balance = (
            Balance(tiering.fractions["optimizer"], tiering.least)
            if tiering.automatic and beside
            else None
        )

    @property
    def all(self) -> list[Tile]:
        """The tiles of all segments, in unit order."""
        return [tile for tiles in self._tiles for tile in tiles]

    def after_step(self, sharded: ShardedOptimizer) -> None:
        """If the cut between device and host is chosen by times, move it to where the last steps
        say that both finish together.
        """
        balance = self.balance
        if balance is None or balance.settled:  # and the step may go on into what follows
            return
        fraction = balance.after_step(*sharded.runner.seconds)
        if fraction is None:
            return
        numels = [0 if seg.master is None else seg.master.numel for _, seg in self._trained]
        for index, split in enumerate(splits(numels, fraction)):
            unit, segment = self._trained[index]
            if split != segment.split:
                self._tiles[index] = self._moved(unit, segment, split, sharded, self._tiles[index])
        sharded.retile(self.all)

    def _moved(
        self,
        unit: Unit,
        segment: Segment,
        split: int,
        sharded: ShardedOptimizer,
        before: list[Tile],
    ) -> list[Tile]:
        """Cut a segment's optimizer state at `split`; return its new tiles, where it rests."""
        segment.wait_uploads()
        states, before_cut = SegmentStates(segment, before, sharded.states), segment.master
        segment.move_split(split, with_gradient=unit.cells.grad.tier is not Tier.DEVICE)
        master = make_master(segment, unit.cells, self._context)
        assert before_cut is not None, segment.key
        move(before_cut, master)
        before_cut.close(kept=master)
        after = cut_tiles(segment, unit.cells, self._context)
        moved = SegmentStates(segment, after, sharded.states)
        numbers = states.numbers()
        groups = {shard.name: shard.group for shard in states.shards}
        for shard in moved.shards:
            if numbers[shard.name]:
                placed = sharded.states.placed(shard, groups[shard.name], numbers[shard.name])
                sharded.optimizer.state[shard.tensor] = placed
        for name, (dtype, parameters) in states.found().items():
            if name.startswith(STATE):
                moments = states.read(name, segment.flat.stepped, dtype)
                states.drop(name)
                moved.write(name, moments, parameters)
        return after
