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
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

from zeroshard.launch.connection import ERR, GREETING, NOTE, OUT, frame, from_text, line, listen
from zeroshard.launch.options import HostPlace, RunOptions, check_target
from zeroshard.launch.worker import KEEPER, die_with
from zeroshard.system.keeper import KeeperServer
from zeroshard.terminal import UsageError, explain

LAUNCH = "launch"  # the child's argument
DRAIN_S = 1.0  # for output that outlives the launcher


def main(argv: list[str]) -> None:
    """Be the guard of a launcher, or that launcher."""
    if argv == [LAUNCH]:
        _launch()
    with contextlib.suppress(BrokenPipeError):  # the caller is gone
        _send(GREETING)
        orders = _Orders()
        order = orders.wait_for("options", "again")
        if order is not None:
            _guard(order, orders)


# ------------------------------------------------------------------ the launcher


def _launch() -> None:
    from zeroshard.launch.run import launch, leave

    job = json.loads(sys.stdin.buffer.readline())
    die_with(job["guard"])
    place = HostPlace(**job["place"])
    options = {**job["options"], "script": from_text(job["options"]["script"])}
    options["args"] = [from_text(argument) for argument in options["args"]]
    try:
        check_target(options["kind"], options["script"])
        code = launch(RunOptions(**{**options, "place": place}))
    except (Exception, KeyboardInterrupt) as error:
        code, message = explain(error)
        with open(place.report, "w") as report:
            json.dump({"error": message}, report)
    leave(code)


# ------------------------------------------------------------------ its guard


def _send(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _note(note: Any) -> None:
    _send(frame(NOTE, json.dumps(note).encode()))


class _Orders:
    """The caller's orders: lines of JSON on standard input."""

    def __init__(self) -> None:
        self._rest = b""
        self._orders: list[dict[str, Any]] = []

    def read(self) -> bool:
        """Read what there is, at least something; return False when the caller is gone."""
        data = os.read(0, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._orders += [json.loads(one) for one in lines]
        return bool(data)

    def take(self) -> list[dict[str, Any]]:
        """Return the orders that have come and were not taken yet."""
        orders, self._orders = self._orders, []
        return orders

    def wait_for(self, *words: str) -> dict[str, Any] | None:
        """Return the first order with one of `words`, passing over others; None when the caller is
        gone.
        """
        while True:
            while self._orders:
                order = self._orders.pop(0)
                if any(word in order for word in words):
                    return order
            if not self.read():
                return None


def _guard(order: dict[str, Any] | None, orders: _Orders) -> None:
    """Be the guard of one launcher, and of those that the caller then asks for. The first order is
    "again", too, on a host that has come back.
    """
    assert order is not None
    job = order.get("again", order)
    if job["options"]["elastic"] is None:
        _guard_one(job, orders, None)
        return
    from zeroshard.launch.run import threads_of

    keeper = KeeperServer()
    os.environ[KEEPER] = keeper.address
    threads = threads_of(int(job["options"]["nproc"]))  # as its first launcher has
    while order is not None:
        job = order.get("again", order)
        if "again" in order:
            os.environ.setdefault(threads.name, threads.value)
            os.environ.update(job["environment"])
            keeper.whole = job["whole"]
        if not _guard_one(job, orders, keeper):
            return
        order = orders.wait_for("again")


def _guard_one(job: dict[str, Any], orders: _Orders, keeper: KeeperServer | None) -> bool:
    """Start a launcher and watch it to its end; return False when the caller is gone, or nothing
    could be started.
    """
    place = job["place"]
    passed = []
    if place["node_rank"] == 0:
        try:
            listener = listen(place["master_addr"], place["master_port"])
        except UsageError as error:
            _note({"error": str(error)})
            _note({"exit": 2})
            return False
        place["listener"], place["master_port"] = listener.fileno(), listener.getsockname()[1]
        passed.append(listener.fileno())
        _note({"port": place["master_port"]})
    else:
        # the caller is gone, or has ended the job already
        message = orders.wait_for("port", "end", "signal") or {}
        if "port" not in message:
            _note({"exit": 0})
            return bool(message)
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
        stdin.write(line(job))
    try:
        return _watch(child, report, orders, keeper)
    finally:
        child.kill()
        child.wait()


def _watch(
    child: subprocess.Popen[bytes], report: int, orders: _Orders, keeper: KeeperServer | None
) -> bool:
    """Pass on what the launcher writes, and what the caller asks for; return when the launcher has
    ended, and all is told, or False when the caller is gone.
    """
    assert child.stdout is not None and child.stderr is not None
    outputs = {child.stdout.fileno(): OUT, child.stderr.fileno(): ERR}
    outcome, kill_at, ended_at = b"", math.inf, math.inf
    pidfd, selector = os.pidfd_open(child.pid), selectors.DefaultSelector()
    for descriptor in (0, report, pidfd, *outputs):
        selector.register(descriptor, selectors.EVENT_READ)

    def tell_kept() -> None:
        if keeper is not None:
            _note({"kept": keeper.summary()})

    while ended_at == math.inf or (outputs and time.monotonic() < ended_at + DRAIN_S):
        for key, _ in selector.select(0.1 if min(kill_at, ended_at) < math.inf else None):
            if key.fd == 0:
                is_there = orders.read()
                for order in orders.take():
                    if "end" in order:
                        kill_at = time.monotonic() + order["end"]
                    if "tell" in order:
                        tell_kept()
                    if child.poll() is None and ("end" in order or "signal" in order):
                        child.send_signal(order.get("signal", signal.SIGTERM))
                if not is_there:
                    return False
            elif key.fd == pidfd:
                selector.unregister(pidfd)
                ended_at = time.monotonic()
            elif not (data := os.read(key.fd, 1 << 16)):
                selector.unregister(key.fd)
                outputs.pop(key.fd, None)
            elif key.fd == report:
                outcome += data
            else:
                _send(frame(outputs[key.fd], data))
        if time.monotonic() >= kill_at:
            child.kill()
    with contextlib.suppress(ValueError):  # it was killed while it wrote
        _note(json.loads(outcome))
    tell_kept()
    _note({"exit": child.wait()})
    selector.close()
    for descriptor in (pidfd, report):
        os.close(descriptor)
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
