"""scripts/matrix.py: which interpreters `make test-matrix` runs on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
