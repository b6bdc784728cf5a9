"""The optimizer's state of tiles that rest on another tier, which is lent as real numbers while it
is needed; and the state dict of a rank.

    optimizer.state[shard]    exp_avg: one NaN, expanded      step: 7
    segment.moments           exp_avg [numel - split]         <--- read, lent, written by the tile

Invariant: a shard off the device, and its moments, are one NaN expanded to their shape wherever the
user sees them. A key is at rest exactly where its value is the placeholder of its length and dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch

from zeroshard.core.placement import Tier
from zeroshard.errors import StateError
from zeroshard.memory import placeholder
from zeroshard.optim.copies import flatten, state_after_trial
from zeroshard.optim.shards import ParamShard, Tile
from zeroshard.state.local import local_of
from zeroshard.state.state import State
from zeroshard.tier.store import Storage


def fitted_grad(shard: ParamShard, flat: torch.Tensor | None) -> torch.Tensor | None:
    """Return the `flat` gradient of `shard` in the shape that its tensor has now."""
    if flat is None or flat.shape == shard.tensor.shape:
        return flat
    return _shaped(shard, flat)


def _shaped(shard: ParamShard, flat: torch.Tensor) -> torch.Tensor:
    shape = local_of(shard.parameter).shape
    return flat.as_strided(shape, shard.stride, flat.storage_offset())


def _flattened(shard: ParamShard, tensor: torch.Tensor) -> torch.Tensor:
    return flatten(tensor, shard.stride)


class TileStates:
    """The state of one optimizer, wherever it rests."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._placeholders: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # by length and dtype
        # what the optimizer keeps of a parameter on the device, by param group and dtype
        self._trials: dict[tuple[int, torch.dtype], dict[str, Any]] = {}

    def of(self, shard: ParamShard) -> dict[str, Any]:
        """Return the optimizer's own entry for a shard, {} before its first step."""
        state: dict[str, Any] = self._optimizer.state.get(shard.tensor, {})
        return state

    def _placeholder(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the placeholder of `numel` numbers, the same object each time."""
        key = (numel, dtype)
        if key not in self._placeholders:
            self._placeholders[key] = placeholder((numel,), dtype)
        return self._placeholders[key]

    def _is_away(self, shard: ParamShard, key: str) -> bool:
        value = self.of(shard).get(key)
        return isinstance(value, torch.Tensor) and value is self._placeholders.get(
            (shard.piece.numel, value.dtype)
        )

    def rests(self, tile: Tile, key: str) -> bool:
        """Whether any shard of the tile has state `key` at rest."""
        return any(self._is_away(shard, key) for shard in tile.shards)

    def open(self, tile: Tile, moments: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        """Return the state of every shard of a tile with real numbers in it, out of `moments`
        (each [tile.numel]).
        """
        opened = []
        for shard in tile.shards:
            state = dict(self.of(shard))
            for key, numbers in moments.items():
                if state.get(key) is self._placeholder(shard.piece.numel, numbers.dtype):
                    state[key] = numbers[shard.span]
            opened.append(state)
        return opened

    def park(
        self,
        tile: Tile,
        opened: Sequence[dict[str, Any]],
        moments: dict[str, torch.Tensor],
        make: Callable[[str, torch.dtype], torch.Tensor],
        into: dict[torch.Tensor, dict[str, Any]] | None = None,
    ) -> None:
        """Collect the `opened` state of a tile in `moments` (`make` makes room for a new key),
        and give the optimizer placeholders, or put them `into` a state that it may take later.
        """
        into = self._optimizer.state if into is None else into
        for shard, state in zip(tile.shards, opened, strict=True):
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if value.shape != shard.tensor.shape:
                    state[key] = value.cpu()  # a step count: a fused step has it on the device
                    continue
                if key not in moments:
                    moments[key] = make(key, value.dtype)
                room = moments[key][shard.span]
                if room.data_ptr() != value.data_ptr():
                    room.copy_(value)
                state[key] = self._placeholder(shard.piece.numel, value.dtype)
            if state:
                into[shard.tensor] = state

    @contextmanager
    def lent(self, tile: Tile) -> Iterator[tuple[torch.Tensor, list[dict[str, Any]]]]:
        """Lend the masters of a tile off the device, and the state of its shards; what is changed
        or added there rests afterwards.
        """
        segment = tile.segment
        added: dict[str, torch.Tensor] = {}

        def make(key: str, dtype: torch.dtype) -> torch.Tensor:
            added[key] = torch.zeros(tile.numel, dtype=dtype)
            return added[key]

        with ExitStack() as stack:
            master = stack.enter_context(segment.master.borrowed(tile.start, tile.stop, write=True))
            moments = {
                key: stack.enter_context(storage.borrowed(*tile.moments_range, write=True))
                for key, storage in segment.moments.items()
            }
            opened = self.open(tile, moments)
            yield master, opened
            self.park(tile, opened, moments, make)
        for key, numbers in added.items():
            with segment.moment(key, numbers.dtype).borrowed(
                *tile.moments_range, write=True
            ) as room:
                room.copy_(numbers)

    def reshape(
        self,
        groups: Sequence[Sequence[ParamShard]],
        entries: Sequence[Sequence[torch.Tensor]],
        *,
        whole: bool,
    ) -> None:
        """Show the optimizer the shards of its `groups`, which are whole parameters, and their
        state in the shapes of these, and no empty ones; or make them flat again, and show all
        `entries`. They lose their gradients.
        """
        for group, shown, shards in zip(self._optimizer.param_groups, entries, groups, strict=True):
            group["params"] = [*shown] if shards or not whole else []
            for shard in shards:
                tensor, shape = shard.tensor, local_of(shard.parameter).shape
                if (tensor.shape == shape) is whole:
                    continue
                before = tensor.shape
                tensor.grad = None
                change = _shaped if whole else _flattened
                tensor.data = change(shard, tensor.data)
                state = self.of(shard)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == before:
                        state[key] = change(shard, value)

    def moments(self, shard: ParamShard) -> dict[str, torch.Tensor]:
        """Return what of the state of a shard has a number per element."""
        return {
            key: value
            for key, value in self.of(shard).items()
            if isinstance(value, torch.Tensor) and value.shape == shard.tensor.shape
        }

    def away(self, shard: ParamShard) -> dict[str, torch.Tensor]:
        """Return copies of the moments of a shard that rest on another tier. No step is under
        way.
        """
        out = {}
        for key in self.moments(shard):
            if self._is_away(shard, key):
                state, first = self.at_rest(shard, key)
                with state.borrowed(first, first + shard.piece.numel, write=False) as numbers:
                    out[key] = numbers.clone()
        return out

    def numbers(self, shard: ParamShard) -> dict[str, Any]:
        """Return the rest of the state of a shard: a step count, an option."""
        moments = self.moments(shard)
        return {key: value for key, value in self.of(shard).items() if key not in moments}

    def placed(self, shard: ParamShard, group: int, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the `numbers` of a parameter's state, each on the device where the
        optimizer keeps it of a parameter like `shard`, of param group `group`: on the host all.
        """
        here, dtype, out = shard.tensor.device, shard.tensor.dtype, {}
        kept: dict[str, Any] = {}
        if here.type != "cpu":
            if (group, dtype) not in self._trials:
                options = self._optimizer.param_groups[group]
                trial = state_after_trial(self._optimizer, options, dtype, here, here)
                self._trials[group, dtype] = trial
            kept = self._trials[group, dtype]
        for key, value in numbers.items():
            if isinstance(value, torch.Tensor):
                like = kept.get(key, value if kept else shard.tensor)
                out[key] = value.to(like.device, copy=True)
            else:
                out[key] = copy.deepcopy(value)
        return out

    def at_rest(self, shard: ParamShard, key: str) -> tuple[State, int]:
        """Return in which State `key` of a shard rests, and where in it the shard begins."""
        if not self._is_away(shard, key):
            return State(self.of(shard)[key]), 0
        return State(None, shard.segment.moments[key]), shard.start - shard.segment.split

    def put(
        self, tile: Tile, key: str, numbers: torch.Tensor, shards: Sequence[ParamShard]
    ) -> None:
        """Let `numbers` [tile.numel] be state `key` of those `shards` of a tile, where it rests."""
        if not tile.method.off_device:
            for shard in shards:
                here = numbers[shard.span].to(shard.tensor.device, copy=True)
                self._optimizer.state[shard.tensor][key] = here
            return
        storage = tile.segment.moment(key, numbers.dtype)
        with storage.borrowed(*tile.moments_range, write=True) as room:
            room.copy_(numbers)
        for shard in shards:
            away = self._placeholder(shard.piece.numel, numbers.dtype)
            self._optimizer.state[shard.tensor][key] = away

    def drop(self, tiles: Sequence[Tile], key: str) -> None:
        """Forget state `key` of `tiles`, all of one segment, and give its memory back."""
        for tile in tiles:
            for shard in tile.shards:
                self.of(shard).pop(key, None)
            storage = tile.segment.moments.pop(key, None)
            if storage is not None:
                storage.close()

    def put_to_rest(self, tile: Tile) -> None:
        """Move state of a tile that is still on the device (created before shard(), or just
        loaded) to its tier.
        """
        # numbers that stand in the optimizer
        keys = ((shard, key) for shard in tile.shards for key in self.moments(shard))
        if tile.method.off_device and any(not self._is_away(*pair) for pair in keys):
            with self.lent(tile):
                pass

    def bytes_by_tier(self, tiles: Sequence[Tile], more: Iterable[Storage]) -> dict[Tier, int]:
        """Return the bytes of the optimizer's own state of `tiles`, and of `more`, by tier."""
        out: dict[Tier, int] = {}
        resting = (segment.moments.values() for segment in {tile.segment for tile in tiles})
        for storage in chain(*resting, more):
            out[storage.tier] = out.get(storage.tier, 0) + storage.num_bytes
        for value in (v for tile in tiles for s in tile.shards for v in self.of(s).values()):
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.stride() != (0,):
                out[Tier.DEVICE] = out.get(Tier.DEVICE, 0) + value.numel() * value.element_size()
        return out


# -------------------------------------------------------------------------------------- state dicts
# ``optimizer.state_dict()`` of a sharded optimizer is one rank's part, and its label says so.
#
# Before the first step the state is anybody's to take out and put back (Accelerate does). After it,
# a part alone would lose the rest: it is refused, unless ``engine.optimizer_part()`` asks for it.
# States on other tiers are copied. Loading checks the label, and notes after which step the state
# was saved, which the ranks compare in their next one.


_KEY = "zeroshard"


class PartialState:
    """The label of one rank's ``state_dict()``: the rank, the number of ranks, the pieces."""

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
