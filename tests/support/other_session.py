"""A second pytest session, in a process of its own, that runs tests one by one for the first.

For tests that pytest's own process must not run: those that load the pretended device, whose lanes
are threads. The first session collects, chooses and reports them like any other, by name; what
passes between the two are names of tests and their reports, after the names of shared zygotes::

    first session        "tests/gpu/test_smoke_device.py::test_one", and which comes next  ->
    second session       <-  the reports of its setup, call and teardown

Invariant: each test has its reports. One that outlives its time limit (the first session's alarm)
or whose process dies is a failure, with the stacks of that process; the next test gets a new one.

Cost: a second start of pytest, then a millisecond for each test.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ROOT, die_with_parent, fork_off, shared_zygotes

_WORDS = "ZEROSHARD_OTHER_SESSION"  # our pid, the second session's end, and its output
_LAST_BYTES = 8000  # of its output, in a report


_is_second = False


def is_second() -> bool:
    """Whether this process is the second session."""
    return _is_second


class OtherSession:
    """The second session, as the first one sees it."""

    def __init__(self, folder: Path, config: pytest.Config) -> None:
        """Start the session, which collects `folder`."""
        ours, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        capture = config.getoption("capture")
        words = ["-p", __name__, "-p", "no:cacheprovider", "-p", "no:terminal"]
        words += ["-p", "no:faulthandler", f"--capture={capture}", str(folder)]
        # the first session chooses, and has the time
        words += ["-o", "addopts=", "-o", "timeout=0"]
        passed = theirs.fileno(), self._output.fileno()
        environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words],
            cwd=ROOT,
            env={
                **environment,
                _WORDS: " ".join(map(str, (os.getpid(), *passed))),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=None if capture == "no" else self._output,
            stderr=None if capture == "no" else subprocess.STDOUT,
            pass_fds=passed,
        )
        theirs.close()
        self._connection: Connection = ours
        ours.send(shared_zygotes())

    @property
    def is_over(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Return the reports of `item`, after which `nextitem` will run."""
        begin = time.time()
        try:
            self._connection.send((item.nodeid, nextitem and nextitem.nodeid))
            sent = self._connection.recv()
        except pytest.fail.Exception as error:  # the time is over
            return [self._failure(item, begin, f"{error.msg}{self._stacks()}")]
        except (EOFError, OSError):
            code = self._process.wait()
            return [self._failure(item, begin, f"its process ended with {code}:\n{self._tail()}")]
        except BaseException:
            self.close(kill=True)
            raise
        read = item.config.hook.pytest_report_from_serializable
        return [read(config=item.config, data=data) for data in sent]

    def close(self, *, kill: bool = False) -> None:
        """End the session."""
        self._connection.close()
        if kill:
            self._process.kill()
        self._process.wait()

    def _stacks(self) -> str:
        """Return the stacks of the process, and end it."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        self.close(kill=True)
        return f"; its process:\n{self._tail()}"

    def _tail(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST_BYTES))
        return self._output.read().decode(errors="replace")

    @staticmethod
    def _failure(item: pytest.Item, begin: float, text: str) -> pytest.TestReport:
        now = time.time()
        return pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed",
            longrepr=text,
            when="call",
            duration=now - begin,
            start=begin,
            stop=now,
        )


# ------------------------------------------------------------------------- in the second session


class _Served:
    """Runs what the first session asks for."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._reports: list[Any] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        while True:
            try:
                nodeid, following = self._connection.recv()
            except EOFError:
                return True
            item, nextitem = items[nodeid], items.get(following)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            self._connection.send(self._reports)
            self._reports = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write = self._config.hook.pytest_report_to_serializable
        self._reports.append(write(config=self._config, report=report))


def pytest_configure(config: pytest.Config) -> None:
    """Serve, in the process that `OtherSession` has started."""
    global _is_second
    _is_second = True
    parent, descriptor, output = map(int, os.environ.pop(_WORDS).split())
    die_with_parent(parent)
    for number in (descriptor, output):
        os.set_inheritable(number, False)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    connection = Connection(descriptor)
    fork_off(connection.recv())
    config.pluginmanager.register(_Served(config, connection))
