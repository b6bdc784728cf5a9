"""Two ranks over gloo on one device: every row, and the rows of several nodes, with no_sync."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.chosen import HAS_CUDA, PRETENDED, chosen_device
from tests.support.harness import run_ranks
from tests.support.programs import Program
from tests.support.training import ROWS, Run

SOME_ROWS = ROWS[1:] if HAS_CUDA else ("zero1", "zero3")
MESH_ROWS = ("hpz", "mics", "hfsdp") if HAS_CUDA else ("mics",)
RANKS = "" if HAS_CUDA else PRETENDED
STEPS, LAYERS = (6, 4) if HAS_CUDA else (2, 2)


def _train(rank: int, world: int, program: Program) -> Run:
    return program.train(chosen_device(), rank=rank, transport="gloo")


@pytest.mark.parametrize("no_sync", [False, True], ids=["every micro-batch", "no_sync"])
def test_two_ranks_share_one_device_with_equal_rows(no_sync: bool) -> None:
    program = Program(
        row="ddp", precision="fp32", steps=STEPS, layers=LAYERS, micro_batches=2, no_sync=no_sync
    )
    reference = run_ranks(2, _train, program, device=RANKS)
    for row in (*SOME_ROWS, *MESH_ROWS):
        comm = {"node_size": 1} if row in MESH_ROWS else {}
        # stage 1 adds micro-batches before ranks, the others ranks before micro-batches
        for run, expected in zip(
            run_ranks(2, _train, replace(program, row=row, comm=comm), device=RANKS),
            reference,
            strict=True,
        ):
            torch.testing.assert_close(run.losses, expected.losses, rtol=1e-4, atol=1e-4)
            if not no_sync:
                assert not run.differs_from(expected), (row, run.differs_from(expected))


def test_two_ranks_agree_in_bf16_with_codecs() -> None:
    codecs = {"weight_codec": "int8", "grad_codec": "int4"}
    for row in ("zero3", "hpz"):
        comm = {"node_size": 1, **codecs} if row == "hpz" else codecs
        program = Program(row=row, steps=STEPS, layers=LAYERS, comm=comm)
        first, second = run_ranks(2, _train, program, device=RANKS)
        assert all(torch.equal(value, second.state[name]) for name, value in first.state.items())
