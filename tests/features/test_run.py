"""``zeroshard run`` for real: arguments, environment, failures, and nobody left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.harness import is_running
from tests.support.launched import HELLO, PROGRAM, STUBBORN, WAIT, Job, wait_until
from zeroshard.launch.run import SIGNAL_GRACE_S

# torchrun itself would end ranks only after SIGNAL_GRACE_S
BEFORE_TORCHRUN_S = SIGNAL_GRACE_S - 10.0

GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(4)
"""
NO_SUCH_STEP = """
    import torch, zeroshard as zs
    os.environ["WORLD_SIZE"] = "1"
    engine = zs.shard(torch.nn.Linear(2, 2))
    zs.save(here / "saved", engine, step=1)
    zs.load(here / "saved", engine, step=7)
"""

Launch = Callable[..., Job]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    jobs: list[Job] = []

    def start(
        text: str, *options: str, args: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> Job:
        directory = tmp_path / str(len(jobs))
        directory.mkdir()
        jobs.append(Job(directory, text, *options, args=args, env=env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()  # the ranks follow
        job.process.communicate()


def test_arguments_and_environment_reach_every_rank_as_they_are(
    launch: Launch, tmp_path: Path
) -> None:
    arguments = (
        "a b",
        "'",
        '"',
        "",
        "--nproc",
        "-x",
        "--",
        "$HOME",
        "${local_rank}",
        "$$",
        "%s",
        "*",
        "\n",
        "é\udcff",
        "a\\",
        "--debug=1",
    )
    script = (
        "import json, os, sys\nnames = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'OMP_NUM_THREADS',"
        " 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')\nown = [name for name in os.environ if"
        " name.startswith('ZEROSHARD')]\nprint(json.dumps([sys.argv[1:], {name: os.environ[name]"
        " for name in names}, own, __name__]) + '\\n', end='')\n"
    )
    job = launch(script, "--nproc", "2", args=arguments, env={"TMPDIR": str(tmp_path)})
    code, stdout, stderr = job.end()
    assert (code, _without_settings(stderr)) == (0, "")
    ranks = sorted(
        (json.loads(line) for line in stdout.splitlines()), key=lambda rank: rank[1]["RANK"]
    )
    assert [rank[0] for rank in ranks] == [list(arguments)] * 2
    assert [rank[1]["RANK"] for rank in ranks] == ["0", "1"]
    threads = (
        str(max(len(os.sched_getaffinity(0)) // 2, 1))
        if "OMP_NUM_THREADS" not in os.environ
        else os.environ["OMP_NUM_THREADS"]
    )
    assert {rank[1]["OMP_NUM_THREADS"] for rank in ranks} == {threads}
    assert {rank[1]["MASTER_ADDR"] for rank in ranks} == {"127.0.0.1"}
    assert {rank[1]["GLOO_SOCKET_IFNAME"] for rank in ranks} == {"lo"}
    assert [rank[2:] for rank in ranks] == [[[], "__main__"]] * 2
    # nothing left in the temporary folder
    assert [path.name for path in tmp_path.iterdir() if path.name != "0"] == []


def _listening(pid: int) -> set[str]:
    """Addresses at which a process listens: IPv4 in hexadecimal as the kernel shows them, "IPv6
    ..." for others.
    """
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(("IPv6 " if table == "tcp6" else "") + fields[1].split(":")[0])
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--max-restarts=1",), marks=pytest.mark.slow),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--nnodes=1",), marks=pytest.mark.slow),
    ],
    ids=["restarts", "plain", "named"],
)
@pytest.mark.parametrize(
    "join",
    [
        pytest.param("dist.init_process_group('gloo')", marks=pytest.mark.slow),
        "zs.init_distributed()",
    ],
    ids=["torch", "ours"],
)
def test_on_one_host_nothing_listens_beyond_loopback(
    launch: Launch, join: str, options: tuple[str, ...]
) -> None:
    text = (
        "import torch, torch.distributed as dist, zeroshard as zs\n"
        + join
        + "\ndist.barrier()\n(here / f'deep-{rank}').touch()\n"
    )
    job = launch(HELLO + text + WAIT, "--nproc", "2", *options)
    pids = job.ranks(2)
    job.wait_for("deep-0")
    job.wait_for("deep-1")
    assert set().union(*map(_listening, [job.process.pid, *pids])) == {"0100007F"}


@pytest.mark.slow
def test_ranks_that_start_again_meet_again(launch: Launch) -> None:
    meet = (
        "import zeroshard as zs, torch, torch.distributed as dist\nfor _ in range(2):\n   "
        " zs.init_distributed()\n    dist.barrier()\n"
    )
    again = (
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and rank == 1:\n    raise"
        " ValueError('first try')\n"
    )
    job = launch(
        HELLO + meet + "    dist.destroy_process_group()\n" + again + "print('met')\n",
        "--nproc",
        "2",
        "--max-restarts=1",
    )
    code, stdout, stderr = job.end()
    assert (code, stdout.count("met")) in ((0, 2), (0, 3)), stderr


def _without_settings(stderr: str) -> str:
    """What is said beside the settings that suit the machine."""
    return re.sub(r"zeroshard run: \w+=\S+: .*\n", "", stderr)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [False, True], ids=["options", "torchrun's variables"])
def test_lines_of_several_ranks_begin_with_the_rank_where_that_is_asked_for(
    launch: Launch, tmp_path: Path, variables: bool
) -> None:
    text = HELLO + "print('hello')\nprint('problem', file=sys.stderr)\n"
    given = {"NPROC_PER_NODE": "2", "TEE": "3", "LOG_DIR": str(tmp_path / "logs")}
    options = [f"--{name.lower()}={value}" for name, value in given.items()]
    env = {f"PET_{name}": value for name, value in given.items()}
    job = launch(text, env=env) if variables else launch(text, *options)
    code, stdout, stderr = job.end()
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    assert {"[rank 0] problem", "[rank 1] problem"} <= set(stderr.splitlines())
    assert len(list((tmp_path / "logs").rglob("stdout.log"))) == 2


@pytest.mark.slow
def test_threads_that_the_user_chose_stay(launch: Launch) -> None:
    job = launch(
        "import os; print(os.environ['OMP_NUM_THREADS'])",
        "--nproc",
        "1",
        env={"OMP_NUM_THREADS": "7"},
    )
    assert job.end() == (0, "7\n", "")


def test_the_first_failure_is_shown_last_with_its_traceback(launch: Launch) -> None:
    job = launch(
        HELLO + GROUP + "if rank == 1:\n    raise ValueError('no good')\nwhile True:\n   "
        " dist.all_reduce(value)\n",
        "--nproc",
        "2",
    )
    job.ranks(2)
    code, _, stderr = job.end()
    assert code == 1
    before, _, block = stderr.rpartition("zeroshard run: ")
    lines = block.splitlines()
    assert lines[0].startswith("rank 1 failed first, ") and lines[0].endswith("exit code 1")
    assert (lines[1], lines[-1]) == ("Traceback (most recent call last):", "ValueError: no good")
    assert block.count('File "') == 1
    assert "no good" not in before


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ("from zeroshard.errors import PlanMismatch; raise PlanMismatch('stage differs')", 72),
        pytest.param(
            "import zeroshard as zs; raise zs.StateError('a user may raise it, too')",
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(NO_SUCH_STEP, 3, marks=pytest.mark.slow),
        pytest.param("os._exit(9)", 1, marks=pytest.mark.slow),
    ],
    ids=["error of ours", "StateError", "a step that is not there", "silent"],
)
def test_the_exit_code_is_that_of_the_first_failure(
    launch: Launch, failure: str, code: int
) -> None:
    job = launch(HELLO + f"if rank == 0:\n    {failure}\n" + WAIT, "--nproc", "2")
    assert job.end()[0] == code


@pytest.mark.slow
def test_ranks_that_ignore_the_request_to_end_are_gone_when_the_grace_is_over(
    launch: Launch,
) -> None:
    job = launch(
        HELLO
        + STUBBORN
        + "while rank == 0:\n    if (here / 'go').exists():\n        raise ValueError\n"
        + WAIT,
        "--nproc",
        "2",
    )
    pids = job.ranks(2)
    os.kill(pids[1], signal.SIGSTOP)  # a stopped process does not even hear SIGTERM
    (job.directory / "go").touch()
    code, _, stderr = job.end(timeout=BEFORE_TORCHRUN_S)
    assert code == 1
    assert "rank 0 failed first" in stderr
    assert not any(map(is_running, pids))


TRAIN = """
import torch, zeroshard as zs
torch.set_num_threads(1)
zs.init_distributed()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
comm = zs.Comm(transport=os.environ.get("TR", "auto"))
# without an optimizer, which imports another 800 modules of torch's
engine = zs.shard(model, stage=3, comm=comm)
def train(num_steps):
    for _ in range(num_steps):
        model(torch.randn(2, 8)).sum().backward()
        model.zero_grad()
"""
CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
(here / f"child-{rank}.part").write_text(str(child.pid))
(here / f"child-{rank}.part").rename(here / f"child-{rank}")
"""
STUCK = "def stuck():\n    (here / f'deep-{rank}').touch()\n    time.sleep(600)\n"


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        pytest.param("sys.exit(0)", "auto", marks=pytest.mark.slow),
        pytest.param("sys.exit(0)", "gloo", marks=pytest.mark.slow),
        pytest.param("os._exit(0)", "gloo", marks=pytest.mark.slow),
        pytest.param("os._exit(0)", "auto", marks=pytest.mark.slow),
        pytest.param("pass", "auto", marks=pytest.mark.slow),
    ],
)
def test_a_rank_whose_script_ends_before_the_others_is_named_with_the_remedy(
    launch: Launch, how: str, transport: str
) -> None:
    job = launch(
        HELLO
        + TRAIN
        + f"train(5 + 5 * (rank == 0))\nif rank == 1:\n    {how}\nelse:\n    train(5)\n",
        "--nproc",
        "2",
        env={"TR": transport},
    )
    code, _, stderr = job.end()
    assert code == 71, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("zeroshard run: rank 1 left first, ") and "engine.join()" in last, stderr
    assert (
        "rank 0 waited for rank 1:\nTraceback" in stderr
        and "PeerLostError" in stderr
        and "train(" in stderr
    ), stderr
    assert "SIGTERM" not in stderr and "failed first" not in stderr, stderr


@pytest.mark.slow
def test_a_save_on_one_rank_alone_shows_where_it_waited_and_who_had_left(launch: Launch) -> None:
    job = launch(
        HELLO + TRAIN + "train(2)\nif rank == 0:\n    zs.save(str(here / 'run'), engine, step=2)\n",
        "--nproc",
        "2",
    )
    code, _, stderr = job.end()
    assert code == 71, stderr
    assert (
        "zs.save(str(here / 'run'), engine, step=2)" in stderr and "exchange of zs.save()" in stderr
    ), stderr
    assert stderr.splitlines()[-1].startswith("zeroshard run: rank 1 left first, "), stderr


@pytest.mark.slow
def test_an_interrupt_of_one_rank_is_told(launch: Launch) -> None:
    job = launch(HELLO + STUCK + "stuck()\n", "--nproc", "2")
    pids = job.ranks(2)
    job.wait_for("deep-1")
    os.kill(pids[1], signal.SIGINT)
    code, _, stderr = job.end()
    assert code == 128 + signal.SIGINT
    assert "rank 1 failed first" in stderr and stderr.splitlines()[-1] == "KeyboardInterrupt", (
        stderr
    )


def test_when_all_ranks_hang_the_job_ends_with_the_stacks_of_every_rank(launch: Launch) -> None:
    job = launch(HELLO + STUCK + "stuck()\n", "--nproc", "2", "--stall-timeout=1.5")
    code, _, stderr = job.end()
    assert code == 71
    assert stderr.splitlines()[-1].startswith("zeroshard run: no rank has made progress for "), (
        stderr
    )
    for rank in range(2):
        assert re.search(
            rf"rank {rank}:\n(Thread|Current thread)[^\n]*\n(  File [^\n]*\n)*  File"
            r" [^\n]*script.py\", line \d+ in stuck",
            stderr,
        ), stderr


BEATING = """
from zeroshard.comm.job import heartbeat
beat = heartbeat()
beat()
(here / f"beats-{rank}").touch()
while not (here / "enough").exists():
    beat()
    time.sleep(0.05)
"""


def test_a_job_that_was_suspended_as_a_whole_goes_on(launch: Launch) -> None:
    job = launch(HELLO + BEATING, "--nproc", "2", "--stall-timeout=10")
    pids = [job.process.pid, *job.ranks(2)]
    for rank in range(2):
        job.wait_for(f"beats-{rank}")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(13)
    for pid in pids:  # the launcher first: it looks before a rank has shown a heartbeat
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    time.sleep(2)
    (job.directory / "enough").touch()
    code, _, stderr = job.end()
    assert code == 0, stderr


def test_ranks_that_compute_before_their_first_heartbeat_have_not_stalled(launch: Launch) -> None:
    busy = "end = time.monotonic() + 5\nwhile time.monotonic() < end:\n    pass\n"
    code, _, stderr = launch(HELLO + busy, "--nproc", "2", "--stall-timeout=1.5").end()
    assert code == 0, stderr


def test_a_rank_that_gave_up_waiting_is_told_with_the_stacks_of_the_others(launch: Launch) -> None:
    raising = (
        "from zeroshard.errors import StallError\n    while not (here / 'deep-1').exists():\n      "
        "  pass\n    raise StallError('x did not come')"
    )
    job = launch(HELLO + STUCK + f"if rank == 0:\n    {raising}\nstuck()\n", "--nproc", "2")
    code, _, stderr = job.end()
    assert code == 71
    assert "rank 1 was here when rank 0 gave up:\n" in stderr and "in stuck" in stderr, stderr
    assert stderr.splitlines()[-1] == "zeroshard.errors.StallError: x did not come"


def test_what_a_failing_rank_has_started_ends_with_it(launch: Launch) -> None:
    job = launch(HELLO + CHILD + "if rank == 1:\n    raise ValueError\n" + WAIT, "--nproc", "2")
    assert job.end()[0] == 1
    children = [
        int((job.directory / f"child-{rank}").read_text())
        for rank in range(2)
        if (job.directory / f"child-{rank}").exists()
    ]
    assert children
    wait_until(lambda: not any(map(is_running, children)))


def test_when_the_launcher_is_killed_nothing_is_left_of_the_job(
    launch: Launch, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = launch(
        HELLO + CHILD + "(here / f'deep-{rank}').touch()\n" + WAIT,
        "--nproc",
        "2",
        env={"TMPDIR": str(temporary)},
    )
    pids = job.ranks(2)
    job.wait_for("deep-0")
    job.wait_for("deep-1")
    children = [int((job.directory / f"child-{rank}").read_text()) for rank in range(2)]
    assert [path.name.startswith("zeroshard-run-") for path in temporary.iterdir()] == [True]
    job.process.kill()
    wait_until(
        lambda: not any(map(is_running, [*pids, *children])) and not list(temporary.iterdir())
    )


MOMENTS = {
    "starting": HELLO + WAIT,
    "importing": HELLO + "import torch\n" + WAIT,
    "joining": (
        HELLO + "import torch.distributed as dist\nif rank == 1:\n   "
        " time.sleep(600)\ndist.init_process_group('gloo')\n"
    ),
    "reducing": (
        HELLO
        + GROUP
        + "while True:\n    dist.all_reduce(value)\n    (here / f'deep-{rank}').touch()\n"
    ),
    "computing": (
        HELLO + GROUP + "(here / f'deep-{rank}').touch()\nwhile rank == 1:\n   "
        " value.sum()\ndist.all_reduce(value)\n"
    ),
}


@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=[pytest.mark.slow] * (moment != "reducing")) for moment in MOMENTS],
)
def test_a_killed_rank_ends_the_job_when_the_grace_is_over_and_is_named(
    launch: Launch, moment: str
) -> None:
    job = launch(MOMENTS[moment], "--nproc", "2")
    pids = job.ranks(2)
    if "deep" in MOMENTS[moment]:
        job.wait_for("deep-0")
        job.wait_for("deep-1")
    os.kill(pids[1], signal.SIGKILL)
    code, _, stderr = job.end(timeout=BEFORE_TORCHRUN_S)
    assert code == 128 + signal.SIGKILL
    assert stderr.splitlines()[-1].startswith("zeroshard run: rank 1 failed first, ")
    assert "killed by SIGKILL" in stderr.splitlines()[-1]
    assert not any(map(is_running, pids))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_killed_at_a_random_moment_is_named(launch: Launch, seed: int) -> None:
    job = launch(MOMENTS["reducing"], "--nproc", "3")
    pids = job.ranks(3)
    time.sleep(seed * 0.2)
    os.kill(pids[seed % 3], signal.SIGKILL)
    code, _, stderr = job.end(timeout=BEFORE_TORCHRUN_S)
    assert code == 137
    assert f"rank {seed % 3} failed first" in stderr.splitlines()[-1]
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("stop", [False, True], ids=["running", "stopped"])
def test_when_the_launcher_is_killed_the_ranks_die(launch: Launch, stop: bool) -> None:
    job = launch(HELLO + STUBBORN + WAIT, "--nproc", "2")
    pids = job.ranks(2)
    if stop:
        os.kill(pids[0], signal.SIGSTOP)
    job.process.kill()
    wait_until(lambda: not any(map(is_running, pids)))
    assert job.end()[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: signal.Signals(number).name
)
def test_a_signal_to_the_launcher_ends_the_ranks_and_is_said(
    launch: Launch, number: signal.Signals
) -> None:
    job = launch(HELLO + WAIT, "--nproc", "2")
    pids = job.ranks(2)
    job.process.send_signal(number)
    code, _, stderr = job.end(timeout=BEFORE_TORCHRUN_S)
    assert code == 128 + number
    assert _without_settings(stderr) == f"zeroshard run: ended by {number.name}\n"
    assert not any(map(is_running, pids))


def test_a_group_that_is_started_again_says_why_and_may_succeed(launch: Launch) -> None:
    job = launch(
        HELLO + "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError('first"
        " try')\n",
        "--nproc",
        "2",
        "--max-restarts=1",
    )
    code, _, stderr = job.end()
    assert code == 0
    assert "starting again after rank" in stderr and "ValueError: first try" in stderr
    assert "failed first" not in stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_job_runs_where_standard_streams_are_closed(tmp_path: Path, closed: str) -> None:
    (tmp_path / "script.py").write_text(
        HELLO + "sys.stdout.write('out\\n')\nsys.stderr.write('err\\n')\n"
    )
    line = [PROGRAM, "run", "--nproc", "2", str(tmp_path / "script.py")]
    shell = ["bash", "-c", f'exec "$@" {closed}', "bash", *line]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / f"pid-{rank}").exists() for rank in range(2))
    # those that are open have what the ranks have written, and no other
    assert done.stdout == ("" if ">&-" in closed.split() else "out\n" * 2)
    assert done.stderr.count("err\n") == (0 if "2>&-" in closed else 2)


@pytest.mark.slow
def test_modules_and_programs_run_too(launch: Launch) -> None:
    assert subprocess.run(
        [PROGRAM, "run", "-m", "json.tool", "--help"], capture_output=True, text=True, timeout=300
    ).stdout.startswith("usage:")
    echo = subprocess.run(
        [PROGRAM, "run", "--no-python", "echo", "$a  b"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (echo.returncode, echo.stdout) == (0, "$a  b\n")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 10])
def test_launchers_started_at_once_all_get_ports_of_their_own(launch: Launch, count: int) -> None:
    script = (
        "import os, socket, time\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], port)).close()\n"
        "print(port)\n"
        "time.sleep(1)\n"
    )
    jobs = [launch(script, "--nproc", "1") for _ in range(count)]
    ends = [job.end() for job in jobs]
    assert [end[0] for end in ends] == [0] * count, [end[2] for end in ends]
    assert len({end[1] for end in ends}) == count
