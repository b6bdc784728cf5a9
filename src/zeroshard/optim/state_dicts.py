"""``optimizer.state_dict()`` of a sharded optimizer: one rank's part, which says so.

Before the first step the state is anybody's to take out and put back (Accelerate does). After it, a
part alone would lose the rest: it is refused, unless it is asked for by name
(``engine.optimizer_part()``). What it holds of other tiers is copied; loading checks the label, and
notes after which step the state was saved, which the ranks compare in their next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroshard.errors import StateError
from zeroshard.optim.shards import ParamShard, Tile
from zeroshard.optim.tiles import TileStates

_KEY = "zeroshard"


class PartialState:
    """What one rank's ``state_dict()`` belongs to."""

    def __init__(
        self, rank: int, world: int, *, is_part: bool, note: Callable[[str, str], None]
    ) -> None:
        """`is_part`: other ranks hold states that this one does not. `note` takes the name of what
        the ranks must do alike, and a value.
        """
        self._rank, self._world = rank, world
        self._is_part, self._note = is_part, note
        self._may_show = False  # inside `of`

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's ``state_dict()``, labelled with the rank that it belongs to."""
        self._may_show = True
        try:
            return optimizer.state_dict()
        finally:
            self._may_show = False

    def refuse(self, num_steps: int) -> None:
        """Raise StateError for a ``state_dict()`` after `num_steps` that would lose the rest."""
        if self._is_part and num_steps and not self._may_show:
            raise StateError(
                "optimizer.state_dict(): the optimizer's state is sharded, and this rank's part"
                " alone would lose the rest. Save and load with zeroshard.save() and"
                " zeroshard.load(), or keep every rank's own engine.optimizer_part() (DeepSpeed's"
                " engine: save_checkpoint(), or every rank's own engine.optimizer.state_dict())"
            )

    def label(self, state: dict[str, Any], groups: list[list[ParamShard]], num_steps: int) -> None:
        """Write into a state_dict, after `num_steps`, what it belongs to."""
        state[_KEY] = {**self._label(groups), "steps": num_steps}

    def _label(self, groups: list[list[ParamShard]]) -> dict[str, Any]:
        names = [
            [
                {
                    "name": shard.name,
                    "start": shard.piece.start,
                    "stop": shard.piece.stop,
                    "shape": list(shard.parameter.shape),
                }
                for shard in shards
            ]
            for shards in groups
        ]
        return {"rank": self._rank, "world": self._world, "pieces": names}

    def checked(self, state: dict[str, Any], groups: list[list[ParamShard]]) -> dict[str, Any]:
        """Return a state_dict without its label; StateError where it belongs to others."""
        label = state.get(_KEY)
        if label is None:
            raise StateError(
                "this optimizer state was not saved from a sharded optimizer: give it to the"
                " optimizer before shard(), which cuts it, or save and load with zeroshard's"
                " checkpoints"
            )
        mine = self._label(groups)
        for what in ("rank", "world", "pieces"):
            if label[what] != mine[what]:
                shown = (
                    f"{label[what]} against {mine[what]}"
                    if what != "pieces"
                    else "names or ranges differ"
                )
                raise StateError(
                    f"this optimizer state belongs to another {what} ({shown}): each rank loads the"
                    " state that it saved"
                )
        steps = label.get("steps", "unknown")  # it may be an older one
        self._note("optimizer.load_state_dict()", f"step count {steps}")
        return {key: value for key, value in state.items() if key != _KEY}


def fill_in(
    packed: dict[int, dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    tiles: list[Tile],
    states: TileStates,
) -> None:
    """Put copies of what rests on other tiers into the states of a state_dict. No step is under
    way.
    """
    params = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    numbers = {id(tensor): index for index, tensor in enumerate(params)}
    for tile in (tile for tile in tiles if tile.method.off_device):
        with states.lent(tile, write=False) as (_, opened):
            for shard, state in zip(tile.shards, opened, strict=True):
                if state:
                    packed[numbers[id(shard.tensor)]] = {
                        key: value.clone() if isinstance(value, torch.Tensor) else value
                        for key, value in state.items()
                    }
