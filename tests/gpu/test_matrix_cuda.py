"""The programs of tests/device on CUDA: rows, precisions, tiers, codecs, meshes and calls give the
same bits when lanes or compute start late and memory is overwritten as it is given back, and those
of plain PyTorch where they are promised. One rank meets over NCCL; two share the device, over gloo,
which takes no tensor of CUDA for what meshes and experts send.
"""

from __future__ import annotations

import pytest

from tests.device.programs import CASES, Schedule, compare
from tests.gpu.chosen import HAS_CUDA
from tests.support.harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")]

LATE: tuple[Schedule, ...] = (("compute_first", 0), ("compute_last", 0))  # lanes, compute
OVER_NCCL = ("pipelines, tensor parallelism", "experts")
EVERY = [
    (world, name)
    for name, case in CASES.items()
    for world in case.worlds
    if world == 1 or (world == 2 and case.kind not in OVER_NCCL)
]


@pytest.mark.parametrize("world, name", EVERY, ids=[f"{n} x {name}" for n, name in EVERY])
def test_late_lanes_late_compute_and_poison_change_no_bit(world: int, name: str) -> None:
    device = "torch.cuda" if world == 1 else ""
    for outcome in run_ranks(world, compare, name, LATE, timeout=100, device=device):
        assert not outcome.found, "\n".join(outcome.found)
