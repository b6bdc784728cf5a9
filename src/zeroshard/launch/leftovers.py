"""Remove what a killed launcher leaves: processes that its ranks started, and its directory.

Run as ``python leftovers.py DIRECTORY``, beside the launcher, with a pipe from it as stdin. The
pipe closes when the launcher ends; then the processes left in the ranks' sessions are killed and
the directory is removed. (The ranks themselves end with the launcher, see ``worker.py``.)

Invariant: only processes of sessions that our ranks lead are ended. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path


class Janitor:
    """The process that cleans up after this one."""

    def __init__(self, directory: str) -> None:
        command = [sys.executable, "-I", "-S", __file__, directory]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )

    def close(self) -> None:
        """End it; the directory has been removed."""
        self._process.communicate()


def end_sessions(leaders: Iterable[int]) -> None:
    """Kill every process in the sessions of `leaders`, ended processes of ours."""
    sessions = set(leaders)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in sessions:
            continue
        with contextlib.suppress(OSError):
            session = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[3])
            if session in sessions:
                os.kill(int(entry.name), signal.SIGKILL)


def _clean_up(directory: Path) -> None:
    if not directory.exists():
        return
    end_sessions(int(path.stem.removeprefix("rank-")) for path in directory.glob("rank-*.heart"))
    for _ in range(20):  # a rank that is just dying may still write
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _clean_up(Path(sys.argv[1]))
