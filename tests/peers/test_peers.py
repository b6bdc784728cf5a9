"""The runner of other people's suites, on suites made here: what it finds, counts and ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.peers.run import COLUMNS, SUITES, Suite, count, end_in_time, main, run_file

_EACH = """
import subprocess, sys, time, unittest
import pytest

class TestEach:
    def test_stand_in_in_every_process(self):
        said = "import deepspeed; print(deepspeed.initialize.__module__)"
        found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
        assert found.stdout.startswith("zeroshard.")

    def test_fails(self):
        assert 1 + 1 == 3

    def test_wants_the_hub(self):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    def test_process_wants_the_hub(self):
        line = "raise OSError('found neither here nor on the Hugging Face Hub')"
        subprocess.run([sys.executable, "-c", line], check=True)

    @unittest.skip("test requires multiple accelerators")
    def test_wants_gpus(self): ...

    @unittest.skip("test is slow")
    def test_is_skipped(self): ...

    @pytest.mark.timeout(1)
    def test_never_ends(self):
        time.sleep(600)

    @pytest.fixture
    def broken(self):
        raise RuntimeError("no set-up")

    def test_cannot_be_set_up(self, broken): ...
"""
_INSIDE = """
import deepspeed
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, Inner

def test_interface():
    assert deepspeed.initialize.__module__.startswith("zeroshard.")

def test_inside():
    Inner()
"""
_LIMITS = (300.0, 300.0)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_each_way_a_test_can_end_has_its_column(tmp_path: Path) -> None:
    _write(tmp_path / "tests/test_each.py", _EACH)
    found = list(run_file(Suite(["tests/test_each"]), tmp_path, "tests/test_each", _LIMITS))
    assert {test.rpartition("::")[2]: column for column, test, _ in found} == {
        "test_stand_in_in_every_process": "passed",
        "test_fails": "failed",
        "test_wants_the_hub": "hub",
        "test_process_wants_the_hub": "hub",
        "test_wants_gpus": "GPU",
        "test_is_skipped": "skipped",
        "test_never_ends": "did not end",
        "test_cannot_be_set_up": "failed",
    }


def test_a_file_that_cannot_be_read_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    _write(tmp_path / "test_broken.py", "import no_such_module_anywhere")
    ((column, _, why),) = run_file(Suite(["test_broken"]), tmp_path, "test_broken", _LIMITS)
    assert column == "failed" and "no_such_module_anywhere" in why


def test_deepspeeds_row_skips_its_inside_and_gives_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "tests/unit/runtime/test_data.py", _INSIDE + "    assert False, 'never'\n")
    monkeypatch.setattr("sys.argv", ["run.py", "deepspeed", str(tmp_path), "--why"])
    main()
    head, _, row, total = capsys.readouterr().out.splitlines()
    assert head == f"| file | {' | '.join(COLUMNS)} |"
    assert row == "| runtime/test_data | 1 | 0 | 0 | 0 | 0 | 1 |"
    assert total == "| all | 1 | 0 | 0 | 0 | 0 | 1 |"


def test_a_test_that_was_running_when_the_file_was_ended_did_not_end() -> None:
    lines = [
        {"test": "a", "outcome": "started", "why": ""},
        {"test": "a", "outcome": "passed", "why": ""},
        {"test": "b", "outcome": "started", "why": ""},
    ]
    assert [(column, test) for column, test, _ in count(lines)] == [
        ("passed", "a"),
        ("did not end", "b"),
    ]


def test_a_file_is_ended_with_its_children(tmp_path: Path) -> None:
    began = time.monotonic()
    end_in_time(["sh", "-c", "sleep 600 & trap '' TERM; wait; wait"], tmp_path, {}, 1.0)
    assert time.monotonic() - began < 300


def test_each_suite_names_a_file_once() -> None:
    for suite in SUITES.values():
        assert suite.files and len(set(suite.files)) == len(suite.files)
