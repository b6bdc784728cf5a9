"""``zeroshard run``: torch.distributed.run without orphans, and with the first failure shown last.

The agent is torch's own, so rendezvous, restarts and logs are what torchrun users know. Each rank
is started through ``worker.py``, which makes it end with the launcher and write its failure down; a
:class:`~zeroshard.launch.supervisor.Supervisor` watches the ranks, and the failures are printed
when everything has ended.

A signal to the launcher is passed on to the ranks, which then have ``SIGNAL_GRACE_S`` seconds (or
TORCH_ELASTIC_SHUTDOWN_TIMEOUT) to save. Their exit code is the job's if it is one of the contract
(75: saved, queue me again), else that is 128 + signal. A second Ctrl-C ends them at once.

On one host everything is bound to loopback. With a hostfile (``hosts.py``), under Slurm and under
SkyPilot one such launcher runs on each host. How they meet (``agent_rendezvous.py``) unpickles
nothing; torch's own rendezvous, where it is asked for, does (SECURITY.md).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from zeroshard.launch import deepspeed_line, elastic, worker
from zeroshard.launch.leftovers import Janitor
from zeroshard.launch.options import RunOptions, check_least
from zeroshard.launch.outcome import Outcome, report_restart, report_stall, say
from zeroshard.launch.supervisor import Failure, Supervisor
from zeroshard.system.device import allocator_setting
from zeroshard.system.this_host import interface_towards
from zeroshard.terminal import UsageError

# torchrun's own, and Slurm's and Kubernetes' for torchrun; after a failure the Supervisor's counts
SIGNAL_GRACE_S = 30
THREADS = "OMP_NUM_THREADS"


def launch(options: RunOptions) -> int:
    """Run the script on every rank; return the exit code (0 to 3, 70 to 75, 128 + signal)."""
    begin = time.monotonic()
    if options.elastic is not None and options.place is None:
        return elastic.launch(options, run_ranks)
    outcome, _ = run_ranks(options)
    if options.place is not None and options.place.report >= 0:
        with open(options.place.report, "w") as report:
            json.dump(outcome.to_json(), report)
    else:
        outcome.tell(begin)
    return outcome.exit_code


def run_ranks(options: RunOptions) -> tuple[Outcome, int]:
    """Run the script on every rank of this host; return how it ended, and how many ranks it had."""
    with ExitStack() as leaving:
        # with mode 0700; the janitor removes it even if this process is killed
        directory = tempfile.mkdtemp(prefix=worker.RUN_FOLDER)
        leaving.callback(Janitor(directory).close)
        leaving.callback(shutil.rmtree, directory, ignore_errors=True)
        import torch.distributed.run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if not options.debug:
            # its log repeats our report in forty lines
            prefixes = tuple(f"torch.distributed.{name}" for name in ("elastic", "run", "launcher"))
            for name in list(logging.root.manager.loggerDict):
                if name.startswith(prefixes):
                    logging.getLogger(name).setLevel(logging.CRITICAL)
        arguments = _torchrun_arguments(torchrun, options, directory)
        num_ranks, restarts = int(arguments.nproc_per_node), arguments.max_restarts > 0
        if options.elastic is not None and options.place is None:
            check_least(options.elastic, num_ranks)
        _set_environment(options, directory, num_ranks=num_ranks, restarts=restarts)
        with _children_of_the_agent() as children:
            supervisor = Supervisor(
                directory,
                options.grace_s,
                children,
                on_restart=report_restart,
                on_stall=report_stall,
                stall_s=options.stall_s,
            )
            supervisor.start()
            agent_failures: list[Failure] = []
            ended_by: signal.Signals | None = None
            try:
                torchrun.run(arguments)  # type: ignore[no-untyped-call]
            except ChildFailedError as error:
                agent_failures = [
                    Failure(rank, failure.pid, time.monotonic(), failure.exitcode)
                    for rank, failure in error.failures.items()
                ]
            except SignalException as error:
                ended_by = signal.Signals(error.sigval)
            except KeyboardInterrupt:
                ended_by = signal.SIGINT
            finally:
                supervisor.stop()
        failures = supervisor.failures() or agent_failures
        return Outcome(failures, supervisor.leavers(), ended_by, supervisor.stalled), num_ranks


@contextmanager
def _children_of_the_agent() -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Yield the processes that torch's agent starts, by process id, as they come. The agent tells
    their exit codes only where it ends by itself, and a signal may end it.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    children: dict[int, subprocess.Popen[bytes]] = {}
    begin = SubprocessHandler.__init__

    def start(handler: SubprocessHandler, *args: Any, **options: Any) -> None:
        begin(handler, *args, **options)
        children[handler.proc.pid] = handler.proc

    SubprocessHandler.__init__ = start  # type: ignore[assignment, method-assign]
    try:
        yield children
    finally:
        SubprocessHandler.__init__ = begin  # type: ignore[method-assign]


def leave(exit_code: int) -> NoReturn:
    """End the process without the interpreter's teardown, which takes seconds with torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _torchrun_arguments(torchrun: Any, options: RunOptions, directory: str) -> Any:
    """torchrun's namespace for this job. The script's arguments never pass through its parser."""
    line = [*options.torchrun]
    if options.nproc is not None:
        line += ["--nproc-per-node", options.nproc]
    elif "PET_NPROC_PER_NODE" not in os.environ:
        import torch

        line += ["--nproc-per-node", str(max(torch.accelerator.device_count(), 1))]
    if "--log-dir" not in "".join(options.torchrun) and "PET_LOG_DIR" not in os.environ:
        line += ["--log-dir", directory]  # torch makes a directory in any case, and leaves it
    arguments = torchrun.parse_args([*line, worker.__file__])
    try:
        num_ranks = torchrun.determine_local_world_size(arguments.nproc_per_node)
        arguments.nproc_per_node = str(num_ranks)
        torchrun.parse_min_max_nnodes(arguments.nnodes)
    except (ValueError, RuntimeError) as error:
        word = arguments.nproc_per_node
        if word in ("gpu", "xpu"):
            raise UsageError(
                f"--nproc {word}: torch finds no {word.upper()} on this machine (`zeroshard doctor`"
                " says what it finds); --nproc N starts N ranks on its CPUs"
            ) from None
        raise UsageError(str(error)) from None
    place = options.place
    if place is not None or options.standalone:
        # the agents of the job meet at `place`, or this one alone on loopback
        from zeroshard.launch import agent_rendezvous as rendezvous

        if place is not None and arguments.max_restarts:
            raise UsageError(
                "--max-restarts is for one host: on several, queue the job again and load its last"
                " checkpoint"
            )
        rendezvous.register(place)
        arguments.standalone, arguments.rdzv_backend = False, rendezvous.BACKEND
        arguments.nnodes, arguments.rdzv_id = "1", secrets.token_hex(8)
        arguments.rdzv_endpoint = f"{rendezvous.LOOPBACK}:{options.port}"
        if place is None:
            arguments.local_addr = arguments.local_addr or rendezvous.LOOPBACK
        else:
            arguments.nnodes, arguments.rdzv_id = str(place.num_nodes), "zeroshard"
            arguments.rdzv_endpoint = f"{place.master_addr}:{place.master_port}"
    # torch replaces ${local_rank} and halves every $$ in the arguments; doubled dollars come out as
    # they went in.
    arguments.training_script_args = [
        argument.replace("$", "$$") for argument in (options.kind, options.script, *options.args)
    ]
    return arguments


def _set_environment(
    options: RunOptions, directory: str, *, num_ranks: int, restarts: bool
) -> None:
    """Set the ranks' environment; the user's own values stay."""
    os.environ[worker.DIRECTORY], os.environ[worker.LAUNCHER_PID] = directory, str(os.getpid())
    grace_s = max(round(options.grace_s), SIGNAL_GRACE_S)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(grace_s))
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")  # of --tee
    if options.bind_cores:
        # each rank takes its own part of these cores of the host, or of all (worker.py)
        try:
            os.sched_setaffinity(0, options.cores or os.sched_getaffinity(0))
        except OSError:
            raise UsageError(
                f"--bind_core_list: cores {list(options.cores)} are not all there"
            ) from None
        num_cores = len(os.sched_getaffinity(0))
        if num_cores < num_ranks:
            raise UsageError(f"--bind_cores_to_rank: {num_cores} core(s) for {num_ranks} ranks")
        os.environ[worker.BIND_CORES] = "1"
    for setting in settings_for(os.environ, num_ranks=num_ranks):
        os.environ[setting.name] = setting.value
        say(str(setting))
    if options.as_deepspeed:
        os.environ[worker.AS_DEEPSPEED] = "1"  # in the ranks, before all that lies on any path
        os.environ["PYTHONPATH"] = deepspeed_line.on_python_path(os.environ)  # in what they start
    if options.local_rank is not None:
        os.environ[worker.LOCAL_RANK] = str(int(options.local_rank))
    if options.place is not None:
        interface = interface_towards(options.place.master_addr)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif options.standalone:
        os.environ[worker.MEETING] = os.path.join(directory, "meeting")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif restarts:
        # else ranks that start again find the addresses of those before them in the agent's store,
        # and cannot connect
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@dataclass(frozen=True)
class Setting:
    """An environment variable of ranks, its value, and the reason in a line."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.reason}"


def settings_for(environ: Mapping[str, str], *, num_ranks: int) -> Iterator[Setting]:
    """Yield the settings that suit `num_ranks` ranks on this machine and that `environ` lacks.

    Nothing is set for malloc: no step of ours has been measured to gain from it.
    """
    if THREADS not in environ:
        yield threads_of(num_ranks)
    if (setting := allocator_setting(environ)) is not None:
        yield Setting(*setting)


def threads_of(num_ranks: int) -> Setting:
    """Return how many threads each of `num_ranks` ranks of this host gets. Bits depend on it, so it
    stays as it is when a job goes on with another number of ranks.
    """
    cores = len(os.sched_getaffinity(0))
    reason = f"{cores} core(s) for {num_ranks} rank(s)"
    return Setting(THREADS, str(max(cores // num_ranks, 1)), reason)
