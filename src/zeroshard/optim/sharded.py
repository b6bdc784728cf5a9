"""Re-point the user's optimizer, in place, at the 1-D shards of the masters.

ZeRO, section 5.1: each rank updates the optimizer states of its partition alone. Every param group
keeps its options, its order, its identity; only its ``params`` change: to this rank's shards of the
same parameters, in the same order (one empty shard, where it owns nothing), so any elementwise
class, LR scheduler and ``zero_grad()`` keep working; others step whole parameters in their shapes.

A step is a list of tiles (optim/shards.py). The user's own step takes those that are his; it finds
the shards of the others without a gradient and passes over them, and the runner takes those
(optim/runner.py).

Invariants: a step reads real gradients only inside the step itself; before and after it every shard
carries a SealedGrad. A step refuses any entry that is not our shard. It does not know how gradients
are summed: the engine hands them over through ``AroundStep``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from zeroshard.core.placement import Tier
from zeroshard.errors import StateError
from zeroshard.optim.copies import HiddenMethod, modes_of
from zeroshard.optim.runner import StepOptions, TileRunner
from zeroshard.optim.sealed import GradientOwner, SealedGrad
from zeroshard.optim.several import (
    INTERRUPTED,
    JointOptimizer,
    OptimizerStep,
    each_of,
    groups_of,
    title,
)
from zeroshard.optim.shards import ParamShard, StepMethod, SteppedSegment, Tile
from zeroshard.optim.tiles import PartialState, TileStates, fitted_grad


class Usable(Protocol):
    """Whether the states of an engine may be used."""

    def check_trained(self) -> None:
        """Raise StateError where the optimizer's state is not there, or not to be changed now."""

    def pause(self, why: str | None) -> None:
        """Raise StateError with `why` at every use from here on; None: no more."""


class AroundStep(GradientOwner, Protocol):
    """The engine around a step."""

    @property
    def availability(self) -> Usable:
        """Whether the states of the engine may be used."""

    def before_step(self) -> bool:
        """Finish the gradients; return whether the step may be taken (False: skip, the shards
        get no gradient).
        """

    def noted(self) -> AbstractContextManager[None]:
        """Return a context; its StorageError, of a tier that could not be read or written, is
        raised by `after_step`.
        """

    def after_step(self, *, late: bool) -> None:
        """Publish what the step wrote, unless it ends `late`, or raise what was `noted` on any
        rank, on every rank.
        """

    def publish_late(self) -> None:
        """Publish a step that was taken one step late."""

    def moving(self, call: str, check: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which the user's optimizer moves its parameters between two steps,
        in `call`; then the weights follow. Raises, on every rank, what `check` raises on one.
        """


class ShardedOptimizer:
    """The tie between one optimizer, or several as one, and this rank's tiles of one engine."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        around_step: AroundStep,
        part: PartialState,
        options: StepOptions,
    ) -> None:
        self.optimizer = optimizer
        self.tiles: list[Tile] = []
        # per param group, the model's own
        self.parameters = [[*group["params"]] for group in optimizer.param_groups]
        self.sealed = False
        self.num_finished = 0  # steps that the user's optimizer has finished on this rank
        # between the engine's hooks: masters may be written and are not published
        self.is_cut_off = False
        self.states = TileStates(optimizer, options.moments, whole=options.whole)
        self._shapes = self.states.whole  # the step sees some parameters in their shapes
        self.runner = (options.runner or TileRunner)(optimizer, self.states, options)
        self._groups: list[list[ParamShard]] = []
        self._segments: dict[SteppedSegment, list[ParamShard]] = {}
        self._empty: list[nn.Parameter | None] = []
        self._entries: list[list[nn.Parameter]] = []  # what each param group holds
        self._around_step, self._part = around_step, part
        self._device = options.device
        self._handles: list[Any] = []
        self._several = isinstance(optimizer, JointOptimizer)
        self._step = OptimizerStep(optimizer)

    def attach(self, tiles: Sequence[Tile]) -> None:
        """Replace every group's parameters by this rank's shards of them, which `tiles` hold.

        Raises ConfigError for state that cannot be cut.
        """
        optimizer = self.optimizer
        self._take(tiles)
        new_state: list[tuple[ParamShard, dict[str, Any]]] = []
        for shard in self.pieces():
            state = optimizer.state.get(shard.parameter)
            if state:
                new_state.append((shard, self.states.part_of(shard, state)))
        optimizer.state.clear()
        for shard, piece in new_state:
            self.states.entries(shard)[shard.tensor] = piece
        self._point()
        self.park()
        self._handles = [*chain.from_iterable(map(self._hooked, each_of(optimizer)))]

    def _hooked(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Let calls of one of the user's optimizers come here; return what ends that."""
        return [
            HiddenMethod(optimizer, "zero_grad", partial(self._zero_grad, optimizer)),
            *(
                HiddenMethod(optimizer, name, partial(self._move, optimizer, name))
                for name in modes_of(optimizer)
            ),
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(self._check_states),
            optimizer.register_state_dict_pre_hook(lambda _: self._part.refuse(self.num_finished)),
            optimizer.register_state_dict_post_hook(self._label_state),
            optimizer.register_load_state_dict_pre_hook(self._check_states),
            optimizer.register_load_state_dict_pre_hook(
                lambda one, state: self._part.checked(state, self._groups_of(one))
            ),
            optimizer.register_load_state_dict_post_hook(lambda _: self.park()),
        ]

    def _check_states(self, *_: Any) -> None:
        self._around_step.availability.check_trained()

    def _groups_of(self, one: torch.optim.Optimizer) -> list[list[ParamShard]]:
        return self._groups[groups_of(self.optimizer, one)]

    def _zero_grad(
        self,
        one: torch.optim.Optimizer,
        zero_grad: Callable[..., None],
        set_to_none: bool = True,
        **options: Any,
    ) -> None:
        """Clear or zero the gradients assigned to the model's parameters, too, and zero what rests
        of those that this rank holds no shard of.
        """
        given = self.parameters
        if self._several:
            again = partial(self._zero_grad, one, zero_grad, set_to_none, **options)
            if self._step.zero_grad(one, again):
                return
            given = given[groups_of(self.optimizer, one)]
        zero_grad(set_to_none, **options)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for parameter in chain(*given):
                if not set_to_none:
                    self._around_step.zero_gradient(parameter)
                grad = parameter.grad
                if grad is None or type(grad) is SealedGrad:
                    continue
                if set_to_none:
                    parameter.grad = None
                else:
                    grad.zero_()
        self.release_dropped()

    def _move(
        self, one: torch.optim.Optimizer, name: str, method: Any, *args: Any, **options: Any
    ) -> Any:
        """Call a `method` that moves the parameters of `one`; the weights follow."""
        call, of = f"optimizer.{name}()", type(one).__qualname__
        if self._several:  # ranks compare calls
            of = title(self.optimizer, one)
            call = f"{call} of {of}"

        def check() -> None:
            if self.rests_elsewhere:
                raise StateError(
                    f"optimizer.{name}() of {of} moves all parameters, and some of their states"
                    " rest on the host or on disk, or in fewer bits: leave the optimizer out of"
                    " offload=, and master= and moments= out of the precision"
                )

        with self._around_step.moving(call, check):
            return method(*args, **options)

    def _take(self, tiles: Sequence[Tile]) -> None:
        """Sort the shards of `tiles` into param groups."""
        shards: dict[int, list[ParamShard]] = {}
        self._segments = {}
        for shard in (shard for tile in tiles for shard in tile.shards):
            shards.setdefault(id(shard.parameter), []).append(shard)
            self._segments.setdefault(shard.segment, []).append(shard)
            shard.sealed = SealedGrad(shard.tensor, shard.name, self._around_step, shard.parameter)
        self.tiles = list(tiles)
        self._groups = [
            [shard for parameter in originals for shard in shards.get(id(parameter), ())]
            for originals in self.parameters
        ]
        for index, group in enumerate(self._groups):
            for shard in group:
                shard.group = index
        if not self._empty:
            self._empty = [
                None if group else nn.Parameter(torch.empty(0, device=self._device))
                for group in self._groups
            ]
        self._entries = [
            [shard.tensor for shard in shards] if empty is None else [empty]
            for shards, empty in zip(self._groups, self._empty, strict=True)
        ]

    def _point(self) -> None:
        """Let the optimizer hold this rank's shards, and state of these alone."""
        held = {id(shard.tensor) for shard in self.pieces()}
        for tensor in [tensor for tensor in self.optimizer.state if id(tensor) not in held]:
            del self.optimizer.state[tensor]
        for group, entries in zip(self.optimizer.param_groups, self._entries, strict=True):
            group["params"] = [*entries]  # which the user may change

    def retile(self, tiles: Sequence[Tile]) -> None:
        """Take other tiles of the same parameters; their state is in the optimizer already. No step
        is under way.
        """
        self._take(tiles)
        self._point()
        self.park()
        self.seal()

    def rejoin(
        self,
        tiles: Sequence[Tile],
        around_step: AroundStep,
        part: PartialState,
        options: StepOptions,
    ) -> None:
        """Step `tiles` of an engine that is laid out anew; its state is in the optimizer and at
        rest already. No gradient rests.
        """
        num_finished, before = self.num_finished, self.runner
        before.close()
        self._around_step, self._part, self._device = around_step, part, options.device
        self.is_cut_off = False
        self.runner = (options.runner or TileRunner)(self.optimizer, self.states, options)
        self.runner.ahead_counts = before.ahead_counts
        self.continue_from(num_finished, before.num_steps)
        self._empty = []
        self._take(tiles)
        self._point()
        self.clear()

    def continue_from(self, num_finished: int, num_steps: int) -> None:
        """Count steps from `num_finished` on, and the tiles' steps from `num_steps`."""
        self.num_finished = num_finished
        self.runner.count_from(num_steps)

    def leave(self) -> None:
        """Let go of everything that rests here: other ranks have it."""
        self.runner.close()
        for shard in self.pieces():
            shard.leave_memory()
        self.optimizer.state.clear()
        self.clear()

    def detach(self) -> None:
        """Give the optimizer its original parameters back, without state, and remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.runner.close()
        for shard in self.pieces():
            shard.leave_memory()
        for group, originals in zip(self.optimizer.param_groups, self.parameters, strict=True):
            group["params"] = originals
        self.optimizer.state.clear()

    # ------------------------------------------------------------------ what rests

    def join(self) -> None:
        """Return when no step is under way: masters and moments may be read."""
        self.runner.settle()

    def pieces(self) -> Iterable[ParamShard]:
        """Return this rank's shards, by param group."""
        return chain.from_iterable(self._groups)

    @property
    def rests_elsewhere(self) -> bool:
        """Whether tiles of this rank are stepped beside the user's own step()."""
        return any(tile.method is not StepMethod.BY_USER for tile in self.tiles)

    def park(self, set_state: Callable[[ParamShard], None] | None = None) -> None:
        """Move state that is still on the device (created before shard(), just loaded, or set by
        `set_state` for every shard) to its tier, a tile at a time.
        """
        self.join()
        for tile in self.tiles:
            if set_state is not None:
                for shard in tile.shards:
                    set_state(shard)
            self.states.put_to_rest(tile)

    def state_bytes(self, keys: Container[str] | None = None) -> dict[Tier, int]:
        """Return the bytes of the optimizer's own state on this rank by tier, of the segments with
        these `keys` or of all.
        """
        self.join()  # a first step makes it
        tiles = [tile for tile in self.tiles if keys is None or tile.segment.key in keys]
        return self.states.bytes_by_tier(tiles, self.runner.ahead(keys))

    def part(self) -> dict[str, Any]:
        """Return this rank's ``state_dict()``, labelled with the rank that it belongs to."""
        return self._part.of(self.optimizer)

    def _label_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        self.join()
        params = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        numbers = {id(tensor): index for index, tensor in enumerate(params)}
        groups = self._groups_of(optimizer)
        for shard in (one for one in chain(*groups) if one.method.off_device):
            if held := self.states.of(shard):
                state["state"][numbers[id(shard.tensor)]] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value
                    for key, value in {**held, **self.states.away(shard)}.items()
                }
        self._part.label(state, groups, self.num_finished)
        return state

    # ------------------------------------------------------------------ sealed gradients

    def seal(self) -> None:
        """Let every shard carry its sealed gradient."""
        for tile in self.tiles:
            for shard in tile.shards:
                shard.tensor.grad = shard.sealed
        for empty in self._empty:
            if empty is not None and empty.grad is None:
                empty.grad = SealedGrad(
                    empty, "(no piece of this group on this rank)", self._around_step, None
                )
        self.sealed = True

    def clear(self) -> None:
        """Take the sealed gradients off: no gradient rests."""
        for entries in self._entries:
            for entry in entries:
                entry.grad = None
        self.sealed = False

    def release_dropped(self) -> None:
        """Release a gradient once no shard carries its sealed one, unless a step is under way:
        those are real.
        """
        for segment, shards in () if self._step.has_begun else self._segments.items():
            if not [shard for shard in shards if shard.tensor.grad is not None]:
                segment.sums.release()

    def dropped(self) -> list[nn.Parameter]:
        """Return the model's parameters with a gradient that the user has cleared on the
        optimizer's side since `seal`.
        """
        if not self.sealed:
            return []
        out: list[nn.Parameter] = []
        for shards, originals, entries in zip(
            self._groups, self.parameters, self._entries, strict=True
        ):
            is_dropped = [entry.grad is None for entry in entries]
            if False not in is_dropped:
                out += originals
            elif True in is_dropped:
                out += [shard.parameter for shard in shards if shard.tensor.grad is None]
        if out:
            self.release_dropped()
        return out

    # ------------------------------------------------------------------ a step

    def check_finished(self) -> None:
        """Raise StateError where the last step has not ended: an exception has ended it, or some
        of several optimizers have not stepped.
        """
        if self._step.has_begun and (why := self._step.unfinished) is not None:
            raise StateError(why)

    def abandon(self, *, num_finished: int) -> None:
        """After an exception in a step: no step is under way, and the shards have no gradient.
        What the step has written stays; the ranks count `num_finished` steps from here on.
        """
        self.num_finished = num_finished
        with suppress(Exception):  # whoever has waited for it before was told
            self.join()
        if self._step.stepped:
            self._around_step.availability.pause(None)
        self._step, self.is_cut_off = OptimizerStep(self.optimizer), False
        if self._shapes:
            self.states.reshape(self._groups, self._entries, whole=False)
        self.clear()

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._step.has_begun:  # else some may show whole parameters
            self._check_entries()
        if self._step.is_broken:
            raise StateError(INTERRUPTED)
        # args[0] is the optimizer itself
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._several:
            self._step.check_turn(optimizer, closure)
            self._prepare()
            self._step.begins(optimizer, elsewhere=self.rests_elsewhere)
            return None
        if closure is None:
            self._prepare()
            return None

        def closed() -> Any:
            loss = self._step.call(closure)
            self._prepare()
            return loss

        rest = dict(kwargs)
        rest.pop("closure", None)
        return (args[0], closed, *args[2:]), rest

    def _check_entries(self) -> None:
        for index, (group, expected) in enumerate(
            zip(self.optimizer.param_groups, self._entries, strict=False)
        ):
            if len(group["params"]) != len(expected) or any(
                map(operator.is_not, group["params"], expected)
            ):
                raise StateError(
                    f"optimizer param group {index} no longer holds the pieces that shard() put"
                    " there: parameters cannot be added to or taken from a sharded optimizer; call"
                    " engine.close(), change the groups and shard() again"
                )
        if len(self.optimizer.param_groups) != len(self._groups):
            raise StateError(
                f"the optimizer has {len(self.optimizer.param_groups)} param groups but was sharded"
                f" with {len(self._groups)}: add_param_group() on a sharded optimizer is not"
                " supported; call engine.close(), add the group and shard() again"
            )

    def hold_options(self) -> None:
        """Let each of several optimizers take this step with the options that it has now."""
        if self._several:
            self._step.hold_options()

    def _prepare(self) -> None:
        """Unseal: hand the averaged gradients to the shards of the user's step, or None to all of
        them when the step is to be skipped.

        Once per step: a subclass with a ``step`` that calls its parent's runs torch's hooks for
        both.
        """
        if self._step.has_begun:
            return
        take = self._around_step.before_step()
        self.is_cut_off = True
        self._step.has_begun = self._step.is_broken = True  # until the tiles have started
        # the tiles' part of the step before ends first
        failed = not self._succeeds(self.runner.wait)
        if self.runner.lags:
            self._around_step.publish_late()
            self.runner.note_late(lags=False)
        if take:
            self._succeeds(partial(self.runner.start, self.tiles, failed=failed))
        self._step.is_broken = False
        if self._shapes:
            self.states.reshape(self._groups, self._entries, whole=True)
        for tile in self.tiles:
            takes = take and tile.method is StepMethod.BY_USER
            grads = tile.gradients() if takes else [None] * len(tile.shards)
            for shard, grad in zip(tile.shards, grads, strict=True):
                shard.tensor.grad = fitted_grad(shard, grad) if self._shapes else grad
        for empty in self._empty:
            if empty is not None:
                empty.grad = None
        self.runner.begin_own()

    def _succeeds(self, call: Callable[[], None]) -> bool:
        """Return whether `call` reads and writes its tiers; where it cannot, the step raises that
        in the end.
        """
        succeeds = False
        with self._around_step.noted():
            call()
            succeeds = True
        return succeeds

    def _after(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._step.has_begun:  # the closure was never called: nothing was stepped
            return
        if self._several and not self._step.ends(optimizer):
            self._around_step.availability.pause(self._step.unfinished)
            return
        step, self._step = self._step, OptimizerStep(self.optimizer)
        if self._several:
            self._around_step.availability.pause(None)
        self.num_finished += 1
        if self._shapes:
            self.states.reshape(self._groups, self._entries, whole=False)
        self._succeeds(self.runner.end_own)
        self.seal()
        self._around_step.after_step(late=self.runner.was_late)
        self.is_cut_off = False
        for zero_grad in step.cleared:
            zero_grad()
