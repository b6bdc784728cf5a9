"""This host: its memory, how many files a process may open, and the interface by which another
host is reached; and the place of this process among the tasks of a job. Standard library only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import resource
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroshard.errors import ConfigError

# ------------------------------------------------------------------------------------------- memory
# The memory of the system, or of the control group (a container, a batch job) where that allows
# less. Read from /proc and /sys, in well under a millisecond; where neither says anything, sysconf
# does.


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this host's memory that this process and its peers may use."""

    total: int
    available: int  # of these, not in use; what the page cache holds counts as free
    limit: int | None  # of the control group; None: none below `total`

    @classmethod
    def now(cls, root: Path = Path("/")) -> HostMemory:
        """Ask the system; its files are below `root`."""
        meminfo = numbers_of(root / "proc/meminfo")
        page = os.sysconf("SC_PAGE_SIZE")
        total = meminfo.get("MemTotal:", 0) << 10 or os.sysconf("SC_PHYS_PAGES") * page
        available = meminfo.get("MemAvailable:", total >> 10) << 10
        limit = None
        for limit_file, usage_file, cache in _groups(root):
            most = _number_in(root / limit_file)
            if most is None or most >= total:  # unlimited
                continue
            stat = numbers_of((root / limit_file).with_name("memory.stat"))
            used = (_number_in(root / usage_file) or 0) - stat.get(cache, 0)
            limit = most if limit is None else min(limit, most)
            available = min(available, max(0, most - used))
        return cls(total if limit is None else limit, available, limit)


def _groups(root: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield limit, usage and the name of the page cache's part of it, of this process's control
    group and of those around it, in both versions of the interface.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        inner = Path(name.lstrip("/"))
        if not controllers:
            for group in (inner, *inner.parents):
                at = Path("sys/fs/cgroup") / group
                yield at / "memory.max", at / "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            for group in (inner, *inner.parents):
                at = Path("sys/fs/cgroup/memory") / group
                limit, usage = at / "memory.limit_in_bytes", at / "memory.usage_in_bytes"
                yield limit, usage, "total_inactive_file"


def _number_in(path: Path) -> int | None:
    """Return the number in `path`; None where there is none ("max")."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def numbers_of(path: Path) -> dict[str, int]:
    """Return the numbers of `path`, by the first word of their lines; {} if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdecimal()}


# ------------------------------------------------------------------------ open files and interfaces

_SIOCGIFADDR = 0x8915
_MOST_FILES = 1 << 16


def raise_file_limit() -> None:
    """Let this process open as many files as its hard limit allows: a rank has a socket to each
    other rank, in several groups, and the usual soft limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_loopback(address: str) -> bool:
    """Whether `address`, as written, reaches this host alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_towards(address: str) -> str | None:
    """Return the network interface by which this host reaches `address`, None if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
            if is_loopback(own) and not is_loopback(address):
                return None  # the host's own name, see listen()
            names = [name for _, name in socket.if_nameindex()]
            return next((name for name in names if _has_address(probe, name, own)), None)
    except OSError:
        return None


def _has_address(probe: socket.socket, interface: str, address: str) -> bool:
    try:
        request = struct.pack("256s", interface.encode())
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # it has no IPv4 address
        return False
    first = socket.inet_ntoa(answer[20:24])
    return first == address or (is_loopback(first) and is_loopback(address))


# ------------------------------------------------------------------------------- the tasks of a job
# Read from the variables that ``srun`` and ``mpirun`` set for each task:
#
#     Slurm                     SLURM_STEP_*: the step's own; variables of the job are also in the
#                               environment of a batch script, which is not a task
#     Open MPI                  OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
#     MVAPICH                   MV2_COMM_WORLD_RANK, ...
#     Hydra (MPICH, Intel MPI)  PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
#     PALS (HPE Cray)           PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK, PMI_LOCAL_SIZE
#
# No MPI says where the first task is. On one host the tasks meet at loopback; on several
# ``MASTER_ADDR`` has to name it. Slurm sets ``PMI_RANK``, too, for ``srun --mpi=pmi2``; and a
# mpirun inside an allocation starts its daemons as a step, and the tasks inherit its variables. So
# a task that knows its place on its host is MPI's, and any other is Slurm's first. SkyPilot starts
# a shell on each node; an mpirun or srun in that shell is nearer to its tasks, and goes first.


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


def stat_of(pid: int) -> list[str]:
    """Return what proc(5) tells of `pid` in stat, from its state on. Raises OSError where it is
    gone.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    """Return the process id of the parent of `pid`. Raises OSError where that is gone."""
    return int(stat_of(pid)[1])


def starter_of(variable: str) -> int:
    """Return the process that has started the tasks of this host: the nearest above this one
    without `variable` in its environment; a shell may lie between. Raises OSError.
    """
    pid = os.getppid()
    while f"{variable}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
        pid = parent_of(pid)
    return pid


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
        with suppress(OSError, ValueError):
            job = str(starter_of(names[0]))
    port = _TORCHS_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    return MpiTask(rank, num_tasks, local_rank, num_local, port)


# ----------------------------------------------------------------------------------------- SkyPilot
# The shell of a task's ``run`` section is started on each of its nodes, with SKYPILOT_NODE_RANK;
# that of ``setup`` has none. On Slurm SkyPilot removes its own step's variables from that shell.

# above the ports of SkyPilot's Ray (to 19999), below Kubernetes' (from 30000) and Linux's clients'
_SKY_PORT = 20000


@dataclass(frozen=True)
class SkyNode:
    """One of several nodes of a SkyPilot task. `port` is the same on all nodes, and nobody has
    reserved it.
    """

    rank: int
    nodes: tuple[str, ...]
    num_gpus: int  # of each node
    port: int


def read_node(environ: Mapping[str, str]) -> SkyNode | None:
    """Return the node of a SkyPilot task that this process runs on; None outside of one, where the
    task has one node, and where Slurm or mpirun has started this process in it.

    Raises:
        ConfigError: the variables contradict each other, or one is not what it is to be.
    """
    if "SKYPILOT_NODE_RANK" not in environ or read_task(environ) or read_step(environ):
        return None
    text = environ.get("SKYPILOT_NODE_IPS", "")
    nodes = tuple(text.removesuffix("\n").split("\n"))
    num_nodes = _number(environ, "SKYPILOT_NUM_NODES", str(len(nodes)))
    rank = _number(environ, "SKYPILOT_NODE_RANK")
    if num_nodes == 1 and rank == 0:
        return None
    for name in nodes:
        if _NODE.fullmatch(name) is None:
            raise ConfigError(f"SKYPILOT_NODE_IPS={text!r}: {name!r} is not a host's address")
    if len(nodes) != num_nodes:
        raise ConfigError(
            f"SKYPILOT_NODE_IPS={text!r} names {len(nodes)} node(s), and SKYPILOT_NUM_NODES is"
            f" {num_nodes}"
        )
    if rank >= num_nodes:
        raise ConfigError(f"SKYPILOT_NODE_RANK={rank} is not one of {num_nodes} node(s)")
    task = environ.get("SKYPILOT_TASK_ID", "")
    return SkyNode(
        rank=rank,
        nodes=nodes,
        num_gpus=_number(environ, "SKYPILOT_NUM_GPUS_PER_NODE", "0"),
        port=_SKY_PORT + zlib.crc32(task.encode()) % NUM_PORTS,
    )


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set for this process, where it is one of several tasks of an MPI
    job or of a Slurm step, or on one of several nodes of a SkyPilot task with at most one GPU each,
    and nobody else has set RANK; else nothing.

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
        node = read_node(environ)
        if node is None or node.num_gpus > 1:  # one process on each node cannot be a rank for each
            return {}
        return {
            "RANK": str(node.rank),
            "WORLD_SIZE": str(len(node.nodes)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": environ.get("MASTER_ADDR", node.nodes[0]),
            "MASTER_PORT": environ.get("MASTER_PORT", str(node.port)),
        }
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
