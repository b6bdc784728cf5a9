"""Trainings that are told to stop, or lose a rank, and go on later with the same losses:
examples/train_gpt.py under ``zeroshard run``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from tests.support.harness import ROOT
from zeroshard.checkpoint.steps import list_steps, read_manifest
from zeroshard.launch.run import SIGNAL_GRACE_S

STEPS = 60
SMALL = shlex.split(
    "--layers 1 --width 32 --heads 2 --context 32 --batch 2 --accumulate 4 --sample 0"
)


class Job:
    """Two ranks of a script under the launcher, in a process of ours."""

    def __init__(self, *line: str) -> None:
        command = [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", *line]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read what the ranks print until `text` is in it."""
        assert self.process.stdout is not None
        while text not in self.shown:
            line = self.process.stdout.readline()
            assert line, f"it ended without {text!r}: {self.end()}"
            self.shown += line

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank."""
        found = {}
        for pid in (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ):
            environment = dict(
                item.partition("=")[::2]
                for item in Path(f"/proc/{pid}/environ").read_text().split("\0")
            )
            if "RANK" in environment:  # else what removes the launcher's files should it be killed
                found[int(environment["RANK"])] = int(pid)
        return found

    def end(self, timeout: float = 60.0) -> tuple[int, str, str]:
        """Return the exit code and all that was printed."""
        shown, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, self.shown + shown, errors


Launch = Callable[..., Job]


@pytest.fixture
def launch() -> Iterator[Launch]:
    jobs: list[Job] = []

    def start(*line: str) -> Job:
        jobs.append(Job(*line))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()  # the ranks follow
        job.process.communicate()


def training(launch: Launch, directory: Path, *options: str, launcher: tuple[str, ...] = ()) -> Job:
    """Start the example with checkpoints in `directory` and its results in `directory`.json."""
    checkpoints = ("--checkpoint", str(directory), "--save-every", "20", "--resume")
    return launch(
        *launcher,
        str(ROOT / "examples" / "train_gpt.py"),
        *SMALL,
        "--steps",
        str(STEPS),
        "--json",
        f"{directory}.json",
        *checkpoints,
        *options,
    )


def result(path: Path) -> dict[str, Any]:
    """Return the losses and the validation loss of a finished training."""
    (found,) = json.loads(path.read_text())["results"]
    return {name: found[name] for name in ("losses", "validation")}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A training that nobody interrupts."""
    path = tmp_path_factory.mktemp("straight") / "out.json"
    job = Job(
        str(ROOT / "examples" / "train_gpt.py"), *SMALL, "--steps", str(STEPS), "--json", str(path)
    )
    code, _, errors = job.end()
    assert code == 0, errors
    return result(path)


def saved_at_a_signal(directory: Path, shown: str, name: str, straight: dict[str, Any]) -> int:
    """Check that rank 0 said once where it stopped, and that this step is saved, with the losses
    of a straight run; return the step.
    """
    (line,) = re.findall(rf"{name}: step (\d+) of {STEPS} is saved", shown)
    stopped = int(line)
    assert 10 <= stopped < STEPS
    assert zs.latest_step(directory) == stopped
    assert (
        read_manifest(list_steps(directory)[stopped]).states["extra"]["same"]["losses"]
        == straight["losses"][:stopped]
    )
    return stopped


@pytest.mark.slow
def test_sigterm_saves_and_asks_to_be_queued_again_and_what_resumes_is_as_if_nothing_had_been(
    launch: Launch, tmp_path: Path, straight: dict[str, Any]
) -> None:
    directory = tmp_path / "run"
    job = training(launch, directory)
    job.wait_for(f"step   10/{STEPS}")
    job.process.send_signal(signal.SIGTERM)
    code, shown, errors = job.end()
    assert code == 75
    assert re.fullmatch(
        r"zeroshard run: preempted \d+\.\d\d s after the start: exit code 75,"
        r" please queue it again\n",
        errors,
    )
    stopped = saved_at_a_signal(directory, shown, "SIGTERM", straight)
    code, shown, errors = training(launch, directory).end()
    assert (code, errors) == (0, "")
    assert f"Resumed after step {stopped} of {STEPS}\n" in shown
    assert result(tmp_path / "run.json") == straight


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_of_them_at_the_same_step(
    launch: Launch, tmp_path: Path, straight: dict[str, Any]
) -> None:
    job = training(launch, tmp_path / "run")
    job.wait_for(f"step   10/{STEPS}")
    os.kill(job.ranks()[1], signal.SIGTERM)
    code, shown, _ = job.end()
    assert code == 75
    saved_at_a_signal(tmp_path / "run", shown, "SIGTERM", straight)


@pytest.mark.slow
def test_ctrl_c_saves_too(launch: Launch, tmp_path: Path, straight: dict[str, Any]) -> None:
    job = training(launch, tmp_path / "run")
    job.wait_for(f"step   10/{STEPS}")
    job.process.send_signal(signal.SIGINT)
    code, shown, errors = job.end()
    assert code == 130 and errors.splitlines()[-1] == "zeroshard run: ended by SIGINT"
    saved_at_a_signal(tmp_path / "run", shown, "SIGINT", straight)


@pytest.mark.slow
def test_after_a_rank_was_killed_all_start_again_and_resume_by_themselves(
    launch: Launch, tmp_path: Path, straight: dict[str, Any]
) -> None:
    job = training(launch, tmp_path / "run", "--save-every", "4", launcher=("--max-restarts", "1"))
    job.wait_for(f"step   15/{STEPS}")
    os.kill(job.ranks()[1], signal.SIGKILL)
    code, shown, errors = job.end()
    assert code == 0, errors
    assert "starting again after rank 1 failed: killed by SIGKILL" in errors
    assert re.search(rf"Resumed after step \d+ of {STEPS}\n", shown)
    assert result(tmp_path / "run.json") == straight


# ------------------------------------------------------------------------------ the launcher's part

SCRIPT = """
import os, pathlib, signal, sys, time
from zeroshard.errors import CheckpointError
rank, here = int(os.environ["RANK"]), pathlib.Path(__file__).parent
class Told(Exception):
    pass
def tell(*_):
    raise Told
signal.signal(signal.SIGINT, {on_sigint})
signal.signal(signal.SIGTERM, {on_sigterm})
try:
    print(f"rank {{rank}} is up", flush=True)
    time.sleep(60)
except Told:
    {then}
"""


def told(
    launch: Launch,
    directory: Path,
    number: signal.Signals,
    *,
    then: str,
    on_sigint: str = "tell",
    on_sigterm: str = "tell",
) -> Job:
    """Send a signal to the launcher of two ranks that do `then` when one reaches them."""
    path = directory / "script.py"
    path.write_text(SCRIPT.format(then=then, on_sigint=on_sigint, on_sigterm=on_sigterm))
    job = launch(str(path))
    job.wait_for("rank 0 is up")
    job.wait_for("rank 1 is up")
    job.process.send_signal(number)
    return job


@pytest.mark.slow
def test_a_rank_that_still_saves_when_another_has_left_with_75_is_given_time(
    launch: Launch, tmp_path: Path
) -> None:
    save = "rank or (time.sleep(4), (here / 'saved').touch()); sys.exit(75)"
    code, _, _ = told(launch, tmp_path, signal.SIGTERM, then=save).end()
    assert code == 75
    assert (tmp_path / "saved").exists()


def test_a_save_that_fails_when_told_to_stop_is_shown_and_is_not_75(
    launch: Launch, tmp_path: Path
) -> None:
    code, _, errors = told(
        launch, tmp_path, signal.SIGTERM, then="raise CheckpointError('no space') from None"
    ).end()
    assert code == 73
    assert errors.endswith("CheckpointError: no space\n")


def test_a_second_ctrl_c_ends_ranks_that_do_not_answer(launch: Launch, tmp_path: Path) -> None:
    job = told(
        launch,
        tmp_path,
        signal.SIGINT,
        then="pass",
        on_sigint="signal.SIG_IGN",
        on_sigterm="signal.SIG_IGN",
    )
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    code, _, errors = job.end(timeout=SIGNAL_GRACE_S - 10.0)
    assert code == 130 and errors.splitlines()[-1] == "zeroshard run: ended by SIGINT"
