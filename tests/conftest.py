"""What every test shares: markers, the skip budget, and the end of the worker pools.

A skipped test is never counted as passed: the session fails when more tests were skipped than
``skip_budget`` (pyproject.toml) allows. Tests marked ``gpu`` are skipped where there is no GPU,
said in the summary, and are outside the budget.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.support.harness import ROOT, close_pools, fork_off, share_zygotes

gc.disable()  # until the tests are collected: else that takes twice as long

STARTUP = str(ROOT / "tests" / "support" / "startup")
if STARTUP not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])

settings.register_profile("zeroshard", deadline=None, derandomize=True)
settings.load_profile("zeroshard")

GPU = "needs a GPU"
_skipped = pytest.StashKey[list[str]]()
_gpu_skipped = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "skip_budget",
        "how many tests may be skipped (gpu tests aside) before the session fails",
        default="0",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_skipped] = []
    config.stash[_gpu_skipped] = []
    config.pluginmanager.register(_SkipBudget(config), "zeroshard-skip-budget")
    if given := getattr(config, "workerinput", None):  # a process of pytest-xdist's
        fork_off(given["zygotes"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by pytest-xdist for each process that runs tests."""
    node.workerinput["zygotes"] = share_zygotes()


def pytest_unconfigure() -> None:
    close_pools()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    for item in gpu_items:  # a report knows the mark no longer, and a folder has the name, too
        item.user_properties.append((GPU, True))
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(scope="session", autouse=True)
def _end_pools() -> Iterator[None]:
    # A fixture, not a session hook: coverage of the workers is written when they end and combined
    # when the last test is torn down.
    yield
    close_pools()


@pytest.fixture
def deepspeed_python() -> str:
    """An interpreter that has DeepSpeed."""
    named = os.environ.get("ZEROSHARD_DEEPSPEED_PYTHON", sys.executable)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    if subprocess.run([named, "-c", look], check=False).returncode:
        pytest.skip(
            "no DeepSpeed here: ZEROSHARD_DEEPSPEED_PYTHON names an interpreter that has it"
        )
    return named


class _SkipBudget:
    """Counts the skipped tests and fails the session when there are too many."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.budget = int(config.getini("skip_budget"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            needs_gpu = dict(report.user_properties).get(GPU, False)
            self.config.stash[_gpu_skipped if needs_gpu else _skipped].append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.config.stash[_skipped].append(report.nodeid)

    @property
    def exceeded(self) -> bool:
        return len(self.config.stash[_skipped]) > self.budget

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.exceeded and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if gpu := self.config.stash[_gpu_skipped]:
            terminalreporter.section("GPU tests NOT RUN", yellow=True)
            terminalreporter.line(
                f"{len(gpu)} test(s) need a GPU, and this machine has none: nothing was checked on"
                " CUDA.",
                yellow=True,
            )
        if self.exceeded:
            skipped = self.config.stash[_skipped]
            terminalreporter.section("skip budget exceeded", red=True)
            terminalreporter.line(
                f"{len(skipped)} test(s) skipped, {self.budget} allowed (skip_budget in"
                " pyproject.toml):",
                red=True,
            )
            for nodeid in skipped:
                terminalreporter.line(f"    {nodeid}")
