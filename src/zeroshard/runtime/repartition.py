"""Move the cut between what of the optimizer rests on the device and what on another tier, while
training.

    before   |  device          |  host         |        masters and moments between the two cuts
    after    |  device      |  host             |        cross over; pieces are cut anew there

Invariant: no number changes; cuts fall on multiples of the layout's align, so no later step changes
a bit either. Cost: one segment's state is held once more while it crosses; segments on which the
cut does not fall are not touched.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.core.placement import Cells, Tier
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, Tile
from zeroshard.runtime.build import Context, make_master
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.tiles import cut_tiles

__all__ = ["repartition"]

_TILE = 1 << 20


def repartition(
    segment: Segment,
    split: int,
    cells: Cells,
    context: Context,
    sharded: ShardedOptimizer,
    before: list[Tile],
) -> list[Tile]:
    """Cut a segment's optimizer state at `split`; return its new tiles, whose state stands in the
    optimizer as real numbers.
    """
    segment.settle()
    states = _states(sharded, [shard for tile in before for shard in tile.shards])
    old = segment.master
    assert old is not None
    segment.split = split
    if cells.grad.tier is not Tier.DEVICE and segment.grad is not None:
        segment.grad.move_rest(split)  # a gradient rests where it is read
    make_master(segment, cells, context)
    master = segment.master
    assert master is not None
    with torch.no_grad():
        for start in range(0, master.numel, _TILE):
            stop = min(start + _TILE, master.numel)
            with (
                old.borrowed(start, stop, write=False) as source,
                master.borrowed(start, stop, write=True) as target,
            ):
                target.copy_(source)
    if old.away is not None and old.away is not master.away:
        old.away.close()
    if before:
        before[0].segment.close_moments()
    tiles = cut_tiles(segment, cells, context)
    for shard in (shard for tile in tiles for shard in tile.shards):
        state = _cut(states.get(shard.piece.index, []), shard)
        if state:
            sharded.optimizer.state[shard.tensor] = state
    return tiles


def _states(
    sharded: ShardedOptimizer, pieces: list[ParamShard]
) -> dict[int, list[tuple[int, int, dict[str, Any]]]]:
    """Return copies of the state of `pieces` by parameter of the segment: (start, stop, state)."""
    out: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
    for owned in pieces:
        state = dict(sharded.optimizer.state.get(owned.tensor, {}))
        for key, rest in sharded.states.at_rest(owned).items():
            with rest.borrowed() as numbers:
                state[key] = numbers.clone()
        out.setdefault(owned.piece.index, []).append((owned.piece.start, owned.piece.stop, state))
    return out


def _cut(parts: list[tuple[int, int, dict[str, Any]]], owned: ParamShard) -> dict[str, Any]:
    """Return the state of one new piece out of those of the old pieces of its parameter."""
    mine = [part for part in parts if part[0] < owned.piece.stop and owned.piece.start < part[1]]
    if not mine or not mine[0][2]:
        return {}
    out: dict[str, Any] = {}
    for key, value in mine[0][2].items():
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            parted = [
                state[key][max(owned.piece.start - low, 0) : owned.piece.stop - low].to(
                    owned.tensor.device
                )
                for low, _, state in mine
            ]
            out[key] = torch.cat(parted)
        else:
            out[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return out
