"""A SkyPilot task on several nodes: its variables, and the line of ``examples/skypilot.yaml``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ROOT
from tests.support.launched import PROGRAM
from zeroshard.errors import ConfigError
from zeroshard.launch.cli import build_parsers
from zeroshard.launch.options import RunOptions, parse_run
from zeroshard.system.this_host import SkyNode, rank_variables, read_node

yaml = pytest.importorskip("yaml")  # Transformers needs it
EXAMPLE = ROOT / "examples" / "skypilot.yaml"
TASK = {
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.5\n10.0.0.6",
    "SKYPILOT_NUM_NODES": "3",
    "SKYPILOT_NODE_RANK": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-managed-2026-07-06-21-18-31-563597_my-job-name_1-0",
}
ONE_GPU = {**TASK, "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a,b",
}  # fmt: skip
MPI = dict(zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), ("1", "2", "0", "1"), strict=True))
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in MPI.items()}
SCRIPT = str(EXAMPLE.with_name("train_gpt.py"))


def _parse(*argv: str) -> RunOptions:
    return parse_run(build_parsers()[1]["run"], [*argv, SCRIPT])


def _set(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_the_task_says_which_of_its_nodes_this_is() -> None:
    node = read_node(TASK)
    assert node is not None
    assert node == SkyNode(2, ("10.0.0.7", "10.0.0.5", "10.0.0.6"), 8, node.port)
    # neither Ray's workers' ports, nor those that Kubernetes and Linux give away
    assert 20000 <= node.port < 30000
    first = read_node({**TASK, "SKYPILOT_NODE_RANK": "0"})
    assert first is not None and first.port == node.port
    other = read_node({**TASK, "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31-563597_myclus_2"})
    assert other is not None and other.port != node.port
    trailing = read_node({**TASK, "SKYPILOT_NODE_IPS": TASK["SKYPILOT_NODE_IPS"] + "\n"})
    assert trailing == node
    old = {name: value for name, value in TASK.items() if name != "SKYPILOT_NUM_NODES"}
    assert read_node(old) == node  # SkyPilot before 0.6


def test_one_node_and_the_setup_of_several_are_no_places() -> None:
    one = {"SKYPILOT_NODE_IPS": "10.0.0.7", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}
    setup = {"SKYPILOT_SETUP_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "3"}
    for environ in ({**TASK, **one}, {**ONE_GPU, **one}, setup):
        assert read_node(environ) is None and rank_variables(environ) == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"SKYPILOT_NUM_NODES": "2"}, r"names 3 node\(s\), and SKYPILOT_NUM_NODES is 2"),
        ({"SKYPILOT_NUM_NODES": "x"}, "SKYPILOT_NUM_NODES='x' is not a whole number"),
        ({"SKYPILOT_NODE_RANK": "3"}, r"SKYPILOT_NODE_RANK=3 is not one of 3 node\(s\)"),
        ({"SKYPILOT_NODE_RANK": "-1"}, "SKYPILOT_NODE_RANK='-1' is not a whole number"),
        ({"SKYPILOT_NUM_GPUS_PER_NODE": "8.0"}, "NUM_GPUS_PER_NODE='8.0' is not a whole number"),
        ({"SKYPILOT_NODE_IPS": "a\n\nb"}, "'' is not a host's address"),
        ({"SKYPILOT_NODE_IPS": "a\n-oProxy\nb"}, "'-oProxy' is not a host's address"),
        ({"SKYPILOT_NODE_IPS": ""}, "'' is not a host's address"),
    ],
)
def test_variables_that_contradict_each_other_are_refused_in_a_line(
    wrong: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_node({**TASK, **wrong})
    assert "\n" not in str(error.value)
    _set(monkeypatch, {**TASK, **wrong})
    with pytest.raises(ConfigError, match=message):
        _parse()
    # who says the place himself does not hear of it
    assert _parse("--standalone").standalone and _parse("--nnodes=1").standalone


def test_the_launcher_takes_its_place_and_what_is_said_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _set(monkeypatch, TASK)
    found = _parse()
    assert found.place is not None and not found.standalone and found.nproc == "8"
    assert (found.place.node_rank, found.place.num_nodes) == (2, 3)
    assert found.place.master_addr == "10.0.0.7"
    chosen = _parse("--nproc=2", "--master-port=5000", "--master-addr=x")
    assert chosen.place is not None and chosen.nproc == "2"
    assert (chosen.place.master_addr, chosen.place.master_port) == ("x", 5000)
    assert _parse("--standalone").place is None
    assert _parse("--rdzv-backend=c10d", "--rdzv-endpoint=x:1").place is None
    assert _parse("--hostfile=h").place is None
    _set(monkeypatch, {"PET_MASTER_ADDR": "y", "PET_MASTER_PORT": "6000"})
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    named = _parse()
    assert named.place is not None and named.nproc is None  # torchrun reads its own
    assert (named.place.master_addr, named.place.master_port) == ("y", 6000)
    monkeypatch.setenv("PET_NNODES", "3")
    assert _parse().place is None
    monkeypatch.delenv("PET_NNODES")
    monkeypatch.delenv("PET_NPROC_PER_NODE")
    monkeypatch.setenv("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    assert _parse().place is not None and _parse().nproc is None


def test_srun_and_mpirun_in_a_task_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_variables({**ONE_GPU, **STEP}) == rank_variables(STEP) != {}
    mpi = {**MPI, "MASTER_ADDR": "a"}
    assert rank_variables({**ONE_GPU, **mpi}) == rank_variables(mpi) != {}
    assert rank_variables({**ONE_GPU, **STEP, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    _set(monkeypatch, {**TASK, **STEP})
    place = _parse().place
    assert place is not None and (place.num_nodes, place.master_addr) == (2, "a")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert _parse().place is None and read_node({**TASK, **MPI}) is None


def test_the_process_of_a_node_with_one_gpu_is_a_rank() -> None:
    found = rank_variables(ONE_GPU)
    assert found.pop("MASTER_PORT").isdecimal()
    place = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    assert found == {**place, "MASTER_ADDR": "10.0.0.7"}
    named = {"MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert rank_variables({**ONE_GPU, **named}) == {**place, **named}
    assert rank_variables({**ONE_GPU, "SKYPILOT_NUM_GPUS_PER_NODE": "0"})["RANK"] == "2"
    assert rank_variables({**ONE_GPU, "RANK": "0"}) == {}
    assert rank_variables(TASK) == {}  # nothing says which of its eight ranks


# ------------------------------------------------------------------ the example


def _example() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return loaded


def test_the_example_says_what_skypilot_reads() -> None:
    task = _example()
    known = {"name", "num_nodes", "workdir", "envs", "resources", "file_mounts", "setup", "run"}
    assert task.keys() == known and task["num_nodes"] > 1
    recovery = task["resources"]["job_recovery"]
    assert recovery.keys() == {"max_restarts_on_errors", "recover_on_exit_codes"}
    errors = (ROOT / "docs" / "errors.md").read_text()
    for code in recovery["recover_on_exit_codes"]:
        assert f"\n| {code} |" in errors and code != 137  # which SkyPilot uses itself
    (mount,) = task["file_mounts"]
    assert f"--checkpoint {mount}/" in task["run"] and "--resume" in task["run"]


def _losses(results: Path) -> list[float]:
    (run,) = json.loads(results.read_text())["results"]
    losses: list[float] = run["losses"]
    return losses


@pytest.mark.slow
def test_the_line_of_the_example_trains_on_two_nodes_as_on_one(tmp_path: Path) -> None:
    """Both nodes are this machine; the task starts again, as after a preemption at step 3."""
    small = " --layers 1 --width 32 --heads 2 --context 32 --batch 2 --sample 0 --save-every 2"
    line = _example()["run"].strip().replace("/checkpoints/", f"{tmp_path}/checkpoints/")
    path = f"{Path(PROGRAM).parent}:{os.environ['PATH']}"
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "STEPS": "4"}

    def node(rank: int, attempt: int) -> subprocess.Popen[str]:
        env = {
            **base,
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_GPUS_PER_NODE": "2",
            "SKYPILOT_TASK_ID": f"sky-managed-2026-07-06-21-18-31-{os.getpid()}_test_1-0",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", "-c", f"{line}{small} --json {tmp_path}/{attempt}.json"],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    for attempt in range(2):
        nodes = [node(rank, attempt) for rank in range(2)]
        said = [one.communicate(timeout=300)[0] for one in nodes]
        assert [one.returncode for one in nodes] == [0, 0], said
        shutil.rmtree(tmp_path / "checkpoints" / "gpt" / "step-0000000004")
    assert "Resumed after step 2 of 4" in said[0]
    alone = f"zeroshard run --nproc 4 {SCRIPT} --steps 4{small} --json {tmp_path}/alone.json"
    subprocess.run(alone.split(), env=base, check=True, timeout=300, capture_output=True)
    expected = _losses(tmp_path / "alone.json")
    assert len(expected) == 4
    assert [_losses(tmp_path / f"{attempt}.json") for attempt in range(2)] == [expected, expected]
