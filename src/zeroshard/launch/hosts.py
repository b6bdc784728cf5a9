"""``zeroshard run --hostfile``: one launcher on each host over ssh, and one end for all of them.

Each host gets the same fixed command. All that is the user's (arguments, environment, directory)
goes through the connection's standard input as JSON (``wire.py``), so that no shell reads it. The
other side is ``on_host.py``. Ranks are numbered in the order of the hostfile.

Invariant: a host whose connection ends has ended its part of the job, or ends it now; and when one
part fails, all are ended. The first failure is that of the whole job: the hosts send their
outcomes, and ``supervisor.blame_order`` orders them.

No torch here, and no part of the job runs in this process.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from zeroshard.launch import hostfile, wire
from zeroshard.launch.hostfile import Host
from zeroshard.launch.options import HostChoice, Place, RunOptions, UsageError
from zeroshard.launch.reports import Outcome, say
from zeroshard.launch.supervisor import SIGNAL_LEAD_S, Failure, blame_order, blame_time

__all__ = ["COMMAND", "beginning", "launch_on_hosts", "sent_environment"]

EXIT_IO = 74
SIGNAL_GRACE_S = 30.0  # a launcher's own, see run.py
ANSWER_S = 2.0  # the way to a host and back
# Reads the interpreter's path, then [directory, command, environment], and becomes that command.
COMMAND = (
    'exec /bin/sh -c \'IFS= read -r python && exec "$python" -I -X utf8 -c "import io, json, os;'
    " job = json.loads(io.FileIO(0, closefd=False).readline()); os.chdir(job[0]);"
    " os.environ.update(job[2]); os.execv(job[1][0], job[1])\"'"
)
SSH_OPTIONS = (
    "-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip
_SENT = re.compile(
    r"PYTHON[A-Z_]*|(NCCL|GLOO|OMP|MKL|KMP|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|CUDA|HF|TRANSFORMERS"
    r"|TOKENIZERS|UCX|FI|ZEROSHARD)_.*|PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|TMPDIR",
    re.DOTALL,
)
_SECRET = {"TOKEN", "TOKENS", "SECRET", "SECRETS", "KEY", "KEYS", "PASSWORD", "PASS", "AUTH",
           "CREDENTIALS"}  # fmt: skip
_NOT_SENT = ("CUDA_VISIBLE_DEVICES",)  # the slots say which


def launch_on_hosts(options: RunOptions, choice: HostChoice) -> int:
    """Run the job on the hosts that `choice` names; return the exit code of ``zeroshard run``."""
    hosts = hostfile.choose(hostfile.read(choice.hostfile), choice.include, choice.exclude)
    try:
        shlex.split(choice.ssh)
    except ValueError as error:
        raise UsageError(f"--ssh {choice.ssh}: {error}") from None
    sent_environment(os.environ, choice.export)  # refuses before anything is started
    return _Job(options, choice, hosts).run()


def sent_environment(environ: Mapping[str, str], export: Sequence[str]) -> dict[str, str]:
    """Return the variables that hosts get: those of the libraries, no secrets, and `export`.

    Raises:
        UsageError: one of `export` is not set.
    """
    for name in export:
        if name not in environ:
            raise UsageError(f"--export {name}: there is no such environment variable")
    return {
        name: value
        for name, value in environ.items()
        if name in export
        or (
            _SENT.fullmatch(name)
            and name not in _NOT_SENT
            and not _SECRET.intersection(name.upper().split("_"))
        )
    }


@dataclass(frozen=True)
class _Loss:
    """A host that is gone, or could not begin, and the exit code for it."""

    at: float
    reason: str
    code: int


class _Lines:
    """Writes the output of a host with its name before each line."""

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self._prefix = f"[{name}] ".encode()
        self._stream = stream
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Write the lines that are complete; a bar ends its lines with a carriage return."""
        *lines, self._rest = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", self._rest + data)
        if len(self._rest) > 1 << 20:
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        if lines:
            self._stream.write(b"".join(self._prefix + line for line in lines))
            self._stream.flush()

    def close(self) -> None:
        """Write the last line, if it has no end."""
        if self._rest:
            self.write(b"\n")


class _Connection:
    """The ssh process of one host, and what is known of the host."""

    def __init__(self, host: Host, command: list[str], orders: bytes) -> None:
        self.host = host
        self.outcome: Outcome | None = None
        self.loss: _Loss | None = None
        self.exit_code: int | None = None  # of its launcher
        self.is_open = True
        self._asked_to_end = False
        self._error = ""
        self._complaints = b""  # ssh's own
        self._orders = bytearray(orders)
        self._frames = wire.Frames()
        self._outputs = {
            wire.OUT: _Lines(host.name, sys.stdout.buffer),
            wire.ERR: _Lines(host.name, sys.stderr.buffer),
        }
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            # not in our group: the terminal's Ctrl-C is passed on, and must not cut the line
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0
        )  # fmt: skip
        self.pidfd = os.pidfd_open(self.process.pid)
        for stream in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(stream, False)

    @property
    def stdin(self) -> int:
        """The descriptor to which orders are written."""
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    @property
    def stdout(self) -> int:
        """The descriptor of the host's frames."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def stderr(self) -> int:
        """The descriptor of ssh's own messages."""
        assert self.process.stderr is not None
        return self.process.stderr.fileno()

    @property
    def has_failed(self) -> bool:
        """Whether this host's part is a reason to end the others."""
        return self.loss is not None or self.exit_code not in (None, 0)

    @property
    def has_orders(self) -> bool:
        """Whether orders wait to be written."""
        return self.is_open and bool(self._orders)

    def order(self, order: Mapping[str, Any]) -> None:
        """Have an order written."""
        self._asked_to_end = self._asked_to_end or "end" in order or "signal" in order
        self._orders += wire.line(order)

    def write_orders(self) -> None:
        """Write as much of the orders as ssh takes now."""
        try:
            count = os.write(self.stdin, self._orders[: 1 << 16])
        except BlockingIOError:
            return
        except BrokenPipeError:  # ssh has ended, which is noticed by itself
            self._orders.clear()
            return
        del self._orders[:count]

    def read(self, descriptor: int) -> list[dict[str, Any]] | None:
        """Pass on output; return the notes of the host, None at the end of the stream."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        if descriptor == self.stderr:
            self._complaints = (self._complaints + data)[-(1 << 14) :]
            return []
        notes = []
        for kind, content in self._frames.feed(data):
            if kind == wire.NOTE:
                notes.append(json.loads(content))
            else:
                self._outputs[kind].write(content)
        return notes

    def note(self, note: Mapping[str, Any]) -> None:
        """Take a note of the host's."""
        if "failures" in note:
            self.outcome = Outcome.from_json(note, self.host.name)
        self._error = str(note.get("error", self._error))
        if "exit" in note:
            self.exit_code = int(note["exit"])
            self._judge()

    def _judge(self) -> None:
        """Say why the launcher of the host has ended, where no rank's failure says it."""
        code, name = self.exit_code or 0, self.host.name
        known = self.outcome is not None and (self.outcome.failures or self.outcome.stalled)
        if code == 0 or self._asked_to_end or known:
            return
        if self._error:
            reason = f"{name}: {self._error}"
        elif self.outcome is not None and self.outcome.ended_by is not None:
            ended_by = signal.Signals(self.outcome.ended_by).name
            reason = f"{name}: its launcher was ended by {ended_by}"
        elif code < 0:
            code, reason = 128 - code, f"{name}: its launcher was {Failure(0, 0, 0, code).how}"
        else:
            reason = f"{name}: its launcher ended with exit code {code}"
        self.loss = _Loss(time.monotonic(), reason, code)

    def lose(self, reason: str) -> None:
        """Note that nothing more will come from this host, and why."""
        self.loss = self.loss or _Loss(time.monotonic(), f"{self.host.name} {reason}", EXIT_IO)

    def end(self) -> None:
        """Take the end of the ssh process."""
        self.process.wait()
        said = self._complaints.decode("utf-8", "replace").strip().splitlines()
        why = f": {said[-1].strip()}" if said else ""
        if not self._frames.greeted and not self._asked_to_end:
            self.lose(f"could not be reached{why}")
        elif self.exit_code is None and not self._asked_to_end:
            self.lose(f"was lost, its connection ended{why}")
        self.close()

    def close(self) -> None:
        """End the connection; the host ends its part of the job for it."""
        if not self.is_open:
            return
        self.is_open = False
        for output in self._outputs.values():
            output.close()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        if self.process.poll() is None:
            self.process.terminate()
        os.close(self.pidfd)


class _Job:
    """The connections to all hosts, from the first to the last of them."""

    def __init__(self, options: RunOptions, choice: HostChoice, hosts: Sequence[Host]) -> None:
        self._begin = time.monotonic()
        self._grace_s = options.grace_s
        own = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        self._signal_grace_s = float(
            own if own.isdecimal() else max(options.grace_s, SIGNAL_GRACE_S)
        )
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._ended_by: int | None = None
        self._end_by = math.inf
        self._is_ending = False
        self._connections = [
            _connect(options, choice, hosts, node_rank) for node_rank in range(len(hosts))
        ]

    def run(self) -> int:
        """Return the exit code when all hosts have ended."""
        try:
            with _wakeup(self._selector, self._take_signals):
                for connection in self._connections:
                    self._register(connection)
                while any(connection.is_open for connection in self._connections):
                    self._turn()
        finally:
            for connection in self._connections:
                connection.close()
        return self._tell()

    def _register(self, connection: _Connection) -> None:
        for descriptor in (connection.stdout, connection.stderr):
            reading = _bind(self._read, connection, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, reading)
        ending = _bind(self._end, connection)
        self._selector.register(connection.pidfd, selectors.EVENT_READ, ending)

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        for connection in self._connections:
            if connection.has_orders and connection.stdin not in self._selector.get_map():
                writing = _bind(self._write, connection)
                self._selector.register(connection.stdin, selectors.EVENT_WRITE, writing)
        patience = None if self._end_by == math.inf else max(self._end_by - time.monotonic(), 0.0)
        for key, _ in self._selector.select(patience):
            if key.fileobj in self._selector.get_map():  # not closed by one before it
                key.data()
        if not self._is_ending and any(one.has_failed for one in self._connections):
            self._end_others()
        if time.monotonic() >= self._end_by:
            for connection in filter(lambda one: one.is_open, self._connections):
                connection.lose("does not answer")
                self._forget(connection)

    def _write(self, connection: _Connection) -> None:
        connection.write_orders()
        if not connection.has_orders:
            self._selector.unregister(connection.stdin)

    def _read(self, connection: _Connection, descriptor: int) -> bool:
        """Take what there is to read; return whether there was something."""
        try:
            notes = connection.read(descriptor)
        except ValueError as error:
            connection.lose(f"cannot be understood: {error}")
            self._forget(connection)
            return False
        if notes is None:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            return False
        for note in notes:
            connection.note(note)
            if "port" in note:
                for other in self._connections[1:]:
                    other.order(note)
        return True

    def _end(self, connection: _Connection) -> None:
        """Take what is left to read, then the end."""
        for descriptor in (connection.stderr, connection.stdout):
            while connection.is_open and self._has_data(descriptor):
                if not self._read(connection, descriptor):
                    break
        if connection.is_open:
            self._unregister(connection)
            connection.end()

    @staticmethod
    def _has_data(descriptor: int) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    def _forget(self, connection: _Connection) -> None:
        self._unregister(connection)
        connection.close()

    def _unregister(self, connection: _Connection) -> None:
        for descriptor in (
            connection.stdin, connection.stdout, connection.stderr, connection.pidfd,
        ):  # fmt: skip
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)

    def _end_others(self) -> None:
        """End every part of the job, since one has failed."""
        self._is_ending = True
        self._end_by = min(self._end_by, time.monotonic() + self._grace_s + ANSWER_S)
        for connection in self._connections:
            if connection.exit_code is None:
                connection.order({"end": self._grace_s})

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            self._signals += 1
            if self._signals == 1:
                self._ended_by, self._is_ending = number, True
                self._end_by = time.monotonic() + self._signal_grace_s + ANSWER_S
                for connection in self._connections:
                    connection.order({"signal": number})
            elif number == signal.SIGINT:
                self._end_by = time.monotonic()

    def _tell(self) -> int:
        """Say how the job has ended; return the exit code."""
        outcome = replace(_joined(self._connections), ended_by=self._ended_by)
        losses = [one.loss for one in self._connections if one.loss is not None]
        if losses and not outcome.was_ended:
            loss = min(losses, key=lambda one: one.at)
            first = outcome.failures[0] if outcome.failures else None
            if first is None or blame_time(first) > loss.at - SIGNAL_LEAD_S or first.consequence:
                for failure in outcome.failures:
                    if not failure.silent and not failure.left:
                        said = (failure.message or failure.how).splitlines()[0][:160]
                        say(f"{failure.name} failed too: {said}")
                say(f"{loss.reason} ({loss.at - self._begin:.2f} s after the start)")
                return loss.code
        outcome.tell(self._begin)
        return outcome.exit_code


def _connect(
    options: RunOptions, choice: HostChoice, hosts: Sequence[Host], node_rank: int
) -> _Connection:
    """Start ssh to a host, with the orders for it."""
    host = hosts[node_rank]
    master = choice.master_addr or hosts[0].name
    place = Place(node_rank, len(hosts), wire.to_text(master), choice.master_port)
    own = replace(options, hosts=None, standalone=False, nproc=str(len(host.slots)))
    data = asdict(own)
    data["script"] = wire.to_text(options.script)
    data["args"] = [wire.to_text(argument) for argument in options.args]
    environment = sent_environment(os.environ, choice.export)
    if not host.is_whole:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.slots))
    orders = beginning([sys.executable, "-P", "-m", "zeroshard.launch.on_host"], environment)
    orders += wire.line({"options": data, "place": asdict(place)})
    command = [*shlex.split(choice.ssh), *SSH_OPTIONS, "--", host.name, COMMAND]
    try:
        return _Connection(host, command, orders)
    except OSError as error:
        raise UsageError(f"--ssh {command[0]}: {error.strerror}") from None


def beginning(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the input that makes `COMMAND` run `command` on a host, in a directory of the same
    path as this process's, with `environment` added to that of the host's shell.
    """
    if "\n" in command[0]:
        raise UsageError(f"the path of the interpreter, {command[0]!r}, has a line end")
    texts = {wire.to_text(name): wire.to_text(text) for name, text in environment.items()}
    job = [wire.to_text(os.getcwd()), [wire.to_text(word) for word in command], texts]
    return os.fsencode(command[0]) + b"\n" + wire.line(job)


def _joined(connections: Sequence[_Connection]) -> Outcome:
    """Return the outcome of all hosts together."""
    outcomes = [one.outcome for one in connections if one.outcome is not None]
    failures = blame_order([one for two in outcomes for one in two.failures if not one.left])
    if failures and (failures[0].consequence or failures[0].stalled):
        left = sorted((one for two in outcomes for one in two.left), key=lambda one: one.at)
        failures = [*left, *failures]
    return Outcome(failures, stalled=any(outcome.stalled for outcome in outcomes))


def _bind(function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    return lambda: function(*arguments)


@contextmanager
def _wakeup(selector: selectors.BaseSelector, take: Callable[[bytes], None]) -> Iterator[None]:
    """Call `take` in the selector's loop with the numbers of the signals that come."""
    receiving, sending = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    numbers = [one for one in numbers if signal.getsignal(one) != signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(sending)
    selector.register(receiving, selectors.EVENT_READ, lambda: take(os.read(receiving, 1 << 10)))
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        selector.unregister(receiving)
        os.close(receiving)
        os.close(sending)
