"""``zeroshard run``: torch.distributed.run without orphans, and with the first failure shown last.

The agent is torch's own, so rendezvous, restarts and logs are what torchrun users know. Each rank
is started through ``worker.py``, which makes it end with the launcher and write its failure down; a
:class:`~zeroshard.launch.supervisor.Supervisor` watches the ranks, and the failures are printed
when everything has ended.

A signal to the launcher is passed on to the ranks, which then have ``SIGNAL_GRACE_S`` seconds (or
TORCH_ELASTIC_SHUTDOWN_TIMEOUT) to save. Their exit code is the job's if it is one of the contract
(75: saved, queue me again), else that is 128 + signal. A second Ctrl-C ends them at once.

On one host everything is bound to loopback, and nothing is unpickled (``one_host.py``). Several
hosts use torch's rendezvous (SECURITY.md). Hostfiles and Slurm are not supported yet.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from zeroshard.launch import worker
from zeroshard.launch.leftovers import Janitor
from zeroshard.launch.options import RunOptions, UsageError
from zeroshard.launch.supervisor import (
    CONTRACT_EXIT_CODES,
    EXIT_PREEMPTED,
    EXIT_STALL,
    Failure,
    Supervisor,
    exit_code_of,
)

__all__ = ["launch", "leave"]

# torchrun's own, and Slurm's and Kubernetes' for torchrun; after a failure the Supervisor's counts
SIGNAL_GRACE_S = 30


def launch(options: RunOptions) -> int:
    """Run the script on every rank; return the exit code (0 to 3, 70 to 75, 128 + signal)."""
    begin = time.monotonic()
    with _private_directory() as directory:
        import torch.distributed.run as torchrun

        if not options.debug:
            _silence_torch_launcher()
        arguments = _torchrun_arguments(torchrun, options, directory)
        num_ranks, restarts = int(arguments.nproc_per_node), arguments.max_restarts > 0
        _set_environment(options, directory, num_ranks=num_ranks, restarts=restarts)
        supervisor = Supervisor(
            directory,
            options.grace_s,
            on_restart=_report_restart,
            on_stall=_report_stall,
            stall_s=options.stall_s,
        )
        supervisor.start()
        return _run(torchrun, arguments, supervisor, begin)


@contextmanager
def _private_directory() -> Iterator[str]:
    """Yield a directory with mode 0700, removed at the end even if this process is killed."""
    directory = tempfile.mkdtemp(prefix="zeroshard-run-")
    janitor = Janitor(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        janitor.close()


def leave(exit_code: int) -> NoReturn:
    """End the process without the interpreter's teardown, which takes seconds with torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _run(torchrun: Any, arguments: Any, supervisor: Supervisor, begin: float) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    agent_failures: list[Failure] = []
    statuses: dict[int, int] = {}
    ended_by: signal.Signals | None = None
    try:
        torchrun.run(arguments)
    except ChildFailedError as error:
        statuses = {failure.pid: failure.exitcode for failure in error.failures.values()}
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
    failures = supervisor.failures(statuses) or agent_failures
    if ended_by is not None and not (failures and failures[0].status in CONTRACT_EXIT_CODES):
        _say(f"ended by {ended_by.name}")
        return 128 + ended_by
    if supervisor.stalled:
        return EXIT_STALL
    if not failures:
        return 0
    _report(failures, begin)
    return exit_code_of(failures[0])


def _torchrun_arguments(torchrun: Any, options: RunOptions, directory: str) -> Any:
    """torchrun's namespace for this job. The script's arguments never pass through its parser."""
    line = [*options.torchrun]
    if options.nproc is not None or "PET_NPROC_PER_NODE" not in os.environ:
        line += ["--nproc-per-node", options.nproc or _default_nproc()]
    if "--log-dir" not in "".join(options.torchrun):
        line += ["--log-dir", directory]  # torch makes a directory in any case, and leaves it
    arguments = torchrun.parse_args([*line, worker.__file__])
    try:
        num_ranks = torchrun.determine_local_world_size(arguments.nproc_per_node)
        arguments.nproc_per_node = str(num_ranks)
        torchrun.parse_min_max_nnodes(arguments.nnodes)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from None
    if options.standalone:
        _place_on_this_host(arguments, options.port)
    # torch replaces ${local_rank} and halves every $$ in the arguments; doubled dollars come out as
    # they went in.
    arguments.training_script_args = [
        argument.replace("$", "$$") for argument in (options.kind, options.script, *options.args)
    ]
    return arguments


def _place_on_this_host(arguments: Any, port: int) -> None:
    from zeroshard.launch import one_host

    one_host.register()
    arguments.standalone, arguments.nnodes = False, "1"
    arguments.rdzv_backend, arguments.rdzv_id = one_host.BACKEND, secrets.token_hex(8)
    arguments.rdzv_endpoint = f"{one_host.LOOPBACK}:{port}"
    arguments.local_addr = arguments.local_addr or one_host.LOOPBACK


def _default_nproc() -> str:
    import torch

    return str(max(torch.cuda.device_count(), 1))


def _set_environment(
    options: RunOptions, directory: str, *, num_ranks: int, restarts: bool
) -> None:
    """Set the ranks' environment; the user's own values stay."""
    os.environ[worker.DIRECTORY], os.environ[worker.LAUNCHER_PID] = directory, str(os.getpid())
    grace_s = max(round(options.grace_s), SIGNAL_GRACE_S)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(grace_s))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // num_ranks, 1)))
    if options.standalone:
        os.environ[worker.MEETING] = os.path.join(directory, "meeting")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif restarts:
        # else ranks that start again find the addresses of those before them in the agent's store,
        # and cannot connect
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _silence_torch_launcher() -> None:
    """Silence its log, which repeats our report in forty lines."""
    prefixes = tuple(f"torch.distributed.{name}" for name in ("elastic", "run", "launcher"))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(prefixes):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _say(line: str) -> None:
    sys.stderr.write(f"zeroshard run: {line}\n")
    sys.stderr.flush()


def _report_restart(failures: list[Failure]) -> None:
    for failure in failures[:1]:
        _say(
            f"starting again after rank {failure.rank} failed:"
            f" {failure.how}\n{failure.traceback or failure.message}"
        )


def _report_stall(seconds: float, stacks: dict[int, str], ends: bool) -> None:
    """Say where every rank is, and whether the job ends for it."""
    shown = [
        f"rank {rank}:\n{stack or 'shows no stacks: it is stopped, or waits in the kernel'}"
        for rank, stack in sorted(stacks.items())
    ]
    what = "ended, exit code 71" if ends else "going on; --stall-timeout SECONDS ends such a job"
    fact = f"no rank has made progress for {seconds:.0f} s, its ranks are shown above"
    _say("\n".join([*shown, f"zeroshard run: {fact}: {what}"]))


def _report(failures: list[Failure], begin: float) -> None:
    """Other failures that have something to say, a line each; then the first one, whole, last."""
    first, *others = failures
    for failure in others:
        if failure.stacks:
            _say(f"rank {failure.rank} was here when rank {first.rank} gave up:\n{failure.stacks}")
        if not failure.silent and not (first.left and failure.traceback):
            line = textwrap.shorten(failure.message or failure.how, 160, placeholder=" ...")
            # the first one counts earlier than it was seen, see supervisor.py
            order = "before" if failure.at < first.at else "after"
            when = f"{abs(failure.at - first.at):.2f} s {order} the first"
            _say(f"rank {failure.rank} failed too, {when}: {line}")
    if first.left:
        _report_leaver(first, others, begin)
        return
    if first.status == EXIT_PREEMPTED:
        _say(
            f"preempted {first.at - begin:.2f} s after the start: exit code {EXIT_PREEMPTED},"
            " please queue it again"
        )
        return
    hint = " (often the kernel, out of memory)" if first.status == -signal.SIGKILL else ""
    when = f"{first.at - begin:.2f} s after the start"
    block = f"rank {first.rank} failed first, {when}: {first.how}{hint}"
    _say("\n".join(filter(None, [block, (first.traceback or first.message).rstrip()])))


def _report_leaver(first: Failure, others: list[Failure], begin: float) -> None:
    """Report a rank whose script ended well while the others waited for it."""
    for failure in others:
        if failure.traceback:
            _say(f"rank {failure.rank} waited for rank {first.rank}:\n{failure.traceback.rstrip()}")
    _say(
        f"rank {first.rank} left first, {first.at - begin:.2f} s after the start: its script ended"
        " with exit code 0 while other ranks waited for it. Where one rank has fewer batches than"
        " another, put the loop into `with engine.join():`; make the calls that all ranks take"
        " part in, zs.save() too, on all ranks"
    )
