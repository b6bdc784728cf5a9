"""scripts/gpu.sh without a GPU: its table, its order, what it says, and one part that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.harness import ROOT

SCRIPT = ROOT / "scripts" / "gpu.sh"
SET_SECONDS = 540  # nine minutes
FAKE = """#!/bin/bash
echo "$*" | head -1 >> {log}
case "$*" in
    -c*) [[ "$PYTHONPATH" == *{installed}* ]] || echo {lacks} ;;
    *pip*) ;;
    *{fails}*) exit 7 ;;
esac
"""


def _gpu(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, "PYTHON": python},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _fake(folder: Path, *, lacks: str = "", fails: str = "nothing") -> tuple[str, Path]:
    """Return an interpreter that writes down what it is asked to do, and where."""
    python, log = folder / "python", folder / "log"
    python.write_text(FAKE.format(log=log, lacks=lacks, fails=fails, installed="/tmp."))
    python.chmod(0o755)
    return str(python), log


def _table() -> list[tuple[str, int, str]]:
    rows = [line.split()[:3] for line in _gpu("--list").stdout.splitlines()]
    return [(part, int(seconds), name) for part, seconds, name in rows]


def test_no_set_of_parts_can_take_longer_than_nine_minutes() -> None:
    seconds: Counter[str] = Counter()
    for _, limit, name in _table():
        seconds[name] += limit
    assert list(seconds) == ["first", "second", "third", "fourth", "fifth", "sixth", "two"]
    assert max(seconds.values()) <= SET_SECONDS and seconds["two"] <= 360, seconds


def test_every_part_is_there_and_every_gpu_test_belongs_to_one() -> None:
    text = SCRIPT.read_text()
    parts = [part for part, _, _ in _table()]
    assert len(set(parts)) == len(parts) and parts[0] == "smoke"
    assert [part for part in parts if f"        {part}) " not in text] == []
    tests = [path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    assert len(tests) > 5 and [name for name in tests if f"tests/gpu/{name}" not in text] == []


def test_parts_run_in_the_order_asked_for_and_each_leaves_its_result(tmp_path: Path) -> None:
    python, log = _fake(tmp_path, fails="memory_device")
    done = _gpu("--device", "cpu", str(tmp_path / "out"), "second", "smoke", python=python)
    wanted = [part for part, _, name in _table() if name == "second"] + ["smoke"]
    assert done.returncode == 1, done.stderr  # one has failed, and the others have run
    report = (tmp_path / "out" / "parts.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in report] == wanted
    assert [line.split(":")[0] for line in report if "exit code 0" not in line] == ["memory"]
    assert all((tmp_path / "out" / f"{part}.txt").is_file() for part in wanted)
    asked = log.read_text()
    assert "bench step --nproc 1 --sizes tiny --precision bf16 --contenders zero3,plain" in asked
    assert f"--out {tmp_path}/out/plain.json" in asked
    assert "--collect-only --basetemp" not in asked and asked.count("--collect-only") == 4


def test_nothing_is_run_after_a_smoke_that_fails(tmp_path: Path) -> None:
    python, _ = _fake(tmp_path, fails="smoke_device")
    done = _gpu("--device", "cpu", str(tmp_path / "out"), "first", python=python)
    assert done.returncode == 1 and "worthless" in done.stderr
    assert len((tmp_path / "out" / "parts.txt").read_text().splitlines()) == 1


def test_missing_packages_are_one_line_or_come_from_the_wheels(tmp_path: Path) -> None:
    python, log = _fake(tmp_path, lacks="pydantic pydantic_core")
    done = _gpu("--device", "cpu", str(tmp_path / "out"), "smoke", python=python)
    assert done.returncode == 3 and not (tmp_path / "out" / "parts.txt").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{python} lacks: pydantic pydantic_core")
    wheels = str(tmp_path)
    done = _gpu(
        "--wheels", wheels, "--device", "cpu", str(tmp_path / "out"), "smoke", python=python
    )
    assert done.returncode == 0, done.stderr
    (pip,) = [line for line in log.read_text().splitlines() if " pip " in line]
    assert f"--no-index --no-deps --find-links {wheels} --target" in pip
    assert pip.endswith("pydantic pydantic-core")


@pytest.mark.parametrize("arguments", [[], ["--wrong"], ["--device", "cpu", "{out}", "nonesuch"]])
def test_what_it_does_not_understand_it_refuses(arguments: list[str], tmp_path: Path) -> None:
    done = _gpu(*(word.format(out=tmp_path / "out") for word in arguments))
    assert done.returncode == 2 and "scripts/gpu.sh" in done.stderr


@pytest.mark.slow
def test_a_part_runs_on_the_cpu_at_tiny_size(tmp_path: Path) -> None:
    done = _gpu("--device", "cpu", str(tmp_path), "codec")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads((tmp_path / "codec.json").read_text())["rows"]
    assert "test_codec_kernels.py" in (tmp_path / "codec.txt").read_text()
