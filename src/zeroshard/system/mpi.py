"""A process of an MPI job, read from the variables that ``mpirun`` sets for each task.

    Open MPI                  OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MVAPICH                   MV2_COMM_WORLD_RANK, ...
    Hydra (MPICH, Intel MPI)  PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    PALS (HPE Cray)           PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK, PMI_LOCAL_SIZE

None of them says where the first task is. On one host the tasks meet at loopback; on several
``MASTER_ADDR`` has to name it. Slurm sets ``PMI_RANK``, too, for ``srun --mpi=pmi2``; and a mpirun
inside an allocation starts its daemons as a step, whose variables the tasks inherit. So a task that
knows its place on its host is MPI's, and any other is Slurm's first (``slurm.py``).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import ConfigError
from zeroshard.system import slurm
from zeroshard.system.slurm import FIRST_PORT, NUM_PORTS

_OMPI, _MV2 = "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"
# rank, number of tasks, the same on this host
_FAMILIES = (
    tuple(_OMPI + word for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    tuple(_MV2 + word for word in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_TORCHS_PORT = 29500


@dataclass(frozen=True)
class MpiTask:
    """One task of an MPI job. `port` is the same on all tasks; nobody has reserved it."""

    rank: int
    num_tasks: int
    local_rank: int
    num_local: int
    port: int


def read_task(environ: Mapping[str, str]) -> MpiTask | None:
    """Return the task of an MPI job that this process is, None outside of one, or where only its
    place in the whole job is said.
    """
    names = next((names for names in _FAMILIES if all(name in environ for name in names)), None)
    if names is None:
        return None
    rank, num_tasks, local_rank, num_local = (_number(environ, name) for name in names)
    port = _port(environ, names[0], one_host=num_local == num_tasks)
    return MpiTask(rank, num_tasks, local_rank, num_local, port)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set for this process, where it is one of several tasks of an MPI
    job or of a Slurm step, and nobody else has set RANK; else nothing.

    Raises:
        ConfigError: nobody has said where the tasks meet, or which of its host's this process is.
    """
    if "RANK" in environ:
        return {}
    task = read_task(environ)
    if task is None:
        found = slurm.rank_variables(environ)
        if not found and slurm.read_step(environ) is None:
            _refuse_half(environ)
        return found
    if task.num_tasks == 1:
        return {}
    address = environ.get("MASTER_ADDR")
    if address is None and task.num_local < task.num_tasks:
        raise ConfigError(
            f"mpirun has started {task.num_local} of {task.num_tasks} ranks on this host, and does"
            " not say where the first is: set MASTER_ADDR for all of them (Open MPI: mpirun -x"
            " MASTER_ADDR=HOST, Hydra: -genv MASTER_ADDR HOST)"
        )
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.num_tasks),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.num_local),
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": environ.get("MASTER_PORT", str(task.port)),
    }


def _refuse_half(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where this is one of several tasks, or may be, and more is not known."""
    several = "PMI_SIZE" in environ and _number(environ, "PMI_SIZE") > 1
    if several or ("PMIX_RANK" in environ and "PMI_SIZE" not in environ):
        name = "PMI_RANK" if several else "PMIX_RANK"
        raise ConfigError(
            f"{name} is set, and neither Slurm nor MPI says which of how many ranks of which host"
            " this is: set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or use"
            " zeroshard run"
        )


def _port(environ: Mapping[str, str], name: str, *, one_host: bool) -> int:
    """Return a port that other jobs of this host do not have, as far as can be known."""
    job = environ.get("PMIX_NAMESPACE")
    if job is None and one_host:
        job = _starter(name)
    return _TORCHS_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS


def _starter(name: str) -> str | None:
    """Return which process has started the tasks of this host: the nearest above this one whose
    environment lacks `name`. A shell may lie between.
    """
    pid = os.getppid()
    try:
        while f"{name}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
    return str(pid)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name}={text!r} is not a whole number")
    return int(text)
