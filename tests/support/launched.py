"""Launchers that a test starts for real, scripts whose ranks say who they are, and scripts on ranks
that need no launcher.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.harness import ROOT, spawn_ranks

# PYTHONPATH of interpreters that need no other: the package, and what spares a second of CPU
PATHS = os.pathsep.join(str(ROOT / name) for name in ("src", "", "tests/support/startup"))
PROGRAM = str(Path(sys.executable).parent / "zeroshard")
# Each rank says who it is, then waits; what it waits in is the test's business.
HELLO = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(__file__).parent
(here / f"pid-{rank}.part").write_text(str(os.getpid()))
(here / f"pid-{rank}.part").rename(here / f"pid-{rank}")
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
WAIT = "time.sleep(600)\n"
PATIENCE_S = 300.0  # a loaded machine takes its time
# What sshd does with a command: a shell of the user's, in another session, in another directory,
# with an environment of its own, that outlives ssh until it looks at its input.
STUB_SSH = """#!/bin/bash
while [ "$1" != "--" ]; do shift; done
host=$2; shift 2
[ -e "$0.without-$host" ] && host=refused-$host  # as a test says
case "$host" in
refused*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;;
esac
cd /
echo "a greeting of the shell's"
setsid env -i HOME="$HOME" PATH=/usr/bin:/bin bash -c "$*" <&0 &
wait $!
"""


def stub_ssh(directory: Path) -> str:
    """Write `STUB_SSH` into `directory`; return its path."""
    path = directory / "ssh"
    path.write_text(STUB_SSH)
    path.chmod(0o755)
    return str(path)


def forget_package() -> None:
    """Let a forked rank load zeroshard anew when it imports it next."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "zeroshard"]:
        del sys.modules[name]


def _run_path(rank: int, world: int, script: str, words: Sequence[str]) -> None:
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def run_script(
    script: Path, *words: str, ranks: int, device: str = "", env: dict[str, str] | None = None
) -> str:
    """Run a script on fresh ranks, which the harness forks: a tenth of the time that a launcher and
    its ranks take. Return what rank 0 has printed.
    """
    found = spawn_ranks(ranks, _run_path, str(script), words, timeout=100, env=env, device=device)
    assert not any(result.exitcode for result in found), [result.stderr for result in found]
    return found[0].stdout


class Job:
    """A launcher under test: its process, and the ranks that its script announced."""

    def __init__(
        self,
        directory: Path,
        text: str,
        *options: str,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        script = directory / "script.py"
        script.write_text(text)
        self.process = subprocess.Popen(
            [*before, PROGRAM, "run", *options, str(script), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            errors="surrogateescape",
        )

    def ranks(self, count: int) -> list[int]:
        """The process ids of the ranks, once they have announced themselves."""
        paths = [self.directory / f"pid-{rank}" for rank in range(count)]
        wait_until(lambda: all(path.exists() for path in paths) or self.process.poll() is not None)
        return [int(path.read_text()) for path in paths]

    def wait_for(self, name: str) -> None:
        wait_until((self.directory / name).exists)

    def end(self, timeout: float = PATIENCE_S) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode, stdout, stderr


def wait_until(condition: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < PATIENCE_S, f"not within {PATIENCE_S} s"
        time.sleep(0.01)
