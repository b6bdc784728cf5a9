"""CUDA's own sanitizer of streams over every row and program. It does not see memory that the
allocator gives out again; tests/gpu/test_lanes_cuda.py does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.programs import PROGRAMS, Program
from tests.support.training import ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CASES = {**{row: Program(row=row) for row in ROWS}, **PROGRAMS}
del CASES["compiled blocks"]  # what Inductor launches does not pass the dispatcher


@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_the_stream_sanitizer_finds_no_race(transport: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path / "store"), transport],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [name.replace(" ", "-") for name in CASES]
    assert "CSAN detected" not in done.stderr, done.stderr[-4000:]


def _run_all(store: str, transport: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1
    )
    for name, program in CASES.items():
        replace(program, steps=2, clip=1.0).train("cuda:0", transport=transport)
        print(name.replace(" ", "-"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    _run_all(*sys.argv[1:])
