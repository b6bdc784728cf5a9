"""``zeroshard bench``: parsed, run on a tiny model with real processes, saved, and shown again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.commands import report
from benchmarks.leader import resident_bytes
from benchmarks.results import ComparisonResult, ContenderResult, Report, Run
from benchmarks.tables import markdown, summary
from tests.support.harness import ROOT
from zeroshard.errors import ConfigError
from zeroshard.launch.cli import main


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``zeroshard bench`` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "zeroshard", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Report]:
    """One run over two real ranks of each contender, DeepSpeed's where it is installed."""
    out = tmp_path_factory.mktemp("bench") / "tiny.json"
    contenders = "zero3,torch-ddp,deepspeed3"
    done = bench(
        "step",
        "--sizes",
        "tiny",
        "--contenders",
        contenders,
        "--pairs",
        "2",
        "--steps",
        "2",
        "--threads",
        "1",
        "--max-norm",
        "inf",
        "--out",
        str(out),
    )
    assert done.returncode == 0, done.stderr
    return done, Report.load(out)


def test_every_pair_and_every_step_is_kept(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    (run,) = tiny[1].runs
    pairs = {
        (c.contender, c.reference): len(c.pairs)
        for c in run.comparisons
        if "deepspeed" not in c.reference
    }
    assert pairs == {("zero3", "torch-ddp"): 2}
    for name in ("zero3", "torch-ddp"):
        contender = run.contender(name)
        assert contender is not None and len(contender.step_s) == 4 and min(contender.step_s) > 0


def test_the_losses_of_stage_3_are_those_of_torch_ddp(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    (run,) = tiny[1].runs
    ours, theirs = run.contender("zero3"), run.contender("torch-ddp")
    assert ours is not None and theirs is not None
    assert len(ours.losses) == 8 and ours.losses == theirs.losses


def test_memory_and_bytes_on_the_wire_are_measured(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    (run,) = tiny[1].runs
    ddp, ours = run.contender("torch-ddp"), run.contender("zero3")
    assert ddp is not None and ours is not None
    # weight 4, grad 4, two moments of 4
    assert 15.5 < ddp.live_after_backward / run.num_parameters < 18
    assert ours.memory["after_backward"]["at_rest"]["weight"] < 4 * run.num_parameters
    assert ddp.base_bytes > 10e6 and ddp.peak_bytes > ddp.base_bytes
    if ddp.wire_exclusive:  # an all-reduce between two ranks sends each gradient once from each
        assert 1.0 < ddp.wire_bytes / (4 * run.num_parameters) < 1.5
    assert ours.payload_bytes is not None and ours.payload_bytes > 0


def test_a_library_that_is_not_installed_is_skipped_aloud(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    done, result = tiny
    record = next(c for c in result.runs[0].contenders if c.name == "deepspeed3")
    if record.skipped:
        assert not record.failed
        assert "skipped deepspeed3: DeepSpeed cannot be imported" in done.stderr
        assert "Skipped: deepspeed3" in done.stdout


def test_the_tables_say_what_was_measured(
    tiny: tuple[subprocess.CompletedProcess[str], Report],
) -> None:
    done, result = tiny
    text = markdown(result)
    for shown in (done.stdout, text):
        assert (
            "zero3 / torch-ddp" in shown and "too few pairs" in shown and "0.0M parameters" in shown
        )
    assert "| zero3 | " in text and "equal" in text


def test_the_engines_time_is_reported_per_unit() -> None:
    pairs = [[0.010, 0.004]] * 12
    contenders = [
        ContenderResult("zero3", facts={"units": 6}, step_s=[0.005]),
        ContenderResult("plain", step_s=[0.002]),
    ]
    run = Run(
        "overhead",
        "fp32",
        1,
        1,
        "cpu",
        1000,
        8,
        contenders,
        [ComparisonResult("zero3", "plain", None, 2, pairs)],
    )
    result = Report(
        "overhead",
        ["zeroshard"],
        "now",
        {"load_before": [0.0], **dict.fromkeys(MACHINE, "")},
        [run],
    )
    assert "500 µs per unit and step (95% interval 500 to 500; 6 units)" in markdown(result)
    assert summary(result)["runs"][0]["comparisons"][0]["difference_s"]["median"] == pytest.approx(
        0.003
    )


MACHINE = ("processor", "flags", "cores", "memory_gib", "kernel", "python")


def test_results_survive_saving_and_a_foreign_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(
        "tiny",
        "fp32",
        2,
        1,
        "cpu",
        10,
        4,
        [ContenderResult("zero3", step_s=[1.0])],
        [ComparisonResult("a", "b", 1.0, 5, [[1.0, 2.0]])],
    )
    result = Report(
        "step", ["zeroshard"], "now", {"load_before": [0.0], **dict.fromkeys(MACHINE, "")}, [run]
    )
    result.save(tmp_path / "result.json")
    assert Report.load(tmp_path / "result.json") == result
    assert report([tmp_path / "result.json"], as_json=True) == 0
    assert (
        json.loads(capsys.readouterr().out)[0]["runs"][0]["comparisons"][0]["ratio"]["median"]
        == 2.0
    )
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"other\.json"):
        report([tmp_path / "other.json"], as_json=False)


@pytest.mark.parametrize(
    "arguments",
    [["--sizes", "huge"], ["--contenders", "fsdp3"], ["--pairs", "0"], ["--alive", "1"]],
)
def test_wrong_arguments_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "step", *arguments])
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_one_contender_is_not_a_comparison() -> None:
    assert main(["bench", "step", "--contenders", "zero3"]) == 3


def test_resident_memory_is_read_from_outside() -> None:
    assert resident_bytes(os.getpid()) > 10e6
    assert resident_bytes(2**22 + 1) == 0
