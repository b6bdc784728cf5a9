"""Uneven numbers of batches: ``engine.join()``, where a rank without further data shadows the
others until theirs has ended too, and ``engine.leaves()``, where ranks have no leaf in some rounds.

As torch's ``Join`` does for DDP, with one difference: a rank here owns a part of the optimizer, so
it cannot sit out the steps. Before every forward, backward, clip, step and update of an average the
ranks tell each other what comes, and what they have made of their gradients since: kept, cleared or
set to zero. A rank without data answers "ended", does the same to its own and its share of it::

    rank 0   F forward   B backward   S step   F forward        B backward     S step         ended
    rank 1   F forward   B backward   S step   ended: gathers   ended: zeros   ended: steps   ended

The gradient is divided by all ranks, those without data included (DDP's
``divide_by_initial_world_size``); with weights (``engine.backward(loss, weight=n)``) by the weights
of the batches that there are. A shadowed clip or step takes the options of the param groups (lr,
betas, ...) from the lowest rank with data: its scheduler goes on.

Where gathers are collective, a rank without data gathers what the others gathered in their last
pass, in that order. In a first pass, and in the first after ``engine.reset()``, they tell it each
unit; a pass that differs from the last one is a PlanMismatch.

Invariant: the ranks with data do the same things in the same order, else PlanMismatch on every
rank. Cost: one small exchange per event, and per unit of a pass that is told.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from zeroshard.comm.transport import Transport
from zeroshard.core.digest import holders
from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.schedule import Phase
from zeroshard.errors import ConfigError, PlanMismatch, StateError
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.backward_pass import WEIGHTED, is_checkpointed
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.loop import Loop
from zeroshard.system.device import Device, undisturbed

_ENDED, _GATHER = "ended", "gather"
_PHASES: tuple[Phase, ...] = ("forward", "backward")


class Average(Protocol):
    """An average of the weights, which the training loop updates (``zs.EMA``)."""

    averages: list[torch.Tensor]
    num_updates: int
    decay: float

    def update(self) -> None: ...


class Join:
    """One use of ``engine.join()``."""

    def __init__(
        self,
        loop: Loop,
        finalizer: Finalizer,
        optimizer: ShardedOptimizer,
        transport: Transport,
        averages: Sequence[weakref.ref[Average]],
    ) -> None:
        self._loop = loop
        self._backward = loop.backward
        self._finalizer = finalizer
        self._optimizer = optimizer
        self._transport = transport
        self._averages = averages  # in the order in which every rank has made them
        self._weights = weights = loop.weights
        self._lead = 0  # the rank that those without data follow: the lowest of the others
        self._some_ended = False
        # whether the ranks meet where a pass gathers
        self._meets = weights.schedule.rules.ordered and any(
            unit.cells.weight.is_sharded for unit in weights.units
        )

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Announce what this rank does in the body; afterwards shadow the ranks that go on."""
        with self._backward.announced(self._announce):
            yield
        while True:
            what, left, *more = self._meet([_ENDED, self._left()])
            self._follow(*left)
            if what == _ENDED:
                return
            self._shadow(what, *more)

    def _announce(self, what: str, argument: Any = None) -> None:
        options = order = None
        if what == "forward":
            argument = not (torch.is_grad_enabled() or is_checkpointed())  # whether it evaluates
        if what in ("clip", "step"):  # where the ranks compare them
            groups = self._optimizer.optimizer.param_groups
            options = [
                {key: _plain(value) for key, value in group.items() if _is_plain(_plain(value))}
                for group in groups
            ]
        if what == "step":
            self._optimizer.hold_options()  # others step with these
        for phase in _PHASES:
            if phase == what:
                order = self._weights.schedule.last_pass(phase) or []
        self._meet([what, self._left(), argument, options, order])
        if order == [] and self._some_ended and self._meets:
            self._weights.tell_gathers(lambda unit: self._meet([_GATHER, unit]))

    def _left(self) -> tuple[bool, list[int]]:
        """Return whether gradients rest here, and the numbers of the parameters that have had
        theirs set to zero since the last backward.
        """
        self._backward.collect_dropped()
        zeroed, parameters = self._backward.zeroed, self._backward.parameters
        numbers = [number for number, one in enumerate(parameters) if id(one.parameter) in zeroed]
        return self._backward.accumulation.has_gradient, numbers

    def _follow(self, has_gradient: bool, zeroed: list[int]) -> None:
        """Clear the gradients here, or set them to zero, where another rank has done so."""
        if not has_gradient:
            self._optimizer.optimizer.zero_grad()
        for parameter in (self._backward.parameters[number].parameter for number in zeroed):
            if id(parameter) not in self._backward.zeroed:
                self._backward.zero_gradient(parameter)

    def _meet(self, event: list[Any]) -> list[Any]:
        """Tell the others; return what the lowest rank with data does next, or what the last such
        rank says when none has any.
        """
        events: list[list[Any]] = self._transport.control.share(event, "engine.join()")
        names = [other[0] for other in events]
        going_on = [rank for rank, name in enumerate(names) if name != _ENDED]
        self._some_ended = len(going_on) < len(events)
        self._lead = min(going_on, default=self._lead)
        if len(set(names) - {_ENDED}) > 1:
            raise PlanMismatch(
                "in engine.join() the ranks with data must do the same in the same order;"
                f" {holders(names)}"
            )
        return events[self._lead]

    def _followed(self, order: list[int]) -> Iterator[int]:
        """Yield the units that a pass of the others gathers: in `order`, else as they tell."""
        yield from order
        while not order and (event := self._meet([_ENDED]))[0] == _GATHER and event[1] is not None:
            yield event[1]

    def _shadow(
        self,
        what: str,
        argument: Any,
        options: list[dict[str, Any]] | None,
        order: list[int] | None,
    ) -> None:
        optimizer = self._optimizer.optimizer
        if options is not None:
            for group, values in zip(optimizer.param_groups, options, strict=True):
                for key, value in values.items():
                    if isinstance(group[key], torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = type(group[key])(value) if isinstance(value, list) else value
        followed = self._followed(order or []) if self._meets else None
        if what == "forward":
            with torch.set_grad_enabled(not argument):
                self._loop.shadow_forward(followed)
        elif what == "backward":
            self._backward.shadow(followed, **argument)
        elif what == "clip":
            self._finalizer.clip(argument, self._loop.events.clipped)
        elif what == "average":
            if (average := self._averages[argument]()) is not None:
                average.update()
        else:
            assert what == "step", what
            optimizer.step()


def _plain(value: Any) -> Any:
    """Return an option as a number where it is a tensor that holds one."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


# ------------------------------------------------------------------------------------------- leaves
# The loop over a step's leaves: what ``engine.leaves()`` does around the user's backwards, and the
# random numbers of leaves.


class LeafLoop(Iterator[int]):
    """The result of ``engine.leaves()``: this rank's leaves of one step, to be gone through once,
    or given to ``engine.accumulate()``.
    """

    def __init__(
        self, loop: Loop, leaves: Leaves, device: torch.device, *, step: int, seed: int
    ) -> None:
        self.leaves = leaves
        self._loop, self._device = loop, device
        self._step, self._seed = step, seed
        self._walk: Iterator[int] | None = None  # once it has begun

    def __next__(self) -> int:
        if self._walk is None:
            walk = _walked(self._loop, self.leaves, self._device, step=self._step, seed=self._seed)
            self.leaves.follow(walk)
            self._walk = walk
        return next(self._walk)

    def begin_all(self, leaves: Leaves) -> Draws:
        """Begin the step in which ``engine.accumulate()`` runs all leaves; return the random
        numbers of this rank's. Raises ConfigError where these are not all of that engine's
        `leaves`, or a trail is written, StateError where gradients of an earlier step are there.
        """
        if self._loop.events.before_leaf:
            raise ConfigError(
                "engine.accumulate() inside engine.trail(), which follows one leaf after another:"
                " run the loop over engine.leaves() there"
            )
        if self.leaves is not leaves or self._walk is not None:
            raise ConfigError(
                "engine.accumulate() was given leaves of another engine, or some that have run:"
                " give it engine.leaves(step) itself"
            )
        _begin_step(self._loop, self._step, self._seed)
        self._walk = iter(())
        seeds = [seed_of(self._seed, self._step, leaf) for leaf in leaves.of_rank]
        return Draws(self._device, seeds)


class Draws:
    """The random numbers of several leaves that take turns to compute."""

    def __init__(self, device: torch.device, seeds: list[int]) -> None:
        """`seeds` are the leaves'; they draw on the CPU and `device`."""
        self._devices = [Device.of(name) for name in sorted({"cpu", str(device)})]
        self._seeds = seeds
        self._states: dict[int, list[torch.Tensor]] = {}  # of those that have begun

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Have the generators inside where leaf `number` of these has left them."""
        if number in self._states:
            for device, state in zip(self._devices, self._states[number], strict=True):
                device.set_generator_state(state)
        else:
            torch.manual_seed(self._seeds[number])
        try:
            yield
        finally:
            self._states[number] = [device.generator_state() for device in self._devices]


def _walked(
    loop: Loop, leaves: Leaves, device: torch.device, *, step: int, seed: int
) -> Generator[int]:
    """Yield this rank's leaves of `step`, with generators seeded; in rounds in which it has none,
    shadow the others. Raises StateError where gradients of an earlier step are there.
    """
    _begin_step(loop, step, seed)
    backward, events, schedule = loop.backward, loop.events, loop.weights.schedule
    for begun in events.before_leaves:
        begun(step, seed)
    for leaf in leaves:
        schedule.look_ahead(if_all_compute=leaves.all_compute)
        if leaf is None:
            here = backward.accumulation
            loop.shadow_forward(None)
            weighted = bool(here.kinds & WEIGHTED)
            backward.shadow(None, sync=True, scaled=here.scaled, weighted=weighted)
            continue
        for came in events.before_leaf:
            came(leaf)
        with undisturbed(device):
            torch.manual_seed(seed_of(seed, step, leaf))
            yield leaf
    schedule.look_ahead(if_all_compute=True)
    for ended in events.after_leaves:
        ended()


def _begin_step(loop: Loop, step: int, seed: int) -> None:
    """The ranks compare `step` and `seed` when they step. Raise StateError where gradients are
    there before the step's first leaf.
    """
    loop.backward.collect_dropped()
    if loop.backward.accumulation.has_gradient:
        raise StateError(
            "gradients rest here from before this step: call optimizer.zero_grad() before the loop"
            " over engine.leaves()"
        )
    loop.backward.decisions.note("step of engine.leaves()", str(step))
    loop.backward.decisions.note("seed of engine.leaves()", str(seed))


def seed_of(seed: int, step: int, leaf: int) -> int:
    """Return the seed of a leaf's random numbers, of 63 bits."""
    text = f"zeroshard {seed} {step} {leaf}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def refuse_leaves(leaves: Leaves | None, method: str) -> None:
    """Raise ConfigError where a run has leaves, which `method` of its engine does not run."""
    if leaves is not None:
        raise ConfigError(
            f"engine.{method}() does not run leaves={leaves.tree}: run the micro-batches in a loop"
            " over engine.leaves()"
        )


# -------------------------------------------------------------------------------- weights of losses
# The weight of a backward's loss in its step: ``engine.backward(loss, weight=n)``, and
# ``batch_shares``.
#
# Of means over n_1, n_2, ... samples with gradients g_1, g_2, ... the mean over all samples has::
#
#     (n_1 g_1 + n_2 g_2 + ...) / (n_1 + n_2 + ...)          over ranks and micro-batches
#
# The loss is multiplied, before its backward: where autograd crosses ranks (experts, context
# parallelism, gathered features, SyncBatchNorm) the gradient that arrives in a parameter comes from
# the losses of several ranks, each with its own weight. The quotient is formed once all ranks have
# told their weights (finalize.py).
#
# Invariant: a loss that counts 0 brings zeros, whatever its numbers are, and its graph runs, in
# which other ranks may wait (docs/design/exactness.md).


@contextmanager
def weighed(
    backward: Backward,
    scaler: LossScaler | None,
    loss: torch.Tensor,
    weight: float | torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Run the backward of `loss` inside, which counts `weight` (0-d of a tensor; None: the share of
    this rank). Yields the loss to call ``backward()`` of. Raises ConfigError for a weight where
    ranks are summed up.
    """
    if weight is not None:
        if backward.sums_ranks:
            raise ConfigError(
                "backward(weight=) forms a mean over all ranks, and gradient_reduction='sum' their"
                " sum: leave weight out and multiply the loss, or take gradient_reduction='mean'"
            )
        # with as many digits as the loss has: autograd rounds it so, and it shall count as much in
        # the sum of all weights
        digits, power = math.frexp(float(weight))
        weight = math.ldexp(float(torch.tensor(digits, dtype=loss.dtype)), power)
    counts = backward.share if weight is None else weight
    scaled = loss if scaler is None else loss.float() * scaler.scale
    if counts is not None:
        scaled = scaled * counts
    # to which the gradients of the loss are added
    scale = 1.0 if scaler is None else scaler.scale
    backward.parameters.scale_assigned(scale if counts is None else scale * counts)
    silenced = silence([scaled.grad_fn]) if counts == 0 else []
    try:
        with backward.running_as(has_loss=True, scaled=scaler is not None, weight=weight):
            yield scaled
    finally:
        for handle in silenced:
            handle.remove()


def silence(nodes: Iterable[Any]) -> list[RemovableHandle]:
    """Let all operators between `nodes` and the leaves make zeros of zeros, where 0 x NaN and 0 / 0
    would be NaN: the mean over no token is. Return the hooks that do so.

    Functions of other code are left alone: gradients of other ranks may come out of them.
    """
    handles, seen, todo = [], set[Any](), list(nodes)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(after for after, _ in node.next_functions)
        if not isinstance(node, BackwardCFunction) and "::" not in node.name():
            handles.append(node.register_hook(_zeros_of_zeros))
    return handles


def _zeros_of_zeros(
    grads: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...] | None:
    """Return the `grads` that an operator has made of those that have `arrived`, zeros where all of
    these are. The host waits only where an operator copies to another device.
    """
    there = [grad for grad in arrived if grad is not None]
    if not there or not all(  # in one block here
        type(grad) is torch.Tensor and grad.layout is torch.strided and not grad.is_nested
        for grad in (*there, *grads)
        if grad is not None
    ):
        return None
    device = there[0].device
    nothing = torch.stack([grad.count_nonzero().to(device) for grad in there]).sum() == 0
    return tuple(
        None if grad is None else torch.where(nothing.to(grad.device), 0.0, grad) for grad in grads
    )
