"""Faults of a job as a whole, repeated (F1, F2, F12, F13): killed ranks and launchers, ports that
are taken, memory that runs out. Each prints its figures (`pytest -s`); see docs/launching.md.
"""

from __future__ import annotations

import random
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.harness import is_running
from tests.support.hosts import descendants
from tests.support.launched import HELLO, PROGRAM, WAIT, Job, wait_until

PHASES = ("forward", "backward", "step", "save")
# Kills itself, or runs out of memory, some milliseconds after a phase of a step has begun.
TRAIN = """
import json, resource, threading, torch, zeroshard as zs
torch.set_num_threads(1)
phase_to_end, step_to_end, victim, delay, how = json.loads(sys.argv[1])

def end():
    time.sleep(delay)
    (here / "killed-at").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

def begin(phase, step):
    if (phase, step, rank) == (phase_to_end, step_to_end, victim):
        if how == "kill":
            threading.Thread(target=end).start()
        else:
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
            (here / "killed-at").write_text(str(time.monotonic()))
            torch.ones(1 << 28)

zs.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = zs.shard(model, optimizer, stage=3)
for step in range(10_000):
    begin("forward", step)
    loss = model(torch.randn(8, 256)).square().mean()
    begin("backward", step)
    loss.backward()
    begin("step", step)
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        begin("save", step)
        zs.save(here / "saved", engine, step=step)
"""


def _train_until(
    directory: Path, where: tuple[str, int], victim: int, delay: float, how: str, ranks: int
) -> tuple[float, int, str, bool]:
    """Run a job that `victim` ends; return the seconds after that, the exit code, the messages and
    whether a process was left.
    """
    directory.mkdir()
    argument = f'["{where[0]}", {where[1]}, {victim}, {delay}, "{how}"]'
    job = Job(directory, HELLO + TRAIN, "--nproc", str(ranks), args=(argument,))
    try:
        pids = job.ranks(ranks)
        everyone = descendants(job.process.pid) | set(pids)
        code, _, stderr = job.end()
        ended_at = time.monotonic()
    finally:
        job.process.kill()
    killed_at = float((directory / "killed-at").read_text())
    left = any(map(is_running, everyone - {job.process.pid}))
    return ended_at - killed_at, code, stderr, left


def _p95(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_rank_killed_at_twenty_random_points_of_training_is_named_and_ends_the_job(
    tmp_path: Path,
) -> None:
    print()
    source, seconds = random.Random(1), list[float]()
    for number in range(20):
        phase = PHASES[number % 4]
        step = 3 * source.randrange(1, 5) if phase == "save" else source.randrange(2, 12)
        victim, delay = source.randrange(2), source.random() * 0.02
        found = _train_until(tmp_path / str(number), (phase, step), victim, delay, "kill", ranks=2)
        took, code, stderr, left = found
        assert code == 137, stderr
        last = stderr.splitlines()[-1]
        assert f"rank {victim} failed first" in last and "killed by SIGKILL" in last, stderr
        assert not left
        seconds.append(took)
    print(f"F1: 20 of 20 named, 0 left, p95 {_p95(seconds):.2f} s, most {max(seconds):.2f} s")
    assert _p95(seconds) <= 3.0, seconds


@pytest.mark.slow
def test_when_the_launcher_is_killed_its_ranks_are_gone_in_two_seconds(tmp_path: Path) -> None:
    print()
    seconds = []
    for number in range(10):
        directory = tmp_path / str(number)
        directory.mkdir()
        job = Job(directory, HELLO + "import torch\n" + WAIT, "--nproc", "2")
        pids = job.ranks(2)
        everyone = descendants(job.process.pid) | set(pids)
        begin = time.monotonic()
        job.process.kill()
        wait_until(lambda pids=pids: not any(map(is_running, pids)))
        seconds.append(time.monotonic() - begin)
        assert job.end()[0] != 0
        wait_until(lambda everyone=everyone: not any(map(is_running, everyone)))
    print(f"F2: ranks gone in {max(seconds):.2f} s at most, 10 launchers killed")
    assert max(seconds) <= 2.0, seconds


@pytest.mark.slow
def test_ten_pairs_started_at_once_beside_a_taken_port_all_start(tmp_path: Path) -> None:
    jobs, taken = [], socket.socket()
    with taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else's, which is taken as well
        for number in range(10):
            directory = tmp_path / str(number)
            directory.mkdir()
            text = "import socket\nsocket.create_connection((os.environ['MASTER_ADDR'],"
            text += " int(os.environ['MASTER_PORT']))).close()\nprint('started')\n"
            jobs.append(Job(directory, HELLO + text, "--nproc", "2"))
        ends = [job.end() for job in jobs]
    started = sum(stdout.count("started") for _, stdout, _ in ends)
    print(f"\nF12: {started} of 20 ranks started")
    assert [code for code, _, _ in ends] == [0] * 10 and started == 20, ends


def test_a_pinned_port_that_is_taken_is_named_at_once() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        begin = time.monotonic()
        answer = subprocess.run(
            [PROGRAM, "run", f"--master-port={port}", __file__],
            capture_output=True,
            text=True,
            timeout=300,
        )
        took = time.monotonic() - begin
    assert answer.returncode == 2 and f"--master-port {port} cannot be used" in answer.stderr
    assert took < 60


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_rank_that_runs_out_of_memory_is_named_first(tmp_path: Path) -> None:
    print()
    source, seconds = random.Random(2), list[float]()
    for number in range(20):
        phase = PHASES[number % 3]
        where = (phase, source.randrange(2, 6))
        took, code, stderr, left = _train_until(
            tmp_path / str(number), where, 1, 0.0, "memory", ranks=2
        )
        assert code == 1, stderr
        block = stderr.rpartition("zeroshard run: ")[2]
        assert re.match(r"rank 1 failed first, .*exit code 1\n", block), stderr
        assert "can't allocate memory" in block, stderr
        assert not left
        seconds.append(took)
    print(f"F13: 20 of 20 named, most {max(seconds):.2f} s")
    assert max(seconds) <= 5.0, seconds


LATE = """
import torch, zeroshard as zs
if rank == 1 and sys.argv[1] == "init_distributed":
    time.sleep(600)
zs.init_distributed(timeout_s=float(sys.argv[2]))
if rank == 1:
    time.sleep(600)
zs.shard(torch.nn.Linear(8, 8), stall_timeout_s=10)
"""


def test_a_rank_that_does_not_come_is_named_when_the_calls_own_limit_is_over(
    tmp_path: Path,
) -> None:
    """Two jobs side by side, since both wait for ten seconds."""
    jobs = {}
    try:
        for call, timeout_s in (("init_distributed", 10), ("shard", 600)):
            (tmp_path / call).mkdir()
            arguments = (call, str(timeout_s))
            jobs[call] = Job(tmp_path / call, HELLO + LATE, "--nproc", "3", args=arguments)
        ends = {call: job.end(timeout=300) for call, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.process.kill()
    for call, (code, _, stderr) in ends.items():
        # on a busy machine another one may be late, too
        told = rf"{call}\(\): rank\(s\) \[[^]]*1[^]]*\] did not come within 10 s"
        assert code == 71 and re.search(told, stderr), stderr
        assert "rank(s) [0, 1, 2]" not in stderr, "who waits has come"
