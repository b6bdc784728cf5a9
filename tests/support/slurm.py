"""A real Slurm of one node, this machine: its daemons, in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("srun", "sinfo", "slurmctld", "slurmd", "munged")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE
"""


def why_not() -> str | None:
    """Return why there is no Slurm here, None where there is."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"{missing[0]} is not installed (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "this needs root"


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@contextlib.contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm inside; yield the variables with which srun finds it."""
    host = socket.gethostname().partition(".")[0]
    folder.chmod(0o755)
    for name, mode in (("munge", 0o700), ("state", 0o755), ("spool", 0o755)):
        (folder / name).mkdir(mode)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o400)
    configuration = folder / "slurm.conf"
    text = CONFIGURATION.format(host=host, folder=folder, ports=_free_ports())
    configuration.write_text(text)
    environ = {"SLURM_CONF": str(configuration)}
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    try:
        _start(["munged", "--force", f"--socket={folder}/munge.socket", *munge], environ)
        _start(["slurmctld"], environ)
        _start(["slurmd"], environ)
        _wait_until_idle(environ)
        yield environ
    finally:
        for name in ("slurmd.pid", "slurmctld.pid", "munge/pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((folder / name).read_text()), signal.SIGTERM)


def _free_ports() -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(2)]
        return [one.getsockname()[1] for one in sockets]


def _start(command: list[str], environ: dict[str, str]) -> None:
    program = _program(command[0])
    assert program is not None
    line = [program, *command[1:]]
    subprocess.run(line, env={**os.environ, **environ}, check=True, timeout=300)


def _wait_until_idle(environ: dict[str, str]) -> None:
    end, line = time.monotonic() + 300, ["sinfo", "-h", "-o", "%t"]
    while time.monotonic() < end:
        env = {**os.environ, **environ}
        said = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
        if said.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise TimeoutError(f"the node is not idle: {said.stdout} {said.stderr}")
