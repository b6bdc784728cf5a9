"""``examples/train_ray.py`` under Ray Train, elastic: a worker is killed, a node is lost, and nodes
join. For real, with nodes of ``ray start`` on this machine, by an interpreter that has Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ROOT
from tests.support.launched import PATHS, wait_until
from zeroshard.launch.leftovers import end_sessions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXAMPLES = ROOT / "examples"
STEPS, LEAVES, BATCH = 200, 4, 32  # long enough that a node joins before the end
# train() of the example in this process alone, which Ray has not started
UNDISTURBED = "import json, sys; from train_ray import train; train(json.loads(sys.argv[1]))"


class Cluster:
    """Nodes of Ray on this machine, each with an address and processes of its own."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python, self._folder = python, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((PATHS, str(EXAMPLES))),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray asks a lost node for its place until it next looks at its nodes, each 20 s
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
        }

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start Python, the leader of a session."""
        line = [self._python, *arguments]
        self._started.append(
            subprocess.Popen(line, env=self.env, start_new_session=True, **options)
        )
        return self._started[-1]

    def add_node(self, cpus: int) -> subprocess.Popen[bytes]:
        """Start a node with room for `cpus` workers."""
        address = self.env.get("RAY_ADDRESS")
        where = [f"--address={address}"]
        if address is None:
            where = ["--head", "--port=0", "--include-dashboard=false"]
            where.append(f"--temp-dir={self._folder}")
        where += [f"--num-cpus={cpus}", f"--node-ip-address=127.0.0.{len(self._started) + 2}"]
        where.append("--object-store-memory=100000000")
        node = self.start("-m", "ray.scripts.scripts", "start", "--block", *where)
        if address is None:
            told = self._folder / "ray_current_cluster"
            wait_until(lambda: node.poll() is not None or told.exists())
            self.env["RAY_ADDRESS"] = told.read_text().strip()
        return node

    def end(self, *leaders: subprocess.Popen[bytes]) -> None:
        """Kill all processes of these sessions at once, as a host without power."""
        for leader in leaders or self._started:
            leader.kill()
        end_sessions(leader.pid for leader in leaders or self._started)
        for leader in leaders or self._started:
            leader.wait()


class Run:
    """The example under Ray, and what its workers have logged."""

    def __init__(self, cluster: Cluster, folder: Path, **options: Any) -> None:
        self._log = folder / "log.jsonl"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        line = [str(EXAMPLES / "train_ray.py"), "--workers", "1", "3", "--folder", str(folder)]
        line += [*words, f"--leaves={LEAVES}", f"--batch={BATCH}", "--resize-every=2"]
        self.said = folder.with_suffix(".output")
        with self.said.open("wb") as output:
            self.process = cluster.start(*line, stdout=output, stderr=output)

    def lines(self, key: str) -> list[dict[str, Any]]:
        """Return the lines with `key`: "pid" of starts of a worker, "loss" of steps."""
        text = self._log.read_text() if self._log.exists() else ""
        return [found for found in map(json.loads, text.splitlines()) if key in found]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        wait_until(lambda: self.process.poll() is not None or holds())
        assert holds(), self.said.read_text(errors="replace")[-4000:]

    def wait_for_steps(self, more: int) -> int:
        """Wait until `more` steps have been taken since the last start; return the last one."""
        awaited = self.lines("pid")[-1]["begin"] + more
        self.wait_until(lambda: any(line["step"] >= awaited for line in self.lines("loss")))
        step: int = self.lines("loss")[-1]["step"]
        return step

    def wait_for_start(self, world: int, number: int) -> list[dict[str, Any]]:
        """Wait until `world` workers have started after `number` others; return what they said."""
        self.wait_until(lambda: len(self.lines("pid")) >= number + world)
        found = self.lines("pid")[number:]
        assert [start["world"] for start in found] == [world] * world
        assert sorted(start["rank"] for start in found) == list(range(world))
        return found


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    python = os.environ.get("ZEROSHARD_RAY_PYTHON", sys.executable)
    has = subprocess.run([python, "-c", "import ray.train"], capture_output=True)
    if has.returncode != 0:
        pytest.skip(
            "NOTHING WAS CHECKED UNDER RAY: ZEROSHARD_RAY_PYTHON names an interpreter that has it"
            ' (pip install "ray[train]")'
        )
    # not pytest's folder: the paths of Ray's sockets would be too long
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        made = Cluster(python, Path(folder))
        try:
            made.add_node(1)
            yield made
        finally:
            made.end()


def _undisturbed(cluster: Cluster, folder: Path) -> dict[int, float]:
    """Return the losses by step of the example's function in one process, without Ray."""
    folder.mkdir()
    config = {"folder": str(folder), "steps": STEPS, "leaves": LEAVES, "batch": BATCH}
    ended = cluster.start("-c", UNDISTURBED, json.dumps(config | {"save_every": STEPS}))
    assert ended.wait(600) == 0
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_workers_killed_lost_and_added_train_as_a_run_without_ray(
    cluster: Cluster, tmp_path: Path
) -> None:
    second = cluster.add_node(1)
    run = Run(cluster, tmp_path / "run", steps=STEPS, save_every=STEPS)
    first = run.wait_for_start(2, 0)
    step = run.wait_for_steps(3)
    wait_s = random.random()  # the kill falls anywhere into a step or a save
    print(f"a worker is killed {wait_s:.3f} s after step {step}")
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.process.wait(wait_s)
    os.kill(first[1]["pid"], signal.SIGKILL)
    again = run.wait_for_start(2, 2)
    run.wait_for_steps(3)
    cluster.end(second)
    alone = run.wait_for_start(1, 4)
    cluster.add_node(2)
    grown = run.wait_for_start(3, 5)
    assert run.process.wait(300) == 0, run.said.read_text(errors="replace")[-4000:]

    for before, starts in ((step, again), (step, alone), (alone[0]["begin"], grown)):
        assert {start["begin"] for start in starts} == {starts[0]["begin"]}
        assert all(start["from_memory"] for start in starts)
        assert starts[0]["begin"] >= before - 1
    assert {line["world"] for line in run.lines("loss")} == {1, 2, 3}
    expected = _undisturbed(cluster, tmp_path / "undisturbed")
    assert list(expected) == list(range(1, STEPS + 1))
    # a step that was cut off is taken again: all that was logged of it is the same
    logged = {(line["step"], line["loss"]) for line in run.lines("loss")}
    assert sorted(logged) == list(expected.items())


def test_without_another_start_the_error_names_the_worker_that_has_died(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add_node(1)
    run = Run(cluster, tmp_path / "run", steps=STEPS, failures=0)
    starts = run.wait_for_start(2, 0)
    run.wait_for_steps(3)
    victim = next(start for start in starts if start["rank"] == 1)
    os.kill(victim["pid"], signal.SIGKILL)
    assert run.process.wait(300) != 0
    assert "PeerLostError" in (said := run.said.read_text(errors="replace"))
    assert "rank(s) [1] ended without finishing" in said
