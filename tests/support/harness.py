"""Real processes for distributed tests: pools that live for the whole pytest session, and fresh
processes for tests about death.

:func:`run_ranks` calls one function on every rank of a persistent pool (interpreter, torch and the
gloo group are paid for once per world size), :func:`spawn_ranks` on processes of their own that may
be killed. Both find the function by importing its module, so it must stand at the top level of a
test module. A test that only does so, and checks what each rank has, is itself that function
(:func:`on_ranks`). All of them are forked off two processes that have imported torch (zygote.py).

Invariant: a pool that is handed out is in step. Whatever puts that in doubt (a rank that died,
hung, destroyed its group, or failed and then missed a barrier) ends the pool by process id, and the
next call builds another.

Cost: about 5 s for the first call, tenths of a second for a rank, about 2 ms for each call of a
pool.

What it does not do: isolate tests that share a pool from each other's module globals. The
environment, torch's thread count and its default dtype are put back after each call; anything else
a test changes is the test's to restore.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, BinaryIO

from tests.support.zygote import Forked, Nursery, Zygote

NUM_ZYGOTES = 2  # neighbours differ in the seed of their hashes
ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0
PEER_GRACE_S = 5.0  # how long the other ranks may go on after the first one failed
MIN_MORE_S = 0.1  # a limit is not extended by less
BARRIER_TIMEOUT_S = 2.0
GROUP_TIMEOUT_S = 300.0
NUM_OUTPUT_LINES = 40
PLAIN = (
    "cuda:gloo"  # backends of a group that serves no CPU tensors, as `init_process_group("nccl")`
)
_OF_RANKS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class RankFailure:
    """Why one rank did not return a value. ``bases`` are the names of the exception's classes,
    its own first.
    """

    rank: int
    type_name: str
    message: str
    traceback: str = ""
    bases: tuple[str, ...] = ()
    at_s: float = 0.0  # seconds since the call began


class RankError(AssertionError):
    """At least one rank failed. ``rank``, ``type_name`` and ``message`` are those of the first
    failure by time; ``errors`` has them all.
    """

    def __init__(self, errors: dict[int, RankFailure], output: str = "") -> None:
        self.errors = errors
        self.first = min(errors.values(), key=lambda failure: failure.at_s)
        self.rank, self.type_name, self.message = (
            self.first.rank,
            self.first.type_name,
            self.first.message,
        )
        parts = [f"{len(errors)} rank(s) failed, rank {self.rank} first"]
        for failure in sorted(errors.values(), key=lambda failure: failure.at_s, reverse=True):
            parts.append(
                f"--- rank {failure.rank} after {failure.at_s:.2f} s: {failure.type_name}:"
                f" {failure.message}\n{failure.traceback}"
            )
        super().__init__("\n".join(parts) + output)


@dataclass(frozen=True)
class ProcessResult:
    """How a fresh process ended. ``exitcode`` is negative for a signal; ``result`` is what the
    function returned, if it did.
    """

    exitcode: int
    stdout: str
    stderr: str
    seconds: float
    result: Any = None
    error: RankFailure | None = None


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies, also by SIGKILL."""
    # 1 is PR_SET_PDEATHSIG
    if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent died before the request
        os._exit(1)


def is_running(pid: int) -> bool:
    """Return whether the process `pid` is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ------------------------------------------------------------------------------------ in the worker


def _describe(rank: int, error: BaseException, at_s: float) -> RankFailure:
    lines = traceback.format_exception(error)
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        # pytest rewrites asserts only in its own process, so show the values that stood beside the
        # one that failed.
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        lines.append("locals of the last frame:\n")
        lines += [f"    {name} = {_short_repr(value)}\n" for name, value in frame.f_locals.items()]
    bases = tuple(cls.__name__ for cls in type(error).__mro__)
    return RankFailure(rank, type(error).__name__, str(error), "".join(lines), bases, at_s)


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= 200 else text[:200] + " ..."


def _call(rank: int, world_size: int, payload: bytes) -> bytes:
    """Run one job; the reply is a pickled (result, RankFailure | None)."""
    import torch

    environment, dtype = dict(os.environ), torch.get_default_dtype()
    begin = time.monotonic()
    result, failure = None, None
    try:
        function, args = pickle.loads(payload)
        result = function(rank, world_size, *args)
        reply = pickle.dumps((result, None))
    except (Exception, SystemExit) as error:
        failure = _describe(rank, error, time.monotonic() - begin)
        traceback.clear_frames(error.__traceback__)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
    if failure is not None:
        gc.collect()
        reply = pickle.dumps((None, failure))
    return reply


def _in_step() -> bool:
    """Whether every rank of the group answers within the short timeout."""
    from datetime import timedelta

    import torch.distributed as dist

    assert dist.group.WORLD is not None
    served = min(dist.group.WORLD._device_types, key=lambda one: one.type != "cpu")
    gloo: Any = dist.group.WORLD._get_backend(served)
    try:
        gloo.monitored_barrier(timeout=timedelta(seconds=BARRIER_TIMEOUT_S))
    except Exception:
        return False
    return True


def _register(device: str, rank: int) -> str:
    """Import the module that `device` names, if it does, and let it give `rank` its device; return
    the backends of a process group, which `device` may name, alone or behind the module.
    """
    import torch
    import torch.distributed as dist

    module, _, backends = device.rpartition(" ") if ":" in device else (device, "", "")
    if module:
        loaded = importlib.import_module(module)
        if hasattr(loaded, "take_rank"):
            loaded.take_rank(rank)
    if not module or backends:
        return backends or "gloo"
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, device
    return f"cpu:gloo,{accelerator}:{dist.get_default_backend_for_device(accelerator)}"


def _init_group(connection: Connection, rank: int, world_size: int, backend: str) -> None:
    """Rank 0 opens the store on a port the system chooses and tells it to the parent, which
    tells the others.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout
        )
        connection.send_bytes(str(store.port).encode())
        connection.recv_bytes()
    else:
        store = dist.TCPStore(
            "127.0.0.1", int(connection.recv_bytes()), world_size, is_master=False, timeout=timeout
        )
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(store.port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _drop_groups() -> None:
    """Destroy the process groups that the job before has made: each has a thread of gloo's that
    wakes a hundred times a second. All ranks have ended that job.
    """
    import torch.distributed as dist

    if dist.is_initialized() and len(dist.distributed_c10d._world.pg_map) > 1:
        if "torch.distributed.tensor" in sys.modules:
            _clear_caches_of_dtensor()
        made = sys.modules.get("zeroshard.comm.groups")  # which has a group beside one of no CPU
        kept = {dist.group.WORLD, *(made._beside.values() if made else ())}
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in kept:
                dist.destroy_process_group(group)
        gc.collect()


def _clear_caches_of_dtensor() -> None:
    """Its caches keep meshes, and these their groups. One of them is of a thread: backwards on a
    device have their own.
    """
    import torch

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
            torch._C._clear_DTensor_sharding_propagator_cache()
            return grads[0]

    torch._C._clear_DTensor_sharding_propagator_cache()
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        InBackward.apply(torch.zeros((), device=device, requires_grad=True)).backward()
    dispatcher = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            vars(module).get("_planner_cache", {}).clear()
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for holder in (module, *classes):
                for value in list(vars(holder).values()):
                    cached = getattr(value, "__func__", value)
                    if isinstance(cached, functools._lru_cache_wrapper):
                        cached.cache_clear()


def worker_main(
    fd: int, parent_pid: int, rank: int, world_size: int, init_group: bool, device: str = ""
) -> None:
    """Serve jobs from the parent until it closes the connection. `device`: a module that registers
    the device which this process has.
    """
    die_with_parent(parent_pid)
    # A thread that wakes does not take the core from one that holds what it needs: gloo's would
    # spin until that one runs again.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(fd)
    import torch.distributed as dist

    backend = _register(device, rank)
    if init_group:
        _init_group(connection, rank, world_size, backend)
    connection.send_bytes(b"ready")
    while True:
        try:
            kind, paths, payload = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        if kind == "call":
            sys.path.extend(path for path in paths if path not in sys.path)
            _drop_groups()
            reply = _call(rank, world_size, payload)
            alive = not init_group or dist.is_initialized()
        else:
            reply, alive = pickle.dumps((_in_step(), None)), True
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(b"\1" if alive else b"\0")
        connection.send_bytes(reply)
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------ in the parent


@dataclass
class _Worker:
    """One process of ours: its end of the pipe and the files its output goes to."""

    rank: int
    process: subprocess.Popen[bytes] | Forked
    connection: Connection
    stdout: BinaryIO
    stderr: BinaryIO
    # where the output of the current job begins
    read_from: list[int] = field(default_factory=lambda: [0, 0])

    def mark_output(self) -> None:
        self.read_from = [
            os.fstat(stream.fileno()).st_size for stream in (self.stdout, self.stderr)
        ]

    def output(self) -> tuple[str, str]:
        texts = []
        for stream, begin in zip((self.stdout, self.stderr), self.read_from, strict=True):
            size = os.fstat(stream.fileno()).st_size
            texts.append(
                os.pread(stream.fileno(), max(size - begin, 0), begin).decode(errors="replace")
            )
        return texts[0], texts[1]

    def dump_stacks(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the process and whatever it started (it leads a session of its own)."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def _interpreter(
    end: Connection, outputs: tuple[BinaryIO, BinaryIO], environment: dict[str, str], *args: object
) -> subprocess.Popen[bytes]:
    """Start a new interpreter for a worker."""
    words = ", ".join(map(repr, (end.fileno(), os.getpid(), *args)))
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        f"from tests.support.harness import worker_main; worker_main({words})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=outputs[0],
        stderr=outputs[1],
        env=environment,
        pass_fds=[end.fileno()],
        start_new_session=True,
    )


_nurseries: list[Nursery] = []  # of the process that has started those that run tests
_shared: list[str | None] = [None] * NUM_ZYGOTES  # names of the nurseries
_zygotes: list[Zygote] = []


def share_zygotes() -> list[str]:
    """Return names for :func:`fork_off`, of processes that end in :func:`close_pools`."""
    if not _nurseries:
        environment = {**os.environ, **_OF_RANKS}
        _nurseries.extend(Nursery(environment) for _ in range(NUM_ZYGOTES))
    return [nursery.name for nursery in _nurseries]


def fork_off(names: Sequence[str | None]) -> None:
    """Let the ranks of this process be forked off those that another one shares."""
    _shared[:] = names


def shared_zygotes() -> list[str | None]:
    """Return what :func:`fork_off` was given; None for a zygote that nobody shares."""
    return list(_shared)


def _zygote(rank: int, environment: dict[str, str]) -> Zygote:
    if not _zygotes:  # all at once: each takes seconds to import torch
        _zygotes.extend(Zygote(environment, name) for name in _shared)
    return _zygotes[rank % NUM_ZYGOTES]


def _start(
    rank: int, world_size: int, init_group: bool, env: dict[str, str] | None, device: str = ""
) -> _Worker:
    ours, theirs = Pipe()
    stdout = tempfile.TemporaryFile()  # noqa: SIM115 (the worker keeps it)
    stderr = tempfile.TemporaryFile()  # noqa: SIM115
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **_OF_RANKS,
        **(env or {}),
    }
    if any(name.startswith("COVERAGE_PROCESS") for name in environment):
        process = _interpreter(
            theirs, (stdout, stderr), environment, rank, world_size, init_group, device
        )
    else:
        process = _zygote(rank, environment).fork(
            worker_main,
            rank,
            world_size,
            init_group,
            device,
            fds=(theirs.fileno(), stdout.fileno(), stderr.fileno()),
            environment=environment,
        )
    theirs.close()
    return _Worker(rank, process, ours, stdout, stderr)


def _start_all(
    world_size: int, init_group: bool, env: dict[str, str] | None, device: str = ""
) -> list[_Worker]:
    workers: list[_Worker] = []
    try:
        workers += [_start(rank, world_size, init_group, env, device) for rank in range(world_size)]
        if init_group:
            port = _expect(workers[0])
            for worker in workers:
                worker.connection.send_bytes(port)
        for worker in workers:
            _expect(worker)
    except BaseException:
        for worker in workers:
            worker.kill()
        raise
    return workers


def _expect(worker: _Worker) -> bytes:
    try:
        if worker.connection.poll(START_TIMEOUT_S):
            return worker.connection.recv_bytes()
    except EOFError:
        pass
    raise RuntimeError(f"rank {worker.rank} did not start:\n{worker.output()[1]}")


def _job(
    kind: str, function: Callable[..., Any] | None = None, args: tuple[Any, ...] = ()
) -> bytes:
    payload = b""
    if function is not None:
        if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
            raise TypeError(
                f"{function.__qualname__} must be a function at the top level of its module: the"
                " ranks find it by import"
            )
        payload = pickle.dumps((function, args))
    return pickle.dumps((kind, sys.path, payload))


@dataclass
class _Outcome:
    """What a round of jobs brought: a value or a failure per rank, and whether the group can be
    used again.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, RankFailure] = field(default_factory=dict)
    usable: bool = True


def _exchange(workers: list[_Worker], job: bytes, timeout: float, peer_grace: float) -> _Outcome:
    """Send the job to every worker and collect the replies; those that are late are dumped and
    marked, not yet killed.

    ``peer_grace`` is how many seconds the others may go on once one failed. Neither counts the
    time in which a rank could have run and other processes had the cores.
    """
    outcome = _Outcome()
    begin, kept_waiting_s = time.monotonic(), _kept_waiting_s(workers)
    deadline = begin + timeout
    pending = {worker.connection: worker for worker in workers}
    for worker in workers:
        worker.mark_output()
        with contextlib.suppress(OSError):  # already dead: the loop below finds out how
            worker.connection.send_bytes(job)
    while pending:
        ready = wait(list(pending), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            more_s = _kept_waiting_s(workers) - kept_waiting_s
            if more_s < MIN_MORE_S:
                break
            deadline, kept_waiting_s = deadline + more_s, kept_waiting_s + more_s
        for connection in ready:
            assert isinstance(connection, Connection)
            worker = pending.pop(connection)
            at_s = time.monotonic() - begin
            try:
                alive = connection.recv_bytes() == b"\1"
                result, failure = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                alive, failure = False, _death(worker, at_s)
            outcome.usable &= alive
            if failure is None:
                outcome.results[worker.rank] = result
            else:
                outcome.failures[worker.rank] = failure
                deadline = min(deadline, time.monotonic() + peer_grace)
    if pending:
        outcome.usable = False
        at_s = time.monotonic() - begin
        for worker in pending.values():
            worker.dump_stacks()
        time.sleep(0.5)  # the handler writes the stacks into the worker's stderr
        for worker in pending.values():
            text = f"still running; its stacks:\n{worker.output()[1]}"
            outcome.failures[worker.rank] = RankFailure(
                worker.rank, "Timeout", f"no answer after {at_s:.1f} s", text, ("Timeout",), at_s
            )
    return outcome


def _kept_waiting_s(workers: Sequence[_Worker]) -> float:
    """Return for how long the ranks could have run while other processes had the cores."""
    nanoseconds = 0
    for worker in workers:
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{worker.process.pid}/schedstat").read_text().split()
            nanoseconds += int(fields[1])
    return nanoseconds / 1e9


def _death(worker: _Worker, at_s: float) -> RankFailure:
    try:
        code = worker.process.wait(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return RankFailure(
            worker.rank,
            "ProcessDied",
            "closed its connection but lives on",
            "",
            ("ProcessDied",),
            at_s,
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return RankFailure(worker.rank, "ProcessDied", how, worker.output()[1], ("ProcessDied",), at_s)


class _Pool:
    """The workers of one world size, with one device."""

    def __init__(self, world_size: int, device: str) -> None:
        self.workers = _start_all(world_size, True, None, device)

    def run(self, job: bytes, timeout: float) -> _Outcome:
        outcome = _exchange(self.workers, job, timeout, PEER_GRACE_S)
        if outcome.failures and outcome.usable:
            check = _exchange(self.workers, _job("barrier"), BARRIER_TIMEOUT_S + 3, PEER_GRACE_S)
            outcome.usable = not check.failures and all(check.results.values())
        return outcome

    def output(self) -> str:
        parts = []
        for worker in self.workers:
            for name, text in zip(("stdout", "stderr"), worker.output(), strict=True):
                if text.strip():
                    tail = "\n".join(text.splitlines()[-NUM_OUTPUT_LINES:])
                    parts.append(f"\n--- rank {worker.rank} {name}\n{tail}")
        return "".join(parts)

    def send_signal(self, number: int) -> None:
        for worker in self.workers:
            worker.process.send_signal(number)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()


_Key = tuple[int, str]  # world size, and the module of the device
_pools: dict[_Key, _Pool] = {}
_stopped: set[_Key] = set()


def _awake(key: _Key) -> _Pool:
    """Return the pool of `key`, which runs alone: the others are stopped, since gloo's threads wake
    a hundred times a second in each rank.
    """
    for other in [other for other in _pools if other != key and other not in _stopped]:
        _pools[other].send_signal(signal.SIGSTOP)
        _stopped.add(other)
    if key not in _pools:
        _pools[key] = _Pool(*key)
    if key in _stopped:
        _pools[key].send_signal(signal.SIGCONT)
        _stopped.remove(key)
    return _pools[key]


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, device: str = ""
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank of the pool and return the results in
    rank order.

    A gloo group over loopback is initialised; one torch thread per rank. Results travel by pickle,
    so tensors arrive as copies. `device`: a module that registers a type of device with torch; the
    ranks of its pool import it first, and the group has its default backend beside gloo. Or the
    backends themselves (`PLAIN`).

    Raises:
        RankError: a rank raised, died, or gave no answer in time (then with the stacks of all its
            threads).
    """
    job = _job("call", fn, args)
    key = world_size, device
    pool = _awake(key)
    try:
        outcome = pool.run(job, timeout)
    except BaseException:  # pytest-timeout, Ctrl-C: nobody knows where the ranks are
        _pools.pop(key).kill()
        raise
    output = pool.output() if outcome.failures else ""
    if not outcome.usable:
        _pools.pop(key).kill()
    if outcome.failures:
        raise RankError(outcome.failures, output)
    return [outcome.results[rank] for rank in range(world_size)]


def on_ranks(
    world_size: int | None = None, *, timeout: float = 60.0, device: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that runs on every rank of the pool, as :func:`run_ranks` runs a function.

    The test may take ``rank`` and ``world``; its other arguments are pytest's, which travel by
    pickle. Without `world_size` its argument ``world`` is the number of ranks.
    """
    own = ("rank",) if world_size is None else ("rank", "world")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each(**given: Any) -> None:
            world = given["world"] if world_size is None else world_size
            run_ranks(world, _run_test, on_each, given, timeout=timeout, device=device)

        signature = inspect.signature(test)
        pytests = [value for name, value in signature.parameters.items() if name not in own]
        on_each.__signature__ = signature.replace(parameters=pytests)  # type: ignore[attr-defined]
        return on_each

    return decorate


def _run_test(rank: int, world: int, test: Any, given: dict[str, Any]) -> None:
    given = {"rank": rank, "world": world, **given}
    names = inspect.signature(test.__wrapped__).parameters
    returned = test.__wrapped__(**{name: given[name] for name in names})
    if returned is not None:
        raise TypeError(f"{test.__name__} returns what nobody looks at: {returned!r}")


def spawn_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    init_group: bool = True,
    device: str = "",
) -> list[ProcessResult]:
    """Call ``fn(rank, world_size, *args)`` in fresh processes, which may die, and say how each
    ended. `device` as for :func:`run_ranks`.

    A process whose function returned ends with code 0, one whose function raised with code 1 and
    the traceback on stderr. Those that still run when ``timeout`` (counted from the moment all have
    started) is over are dumped and killed (exit code -9). Nothing outlives the call.
    """
    job = _job("call", fn, args)
    workers = _start_all(world_size, init_group, env, device)
    begin = time.monotonic()
    try:
        outcome = _exchange(workers, job, timeout, peer_grace=timeout)
        seconds = dict.fromkeys(outcome.results, time.monotonic() - begin) | {
            f.rank: f.at_s for f in outcome.failures.values()
        }
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            failure = outcome.failures.get(worker.rank)
            if failure is None or failure.type_name not in ("Timeout", "ProcessDied"):
                try:
                    worker.process.wait(timeout=END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    worker.dump_stacks()
                    time.sleep(0.5)
    finally:
        for worker in workers:
            worker.kill()
    results = []
    for worker in workers:
        failure = outcome.failures.get(worker.rank)
        code, (stdout, stderr) = worker.process.returncode, worker.output()
        if failure is not None and failure.type_name not in ("Timeout", "ProcessDied"):
            code, stderr = code or 1, stderr + failure.traceback
        results.append(
            ProcessResult(
                code,
                stdout,
                stderr,
                seconds[worker.rank],
                outcome.results.get(worker.rank),
                failure,
            )
        )
    return results


def close_pools() -> None:
    """End every pool; the next :func:`run_ranks` starts new ones.

    Forked workers are killed: an interpreter's own end copies all that the zygote has imported, a
    quarter of a second for each. Under coverage workers end by themselves, and write it at exit.
    """
    workers = [worker for pool in _pools.values() for worker in pool.workers]
    for key in _stopped:
        _pools[key].send_signal(signal.SIGCONT)
    _stopped.clear()
    _pools.clear()
    for worker in workers:
        if isinstance(worker.process, Forked):
            worker.kill()
        worker.connection.close()
    deadline = time.monotonic() + 10
    for worker in workers:
        try:
            worker.process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            worker.kill()
    for process in (*_zygotes, *_nurseries):
        process.close()
    _zygotes.clear()
    _nurseries.clear()
