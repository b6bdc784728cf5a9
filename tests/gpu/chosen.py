"""The device of these tests, for ranks and processes that no fixture reaches.

The pretended device needs a third of a millisecond for each operation: there programs are smaller,
and what it shows no better than the tests of tests/device is marked slow.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.programs import Program

HAS_CUDA = torch.cuda.is_available()
PRETENDED = "tests.device.zsim"
_STEPS, _LAYERS = 3, 2

# marks of a parameter, or of a module's tests
slow_unless_cuda = [] if HAS_CUDA else [pytest.mark.slow]


def chosen_device() -> str:
    """Return the device, after making it the current one; loads the pretended device where there is
    no CUDA.
    """
    if not HAS_CUDA:
        importlib.import_module(PRETENDED)
    torch.accelerator.set_device_index(0)
    return "cuda:0" if HAS_CUDA else "zsim:0"


def most_reserved(settled: int) -> float:
    """Return how many bytes the allocator may have reserved in the end, that had reserved `settled`
    once every pool had its buffers: CUDA's has fragments.
    """
    return 1.02 * settled + 2**21 if HAS_CUDA else settled


def sized(program: Program) -> Program:
    """Return `program` as the device has time for it."""
    if HAS_CUDA:
        return program
    return replace(program, steps=min(program.steps, _STEPS), layers=_LAYERS)


@contextmanager
def order_of(schedule: str) -> Iterator[None]:
    """Let the pretended device take its tasks in the order of `schedule`."""
    zsim: Any = importlib.import_module(PRETENDED)
    zsim.set_schedule(schedule)
    try:
        yield
    finally:
        zsim.set_schedule("threads")
