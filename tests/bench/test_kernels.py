"""`zeroshard bench kernels`: names, sums and gaps of a trace that is written here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.kernels import Options, read, run
from zeroshard.errors import ConfigError


def event(ts: float, dur: float, name: str, cat: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "ts": ts, "dur": dur, "name": name, "cat": cat}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two steps: a product, then after a gap of 100 us a copy beside a sum."""
    events = [event(0, 999, "aten::mm", "cpu_op"), {"ph": "M", "name": "process_name"}]
    for start in (1000, 2000):
        events += [event(start, 400, "gemm"), event(start + 500, 200, "copy", "gpu_memcpy")]
        events += [event(start + 600, 200, "sum")]
    file = tmp_path / "one.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return file


def test_kernels_of_one_name_are_added_and_gaps_have_neighbours(trace: Path) -> None:
    found = read(trace, steps=2, gap_us=50)
    assert found.names == [("gemm", 0.4, 1.0), ("copy", 0.2, 1.0), ("sum", 0.2, 1.0)]
    assert found.num_kernels == 3 and found.busy_ms == pytest.approx(0.7)
    assert found.span_ms == pytest.approx(0.9)
    assert found.gaps == [(200, "sum", "gemm"), (100, "gemm", "copy"), (100, "gemm", "copy")]


def test_the_table_and_the_file_have_all_of_it(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert run(Options([trace, trace], steps=2), out=out, as_json=False) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("3 kernels a step, busy 0.7 of 0.9 ms; 3 gaps in 2 steps") == 2
    assert "a gap of 200 us between sum and gemm" in printed
    assert len(json.loads(out.read_text())["traces"]) == 2


def test_what_is_no_trace_of_a_gpu_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps({"traceEvents": [event(0, 1, "aten::mm", "cpu_op")]}))
    with pytest.raises(ConfigError, match="no kernel of a GPU"):
        read(file, steps=1, gap_us=50)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="not a trace"):
        read(file, steps=1, gap_us=50)
