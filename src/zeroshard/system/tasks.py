"""The place of this process among the tasks of a job, read from the variables that ``srun`` and
``mpirun`` set for each task.

    Slurm                     SLURM_STEP_*: the step's own; variables of the job are also in the
                              environment of a batch script, which is not a task
    Open MPI                  OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    MVAPICH                   MV2_COMM_WORLD_RANK, ...
    Hydra (MPICH, Intel MPI)  PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    PALS (HPE Cray)           PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK, PMI_LOCAL_SIZE

No MPI says where the first task is. On one host the tasks meet at loopback; on several
``MASTER_ADDR`` has to name it. Slurm sets ``PMI_RANK``, too, for ``srun --mpi=pmi2``; and a mpirun
inside an allocation starts its daemons as a step, and the tasks inherit its variables. So a task
that knows its place on its host is MPI's, and any other is Slurm's first.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import ConfigError

# -------------------------------------------------------------------------------------------- Slurm
# ``expand()`` undoes Slurm's short form of a list of nodes: ``gpu[01-03,7]-ib,login`` is gpu01-ib,
# gpu02-ib, gpu03-ib, gpu7-ib and login. ``read_step()`` returns the task that this process is, and
# where the tasks meet.

_MAX_NODES = 1 << 17
FIRST_PORT, NUM_PORTS = 15000, 10000  # below the ports that Linux gives to clients
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True)
class SlurmStep:
    """One task of a step. `port` is the same on all tasks; nobody has reserved it, unless the step
    was started with ``--resv-ports``.
    """

    num_tasks: int
    num_nodes: int
    rank: int
    local_rank: int
    node_rank: int
    nodes: tuple[str, ...]
    port: int

    @property
    def name(self) -> str:
        """The number of tasks and nodes, in words."""
        return f"{self.num_tasks} task(s) on {self.num_nodes} node(s)"


def expand(text: str) -> list[str]:
    """Return the names that Slurm's list of nodes stands for, in its order.

    Raises:
        ConfigError: a bracket without its other half, an empty or reversed range, a name that is no
            host's.
    """
    names: list[str] = []
    for part in _parts(text):
        for name in _names(part, text):
            if _NODE.fullmatch(name) is None:
                raise ConfigError(f"SLURM_STEP_NODELIST={text!r}: {name!r} is not a host's name")
            names.append(name)
            if len(names) > _MAX_NODES:
                raise ConfigError(f"SLURM_STEP_NODELIST={text!r} names over {_MAX_NODES} nodes")
    return names


def _parts(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and depth == 0:
            yield part
            part = ""
        else:
            part += letter
    if depth != 0:
        raise ConfigError(f"SLURM_STEP_NODELIST={text!r}: its brackets do not match")
    yield part


def _names(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, tail = rest.partition("]")
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise ConfigError(f"SLURM_STEP_NODELIST={text!r}: {one!r} is not a range like 01-03")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MAX_NODES:
            raise ConfigError(f"SLURM_STEP_NODELIST={text!r}: {one!r} is not a range of nodes")
        for number in range(first, last + 1):
            for end in _names(tail, text):
                yield f"{head}{number:0{len(match[1])}d}{end}"


def read_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """Return the step's task that this process is; None outside of a step."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    nodes = tuple(expand(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]))
    job = _number(environ, "SLURM_JOB_ID", "0")
    step = _number(environ, "SLURM_STEP_ID", "0")
    reserved = _RANGE.match(environ.get("SLURM_STEP_RESV_PORTS", ""))
    return SlurmStep(
        num_tasks=_number(environ, "SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")),
        num_nodes=_number(environ, "SLURM_STEP_NUM_NODES", str(len(nodes))),
        rank=_number(environ, "SLURM_PROCID", "0"),
        local_rank=_number(environ, "SLURM_LOCALID", "0"),
        node_rank=_number(environ, "SLURM_NODEID", "0"),
        nodes=nodes,
        port=int(reserved[1]) if reserved else FIRST_PORT + (job * 101 + step) % NUM_PORTS,
    )


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set for this process, where it is one of several tasks of a step
    and nobody else has set RANK; else nothing.
    """
    step = None if "RANK" in environ else read_step(environ)
    if step is None or step.num_tasks == 1:
        return {}
    return {
        "RANK": str(step.rank),
        "WORLD_SIZE": str(step.num_tasks),
        "LOCAL_RANK": str(step.local_rank),
        "MASTER_ADDR": environ.get("MASTER_ADDR", step.nodes[0]),
        "MASTER_PORT": environ.get("MASTER_PORT", str(step.port)),
    }


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ[name] if default is None else environ.get(name, default)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name}={text!r} is not a whole number")
    return int(text)


# ---------------------------------------------------------------------------------------------- MPI

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
    # a port that other jobs of this host do not have, as far as can be known
    job = environ.get("PMIX_NAMESPACE")
    if job is None and num_local == num_tasks:
        job = _starter(names[0])
    port = _TORCHS_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
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
        found = slurm_variables(environ)
        if found or read_step(environ) is not None:
            return found
        # one of several tasks, or it may be, and more is not known
        several = "PMI_SIZE" in environ and _number(environ, "PMI_SIZE") > 1
        if several or ("PMIX_RANK" in environ and "PMI_SIZE" not in environ):
            name = "PMI_RANK" if several else "PMIX_RANK"
            raise ConfigError(
                f"{name} is set, and neither Slurm nor MPI says which rank of how many, and on"
                " which host, this is: set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and"
                " MASTER_PORT, or use zeroshard run"
            )
        return {}
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


def _starter(name: str) -> str | None:
    """Return which process has started the tasks of this host: the nearest above this one without
    `name` in its environment. A shell may lie between.
    """
    pid = os.getppid()
    try:
        while f"{name}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
    return str(pid)
