"""Re-point the user's optimizer, in place, at the 1-D pieces of the master shards.

ZeRO, section 5.1: each rank updates the optimizer states of its partition alone. Every param group
keeps its options, its order, its identity; only its ``params`` change: to this rank's pieces of the
same parameters, in the same order. So any elementwise ``torch.optim`` class, any LR scheduler and
``zero_grad()`` keep working. A rank that owns nothing of a group holds one empty piece there.

Pieces whose state or gradient rests on another tier are stepped by tiles beside the user's own step
(optim/streamed.py), which finds them without a gradient and passes over them.

Invariants: a step reads real gradients only inside the step itself; before and after it every piece
carries a SealedGrad. A step refuses any entry that is not our piece. It does not know how gradients
are summed: the engine hands them over through ``StepHooks``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn

from zeroshard.core.placement import Tier
from zeroshard.errors import ConfigError, StateError, StorageError
from zeroshard.optim.delayed import StepRunner
from zeroshard.optim.elementwise import check_elementwise, shard_state
from zeroshard.optim.pieces import ParamShard
from zeroshard.optim.sealed import SealedGrad
from zeroshard.optim.streamed import Streamed, Tile

__all__ = ["INTERRUPTED", "ShardedOptimizer", "StepHooks", "check_parameters"]

INTERRUPTED = (
    "the last optimizer.step() did not finish: call engine.reset() on every rank after an exception"
)
_STATE_KEY = "zeroshard"


class StepHooks(Protocol):
    """What the engine does around a step."""

    def before_step(self) -> bool:
        """Finish the gradients; return whether the step may be taken (False: skip, the pieces
        get no gradient).
        """

    def after_step(self, error: StorageError | None) -> None:
        """Publish what the step wrote, or raise `error`, and on every rank, where a tier could
        not be read or written.
        """

    def publish_late(self) -> None:
        """Publish a step that was taken one step late."""

    def zero_gradient(self, parameter: nn.Parameter | None) -> None:
        """Set one parameter's resting gradient to zero; None: of a group of which nothing rests
        here.
        """


def check_parameters(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError unless `optimizer` holds all trainable `parameters` (by qualified name)
    and no others; frozen ones may be in it.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    held: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"optimizer param group {index} holds a parameter of shape"
                    f" {tuple(parameter.shape)} that is not one of this model's: build the"
                    " optimizer from model.parameters() of the model given to shard()"
                )
            held[id(parameter)] = index
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ConfigError(
            f"parameter {missing[0]!r}{more} is trainable but not in the optimizer: add it, or set"
            " requires_grad=False before shard()"
        )


class ShardedOptimizer:
    """The tie between one optimizer and the pieces of one engine."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, hooks: StepHooks, *, rank: int, world: int
    ) -> None:
        self.optimizer = optimizer
        self.groups: list[list[ParamShard]] = []
        self.parameters: list[list[nn.Parameter]] = []  # per group, the model's own
        self.sealed = False
        self.is_part = False  # whether other ranks hold states that this one does not
        self._may_show = False  # inside part()
        self.streamed: Streamed | None = None
        self._runner: StepRunner | None = None
        self._device = torch.device("cpu")
        self._device_s = 0.0
        self._hooks = hooks
        self._rank = rank
        self._world = world
        self._empty: list[nn.Parameter | None] = []
        self._handles: list[Any] = []
        self.taken = 0  # steps that the user's optimizer has finished on this rank
        self._prepared = False
        self._broken = False  # the streamed part of the step has raised
        self._in_closure = False
        # in a step: the sealed gradients, which hold the resting ones, and real ones in their place
        self._sealed: list[SealedGrad | None] = []
        self._zeroers: dict[int, Callable[[], None]] = {}  # by id of the model's parameter
        self._begin: Any = None  # when the device's own part of the step began
        self._late = False  # a late step has ended and is not in the weights yet
        self._error: StorageError | None = None

    def attach(
        self,
        pieces: dict[int, list[ParamShard]],
        device: torch.device,
        *,
        tiles: Sequence[Tile] = (),
        delayed_update: int | None = None,
        into_forward: bool = False,
    ) -> None:
        """Replace every group's parameters by this rank's pieces; `pieces` maps id(parameter) to
        them, `tiles` hold those to be streamed.

        `into_forward`: tiles may be stepped while the next forward runs, whose units wait for their
        own.

        Raises ConfigError for an optimizer whose step is not elementwise, and for state that cannot
        be cut.
        """
        optimizer = self.optimizer
        check_elementwise(optimizer)
        new_state: dict[torch.Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            originals = list(group["params"])
            owned = [piece for parameter in originals for piece in pieces.get(id(parameter), ())]
            for parameter in originals:
                state = optimizer.state.get(parameter)
                for piece in pieces.get(id(parameter), ()):
                    if state:
                        new_state[piece.tensor] = shard_state(
                            state,
                            tuple(parameter.shape),
                            piece.piece.start,
                            piece.piece.stop,
                            stride=piece.stride,
                            name=piece.name,
                        )
            empty = None if owned else nn.Parameter(torch.empty(0, device=device))
            self.groups.append(owned)
            self.parameters.append(originals)
            self._empty.append(empty)
        for parameter in list(optimizer.state):
            del optimizer.state[parameter]
        optimizer.state.update(new_state)
        for group, owned, empty in zip(
            optimizer.param_groups, self.groups, self._empty, strict=True
        ):
            group["params"] = [piece.tensor for piece in owned] if empty is None else [empty]
        # all ranks publish late updates alike, also one that steps nothing
        if tiles or delayed_update is not None:
            self._stream(tiles, device, delayed_update, into_forward)
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(self._refuse_state),
            optimizer.register_state_dict_post_hook(self._label_state),
            optimizer.register_load_state_dict_pre_hook(self._check_state),
            optimizer.register_load_state_dict_post_hook(lambda _: self.park()),
        ]

    def _stream(
        self,
        tiles: Sequence[Tile],
        device: torch.device,
        delayed_update: int | None,
        into_forward: bool,
    ) -> None:
        self._device = device
        self.streamed = Streamed(self.optimizer, self._grouped(tiles), device)
        beside = any(not owned.streamed for owned in self.pieces())
        self._runner = StepRunner(
            self.streamed,
            beside=beside,
            into_forward=into_forward,
            delayed_update=delayed_update,
            device=device,
        )
        self.streamed.park()

    def join(self) -> None:
        """Return when no step is under way: masters and moments may be read."""
        if self._runner is not None:
            # also where it has failed: the ranks must agree
            self._late = (self._runner.is_under_way and self._runner.was_late) or self._late
            self._runner.join()

    @property
    def is_late(self) -> bool:
        """Whether the last step that was started is applied one step late."""
        return self._runner is not None and self._runner.was_late

    def take_late(self) -> bool:
        """Whether a late step has ended that is not in the weights yet; the caller brings it
        there.
        """
        late, self._late = self._late, False
        return late

    def failure(self) -> StorageError | None:
        """Return what a step that went on by itself has failed with, if it has ended so."""
        if self._runner is None or not self._runner.has_failed:
            return None
        try:
            self.join()
        except StorageError as error:
            return error
        return None

    @property
    def is_interrupted(self) -> bool:
        """Whether a step has begun and not ended: an exception has ended it, or it is under way
        now.
        """
        return self._prepared and not self._in_closure

    def abandon(self) -> None:
        """After an exception in a step: no step is under way, and the pieces have no gradient.
        What the step has written stays.
        """
        with suppress(Exception):  # whoever has joined it before was told
            self.join()
        self._prepared = self._broken = self._in_closure = False
        self._sealed, self._error = [], None
        self.clear()

    def park(self) -> None:
        """Put real numbers in the optimizer's state to rest where they belong."""
        if self.streamed is not None:
            self.join()
            self.streamed.park()

    def set_states(self, set_state: Callable[[ParamShard], None]) -> None:
        """Call `set_state` for every piece; the state that it sets is put to rest a tile at a
        time.
        """
        self.join()
        for owned in self.pieces():
            if not owned.streamed:
                set_state(owned)
        for tile in () if self.streamed is None else self.streamed.tiles:
            for _, owned, _ in tile.pieces:
                set_state(owned)
            assert self.streamed is not None
            self.streamed.park_tile(tile)

    @property
    def num_steps(self) -> int:
        """How many steps of tiles have been taken: `delayed_update` counts them."""
        return 0 if self._runner is None else self._runner.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        if self._runner is not None:
            self._runner.num_steps = value

    def detach(self) -> None:
        """Give the optimizer its original parameters back, without state, and take the hooks
        off.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._runner is not None:
            self._runner.close()
        for group, originals in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["params"] = originals
        self.optimizer.state.clear()

    def pieces(self) -> Iterable[ParamShard]:
        """Yield this rank's pieces of every param group."""
        for group in self.groups:
            yield from group

    def state_bytes(self) -> dict[Tier, int]:
        """Return the bytes of the optimizer's own state on this rank, by tier."""
        out = {} if self.streamed is None else self.streamed.state_bytes()
        for owned in self.pieces():
            for value in self.optimizer.state.get(owned.tensor, {}).values():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.stride() != (0,):
                    out[Tier.DEVICE] = (
                        out.get(Tier.DEVICE, 0) + value.numel() * value.element_size()
                    )
        return out

    def repoint(self) -> None:
        """Point the pieces on the device at the master again: its memory has come back."""
        for owned in self.pieces():
            if owned.on_device:
                owned.tensor.data = owned.at_rest()

    def retie(self, pieces: dict[int, list[ParamShard]], tiles: Sequence[Tile]) -> None:
        """Take other pieces of the same parameters, which have their state already: what rests
        where has changed. No step is under way.
        """
        assert self.streamed is not None
        self.groups = [
            [piece for parameter in originals for piece in pieces.get(id(parameter), ())]
            for originals in self.parameters
        ]
        held = {id(owned.tensor) for owned in self.pieces()}
        for tensor in [tensor for tensor in self.optimizer.state if id(tensor) not in held]:
            del self.optimizer.state[tensor]
        for group, owned, empty in zip(
            self.optimizer.param_groups, self.groups, self._empty, strict=True
        ):
            group["params"] = [piece.tensor for piece in owned] if empty is None else [empty]
        self.streamed.retile(self._grouped(tiles))
        self.streamed.park()
        self.seal()

    def _grouped(self, tiles: Sequence[Tile]) -> Sequence[Tile]:
        """Write into `tiles` which param group each of their pieces belongs to."""
        group_of = {id(owned): index for index, group in enumerate(self.groups) for owned in group}
        for tile in tiles:
            tile.pieces = [(group_of[id(owned)], owned, low) for _, owned, low in tile.pieces]
        return tiles

    @property
    def step_seconds(self) -> tuple[float, float]:
        """What the last step took of the device's own part, and of the tiles'. Waits for the
        latter.
        """
        self.join()
        return self._device_s, 0.0 if self.streamed is None else self.streamed.step_s

    def seal(self) -> None:
        """Let every piece without a gradient carry a sealed one, which keeps the resting
        gradient alive.
        """
        for piece in self.pieces():
            sealed = piece.tensor.grad
            if not isinstance(sealed, SealedGrad):
                zero = self._zeroing(piece.parameter)
                sealed = piece.tensor.grad = SealedGrad(piece.tensor, piece.name, None, zero)
            sealed.hold(piece.holds())
        for empty in self._empty:
            if empty is not None and empty.grad is None:
                empty.grad = SealedGrad(
                    empty, "(no piece of this group on this rank)", None, self._zeroing(None)
                )
        self.sealed = True

    def clear(self) -> None:
        """Take the sealed gradients off: no gradient rests."""
        for group in self.groups:
            for piece in group:
                piece.tensor.grad = None
        for empty in self._empty:
            if empty is not None:
                empty.grad = None
        self.sealed = False

    def _zeroing(self, parameter: nn.Parameter | None) -> Callable[[], None]:
        known = self._zeroers.get(id(parameter))
        if known is not None:
            return known
        hooks = weakref.ref(self._hooks)  # a gradient must not keep the engine alive
        target = None if parameter is None else weakref.ref(parameter)

        def zero() -> None:
            engine, alive = hooks(), None if target is None else target()
            if engine is not None and (target is None or alive is not None):
                engine.zero_gradient(alive)

        self._zeroers[id(parameter)] = zero
        return zero

    def dropped(self) -> list[nn.Parameter]:
        """Return the model's parameters whose gradient the user has cleared on the optimizer's
        side since `seal`.
        """
        if not self.sealed:
            return []
        out: list[nn.Parameter] = []
        for owned, originals, empty in zip(self.groups, self.parameters, self._empty, strict=True):
            marks = [piece.tensor for piece in owned] if empty is None else [empty]
            if all(mark.grad is None for mark in marks):
                out += originals
            else:
                out += [piece.parameter for piece in owned if piece.tensor.grad is None]
        return out

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_entries()
        if self._broken:
            raise StateError(INTERRUPTED)
        # args[0] is the optimizer itself
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._prepare()
            return None

        def closed() -> Any:
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            self._prepare()
            return loss

        rest = dict(kwargs)
        rest.pop("closure", None)
        return (args[0], closed, *args[2:]), rest

    def _check_entries(self) -> None:
        for index, (group, owned, empty) in enumerate(
            zip(self.optimizer.param_groups, self.groups, self._empty, strict=False)
        ):
            expected = [piece.tensor for piece in owned] if empty is None else [empty]
            if len(group["params"]) != len(expected) or any(
                a is not b for a, b in zip(group["params"], expected, strict=True)
            ):
                raise StateError(
                    f"optimizer param group {index} no longer holds the pieces that shard() put"
                    " there: parameters cannot be added to or taken from a sharded optimizer; call"
                    " engine.close(), change the groups and shard() again"
                )
        if len(self.optimizer.param_groups) != len(self.groups):
            raise StateError(
                f"the optimizer has {len(self.optimizer.param_groups)} param groups but was sharded"
                f" with {len(self.groups)}: add_param_group() on a sharded optimizer is not"
                " supported; call engine.close(), add the group and shard() again"
            )

    def _prepare(self) -> None:
        """Unseal: hand the averaged gradients to the pieces, or None to all of them when the
        step is to be skipped.

        Once per step: a subclass whose ``step`` calls its parent's runs torch's hooks for both.
        """
        if self._prepared:
            return
        take = self._hooks.before_step()
        self._prepared = self._broken = True  # until the streamed part has begun
        pieces = list(self.pieces())
        grads = [piece.tensor.grad for piece in pieces]
        self._sealed = [grad if isinstance(grad, SealedGrad) else None for grad in grads]
        self._start_streamed(take)
        self._broken = False
        for piece in pieces:
            grad = piece.grad() if take and not piece.streamed else None
            if grad is not None and grad.dtype is not piece.tensor.dtype:
                grad = grad.to(piece.tensor.dtype)
            piece.tensor.grad = grad
        for empty in self._empty:
            if empty is not None:
                empty.grad = None
        self._begin = self._clock()

    def _clock(self) -> Any:
        """Return the time on the device's own stream: seconds on the CPU, an event elsewhere."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _since(self, begin: Any) -> float:
        end = self._clock()
        if self._device.type == "cpu":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _start_streamed(self, take: bool) -> None:
        """Start the streamed step; the one before ends first. What goes wrong is told after the
        step, when all ranks can be told.
        """
        if self.streamed is None or self._runner is None:
            return
        try:
            self.join()
        except StorageError as error:
            self._error = error
        if self.take_late():
            self._hooks.publish_late()
        if not take:
            return
        job = None if self._error is not None else self.streamed.job(late=self._runner.is_late)
        try:
            self._runner.start(job)
        except StorageError as error:
            self._error = error

    def _after(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._prepared:  # the closure was never called: nothing was stepped
            return
        self._prepared = False
        self.taken += 1
        if self.streamed is not None and self.streamed.timed:
            self._device_s = self._since(self._begin)
        error, self._error = self._error, None
        try:
            if self._runner is not None:
                self._runner.end_of_step()
        except StorageError as failed:
            error = failed
        sealed, self._sealed = self._sealed, []
        for piece, grad in zip(self.pieces(), sealed, strict=True):
            piece.tensor.grad = grad
        self.seal()
        self._hooks.after_step(error)

    def part(self) -> dict[str, Any]:
        """Return this rank's ``state_dict()``, labelled with the rank that it belongs to."""
        self._may_show = True
        try:
            return self.optimizer.state_dict()
        finally:
            self._may_show = False

    def _refuse_state(self, optimizer: torch.optim.Optimizer) -> None:
        # before: nothing to lose, and Accelerate takes the state out and puts it back
        if self.is_part and self.taken and not self._may_show:
            raise StateError(
                "optimizer.state_dict(): the optimizer's state is sharded, and this rank's part"
                " alone would lose the rest. Save and load with zeroshard.save() and"
                " zeroshard.load(), or keep every rank's own engine.optimizer_part()"
            )

    def _label_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        if self.streamed is not None:
            self._fill_state(state["state"])
        state[_STATE_KEY] = self._label()
        return state

    def _label(self) -> dict[str, Any]:
        """Return what the state of this rank belongs to."""
        names = [
            [
                {
                    "name": p.name,
                    "start": p.piece.start,
                    "stop": p.piece.stop,
                    "shape": list(p.parameter.shape),
                }
                for p in owned
            ]
            for owned in self.groups
        ]
        return {"rank": self._rank, "world": self._world, "pieces": names}

    def _fill_state(self, packed: dict[int, dict[str, Any]]) -> None:
        """Put copies of what rests on other tiers into a state_dict."""
        assert self.streamed is not None
        self.join()
        params = [tensor for group in self.optimizer.param_groups for tensor in group["params"]]
        numbers = {id(tensor): index for index, tensor in enumerate(params)}
        for tile in self.streamed.tiles:
            if tile.on_device:
                continue
            with self.streamed.bound(tile, write=False) as (_, opened):
                for (_, owned, _), state in zip(tile.pieces, opened, strict=True):
                    if state:
                        packed[numbers[id(owned.tensor)]] = {
                            k: v.clone() if isinstance(v, torch.Tensor) else v
                            for k, v in state.items()
                        }

    def _check_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any] | None:
        label = state.get(_STATE_KEY)
        if label is None:
            raise StateError(
                "this optimizer state was not saved from a sharded optimizer: give it to the"
                " optimizer before shard(), which cuts it, or save and load with zeroshard's"
                " checkpoints"
            )
        mine = self._label()
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
        return {key: value for key, value in state.items() if key != _STATE_KEY}
