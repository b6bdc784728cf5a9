"""Lanes that start late and memory that is overwritten when it is given back change no bit.

Late lanes let compute run ahead of every gather and reduce; late compute lets lanes run ahead. The
pretended device has no time to be late in: it runs compute first, or last. The poisoner writes NaN
in compute's order to what the engine frees (tests/support/adversary.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.gpu.chosen import HAS_CUDA, order_of, sized, slow_unless_cuda
from tests.support.adversary import ForgetfulReduction, Poisoner, slow_compute, slow_lanes
from tests.support.programs import PROGRAMS, Program
from tests.support.training import ROWS, Run
from zeroshard.runtime import bucket
from zeroshard.runtime.streams import AcceleratorStreams

pytestmark = pytest.mark.usefixtures("deterministic")

PLAIN = {row: Program(row=row) for row in ROWS}
CASES = {name: sized(program) for name, program in {**PLAIN, **PROGRAMS}.items()}
del CASES["compiled blocks"]  # nothing of it is another lane's
CYCLES = 2_000_000  # about a millisecond


@pytest.mark.parametrize("late", ["lanes", pytest.param("compute", marks=slow_unless_cuda)])
@pytest.mark.parametrize("name", CASES)
def test_neither_late_lanes_nor_poison_change_a_bit(
    device: str, native_group: Any, name: str, late: str
) -> None:
    quiet = CASES[name].train(device, transport="nccl")
    run, poisoner = _disturbed(CASES[name], device, late)
    assert not run.differs_from(quiet), (name, run.differs_from(quiet))
    assert poisoner.num_released + poisoner.num_dropped > 0


def test_the_poisoner_finds_a_reduce_that_does_not_hold_its_memory(
    device: str, native_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = replace(CASES["gradient codec"], steps=2)  # a third NaN in a row would raise
    quiet = program.train(device, transport="nccl")
    monkeypatch.setattr(bucket, "Reduction", ForgetfulReduction)
    run, _ = _disturbed(program, device, "lanes")
    assert run.differs_from(quiet)


def _disturbed(program: Program, device: str, late: str) -> tuple[Run, Poisoner]:
    poisoner = Poisoner(device)
    sleep = partial(torch.get_device_module(device)._sleep, CYCLES)
    with ExitStack() as stack:
        stack.enter_context(poisoner.poisoning())
        if not HAS_CUDA:
            stack.enter_context(order_of("compute_first" if late == "lanes" else "compute_last"))
        elif late == "lanes":
            stack.enter_context(slow_lanes(AcceleratorStreams, sleep))
        else:
            stack.enter_context(slow_compute(sleep))
        return program.train(device, transport="nccl"), poisoner
