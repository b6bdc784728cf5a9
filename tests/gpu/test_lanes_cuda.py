"""Lanes that start late and memory that is overwritten when it is given back change no bit.

Late lanes let compute run ahead of every gather and reduce; late compute lets lanes run ahead. The
poisoner writes NaN in compute's order to what the engine frees (tests/support/adversary.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.adversary import Poisoner, slow_compute, slow_lanes
from tests.support.programs import PROGRAMS, Program
from tests.support.training import ROWS, Run
from zeroshard.runtime import bucket
from zeroshard.runtime.bucket import Reduction
from zeroshard.runtime.streams import AcceleratorStreams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]

DEVICE = "cuda:0"
CASES = {**{row: Program(row=row) for row in ROWS}, **PROGRAMS}
del CASES["compiled blocks"]  # nothing of it is another lane's
SLEEP = partial(torch.cuda._sleep, 2_000_000)  # cycles: about a millisecond


@pytest.mark.parametrize("late", ["lanes", "compute"])
@pytest.mark.parametrize("name", CASES)
def test_neither_late_lanes_nor_poison_change_a_bit(nccl_group: Any, name: str, late: str) -> None:
    quiet = CASES[name].train(DEVICE, transport="nccl")
    run, poisoner = _disturbed(CASES[name], late)
    assert not run.differs_from(quiet), (name, run.differs_from(quiet))
    assert poisoner.num_released + poisoner.num_dropped > 0


def test_the_poisoner_finds_a_reduce_that_does_not_hold_its_memory(
    nccl_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(flight: Any, buffer: Any, loan: Any, uses: Any) -> Reduction:
        return Reduction(flight, buffer, loan, ())

    program = PROGRAMS["gradient codec"]
    quiet = program.train(DEVICE, transport="nccl")
    monkeypatch.setattr(bucket, "Reduction", forgetful)
    run, _ = _disturbed(program, "lanes")
    assert run.differs_from(quiet)


def _disturbed(program: Program, late: str) -> tuple[Run, Poisoner]:
    poisoner = Poisoner(DEVICE)
    with ExitStack() as stack:
        stack.enter_context(poisoner.poisoning())
        if late == "lanes":
            stack.enter_context(slow_lanes(AcceleratorStreams, SLEEP))
        else:
            stack.enter_context(slow_compute(SLEEP))
        return program.train(DEVICE, transport="nccl"), poisoner
