"""The options of ``zeroshard run``: its own, torchrun's, then the script and its arguments.

torch's own parser takes seconds to import, and a usage error must not. So torchrun's options are
listed here as data; a test compares the table with the parser of the installed torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.machinery
import os
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from zeroshard.core.mpi import read_task
from zeroshard.core.slurm import read_step

__all__ = [
    "ELASTIC", "REFUSED", "TORCHRUN_FLAGS", "TORCHRUN_VALUES", "HostChoice", "LineParser", "Place",
    "RunOptions", "UsageError", "add_run_options", "check_least", "check_target", "parse_run",
]  # fmt: skip

T = TypeVar("T")

DEFAULT_GRACE_S = 3

TORCHRUN_VALUES = {
    "--nnodes": "number of nodes, or a range MIN:MAX",
    "--node-rank": "rank of this node (static rendezvous)",
    "--master-addr": "address of the node with rank 0 (static rendezvous)",
    "--master-port": "port on the node with rank 0 (static rendezvous)",
    "--local-addr": "address of this node, as the others reach it",
    "--rdzv-backend": "rendezvous backend: c10d, static, ...",
    "--rdzv-endpoint": "rendezvous endpoint, HOST:PORT",
    "--rdzv-id": "name of the job, the same on every node",
    "--rdzv-conf": "more rendezvous settings, KEY=VALUE,...",
    "--max-restarts": "how often the whole group is started again after a failure (default 0)",
    "--monitor-interval": "seconds between two looks at the ranks (default 0.1)",
    "--event-log-handler": "torchrun.handlers entry point for events",
    "--role": "name of the ranks' role",
    "--log-dir": "where redirected output goes",
    "--redirects": "redirect stdout (1), stderr (2) or both (3) of all or some ranks into files",
    "--tee": "redirect stdout (1), stderr (2) or both (3) into files and show them, after [rank N]",
    "--local-ranks-filter": "show only these local ranks' output",
    "--duplicate-stdout-filters": "copy matching stdout lines to one file",
    "--duplicate-stderr-filters": "copy matching stderr lines to one file",
    "--logs-specs": "torchrun.logs_specs entry point",
    "--numa-binding": "bind each rank near its GPU: node, socket, exclusive, core-complex",
    "--signals-to-handle": "signals to pass on to the ranks",
    "--shutdown-timeout": (
        f"seconds that ranks have to end after a failure, then SIGKILL (default {DEFAULT_GRACE_S})"
    ),
}
TORCHRUN_FLAGS = {
    "--standalone": (
        "one node, a free port (the default unless a rendezvous, a master or nodes are named)"
    ),
    "--module": "the script is a module's name, as in python -m",
    "--no-python": "the script is a program to be started directly",
    "--virtual-local-rank": "LOCAL_RANK is 0 everywhere and each rank sees its own GPU only",
}
SHORT = {"-m": "--module", "-t": "--tee", "-r": "--redirects"}
REFUSED = {
    "--run-path": "each rank always gets an interpreter of its own, in which the script runs",
    "--start-method": (
        "it only matters for functions, and scripts are always started as fresh processes"
    ),
}
HOST_VALUES = {
    "--hostfile": "run on the hosts of FILE (lines `HOST slots=N`), over ssh",
    "--include": "of them only these, with these slots: worker-0@worker-1:0,2",
    "--exclude": "all but these",
    "--ssh": "the ssh program and options of it, as one word: 'ssh -p 2222'",
    "--export": "more environment variables for the hosts, NAME,... (docs/launching.md)",
}
ELASTIC = "--elastic"  # with a value or without
OWN_VALUES = ("--nproc", "--nproc-per-node", "--stall-timeout", *HOST_VALUES)
OWN_FLAGS = ("--as-deepspeed", "--debug", "--help", "-h")
HOST_WORDS = {
    "--hostfile": "FILE", "--include": "HOSTS", "--exclude": "HOSTS", "--ssh": "COMMAND",
    "--export": "NAMES",
}  # fmt: skip
SHOWN = (  # in --help, of torchrun's
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts", "--log-dir",
    "--tee", "--shutdown-timeout", "--module", "--no-python",
)  # fmt: skip
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

EXAMPLE = "example:\n  zeroshard run --nproc 2 examples/train_gpt.py --steps 100"


class UsageError(Exception):
    """An invalid command line: one line, exit code 2."""


class LineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


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


@dataclass(frozen=True)
class Place:
    """This launcher's place among those of several hosts. `listener` is the socket of the first
    host where it is open already, and `report` a pipe for the outcome, both descriptors.
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
    place: Place | None = None  # this is one of them
    # when a rank dies go on with the others, down to so many; None: end
    elastic: int | None = None
    as_deepspeed: bool = False  # `import deepspeed` is zeroshard's stand-in in the ranks


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``zeroshard run`` on the parser, which also makes its ``--help``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [--nproc N] [torchrun options] script.py ..."
    parser.description = (
        "Start one process per rank, end them all when one fails, and show the first failure last."
    )
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--nproc",
        "--nproc-per-node",
        metavar="N",
        help="ranks here: a number, auto, cpu or gpu (default: one per GPU, else 1)",
    )
    parser.add_argument(
        "--stall-timeout",
        metavar="SECONDS",
        help=(
            "end the job, with all stacks, when no rank has made progress (a forward, a step) for"
            " so long; 0: never look (default: show the stacks after 600 s)"
        ),
    )
    parser.add_argument(
        ELASTIC,
        metavar="MIN",
        nargs="?",
        const="1",
        help="when a rank dies, go on with at least MIN (1) others",
    )
    parser.add_argument(
        "--as-deepspeed",
        action="store_true",
        help=(
            "let `import deepspeed` be zeroshard's stand-in, also inside Transformers and"
            " Accelerate; no --local_rank is passed, LOCAL_RANK is set"
        ),
    )
    debug = "show the log of torch's launcher and our own tracebacks"
    parser.add_argument("--debug", action="store_true", help=debug)
    group = parser.add_argument_group("several hosts")
    for name, text in HOST_VALUES.items():
        group.add_argument(name, metavar=HOST_WORDS.get(name, "VALUE"), help=text)
    group = parser.add_argument_group("torchrun options (more: torchrun --help)")
    names = {long: (long, short) for short, long in SHORT.items()}
    for name, text in {**TORCHRUN_VALUES, **TORCHRUN_FLAGS}.items():
        how: Any = {"metavar": "VALUE"} if name in TORCHRUN_VALUES else {"action": "store_true"}
        shown = text if name in SHOWN else argparse.SUPPRESS
        group.add_argument(*names.get(name, (name,)), help=shown, **how)


def parse_run(parser: argparse.ArgumentParser, argv: list[str]) -> RunOptions:
    """Parse what follows ``zeroshard run``.

    Raises:
        UsageError: an unknown option, a bad number, a script that is not there.
    """
    options, rest = _split(argv)
    given = parser.parse_args(_canonical(options))  # also answers --help
    if not rest:
        raise UsageError("no script given")
    _hint_at_order(options, rest)
    _check_nproc(given.nproc)
    if given.module and given.no_python:
        raise UsageError("--module and --no-python exclude each other")
    if given.as_deepspeed and given.no_python:
        raise UsageError("--as-deepspeed acts on Python scripts: leave out --no-python")
    kind = "module" if given.module else "command" if given.no_python else "script"
    check_target(kind, rest[0])
    # from the line, or torchrun's own defaults, which cluster operators set
    places = {
        name: getattr(given, _dest(name)) or os.environ.get(f"PET_{_dest(name).upper()}")
        for name in PLACES_THE_JOB
    }
    named = [name for name, value in places.items() if value is not None]
    if given.standalone and named:
        raise UsageError(f"--standalone and {named[0]} exclude each other")
    hosts = _host_choice(given, named)
    place = None if hosts is not None else _mpi_place(given, named) or _slurm_place(given, named)
    if hosts is None and place is None:
        _check_port(given)
    one_host = hosts is None and place is None
    one_host = one_host and all(
        value is None or value in ONE_HOST.get(name, ())
        for name, value in places.items()
        if name != "--master-port"
    )
    return RunOptions(
        script=rest[0],
        args=rest[1:],
        kind=kind,
        nproc=given.nproc,
        torchrun=_for_torchrun(options),
        standalone=one_host,
        port=_port(places["--master-port"]) if one_host else 0,
        grace_s=_seconds("--shutdown-timeout", given.shutdown_timeout, DEFAULT_GRACE_S),
        stall_s=_seconds("--stall-timeout", given.stall_timeout, None),
        debug=given.debug,
        hosts=hosts,
        place=place,
        elastic=_elastic(given, is_placed=not one_host and hosts is None),
        as_deepspeed=given.as_deepspeed,
    )


def _elastic(given: argparse.Namespace, *, is_placed: bool) -> int | None:
    """Return the least number of ranks of ``--elastic``; None where it is not given."""
    least = given.elastic
    if least is None:
        return None
    if not least.isdecimal() or int(least) < 1:
        raise UsageError(f"{ELASTIC} must be a number of ranks of at least 1, not {least!r}")
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
        check_least(int(least), int(given.nproc))
    return int(least)


def check_least(least: int, num_ranks: int) -> None:
    """Raise UsageError where a job of `num_ranks` never has as many as ``--elastic`` asks for."""
    if least > num_ranks:
        raise UsageError(f"{ELASTIC}={least} asks for more ranks than the {num_ranks} there are")


def _host_choice(given: argparse.Namespace, named: list[str]) -> HostChoice | None:
    """Return what the line says about hosts; `named` are its options that place the job."""
    if given.hostfile is None:
        alone = next((name for name in HOST_VALUES if getattr(given, _dest(name))), None)
        if alone is not None:
            raise UsageError(f"{alone} goes with --hostfile")
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
    return HostChoice(
        hostfile=given.hostfile,
        include=given.include,
        exclude=given.exclude,
        ssh=given.ssh or "ssh",
        export=tuple(filter(None, (given.export or "").split(","))),
        master_addr=given.master_addr,
        master_port=_port(given.master_port),
    )


def _slurm_place(given: argparse.Namespace, named: list[str]) -> Place | None:
    """Return the place of this launcher, where ``srun`` has started one on each of several nodes
    and the line says nothing else.
    """
    if given.standalone or set(named) - {"--master-addr", "--master-port"}:
        return None
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
    return Place(step.node_rank, step.num_nodes, address, port)


def _mpi_place(given: argparse.Namespace, named: list[str]) -> Place | None:
    """Return the place of this launcher, where ``mpirun`` has started one on each of several hosts
    and the line says nothing else.
    """
    if given.standalone or set(named) - {"--master-addr", "--master-port"}:
        return None
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
    return Place(task.rank, task.num_tasks, address, _port(given.master_port) or task.port)


def _hint_at_order(options: list[tuple[str, str | None]], rest: list[str]) -> None:
    """Warn of an option of ours after the script; it may be the script's own."""
    before = {name for name, _ in options}
    named = (token.partition("=")[0] for token in rest[1:])
    late = next((name for name in named if name in OWN_VALUES and name not in before), None)
    if late is not None:
        sys.stderr.write(
            f"zeroshard run: {late} comes after {rest[0]} and goes to it; options of zeroshard run"
            " come before the script\n"
        )


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _long(name: str) -> str:
    return SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name)


def _split(argv: list[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Split the line into (option, value) pairs and everything from the script on."""
    options: list[tuple[str, str | None]] = []
    index = 0
    while index < len(argv):
        token = argv[index]
        index += 1
        if token == "--":
            return options, argv[index:]
        if not token.startswith("-") or token == "-":
            return options, argv[index - 1 :]
        written, joined, value = token.partition("=")
        name = _long(written)
        if name in TORCHRUN_FLAGS or name in OWN_FLAGS:
            if joined:
                raise UsageError(f"{written} takes no value")
            options.append((name, None))
        elif name in TORCHRUN_VALUES or name in OWN_VALUES:
            if not joined:
                if index == len(argv):
                    raise UsageError(f"{written} needs a value")
                value = argv[index]
                index += 1
            options.append((name, value))
        elif name == ELASTIC:
            options.append((name, value if joined else None))
        else:
            raise UsageError(_unknown(written, name))
    return options, []


def _unknown(written: str, name: str) -> str:
    if name in REFUSED:
        return f"{written} has no place here: {REFUSED[name]}"
    known = [*TORCHRUN_VALUES, *TORCHRUN_FLAGS, *OWN_VALUES, *OWN_FLAGS, ELASTIC]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"unknown option {written}{hint}; the script's own options come after it"


def _canonical(options: list[tuple[str, str | None]]) -> list[str]:
    return [name if value is None else f"{name}={value}" for name, value in options]


def _for_torchrun(options: list[tuple[str, str | None]]) -> list[str]:
    ours = {*OWN_VALUES, *OWN_FLAGS, ELASTIC}
    ours |= {"--module", "--no-python", "--shutdown-timeout", "--standalone"}
    return _canonical([(name, value) for name, value in options if name not in ours])


def _check_nproc(nproc: str | None) -> None:
    if nproc is None or nproc in NPROC_WORDS:
        return
    if not nproc.isdecimal() or int(nproc) < 1:
        raise UsageError(
            f"--nproc must be a number of at least 1, or one of {', '.join(NPROC_WORDS)}, not"
            f" {nproc!r}"
        )


def _seconds(name: str, text: str | None, default: T) -> float | T:
    """Return the number of seconds that `text` is, `default` if it is not given."""
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"{name} must be a number of seconds, not {text!r}")
    return seconds


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
    if text is None:
        return 0
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"--master-port must be a port number, not {text!r}")
    return int(text)


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
