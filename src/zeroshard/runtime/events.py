"""The events of a step, and who is called at each of them beside the parts that the loop runs.

    event            when
    before_forward   a forward of the model begins, outside a backward; nothing is gathered yet
    forward_begun    its first gathers have been started, or others' gathers (join.py)
    called           the same, and of each micro-batch of accumulate(); the model's arguments
    after_forward    it has ended, perhaps by an exception
    forward_agreed   it has ended well, on every rank: failures may be shared
    evaluated        the same of one without gradients, which no step may follow
    before_module    a module's forward begins; the units that it needs
    computed         a module that units belong to has computed its output; they and the output
    after_module     it has ended
    before_backward  a gradient has come to an output of a module; the module's units
    after_backward   the weights are there for it
    returned         a gradient has come to an input of a module that spans units; both
    lost             a loss is about to have its backward, in engine.backward() or accumulate()
    before_leaves    the loop over a step's leaves begins; the step's number and the seed
    before_leaf      a leaf of this rank begins; its number
    after_leaves     every leaf has had its backward; sums may still be under way
    clipped          the norm of the gradients is known; they are about to be clipped
    before_step      optimizer.step() begins
    averaged         the gradients are averaged, and every rank knows; nothing is written yet
    after_step       what the step wrote is published

Listeners of one event are called in the order of its list. ``runtime/assembly.py`` registers those
of an engine; `around` puts others around them for a while, a trace for one.

Invariant: listeners that are collective are the same on every rank, in the same order. Cost: that
of the listeners; an event that nobody listens to costs a look at an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from zeroshard.errors import StorageError
from zeroshard.runtime.unit import Unit

_Listeners = list[Callable[[], None]]
_OfUnits = list[Callable[[Sequence[Unit]], None]]


@dataclass(frozen=True)
class StepEvents:
    """The listeners of each event, in order."""

    before_forward: _Listeners = field(default_factory=list)
    called: list[Callable[[Any], None]] = field(default_factory=list)
    forward_begun: _Listeners = field(default_factory=list)
    after_forward: _Listeners = field(default_factory=list)
    forward_agreed: _Listeners = field(default_factory=list)
    evaluated: _Listeners = field(default_factory=list)
    before_module: _OfUnits = field(default_factory=list)
    computed: list[Callable[[Sequence[Unit], Any], None]] = field(default_factory=list)
    after_module: _Listeners = field(default_factory=list)
    before_backward: _OfUnits = field(default_factory=list)
    after_backward: _Listeners = field(default_factory=list)
    returned: list[Callable[[Sequence[Unit], torch.Tensor], None]] = field(default_factory=list)
    lost: list[Callable[[torch.Tensor], None]] = field(default_factory=list)
    before_leaves: list[Callable[[int, int], None]] = field(default_factory=list)
    before_leaf: list[Callable[[int], None]] = field(default_factory=list)
    after_leaves: _Listeners = field(default_factory=list)
    clipped: list[Callable[[torch.Tensor], None]] = field(default_factory=list)
    before_step: _Listeners = field(default_factory=list)
    averaged: _Listeners = field(default_factory=list)
    after_step: _Listeners = field(default_factory=list)

    @contextmanager
    def around(self, others: StepEvents) -> Iterator[None]:
        """Inside, call `others` too: before ours at the beginning of anything, else after them."""
        lists: list[tuple[str, list[Any], list[Any]]] = [
            (event.name, getattr(self, event.name), getattr(others, event.name))
            for event in fields(self)
        ]
        for name, here, more in lists:
            here[:] = [*more, *here] if name.startswith("before") else [*here, *more]
        try:
            yield
        finally:
            for _, here, more in lists:
                here[:] = [one for one in here if all(one is not other for other in more)]


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Raise StorageError, naming `what` listeners write, for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what}: cannot write it ({error.strerror or error}): name another directory"
        ) from None
