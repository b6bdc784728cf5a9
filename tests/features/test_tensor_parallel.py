"""Tensor parallelism first, sharding after: the same training as in one process, and the same
bits in every row.
"""

from __future__ import annotations

import pytest

from tests.support.harness import run_ranks
from tests.support.tensor_parallel import CASES, alone, difference, mesh_of, train

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
SMALL = 0.05  # what clips every step

# ------------------------------------------------------------------------------------ the same bits


def _as_alone(rank: int, world: int, name: str, rows: tuple[str, ...], dp: int, steps: int) -> None:
    mesh = mesh_of(dp=dp, tp=world // dp)
    case = CASES[name]
    expected = alone(case, dp, steps, clip=SMALL)[mesh.get_local_rank("dp")]
    first = None
    for row in rows:
        run = train(case, mesh, steps, clip=SMALL, policy=row)
        assert run.losses == pytest.approx(expected.losses, rel=1e-5), row
        assert run.norms == pytest.approx(expected.norms, rel=1e-5), row
        assert difference(run.state, expected.state) < 1e-5, row
        first = first or run
        assert not run.same_bits(first), (row, run.same_bits(first))


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process_and_rows_have_the_same_bits(name: str) -> None:
    run_ranks(4, _as_alone, name, ("ddp", "zero2", "zero3"), 2, 3, timeout=100)
