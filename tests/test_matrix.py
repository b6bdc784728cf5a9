"""scripts/matrix.py: which interpreters, and which torches, `make test-matrix` runs on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.harness import ROOT


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "zeroshard_matrix", ROOT / "scripts" / "matrix.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules["zeroshard_matrix"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _says(path: Path, version: str, text: str, prefix: str) -> None:
    """Put a program at `path` that answers as an interpreter does."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho \'[{version}, "{text}", "{prefix}", "CPython"]\'\n')
    path.chmod(0o755)


def test_every_build_from_311_is_found_once_and_what_does_not_start_is_passed_over(
    matrix: ModuleType, tmp_path: Path
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    _says(one / "python3.11", "[3, 11, 2]", "3.11.2 (distribution)", "/usr")
    _says(one / "python3.13", "[3, 13, 0]", "3.13.0", "/opt/13")
    _says(one / "python3.10", "[3, 10, 1]", "3.10.1", "/opt/10")
    _says(other / "python3.11", "[3, 11, 2]", "3.11.2 (of our own)", "/opt/11")
    _says(other / "python3.13", "[3, 13, 0]", "3.13.0", "/opt/13")
    (other / "python3.12").write_text("#!/bin/sh\necho 'not chosen' >&2\nexit 127\n")
    (other / "python3.12").chmod(0o755)
    (other / "python3.11-config").write_text("")
    found = matrix.find([one, tmp_path / "missing", other])
    assert [interpreter.path for interpreter in found] == [
        one / "python3.11",
        other / "python3.11",
        one / "python3.13",
    ]
    assert matrix.environments(found) == [".venv-3.11.2", ".venv-3.11.2-2", ".venv-3.13.0"]


@pytest.fixture
def interpreters(matrix: ModuleType) -> list[Any]:
    versions = [(3, 11, 7), (3, 12, 1)]
    return [
        matrix.Interpreter(Path(f"/bin/python3.{version[1]}"), version, ("", str(version)))
        for version in versions
    ]


def test_the_oldest_python_also_gets_the_oldest_torch_and_other_kernels(
    matrix: ModuleType, interpreters: list[Any]
) -> None:
    oldest = matrix.oldest_torch()
    assert f'"torch>={oldest.removesuffix(".0")}"' in (ROOT / "pyproject.toml").read_text()
    assert [(pair.environment, pair.torch) for pair in matrix.pairs(interpreters, [])] == [
        (".venv-3.11.7", None),
        (".venv-3.12.1", None),
        (f".venv-3.11.7-torch-{oldest}", oldest),
        *[(".venv-3.11.7", None)] * len(matrix.KERNELS),
    ]
    assert [pair.environment for pair in matrix.pairs(interpreters, ["2.11.0"])] == [
        ".venv-3.11.7-torch-2.11.0",
        ".venv-3.12.1-torch-2.11.0",
    ]


def test_other_kernels_are_chosen_by_the_environment_of_the_tests(
    matrix: ModuleType, interpreters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(matrix.subprocess, "run", run)
    for pair in matrix.with_other_kernels(interpreters):
        assert pair.run(["tests/unit"]) == "passed" and pair.kernels in str(pair)
    assert [call[:2] for call in calls] == [["env", kernels] for kernels in matrix.KERNELS]
    assert all(call[-2:] == ["suite", "ARGS=tests/unit"] for call in calls)


@pytest.mark.parametrize("fails", ["", "ready-torch", "suite"])
def test_a_torch_that_is_not_there_is_said(
    matrix: ModuleType, interpreters: list[Any], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        calls.append(" ".join(command))
        return SimpleNamespace(returncode=int(bool(fails) and fails in calls[-1]))

    monkeypatch.setattr(matrix.subprocess, "run", run)
    (pair, _) = matrix.pairs(interpreters, ["2.10.0"])
    outcome = pair.run(["tests/unit"])
    wanted = {"": "passed", "suite": "FAILED"}
    assert outcome == wanted.get(
        fails, "FAILED: no torch 2.10.0 for this Python in the package index"
    )
    assert all("TORCH_VERSION=2.10.0" in call for call in calls)
    assert len(calls) == 1 + (fails != "ready-torch")
    assert fails == "ready-torch" or calls[-1].endswith("tests/unit")
