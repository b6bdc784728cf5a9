"""Memory of a device over thirty steps: allocated, reserved and peak, with expandable segments and
without. A snapshot for torch's memory viewer stays in the test's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.support.training import Net, batch, two_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = "cuda:0"
STEPS = 30
SETTLED = 5  # steps after which nothing may grow


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("segments", ["fixed", "expandable"])
def test_memory_is_steady_over_thirty_steps(segments: str, precision: str, tmp_path: Path) -> None:
    settings = f"expandable_segments:{segments == 'expandable'}"
    # the second name is that of torch before 2.9
    allocator = {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path), precision],
        env={**os.environ, **allocator},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(f"{segments} segments, {precision}: {report}")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
    assert report["allocated"][-1] == report["allocated"][SETTLED]
    assert report["peak"][-1] == report["peak"][SETTLED]
    assert report["reserved"][-1] <= 1.02 * report["reserved"][SETTLED] + 2**21
    assert report["retries"] == 0


def _measure(folder: Path, precision: str) -> dict[str, Any]:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    torch.cuda.memory._record_memory_history(max_entries=20_000)
    torch.manual_seed(0)
    model = Net(width=512, layers=12).to(DEVICE)
    optimizer = two_groups(model)
    comm = zs.Comm(transport="nccl")
    engine = zs.shard(model, optimizer, stage=3, precision=precision, comm=comm)
    report: dict[str, Any] = {"allocated": [], "reserved": [], "peak": []}
    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        engine.backward(model(*(tokens.to(DEVICE) for tokens in batch(0, step))))
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        report["allocated"].append(torch.cuda.memory_allocated())
        report["reserved"].append(torch.cuda.memory_reserved())
        report["peak"].append(torch.cuda.max_memory_allocated())
    report["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
    engine.close()
    dist.destroy_process_group()
    return report


if __name__ == "__main__":
    print(json.dumps(_measure(Path(sys.argv[1]), sys.argv[2])))
