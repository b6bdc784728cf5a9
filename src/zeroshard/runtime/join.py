"""Uneven numbers of batches: a rank whose data has ended shadows the others until theirs has
ended too.

As torch's ``Join`` does for DDP, with one difference: a rank here owns a part of the optimizer, so
it cannot sit out the steps. Before every forward, backward, clip, step and update of an average the
ranks tell each other what comes, and what they have made of their gradients since: kept, cleared or
set to zero. A rank without data answers "ended", does the same to its own and its share of it::

    rank 0   F forward   B backward   S step   F forward        B backward     S step         ended
    rank 1   F forward   B backward   S step   ended: gathers   ended: zeros   ended: steps   ended

The gradient is divided by all ranks, those without data included (DDP's
``divide_by_initial_world_size``); with weights (``engine.backward(loss, weight=n)``) by those of
the batches that there are. A shadowed clip or step takes the options of the param groups
(lr, betas, ...) from the lowest rank with data, whose scheduler is the one that goes on.

Where gathers are collective, a rank without data gathers what the others gathered in their last
pass, in that order. In a first pass, and in the first after ``engine.reset()``, they tell it each
unit; a pass that differs from the last one is a PlanMismatch.

Invariant: the ranks with data do the same things in the same order, else PlanMismatch on every
rank. Cost: one small exchange per event, and per unit of a pass that is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from zeroshard.comm.transport import Transport
from zeroshard.core.digest import holders
from zeroshard.core.schedule import Phase
from zeroshard.errors import PlanMismatch
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.backward_pass import is_checkpointed
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.loop import Loop

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
        for phase in _PHASES:
            if phase == what:
                order = self._weights.schedule.last_pass(phase) or []
        self._meet([what, self._left(), argument, options, order])
        if order == [] and self._some_ended and self._meets:
            self._weights.tell_gathers(lambda unit: self._meet([_GATHER, unit]))

    def _left(self) -> tuple[bool, list[int]]:
        """Return whether gradients rest here, and the numbers of the parameters whose have been set
        to zero since the last backward.
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
                _take_over(group, values)
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


def _take_over(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(group[key], torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = type(group[key])(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return an option as a number where it is a tensor that holds one."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
