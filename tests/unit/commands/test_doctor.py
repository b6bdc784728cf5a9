"""``zeroshard doctor``: facts, limits, what is missing for which feature, and measured rates."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard._version import __version__
from zeroshard.commands import doctor, probes
from zeroshard.launch import cli
from zeroshard.planner.machine import machine_of
from zeroshard.tier.swapdir import SwapDirectory


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what the user's own doctor has found alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # whatever runs beside the tests


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return doctor.facts()


def _report(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["doctor", "--json", *argv])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def test_facts_are_those_of_the_machine(found: dict[str, Any]) -> None:
    versions, limits = found["versions"], found["limits"]
    assert versions["torch"] == version("torch") and versions["zeroshard"] == __version__
    assert versions["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert {*doctor.PACKAGES, "nccl", "cuda"} <= set(versions)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits["open_files"] == (None if soft == resource.RLIM_INFINITY else soft)
    assert limits["dev_shm_bytes"] == shutil.disk_usage("/dev/shm").total
    assert found["host"]["cores"] == len(os.sched_getaffinity(0))
    assert found["host"]["memory_bytes"] > 1 << 28
    assert found["backends"]["gloo"] and doctor.find_problems(found) == []


def test_quick_measures_nothing_and_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = _report(capsys, "--quick")
    assert (code, report["measured"], report["grade"], report["problems"]) == (0, None, "probe", [])
    assert list(report) == [
        "versions",
        "host",
        "devices",
        "backends",
        "limits",
        "grade",
        "measured",
        "missing",
        "problems",
    ]
    assert cli.main(["doctor", "--quick"]) == 0
    text = capsys.readouterr().out
    assert version("torch") in text and "open files limit" in text and "GFLOP" not in text


def test_what_is_missing_names_the_feature_and_the_command(found: dict[str, Any]) -> None:
    bare = copy.deepcopy(found)
    bare["versions"] |= dict.fromkeys(doctor.PACKAGES[6:])
    bare["limits"]["open_files"] = 1024
    missing = {one["what"]: one for one in doctor.find_missing(bare)}
    assert (
        missing["transformers"]["command"]
        == "pip install '.[transformers]'  # in a checkout of zeroshard"
    )
    assert "ZeroTrainer" in missing["transformers"]["for"]
    assert missing["deepspeed"]["command"] == "pip install '.[bench]'  # in a checkout of zeroshard"
    assert missing["open files beyond 1024"]["command"] == "ulimit -n 4096"
    assert "triton" not in missing and not any("pinned" in what for what in missing)


def test_beside_gpus_triton_nccl_and_the_pinned_limit_matter(found: dict[str, Any]) -> None:
    gpu = copy.deepcopy(found)
    gpu["devices"] = [{"name": "H100", "index": 0, "memory_bytes": 1 << 36, "capability": "9.0"}]
    gpu["versions"]["triton"] = None
    gpu["backends"]["nccl"] = False
    gpu["limits"]["pinned_memory_bytes"] = 8 << 20
    missing = {one["what"]: one["command"] for one in doctor.find_missing(gpu)}
    assert missing["triton"] == "pip install triton" and "NCCL in torch" in missing
    assert missing["pinned memory beyond 8388608 bytes"] == "ulimit -l unlimited"


def test_commands_name_extras_that_exist_and_no_host() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    commands = [command for _, command in doctor.OPTIONAL.values()]
    for extra in re.findall(r"zeroshard\[(\w+)\]", " ".join(commands)):
        assert f"\n{extra} = [" in project
    assert not any("://" in command or "--index" in command for command in commands)


@pytest.mark.parametrize(
    ("versions", "backends", "words"),
    [
        ({"torch": None}, {}, "torch missing: pip install torch"),
        ({"torch": "2.9.1"}, {"gloo": True}, "torch 2.9.1 is older than 2.10"),
        ({}, {}, "without torch.distributed"),
        ({"xxhash": None}, {"gloo": True}, "xxhash missing: pip install xxhash"),
    ],
    ids=["no torch", "old torch", "no distributed", "no xxhash"],
)
def test_where_the_library_cannot_run_the_exit_code_is_1(
    found: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str | None],
    backends: dict[str, bool],
    words: str,
) -> None:
    broken = {**found, "versions": {**found["versions"], **versions}, "backends": backends}
    monkeypatch.setattr(doctor, "facts", lambda: broken)
    code, report = _report(capsys)
    assert (code, report["measured"]) == (1, None)
    (problem,) = report["problems"]
    assert words in problem
    assert cli.main(["doctor"]) == 1 and words[:14] in capsys.readouterr().out


def test_rates_are_measured_between_two_ranks_and_on_disk_and_kept_for_a_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probes, "RANKS_TIMEOUT_S", 60.0)  # other tests run beside this one
    monkeypatch.setattr(doctor, "BUDGET_S", 60.0)
    code, report = _report(capsys, "--disk", str(tmp_path))
    measured = report["measured"]
    assert code == 0 and list(measured) == list(doctor.KINDS)
    failures = [one["error"] for kind in measured.values() for one in kind if "error" in one]
    assert not failures
    assert {one["dtype"] for one in measured["matmul"]} == {"float32", "bfloat16"}
    assert all(one["flops_per_s"] > 1e6 for one in measured["matmul"])
    assert all(one["bytes_per_s"] > 1e6 for one in measured["copies"])
    collectives = [(one["transport"], one["operation"]) for one in measured["collectives"]]
    assert collectives == [
        (name, operation)
        for name in ("shared_memory", "gloo")
        for operation in ("all_gather", "reduce_scatter")
    ]
    assert all(1e-7 < one["latency_s"] < 5 for one in measured["collectives"])
    assert all(one["bytes_per_s"] > 1e5 for one in measured["collectives"])
    (disk,) = measured["disk"]
    assert disk["path"] == str(tmp_path) and disk["bytes"] % (16 << 20) == 0 < disk["bytes"]
    assert disk["write_bytes_per_s"] > 1e5 and disk["read_bytes_per_s"] > 1e5
    assert 0 < disk["core_s_per_byte"] < 1e-6
    assert 0 < disk["latency_s"] < 5 and 0 < disk["busy_latency_s"] < 5
    assert [path.name for path in tmp_path.iterdir()] == ["cache"] and disk["free_bytes"] > 0

    monkeypatch.setattr(doctor, "examine", lambda: pytest.fail("measured again"))
    argv = ["plan", "--params", "10M", "--this-machine", "--gpus", "2", "--precision", "fp32"]
    assert cli.main([*argv, "--json"]) == 0
    seen = capsys.readouterr()
    planned = json.loads(seen.out)["machine"]
    assert planned == asdict(machine_of(report, ranks=2)) and "as measured 20" in seen.err
    rates = [planned["speeds"][name] for name in ("fp32_flops", "memory", "local", "host", "disk")]
    assert planned["node_size"] == 2 and all(rate > 1e5 for rate in rates)
    assert cli.main(argv) == 0
    assert "(this machine)" in capsys.readouterr().out


def test_what_cannot_be_measured_is_an_entry_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rate(device: torch.device) -> list[dict[str, Any]]:
        return [{"device": "cpu", "dtype": "float32", "side": 2, "flops_per_s": 3e9}]

    def ranks(*transports: str) -> list[dict[str, Any]]:
        raise RuntimeError("no address\nof this host")

    monkeypatch.setattr(probes, "matmul", rate)
    monkeypatch.setattr(probes, "copies", lambda device: [])
    monkeypatch.setattr(probes, "collectives", ranks)
    monkeypatch.setattr(SwapDirectory, "__init__", _no_space)
    assert cli.main(["doctor", "--disk", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "3 GFLOP/s" in text and "failed: no address" in text and "of this host" not in text
    assert "failed: [Errno 28] no space" in text and "probe grade" in text
    monkeypatch.setattr(doctor, "BUDGET_S", -1.0)
    _, report = _report(capsys)
    assert "left out" in report["measured"]["matmul"][0]["error"]


def _no_space(self: SwapDirectory, parent: Path, **options: Any) -> None:
    raise OSError(28, "no space")


def test_a_rank_that_dies_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\necho last words >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=r"^last words$"):
        probes.collectives("gloo")
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(probes, "RANKS_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
        probes.collectives("gloo")


def test_a_disk_that_is_no_directory_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--disk", "/no/such/place"]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_help_answers_without_torch() -> None:
    program = (
        "import sys\nfrom zeroshard.launch.cli import main\n"
        "try:\n    main(['doctor', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert "example:" in ended.stdout and ended.stdout.endswith("False\n")


# ---------------------------------------------------------------- zeroshard plan --this-machine


def test_a_plan_for_a_machine_on_which_nothing_runs_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: {"problems": ["torch missing: pip install"]})
    assert cli.main(["plan", "--params", "10M", "--this-machine"]) == 2
    seen = capsys.readouterr().err
    assert "measuring this machine" in seen and "--this-machine: torch missing" in seen


def test_doctor_says_where_it_keeps_what_it_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {"matmul": [], "copies": [], "collectives": [], "disk": []}
    monkeypatch.setattr(doctor, "_measure", lambda facts, disk: found)
    assert cli.main(["doctor"]) == 0
    (kept,) = (tmp_path / "cache" / "zeroshard").iterdir()
    assert f"Kept for zeroshard plan --this-machine: {kept}" in capsys.readouterr().out


def test_what_is_measured_beside_other_programs_is_told_with_the_load_and_not_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (60.25, 3.0, 2.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(doctor, "_measure", lambda facts, disk: _rates())
    assert cli.main(["doctor"]) == 0
    seen = capsys.readouterr()
    assert seen.err.count("\n") == 1 and "measured at load 60.2 on 2 CPU(s)" in seen.err
    assert "Kept" not in seen.out and not (tmp_path / "cache").exists()
    assert cli.main(["doctor", "--quick"]) == 0
    assert capsys.readouterr().err == ""
    argv = ["plan", "--params", "10M", "--this-machine", "--gpus", "2", "--precision", "fp32"]
    assert cli.main(argv) == 0  # planned, with the warning, and measured anew the next time
    assert "measured at load 60.2" in capsys.readouterr().err and not (tmp_path / "cache").exists()


def test_links_that_were_not_measured_in_time_are_the_presets_with_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = _rates()
    rates["collectives"] = [{"what": "2 ranks on the host", "error": "no answer within 40 s"}]
    monkeypatch.setattr(doctor, "_measure", lambda facts, disk: rates)
    argv = ["plan", "--params", "10M", "--this-machine", "--gpus", "2", "--precision", "fp32"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "note      links between ranks are preset CPU's: shared_memory and gloo could" in text
    assert "(no answer within 40 s)" in text
    assert not (tmp_path / "cache").exists()
    assert cli.main([*argv[:3], "--this-machine"]) == 0
    assert "links between ranks" not in capsys.readouterr().out  # one rank has none


def _rates() -> dict[str, list[dict[str, Any]]]:
    matmul = [
        {"device": "cpu", "dtype": dtype, "side": 512, "flops_per_s": 1e11}
        for dtype in ("float32", "bfloat16")
    ]
    copies = [{"device": "cpu", "way": "within", "pinned": None, "bytes_per_s": 5e9}]
    links = [
        {"transport": "gloo", "operation": name, "ranks": 2, "bytes_per_s": 1e9, "latency_s": 1e-4}
        for name in ("all_gather", "reduce_scatter")
    ]
    return {"matmul": matmul, "copies": copies, "collectives": links, "disk": []}
