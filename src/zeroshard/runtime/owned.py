"""What this rank's optimizer holds of one segment: pieces of parameters, and the tiles in which
those off the device are stepped.

    share of this rank   |  piece a  |  piece b   |  piece c .....|..... piece c ....|
                         |<--- resident: on the device ---->|<- tile ->|<- tile ->|<-|

Resident pieces are stepped by the user's own ``optimizer.step()``; the others in tiles
(optim/streamed.py): because their state rests on another tier, or because their gradient does. A
cut between tiles falls on a multiple of the layout's align, so it changes no bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from zeroshard.core.layout import Piece
from zeroshard.core.placement import Cells, Tier
from zeroshard.core.split import tiles
from zeroshard.memory import placeholder
from zeroshard.optim.pieces import ParamShard
from zeroshard.optim.streamed import SteppedSegment, Tile
from zeroshard.runtime.build import Context
from zeroshard.runtime.segment import Segment

__all__ = ["own"]

# that a tile may need beside it: on disk four sets of master, gradient and two moments
_TENSORS = {Tier.DISK: 16, Tier.HOST: 4, Tier.DEVICE: 4}
_ALIGN = 1024  # elements: a tile of fp32 begins on a page


def own(segment: Segment, cells: Cells, context: Context) -> tuple[list[ParamShard], list[Tile]]:
    """Return the pieces of `segment` that this rank steps, and the tiles that hold those to be
    streamed.
    """
    path, master = segment.grad, segment.master
    assert path is not None and master is not None
    base = segment.flat.stepped[0]
    share = (
        max(context.tiering.staging_bytes // (_TENSORS[cells.optim.tier] * 4), _ALIGN)
        // _ALIGN
        * _ALIGN
    )
    near = tiles(0, segment.split, share) if path.tiered else []
    stepped = SteppedSegment(
        segment.key,
        segment.split,
        master,
        context.tiering.store(cells.optim.tier),
        path.resting,
        segment.bring,
        segment.can_bring_from_rest,
        segment.bring_from_rest,
    )
    segment.step = stepped.stepped
    owned: list[ParamShard] = []
    streamed: list[Tile] = []
    if not near and segment.split:
        owned += [
            _piece(segment, _placed(piece, 0))
            for piece in segment.flat.layout.pieces_in((base, base + segment.split))
        ]
    for start, stop in [*near, *tiles(segment.split, master.numel, share)]:
        tile = Tile(stepped, start, stop)
        for piece in segment.flat.layout.pieces_in((base + start, base + stop)):
            held = _piece(segment, _placed(piece, start))
            owned.append(held)
            tile.pieces.append((0, held, piece.shard_start))
        if tile.pieces:
            streamed.append(tile)
    return owned, streamed


def _placed(piece: Piece, start: int) -> Piece:
    """Return `piece`, found in a range that begins at `start` of the share, placed in the share."""
    return replace(piece, shard_start=piece.shard_start + start)


def _piece(segment: Segment, piece: Piece) -> ParamShard:
    path, master = segment.grad, segment.master
    assert path is not None and master is not None
    start, stop = piece.shard_start, piece.shard_stop
    on_device = stop <= segment.split and master.tensor is not None

    def is_used() -> bool:
        return path.used[piece.index]

    def grad() -> torch.Tensor | None:
        if not is_used():
            return None
        resting = path.resting()
        assert resting is not None, f"the gradient of {path.key} is used and not held"
        return resting.fetch(start, stop)

    def at_rest() -> torch.Tensor:
        assert master.tensor is not None
        return master.tensor[start:stop]

    tensor = nn.Parameter(at_rest() if on_device else placeholder((piece.numel,), master.dtype))
    parameter, stride = segment.parameters[piece.index], segment.flat.strides[piece.index]
    return ParamShard(
        piece.name,
        parameter,
        piece,
        stride,
        tensor,
        is_used,
        grad,
        path.resting,
        on_device,
        at_rest,
    )
