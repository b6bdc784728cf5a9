"""Each launch line of docs/launching.md starts two ranks that train as DDP does, and ends, with
nothing left, when one of them is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.deepspeed_files import FILES
from tests.support.harness import ROOT, is_running, run_ranks
from tests.support.hosts import descendants
from tests.support.launched import PROGRAM, stub_ssh, wait_until
from tests.support.launched_runs import ddp_losses
from tests.support.slurm import one_node, why_not

SCRIPT = str(ROOT / "tests" / "support" / "launched_runs.py")
CLM = str(ROOT / "tests" / "support" / "clm_runs.py")
BIN = Path(sys.executable).parent
MPIRUN = (
    "mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,vader", "--mca",
    "oob_tcp_if_include", "lo", "-n", "2",
)  # fmt: skip
AS = (PROGRAM, "as-deepspeed")
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {config}
  zero3_init_flag: true
{more}machine_rank: 0
main_training_function: main
num_machines: {machines}
num_processes: 2
main_process_port: {port}
use_cpu: false
"""
Run = Callable[..., "Started"]


class Started:
    """A launch line that runs, and what its ranks have written."""

    def __init__(self, folder: Path, line: list[str], env: dict[str, str]) -> None:
        self.folder = folder
        log = (folder / f"log-{len(list(folder.glob('log-*')))}").open("w+")
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
        self.process = subprocess.Popen(line, stdout=log, stderr=log, env=environ)
        self.log = Path(log.name)

    def pids(self) -> list[int]:
        """Return the process ids of both ranks, once they have trained."""
        paths = [self.folder / f"pid-{rank}" for rank in range(2)]
        is_over = lambda: self.process.poll() is not None  # noqa: E731
        wait_until(lambda: is_over() or all(path.exists() for path in paths))
        assert all(path.exists() for path in paths), self.log.read_text()
        return [int(path.read_text()) for path in paths]

    def found(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"losses-{rank}").read_text())
        return found

    def end(self) -> str:
        """Return what it has said, once it has ended, which a killed rank is to bring about."""
        assert self.process.wait(300) != 0, self.log.read_text()
        return self.log.read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started: list[Started] = []

    def begin(*line: str, env: dict[str, str] | None = None) -> Started:
        started.append(Started(tmp_path, list(line), env or {}))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()
    for path in tmp_path.glob("pid-?"):
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)


def _check(started: Started, *, local_rank: bool | None = False) -> str:
    """Both ranks train as DDP does; one is killed, and all ends. Return what was said."""
    pids = started.pids()
    everyone = (descendants(started.process.pid) | set(pids)) - {started.process.pid}
    expected = run_ranks(2, ddp_losses)
    for rank in range(2):
        found = started.found(rank)
        assert found["losses"] == expected[rank]
        given = {None: 0, True: rank, False: -1}[local_rank]  # None: the first of its host
        assert found["local_rank"] == given
        assert found["engine"] == "zeroshard.deepspeed.deepspeed_engine"
    os.kill(pids[1], signal.SIGKILL)
    said = started.end()
    wait_until(lambda: not any(map(is_running, everyone)))
    return said


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _accelerate(folder: Path, config: Path, machines: int = 1, more: str = "") -> str:
    path = folder / "zero3.yaml"
    port = _free_port()
    text = ACCELERATE.format(config=config, machines=machines, more=more, port=port)
    path.write_text(text)
    return str(path)


# ------------------------------------------------------------------ one host


def test_the_line_of_deepspeeds_launcher(run: Run, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    binds = ["--bind_cores_to_rank"] * (len(cores) >= 2)
    started = run(PROGRAM, "deepspeed", "--num_gpus=2", *binds, SCRIPT, str(tmp_path))
    said = _check(started, local_rank=True)
    first, second = (started.found(rank) for rank in range(2))
    assert first["theirs"] == second["theirs"] == ["2", "1"]
    if binds:
        assert {*first["cores"]} | {*second["cores"]} <= cores
        assert len(first["cores"]) == len(second["cores"]) == len(cores) // 2
        assert not {*first["cores"]} & {*second["cores"]}
    assert "this machine has no accelerator: 2 rank(s) on the CPU" in said or _has_device()
    assert "rank 1 failed first" in said and "killed by SIGKILL" in said


def _has_device() -> bool:
    return torch.accelerator.is_available()


def test_accelerate_launch_with_a_deepspeed_configuration(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = _zero3(tmp_path)
    line = [str(BIN / "accelerate"), "launch", "--config_file", _accelerate(tmp_path, config)]
    said = _check(run(*AS, *line, SCRIPT, str(tmp_path)))
    assert "Signal 9 (SIGKILL)" in said and "rank      : 1" in said, said
    assert "nothing was sharded" not in said  # by the process that starts the ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "local_rank", "more"),
    [
        ((PROGRAM, "run", "--nproc=2"), False, ("native",)),
        ((str(BIN / "torchrun"), "--nproc-per-node=2"), False, ("native",)),
        ((PROGRAM, "run", "--nproc=2", "--as-deepspeed"), False, ()),
        ((*AS, str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2"), False, ()),
        ((*AS, "sh", "-c", 'deepspeed --num_gpus 2 "$@"', "sh"), True, ()),
    ],
    ids=["run native", "torchrun native", "run", "torchrun", "deepspeed in a shell's file"],
)
def test_other_launchers_of_one_host(
    run: Run, tmp_path: Path, line: tuple[str, ...], local_rank: bool, more: tuple[str, ...]
) -> None:
    env = {"PET_MASTER_PORT": str(_free_port())}  # not 29500, which others may have
    said = _check(run(*line, SCRIPT, str(tmp_path), *more, env=env), local_rank=local_rank)
    assert "SIGKILL" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "before"),
    [((), ()), (("-x", "MASTER_ADDR=127.0.0.1"), ()), ((), AS)],
    ids=["native", "native with an address", "as-deepspeed"],
)
def test_mpirun(
    run: Run, tmp_path: Path, options: tuple[str, ...], before: tuple[str, ...]
) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("NOTHING WAS CHECKED UNDER mpirun: apt-get install openmpi-bin")
    native = [] if before else ["native"]
    line = [*MPIRUN, *options, *before, sys.executable, SCRIPT, str(tmp_path), *native]
    assert "signal 9 (Killed)" in _check(run(*line))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if reason := why_not():
        pytest.skip(f"NOTHING WAS CHECKED UNDER A REAL srun: {reason}")
    with one_node(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "native"),
    [
        (("-n2", "--kill-on-bad-exit=1", sys.executable), True),
        (("-n2", "--kill-on-bad-exit=1", *AS, sys.executable), False),
        (("-n1", PROGRAM, "run", "--nproc=2"), True),
        (("-n1", PROGRAM, "deepspeed", "--num_gpus=2", "--no_local_rank"), False),
    ],
    ids=["native", "as-deepspeed", "run", "deepspeed"],
)
def test_srun(
    run: Run, tmp_path: Path, slurm: dict[str, str], line: tuple[str, ...], native: bool
) -> None:
    said = _check(run("srun", *line, SCRIPT, str(tmp_path), *["native"] * native, env=slurm))
    assert "Killed" in said or "killed by SIGKILL" in said


# ------------------------------------------------------------------ several


def _pods(run: Run, line: list[str], variables: Callable[[int], dict[str, str]]) -> None:
    """Two pods on this machine run the line, each with its variables, as `_check` says."""
    pods = [run(*line, env=variables(rank)) for rank in range(2)]
    pods[0].pids()
    assert "SIGKILL" in _check(pods[1])
    pods[0].end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "more"),
    [
        ((PROGRAM, "run"), ("native",)),
        ((PROGRAM, "run", "--as-deepspeed"), ()),
        ((str(BIN / "torchrun"),), ("native",)),
        ((*AS, str(BIN / "torchrun")), ()),
    ],
    ids=["run native", "run", "torchrun native", "torchrun"],
)
def test_the_variables_of_a_pytorchjob(
    run: Run, tmp_path: Path, line: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Kubeflow's operator sets these, in each pod."""
    port = str(_free_port())
    _pods(run, [*line, SCRIPT, str(tmp_path), *more], lambda rank: {
        "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "WORLD_SIZE": "2", "RANK": str(rank), "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
    })  # fmt: skip


def _line_of_the_page(word: str, launcher: str, folder: Path) -> str:
    """Return the line of the page's section on Kubernetes that has `word`, with one rank on the CPU
    for each pod.
    """
    text = (ROOT / "docs" / "launching.md").read_text()
    section = text.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    (line,) = (one for one in section.replace("\\\n", "").splitlines() if word in one)
    for old, new in (
        ("zeroshard run --nproc gpu", launcher),
        ("train.py", f"{SCRIPT} {folder} native"),
    ):
        assert line.count(old) == 1, line
        line = line.replace(old, new)
    return line


ONE_RANK = {"run": f"{PROGRAM} run --nproc 1", "torchrun": f"{BIN}/torchrun --nproc-per-node 1"}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ONE_RANK)
def test_the_variables_of_an_old_operator(run: Run, tmp_path: Path, launcher: str) -> None:
    """RANK and WORLD_SIZE count pods, and the first pod is its own localhost."""
    line = _line_of_the_page("$MASTER_PORT", ONE_RANK[launcher], tmp_path)
    port = str(_free_port())
    _pods(run, ["sh", "-c", f"exec {line}"], lambda rank: {
        "PYTHONUNBUFFERED": "0", "MASTER_ADDR": ("localhost", "127.0.0.1")[rank],
        "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank),
    })  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ONE_RANK)
def test_the_variables_of_a_jobset(run: Run, tmp_path: Path, launcher: str) -> None:
    """The name of the first pod is one of a file of hosts that only these processes have."""
    beside = ["unshare", "--mount", "sh", "-c"]
    if os.geteuid() or subprocess.run([*beside, "true"], capture_output=True).returncode:
        pytest.skip("NOTHING WAS CHECKED: names of pods need root, and a mount namespace")
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n127.0.0.1 job-workers-0-0.job\n")
    line = _line_of_the_page("29500", ONE_RANK[launcher], tmp_path).replace("=N ", "=2 ")
    line = line.replace("29500", str(_free_port()))  # others may have that one
    mounted = f"mount --bind {names} /etc/hosts && exec {line}"
    _pods(
        run,
        [*beside, mounted],
        lambda rank: {"JOB_COMPLETION_INDEX": str(rank), "JOBSET_NAME": "job"},
    )


@pytest.mark.slow
def test_one_line_per_host_without_ssh(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    line = [PROGRAM, "deepspeed", "--no_ssh", f"--hostfile={tmp_path}/hosts"]
    line += [f"--master_port={_free_port()}", "--no_local_rank"]
    ends = [run(*line, f"--node_rank={rank}", SCRIPT, str(tmp_path)) for rank in range(2)]
    ends[0].pids()
    assert "rank 1 failed first" in _check(ends[1])
    ends[0].end()


@pytest.mark.slow
def test_two_hosts_over_ssh_get_the_variables_of_deepspeed_env(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.2 slots=4\n127.0.0.3 slots=4\n127.0.0.4 slots=4\n")
    (tmp_path / "variables").write_text("# a comment\n\nMY_OWN=a=b $x\n")
    stub_ssh(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, runpy\nassert os.environ['MY_OWN'] == 'a=b $x', os.environ\n"
        f"assert os.getcwd() in sys.path\nsys.argv[0] = {SCRIPT!r}\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    line = [PROGRAM, "deepspeed", "-H", str(tmp_path / "hosts"), "--num_nodes=2", "--num_gpus=1"]
    env = {"PATH": path, "DS_ENV_FILE": str(tmp_path / "variables")}
    said = _check(run(*line, str(script), str(tmp_path), env=env), local_rank=None)
    assert "rank 1 on 127.0.0.3 failed first" in said


@pytest.mark.slow
def test_accelerate_launch_on_two_hosts_finds_a_program_deepspeed(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "hosts").write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    stub_ssh(tmp_path)
    more = f"  deepspeed_hostfile: {tmp_path}/hosts\n  deepspeed_multinode_launcher: pdsh\n"
    config = _accelerate(tmp_path, _zero3(tmp_path), 2, more)
    line = [*AS, str(BIN / "accelerate"), "launch", "--config_file", config]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DS_ENV_FILE": str(tmp_path / "variables")}
    said = _check(run(*line, SCRIPT, str(tmp_path), env=env))
    assert "rank 1 on 127.0.0.3 failed first" in said


# ------------------------------------------------------------------ Transformers


def _zero3(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write Transformers' ds_config_zero3.json, with `sections` filled in; return its path."""
    config = json.loads(json.dumps(FILES["transformers zero3"]))
    for name, params in sections.items():
        config[name]["params"] |= params
    path = folder / "ds_config_zero3.json"
    path.write_text(json.dumps(config))
    return path


def _saved_model(folder: Path) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(1)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, **none)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    return str(folder / "model")


# the numbers of the file in Transformers' own tests, but the rate, which would move nothing here
_NUMBERS: dict[str, dict[str, Any]] = {
    "optimizer": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    "scheduler": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("start", "sections"), [("saved", {}), ("scratch", {}), ("scratch", _NUMBERS)],
    ids=["saved", "from scratch", "from scratch, with numbers in the file"],
)  # fmt: skip
def test_a_script_of_transformers_has_the_losses_of_ddp_under_each(
    tmp_path: Path, start: str, sections: dict[str, dict[str, Any]]
) -> None:
    """With the optimizer and the schedule of the file, WarmupLR."""
    pytest.importorskip("accelerate")
    text, config = tmp_path / "text.txt", str(_zero3(tmp_path, **sections))
    text.write_text((ROOT / "README.md").read_text()[:4000])
    named = {"saved": "--model_name_or_path", "scratch": "--config_name"}[start]
    arguments = (
        f"{named} {_saved_model(tmp_path)} --train_file {text} --max_steps 8"
        " --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --logging_steps 1"
        " --learning_rate 1e-3 --adam_beta1 0.8 --weight_decay 3e-7 --warmup_steps 5"
        " --report_to none --save_strategy no"
    ).split()
    torchrun = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2")
    accelerate = (str(BIN / "accelerate"), "launch", "--config_file")
    lines = {
        "ddp": ((*torchrun, CLM), ("--use_cpu", "true", "--plain_warmup", "5")),
        "deepspeed": ((PROGRAM, "deepspeed", "--num_gpus=2", CLM), ("--deepspeed", config)),
        "torchrun": ((*AS, *torchrun, CLM), ("--deepspeed", config)),
        "accelerate": ((*AS, *accelerate, _accelerate(tmp_path, Path(config)), CLM), ()),
    }
    found = {}
    for name, (line, more) in lines.items():
        output = tmp_path / name
        ended = subprocess.run(
            [*line, *arguments, "--output_dir", str(output), *more], capture_output=True, text=True,
            timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert ended.returncode == 0, (name, ended.stderr[-4000:])
        found[name] = json.loads((output / "losses.json").read_text())
    expected = found.pop("ddp")
    assert expected["engine"] == "torch.nn.parallel.distributed"
    for name, one in found.items():
        assert one["engine"] == "zeroshard.deepspeed.deepspeed_engine", name
        # the Trainer reads the rate once DeepSpeed's engine has moved it, and DDP's before
        assert one["rates"][:-1] == pytest.approx(expected["rates"][1:], rel=1e-6), name
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-6), name
