"""The bits of plain PyTorch: every row in three precisions, in one process and over the
device's own backend, and the options under which a device may go wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.gpu.chosen import sized, slow_unless_cuda
from tests.support.programs import PROGRAMS, Program
from tests.support.training import ROWS

pytestmark = pytest.mark.usefixtures("deterministic")

CODED = [name for name in PROGRAMS if "codec" in name]
ON_HOST = [name for name in PROGRAMS if name.endswith("on the host") and "check" not in name]
EXACT = [
    # what Inductor makes is CUDA's
    pytest.param(name, marks=[pytest.mark.gpu] if "compiled" in name else [])
    for name in PROGRAMS
    if name not in (*CODED, *ON_HOST)
]


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", pytest.param("fp16", marks=slow_unless_cuda)]
)
def test_every_row_has_the_bits_of_plain_pytorch(
    device: str, native_group: Any, precision: str
) -> None:
    program = sized(Program(precision=precision))
    plain = program.train_plainly(device)
    for row in ROWS:
        for transport in ("auto", "nccl"):
            run = replace(program, row=row).train(device, transport=transport)
            assert not run.differs_from(plain), (row, transport, run.differs_from(plain))


@pytest.mark.parametrize("name", EXACT)
def test_no_option_changes_a_bit(device: str, native_group: Any, name: str) -> None:
    program = sized(PROGRAMS[name])
    plain = program.train_plainly(device)
    for transport in ("auto", "nccl"):
        run = program.train(device, transport=transport)
        assert not run.differs_from(plain), (transport, run.differs_from(plain))


@pytest.mark.parametrize("name", ON_HOST)
def test_a_step_on_the_host_is_that_of_the_device_but_for_rounding(
    device: str, native_group: Any, name: str
) -> None:
    # The host's AdamW does not round as the device's does; weights one step old are further off.
    program = sized(PROGRAMS[name])
    plain, run = program.train_plainly(device), program.train(device, transport="nccl")
    torch.testing.assert_close(run.losses, plain.losses, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", CODED)
def test_a_codec_trains_nearly_as_without(device: str, native_group: Any, name: str) -> None:
    program = sized(PROGRAMS[name])
    exact = program.train_plainly(device)
    run, again = (program.train(device, transport="nccl") for _ in range(2))
    assert run.losses == pytest.approx(exact.losses, rel=0.1)
    assert run.differs_from(exact), "the codec was left out"
    assert not run.differs_from(again)


@pytest.mark.parametrize("row", ROWS)
def test_the_ordered_sum_has_the_same_bits(device: str, native_group: Any, row: str) -> None:
    native, ordered = (
        sized(Program(row=row, comm={"ordered": ordered})).train(device, transport="nccl")
        for ordered in (False, True)
    )
    assert not ordered.differs_from(native)


def test_a_backward_that_fails_leaves_no_trace_after_reset(device: str, native_group: Any) -> None:
    from tests.support.training import batch, final_state, make_model, take_steps, two_groups

    states = []
    for fails in (False, True):
        model = make_model(width=64, layers=2).to(device)
        optimizer = two_groups(model)
        engine = zs.shard(
            model, optimizer, stage=3, precision="bf16", comm=zs.Comm(transport="nccl")
        )
        if fails:
            handle = model.blocks[0].up.weight.register_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                engine.backward(model(*(tokens.to(device) for tokens in batch(0, 9))))
            handle.remove()
            engine.reset()
        take_steps(
            0,
            3,
            model,
            optimizer,
            engine,
            data=lambda rank, step: [tokens.to(device) for tokens in batch(rank, step)],
        )
        states.append(final_state(model, engine))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def _fail(grad: torch.Tensor) -> None:
    raise ZeroDivisionError
