"""A skipped test is never counted as passed: too many of them fail the session, and missing GPUs
are said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ROOT

pytest_plugins = ["pytester"]

SKIPS = (
    "import pytest\ndef test_fine(): pass\ndef test_one():"
    " pytest.skip('no')\n@pytest.mark.skip\ndef test_two(): pass\n"
)


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest("from tests.conftest import *")
    return pytester


def _run(session: pytest.Pytester, budget: int) -> pytest.RunResult:
    session.makeini(f"[pytest]\nskip_budget = {budget}\nmarkers = gpu\n")
    return session.runpytest_subprocess("-p", "no:cacheprovider")


def test_too_many_skipped_tests_fail_the_session_and_are_named(session: pytest.Pytester) -> None:
    session.makepyfile(SKIPS)
    result = _run(session, budget=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*skip budget exceeded*", "2 test(s) skipped, 1 allowed*", "*::test_one", "*::test_two"]
    )
    result.assert_outcomes(passed=1, skipped=2)


def test_as_many_as_the_budget_allows_are_fine(session: pytest.Pytester) -> None:
    session.makepyfile(SKIPS)
    assert _run(session, budget=2).ret == pytest.ExitCode.OK


def test_a_module_that_skips_itself_counts(session: pytest.Pytester) -> None:
    session.makepyfile("import pytest\npytest.importorskip('no_such_package')\n")
    assert _run(session, budget=0).ret == pytest.ExitCode.TESTS_FAILED


def test_gpu_tests_are_outside_the_budget_and_never_pass_in_silence(
    session: pytest.Pytester,
) -> None:
    session.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_stream(): pass\n")
    # stands before torch on the path
    session.makepyfile(torch="class cuda:\n    is_available = staticmethod(lambda: False)\n")
    result = _run(session, budget=0)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*GPU tests NOT RUN*", "1 test(s) need a GPU*"])


@pytest.mark.parametrize("test", ["gpu/test_smoke_device.py", "device/test_zsim.py"])
def test_without_a_compiler_tests_of_a_device_are_skipped_and_count(
    test: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{test}"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout[-2000:]
    assert "skip budget exceeded" in done.stdout and "passed" not in done.stdout
    assert "no g++ in PATH. Debian, Ubuntu: apt-get install g++" in done.stdout
