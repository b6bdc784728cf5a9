"""Who failed first: the rule, then real processes that announce themselves and fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroshard.launch.supervisor import (
    Failure,
    Supervisor,
    _WatchedRank,
    blame_order,
    exit_code_of,
)


def _of(rank: int, at: float, status: int | None, message: str = "", **more: bool) -> Failure:
    return Failure(rank, 10 + rank, at, status, message, **more)


_RESET = "connection reset"


@pytest.mark.parametrize(
    ("first", "second", "blamed"),
    [
        (_of(0, 2.0, 1, "b"), _of(1, 1.0, 1, "a"), 1),  # the earliest report
        # a peer reports a killed rank's connections sooner
        (_of(0, 1.0, 1, _RESET), _of(1, 1.02, -signal.SIGKILL), 1),
        # which an abort or a SIGTERM may be a consequence of
        (_of(0, 1.0, 1, "ValueError"), _of(1, 1.02, -signal.SIGABRT), 0),
        (_of(0, 1.0, 1, "ValueError"), _of(1, 1.02, -signal.SIGTERM), 0),
        # a silent exit only when the report came just before it
        (_of(0, 1.0, 1, _RESET), _of(1, 1.02, 5), 1),
        (_of(0, 0.5, 1, "ValueError"), _of(1, 1.02, 5), 0),
        # a rank that lost a peer never before it
        (_of(0, 1.0, 71, "PeerLostError", consequence=True), _of(1, 1.5, 1, "ValueError"), 1),
    ],
)
def test_the_failure_that_is_no_consequence_is_to_blame(
    first: Failure, second: Failure, blamed: int
) -> None:
    assert blame_order([first, second])[0].rank == blamed


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *((0, 71), (1, 1), (5, 1), (2, 1), (3, 3), (70, 70), (71, 71), (72, 72), (73, 73)),
        *((74, 74), (75, 75), (-9, 137), (-11, 139), (None, 1)),
    ],
)
def test_exit_codes_are_those_of_the_contract(status: int | None, code: int) -> None:
    assert exit_code_of(Failure(0, 10, at=0.0, status=status)) == code


def test_a_failure_says_how_in_words() -> None:
    assert Failure(0, 1, 0.0, status=-9).how == "killed by SIGKILL"
    assert Failure(0, 1, 0.0, status=-60).how == "killed by signal 60"
    assert Failure(0, 1, 0.0, status=7).how == "exit code 7"
    assert Failure(0, 1, 0.0).how == "ended in an unknown way"


class _Ranks:
    """Processes that look like ranks to the supervisor."""

    def __init__(
        self,
        directory: Path,
        supervisor: Supervisor,
        processes: dict[int, subprocess.Popen[bytes]],
    ) -> None:
        self.directory, self.supervisor, self.processes = directory, supervisor, processes

    def start(self, rank: int, code: str, restart_count: int = 0) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
        self.processes[process.pid] = process
        self.announce({"pid": process.pid, "rank": rank, "restart_count": restart_count})
        _wait_until(lambda: self.supervisor.knows(process.pid))
        return process

    def announce(self, message: dict[str, float]) -> None:
        with open(self.directory / "events", "wb", buffering=0) as fifo:
            fifo.write(json.dumps(message).encode() + b"\n")


def _wait_until(condition: object, timeout: float = 300.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[_Ranks]:
    restarted: list[list[Failure]] = []
    processes: dict[int, subprocess.Popen[bytes]] = {}
    supervisor = Supervisor(str(tmp_path), 0.3, processes, on_restart=restarted.append)
    supervisor.start()
    ranks = _Ranks(tmp_path, supervisor, processes)
    ranks.restarted = restarted  # type: ignore[attr-defined]
    yield ranks
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("reaped", [False, True])
def test_a_killed_process_is_seen_whoever_reaps_it(
    ranks: _Ranks, reaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reaped:
        _reap_first(ranks, monkeypatch)
    process = ranks.start(1, "import time; time.sleep(60)")
    os.kill(process.pid, signal.SIGKILL)
    _wait_until(lambda: ranks.supervisor.failures())
    if not reaped:
        os.killpg(process.pid, signal.SIGTERM)  # as the agent may do
    ranks.supervisor.stop()
    (failure,) = ranks.supervisor.failures()
    assert (failure.rank, failure.status) == (1, -signal.SIGKILL)
    assert ranks.supervisor.leavers() == []
    assert process.wait() == -signal.SIGKILL


def _reap_first(ranks: _Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the agent reap each process before the supervisor looks."""
    record = Supervisor._record_end

    def late(supervisor: Supervisor, watched: _WatchedRank) -> None:
        ranks.processes[watched.pid].wait(timeout=300)
        record(supervisor, watched)

    monkeypatch.setattr(Supervisor, "_record_end", late)


def test_after_a_failure_the_others_are_ended_when_the_grace_is_over(ranks: _Ranks) -> None:
    stubborn = ranks.start(
        0, "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    ranks.start(1, "raise SystemExit(1)")
    assert stubborn.wait(timeout=300) == -signal.SIGKILL
    ranks.supervisor.stop()
    assert [failure.rank for failure in ranks.supervisor.failures()] == [1, 0]


def test_a_failure_that_was_announced_counts_from_then_even_if_the_process_lingers(
    ranks: _Ranks,
) -> None:
    process = ranks.start(0, "import time; time.sleep(60)")
    report = {"at": 1.5, "message": "ValueError: no", "traceback": "Traceback ...", "exit_code": 72}
    (ranks.directory / f"failure-{process.pid}.json").write_text(json.dumps(report))
    ranks.announce({"pid": process.pid, "failed_at": 1.5})
    assert process.wait(timeout=300) == -signal.SIGKILL
    ranks.supervisor.stop()
    (failure,) = ranks.supervisor.failures()
    assert (failure.at, failure.status, failure.message) == (1.5, 72, "ValueError: no")


def test_a_clean_end_is_no_failure_and_disturbs_nobody(ranks: _Ranks) -> None:
    other = ranks.start(0, "import time; time.sleep(0.8)")
    ranks.start(1, "pass")
    assert other.wait(timeout=300) == 0
    ranks.supervisor.stop()
    assert ranks.supervisor.failures() == []


def test_a_rank_that_left_is_to_blame_for_what_lost_it_and_for_nothing_else(ranks: _Ranks) -> None:
    left = ranks.start(1, "import time; time.sleep(60)")  # still tearing down when the others end
    other = ranks.start(0, "import time; time.sleep(60)")
    ranks.announce({"pid": left.pid, "left_at": 1.0})
    for consequence, blamed in ((True, [(1, 0), (0, 71)]), (False, [(0, 71)])):
        report = {
            "at": 2.0,
            "message": "PeerLostError: no",
            "traceback": "Traceback ...",
            "exit_code": 71,
            "consequence": consequence,
        }
        (ranks.directory / f"failure-{other.pid}.json").write_text(json.dumps(report))
        ranks.announce({"pid": other.pid, "failed_at": 2.0})
        other.wait(timeout=300)
        left.wait(timeout=300)
        found = ranks.supervisor.failures()
        assert [(failure.rank, failure.status) for failure in found] == blamed
    ranks.supervisor.stop()


def test_a_rank_that_the_agent_reaped_first_has_left_if_nobody_had_failed(
    ranks: _Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _reap_first(ranks, monkeypatch)
    left = ranks.start(1, "pass")
    stays = ranks.start(2, "import time; time.sleep(60)")  # ended with the one that failed
    other = ranks.start(0, "import time; time.sleep(60)")
    left.wait(timeout=300)
    time.sleep(0.2)  # until the thread has looked
    report = {"at": 2.0, "message": "no", "traceback": "T", "exit_code": 71, "consequence": True}
    (ranks.directory / f"failure-{other.pid}.json").write_text(json.dumps(report))
    ranks.announce({"pid": other.pid, "failed_at": 2.0})
    for process in (other, stays):
        process.wait(timeout=300)
    ranks.supervisor.stop()
    found = ranks.supervisor.failures()
    assert [(failure.rank, failure.status) for failure in found] == [(1, 0), (0, 71), (2, -9)]


def test_a_new_generation_reports_the_old_one_and_starts_with_a_clean_slate(ranks: _Ranks) -> None:
    ended = ranks.start(0, "raise SystemExit(4)")
    ended.wait(timeout=300)
    time.sleep(0.3)
    fine = ranks.start(0, "import time; time.sleep(0.8)", restart_count=1)
    assert [failure.status for failure in ranks.restarted[0]] == [4]  # type: ignore[attr-defined]
    assert fine.wait(timeout=300) == 0
    ranks.supervisor.stop()
    assert ranks.supervisor.failures() == []


def test_a_rank_that_comes_twice_with_the_same_restart_count_begins_a_new_generation(
    ranks: _Ranks,
) -> None:
    """A group that changed its members starts again without counting; its old failures are
    reported, and end none of the new ranks.
    """
    ended = ranks.start(0, "raise SystemExit(4)", restart_count=2)
    ended.wait(timeout=300)
    time.sleep(0.3)
    again = ranks.start(0, "import time; time.sleep(0.8)", restart_count=2)
    other = ranks.start(1, "import time; time.sleep(0.8)", restart_count=2)
    (first, second) = ranks.restarted  # type: ignore[attr-defined]
    assert [failure.status for failure in second] == [4] and first == [], (
        "with the first rank a generation begins, too: it counts from 0"
    )
    assert (again.wait(timeout=300), other.wait(timeout=300)) == (0, 0)
    ranks.supervisor.stop()
    assert ranks.supervisor.failures() == []


def test_what_is_left_at_the_end_is_ended(ranks: _Ranks) -> None:
    process = ranks.start(0, "import time; time.sleep(60)")
    ranks.supervisor.stop(grace_s=0.1)
    assert process.wait(timeout=300) == -signal.SIGKILL
