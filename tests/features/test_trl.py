"""TRL's trainers, sharded in both ways, beside themselves under DDP: the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = str(ROOT / "tests" / "support" / "trl_runs.py")


def _run(*command: str) -> list[float]:
    line = [sys.executable, *command]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    losses: list[float] = json.loads(found[0])["losses"] if found else []
    return losses


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_a_trainer_of_trl_has_the_losses_that_it_has_with_ddp(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    _run(SCRIPT, kind, "make", str(tmp_path))
    launch = ("-m", "zeroshard", "run", "--nproc", "2")
    plain = _run(*launch, SCRIPT, kind, "plain", str(tmp_path))
    assert len(plain) == 4 and len(set(plain)) > 1
    native = _run(*launch, SCRIPT, kind, "native", str(tmp_path))
    unmodified = _run(*launch, "--as-deepspeed", SCRIPT, kind, "deepspeed", str(tmp_path))
    assert native == pytest.approx(plain, rel=1e-5, abs=1e-6)
    assert unmodified == pytest.approx(plain, rel=1e-5, abs=1e-6)
