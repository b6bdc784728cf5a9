"""The optimizer's state of tiles that rest on another tier, which is lent as real numbers while it
is needed; and the state dict of a rank.

    optimizer.state[shard]    exp_avg: one NaN, expanded      step: 7
    segment.moments           exp_avg [numel - split]         <--- read, lent, written by the tile

Invariant: a shard off the device, and its moments, are one NaN expanded to their shape wherever the
user sees them. A key is at rest exactly where its value is the placeholder of its length and dtype.

A rank that owns whole parameters keeps states of any shape with them (Adafactor's factors, blocks
of 8 bits), as the optimizer has made them. Where one has the shape of a flat shard's moments, it
has one more dimension between steps, of size 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch

from zeroshard.core.boxes import overlap
from zeroshard.core.layout import Range
from zeroshard.core.placement import Tier
from zeroshard.errors import ConfigError, StateError
from zeroshard.memory import placeholder
from zeroshard.optim.copies import (
    SCALARS,
    block_states,
    flatten,
    is_elementwise,
    is_plain,
    joined,
    plain_tensors,
    shard_state,
    state_after_trial,
)
from zeroshard.optim.several import owner, owners_of_groups
from zeroshard.optim.shards import ParamShard, StepMethod, Tile
from zeroshard.state.local import local_of
from zeroshard.state.state import State
from zeroshard.tier.store import Storage


def fitted_grad(shard: ParamShard, flat: torch.Tensor | None) -> torch.Tensor | None:
    """Return the `flat` gradient of `shard` in the shape that its tensor has now."""
    return flat if flat is None or flat.shape == shard.tensor.shape else shard.shaped(flat)


def reshape_state(shard: ParamShard, state: dict[str, Any], *, whole: bool) -> None:
    """Give the `state` of `shard` the shapes of a step, or let it be as it rests again."""
    if not whole:
        state.update(settled(shard, state))
        return
    flat, dtype = torch.Size([shard.piece.numel]), shard.tensor.dtype
    for key, value in state.items():
        if is_plain(value) and value.shape == flat and value.dtype is dtype:
            state[key] = shard.shaped(value)
        else:
            state[key] = _apart(shard, value, rests=False)


def _on(value: Any, device: torch.device) -> Any:
    """Return a state with the tensors in it on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _on(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on(item, device) for item in value)
    return value


def is_apart(value: object) -> bool:
    """Whether a state that is no moment is more than a number."""
    return any(one.dim() or one is not value for one in plain_tensors(value))


def settled(shard: ParamShard, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `state` of `shard`, in the shapes of a step, as it rests: moments flat, and others
    of its shape in its memory order.
    """
    shape, out = shard.shape, dict[str, Any]()
    for key, value in state.items():
        is_scalar = not shape and key in SCALARS  # of a parameter without dimensions
        if not is_plain(value) or value.shape != shape or is_scalar:
            out[key] = _apart(shard, value, rests=True)
        elif value.dtype is shard.tensor.dtype:
            out[key] = flatten(value, shard.shape_stride)
        else:
            out[key] = shard.shaped(value.new_empty(shard.piece.numel)).copy_(value)
    return out


def _apart(shard: ParamShard, value: Any, *, rests: bool) -> Any:
    """Return a state that is no moment as it `rests`, or as a step sees it."""
    if not is_plain(value) or value.dtype is not shard.tensor.dtype or not value.dim():
        return value
    is_like = value.shape == (shard.piece.numel, *(1,) * (value.dim() - 1))
    if not is_like or len(shard.shape) == 1:
        return value
    return value.unsqueeze(-1) if rests else value.squeeze(-1)


class TileStates:
    """The state of one optimizer, wherever it rests."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rounded: torch.dtype | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """`rounded`: the dtype in which moments of decoded tiles rest, if not as they are made.
        `whole`: parameters lie whole in the tiles, and are stepped in their shapes where the rule
        is not known to be elementwise.
        """
        # by param group
        self.by_shape = [whole and not is_elementwise(one) for one in owners_of_groups(optimizer)]
        self.whole = any(self.by_shape)
        self._optimizer = optimizer
        self.rounded = rounded
        self._placeholders: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # by length and dtype
        # what the optimizer keeps of a parameter on the device, by param group and dtype
        self._trials: dict[tuple[int, torch.dtype], dict[str, Any]] = {}
        self._cuts: dict[tuple[int, torch.dtype], Mapping[str, list[bool]]] = {}

    def of(self, shard: ParamShard) -> dict[str, Any]:
        """Return the optimizer's own entry for a shard, {} before its first step."""
        return self.entries(shard).get(shard.tensor, {})

    def entries(self, shard: ParamShard) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of the optimizer that steps a shard, by tensor."""
        return owner(self._optimizer, shard.parameter).state

    def part_of(self, shard: ParamShard, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a parameter's `state` that belongs to a shard. Raises ConfigError for
        one that cannot be cut.
        """
        if self.by_shape[shard.group]:
            part, like = dict[str, Any](), local_of(shard.parameter)
            for key, kept in state.items():
                value = local_of(kept)
                if is_plain(value) and value.dtype is like.dtype:
                    value = value.to(shard.tensor.dtype)  # as the master is
                if is_plain(value) and value.shape == like.shape != shard.shape:
                    flat = flatten(value, shard.stride)[shard.piece.start : shard.piece.stop]
                    part[key] = shard.shaped(flat.clone())
                else:
                    part |= self.gathered(shard, shard.group, {(0, like.numel()): {key: value}})
            return settled(shard, part)
        return shard_state(
            {key: local_of(value) for key, value in state.items()},
            tuple(local_of(shard.parameter).shape),
            shard.piece.start,
            shard.piece.stop,
            stride=shard.stride,
            name=shard.name,
        )

    def gathered(
        self, shard: ParamShard, group: int, numbers: Mapping[Range, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the part of a shard, of param group `group`, in the states of its parameter that
        are no moments, which were kept of these ranges of it. Raises ConfigError for one that
        cannot be cut.
        """
        found: dict[str, list[tuple[Range, Any]]] = {}
        here, out = (shard.piece.start, shard.piece.stop), dict[str, Any]()
        for span, state in sorted(numbers.items()):
            for key, value in state.items():
                found.setdefault(key, []).append((span, value))
        for key, kept in found.items():
            parts = [(span, value) for span, value in kept if overlap(span, here)]
            if not parts and self.by_shape[group]:
                continue  # a small part may have other states than the rest
            span, out[key] = (parts or kept)[0]
            if not is_apart(out[key]) or not self.by_shape[group]:
                continue
            flags = self.cuts(shard, group).get(key)
            if flags is not None:
                out[key] = joined(parts, here, iter(flags))
            elif span != here:
                raise ConfigError(
                    f"optimizer state {key!r} of parameter {shard.name!r} was kept of its elements"
                    f" {span[0]} to {span[1]} and cannot be cut, and {here[0]} to {here[1]} are"
                    " stepped here: give the same matrix_parts, or none"
                )
        return out

    def cuts(self, shard: ParamShard, group: int) -> Mapping[str, list[bool]]:
        """Return, by state, which of the tensors in it are cut with the parameter of a shard: none
        where it is not stepped by blocks.
        """
        if not self.by_shape[group] or shard.shape != (shard.piece.numel,):
            return {}
        dtype, device = shard.tensor.dtype, shard.tensor.device
        if (group, dtype) not in self._cuts:
            rule = owners_of_groups(self._optimizer)[group]
            options = self._optimizer.param_groups[group]
            self._cuts[group, dtype] = block_states(rule, options, dtype, device) or {}
        return self._cuts[group, dtype]

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
        for shard, state in zip(tile.shards, opened, strict=True):
            for key, value in state.items():
                if not self._is_moment(shard, value):
                    # a step count, too: a fused step has it on the device
                    state[key] = _on(value, torch.device("cpu"))
                    continue
                if key not in moments:
                    moments[key] = make(key, value.dtype)
                room = moments[key][shard.span]
                if room.data_ptr() != value.data_ptr():
                    room.copy_(value)
                state[key] = self._placeholder(shard.piece.numel, value.dtype)
            if state:
                (self.entries(shard) if into is None else into)[shard.tensor] = state

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
        """Show the optimizer the shards of its `groups` that its own step takes, which are whole
        parameters, and their state in the shapes of these; or make them flat again, and show all
        `entries`. They lose their gradients.
        """
        for by_shape, group, shown, shards in zip(
            self.by_shape, self._optimizer.param_groups, entries, groups, strict=True
        ):
            if not by_shape:
                continue
            own = [shard for shard in shards if shard.method is StepMethod.BY_USER]
            group["params"] = [shard.tensor for shard in own] if whole else [*shown]
            for shard in own:
                tensor = shard.tensor
                if (tensor.shape == shard.shape) is whole:
                    continue
                stepped = tensor.data
                tensor.grad = None
                flat = stepped if whole else flatten(stepped, shard.shape_stride)
                tensor.data = shard.shaped(flat) if whole else flat
                if not whole:
                    shard.repoint()
                    if tensor.data_ptr() != stepped.data_ptr():  # of its own: bitsandbytes' can be
                        shard.shaped(tensor.data).copy_(stepped)
                reshape_state(shard, self.of(shard), whole=whole)

    def _is_moment(self, shard: ParamShard, value: Any) -> bool:
        """Whether a state of a shard has a number per element, which rests in its place."""
        if not isinstance(value, torch.Tensor) or value.shape != shard.tensor.shape:
            return False
        is_like = value.dtype is shard.tensor.dtype and is_plain(value)
        return is_like or not self.by_shape[shard.group]

    def moments(self, shard: ParamShard) -> dict[str, torch.Tensor]:
        """Return what of the state of a shard has a number per element."""
        return {
            key: value for key, value in self.of(shard).items() if self._is_moment(shard, value)
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
        """Return the rest of the state of a shard: a step count, an option; of a whole parameter
        also states of other shapes, as a step sees them.
        """
        moments = self.moments(shard)
        return {
            key: _apart(shard, value, rests=False) if self.by_shape[shard.group] else value
            for key, value in self.of(shard).items()
            if key not in moments
        }

    def placed(
        self, shard: ParamShard, group: int, numbers: Mapping[Range, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return copies of the part of a shard in `numbers` (`gathered`), each on the device where
        the optimizer keeps it of a parameter like `shard`, of param group `group`: on the host all.
        """
        here, dtype, out = shard.tensor.device, shard.tensor.dtype, {}
        kept: dict[str, Any] = {}
        if here.type != "cpu":
            if (group, dtype) not in self._trials:
                options = self._optimizer.param_groups[group]
                rule = owners_of_groups(self._optimizer)[group]
                trial = state_after_trial(rule, options, dtype, here, here)
                self._trials[group, dtype] = trial
            kept = self._trials[group, dtype]
        for key, value in self.gathered(shard, group, numbers).items():
            if isinstance(value, torch.Tensor):
                like = kept.get(key, value if kept else shard.tensor)
                out[key] = value.to(like.device, copy=True)
            else:
                out[key] = _on(copy.deepcopy(value), here)
        return settled(shard, out) if self.by_shape[group] else out

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
                self.entries(shard)[shard.tensor][key] = here
            return
        storage = tile.segment.moment(key, numbers.dtype)
        with storage.borrowed(*tile.moments_range, write=True) as room:
            room.copy_(numbers)
        for shard in shards:
            away = self._placeholder(shard.piece.numel, numbers.dtype)
            self.entries(shard)[shard.tensor][key] = away

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
        loaded) to its tier; round moments that were stepped, or loaded.
        """
        if self.rounded is not None and tile.method is StepMethod.DECODED:
            self._cast(tile, self.rounded)
        # numbers that stand in the optimizer
        keys = ((shard, key) for shard in tile.shards for key in self.moments(shard))
        if tile.method.off_device and any(not self._is_away(*pair) for pair in keys):
            with self.lent(tile):
                pass

    def widen(self, tile: Tile) -> None:
        """Let moments that rest in fewer bits be fp32 until `put_to_rest`."""
        if self.rounded is not None and tile.method is StepMethod.DECODED:
            self._cast(tile, torch.float32)

    def _cast(self, tile: Tile, dtype: torch.dtype) -> None:
        for shard in tile.shards:
            for key, value in self.moments(shard).items():
                if value.dtype in (torch.float32, self.rounded):
                    self.of(shard)[key] = value.to(dtype)

    def bytes_by_tier(self, tiles: Sequence[Tile], more: Iterable[Storage]) -> dict[Tier, int]:
        """Return the bytes of the optimizer's own state of `tiles`, and of `more`, by tier."""
        out: dict[Tier, int] = {}
        resting = (segment.moments.values() for segment in {tile.segment for tile in tiles})
        for storage in chain(*resting, more):
            out[storage.tier] = out.get(storage.tier, 0) + storage.num_bytes
        known: set[int] = set()  # tables that parameters share count once
        for shard in (shard for tile in tiles for shard in tile.shards):
            tier = Tier.HOST if shard.method.off_device else Tier.DEVICE
            for one in chain.from_iterable(map(plain_tensors, self.of(shard).values())):
                if one.numel() > 1 and 0 not in one.stride() and one.data_ptr() not in known:
                    known.add(one.data_ptr())
                    out[tier] = out.get(tier, 0) + one.numel() * one.element_size()
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
