"""The engine on the pretended device: each row, precision and option has the same bits under every
schedule, and those of plain PyTorch where they are promised.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.device.programs import ALL, CASES, PRECISIONS, QUICK, Schedule, compare
from tests.support.harness import run_ranks
from tests.support.training import ROWS

ROUND = (
    "hpz", "mics", "hfsdp", "ordered zero3", "reduces apart, hpz", "codecs, hpz", "a fraction",
    "no_sync", "two levels of 2, zero3", "pipeline zero3", "tensor parallel zero3", "leaves zero3",
    "leaves zero1, on the host", "inference in int8, from the host", "experts zero3",
    "a rank leaves", "kept in memory, one goes on", "integers of 16 bits, equal",
    "integers of 16 bits, shares",
)  # fmt: skip
OPTIONS = (
    "error feedback", "codecs and no_sync", "frozen in int4", "micro-batches", "no_sync of stage 2",
    "checkpointed on the host", "accumulate on the host", "off the device and back", "reset",
    "average", "repartition", "save and load", "everything on the host", "states on the host",
    "everything late, fp32", "in the backward", "a fraction, fp32", "everything on disk",
    "inference, from the host",
    "to the host and back", "one curve, zero3", "decode, all on the host", "fused zero1",
    "fused, average", "fused, reset", "remainders zero1", "remainders, fused",
    "remainders off the device",
)  # fmt: skip
# the others are slow: about 75 runs here, of which each has two or three
ROWS_OFTEN = [
    *((1, f"{row} fp32") for row in ROWS),
    *((1, f"zero3 {precision}") for precision in PRECISIONS if precision != "fp32"),
    *((2, f"{row} bf16") for row in ROWS if row not in ("ddp", "zero2")),
]
BRANCHES = [(n, name) for name, case in CASES.items() if "branches" in name for n in case.worlds]
OFTEN = [*ROWS_OFTEN, *((1, name) for name in OPTIONS), *((2, name) for name in ROUND), *BRANCHES]


@pytest.mark.parametrize("world, name", OFTEN, ids=[f"{n} x {name}" for n, name in OFTEN])
def test_a_schedule_has_the_bits_of_another(world: int, name: str) -> None:
    # an option shows in the order that has found most
    _check(world, name, QUICK if (world, name) in ROWS_OFTEN else QUICK[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, name", [(world, name) for name, case in CASES.items() for world in case.worlds]
)
def test_every_schedule_has_the_same_bits(world: int, name: str) -> None:
    _check(world, name, ALL)


def _check(world: int, name: str, schedules: Sequence[Schedule]) -> None:
    for outcome in run_ranks(world, compare, name, schedules, device="tests.device.zsim"):
        assert not outcome.found, "\n".join(outcome.found)
