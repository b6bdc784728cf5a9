"""Forwards that torch's reentrant checkpoint will run again inside the backward: how many of a
unit's are still to come.

A reentrant checkpoint runs its forward without gradients, runs it again in backward, and then runs
a backward of its own, in which each parameter gets a gradient. So a unit inside several such
checkpoints gets several gradients in one backward, and only the last one completes it. Each forward
of a module inside ``CheckpointFunction.forward`` counts one up, each forward with gradients inside
a backward one down.

The counts are in core/residency.py. Cost: nothing where gradients are on. What it does not do: know
the reentrant checkpoints of other libraries; a gradient that comes late for that reason is reduced
before the step (backward.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from zeroshard.core.residency import Use
from zeroshard.runtime.unit import Unit

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def count_recomputations(
    units: Sequence[Unit], *, ends_one: bool, enter: Callable[[], None]
) -> None:
    """Count the forward of a module of `units` that is about to run: with gradients inside a
    backward (`ends_one`), or without outside of it. `enter` notes that backward, which may bring no
    gradient before the one that the checkpoint runs inside it.
    """
    if ends_one:
        if any(unit.residency.has(Use.REPEATED) for unit in units) and is_recomputed():
            enter()
            for unit in units:
                unit.residency.release(Use.REPEATED)
    elif is_checkpointed():
        for unit in units:
            unit.residency.acquire(Use.REPEATED)


def is_checkpointed() -> bool:
    """Whether this runs inside the forward of a reentrant checkpoint."""
    return _frame_of(CheckpointFunction.forward.__code__) is not None


def is_recomputed() -> bool:
    """Whether this runs inside the backward of a reentrant checkpoint, and not in the nested
    backward that it starts.
    """
    return _frame_of(CheckpointFunction.backward.__code__, _RUN_BACKWARD) is not None


def checkpoint_around() -> Any:
    """Return the autograd node of the reentrant checkpoint inside whose backward this runs, None
    outside of one.
    """
    inside = _frame_of(_RUN_BACKWARD)
    code = CheckpointFunction.backward.__code__
    around = inside and _frame_of(code, _RUN_BACKWARD, inside.f_back)
    return None if around is None else around.f_locals["ctx"]


def when_over(node: Any, call: Callable[[], None]) -> None:
    """Call `call` once, in the backward of `node`, right after that of the node itself."""

    def over(*grads: Any) -> None:
        handle.remove()
        call()

    handle = node.register_hook(over)


def _frame_of(
    code: CodeType, but_not: CodeType | None = None, frame: FrameType | None = None
) -> FrameType | None:
    """Return the innermost frame that runs `code`, from `frame` (default: the caller's caller) on
    outwards, none beyond one that runs `but_not`.
    """
    frame = frame or sys._getframe(2)
    while frame is not None and frame.f_code is not but_not:
        if frame.f_code is code:
            return frame
        frame = frame.f_back
    return None
