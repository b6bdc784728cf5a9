"""Cut what this rank steps of a segment into tiles.

    share of this rank   |  shard a  |  shard b   |  shard c .....|..... shard c ....|
                         |<--- the first `split`: device --->|<- tile ->|<- tile ->|<-|

The device's part is one tile, which the user's own ``optimizer.step()`` takes, unless its gradient
rests on another tier: then it is cut like the rest. A cut between tiles falls on a multiple of the
layout's align, so it changes no bit. How a tile is stepped is settled here, and nowhere else.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zeroshard.core.layout import Range
from zeroshard.core.placement import Cells, Tier
from zeroshard.core.split import tiles
from zeroshard.memory import placeholder
from zeroshard.optim.shards import ParamShard, StepMethod, SteppedSegment, Tile
from zeroshard.runtime.build import Context
from zeroshard.runtime.segment import Segment

# the tiers whose tiles are not stepped where they rest, and the tensors that a tile may need beside
# it: on disk four sets of master, gradient and two moments
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
        gradient=bucket.accumulator.resting,
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
