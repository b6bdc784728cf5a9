"""Lanes that start late and memory that is overwritten when it is given back change no bit.

Late lanes let compute run ahead of every gather and reduce; late compute lets lanes run ahead. The
pretended device has no time to be late in: it runs compute first, or last. The poisoner writes NaN
in compute's order to what the engine frees (tests/support/adversary.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.chosen import HAS_CUDA, order_of, sized, slow_unless_cuda
from tests.support.adversary import ForgetfulReduction, Poisoner, disturbed
from tests.support.programs import PROGRAMS, Program
from tests.support.training import ROWS, Run
from zeroshard.runtime import bucket

pytestmark = pytest.mark.usefixtures("deterministic")

PLAIN = {row: Program(row=row) for row in ROWS}
CASES = {name: sized(program) for name, program in {**PLAIN, **PROGRAMS}.items()}
del CASES["compiled blocks"]  # nothing of it is another lane's


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
    if HAS_CUDA:
        with disturbed(device, late) as poisoner:
            return program.train(device, transport="nccl"), poisoner
    poisoner = Poisoner(device)
    order = "compute_first" if late == "lanes" else "compute_last"
    with poisoner.poisoning(), order_of(order):
        return program.train(device, transport="nccl"), poisoner
