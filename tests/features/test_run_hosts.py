"""``zeroshard run --hostfile``: several hosts, over an ssh that starts a shell on this one.

The hosts are loopback addresses of this machine. `tests/faults/test_real_hosts.py` does the same
with hosts of their own network and a real sshd.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.harness import is_running, run_ranks
from tests.support.hosts import descendants
from tests.support.launched import HELLO, PROGRAM, WAIT, Job, stub_ssh, wait_until

HOSTS = "127.0.0.2 slots=2\n127.0.0.3 slots=2\n"
ONE_EACH = "127.0.0.2 slots=1\n127.0.0.3 slots=1\n"
TRAIN = """
import torch, zeroshard as zs

def train(rank, world, transport="auto", steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = zs.shard(model, optimizer, stage=3, comm=zs.Comm(transport=transport))
    losses = []
    for step in range(steps):
        torch.manual_seed(world * step + rank)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.close()
    return losses
"""
SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "ZEROSHARD_T", "HF_TOKEN",
         "MY_OWN")
if __name__ == "__main__":
    zs.init_distributed()
    rank = int(os.environ["RANK"])
    shown = {name: os.environ.get(name) for name in names}
    losses = train(rank, int(os.environ["WORLD_SIZE"]))
    print(json.dumps([sys.argv[1:], shown, os.getcwd(), losses]), flush=True)
    torch.distributed.destroy_process_group()
"""
QUIET = {"OMP_NUM_THREADS": "1"}  # else each launcher says what it chose
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(
        text: str,
        *options: str,
        hosts: str = ONE_EACH,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Job:
        hostfile = tmp_path / "hostfile"
        hostfile.write_text(hosts)
        line = ["--hostfile", str(hostfile), "--ssh", stub_ssh(tmp_path), *options]
        jobs.append(Job(tmp_path, text, *line, args=args, env={**QUIET, **(env or {})}))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.communicate()
    for path in tmp_path.glob("pid-[0-9]"):  # ranks of a host that has not noticed
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _losses(rank: int, world: int) -> list[float]:
    space: dict[str, object] = {}
    exec(TRAIN, space)
    losses: list[float] = space["train"](rank, world)  # type: ignore[operator]
    return losses


@pytest.mark.slow
def test_two_hosts_train_as_one_does_with_the_users_arguments_and_variables(
    start: Start,
) -> None:
    arguments = ("a b", "$(touch x)", "", "é\udcff", "'\"\\", "\n", "--nproc", "${local_rank}")
    job = start(
        TRAIN + SHOW,
        "--include=127.0.0.2@127.0.0.3:1,2",
        "--export=MY_OWN",
        hosts="127.0.0.2 slots=2\n127.0.0.3 slots=3\n127.0.0.4 slots=9\n",
        args=arguments,
        env={"ZEROSHARD_T": "$x\n'", "HF_TOKEN": "secret", "MY_OWN": "mine"},
    )
    code, stdout, stderr = job.end()
    assert code == 0, stderr
    lines = [line.partition("] ") for line in stdout.splitlines() if "{" in line]
    found = sorted(
        ((json.loads(text), host[1:]) for host, _, text in lines), key=lambda one: one[0][1]["RANK"]
    )
    assert len(found) == 4, stdout
    here = os.getcwd()
    expected = run_ranks(4, _losses)
    for rank, ((argv, shown, directory, losses), host) in enumerate(found):
        assert (argv, directory) == (list(arguments), here)
        assert host == ("127.0.0.2", "127.0.0.3")[rank // 2]
        assert shown == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "CUDA_VISIBLE_DEVICES": (None, "1,2")[rank // 2],
            "ZEROSHARD_T": "$x\n'",
            "HF_TOKEN": None,
            "MY_OWN": "mine",
        }
        assert losses == expected[rank]


def test_a_killed_rank_ends_every_host_and_is_named_with_its_host(start: Start) -> None:
    job = start(HELLO + WAIT, hosts=HOSTS)
    pids = job.ranks(4)
    everyone = descendants(job.process.pid) | set(pids)
    os.kill(pids[3], signal.SIGKILL)
    code, _, stderr = job.end()
    assert code == 128 + signal.SIGKILL, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("zeroshard run: rank 3 on 127.0.0.3 failed first, "), stderr
    assert "killed by SIGKILL" in last and stderr.count("failed") == 1, stderr
    wait_until(lambda: not any(map(is_running, everyone)))


@pytest.mark.slow
def test_an_error_is_shown_whole_and_once(start: Start) -> None:
    text = "if rank == 1:\n    raise ValueError('no good')\n"
    code, _, stderr = start(HELLO + text + WAIT).end()
    assert code == 1
    block = stderr.rpartition("zeroshard run: ")[2].splitlines()
    assert block[0].startswith("rank 1 on 127.0.0.3 failed first, "), stderr
    assert block[-1] == "ValueError: no good" and stderr.count("no good\n") == 1, stderr


@pytest.mark.slow
def test_a_killed_host_ends_the_others_and_is_named(start: Start) -> None:
    job = start(HELLO + WAIT)
    pids = job.ranks(2)
    everyone = descendants(job.process.pid) | set(pids)
    guard = _guard_of(pids[1])
    os.kill(guard, signal.SIGKILL)
    code, _, stderr = job.end()
    assert code == 74, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("zeroshard run: 127.0.0.3 was lost, its connection ended"), stderr
    wait_until(lambda: not any(map(is_running, everyone)))


def _guard_of(pid: int) -> int:
    """The process between ssh and the launcher of a rank."""
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def test_a_host_that_refuses_ends_the_others_and_is_named(start: Start) -> None:
    hosts = "127.0.0.2 slots=1\nrefused-1 slots=1\n"
    job = start(HELLO + WAIT, hosts=hosts)
    code, _, stderr = job.end()
    assert code == 74
    assert stderr.count("\n") == 1
    assert stderr.startswith(
        "zeroshard run: refused-1 could not be reached: ssh: connect to host refused-1 port 22:"
        " Connection refused ("
    ), stderr


@pytest.mark.slow
def test_a_script_that_a_host_lacks_is_named_with_the_host(start: Start, tmp_path: Path) -> None:
    gone = tmp_path / "other"
    job = start(HELLO, env={"ZEROSHARD_GONE": "1"})
    assert job.end()[0] == 0
    gone.mkdir()
    stub = Path(stub_ssh(tmp_path))
    # the second host has another directory where this one has the script's
    stub.write_text(stub.read_text().replace("cd /\n", f'[ "$host" = 127.0.0.3 ] && mv '
                                             f"{tmp_path}/script.py {gone}\ncd /\n"))  # fmt: skip
    answer = subprocess.run(
        [PROGRAM, "run", "--hostfile", str(tmp_path / "hostfile"), "--ssh", str(stub),
         str(tmp_path / "script.py")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert answer.returncode == 2, answer.stderr
    assert "not found in" in answer.stderr.splitlines()[-1], answer.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_one_host_while_another_waits_for_it_is_named(start: Start) -> None:
    text = HELLO + TRAIN + "zs.init_distributed()\ntrain(rank, 2, 'gloo', 3 + 3 * rank)\n"
    code, _, stderr = start(text).end()
    assert code == 71, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("zeroshard run: rank 0 on 127.0.0.2 left first, "), stderr


@pytest.mark.slow
def test_one_launcher_per_node_of_a_slurm_step_makes_one_job(tmp_path: Path) -> None:
    text = "import torch, zeroshard as zs\nzs.init_distributed()\nvalue = torch.ones(1)\n"
    text += "torch.distributed.all_reduce(value)\nprint(rank, value.item(), flush=True)\n"
    text += "torch.distributed.destroy_process_group()\n"
    jobs = []
    for node in range(2):
        directory = tmp_path / str(node)
        directory.mkdir()
        step = {
            "SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(os.getpid()), "SLURM_PROCID": str(node),
            "SLURM_NODEID": str(node), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NODELIST": "127.0.0.2,127.0.0.3",
        }  # fmt: skip
        jobs.append(Job(directory, HELLO + text, "--nproc", "2", env=step))
    ends = [job.end() for job in jobs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    lines = sorted(line for _, stdout, _ in ends for line in stdout.splitlines())
    assert lines == [f"{rank} 4.0" for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun.openmpi", "mpiexec.hydra"])
def test_tasks_of_mpirun_are_ranks_of_one_job(tmp_path: Path, launcher: str) -> None:
    if shutil.which(launcher) is None:
        pytest.skip(f"NOTHING WAS CHECKED UNDER {launcher}: it is not installed")
    script = tmp_path / "script.py"
    text = TRAIN + "zs.init_distributed()\nrank = torch.distributed.get_rank()\n"
    text += "train(rank, torch.distributed.get_world_size())\n"
    script.write_text(text + "torch.distributed.destroy_process_group()\nprint('done', rank)\n")
    options = []
    if launcher == "mpirun.openmpi":
        options = ["--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader"]
        options += ["--mca", "oob_tcp_if_include", "lo"]
    ended = subprocess.run(
        [launcher, *options, "-n", "2", sys.executable, str(script)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    done = [line for line in ended.stdout.splitlines() if line.startswith("done")]
    assert sorted(done) == ["done 0", "done 1"], ended


@pytest.mark.slow
def test_when_the_launcher_is_killed_nothing_is_left_on_any_host(start: Start) -> None:
    job = start(HELLO + WAIT, hosts=HOSTS)
    pids = job.ranks(4)
    everyone = descendants(job.process.pid) | set(pids)
    job.process.kill()
    wait_until(lambda: not any(map(is_running, everyone)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "text", "code"),
    [
        pytest.param(signal.SIGTERM, "", 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "", 130, marks=pytest.mark.slow),
        (signal.SIGTERM, "signal.signal(15, lambda *_: os._exit(75))\n", 75),
    ],
    ids=["SIGTERM", "SIGINT", "saved"],
)
def test_a_signal_to_the_launcher_reaches_the_ranks_of_every_host(
    start: Start, number: int, text: str, code: int
) -> None:
    job = start(HELLO.replace("here =", text + "here =") + WAIT)
    pids = job.ranks(2)
    job.process.send_signal(number)
    found, _, stderr = job.end()
    assert found == code, stderr
    said = "preempted" if code == 75 else f"ended by {signal.Signals(number).name}\n"
    assert stderr.startswith(f"zeroshard run: {said}") and stderr.count("\n") == 1, stderr
    assert not any(map(is_running, pids))


def test_a_port_that_is_taken_on_the_first_host_is_named(start: Start) -> None:
    import socket

    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        job = start(HELLO, f"--master-port={port}")
        code, _, stderr = job.end()
    assert code == 2, stderr
    assert f"--master-port {port} cannot be used" in stderr and stderr.count("\n") == 1, stderr
