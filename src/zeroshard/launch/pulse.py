"""How a rank is, seen from outside: its last heartbeat, and the stacks of its threads on request.

Both are files in the launcher's directory, made by ``worker.py``. A stopped rank does not answer.
Before its first heartbeat a rank that computes is alive: it imports torch, or builds its model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from zeroshard.launch.worker import STACKS_SIGNAL, TIME

_ANSWER_S = 0.3
_LATE_S = 3.0  # for those that have not begun to answer by then, on a loaded machine
_BUSY = 0.01  # of one core, above which a rank computes
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_LINES = 60


class Pulse:
    """The files of one rank; `shows` is whether it has made them."""

    def __init__(self, directory: Path, pid: int, pidfd: int, *, shows: bool) -> None:
        self._prefix = directory / f"rank-{pid}"
        self._pidfd = pidfd
        self.shows = shows
        self._stat = Path(f"/proc/{pid}/stat")
        self._computed = (time.monotonic(), 0.0)  # when it was seen to, seconds of a core so far

    def last_sign(self) -> float:
        """Return the CLOCK_MONOTONIC seconds of the last heartbeat, or, before the first, of the
        last look at which the rank had computed since the one before.
        """
        beat = self.last_beat()
        if beat is not None:
            return beat
        at, so_far = self._computed
        now, seconds = time.monotonic(), so_far
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = self._stat.read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        if seconds - so_far > _BUSY * (now - at):
            self._computed = (now, seconds)
        return self._computed[0]

    def last_beat(self) -> float | None:
        """Return the CLOCK_MONOTONIC seconds of the last heartbeat, None before the first."""
        with contextlib.suppress(OSError):
            data = Path(f"{self._prefix}.heart").read_bytes()
            if len(data) == TIME.size:
                return float(TIME.unpack(data)[0]) or None
        return None

    def ask(self) -> int:
        """Have the rank write its stacks; return where in its file they will begin."""
        with contextlib.suppress(OSError):
            before = Path(f"{self._prefix}.stacks").stat().st_size
            if self.shows:
                signal.pidfd_send_signal(self._pidfd, STACKS_SIGNAL)
            return before
        return 0

    def answer(self, begin: int) -> str:
        """Return the stacks written since `begin`, at most 60 lines."""
        with contextlib.suppress(OSError):
            data = Path(f"{self._prefix}.stacks").read_bytes()[begin:]
            lines = data.decode(errors="replace").splitlines()
            if len(lines) > _NUM_LINES:
                lines[_NUM_LINES:] = [f"... {len(lines) - _NUM_LINES} more lines"]
            return "\n".join(lines)
        return ""


def stacks_of(pulses: Sequence[Pulse]) -> list[str]:
    """Return the stacks of several ranks, "" for one that does not answer."""
    begins = [pulse.ask() for pulse in pulses]
    time.sleep(_ANSWER_S if pulses else 0.0)
    deadline = time.monotonic() + _LATE_S
    for pulse, begin in zip(pulses, begins, strict=True):
        while pulse.shows and not pulse.answer(begin) and time.monotonic() < deadline:
            time.sleep(0.05)
    return [pulse.answer(begin) for pulse, begin in zip(pulses, begins, strict=True)]
