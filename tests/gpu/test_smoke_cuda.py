"""One step of stage 3, in one process and over NCCL: if this is broken, nothing else is worth
running.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.programs import Program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_step_in_one_process(precision: str) -> None:
    _step(precision, "auto")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_step_over_nccl(nccl_group: Any, precision: str) -> None:
    _step(precision, "nccl")


def _step(precision: str, transport: str) -> None:
    program = Program(precision=precision, steps=2)
    run = program.train("cuda:0", transport=transport)
    plain = program.train_plainly("cuda:0")
    assert run.losses == pytest.approx(plain.losses, rel=1e-2)
