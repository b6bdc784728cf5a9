"""One step of stage 3, in one process and over the device's own backend: if this is broken,
nothing else is worth running.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.chosen import sized
from tests.support.programs import Program


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_step_in_one_process(device: str, precision: str) -> None:
    _step(device, precision, "auto")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_step_over_the_devices_backend(device: str, native_group: Any, precision: str) -> None:
    _step(device, precision, "nccl")


def _step(device: str, precision: str, transport: str) -> None:
    program = sized(Program(precision=precision, steps=2))
    run = program.train(device, transport=transport)
    plain = program.train_plainly(device)
    assert run.losses == pytest.approx(plain.losses, rel=1e-2)
