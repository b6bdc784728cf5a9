"""Longer trainings over NCCL: twenty steps with clipping stay near plain PyTorch, and encoded ones
near exact ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.programs import Program
from tests.support.training import ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = "cuda:0"
CODED = {"weight_codec": "int8", "grad_codec": "int4", "error_feedback": True}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ordered", [None, True], ids=["native", "ordered"])
def test_twenty_steps_with_clipping_are_those_of_every_row(
    nccl_group: Any, row: str, ordered: bool | None
) -> None:
    # no large norm is clipped to 100, so plain PyTorch need not clip
    program = Program(row=row, precision="fp32", steps=20, clip=100.0, comm={"ordered": ordered})
    plain, run = program.train_plainly(DEVICE), program.train(DEVICE, transport="nccl")
    torch.testing.assert_close(run.losses, plain.losses, rtol=1e-5, atol=1e-5)
    for name, value in run.state.items():
        torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_rows_are_equal_where_they_clip(nccl_group: Any, precision: str) -> None:
    runs = {
        row: Program(row=row, precision=precision, steps=20, clip=1.0).train(
            DEVICE, transport="nccl"
        )
        for row in ROWS
    }
    for row, run in runs.items():
        assert not run.differs_from(runs["ddp"]), (row, run.differs_from(runs["ddp"]))


def test_encoded_weights_and_gradients_train_nearly_as_exact_ones(nccl_group: Any) -> None:
    exact = Program(steps=40).train(DEVICE, transport="nccl").losses
    coded = Program(steps=40, comm=CODED).train(DEVICE, transport="nccl").losses
    assert coded != exact and sum(coded[-10:]) == pytest.approx(sum(exact[-10:]), rel=0.05)
