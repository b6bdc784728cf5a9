"""``zeroshard run --hostfile`` on two hosts of their own network, over a real sshd.

Needs root and openssh-server, and is skipped without them, which counts against the skip budget;
`tests/features/test_run_hosts.py` asks the same of a stand-in for ssh.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.test_elastic import _rank_after, check_came_back, of, run
from tests.features.test_run_hosts import TRAIN
from tests.support.elastic_runs import Plan, events
from tests.support.harness import is_running, run_ranks
from tests.support.hosts import descendants
from tests.support.launched import HELLO, PROGRAM, WAIT, Job, wait_until
from tests.support.namespaces import ADDRESSES, TwoHosts, two_hosts, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HOSTS = "".join(f"{address} slots=2\n" for address in ADDRESSES)
SHOW = """
zs.init_distributed()
losses = train(rank, int(os.environ["WORLD_SIZE"]), "gloo")
interfaces = os.environ["GLOO_SOCKET_IFNAME"]
print(json.dumps([rank, losses, interfaces, os.environ["MASTER_ADDR"]]), flush=True)
torch.distributed.destroy_process_group()
"""
Start = Callable[..., Job]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    if reason := why_not():
        pytest.skip(f"NOTHING WAS CHECKED OVER A REAL ssh: {reason}")
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def start(hosts: TwoHosts, tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(text: str) -> Job:
        hostfile = tmp_path / "hostfile"
        hostfile.write_text(HOSTS)
        options = ("--hostfile", str(hostfile), "--ssh", hosts.ssh)
        jobs.append(Job(tmp_path, text, *options, before=hosts.inside(0)))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.communicate()


def _losses(rank: int, world: int) -> list[float]:
    space: dict[str, object] = {}
    exec(TRAIN, space)
    losses: list[float] = space["train"](rank, world, "gloo")  # type: ignore[operator]
    return losses


def _on_hosts(pids: list[int]) -> set[int]:
    """All processes of the job on both hosts: sessions of sshd below them, guards, launchers."""
    return {one for pid in pids for one in {_ancestor(pid, 2), _ancestor(pid, 1), pid}}


def _ancestor(pid: int, generations: int) -> int:
    for _ in range(generations):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def test_two_by_two_ranks_train_over_the_network_with_the_losses_of_one_host(start: Start) -> None:
    code, stdout, stderr = start(HELLO + "import json\n" + TRAIN + SHOW).end()
    assert code == 0, stderr
    found = sorted(json.loads(line.partition("] ")[2]) for line in stdout.splitlines())
    expected = run_ranks(4, _losses)
    assert found == [[rank, expected[rank], "eth0", ADDRESSES[0]] for rank in range(4)]


def test_a_killed_rank_is_named_with_its_host_and_nobody_is_left(start: Start) -> None:
    job = start(HELLO + WAIT)
    pids = job.ranks(4)
    everyone = _on_hosts(pids) | descendants(job.process.pid)
    os.kill(pids[2], signal.SIGKILL)
    code, _, stderr = job.end()
    assert code == 137, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith(f"zeroshard run: rank 2 on {ADDRESSES[1]} failed first, "), stderr
    wait_until(lambda: not any(map(is_running, everyone)))


@pytest.mark.parametrize("what", ["connection", "everything"])
def test_a_killed_host_is_named_and_nobody_is_left(start: Start, what: str) -> None:
    job = start(HELLO + WAIT)
    pids = job.ranks(4)
    everyone = _on_hosts(pids) | descendants(job.process.pid)
    guard = _ancestor(pids[2], 2)
    session = _ancestor(guard, 1)
    victims = [session] if what == "connection" else [session, guard, *pids[2:]]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    code, _, stderr = job.end()
    assert time.monotonic() - begin < 10
    assert code == 74, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith(f"zeroshard run: {ADDRESSES[1]} was lost, its connection ended"), stderr
    wait_until(lambda: not any(map(is_running, everyone)))


def test_when_the_launcher_is_killed_both_hosts_end_their_ranks(start: Start) -> None:
    job = start(HELLO + WAIT)
    pids = job.ranks(4)
    everyone = _on_hosts(pids) | descendants(job.process.pid)
    os.kill(job.process.pid, signal.SIGKILL)
    begin = time.monotonic()
    wait_until(lambda: not any(map(is_running, everyone)))
    assert time.monotonic() - begin < 3


def test_a_host_without_sshd_is_named(start: Start, hosts: TwoHosts, tmp_path: Path) -> None:
    (tmp_path / "nobody").write_text(f"{ADDRESSES[0]} slots=1\n10.211.211.9 slots=1\n")
    (tmp_path / "script.py").write_text(HELLO + WAIT)
    refused = [*hosts.ssh.split(), "-p", "9"]
    for ssh, why in ((" ".join(refused), "Connection refused"), (hosts.ssh, "No route to host")):
        answer = subprocess.run(
            [*hosts.inside(0), PROGRAM, "run", "--hostfile", str(tmp_path / "nobody"), "--ssh", ssh,
             str(tmp_path / "script.py")],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert answer.returncode == 74, answer.stderr
        assert "could not be reached" in answer.stderr and why in answer.stderr, answer.stderr
        lines = answer.stderr.splitlines()  # torch may warn before: no name for the address
        assert [line for line in lines if "[c10d]" not in line] == lines[-1:]


def test_a_host_whose_sshd_answers_again_takes_part_again(hosts: TwoHosts, tmp_path: Path) -> None:
    """The second host is gone, sshd and all; when sshd is back it gets the state of the first."""
    (tmp_path / "hostfile").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    options = ("--elastic", "--rejoin-after=0.5", "--hostfile", str(tmp_path / "hostfile"))
    plan = Plan(steps=40, gate=35, leaves=6, redundancy=1, pause_s=0.05)

    def disturb(_: subprocess.Popen[str]) -> None:
        guard = _ancestor(_rank_after(tmp_path, 2, 1, 3), 2)
        hosts.close(1)
        try:
            os.kill(guard, signal.SIGKILL)
            wait_until(lambda: len(of(events(tmp_path), "kept", 1)) >= 2)
        finally:
            hosts.open(1)
        wait_until(lambda: len(of(events(tmp_path), "loaded", 2)) == 2)
        (tmp_path / "open").touch()

    done = run(
        tmp_path, plan, *options, "--ssh", hosts.ssh, meanwhile=disturb, before=hosts.inside(0)
    )
    assert done.code == 0, done.said
    said = [line for line in done.said if line.startswith("zeroshard run: ")]
    check_came_back(done, ADDRESSES[1], said, steps=40, leaves=6)
