"""A model larger than its memory generates: four times the cap, from disk and from the host.

The cap is RLIMIT_DATA, on what a process allocates beyond the libraries. Weights that rest on the
host are memory of the process, too: there the cap leaves room for them, and a quarter of the model
for everything else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ROOT

pytest.importorskip("transformers")


_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    # holes in the allocator's heap, and arenas of threads, are no memory in use, but count
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}


def _generate(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tests" / "support" / "capped_generation.py"
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | _ENVIRONMENT,
    )


def _told(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stderr[-4000:]
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_four_times_the_memory_generates_the_tokens_of_the_plain_one(
    tmp_path: Path,
) -> None:
    plain = _told(_generate("plain", tmp_path))
    whole = plain["weight_bytes"]
    for tier, cap in (("disk", whole // 4), ("host", whole + whole // 4)):
        told = _told(_generate(tier, tmp_path, cap))
        assert told["tokens"] == plain["tokens"] and told["weight_bytes"] == whole
        assert told["peak"] <= whole // 4, told
        print({"tier": tier, "model": whole, "cap": cap, "gathered": told["peak"]})
    # the cap is one: half of it is not enough
    assert _generate("disk", tmp_path, whole // 40).returncode != 0
