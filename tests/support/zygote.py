"""Processes that have imported torch once, and fork the ranks of tests off themselves.

A new interpreter takes 3.5 s of CPU until it has torch, an optimizer's ``torch._dynamo`` and this
library; a fork takes 10 ms. Ranks take turns between two such processes, so that neighbours differ
in the seed of their hashes as ranks that are started for real do: a set has another order.

Test processes side by side (pytest-xdist's workers) share the two: the process that starts them
runs a :class:`Nursery`, which forks a zygote for each of them off one that has imported everything.

A forked rank is like a new interpreter otherwise: a session, environment, directory and output of
its own, no thread but its main one, and it ends as interpreters end, ``atexit`` included. Variables
that torch reads when it is imported are those of the first rank. Coverage begins with an
interpreter: under ``make coverage`` the harness starts one for each rank.

Invariant: the zygotes end with the process that started them, and their ranks with them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("torch._dynamo", "torch.distributed", "safetensors.torch", "pytest", "hypothesis")
_OURS = ("zeroshard.sharding.api", "zeroshard.checkpoint", "tests.support.harness")
# a second for each rank that trains a model of theirs; where they are not installed, tests skip.
# Beside a GPU they find libraries that start threads.
_MODELS = () if Path("/dev/nvidiactl").exists() else ("transformers.trainer", "accelerate")
_THREADS_STARTED = 75  # the exit code of a process that has imported them, and has threads since


class Forked:
    """A forked rank, with the part of ``subprocess.Popen`` that the harness uses."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # the zygote writes the exit code here when it has reaped the rank

    def poll(self) -> int | None:
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            text = os.read(self._status, 16)
            os.close(self._status)
            # nothing: the zygote has died, and its ranks with it
            self.returncode = int(text or -signal.SIGKILL)
        return self.returncode


def _start(
    function: str, end: socket.socket, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start an interpreter that calls a function of this module with its `end`."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support import zygote; "
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}zygote.{function}({end.fileno()})()"],
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        pass_fds=[end.fileno()],
        start_new_session=True,  # no Ctrl-C: it ends when its owner does
    )


class Nursery:
    """A process that forks zygotes for whoever connects to its `name`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.name = f"\0zeroshard-tests-{os.getpid()}-{secrets.token_hex(8)}"  # no file's
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.name)
            listener.listen()
            self._process = _start("serve_sessions", listener, environment)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(self.name)

    def close(self) -> None:
        """End it; the owners of its zygotes have ended."""
        self._socket.close()
        self._process.wait()


class Zygote:
    """One process that forks, as its owner sees it: forked off the :class:`Nursery` of that name,
    or else of its own.
    """

    def __init__(self, environment: Mapping[str, str], nursery: str | None = None) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if nursery is not None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(nursery)
            return
        self._socket, theirs = socket.socketpair()
        self._process = _start("serve", theirs, environment)
        theirs.close()

    def fork(
        self,
        function: Callable[..., None],
        *args: Any,
        fds: tuple[int, int, int],
        environment: Mapping[str, str],
    ) -> Forked:
        """Call ``function(fd, parent's pid, *args)`` in a new process; `fds` are that descriptor,
        standard output and standard error.
        """
        reader, writer = os.pipe()
        job = pickle.dumps((function, args, dict(environment), os.getcwd()))
        socket.send_fds(self._socket, [len(job).to_bytes(8, "big")], [*fds, writer])
        self._socket.sendall(job)
        os.close(writer)
        pid = int.from_bytes(_exactly(self._socket, 8), "big")
        return Forked(pid, reader)

    def close(self) -> None:
        """End it; its ranks have ended."""
        self._socket.close()
        if self._process is not None:
            self._process.wait()


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the other end is gone")
        data += more
    return data


def _threads() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def _import_all() -> None:
    """Import what ranks use; a process that has done so without starting a thread returns."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # `datasets` brings pyarrow
    for name in (*_LIBRARIES, *_OURS):
        __import__(name)
    assert len(_threads()) == 1, f"{_threads()}: threads, which a fork would lose"
    # A child tries the rest, and goes on with it. Where that has started threads, this process
    # goes on without, and ranks import what they use.
    if (child := os.fork()) != 0:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != _THREADS_STARTED:
            os._exit(abs(code))
    else:
        with contextlib.suppress(ImportError):
            for name in _MODELS:
                __import__(name)
        if len(_threads()) > 1:
            os._exit(_THREADS_STARTED)
    gc.collect()
    gc.freeze()  # else each rank's first collection would copy all of it


def serve_sessions(fd: int) -> Callable[[], None]:
    """Fork a zygote for each connection to the listener `fd` until the owner closes the first one;
    return what a rank of theirs is left to do.
    """
    listener = socket.socket(fileno=fd)
    owner, _ = listener.accept()
    imported = False
    while owner not in select.select([owner, listener], [], [])[0]:
        session, _ = listener.accept()
        if not imported:  # not before: a run of a few tests may need no rank
            _import_all()
            imported = True
        if os.fork() == 0:
            owner.close()
            listener.close()
            return _serve(session)
        session.close()
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            os.wait()
    os._exit(0)


def serve(fd: int) -> Callable[[], None]:
    """Fork ranks until the owner closes its end; return what a rank is left to do."""
    _import_all()
    return _serve(socket.socket(fileno=fd))


def _serve(owner: socket.socket) -> Callable[[], None]:
    running: dict[int, tuple[int, int]] = {}  # descriptor of a rank -> its pid, where its code goes
    while True:
        for ready in select.select([owner, *running], [], [])[0]:
            if ready is not owner:
                pid, status = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(status, str(code).encode())
                os.close(status)
                os.close(ready)
                continue
            header, fds, _, _ = socket.recv_fds(owner, 8, 4)
            if not header:
                os._exit(0)  # the interpreter's own end takes seconds with torch
            header += _exactly(owner, 8 - len(header)) if len(header) < 8 else b""
            function, args, environment, cwd = pickle.loads(
                _exactly(owner, int.from_bytes(header, "big"))
            )
            parent, (end, stdout, stderr, status) = os.getpid(), fds
            pid = os.fork()
            if pid == 0:
                os.setsid()
                owner.sendall(os.getpid().to_bytes(8, "big"))
                owner.close()
                for other in (status, *running, *(pair[1] for pair in running.values())):
                    os.close(other)
                _become(stdout, stderr, environment, cwd)
                return partial(function, end, parent, *args)
            for other in (end, stdout, stderr):
                os.close(other)
            running[os.pidfd_open(pid)] = (pid, status)


def _become(stdout: int, stderr: int, environment: Mapping[str, str], cwd: str) -> None:
    """Take output, environment and directory of the rank."""
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
