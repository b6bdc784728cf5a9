"""The options of ``zeroshard run``: its own, torchrun's, then the script and its arguments.

torch's own parser takes seconds to import, and a usage error must not. So torchrun's options are
listed here as data; a test compares the table with the parser of the installed torch.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import math
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from zeroshard.system.this_host import read_node, read_step, read_task
from zeroshard.terminal import Option, Subcommand, UsageError, joined, made, split_line

DEFAULT_GRACE_S = 3
REJOIN_AFTER_S = 60.0

# torchrun's, with their help; None: it stays with ``torchrun --help``
TORCHRUN_VALUES = {
    "--nnodes": "number of nodes, or a range MIN:MAX",
    "--node-rank": "rank of this node (static rendezvous)",
    "--master-addr": "address of the node with rank 0 (static rendezvous)",
    "--master-port": "port on the node with rank 0 (static rendezvous)",
    "--max-restarts": "how often the whole group is started again after a failure (default 0)",
    "--log-dir": "where redirected output goes",
    "--tee": "redirect stdout (1), stderr (2) or both (3) into files and show them, after [rank N]",
    "--shutdown-timeout": (
        f"seconds that ranks have to end after a failure, then SIGKILL (default {DEFAULT_GRACE_S})"
    ),
    **dict.fromkeys((
        "--local-addr", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
        "--monitor-interval", "--event-log-handler", "--role", "--redirects",
        "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
        "--logs-specs", "--numa-binding", "--signals-to-handle", "--log-line-prefix-template",
    )),
}  # fmt: skip
TORCHRUN_FLAGS = {
    "--module": "the script is a module's name, as in python -m",
    "--no-python": "the script is a program to be started directly",
    "--standalone": None,
    "--virtual-local-rank": None,
}
SHORT = {"--module": ", -m", "--tee": ", -t", "--redirects": ", -r"}
REFUSED = {
    "--run-path": "each rank always gets an interpreter of its own, in which the script runs",
    "--print-completion": "it is torchrun's own: run torchrun --print-completion",
    "--start-method": (
        "it only matters for functions, and scripts are always started as fresh processes"
    ),
}
ELASTIC = "--elastic"  # with a value or without
NPROC_WORDS = ("auto", "cpu", "gpu", "xpu")
PLACES_THE_JOB = (
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
    "--rdzv-endpoint",
)  # fmt: skip
ONE_HOST = {  # values that mean the same as the default
    "--nnodes": ("1", "1:1"),
    "--node-rank": ("0",),
    "--master-addr": ("127.0.0.1", "localhost"),
    "--rdzv-backend": ("static",),
}


@dataclass(frozen=True)
class HostChoice:
    """The hosts that the line names: ``--hostfile`` and what goes with it, as written."""

    hostfile: str
    include: str | None = None
    exclude: str | None = None
    ssh: str = "ssh"
    export: tuple[str, ...] = ()
    master_addr: str | None = None
    master_port: int = 0  # 0: a free one of the first host
    variables: Mapping[str, str] = field(default_factory=dict)  # more for the hosts, with values
    rejoin_after: float = (
        REJOIN_AFTER_S  # elastic: seconds between two questions to a lost host; 0: none
    )


@dataclass(frozen=True)
class HostPlace:
    """This launcher's place among the launchers of several hosts. `listener` is the socket of the
    first host where it is open already, and `report` a pipe for the outcome, both descriptors.
    """

    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    listener: int = -1
    report: int = -1


@dataclass(frozen=True)
class RunOptions:
    """A parsed ``zeroshard run`` line; `kind` is script, module or command."""

    script: str
    args: list[str] = field(default_factory=list)
    kind: str = "script"
    nproc: str | None = None
    torchrun: list[str] = field(default_factory=list)
    standalone: bool = True  # all ranks are on this host
    port: int = 0  # where they meet then, 0: a free one
    grace_s: float = DEFAULT_GRACE_S
    # end the job when no rank has made progress for so long; None: say it, and go on
    stall_s: float | None = None
    debug: bool = False
    hosts: HostChoice | None = None  # start launchers there
    place: HostPlace | None = None  # this is one of them
    # when a rank dies go on with the others, down to so many; None: end
    elastic: int | None = None
    as_deepspeed: bool = False  # `import deepspeed` is zeroshard's stand-in in the ranks
    # DeepSpeed's launcher: whether the script gets --local_rank=N; None: its variables neither
    local_rank: bool | None = None
    bind_cores: bool = False  # each rank gets its own part of the host's cores, or of `cores`
    cores: Sequence[int] = ()


def whole(text: str, below: float = math.inf, least: int = 1) -> int:
    """Return the whole number that `text` is. Raises ValueError for any other."""
    if not text.isdecimal() or not least <= int(text) < below:
        raise ValueError(text)
    return int(text)


def _nproc(text: str) -> str:
    return text if text in NPROC_WORDS else str(whole(text))


def _seconds(text: str) -> float:
    if not 0 <= float(text) < 1e6:
        raise ValueError(text)
    return float(text)


OWN = (
    Option("--nproc, --nproc-per-node N", "ranks here: a number, auto, cpu or gpu (default: one per"
           " GPU, else 1)", _nproc,
           must=f"a number of at least 1, or one of {', '.join(NPROC_WORDS)}"),
    Option("--stall-timeout SECONDS", "end the job, with all stacks, when no rank has made progress"
           " (a forward, a step) for so long; 0: never look (default: show the stacks after 600 s)",
           _seconds, dest="stall_s", must="a number of seconds"),
    Option(f"{ELASTIC} [MIN]", "when a rank dies, go on with at least MIN (1) others", whole,
           const=1, must="a number of ranks of at least 1"),
    Option("--as-deepspeed", "let `import deepspeed` be zeroshard's stand-in, also inside"
           " Transformers and Accelerate; no --local_rank is passed, LOCAL_RANK is set"),
    Option("--debug", "show torch's launcher's log and our own tracebacks"),
)  # fmt: skip
HOSTS = (
    Option("--hostfile FILE", "run over ssh on the hosts of FILE (`HOST slots=N`)"),
    Option("--include HOSTS", "of them only these, with these slots: worker-0@worker-1:0,2"),
    Option("--exclude HOSTS", "all but these"),
    Option("--ssh COMMAND", "the ssh program and options of it, as one word: 'ssh -p 2222'"),
    Option("--export NAMES", "more environment variables for them: NAME,..."),
    Option("--rejoin-after SECONDS", f"{ELASTIC} asks a lost host so often whether it is back"
           " (default: 60; 0: never)", _seconds, must="a number of seconds"),
)  # fmt: skip
TORCHRUN = tuple(
    Option(f"{name}{SHORT.get(name, '')}{unit}", text or argparse.SUPPRESS)
    for unit, options in ((" VALUE", TORCHRUN_VALUES), ("", TORCHRUN_FLAGS))
    for name, text in options.items()
)
# of torchrun's options, those that are read here: a port only where this launcher takes it
_GRACE = Option("--shutdown-timeout VALUE", type=_seconds, must="a number of seconds")
_PORT = Option("--master-port VALUE", type=partial(whole, below=65536), must="a port number")
_UNITS = {name: one.unit for one in (*OWN, *HOSTS) for name in one.names} | {"--help": "", "-h": ""}
_ALL_UNITS = _UNITS | dict.fromkeys(TORCHRUN_VALUES, "VALUE") | dict.fromkeys(TORCHRUN_FLAGS, "")
_LONG = {short.strip(", "): name for name, short in SHORT.items()}
RUN = Subcommand(
    "run", "start a script on every rank",
    "zeroshard run --nproc 2 examples/train_gpt.py --steps 100",
    OWN, usage="%(prog)s [--nproc N] [torchrun options] script.py ...", allow_abbrev=False,
    groups={"several hosts": HOSTS, "torchrun options (more: torchrun --help)": TORCHRUN},
    description="Start one process per rank, end them all when one fails, and show the first"
    " failure last.",
)  # fmt: skip


def parse_run(parser: argparse.ArgumentParser, argv: list[str]) -> RunOptions:
    """Parse what follows ``zeroshard run``.

    Raises:
        UsageError: an unknown option, a bad number, a script that is not there.
    """
    options, rest = split_line(
        argv,
        _ALL_UNITS,
        lambda name: name.replace("_", "-") if name.startswith("--") else _LONG.get(name, name),
        REFUSED,
        "the script's own options come after it",
    )
    given = parser.parse_args(joined(options))  # also answers --help
    if not rest:
        raise UsageError("no script given")
    before = {name for name, _ in options}
    words = (token.partition("=")[0] for token in rest[1:])
    late = next((name for name in words if _UNITS.get(name) and name not in before), None)
    if late is not None:  # it may be the script's own
        sys.stderr.write(
            f"zeroshard run: {late} comes after {rest[0]} and goes to it; options of zeroshard run"
            " come before the script\n"
        )
    if given.module and given.no_python:
        raise UsageError("--module and --no-python exclude each other")
    kind = "module" if given.module else "command" if given.no_python else "script"
    check_target(kind, rest[0])
    # from the line, or torchrun's own defaults, which cluster operators set
    given.max_restarts = given.max_restarts or os.environ.get("PET_MAX_RESTARTS")
    places = {
        name: getattr(given, _dest(name)) or os.environ.get(f"PET_{_dest(name).upper()}")
        for name in PLACES_THE_JOB
    }
    named = [name for name, value in places.items() if value is not None]
    if given.standalone and named:
        raise UsageError(f"--standalone and {named[0]} exclude each other")
    hosts = _host_choice(given, named)
    # mpirun, srun or SkyPilot may have started a launcher on each of several hosts
    place, elsewhere = None, set(named) - {"--master-addr", "--master-port"}
    if hosts is None and not given.standalone and not elsewhere:
        place = _mpi_place(given) or _slurm_place(given) or _sky_place(given, places)
    one_host = hosts is None and place is None
    if one_host:
        _check_port(given)
    # a port, and the address of the only node, which Kubeflow names as if it were one of several
    anywhere = ["--master-port"]
    anywhere += ["--master-addr"] * (places["--nnodes"] in ONE_HOST["--nnodes"])
    one_host = one_host and all(
        value is None or name in anywhere or value in ONE_HOST.get(name, ())
        for name, value in places.items()
    )
    _check_elastic(given, is_placed=not one_host and hosts is None)
    ours = {*_UNITS, "--module", "--no-python", "--shutdown-timeout", "--standalone"}
    return made(
        RunOptions,
        given,
        script=rest[0],
        args=rest[1:],
        kind=kind,
        torchrun=joined((name, value) for name, value in options if name not in ours),
        standalone=one_host,
        port=_port(places["--master-port"]) if one_host else 0,
        grace_s=_GRACE.read(given.shutdown_timeout or str(DEFAULT_GRACE_S)),
        hosts=hosts,
        place=place,
    )


def _check_elastic(given: argparse.Namespace, *, is_placed: bool) -> None:
    """Raise UsageError where ``--elastic`` does not go with the other options."""
    if given.elastic is None:
        if given.rejoin_after is not None:
            raise UsageError(f"--rejoin-after goes with {ELASTIC}")
        return
    if given.max_restarts not in (None, "0"):
        raise UsageError(
            f"{ELASTIC} and --max-restarts exclude each other: one goes on with fewer ranks, the"
            " other starts as many again"
        )
    if is_placed:
        raise UsageError(
            f"{ELASTIC} needs one launcher for all ranks: use --nproc on one host, or --hostfile"
        )
    if given.nproc is not None and given.nproc.isdecimal():
        check_least(given.elastic, int(given.nproc))


def check_least(least: int, num_ranks: int) -> None:
    """Raise UsageError where a job of `num_ranks` never has as many as ``--elastic`` asks for."""
    if least > num_ranks:
        raise UsageError(f"{ELASTIC}={least} asks for more ranks than the {num_ranks} there are")


def _host_choice(given: argparse.Namespace, named: list[str]) -> HostChoice | None:
    """Return what the line says about hosts; `named` are its options that place the job."""
    if given.hostfile is None:
        for option in HOSTS:
            if getattr(given, _dest(option.names[0])) is not None:
                raise UsageError(f"{option.names[0]} goes with --hostfile")
        return None
    others = [name for name in named if name not in ("--master-addr", "--master-port")]
    others += ["--nproc"] * (given.nproc is not None) + ["--standalone"] * given.standalone
    others += ["--local-addr"] * (given.local_addr is not None)
    if others:
        raise UsageError(
            f"--hostfile and {others[0]} exclude each other: the hostfile says which hosts there"
            " are, and how many ranks each has"
        )
    if given.max_restarts not in (None, "0"):
        raise UsageError("--hostfile and --max-restarts exclude each other: queue the job again")
    export = tuple(filter(None, (given.export or "").split(",")))
    own = {"ssh": given.ssh or "ssh", "export": export, "master_port": _port(given.master_port)}
    rejoin_after = REJOIN_AFTER_S if given.rejoin_after is None else given.rejoin_after
    return made(HostChoice, given, **own, rejoin_after=rejoin_after)


def _slurm_place(given: argparse.Namespace) -> HostPlace | None:
    step = read_step(os.environ)
    if step is None or step.num_tasks == 1:
        return None
    if step.num_tasks != step.num_nodes:
        raise UsageError(
            f"this step has {step.name}, and zeroshard run needs one task per node: `srun"
            " --ntasks-per-node=1 zeroshard run ...`; with one task per rank start the script"
            " itself, `srun python script.py`, in which zs.init_distributed() reads Slurm's"
            " variables"
        )
    address, port = given.master_addr or step.nodes[0], _port(given.master_port) or step.port
    return HostPlace(step.node_rank, step.num_nodes, address, port)


def _mpi_place(given: argparse.Namespace) -> HostPlace | None:
    task = read_task(os.environ)
    if task is None or task.num_tasks == 1:
        return None
    if task.num_local != 1:
        raise UsageError(
            f"mpirun has started {task.num_local} of {task.num_tasks} tasks on this host, and"
            " zeroshard run needs one per host: `mpirun --map-by ppr:1:node zeroshard run ...`"
            " (Hydra: -ppn 1); with one task per rank start the script itself, `mpirun python"
            " script.py`, in which zs.init_distributed() reads MPI's variables"
        )
    address = given.master_addr or os.environ.get("MASTER_ADDR")
    if address is None:
        raise UsageError(
            f"mpirun has started one task on each of {task.num_tasks} hosts, and does not say which"
            " is the first: --master-addr HOST"
        )
    return HostPlace(task.rank, task.num_tasks, address, _port(given.master_port) or task.port)


def _sky_place(given: argparse.Namespace, places: Mapping[str, str | None]) -> HostPlace | None:
    node = read_node(os.environ)
    if node is None:
        return None
    if node.num_gpus and "PET_NPROC_PER_NODE" not in os.environ:
        given.nproc = given.nproc or str(node.num_gpus)
    address = places["--master-addr"] or node.nodes[0]
    port = _port(places["--master-port"]) or node.port
    return HostPlace(node.rank, len(node.nodes), address, port)


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def check_target(kind: str, target: str) -> None:
    """Raise UsageError for a script or a module that is not here."""
    if kind == "script":
        if not os.path.exists(target):
            raise UsageError(f"script {target!r} not found in {os.getcwd()}")
        if not os.path.isfile(target) or not os.access(target, os.R_OK):
            raise UsageError(f"script {target!r} is not a file that can be read")
    elif kind == "module":
        top = target.partition(".")[0]
        spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
        if spec is None and top not in sys.builtin_module_names:
            raise UsageError(f"module {target!r} not found")


def _port(text: str | None) -> int:
    """Return the port number that `text` is; 0 where none is given."""
    return 0 if text is None else int(_PORT.read(text))


def _check_port(given: argparse.Namespace) -> None:
    """Raise UsageError for a port that is taken, before the rendezvous would time out."""
    is_ours = given.node_rank in (None, "0") and given.rdzv_backend in (None, "static")
    if given.master_port is None or not is_ours:
        return
    port = _port(given.master_port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"--master-port {given.master_port} cannot be used: {error.strerror}; leave it out"
                " to get a free one"
            ) from None


# ---------------------------------------------------------------------------------------- hostfiles
# As DeepSpeed and MPI have them, and the choice of hosts and slots from one.
#
#     # comment
#     worker-0 slots=4
#     worker-1 slots=4
#
# A slot is a place for one rank: device 0, 1, ... of the host. ``--include`` and ``--exclude`` take
# ``HOST[:SLOT,...]`` joined by ``@``: ``worker-0@worker-1:0,2`` is all of worker-0 and two slots of
# worker-1.
#
# Invariant: a hostfile is not trusted. A name that is returned holds letters, digits, dots, dashes
# and underscores only and never begins with a dash, so that it cannot be an option or more than one
# word for any program.

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}", re.ASCII)
_LINE = re.compile(r"(\S+)[ \t]+slots=([1-9][0-9]{0,3})", re.ASCII)
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """A host and the slots of it that take a rank; `num_slots` is how many it has."""

    name: str
    slots: tuple[int, ...]
    num_slots: int

    @property
    def is_whole(self) -> bool:
        """Whether every slot takes a rank."""
        return len(self.slots) == self.num_slots


def read_hosts(path: str) -> list[Host]:
    """Read a hostfile. Raises UsageError, with the line's number, for what it does not say."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"hostfile {path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"hostfile {path}: over {_MAX_BYTES} bytes are no hostfile")
    return parse_hosts(data.decode("utf-8", "replace"), path)


def parse_hosts(text: str, path: str = "hostfile") -> list[Host]:
    """Return the hosts of a hostfile, in its order."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].strip(" \t\r")
        if not words:
            continue
        match = _LINE.fullmatch(words)
        where = f"hostfile {path}, line {number}"
        if match is None:
            raise UsageError(f"{where}: {words[:80]!r} is not of the form HOST slots=N")
        name, count = match[1], int(match[2])
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"{where}: {name[:80]!r} is not a host's name: letters, digits, '.', '_' and '-',"
                " the first no '-' (a user or a port belongs into ~/.ssh/config)"
            )
        if name in hosts:
            raise UsageError(f"{where}: {name} stands there twice")
        hosts[name] = Host(name, tuple(range(count)), count)
    if not hosts:
        raise UsageError(f"hostfile {path} names no host")
    return list(hosts.values())


def choose_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts, in their order, that `include` names or `exclude` leaves.

    Raises:
        UsageError: both are given; a host or a slot that is not there; nothing is left.
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude exclude each other")
    if include is not None:
        named = _named("--include", include, hosts)
        kept = {name: slots for name, slots in named.items() if slots}
    else:
        named = {} if exclude is None else _named("--exclude", exclude, hosts)
        kept = {
            host.name: tuple(slot for slot in host.slots if slot not in named.get(host.name, ()))
            for host in hosts
        }
    chosen = [
        Host(host.name, kept[host.name], host.num_slots) for host in hosts if kept.get(host.name)
    ]
    if not chosen:
        raise UsageError(f"--exclude {exclude} leaves no slot")
    return chosen


def _named(option: str, text: str, hosts: Sequence[Host]) -> Mapping[str, tuple[int, ...]]:
    """Return the slots that a choice names, by host."""
    known = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            raise UsageError(f"{option}: {name!r} is not a host of the hostfile")
        if name in named:
            raise UsageError(f"{option}: {name} stands there twice")
        slots = known[name].slots
        if colon:
            chosen = set()
            for written in numbers.split(","):
                number = written.strip()
                if not (number.isascii() and number.isdecimal()) or int(number) not in slots:
                    last = known[name].num_slots - 1
                    raise UsageError(f"{option}: {name} has no slot {written!r}, only 0 to {last}")
                chosen.add(int(number))
            slots = tuple(sorted(chosen))
        named[name] = slots
    return named
