"""The tiles that this rank steps, and the cut between those of the device and the host, which moves
where ``fraction="auto"`` finds a better place (Offload++, Twin-Flow).

    before   |  device          |  host         |        masters and moments between the two cuts
    after    |  device      |  host             |        cross over; shards are cut anew there

Each rank decides by itself. Invariant: no number changes; cuts fall on multiples of the layout's
align, so no later step changes a bit either. Cost: one state of a segment on the host, and its
master once more, while they cross; segments on which the cut does not fall are not touched.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zeroshard.core.boxes import dense_stride
from zeroshard.core.layout import Range
from zeroshard.core.placement import VALUE, Cells, Tier
from zeroshard.core.resting import balanced, splits
from zeroshard.core.shares import WholeParameters, whole_tiles
from zeroshard.memory import bounce_buffer, placeholder, synchronize
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, StepMethod, SteppedSegment, Tile
from zeroshard.runtime.build import make_master
from zeroshard.runtime.context import Context
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.segment_states import SegmentStates
from zeroshard.runtime.unit import Unit
from zeroshard.state.state import move
from zeroshard.tier.store import Link

# ------------------------------------------------------------------------------------------ balance
# It starts from what a short probe says of the link and of both memories, and from the memory that
# the device has left; then every step is measured, and the cut moves to where host and device would
# have taken the same time::
#
#     step        1      2      3      4      5 ...
#     device    ======  ====   ====
#     host      ==      ====   ====                 the cut stays once a move would be less than two
#                                                   hundredths


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
# multiple of the layout's align, so it changes no bit; with a rule that goes by parameters, at the
# end of one. How a tile is stepped is settled here, and nowhere else.


# the tiers that do not step tiles where they rest, and the tensors that a tile may need beside it:
# on disk four sets of master, gradient and two moments
_WAYS, TILE_TENSORS = {Tier.DISK: StepMethod.THROUGH_RING}, {Tier.DISK: 16}
_ALIGN = 1024  # elements: a tile of fp32 begins on a page


def cut_tiles(segment: Segment, cells: Cells, context: Context, *, whole: bool) -> list[Tile]:
    """Return the tiles of `segment` on this rank, each with at least one shard. `whole`: none cuts
    a parameter, and one that is larger than a tile makes a larger tile.
    """
    bucket, master, split = segment.bucket, segment.master, segment.split
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
    tensors = TILE_TENSORS.get(tier, 4)
    share = max(context.tiering.staging_bytes // (tensors * 4) // _ALIGN, 1) * _ALIGN
    shares = context.options.shares if whole else None
    assert shares is None or isinstance(shares, WholeParameters), shares
    uncut = shares.uncut(segment.flat.stepped, segment.flat.layout) if shares else []
    cuts: list[tuple[Range, StepMethod]] = []
    if bucket.precision.decodes:
        cuts += [(span, StepMethod.DECODED) for span in whole_tiles(0, split, share, uncut)]
    elif bucket.accumulator.tiered:
        cuts += [(span, StepMethod.ON_DEVICE) for span in whole_tiles(0, split, share, uncut)]
    elif split:
        cuts.append(((0, split), StepMethod.BY_USER))
    cuts += [
        (span, _WAYS.get(tier, StepMethod.ON_HOST))
        for span in whole_tiles(split, master.numel, share, uncut)
    ]
    base, made = segment.flat.stepped[0], list[Tile]()
    for (start, stop), method in cuts:
        tile = Tile(stepped, start, stop, method)
        for found in segment.flat.layout.pieces_in((base + start, base + stop)):
            slot, stride = segment.flat.layout.slots[found.index], segment.flat.strides[found.index]
            for part, shape in shares.stepped(found, slot) if shares else [(found, (found.numel,))]:
                sizes = (*(1,) * (len(slot.shape) - len(shape)), *shape)
                dense = dense_stride(stride, slot.shape, sizes)[-len(shape) :]
                piece = replace(part, shard_start=part.shard_start + start)
                if method.off_device or master.tensor is None:
                    where = segment.flat.full.device if segment.writes_weights else "cpu"
                    numbers = placeholder((piece.numel,), master.dtype, where)
                else:
                    numbers = master.tensor[piece.shard_start : piece.shard_stop]
                shard = ParamShard(
                    piece.name,
                    segment.parameters[piece.index],
                    piece,
                    stride,
                    shape,
                    stride if shape == slot.shape else dense or (1,),
                    nn.Parameter(numbers),
                    stepped,
                    method,
                    low=part.shard_start,
                    start=piece.shard_start,
                    stop=piece.shard_stop,
                )
                tile.shards.append(shard)
        if tile.shards:
            made.append(tile)
    return made


# --------------------------------------------------------------------------------------- step tiles


class StepTiles:
    """The tiles that one rank steps, and the cut between the device's and the others."""

    def __init__(
        self,
        units: Sequence[Unit],
        context: Context,
        cut: Sequence[list[Tile]] | None = None,
        *,
        whole: bool,
    ) -> None:
        """`cut`: the tiles of each trained segment, where they have been cut before; `whole`: none
        of them cuts a parameter.
        """
        self._trained = [(unit, segment) for unit in units for segment in unit.trainable]
        self._context = context
        self._whole = whole
        self._tiles = (
            [cut_tiles(seg, unit.cells, context, whole=whole) for unit, seg in self._trained]
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
        shares = self._context.options.shares
        for index, split in enumerate(splits(numels, fraction)):
            flat = self._trained[index][1].flat
            if isinstance(shares, WholeParameters):
                split = shares.nearest(split, flat.stepped, flat.layout)
            if split != self._trained[index][1].split:
                self._move(index, split, sharded)
        sharded.retile(self.all)

    def _move(self, index: int, split: int, sharded: ShardedOptimizer) -> None:
        """Cut the optimizer state of a trained segment at `split`."""
        (unit, segment), old = self._trained[index], self._trained[index][1].master
        assert old is not None, segment.key
        segment.wait_uploads()
        before = SegmentStates(segment, self._tiles[index], sharded)
        segment.move_split(split, with_gradient=unit.cells.grad.tier is not Tier.DEVICE)
        master = make_master(segment, unit.cells, self._context)
        move(old, master)
        old.close(kept=master)
        self._tiles[index] = cut_tiles(segment, unit.cells, self._context, whole=self._whole)
        after = SegmentStates(segment, self._tiles[index], sharded)
        after.set_numbers(before.numbers())
        for kind, (dtype, parts) in before.found().items():
            if kind != VALUE:
                numbers = before.read(kind, segment.flat.stepped, dtype)
                before.drop(kind)
                after.write(kind, numbers, parts)
