"""What stands between the launcher and a script: the script sees what ``python script.py`` shows
it, the launcher hears how it went.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.comm import job
from zeroshard.launch import worker

LOOK = """
import json, os, sys
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[:2],
    "main": sys.modules["__main__"].__file__,
    "variables": sorted(name for name in os.environ if name.startswith("ZEROSHARD")),
    "doc": __doc__, "spec": str(__spec__),
}))
"""


@dataclass
class _Ended:
    code: int
    stdout: str
    stderr: str
    events: list[dict[str, Any]]
    failure: dict[str, Any] | None


def _run(tmp_path: Path, *argv: str, cwd: Path | None = None, writable: bool = True) -> _Ended:
    directory = tmp_path / "run"
    directory.mkdir()
    os.mkfifo(directory / "events")
    fifo = os.open(directory / "events", os.O_RDWR | os.O_NONBLOCK)
    environment = {
        **os.environ,
        worker.DIRECTORY: str(directory),
        worker.LAUNCHER_PID: str(os.getpid()),
        "RANK": "3",
    }
    if not writable:
        environment[worker.DIRECTORY] = str(directory / "gone")
    process = subprocess.run(
        [sys.executable, worker.__file__, *argv],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        events = [json.loads(line) for line in os.read(fifo, 1 << 16).splitlines()]
    except BlockingIOError:
        events = []
    os.close(fifo)
    failures = [json.loads(path.read_text()) for path in directory.glob("failure-*.json")]
    return _Ended(
        process.returncode,
        process.stdout,
        process.stderr,
        events,
        failures[0] if failures else None,
    )


def _script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_a_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    script = _script(tmp_path, '"""A script."""' + LOOK)
    ended = _run(tmp_path, "script", script, "a b", "--x")
    plain = json.loads(
        subprocess.run(
            [sys.executable, script, "a b", "--x"], capture_output=True, text=True, check=True
        ).stdout
    )
    assert json.loads(ended.stdout) == plain
    assert plain["doc"] == "A script."
    started, left = ended.events
    assert (started["rank"], started["restart_count"], ended.failure) == (3, 0, None)
    assert left.keys() == {"pid", "left_at"} and left["pid"] == started["pid"]


def test_a_module_sees_what_python_m_shows_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "look.py").write_text(
        LOOK.replace('"spec": str(__spec__)', '"spec": __spec__.name')
    )
    ended = _run(tmp_path, "module", "package.look", "a", cwd=tmp_path)
    plain = subprocess.run(
        [sys.executable, "-m", "package.look", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    seen, expected = json.loads(ended.stdout), json.loads(plain)
    assert seen.pop("argv")[1:] == expected.pop("argv")[1:]
    assert seen == expected


def test_a_program_is_started_directly_and_keeps_the_process_id(tmp_path: Path) -> None:
    ended = _run(tmp_path, "command", "sh", "-c", 'echo $$ "$1"', "sh", "a  b")
    assert ended.stdout == f"{ended.events[0]['pid']} a  b\n"


def test_classes_of_the_script_can_be_pickled_also_by_spawned_children(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import multiprocessing as mp\nclass Thing:\n    pass\ndef work(thing):\n    return"
        " type(thing).__name__\nif __name__ == '__main__':\n    with"
        " mp.get_context('spawn').Pool(1) as pool:\n        print(pool.apply(work, (Thing(),)))\n",
    )
    assert _run(tmp_path, "script", script).stdout == "Thing\n"


def test_an_exception_is_written_down_with_the_scripts_frames_only(tmp_path: Path) -> None:
    ended = _run(
        tmp_path,
        "script",
        _script(tmp_path, "def deep():\n    raise ValueError('no good')\ndeep()\n"),
    )
    assert ended.code == 1
    assert ended.failure is not None
    assert ended.failure["message"] == "ValueError: no good"
    assert [
        line for line in ended.failure["traceback"].splitlines() if line.startswith("  File")
    ] == [
        f'  File "{tmp_path}/script.py", line 3, in <module>',
        f'  File "{tmp_path}/script.py", line 2, in deep',
    ]
    assert ended.stderr == ""  # the launcher shows it, last
    assert ended.events[1] == {"pid": ended.events[0]["pid"], "failed_at": ended.failure["at"]}


def test_a_syntax_error_points_into_the_script(tmp_path: Path) -> None:
    ended = _run(tmp_path, "script", _script(tmp_path, "x = = 1\n"))
    assert ended.failure is not None
    assert ended.failure["traceback"].startswith(f'  File "{tmp_path}/script.py", line 1\n')


def test_errors_of_ours_end_with_their_own_code(tmp_path: Path) -> None:
    ended = _run(
        tmp_path,
        "script",
        _script(
            tmp_path,
            "from zeroshard.errors import PlanMismatch\nraise PlanMismatch('stage differs')\n",
        ),
    )
    assert ended.code == 72
    assert ended.failure is not None and ended.failure["exit_code"] == 72


def test_a_stall_that_no_program_can_raise_is_reported_by_another_thread(tmp_path: Path) -> None:
    text = (
        "import threading, time\nfrom zeroshard.comm.job import end_process\n"
        "from zeroshard.errors import StallError\nerror = StallError('rank 1 did not come')\n"
        "threading.Thread(target=end_process, args=(error,)).start()\ntime.sleep(60)\n"
    )
    ended = _run(tmp_path, "script", _script(tmp_path, text))
    assert ended.code == 71 and ended.stderr == ""  # the launcher shows it
    assert ended.failure is not None and ended.failure["stalled"]
    assert ended.failure["message"] == "zeroshard.errors.StallError: rank 1 did not come"


def test_losing_a_peer_is_marked_as_a_consequence(tmp_path: Path) -> None:
    ended = _run(
        tmp_path,
        "script",
        _script(
            tmp_path,
            "from zeroshard.errors import PeerLostError\nraise PeerLostError('rank 0 has ended')\n",
        ),
    )
    assert ended.code == 71
    assert ended.failure is not None and ended.failure["consequence"]


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [("75", 75, ""), ("'no data'", 1, "no data"), ("0", 0, None), ("", 0, None)],
)
def test_sys_exit_means_what_it_means(
    tmp_path: Path, how: str, code: int, message: str | None
) -> None:
    ended = _run(tmp_path, "script", _script(tmp_path, f"import sys\nsys.exit({how})\n"))
    assert ended.code == code
    assert (ended.failure["message"] if ended.failure else None) == message


def test_after_a_failure_exit_functions_run_and_threads_do_not_keep_the_process(
    tmp_path: Path,
) -> None:
    script = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'bye')\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "raise ValueError\n"
    )
    ended = _run(tmp_path, "script", _script(tmp_path, script))
    assert (ended.code, ended.stdout) == (1, "bye\n")


def test_the_users_own_hook_is_called(tmp_path: Path) -> None:
    script = (
        "import sys\nsys.excepthook = lambda kind, error, frames: print('hook',"
        " kind.__name__)\nraise ValueError\n"
    )
    assert _run(tmp_path, "script", _script(tmp_path, script)).stdout == "hook ValueError\n"


def test_a_failure_that_cannot_be_written_down_is_printed(tmp_path: Path) -> None:
    ended = _run(
        tmp_path, "script", _script(tmp_path, "raise ValueError('no good')\n"), writable=False
    )
    assert ended.code == 1
    assert ended.stderr.endswith("ValueError: no good\n")


def test_a_worker_whose_launcher_is_gone_does_not_start(tmp_path: Path) -> None:
    environment = {**os.environ, worker.DIRECTORY: str(tmp_path), worker.LAUNCHER_PID: "1"}
    script = _script(tmp_path, "print('started')\n")
    process = subprocess.run(
        [sys.executable, worker.__file__, "script", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (process.returncode, process.stdout) == (137, "")


def test_the_heart_beats_in_forwards_and_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[str] = []
    launcher = SimpleNamespace(
        beat=lambda: beats.append("beat"), meeting_file=lambda: None, keeper_address=lambda: None
    )
    monkeypatch.setitem(sys.modules, job.LAUNCHER, launcher)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert len(beats) == 1, "evaluation alone is progress"
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(beats) == 3
    engine.close()
