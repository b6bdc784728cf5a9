"""``zeroshard deepspeed``: the line of DeepSpeed's launcher, run by ``zeroshard run``; and
``zeroshard as-deepspeed``, which runs any command with the stand-in for DeepSpeed.

    zeroshard deepspeed --num_gpus 8 train.py --deepspeed zero.json
    zeroshard deepspeed --hostfile hosts --include worker-0@worker-1:0,2 train.py ...
    zeroshard as-deepspeed accelerate launch --config_file zero3.yaml train.py

`parse` turns the line into one of ``zeroshard run``: one rank per slot, `--local_rank=N` as the
script's first argument, the stand-in under the name ``deepspeed``. Options mean what they mean
there (deepspeed/launcher/runner.py, 0.19); the options that have no meaning here are refused with
the line to use, none is dropped. Its one default that is another: a port that is free, not 29500.

A hostfile goes over ssh, in place of pdsh, where it leaves more than one host, or one that is not
this machine.
"""

from __future__ import annotations

import argparse
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.deepspeed.shim import DEEPSPEED_ENVIRONMENT_NAME, VERSION, write_distribution
from zeroshard.launch.options import (
    Host,
    HostChoice,
    HostPlace,
    RunOptions,
    check_target,
    choose_hosts,
    read_hosts,
    whole,
)
from zeroshard.launch.outcome import say
from zeroshard.system.device import VISIBLE_DEVICES
from zeroshard.system.this_host import rank_variables
from zeroshard.terminal import Option, Subcommand, UsageError, joined, split_line

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500  # where launchers that do not know each other meet
_COUNT = "a number of at least 1"
_OPTIONS = (
    Option("--num_gpus, --num_accelerators N", "ranks of each host, on its devices 0 to N - 1; on a"
           " machine without a device N ranks on the CPU", whole, must=_COUNT),
    Option("--num_nodes N", "the first N hosts of the hostfile", whole, must=_COUNT),
    Option("--hostfile, -H FILE", "run on the hosts of FILE (lines `HOST slots=N`), over ssh"
           f" (default: {DEFAULT_HOSTFILE} where it exists)"),
    Option("--include, -i HOSTS", "only these hosts and slots: worker-0@worker-1:0,2, or"
           " localhost:1,3"),
    Option("--exclude, -e HOSTS", "all but these"),
    Option("--master_addr HOST", "where the first host listens (default: its name)"),
    Option("--master_port N", "the port there (default: a free one)", partial(whole, below=65536),
           must="a port number"),
    Option("--module", "the script is a module's name, as in python -m"),
    Option("--no_python", "the script is a program to be started directly"),
    Option("--no_local_rank", "pass no --local_rank=N to the script"),
    Option("--no_ssh", "each host has its own line, with its --node_rank"),
    Option("--node_rank N", "this host's place in the hostfile, with --no_ssh",
           partial(whole, least=0), must="a number of at least 0"),
    Option("--force_multi", "go over ssh to a single host, too"),
    Option("--ssh_port N", "the port of the hosts' sshd", partial(whole, below=65536),
           must="a port number"),
    Option("--no_ssh_check", "no host is tried before the job in any case"),
    Option("--launcher NAME", "pdsh, which is ssh here"),
    Option("--bind_cores_to_rank", "give each rank its own cores of the host"),
    Option("--bind_core_list LIST", "of these cores: 0,2-5"),
    Option("--enable_each_rank_log DIR", "write each rank's output into a folder of DIR"),
)  # fmt: skip
COMMAND = Subcommand(
    "deepspeed", "DeepSpeed's launcher: the same line, on this library",
    "zeroshard deepspeed --num_gpus 8 train.py --deepspeed zero.json",
    _OPTIONS, usage="%(prog)s [options] script.py ...", allow_abbrev=False,
    description="Take DeepSpeed's launch line; `import deepspeed` is zeroshard's stand-in.",
)  # fmt: skip
_ELASTIC = "zeroshard run --elastic --as-deepspeed ... goes on without ranks and hosts that die"
_SLURM = "srun zeroshard as-deepspeed python train.py ..."
REFUSED = {
    "--elastic_training": _ELASTIC,
    "--min_elastic_nodes": _ELASTIC,
    "--max_elastic_nodes": _ELASTIC,
    "--autotuning": "zeroshard plan says which configurations fit",
    "--launcher_args": "options of ssh belong into ~/.ssh/config, or into --ssh of"
    " zeroshard run --as-deepspeed --hostfile ...",
    "--comment": f"it is Slurm's: {_SLURM}",
    "--account": f"it is Slurm's: {_SLURM}",
    "--save_pid": "the launcher is the process that the line starts, $! of the shell",
    "--venv_script": "hosts start the interpreter that runs this line, by its path",
}
_LAUNCHERS = {
    "slurm": _SLURM,
    **dict.fromkeys(
        ("openmpi", "mvapich", "mpich", "impi"), "mpirun zeroshard as-deepspeed python train.py ..."
    ),
}
_UNITS = {name: one.unit for one in _OPTIONS for name in one.names} | {"--help": "", "-h": ""}
_LONG = {name: one.names[0] for one in _OPTIONS for name in one.names if not name.startswith("--")}


@dataclass(frozen=True)
class Line:
    """A line of DeepSpeed's launcher as ``zeroshard run`` takes it: on `hosts`, where there are
    any, else here, on the `devices` of this machine that it names.
    """

    options: RunOptions
    hosts: Sequence[Host] = ()
    devices: Sequence[int] = ()


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> Line:
    """Return what the words after ``zeroshard deepspeed`` mean.

    Raises:
        UsageError: an unknown or refused option, a host or slot that is not there, no script.
    """
    pairs, rest = split_line(
        argv,
        _UNITS,
        lambda name: _LONG.get(name) or name[:2] + name[2:].replace("-", "_"),
        REFUSED,
        "the script's own options come after it, and options of zeroshard run are for zeroshard run"
        " --as-deepspeed",
    )
    given = parser.parse_args(joined(pairs))  # also answers --help
    if not rest:
        raise UsageError("deepspeed: no script given")
    if given.module and given.no_python:
        raise UsageError("--module and --no_python exclude each other")
    counted = given.num_gpus or given.num_nodes
    if counted and (given.include or given.exclude):
        raise UsageError("--num_gpus and --num_nodes do not go with --include and --exclude")
    launcher = (given.launcher or "pdsh").lower()
    if launcher != "pdsh":
        use = _LAUNCHERS.get(launcher, "--hostfile FILE goes over ssh")
        raise UsageError(f"--launcher {launcher} has no place here: {use}")
    if given.bind_core_list and not given.bind_cores_to_rank:
        raise UsageError("--bind_core_list goes with --bind_cores_to_rank")
    if (given.node_rank is not None) != given.no_ssh:
        raise UsageError("--no_ssh and --node_rank N go together")
    kind = "module" if given.module else "command" if given.no_python else "script"
    check_target(kind, rest[0])
    log = given.enable_each_rank_log
    options: dict[str, Any] = {
        "script": rest[0],
        "args": rest[1:],
        "kind": kind,
        "torchrun": [] if log is None else ["--redirects=3", f"--log-dir={log}"],
        "as_deepspeed": True,
        "local_rank": not given.no_local_rank,
        "bind_cores": given.bind_cores_to_rank,
        "cores": _numbers("--bind_core_list", given.bind_core_list or ""),
    }
    return _placed(given, options)


# ------------------------------------------------------------------ where the ranks are


def _placed(given: argparse.Namespace, options: dict[str, Any]) -> Line:
    """Return the line with the place of its ranks: here, on hosts over ssh, one of several hosts
    without ssh.
    """
    path = given.hostfile or (DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None)
    port = given.master_port or 0
    if path is None:
        if given.no_ssh or given.force_multi or (given.num_nodes or 1) > 1:
            raise UsageError("several hosts need --hostfile FILE, with lines `HOST slots=N`")
        devices: Sequence[int] = range(given.num_gpus or 0)  # none: all there are
        if given.include is not None or given.exclude is not None:
            count = _num_devices() or os.cpu_count() or 1
            here = Host("localhost", tuple(range(count)), count)
            devices = choose_hosts([here], given.include, given.exclude)[0].slots
        nproc = str(len(devices)) if devices else None
        return Line(RunOptions(**options, nproc=nproc, port=port), devices=devices)
    hosts = list(_chosen(given, path))
    if given.no_ssh:
        if given.node_rank >= len(hosts):
            raise UsageError(f"--node_rank {given.node_rank}: there are {len(hosts)} host(s)")
        own, master = hosts[given.node_rank], given.master_addr or hosts[0].name
        place = HostPlace(given.node_rank, len(hosts), master, port or DEFAULT_PORT)
        options |= {"nproc": str(len(own.slots)), "standalone": False, "place": place}
        return Line(RunOptions(**options), devices=own.slots)
    ours = ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())
    if len(hosts) == 1 and hosts[0].name in ours and not given.force_multi:
        slots = hosts[0].slots
        return Line(RunOptions(**options, nproc=str(len(slots)), port=port), devices=slots)
    ssh = "ssh" if given.ssh_port is None else f"ssh -p {given.ssh_port}"
    choice = HostChoice(
        path, ssh=ssh, master_addr=given.master_addr, master_port=port, variables=exported()
    )
    return Line(RunOptions(**options, standalone=False, hosts=choice), hosts)


def _chosen(given: argparse.Namespace, path: str) -> Iterator[Host]:
    """Yield the hosts of the hostfile, with the slots, that the line names."""
    hosts = choose_hosts(read_hosts(path), given.include, given.exclude)
    for host in hosts[: given.num_nodes]:
        num = given.num_gpus or len(host.slots)
        if num > host.num_slots:
            raise UsageError(f"--num_gpus {num}: {host.name} has slots={host.num_slots} in {path}")
        yield host if given.num_gpus is None else Host(host.name, host.slots[:num], host.num_slots)


def take_devices(devices: Sequence[int]) -> None:
    """Show the ranks these devices of this machine, as far as it has any, and say so where it has
    none. Raises UsageError for one that is not there.
    """
    if not devices:
        return
    count = _num_devices()
    if count == 0:
        say(f"this machine has no accelerator: {len(devices)} rank(s) on the CPU")
        return
    if max(devices) >= count:
        raise UsageError(f"device {max(devices)} is not there: this machine has {count}")
    slots = ",".join(map(str, devices))
    os.environ.update(dict.fromkeys(VISIBLE_DEVICES.values(), slots))


def _num_devices() -> int:
    """Return how many devices this machine has, visible or not: the line names them by their number
    among all, as DeepSpeed's does.
    """
    for name in VISIBLE_DEVICES.values():
        if (before := os.environ.pop(name, None)) is not None:
            say(f"{name}={before} gives way to the devices that the line names")
    import torch

    return torch.accelerator.device_count()


def exported() -> Mapping[str, str]:
    """Return the variables for other hosts: from ``.deepspeed_env`` in the home directory, then in
    this one, and this directory in PYTHONPATH. Raises UsageError for a line without a `=`.
    """
    found: dict[str, str] = {}
    # once where the name is a whole path
    for path in dict.fromkeys(one / DEEPSPEED_ENVIRONMENT_NAME for one in (Path.home(), Path())):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="surrogateescape").splitlines(), 1):
            variable, sign, value = line.partition("=")
            if not line.strip() or line.startswith("#"):
                continue
            if not sign or not variable.strip():
                raise UsageError(f"{path}, line {number} is not of the form NAME=VALUE")
            found[variable.strip()] = value
        say(f"variables of {path} go to the hosts: {', '.join(sorted(found))}")
    paths = found.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), paths)))}


# ------------------------------------------------------------------ words


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as 0,2-5."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{option}: {part!r} is no number or range such as 2-5")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


# --------------------------------------------------------------------------- zeroshard as-deepspeed
# A command with Python processes that find the stand-in for DeepSpeed, as ``env`` and ``nice``
# start a command.
#
#     zeroshard as-deepspeed bash train.sh          # which says `deepspeed --num_gpus=8 ...`
#     srun --ntasks-per-node=8 zeroshard as-deepspeed python train.py --deepspeed zero.json
#
# One folder of this package goes first in ``PYTHONPATH``, and the folder `bin` in it first in
# ``PATH``. It holds a module ``deepspeed`` that becomes the stand-in when it is imported, the
# METADATA of a distribution of that name, and a program ``deepspeed``, which is ``zeroshard
# deepspeed``. Nothing is installed, and processes that are not the command's see nothing of it.
#
# If srun or mpirun has started this process as one of several, the command also gets the variables
# that torchrun would set: programs look for RANK, and few of them for Slurm's and MPI's own. This
# process becomes the command: no process stands between it and whoever sends signals.

PYTHON = "ZEROSHARD_PYTHON"  # the interpreter of the program `deepspeed`
AS_DEEPSPEED = Subcommand(
    "as-deepspeed", "run a command in which `import deepspeed` is zeroshard's stand-in",
    "zeroshard as-deepspeed accelerate launch --config_file zero3.yaml train.py\n"
    "zeroshard as-deepspeed torchrun --nproc-per-node 8 train.py --deepspeed zero.json\n"
    "srun --ntasks-per-node=8 zeroshard as-deepspeed python train.py --deepspeed zero.json",
    usage="%(prog)s COMMAND ...",
    description="Run COMMAND so that its Python processes find the stand-in for DeepSpeed, and its"
    "\nshells a program `deepspeed`, which is `zeroshard deepspeed`. Nothing is installed.",
)  # fmt: skip
_ON_PATH = Path(__file__).resolve().parents[1] / "deepspeed" / "on_path"


def become(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Become the command ``argv``. Raises UsageError where there is none, or no such program."""
    words = argv[1:] if argv[:1] == ["--"] else argv
    if not words or (words is argv and words[0].startswith("-")):
        parser.parse_args(words)  # --help, and options: there are no others
        raise UsageError("as-deepspeed: no command given")
    environ = environment_of_stand_in(os.environ)
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        raise UsageError(f"as-deepspeed: {words[0]}: {error.strerror}") from None


def environment_of_stand_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the stand-in in its paths, and the variables of one rank of several.

    Raises:
        ConfigError: mpirun has not said where the ranks meet, or which of them this is.
    """
    return {
        **environ,
        **rank_variables(environ),
        "PYTHONPATH": on_python_path(environ),
        "PATH": _first(environ.get("PATH", os.defpath), _ON_PATH / "bin"),
        PYTHON: sys.executable,
    }


def on_python_path(environ: Mapping[str, str]) -> str:
    """Return ``PYTHONPATH`` with the stand-in's folder before all others, and the folder of its
    distribution, which programs ask importlib.metadata for. That one is written here: a wheel with
    a distribution beside its own would look like two. Raises UsageError where another user has
    taken the folder's name in the temporary directory.
    """
    home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "zeroshard" / f"as-deepspeed-{VERSION}"
    try:
        write_distribution(folder)
    except OSError:  # a home that is read-only, or none: one folder for all runs, which nobody
        # else can write, since Python imports from it
        folder = Path(tempfile.gettempdir()) / f"zeroshard-as-deepspeed-{VERSION}-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        there = folder.lstat()
        is_own = stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()
        if not is_own or there.st_mode & 0o077:
            raise UsageError(
                f"{folder} is not a folder of uid {os.geteuid()} with mode 0700: remove it, or let"
                " XDG_CACHE_HOME name a folder that can be written"
            ) from None
        write_distribution(folder)
    return _first(environ.get("PYTHONPATH", ""), _ON_PATH, folder)


def _first(path: str, *folders: Path) -> str:
    """Return a path of folders that begins with `folders`, each once."""
    others = filter(None, path.split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([*map(str, folders), *others]))
