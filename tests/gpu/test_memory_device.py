"""Memory of a device over many steps: allocated, reserved and peak; on CUDA with expandable
segments and without. There a snapshot for torch's memory viewer stays in the test's folder.
"""

from __future__ import annotations

import gc
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
from tests.gpu.chosen import HAS_CUDA, chosen_device, most_reserved
from tests.support.training import Net, batch, two_groups

STEPS = 30 if HAS_CUDA else 6
PRECISIONS = ("fp32", "bf16")
SETTLED = 5 if HAS_CUDA else 2  # steps after which nothing may grow


@pytest.mark.parametrize("segments", ["fixed", pytest.param("expandable", marks=pytest.mark.gpu)])
def test_memory_is_steady(segments: str, tmp_path: Path) -> None:
    settings = f"expandable_segments:{segments == 'expandable'}"
    # the second name is that of torch before 2.9
    allocator = {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path)],
        # a pool takes its second buffer while the first is in use, which threads leave to chance
        env={**os.environ, **allocator, "ZSIM_SCHEDULE": "fifo"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = json.loads(done.stdout.splitlines()[-1])
    for precision, report in reports.items():
        print(f"{segments} segments, {precision}: {report}")
        if HAS_CUDA:
            assert (tmp_path / precision / "snapshot.pickle").stat().st_size > 0
        assert report["allocated"][-1] == report["allocated"][SETTLED]
        assert report["peak"][-1] == report["peak"][SETTLED]
        assert report["reserved"][-1] <= most_reserved(report["reserved"][SETTLED])
        assert report["retries"] == 0


def _measure(folder: Path, precision: str) -> dict[str, Any]:
    folder.mkdir()
    device = chosen_device()
    module, kind = torch.get_device_module(device), torch.device(device).type
    dist.init_process_group(
        f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}",
        init_method=f"file://{folder}/store",
        rank=0,
        world_size=1,
    )
    gc.collect()
    module.empty_cache()
    if HAS_CUDA:
        torch.cuda.memory._record_memory_history(max_entries=20_000)
    torch.manual_seed(0)
    model = Net(**({"width": 512, "layers": 12} if HAS_CUDA else {"width": 64, "layers": 2})).to(
        device
    )
    optimizer = two_groups(model)
    comm = zs.Comm(transport="nccl")
    engine = zs.shard(model, optimizer, stage=3, precision=precision, comm=comm)
    report: dict[str, Any] = {"allocated": [], "reserved": [], "peak": []}
    for step in range(STEPS):
        module.reset_peak_memory_stats()
        engine.backward(model(*(tokens.to(device) for tokens in batch(0, step))))
        optimizer.step()
        optimizer.zero_grad()
        module.synchronize()
        report["allocated"].append(module.memory_allocated())
        report["reserved"].append(module.memory_reserved())
        report["peak"].append(module.max_memory_allocated())
    report["retries"] = module.memory_stats()["num_alloc_retries"]
    if HAS_CUDA:
        torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
    engine.close()
    dist.destroy_process_group()
    return report


if __name__ == "__main__":
    gc.disable()  # it comes when it likes
    folder = Path(sys.argv[1])
    found = {precision: _measure(folder / precision, precision) for precision in PRECISIONS}
    print(json.dumps(found))
