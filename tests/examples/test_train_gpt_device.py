"""examples/train_gpt.py on the pretended device, which it does not name: torch loads it as it loads
a vendor's, by an entry point of ``torch.backends``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device.build import build, compiler_missing
from tests.support.harness import ROOT
from tests.support.launched import run_script
from zeroshard.launch.cli import main

pytestmark = pytest.mark.skipif(
    compiler_missing() is not None, reason=f"no pretended device: {compiler_missing()}"
)

SCRIPT = ROOT / "examples" / "train_gpt.py"
DEVICE = "tests.device.zsim"
WORDS = "layers 2 width 32 heads 2 context 32 batch 4 sample 8 steps 7"
SMALL = [f"--{word}" if word.isalpha() else word for word in WORDS.split(" ")]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which torch finds the pretended device, as if it were installed."""
    folder = tmp_path_factory.mktemp("vendor")
    (folder / "zsim_vendor.py").write_text("def load():\n    import tests.device.zsim\n")
    facts = folder / "zsim_vendor-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: zsim-vendor\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\nzsim = zsim_vendor:load\n")
    build()
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _train(environment: dict[str, str], folder: Path, device: str, ranks: int) -> dict[str, Any]:
    out = folder / f"{device}.json"
    launcher = ["-m", "zeroshard", "run", "--nproc", str(ranks)] if ranks > 1 else []
    words = ["--device", device, "--json", str(out), "--trace", str(folder / device)]
    _run([*launcher, "examples/train_gpt.py", *SMALL, *words], environment)
    result: dict[str, Any] = json.loads(out.read_text())["results"][0]
    return result


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_example_trains_on_a_device_that_torch_has_loaded(
    environment: dict[str, str], tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = _train(environment, tmp_path, "zsim", ranks)
    if ranks == 1:
        on_cpu = _train(environment, tmp_path, "cpu", ranks)
        # kernels are the CPU's, and what they are called with: the same numbers but for rounding
        assert ours["losses"] == pytest.approx(on_cpu["losses"], rel=1e-4)
        assert ours["memory"] == on_cpu["memory"]
    assert ours["losses"][-1] < ours["losses"][0]
    assert main(["report", str(tmp_path / "zsim" / "ZeRO-3")]) == 0
    assert "exposed" in capsys.readouterr().out
    assert (tmp_path / "zsim" / "ZeRO-3" / "lanes.png").stat().st_size > 10_000
    for rank in range(ranks if ranks > 1 else 0):  # one process gathers and reduces nothing
        _has_real_lanes(tmp_path / "zsim" / "ZeRO-3" / f"rank-{rank:05}.json")


def test_trails_on_that_device_are_equal_on_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build()
    words = [*SMALL, "--device", "zsim", "--leaves", "4", "--trail-every", "2", "--steps", "3"]
    for ranks, more in ((1, []), (2, ["--stage", "2"])):
        all_words = [*words, "--trail", str(tmp_path / str(ranks)), *more]
        run_script(SCRIPT, *all_words, ranks=ranks, device=DEVICE)
    assert main(["compare", *(str(tmp_path / ranks) for ranks in "12")]) == 0
    assert "equal: every hash of 2 step(s), 0 to 2" in capsys.readouterr().out


def _has_real_lanes(path: Path) -> None:
    """Gathers and reduces lie beside what compute does meanwhile."""
    lanes: dict[str, list[tuple[float, float]]] = {"all_gather": [], "reduce_scatter": []}
    parts = []
    for event in json.loads(path.read_text())["traceEvents"]:
        kind = event["args"].get("event")
        if kind in lanes:
            lanes[kind].append((event["ts"], event["ts"] + event["dur"]))
        elif kind in ("forward", "backward"):
            parts.append((event["ts"], event["ts"] + event["dur"]))
    for kind, spans in lanes.items():
        hidden_us = sum(
            max(0.0, min(end, stop) - max(begin, start))
            for begin, end in spans
            for start, stop in parts
        )
        assert len(spans) > 5 and hidden_us > 0, (path, kind, len(spans))
