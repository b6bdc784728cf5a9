"""The ``zeroshard`` program: answers at once, one line per error, the exit codes of the
contract.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from tests.support.harness import ROOT
from zeroshard._version import __version__
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.launch import cli
from zeroshard.terminal import UsageError, explain

PROGRAM = str(Path(sys.executable).parent / "zeroshard")
# Coverage measures our subprocesses, which costs more than all they do here.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
}


def _zeroshard(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *argv], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["run", "--help"], 0),
        (["fly"], 2),
        (["run", "--nproc", "0", "x.py"], 2),
        (["run", "no_such_script.py"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_help_version_and_usage_errors_answer_without_importing_torch_numpy_or_pydantic(
    argv: list[str], code: int
) -> None:
    program = (
        "import atexit, sys\n"
        "from zeroshard.launch.cli import main\n"
        "atexit.register(lambda: print('modules:', *sys.modules))\n"
        f"sys.exit(main({argv!r}))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
    )
    assert answer.returncode == code == _zeroshard(*argv).returncode
    modules = set(answer.stdout.rpartition("modules:")[2].split())
    assert "argparse" in modules and not modules & {"torch", "numpy", "pydantic"}


def test_the_module_is_the_program() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "zeroshard", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    assert answer.stdout == f"zeroshard {__version__}\n" == _zeroshard("--version").stdout


@pytest.mark.parametrize(
    "argv",
    [["fly"], ["run", "--nproc", "0", "x.py"], ["run"], ["run", "--nprocs", "2"]],
    ids=" ".join,
)
def test_a_usage_error_is_one_line_on_stderr(argv: list[str]) -> None:
    answer = _zeroshard(*argv)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("zeroshard") and answer.stderr.count("\n") == 1


def test_a_signal_between_two_starts_of_a_job_is_no_internal_error() -> None:
    assert explain(SignalException("got it", signal.SIGTERM)) == (143, "ended by SIGTERM")
    assert explain(SignalException("got it", signal.SIGINT)) == (130, "ended by SIGINT")


def test_no_command_shows_the_help_as_an_error() -> None:
    answer = _zeroshard()
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "zeroshard run --nproc 2" in answer.stderr


TITLES = ("example:", "examples:")


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for kind in action.choices.values():
                yield from _parsers(kind)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_of_every_command_fits_a_screen_and_shows_an_example(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser, parsers = cli.build_parsers()
    cli.add_benchmarks(parsers["bench"])
    found = list(_parsers(parser))
    assert len(found) >= 17
    for one in found:
        lines = one.format_help().splitlines()
        assert len(lines) <= 50 and max(map(len, lines)) <= 100, (one.prog, len(lines))
        start = next(index for index, line in enumerate(lines) if line in TITLES)
        assert lines[start + 1].startswith(("  zeroshard ", "  srun ")), one.prog


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no"), 2, "zeroshard: no\n"),
        (ConfigError("stage=4"), 3, "zeroshard: stage=4\n"),
        (CheckpointError("torn"), 73, "zeroshard: torn\n"),
        (
            FileNotFoundError(2, "No such file or directory", "x"),
            74,
            "zeroshard: x: No such file or directory\n",
        ),
        (
            ValueError("oops"),
            70,
            "zeroshard: internal error, ValueError: oops (--debug shows where)\n",
        ),
        (KeyboardInterrupt(), 130, "zeroshard: interrupted\n"),
        (BrokenPipeError(), 74, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_become_one_line_and_a_code(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["anything"]) == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "argv", [["--debug", "run"], ["run", "--debug"], ["--debug", "bench", "report"]], ids=" ".join
)
def test_debug_is_taken_before_and_by_every_command(argv: list[str]) -> None:
    answer = _zeroshard(*argv)
    assert answer.returncode == 2
    assert "--debug" not in answer.stderr.splitlines()[-1]


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: 1 // 0)
    assert cli.main(["run", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_bench_runs_where_the_benchmarks_are_and_says_in_a_line_where_they_are_not(
    tmp_path: Path,
) -> None:
    shutil.copytree(ROOT / "src" / "zeroshard", tmp_path / "installed" / "zeroshard")
    (tmp_path / "benchmarks").mkdir()  # of somebody else
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise SystemExit('imported')")

    def run_bench(*path: Path) -> subprocess.CompletedProcess[str]:
        environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, path))}
        return subprocess.run(
            [sys.executable, "-m", "zeroshard", "bench", "step", "--help"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    missing = run_bench(tmp_path / "installed")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("zeroshard: bench: the benchmarks are not part of")
    assert missing.stderr.count("\n") == 1
    shutil.rmtree(tmp_path / "benchmarks")
    for found in (run_bench(ROOT / "src"), run_bench(tmp_path / "installed", ROOT)):
        assert found.returncode == 0 and "--contenders" in found.stdout


def test_gpus_that_are_not_there_are_said_with_what_to_write_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script = tmp_path / "x.py"
    script.write_text("")
    assert cli.main(["run", "--nproc", "gpu", str(script)]) == 2
    assert "--nproc gpu: torch finds no GPU on this machine" in capsys.readouterr().err
