"""Ray Train with two workers, one of which is killed: for real, by an interpreter that has Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ROOT, run_ranks
from tests.support.launched_runs import ddp_losses

STEPS, KILLED_AT = 6, 3  # as tests/support/ray_runs.py has them


def _python() -> str:
    """Return an interpreter that has Ray, by ZEROSHARD_RAY_PYTHON or this one; else skip."""
    named = os.environ.get("ZEROSHARD_RAY_PYTHON", sys.executable)
    has = subprocess.run([named, "-c", "import ray.train"], capture_output=True)
    if has.returncode != 0:
        pytest.skip(
            "NOTHING WAS CHECKED UNDER RAY: ZEROSHARD_RAY_PYTHON names an interpreter that has it"
            ' (pip install "ray[train]")'
        )
    return named


@pytest.mark.slow
def test_workers_of_ray_train_as_ddp_does_and_go_on_after_one_is_killed(tmp_path: Path) -> None:
    line = [_python(), str(ROOT / "tests" / "support" / "ray_runs.py"), str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(line, env=env, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    said = next(one for one in ended.stdout.splitlines() if one.startswith("FOUND "))
    found = json.loads(said.removeprefix("FOUND "))
    expected = dict(zip(map(str, range(STEPS)), run_ranks(2, ddp_losses, STEPS)[0], strict=True))
    assert found["twice"] == {"losses": expected, "began": ["0", str(KILLED_AT)], "error": ""}
    once = found["once"]
    assert list(once["losses"]) == [str(step) for step in range(KILLED_AT)]
    assert "rank(s) [1] ended without finishing" in once["error"]
