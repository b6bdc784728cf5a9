"""``zeroshard top``: a line per rank of a real run, of which one rank does not come."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zeroshard.launch import cli
from zeroshard.terminal import EXIT_USAGE

SCRIPT = """
import json, os, pathlib, sys, time
import torch
from torch import nn
import zeroshard as zs

folder = pathlib.Path(sys.argv[1])
zs.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
engine = zs.shard(model, optimizer, stage=3)
for step in range(10):
    if step == 8:
        while engine.rank == 1 and not (folder / "go").exists():
            time.sleep(0.05)
    model(torch.randint(0, 64, (2, 16))).square().mean().backward()
    optimizer.step()
    memory = engine.memory()
    held = memory.total + memory.temporary, memory.total + memory.peak
    (folder / f"memory-{engine.rank}").write_text(json.dumps(held))
    optimizer.zero_grad()
    time.sleep(0.1)
"""


def _top(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code = cli.main(["top", *argv, "--once", "--json"])
    assert code in (0, EXIT_USAGE)  # the ranks have not started yet
    return json.loads(capsys.readouterr().out or "[]")


def test_a_line_per_rank_says_how_far_it_is_and_for_whom_it_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", str(script), str(tmp_path)]
    job = subprocess.Popen(line)
    run = str(job.pid)
    try:
        deadline = time.monotonic() + 240
        ranks: Any = []
        while [one["waits_for"] for one in ranks] != [[1], []] or ranks[0]["silent_s"] < 1:
            assert job.poll() is None and time.monotonic() < deadline, ranks
            time.sleep(0.2)
            ranks = _top(capsys, run)
        assert [one["rank"] for one in ranks] == [0, 1] and [one["step"] for one in ranks] == [8, 8]
        for one in ranks:
            held, peak = json.loads((tmp_path / f"memory-{one['rank']}").read_text())
            assert (one["held_bytes"], one["peak_bytes"]) == (held, peak)
            # 32 tokens a step, of which each takes 0.1 s at least
            assert one["step_s"] > 0.1
            assert one["tokens_per_s"] == pytest.approx(32 / one["step_s"], rel=0.5)
        assert cli.main(["top", run]) == 0
        head, _, first, second = capsys.readouterr().out.splitlines()
        assert head.split()[:5] == ["rank", "step", "s/step", "tokens/s", "held"]
        assert first.rstrip().endswith("rank 1") and second.split()[-1] == "-"
    finally:
        (tmp_path / "go").touch()
        assert job.wait(timeout=240) == 0
    assert cli.main(["top", run]) == EXIT_USAGE
    assert f"no ranks of {run} are on this host" in capsys.readouterr().err
