"""Forwards that torch's reentrant checkpoint will run again inside the backward: how many of a
unit's are still to come.

A reentrant checkpoint runs its forward without gradients, runs it again in backward, and then runs
a backward of its own, in which each parameter gets a gradient. So a unit inside several such
checkpoints gets several gradients in one backward, and only the last one completes it. Each forward
of a module inside ``CheckpointFunction.forward`` counts one up, each forward with gradients inside
a backward one down.

The counts are in forwards.py. Cost: nothing where gradients are on. What it does not do: know the
reentrant checkpoints of other libraries; a gradient that comes late for that reason is reduced
before the step (backward.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType, FrameType

import torch
from torch.utils.checkpoint import CheckpointFunction

from zeroshard.runtime.unit import Unit

__all__ = ["count_recomputations", "is_checkpointed", "is_recomputed"]


def count_recomputations(units: Sequence[Unit], *, ends_one: bool) -> None:
    """Count the forward of a module of `units` that is about to run: with gradients inside a
    backward (`ends_one`), or without outside of it.
    """
    if ends_one:
        if any(unit.forwards.to_recompute for unit in units) and is_recomputed():
            for unit in units:
                unit.forwards.recompute()
    elif is_checkpointed():
        for unit in units:
            unit.forwards.expect_recomputation()


def is_checkpointed() -> bool:
    """Whether this runs inside the forward of a reentrant checkpoint."""
    return _runs_inside(CheckpointFunction.forward.__code__)


def is_recomputed() -> bool:
    """Whether this runs inside the backward of a reentrant checkpoint, and not in the nested
    backward that it starts.
    """
    return _runs_inside(
        CheckpointFunction.backward.__code__,
        but_not=torch.autograd.graph._engine_run_backward.__code__,
    )


def _runs_inside(code: CodeType, but_not: CodeType | None = None) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not but_not:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
