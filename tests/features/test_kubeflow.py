"""Kubeflow Trainer v2: the files of examples/kubeflow, what their pods run, and a job that
Kubeflow's SDK runs as processes of this machine.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import site
import socket
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zeroshard as zs
from tests.support.harness import ROOT
from tests.support.hosts import descendants
from tests.support.launched import PROGRAM, wait_until
from zeroshard.launch.options import RUN, RunOptions, parse_run
from zeroshard.launch.run import SIGNAL_GRACE_S
from zeroshard.terminal import LineParser

STEPS = 30
SMALL = shlex.split(
    "--layers 1 --width 32 --heads 2 --context 32 --batch 2 --accumulate 4 --sample 0 --save-every"
    f" 4 --steps {STEPS}"
)
FILES = ROOT / "examples" / "kubeflow"
DOCUMENTS = {
    document["kind"]: document
    for path in sorted(FILES.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
RUNTIME, JOB, VOLUME = (
    DOCUMENTS[kind] for kind in ("ClusterTrainingRuntime", "TrainJob", "PersistentVolumeClaim")
)
(REPLICATED,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
POD = REPLICATED["template"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def _known(document: dict[str, Any]) -> dict[str, Any]:
    """Return what Kubeflow's API keeps of a document: it drops a key that it does not know."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api"
    )
    prefix = {"v1": "IoK8sApiCoreV1", "trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1"}
    model = getattr(models, prefix[document["apiVersion"]] + document["kind"])
    kept: dict[str, Any] = model.from_dict(document).to_dict()
    return kept


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_kubeflows_api_knows_every_key_of_the_files(kind: str) -> None:
    assert _known(DOCUMENTS[kind]) == DOCUMENTS[kind]


def test_the_number_of_ranks_belongs_to_the_job_and_not_to_the_runtime() -> None:
    """Trainer 2.2 has dropped the key that 2.0 had there."""
    assert "numProcPerNode" in JOB["spec"]["trainer"]
    runtime = json.loads(json.dumps(RUNTIME))
    runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"] = 4
    assert _known(runtime) == RUNTIME


def test_the_files_fit_each_other_and_the_launcher() -> None:
    assert JOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]
    assert RUNTIME["metadata"]["labels"] == {"trainer.kubeflow.org/framework": "torch"}
    assert REPLICATED["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    # Trainer looks for a job and a container of this name
    assert REPLICATED["name"] == CONTAINER["name"] == "node"
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert volumes.keys() == {mount["name"] for mount in CONTAINER["volumeMounts"]}
    claim = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert claim == VOLUME["metadata"]["name"]
    # a pod is killed only after the ranks have had their time to save
    assert POD["terminationGracePeriodSeconds"] > SIGNAL_GRACE_S
    # what does not help to start again: a wrong line, and a configuration that is refused
    (rule,) = REPLICATED["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, zs.ConfigError.exit_code]


def _line(folder: Path) -> list[str]:
    """Return the arguments of ``zeroshard run`` in a pod of the job, with `folder` as the volume
    and a model that is trained in seconds.
    """
    (mounted,) = (
        mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == "checkpoints"
    )
    program, run, *options = CONTAINER["command"]
    assert (program, run) == ("zeroshard", "run")
    script, *words = JOB["spec"]["trainer"]["args"]
    words = [word.replace(f"{mounted}/", f"{folder}/") for word in words]
    return [*options, script.replace("/zeroshard/", f"{ROOT}/"), *words, *SMALL]


def _variables(node: int, port: int, ranks: int) -> dict[str, str]:
    """Return what Trainer sets in the container of a pod."""
    return {
        "PET_NNODES": str(JOB["spec"]["trainer"]["numNodes"]),
        "PET_NPROC_PER_NODE": str(ranks),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "localhost",  # gpt-node-0-0.gpt there
        "PET_MASTER_PORT": str(port),
    }


def test_the_line_of_a_pod_is_one_of_zeroshard_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in _variables(1, 29500, JOB["spec"]["trainer"]["numProcPerNode"]).items():
        monkeypatch.setenv(name, value)
    parser = LineParser(prog="zeroshard run", allow_abbrev=False)
    RUN.declare(parser)
    script = str(ROOT / "examples" / "train_gpt.py")
    args = [f"--checkpoint={tmp_path}/gpt", "--resume", *SMALL]
    expected = RunOptions(script, args, standalone=False)
    assert parse_run(parser, _line(tmp_path)) == expected


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _losses(path: Path) -> list[float]:
    """Return the losses of all steps of a training that has ended."""
    (result,) = json.loads(path.read_text())["results"]
    found: list[float] = result["losses"]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks under ``zeroshard run``."""
    path = tmp_path_factory.mktemp("undisturbed") / "out.json"
    line = [PROGRAM, "run", "--nproc", "2", str(ROOT / "examples" / "train_gpt.py"), *SMALL]
    subprocess.run([*line, "--json", str(path)], check=True, capture_output=True, timeout=300)
    return _losses(path)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["all pods", "pod", "rank"])
def test_two_pods_go_on_from_the_volume(
    tmp_path: Path, undisturbed: list[float], killed: str
) -> None:
    """When a pod dies the ranks of the other start again and wait for the new one; when all of them
    are made anew, they meet as at first; when a rank dies, the pods stay.
    """
    out, port = tmp_path / "out.json", _free_port()

    def start(node: int) -> subprocess.Popen[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **_variables(node, port, ranks=1)}
        env |= {one["name"]: one["value"] for one in CONTAINER["env"]}
        line, pipe = [PROGRAM, "run", *_line(tmp_path), "--json", str(out)], subprocess.PIPE
        return subprocess.Popen(line, env=env, stdout=pipe, stderr=pipe, text=True)

    pods = [start(0), start(1)]
    wait_until(lambda: zs.latest_step(tmp_path / "gpt") is not None)
    if killed != "rank":
        for pod in pods if killed == "all pods" else pods[1:]:
            pod.kill()  # its rank ends with it
            pod.communicate(timeout=120)
        assert not out.exists()
        pods = [start(0) if killed == "all pods" else pods[0], start(1)]
    else:
        (rank,) = (
            pid
            for pid in descendants(pods[1].pid)
            if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
        )
        os.kill(rank, signal.SIGKILL)
    said = [pod.communicate(timeout=120) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert f" of {STEPS}" in said[0][0].partition("Resumed after step ")[2], said
    assert _losses(out) == undisturbed


# ------------------------------------------------------------------ the SDK's local processes


def _train(given: dict) -> None:  # no name of this file may stand in it
    """Run the example, and on the first try kill the second rank once a step is saved. The SDK
    copies these lines into a file, and starts that.
    """
    import os
    import runpy
    import signal
    import sys
    import threading
    import time

    import zeroshard as zs

    def die() -> None:
        while zs.latest_step(given["checkpoint"]) is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        threading.Thread(target=die, daemon=True).start()
    sys.argv = [given["script"], *given["words"], "--checkpoint", given["checkpoint"], "--resume"]
    runpy.run_path(given["script"], run_name="__main__")


def _wheel_of_this_torch(folder: Path) -> None:
    """Write a wheel named torch that makes an environment see the packages of this one."""
    version = torch.__version__
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    info = f"torch-{version}.dist-info"
    files = {
        "torch_of_the_tests.pth": "\n".join(lines),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ntorchrun = torch.distributed.run:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


@pytest.mark.slow
def test_a_job_of_kubeflows_local_backend_goes_on_after_a_rank_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[float]
) -> None:
    """The backend makes an environment, installs torch into it, and starts torchrun there."""
    trainer = pytest.importorskip(
        "kubeflow.trainer",
        reason="NOTHING WAS CHECKED UNDER KUBEFLOW'S LOCAL BACKEND: pip install kubeflow",
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # the environment is one of the first python in PATH
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    _wheel_of_this_torch(tmp_path)
    given = {
        "script": str(ROOT / "examples" / "train_gpt.py"),
        "words": [*SMALL, "--json", str(tmp_path / "out.json")],
        "checkpoint": str(tmp_path / "gpt"),
    }
    env = {  # all that there is: nothing of this process's environment gets there
        "PET_NPROC_PER_NODE": "2",
        "PET_MAX_RESTARTS": "1",
        "PET_MASTER_PORT": str(_free_port()),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    client = trainer.TrainerClient(trainer.LocalProcessBackendConfig())
    name = client.train(
        "torch-distributed",
        trainer=trainer.CustomTrainer(_train, given, packages_to_install=["torch"], env=env),
    )
    said = "\n".join(client.get_job_logs(name, follow=True))
    assert client.get_job(name).status == "Complete", said
    assert f" of {STEPS}" in said.partition("Resumed after step ")[2]
    assert _losses(tmp_path / "out.json") == undisturbed
