"""Host's side of ``zeroshard run --hostfile``: start the launcher here, and end it with its caller.

``hosts.py`` starts this over ssh, in the user's directory and environment. It

1. greets, and reads the job, a line of JSON, from standard input;
2. on the first host listens for the ranks and tells the port, on the others waits for that port;
3. starts a launcher (``run.py``) as a child and passes on its output and its outcome, as frames;
4. sends it the signals that the caller asks for, and kills it when standard input ends: the caller,
   or the connection to it, is gone.

Invariant: the launcher dies with this process, the ranks with the launcher, and all they started
with its janitor, also by SIGKILL. Nothing here imports torch; the child does.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

from zeroshard.launch import cli, network, wire
from zeroshard.launch.options import Place, RunOptions, UsageError, check_target
from zeroshard.launch.worker import die_with

__all__ = ["main"]

LAUNCH = "launch"  # the child's argument
DRAIN_S = 1.0  # for output that outlives the launcher


def main(argv: list[str]) -> None:
    """Be the guard of a launcher, or that launcher."""
    if argv == [LAUNCH]:
        _launch()
    with contextlib.suppress(BrokenPipeError):  # the caller is gone
        _send(wire.GREETING)
        job = io.FileIO(0, closefd=False).readline()
        if job:
            _guard(json.loads(job))


# ------------------------------------------------------------------ the launcher


def _launch() -> None:
    from zeroshard.launch.run import launch, leave

    job = json.loads(sys.stdin.buffer.readline())
    die_with(job["guard"])
    place = Place(**job["place"])
    options = {**job["options"], "script": wire.from_text(job["options"]["script"])}
    options["args"] = [wire.from_text(argument) for argument in options["args"]]
    try:
        check_target(options["kind"], options["script"])
        code = launch(RunOptions(**{**options, "place": place}))
    except (Exception, KeyboardInterrupt) as error:
        code, message = cli.explain(error)
        with open(place.report, "w") as report:
            json.dump({"error": message}, report)
    leave(code)


# ------------------------------------------------------------------ its guard


def _send(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _note(note: Any) -> None:
    _send(wire.frame(wire.NOTE, json.dumps(note).encode()))


def _guard(job: dict[str, Any]) -> None:
    place = job["place"]
    passed = []
    if place["node_rank"] == 0:
        try:
            listener = network.listen(place["master_addr"], place["master_port"])
        except UsageError as error:
            _note({"error": str(error)})
            _note({"exit": 2})
            return
        place["listener"], place["master_port"] = listener.fileno(), listener.getsockname()[1]
        passed.append(listener.fileno())
        _note({"port": place["master_port"]})
    else:
        # the caller is gone, or has ended the job already
        message = json.loads(io.FileIO(0, closefd=False).readline() or "{}")
        if "port" not in message:
            _note({"exit": 0})
            return
        place["master_port"] = message["port"]
    report, place["report"] = os.pipe()
    job["guard"] = os.getpid()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "zeroshard.launch.on_host", LAUNCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[*passed, place["report"]],
        start_new_session=True,
    )
    for descriptor in [*passed, place["report"]]:
        os.close(descriptor)
    assert child.stdin is not None
    with child.stdin as stdin, contextlib.suppress(BrokenPipeError):
        stdin.write(wire.line(job))
    try:
        _Guard(child, report).watch()
    finally:
        child.kill()


class _Guard:
    """Passes on what the launcher writes, and what the caller asks for."""

    def __init__(self, child: subprocess.Popen[bytes], report: int) -> None:
        assert child.stdout is not None and child.stderr is not None
        self._child = child
        self._outputs = {child.stdout.fileno(): wire.OUT, child.stderr.fileno(): wire.ERR}
        self._report_fd = report
        self._report = b""
        self._orders = b""
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        for descriptor in (0, report, *self._outputs):
            self._selector.register(descriptor, selectors.EVENT_READ)
        self._pidfd = os.pidfd_open(child.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ)

    def watch(self) -> None:
        """Return when the launcher has ended, and all is told, or the caller is gone."""
        ended_at: float | None = None
        while ended_at is None or (self._outputs and time.monotonic() < ended_at + DRAIN_S):
            for key, _ in self._selector.select(0.1 if self._kill_at or ended_at else None):
                if key.fd == self._pidfd:
                    self._selector.unregister(self._pidfd)
                    ended_at = time.monotonic()
                elif not self._read(key.fd):
                    return
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._child.kill()
        with contextlib.suppress(ValueError):  # it was killed while it wrote
            _note(json.loads(self._report))
        _note({"exit": self._child.wait()})

    def _read(self, descriptor: int) -> bool:
        """Pass on what there is to read; return False when the caller is gone."""
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._selector.unregister(descriptor)
            self._outputs.pop(descriptor, None)
            return descriptor != 0
        if descriptor == 0:
            *orders, self._orders = (self._orders + data).split(b"\n")
            for order in orders:
                self._obey(json.loads(order))
        elif descriptor == self._report_fd:
            self._report += data
        else:
            _send(wire.frame(self._outputs[descriptor], data))
        return True

    def _obey(self, order: dict[str, Any]) -> None:
        number = order.get("signal", signal.SIGTERM)
        if "end" in order:
            self._kill_at = time.monotonic() + order["end"]
        if self._child.poll() is None and ("end" in order or "signal" in order):
            self._child.send_signal(number)


if __name__ == "__main__":
    main(sys.argv[1:])
