"""Longer trainings over the device's own backend: twenty steps with clipping stay near plain
PyTorch, and encoded ones near exact ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.chosen import HAS_CUDA, sized, slow_unless_cuda
from tests.support.programs import Program
from tests.support.training import ROWS

STEPS, LAYERS = (40, 4) if HAS_CUDA else (12, 2)
CODED = {"grad_codec": "int4", "error_feedback": True}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "ordered", [None, pytest.param(True, marks=slow_unless_cuda)], ids=["native", "ordered"]
)
def test_twenty_steps_with_clipping_are_those_of_every_row(
    device: str, native_group: Any, row: str, ordered: bool | None
) -> None:
    # no large norm is clipped to 100, so plain PyTorch need not clip
    program = sized(
        Program(row=row, precision="fp32", steps=20, clip=100.0, comm={"ordered": ordered})
    )
    plain, run = program.train_plainly(device), program.train(device, transport="nccl")
    torch.testing.assert_close(run.losses, plain.losses, rtol=1e-5, atol=1e-5)
    for name, value in run.state.items():
        torch.testing.assert_close(value, plain.state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "precision", ["bf16", *(pytest.param(p, marks=slow_unless_cuda) for p in ("fp32", "fp16"))]
)
def test_rows_are_equal_where_they_clip(device: str, native_group: Any, precision: str) -> None:
    runs = {
        row: sized(Program(row=row, precision=precision, steps=20, clip=1.0)).train(
            device, transport="nccl"
        )
        for row in ROWS
    }
    for row, run in runs.items():
        assert not run.differs_from(runs["ddp"]), (row, run.differs_from(runs["ddp"]))


@pytest.mark.parametrize("weight_codec", [pytest.param("int8", marks=slow_unless_cuda)])
def test_encoded_weights_and_gradients_train_nearly_as_exact_ones(
    device: str, native_group: Any, weight_codec: str
) -> None:
    exact = Program(steps=STEPS, layers=LAYERS).train(device, transport="nccl").losses
    comm = {"weight_codec": weight_codec, **CODED}
    coded = Program(steps=STEPS, layers=LAYERS, comm=comm).train(device, transport="nccl").losses
    assert coded != exact and sum(coded[-10:]) == pytest.approx(sum(exact[-10:]), rel=0.05)
