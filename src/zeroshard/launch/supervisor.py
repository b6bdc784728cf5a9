"""Watch the ranks of this machine, end the others after a failure, and name the first failure.

The launcher's agent polls its children every 0.1 s, too coarse to tell a cause from its effects: a
killed rank takes its peers down within milliseconds. So each rank announces itself on a FIFO, one
thread sleeps on the FIFO and on a pidfd per rank, and a rank that raises reports it, with the time,
before it tears anything down. The thread reads the exit code of a rank without reaping it, since
the agent sends signals to the rank's process group until it has; if the agent came first, its
`Popen` has the exit code.

[Note: blame] Failures are ordered by time, with three corrections, since a silent death is noticed
late:

- a rank killed by a signal that no peer sends counts ``SIGNAL_LEAD_S`` earlier: peers may report
  its broken connections sooner;
- a rank that ended with an exit code and no report counts ``SILENT_LEAD_S`` earlier;
- a rank that reports a lost peer, or that we ended, counts ``CONSEQUENCE_LAG_S`` later.

A rank that ends well while others wait for it is to blame before those that lost it (exit code 71).
Ranks are asked for their stacks before a stall ends them, or when none has shown a
heartbeat for `stall_s` seconds. A rank that ends with exit code 75 (preempted) has not failed: its
peers may still be saving, and have the agent's longer grace.

No torch here, and nothing is ended before a rank has failed, the job has stalled, or Ctrl-C has
come twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeroshard.launch.leftovers import end_sessions
from zeroshard.launch.worker import STACKS_SIGNAL, TIME
from zeroshard.terminal import EXIT_INTERRUPTED

_ANSWER_S = 0.3
_LATE_S = 3.0  # for those that have not begun to answer by then, on a loaded machine
_BUSY = 0.01  # of one core, above which a rank computes
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_LINES = 60
SIGNAL_LEAD_S = 1.0
SILENT_LEAD_S = 0.05
CONSEQUENCE_LAG_S = 1.0
STALL_S = 600.0
EXIT_PREEMPTED = 75
EXIT_STALL = 71
CONTRACT_EXIT_CODES = frozenset({3, 70, 71, 72, 73, 74, EXIT_PREEMPTED})
# A peer's broken connection may end in SIGABRT (a C++ thread that throws); SIGTERM and SIGINT are
# what launchers send.
ENDED_BY_LAUNCHERS = frozenset({-signal.SIGTERM, -signal.SIGKILL})
SIGNALS_OF_A_CONSEQUENCE = frozenset({signal.SIGABRT, signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: exit code (or -signal) if known, and CLOCK_MONOTONIC seconds."""

    rank: int
    pid: int
    at: float
    status: int | None = None
    message: str = ""
    traceback: str = ""
    consequence: bool = False
    stalled: bool = False  # it gave up waiting for others
    stacks: str = ""  # where it was when another rank gave up
    hung: bool = False  # it did not even answer then
    host: str = ""  # where it ran, if there are several

    @property
    def name(self) -> str:
        """The rank, and its host where there are several."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def left(self) -> bool:
        """Whether its script ended well, while others waited for this rank."""
        return self.status == 0

    @property
    def silent(self) -> bool:
        """Whether the rank ended without saying why."""
        return not self.message and not self.traceback

    @property
    def how(self) -> str:
        """The exit code or the signal, in words."""
        if self.status is None:
            return "ended in an unknown way"
        if self.status >= 0:
            return f"exit code {self.status}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.status).name}"
        return f"killed by signal {-self.status}"


def blame_order(failures: list[Failure]) -> list[Failure]:
    """The failures, the one to blame first ([Note: blame])."""
    return sorted(failures, key=blame_time)


def blame_time(failure: Failure) -> float:
    """Return the time at which a failure counts ([Note: blame])."""
    if failure.consequence:
        return failure.at + CONSEQUENCE_LAG_S
    if not failure.silent:
        return failure.at
    if failure.status is None or failure.status >= 0:
        return failure.at - SILENT_LEAD_S
    is_consequence = -failure.status in SIGNALS_OF_A_CONSEQUENCE
    return failure.at if is_consequence else failure.at - SIGNAL_LEAD_S


def exit_code_of(failure: Failure) -> int:
    """Return the launcher's exit code: 71 for a leaver, 128 + signal, the contract's, or 1."""
    if failure.status is None:
        return 1
    if failure.left:
        return EXIT_STALL
    if failure.status < 0:
        return 128 - failure.status
    return failure.status if failure.status in CONTRACT_EXIT_CODES | {EXIT_INTERRUPTED} else 1


@dataclass
class _WatchedRank:
    """One rank of one generation, that is of one start of the whole group, seen from outside.

    ``worker.py`` makes two files for it, unless it cannot (`shows`): one with the time of the last
    heartbeat, and one for its threads' stacks on request, which a stopped rank does not write.
    """

    rank: int
    generation: int
    pid: int
    pidfd: int
    files: Path  # the beginning of their names
    shows: bool
    end_by: float | None = None
    ended_by_us: bool = False
    ended_at: float | None = None
    failed_at: float | None = None
    left_at: float | None = None  # its script has ended well
    status: int | None = None
    stacks: str = ""
    hung: bool = False
    # when it was seen to compute, and the seconds of a core so far
    computed: tuple[float, float] = field(default_factory=lambda: (time.monotonic(), 0.0))

    @property
    def alive(self) -> bool:
        return self.ended_at is None

    def last_sign(self) -> float:
        """Return the CLOCK_MONOTONIC seconds of the last heartbeat, or, before the first, of the
        last look at which the rank had computed since the one before: it imports torch, or builds
        its model.
        """
        beat = self.last_beat()
        if beat is not None:
            return beat
        at, so_far = self.computed
        now, seconds = time.monotonic(), so_far
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        if seconds - so_far > _BUSY * (now - at):
            self.computed = (now, seconds)
        return self.computed[0]

    def last_beat(self) -> float | None:
        """Return the CLOCK_MONOTONIC seconds of the last heartbeat, None before the first."""
        with contextlib.suppress(OSError):
            data = Path(f"{self.files}.heart").read_bytes()
            if len(data) >= TIME.size:
                return float(TIME.unpack_from(data)[0]) or None
        return None

    def ask(self) -> int:
        """Have the rank write its stacks; return where in its file they will begin."""
        with contextlib.suppress(OSError):
            before = Path(f"{self.files}.stacks").stat().st_size
            if self.shows:
                signal.pidfd_send_signal(self.pidfd, STACKS_SIGNAL)
            return before
        return 0

    def answer(self, begin: int) -> str:
        """Return the stacks written since `begin`, at most 60 lines."""
        with contextlib.suppress(OSError):
            data = Path(f"{self.files}.stacks").read_bytes()[begin:]
            lines = data.decode(errors="replace").splitlines()
            if len(lines) > _NUM_LINES:
                lines[_NUM_LINES:] = [f"... {len(lines) - _NUM_LINES} more lines"]
            return "\n".join(lines)
        return ""


def _ask_for_stacks(ranks: Sequence[_WatchedRank]) -> None:
    """Note the stacks of several ranks, and that a rank hangs which does not answer."""
    begins = [one.ask() for one in ranks]
    time.sleep(_ANSWER_S if ranks else 0.0)
    deadline = time.monotonic() + _LATE_S
    for watched, begin in zip(ranks, begins, strict=True):
        while watched.shows and not watched.answer(begin) and time.monotonic() < deadline:
            time.sleep(0.05)
    for watched, begin in zip(ranks, begins, strict=True):
        watched.stacks = watched.answer(begin)
        watched.hung = watched.shows and not watched.stacks


class _Stall:
    """Tells, once, that no rank has shown a heartbeat for too long."""

    def __init__(
        self, limit_s: float | None, tell: Callable[[float, dict[int, str], bool], None]
    ) -> None:
        self.ends = limit_s is not None  # and else is only told
        self.limit_s = STALL_S if limit_s is None else limit_s  # 0: never look
        self.every_s = min(self.limit_s / 4, 5.0)  # a look comes after so long, or sooner
        self._tell = tell
        self._told_of: float | None = None  # the last heartbeat before it
        self._looked_at, self._last = time.monotonic(), 0.0
        self._suspended_s = 0.0  # since the `_last` sign: looks came late, so we were not running

    def is_new(self, ranks: list[_WatchedRank]) -> bool:
        """Whether the `ranks`, all alive, have stalled since it was told last. A job that is
        suspended as a whole has not: its launcher did not run either.
        """
        beats = [watched.last_beat() for watched in ranks]
        last = max(watched.last_sign() for watched in ranks)
        now = time.monotonic()
        before = self._suspended_s if last == self._last else 0.0
        late_s = max(0.0, now - self._looked_at - self.every_s)
        self._suspended_s = min(before + late_s, now - last)
        self._looked_at, self._last = now, last
        if now - last - self._suspended_s <= self.limit_s or last == self._told_of:
            return False
        if not (all(beats) or self.ends):
            return False
        self._told_of = last
        return True

    def tell(self, stacks: dict[int, str]) -> None:
        """Tell it, with each rank's stacks."""
        assert self._told_of is not None
        self._tell(time.monotonic() - self._told_of, stacks, self.ends)


class Supervisor:
    """Watches the ranks of ``directory``; after a failure the rest have ``grace_s`` seconds.

    ``children`` are the processes that the agent starts, by process id.
    ``on_restart`` is called, in the thread, with the failures of a generation when the agent has
    started the next. When no rank has shown a heartbeat for ``stall_s`` seconds, ``on_stall`` is
    called with the seconds, each rank's stacks and True, and the job is ended. Without ``stall_s``
    it is called with False after `STALL_S`, where every rank has shown one before (a script may do
    without an engine).
    """

    def __init__(
        self,
        directory: str,
        grace_s: float,
        children: Mapping[int, subprocess.Popen[bytes]],
        on_restart: Callable[[list[Failure]], None],
        *,
        stall_s: float | None = None,
        on_stall: Callable[[float, dict[int, str], bool], None] = lambda seconds, stacks, ends: (
            None
        ),
    ) -> None:
        self.directory = Path(directory)
        self.grace_s = grace_s
        self.stalled = False  # and ended for it
        self._children = children
        self._on_restart = on_restart
        self._stall = _Stall(stall_s, on_stall)
        # of the main thread's signals; its Ctrl-C are counted
        self._signals, self._signals_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before, self._num_interrupts = -1, 0
        self._watched: dict[int, _WatchedRank] = {}  # by process id
        self._generation = 0
        self._restart_count = 0
        self._unread = b""
        self._stopping = False
        os.mkfifo(self.directory / "events", 0o600)
        self._fifo = os.open(self.directory / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fifo, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        name = "zeroshard-supervisor"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Begin to watch. Called in the main thread: its signals are counted."""
        self._wakeup_before = signal.set_wakeup_fd(self._signals_in, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self, grace_s: float = 0.5) -> None:
        """Watch at most ``grace_s`` seconds more, then end the remaining ranks and the thread."""
        deadline = time.monotonic() + grace_s
        while any(one.alive for one in self._watched.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._stopping = True
        os.write(self._fifo, b"\n")
        self._thread.join()
        for watched in self._watched.values():
            watched.status = self._children[watched.pid].poll()  # the thread may not have looked
            if watched.status is None:
                self._kill(watched)
            os.close(watched.pidfd)
        self._end_children()
        self._selector.close()
        signal.set_wakeup_fd(self._wakeup_before)
        for descriptor in (self._signals, self._signals_in, self._fifo):
            os.close(descriptor)

    def failures(self) -> list[Failure]:
        """The failures of the last generation, the one to blame first; call after :meth:`stop`."""
        failures = []
        for watched in self._ranks():
            status, failed_at = watched.status, watched.failed_at
            was_ended = watched.left_at is not None and status in ENDED_BY_LAUNCHERS
            if failed_at is None and (status in (None, 0) or was_ended):
                continue
            report = self._report_of(watched.pid)
            if "exit_code" in report and (status is None or status < 0):
                # it was ended by us while it was still tearing down
                status = int(str(report["exit_code"]))
            ended_by_us = watched.ended_by_us and failed_at is None
            at = watched.ended_at if failed_at is None else failed_at
            failures.append(
                Failure(
                    rank=watched.rank,
                    pid=watched.pid,
                    at=at if at is not None else time.monotonic(),
                    status=status,
                    message=str(report.get("message", "")),
                    traceback=str(report.get("traceback", "")),
                    consequence=bool(report.get("consequence", ended_by_us)),
                    stalled=bool(report.get("stalled", False)),
                    stacks=watched.stacks,
                    hung=watched.hung and failed_at is None,
                )
            )
        failures = blame_order(failures)
        if failures and (failures[0].consequence or failures[0].stalled):
            failures = [*self.leavers(), *failures]
        return failures

    def leavers(self) -> list[Failure]:
        """The ranks of the last generation that have ended well, in order of time."""
        left = []
        for watched in self._ranks():
            at = watched.ended_at if watched.left_at is None else watched.left_at
            well = watched.left_at is not None or watched.status == 0
            if watched.failed_at is None and well and at is not None:
                left.append(Failure(watched.rank, watched.pid, at, status=0))
        return sorted(left, key=lambda failure: failure.at)

    def _end_children(self) -> None:
        """End the processes that the ranks of the last generation have started, if it failed."""
        if self.failures():
            end_sessions(watched.pid for watched in self._ranks())

    def _ranks(self, generation: int | None = None) -> list[_WatchedRank]:
        """Return the ranks of a generation, by default of the last."""
        asked = self._generation if generation is None else generation
        return [one for one in self._watched.values() if one.generation == asked]

    def knows(self, pid: int) -> bool:
        """Whether the process announced itself."""
        return pid in self._watched

    def _report_of(self, pid: int) -> dict[str, object]:
        """Return what a rank wrote about its failure, if anything."""
        path, report = self.directory / f"failure-{pid}.json", dict[str, object]()
        with contextlib.suppress(OSError, ValueError):
            report = json.loads(path.read_text(encoding="utf-8"))
        return report

    def _watch(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._patience()):
                if key.fd == self._fifo:
                    self._read_events()
                elif key.fd == self._signals:
                    numbers = os.read(self._signals, 1 << 10)
                    self._num_interrupts += numbers.count(signal.SIGINT)
                    if self._num_interrupts > 1:
                        for watched in self._watched.values():
                            watched.end_by = time.monotonic()
                else:
                    self._record_end(key.data)
            for watched in self._watched.values():
                if watched.end_by is not None and watched.end_by <= time.monotonic():
                    self._kill(watched)
            self._look_for_a_stall()

    def _patience(self) -> float | None:
        alive = [one.end_by for one in self._watched.values() if one.alive]
        ends = [end_by for end_by in alive if end_by is not None]
        patience = [max(min(ends) - time.monotonic(), 0.01)] if ends else []
        if self._stall.limit_s:
            patience.append(self._stall.every_s)
        return min(patience, default=None)

    def _look_for_a_stall(self) -> None:
        """Report a stall, and end the ranks for it where that was asked for."""
        stall = self._stall
        ranks = [watched for watched in self._ranks() if watched.alive]
        if not stall.limit_s or self.stalled or not ranks:
            return
        if any(watched.end_by is not None for watched in ranks) or not stall.is_new(ranks):
            return
        _ask_for_stacks(ranks)
        stall.tell({watched.rank: watched.stacks for watched in ranks})
        self.stalled = stall.ends
        if self.stalled:
            for watched in ranks:
                watched.end_by = time.monotonic()

    def _read_events(self) -> None:
        self._unread += os.read(self._fifo, 1 << 16)
        *lines, self._unread = self._unread.split(b"\n")
        for line in filter(None, lines):
            event = json.loads(line)
            watched = self._watched.get(event["pid"])
            if "rank" in event:
                self._add(event)
            elif watched is not None and "left_at" in event:
                watched.left_at = event["left_at"]
            elif watched is not None:
                watched.failed_at = event["failed_at"]
                report, generation = self._report_of(watched.pid), watched.generation
                if report.get("stalled"):
                    peers = [one for one in self._ranks(generation) if one is not watched]
                    _ask_for_stacks([one for one in peers if one.alive])
                if report.get("exit_code") != EXIT_PREEMPTED:
                    self._start_grace(generation)

    def _add(self, hello: Mapping[str, int]) -> None:
        """Watch a rank that has announced itself."""
        rank, restart_count, pid = hello["rank"], hello["restart_count"], hello["pid"]
        # A group that changed its members starts again with the same count, and then a rank comes
        # twice.
        again = any(watched.rank == rank for watched in self._ranks())
        if again or restart_count > self._restart_count:
            self._on_restart(self.failures())
            self._end_children()
            self._generation += 1
        self._restart_count = restart_count
        # dead and reaped already: the agent's exit code is all there is
        with contextlib.suppress(ProcessLookupError):
            files, shows = self.directory / f"rank-{pid}", bool(hello.get("shows"))
            watched = _WatchedRank(rank, self._generation, pid, os.pidfd_open(pid), files, shows)
            # other threads iterate over the old one
            self._watched = {**self._watched, pid: watched}
            self._selector.register(watched.pidfd, selectors.EVENT_READ, watched)

    def _record_end(self, watched: _WatchedRank) -> None:
        watched.ended_at = time.monotonic()
        self._selector.unregister(watched.pidfd)
        try:
            result = os.waitid(os.P_PIDFD, watched.pidfd, os.WEXITED | os.WNOWAIT)
            assert result is not None
            is_exit, status = result.si_code == os.CLD_EXITED, result.si_status
            watched.status = status if is_exit else -status
        except ChildProcessError:  # the agent has reaped it, or is about to
            watched.status = self._children[watched.pid].wait()
        if watched.status not in (0, EXIT_PREEMPTED):
            self._start_grace(watched.generation)

    def _start_grace(self, generation: int) -> None:
        for watched in self._ranks(generation):
            if watched.end_by is None:
                watched.end_by = time.monotonic() + self.grace_s

    @staticmethod
    def _kill(watched: _WatchedRank) -> None:
        if watched.alive:
            watched.ended_by_us = True
            with contextlib.suppress(ProcessLookupError):
                # the agent makes each rank the leader of a group of its own
                os.killpg(watched.pid, signal.SIGKILL)
