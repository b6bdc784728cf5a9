"""Move States from one cut to another: between the device and another tier while training.

    before   |  device          |  host         |        masters and moments between the two cuts
    after    |  device      |  host             |        cross over; shards are cut anew there

``fraction="auto"`` (runtime/balance.py) decides where the cut goes; `StepTiles` puts it there.

Invariant: no number changes; cuts fall on multiples of the layout's align, so no later step changes
a bit either. Cost: one state of a segment on the host, and its master once more, while they cross;
segments on which the cut does not fall are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.core.placement import Tier
from zeroshard.core.split import splits
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import StepMethod, Tile
from zeroshard.runtime.balance import Balance
from zeroshard.runtime.build import Context, make_master
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.segment_states import STATE, SegmentStates
from zeroshard.runtime.tile_cuts import cut_tiles
from zeroshard.runtime.unit import Unit
from zeroshard.state.state import move


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
        """Cut a segment's optimizer state at `split`; return its new tiles, where it rests."""
        segment.wait_uploads()
        states, master = SegmentStates(segment, before, sharded.states), segment.master
        segment.move_split(split, with_gradient=unit.cells.grad.tier is not Tier.DEVICE)
        make_master(segment, unit.cells, self._context)
        assert master is not None and segment.master is not None, segment.key
        move(master, segment.master)
        master.close(kept=segment.master)
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
