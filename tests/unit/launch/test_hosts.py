"""What goes to a host over ssh, and what comes back: byte by byte, and past every shell (F11)."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.launched import stub_ssh
from zeroshard.launch import connection, hosts, on_host
from zeroshard.launch.cli import build_parsers
from zeroshard.launch.options import parse_run
from zeroshard.launch.outcome import Outcome
from zeroshard.launch.supervisor import Failure
from zeroshard.system.this_host import interface_towards
from zeroshard.terminal import UsageError

MARK = "it-was-run"
SHOW = """
import json, os, sys
own = {name: os.environ[name] for name in os.environ if name.startswith("ZEROSHARD_T")}
print(json.dumps([sys.argv[1:], own, os.getcwd()]))
"""
HOSTILE = st.sampled_from(
    [f"$(touch {MARK})", f"`touch {MARK}`", f"x;touch${{IFS}}{MARK};", f"'; touch {MARK} #",
     f'"; touch {MARK} #', f"| touch {MARK}", f"\ntouch {MARK}\n", "\\", "!!", "~", "*", "--",
     "-oProxyCommand=x", "%s", "${IFS}", "\r", "\t", "'", '"', "\udcff", "é", " "]
)  # fmt: skip
ANY = st.text(
    st.characters(min_codepoint=1, max_codepoint=0x10FFFF, exclude_categories=["Cs"]), max_size=12
)
TEXTS = st.lists(st.one_of(HOSTILE, ANY), max_size=4).map("".join)


# 10 processes with 100 strings each
@settings(
    max_examples=10,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(TEXTS, min_size=100, max_size=100))
def test_arguments_environment_and_directory_reach_a_host_as_they_are_and_nothing_runs(
    tmp_path: Path, texts: list[str]
) -> None:
    texts = [os.fsdecode(os.fsencode(text)) for text in texts]  # as a program gets them
    arguments, values = texts[:50], texts[50:]
    environment = {f"ZEROSHARD_T{number}": value for number, value in enumerate(values)}
    name = next((one for one in texts if one.strip(". ") and "/" not in one), "x")
    directory = tmp_path / "in" / os.fsdecode(os.fsencode(name)[:250])
    directory.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(directory)
    try:
        orders = hosts.beginning([sys.executable, "-I", "-c", SHOW, *arguments], environment)
    finally:
        os.chdir(before)
    seen = subprocess.run(
        [stub_ssh(tmp_path), *hosts.SSH_OPTIONS, "--", "worker-0", hosts.COMMAND],
        input=orders,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert json.loads(seen.stdout.splitlines()[-1]) == [arguments, environment, str(directory)]
    assert not list(tmp_path.rglob(MARK)) and not Path("/", MARK).exists()


def test_the_command_for_a_host_is_the_same_for_every_job() -> None:
    assert "zeroshard" not in hosts.COMMAND and sys.executable not in hosts.COMMAND
    assert hosts.COMMAND.count("'") == 2 and "\\" not in hosts.COMMAND


@given(st.binary())
def test_text_of_the_systems_is_bytes(data: bytes) -> None:
    data = data.replace(b"\0", b"")
    text = json.loads(connection.line(connection.to_text(data)))
    assert os.fsencode(connection.from_text(text)) == data


@given(
    st.binary(max_size=20).filter(
        lambda before: connection.GREETING not in before + connection.GREETING[:-1]
    ),
    st.lists(
        st.tuples(st.sampled_from([connection.OUT, connection.ERR, connection.NOTE]), st.binary())
    ),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_frames_are_read_however_they_are_cut(
    before: bytes, frames: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    data = before + connection.GREETING + b"".join(connection.frame(*one) for one in frames)
    reader, found = connection.Frames(), []
    while data:
        size = cuts[len(data) % len(cuts)]
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == frames


@pytest.mark.parametrize(
    "data",
    [b"x" * (1 << 17), connection.GREETING + b"?\0\0\0\0", connection.GREETING + b"o\xff\0\0\0"],
)
def test_bytes_of_others_are_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"its shell|protocol"):
        connection.Frames().feed(data)


def test_a_host_gets_the_variables_of_the_libraries_and_no_secret() -> None:
    sent = ["PYTHONPATH", "NCCL_DEBUG", "OMP_NUM_THREADS", "HF_HOME", "TOKENIZERS_PARALLELISM",
            "TORCH_LOGS", "CUDA_LAUNCH_BLOCKING", "PATH", "LD_LIBRARY_PATH"]  # fmt: skip
    kept = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HOME",
            "USER", "SSH_AUTH_SOCK", "CUDA_VISIBLE_DEVICES", "MY_VALUE",
            "TORCH_SECRET"]  # fmt: skip
    environ = dict.fromkeys([*sent, *kept], "x")
    assert set(hosts.sent_environment(environ, ())) == set(sent)
    assert set(hosts.sent_environment(environ, ("MY_VALUE", "HF_TOKEN"))) == {
        *sent, "MY_VALUE", "HF_TOKEN",
    }  # fmt: skip
    with pytest.raises(UsageError, match="--export NOT_THERE"):
        hosts.sent_environment(environ, ("NOT_THERE",))


def test_a_host_that_never_begins_is_waited_for_aloud_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ssh, hostfile, script = tmp_path / "ssh", tmp_path / "hosts", tmp_path / "script.py"
    ssh.write_text("#!/bin/sh\nexec sleep 1000\n")
    ssh.chmod(0o755)
    hostfile.write_text("h1 slots=1\n")
    script.touch()
    monkeypatch.setattr(hosts, "TELL_S", 0.2)
    monkeypatch.setattr(hosts, "GREETING_S", 0.7)
    _, parsers = build_parsers()
    options = parse_run(
        parsers["run"], ["--hostfile", str(hostfile), "--ssh", str(ssh), str(script)]
    )
    assert options.hosts is not None
    assert hosts.launch_on_hosts(options, options.hosts) == 74
    *waiting, last = capfd.readouterr().err.splitlines()
    assert last.startswith("zeroshard run: h1 has not begun within 0.7 s: ssh runs, but no answer")
    assert 2 <= len(waiting) <= 3 and len(set(waiting)) == 1, waiting
    assert "waiting for h1 to begin" in waiting[0]


def test_a_host_that_has_come_back_knows_which_steps_are_in_the_memory_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = []

    def launched(job: Any, orders: Any, keeper: Any) -> bool:
        known.append(keeper.whole)
        return False

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(on_host, "_guard_one", launched)
    options = {"elastic": 1, "nproc": "1"}
    job = {"options": options, "environment": {}, "whole": {"/runs": 3}}
    on_host._guard({"again": job}, None)  # type: ignore[arg-type]
    assert known == [{"/runs": 3}]


def test_a_failure_keeps_its_age_on_the_way() -> None:
    now = time.monotonic()
    sent = Outcome([Failure(3, 77, now - 5.0, -9, "why", "trace")], [Failure(2, 76, now - 6.0, 0)])
    text = json.dumps(sent.to_json())
    found = Outcome.from_json(json.loads(text), "worker-1")
    assert found.failures[0].name == "rank 3 on worker-1"
    assert found.failures[0].at == pytest.approx(now - 5.0, abs=0.5)
    assert found.left[0].at == pytest.approx(now - 6.0, abs=0.5)
    assert (found.exit_code, found.failures[0].message) == (137, "why")


@given(st.binary().map(lambda data: data.replace(b"[", b"\r\n")), st.integers(1, 7))
def test_output_of_a_host_is_the_same_but_for_its_name_before_each_line(
    data: bytes, size: int
) -> None:
    stream = io.BytesIO()
    lines = connection._Lines("worker-1", stream)
    for start in range(0, len(data), size):
        lines.write(data[start : start + size])
    lines.close()
    shown = stream.getvalue()
    end = b"" if not data or data.endswith(b"\n") else b"\n"
    assert shown.replace(b"[worker-1] ", b"") == data + end
    assert all(line.startswith(b"[worker-1] ") for line in shown.split(b"\n")[:-1])
    assert b"\r[worker-1] \n" not in shown


def test_a_port_is_held_from_the_moment_it_is_told() -> None:
    with connection.listen("127.0.0.2", 0) as held:
        address, port = held.getsockname()
        assert address == "127.0.0.2"
        with pytest.raises(UsageError, match=f"--master-port {port} cannot be used"):
            connection.listen("127.0.0.2", port)
    with pytest.raises(UsageError, match="--master-addr names this host"):
        connection.listen("192.0.2.1", 0)  # an address for examples, which nobody has
    with pytest.raises(UsageError, match="is not known here"):
        connection.listen("no-such-host.invalid", 0)
    assert interface_towards("127.0.0.3") == "lo"
