"""A Slurm job step, read from the variables that ``srun`` sets for each task.

``expand()`` undoes Slurm's short form of a list of nodes: ``gpu[01-03,7]-ib,login`` is gpu01-ib,
gpu02-ib, gpu03-ib, gpu7-ib and login. ``read_step()`` says which task this process is, and where
the tasks meet. Only the step's own variables are read (``SLURM_STEP_*``): those of the job are also
in the environment of a batch script, which is not a task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zeroshard.errors import ConfigError

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


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
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


def _number(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name, default)
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name}={text!r} is not a whole number")
    return int(text)
