"""Move States from one cut to another: between the device and another tier while training.

    before   |  device          |  host         |        masters and moments between the two cuts
    after    |  device      |  host             |        cross over; shards are cut anew there

``fraction="auto"`` (runtime/balance.py) decides where the cut goes; `StepTiles` puts it there.

Invariant: no number changes; cuts fall on multiples of the layout's align, so no later step changes
a bit either. Cost: one segment's state is held once more while it crosses; segments on which the
cut does not fall are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from zeroshard.core.overlaps import overlaps
from zeroshard.core.placement import Tier
from zeroshard.core.split import splits
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, Taken, Tile
from zeroshard.optim.tiles import TileStates
from zeroshard.runtime.balance import Balance
from zeroshard.runtime.build import Context, make_master
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.tile_cuts import cut_tiles
from zeroshard.runtime.unit import Unit
from zeroshard.state.state import move

__all__ = ["StepTiles"]


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
        beside = any(tile.taken is not Taken.BY_USER for tile in self.all)
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
        """Where the cut between device and host is chosen by times, move it to where the last steps
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
        """Cut a segment's optimizer state at `split`; return its new tiles, whose state stands in
        the optimizer as real numbers.
        """
        segment.wait_uploads()
        old = segment.master
        segment.recut(split, with_gradient=unit.cells.grad.tier is not Tier.DEVICE)
        make_master(segment, unit.cells, self._context)
        master = segment.master
        assert old is not None and master is not None, segment.key
        move(old, master)
        old.close(kept=master)
        after = cut_tiles(segment, unit.cells, self._context)
        shards = [shard for tile in before for shard in tile.shards]
        for shard in (shard for tile in after for shard in tile.shards):
            state = _state_of(shard, shards, sharded.states)
            if state:
                sharded.optimizer.state[shard.tensor] = state
        for tile in before:
            tile.segment.close_moments()
        return after


def _state_of(shard: ParamShard, before: list[ParamShard], states: TileStates) -> dict[str, Any]:
    """Return the state of a new shard out of that of the old shards of its parameter, as real
    numbers of its own.
    """
    mine = [old for old in before if old.piece.index == shard.piece.index]
    parts = overlaps(
        [(old.piece.start, old.piece.stop) for old in mine], [(shard.piece.start, shard.piece.stop)]
    )
    out: dict[str, Any] = {}
    for key, value in states.of(mine[parts[0].old]).items() if parts else ():
        if not isinstance(value, torch.Tensor) or value.dim() != 1:
            out[key] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        with ExitStack() as stack:
            found = [states.numbers(mine[part.old], key, part.start, part.stop) for part in parts]
            numbers = [
                one if isinstance(one, torch.Tensor) else stack.enter_context(one())
                for one in found
            ]
            out[key] = torch.cat([part.to(shard.tensor.device) for part in numbers])
    return out
