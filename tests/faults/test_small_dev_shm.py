"""Shared memory under a /dev/shm of 64 MB, as containers have it: a mount of that size, in a
mount namespace of the test's own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import torch
import zeroshard as zs

zs.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)))  # 128 MB
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = zs.shard(model, optimizer, stage=STAGE)
for _ in range(2):
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
size = os.statvfs("/dev/shm")
assert size.f_blocks * size.f_frsize == 64 << 20, "this is not the small mount"
assert size.f_blocks - size.f_bfree < 256, "something lies in /dev/shm"
assert {"shared_memory", "mapped"} & set(engine.traffic().links), engine.traffic()
if os.environ["RANK"] == "0":
    print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_training_works_where_dev_shm_is_small(stage: int, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "--mount", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("mount namespaces are not permitted here")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STAGE", str(stage)))
    inside = (
        f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {sys.executable} -m zeroshard run"
        f" --nproc 2 {script}"
    )
    result = subprocess.run(
        [unshare, "--mount", "sh", "-c", inside],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "trained" in result.stdout
