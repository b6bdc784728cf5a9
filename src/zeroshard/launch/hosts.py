"""``zeroshard run --hostfile``: one launcher on each host over ssh, and one end for all of them.

Each host gets the same fixed command. All that is the user's (arguments, environment, directory)
goes through the connection's standard input as JSON, so that no shell reads it. ``connection.py``
is one host seen from here, ``on_host.py`` the other side. Ranks are numbered in the order of the
hostfile.

Invariant: where a connection ends, its host has ended its part of the job, or ends it now; and when
one part fails, all are ended. The first failure counts for the whole job: the hosts send their
outcomes, and ``supervisor.blame_order`` orders them.

No torch here, and no part of the job runs in this process.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from zeroshard.launch import elastic
from zeroshard.launch.connection import Connection, line, to_text
from zeroshard.launch.options import (
    Host,
    HostChoice,
    HostPlace,
    RunOptions,
    choose_hosts,
    read_hosts,
)
from zeroshard.launch.outcome import Outcome, say
from zeroshard.launch.supervisor import SIGNAL_LEAD_S, blame_order, blame_time
from zeroshard.system.device import LIBRARIES, VISIBLE_DEVICES
from zeroshard.system.keeper_client import whole_steps
from zeroshard.terminal import UsageError

# ------------------------------------------------------------------------------------- absent hosts
# Hosts that a job goes on without, asked at an interval whether they are back.
#
# A host is asked as a start asks it: ssh, the interpreter, the directory and ``on_host.py``. Its
# greeting is the answer. The connection that has brought the greeting stays open, and takes the
# orders of the next start. A host that does not answer is asked again, and nothing is said of it.
#
# Invariant: asking starts no part of the job, and a connection is open to a host once. No torch
# here.


class AbsentHosts:
    """The hosts that were lost. `connect` starts the connection to one, which has `patience_s`
    seconds to answer. They are asked `every_s` seconds after the job has gone on without one, and
    so often again; 0: never. One that is lost again doubles the interval.
    """

    def __init__(
        self, every_s: float, patience_s: float, connect: Callable[[Host], Connection]
    ) -> None:
        self._every_s, self._patience_s = every_s, patience_s
        self._connect = connect
        self._hosts: list[Host] = []
        self._were_back: set[str] = set()
        self._asked: dict[str, Connection] = {}  # by the name of the host
        self._ask_at = math.inf

    def add(self, host: Host) -> None:
        """Ask `host` from now on."""
        if host.name in self._were_back:
            self._every_s *= 2
        if self._every_s:
            self._hosts.append(host)
            self._ask_at = time.monotonic() + self._every_s

    @property
    def back(self) -> list[Connection]:
        """The connections to hosts that have answered and could begin."""
        return [one for one in self._asked.values() if one.is_open and not one.is_silent]

    def ask(self) -> float:
        """Ask the hosts that are due; return when to call again."""
        now = time.monotonic()
        for name, connection in list(self._asked.items()):
            if connection.is_silent and now >= connection.begun_at + self._patience_s:
                connection.close()
            if not connection.is_open:
                del self._asked[name]
        if now >= self._ask_at:
            self._ask_at = now + self._every_s
            for host in self._hosts:
                if host.name not in self._asked:
                    with suppress(UsageError):  # no ssh any more: perhaps the next time
                        self._asked[host.name] = self._connect(host)
        silent = [one for one in self._asked.values() if one.is_silent]
        return min([self._ask_at, *(one.begun_at + self._patience_s for one in silent)])

    def take(self, connections: Iterable[Connection]) -> None:
        """Leave these of `back` to the job."""
        for connection in connections:
            del self._asked[connection.host.name]
            self._were_back.add(connection.host.name)
            self._hosts = [one for one in self._hosts if one.name != connection.host.name]
        if not self._hosts:
            self._ask_at = math.inf

    def close(self) -> None:
        """End all connections."""
        for connection in self._asked.values():
            connection.close()


# -------------------------------------------------------------------------------------------- hosts

SIGNAL_GRACE_S = 30.0  # a launcher's own, see run.py
ANSWER_S = 2.0  # the way to a host and back
# the same under --elastic, where a host that is given up is lost with its memory: a loaded one may
# take long to end its ranks, and ssh notices by itself that one is gone
ELASTIC_ANSWER_S = 60.0
GREETING_S = 90.0  # for a host to log in, load a shell's settings and begin
LOOK_S = 1.0  # between two questions whether a newer step is kept, while a host is back
TELL_S = 15.0  # between two lines about hosts that have not begun
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
    r"PYTHON[A-Z_]*|(GLOO|OMP|MKL|KMP|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|HF|TRANSFORMERS|TOKENIZERS"
    rf"|UCX|FI|ZEROSHARD|{'|'.join(LIBRARIES)})_.*|PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|TMPDIR",
    re.DOTALL,
)
_SECRET = {"TOKEN", "TOKENS", "SECRET", "SECRETS", "KEY", "KEYS", "PASSWORD", "PASS", "AUTH",
           "CREDENTIALS"}  # fmt: skip
_NOT_SENT = tuple(VISIBLE_DEVICES.values())  # the slots say which


def launch_on_hosts(
    options: RunOptions, choice: HostChoice, hosts: Sequence[Host] | None = None
) -> int:
    """Run the job on the hosts that `choice` names, or on `hosts`; return the exit code of
    ``zeroshard run``.
    """
    if hosts is None:
        hosts = choose_hosts(read_hosts(choice.hostfile), choice.include, choice.exclude)
    try:
        shlex.split(choice.ssh)
    except ValueError as error:
        raise UsageError(f"--ssh {choice.ssh}: {error}") from None
    sent_environment(os.environ, choice.export)  # refuses before anything is started
    return _HostsJob(options, choice, hosts).run()


def sent_environment(environ: Mapping[str, str], export: Sequence[str]) -> dict[str, str]:
    """Return the variables that hosts get: variables of the libraries, no secrets, and `export`.

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


class _HostsJob:
    """The connections to all hosts, from the first to the last of them."""

    def __init__(self, options: RunOptions, choice: HostChoice, hosts: Sequence[Host]) -> None:
        self._begin = time.monotonic()
        self._options, self._choice = options, choice
        own = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        self._signal_grace_s = float(
            own if own.isdecimal() else max(options.grace_s, SIGNAL_GRACE_S)
        )
        self._selector = selectors.DefaultSelector()
        self._signals = 0
        self._ended_by: int | None = None
        self._end_by, self._tell_at = math.inf, self._begin + TELL_S
        self._is_ending = False
        self._has_told = False  # why the job ends
        self._hosts = {host.name: host for host in hosts}
        self._absent = AbsentHosts(choice.rejoin_after, GREETING_S, self._connect)
        self._grows, self._look_at = False, -math.inf
        # by directory: branch and number of the step in memory at this start
        self._began_from: dict[str, list[int]] = {}
        self._connections = [self._connect(host) for host in hosts]
        for node_rank, connection in enumerate(self._connections):
            connection.order(_orders(options, choice, hosts, node_rank))

    def run(self) -> int:
        """Return the exit code when all hosts have ended."""
        try:
            with _wakeup(self._selector, self._take_signals):
                while not all(map(self._has_ended, self._connections)) or self._go_on():
                    self._turn()
        finally:
            self._absent.close()
            for connection in self._connections:
                connection.close()
        return self._tell()

    def _has_ended(self, connection: Connection) -> bool:
        waits = self._options.elastic is not None and connection.waits
        return waits or not connection.is_open

    def _go_on(self) -> bool:
        """Begin again without what has died, or with what is back, where ``--elastic`` says so;
        return whether.
        """
        if self._options.elastic is None or self._ended_by is not None:
            return False
        left = self._left(self._options.elastic)
        self._has_told = left is not None and not left
        if not left:
            return False
        self._absent.take([one for one, _ in left if one not in self._connections])
        for connection in self._connections:
            if connection not in [one for one, _ in left]:
                if not connection.waits and not elastic.has_refused(connection):
                    self._absent.add(self._hosts[connection.host.name])
                connection.close()
        left.sort(key=lambda one: list(self._hosts).index(one[1].name))
        hosts = [host for _, host in left]
        # the line names the address of its first host, if that is still there
        is_first = left[0][0].host.name == next(iter(self._hosts))
        choice = replace(self._choice, master_addr=self._choice.master_addr if is_first else None)
        for node_rank, (connection, host) in enumerate(left):
            orders = _orders(self._options, choice, hosts, node_rank)
            connection.begin_again(host, {**orders, "environment": _devices(host)})
        self._connections = [connection for connection, _ in left]
        self._is_ending, self._end_by, self._begin = False, math.inf, time.monotonic()
        self._began_from = self._connections[0].kept["whole"]
        return True

    def _left(self, least: int) -> list[tuple[Connection, Host]] | None:
        """Return the hosts that go on: none where they are too few, None where the job is over."""
        grows, self._grows = self._grows, False
        if grows and all(one.exit_code == 0 for one in self._connections):
            return None  # it was done before it could be stopped
        grown = elastic.grow(self._connections, self._absent.back) if grows else None
        return grown or elastic.go_on(self._connections, self._outcome(), least)

    def _connect(self, host: Host) -> Connection:
        """Start ssh to a host, where a guard then waits for orders."""
        choice = self._choice
        environment = sent_environment(os.environ, choice.export) | dict(choice.variables)
        environment |= _devices(host)
        orders = beginning([sys.executable, "-P", "-m", "zeroshard.launch.on_host"], environment)
        command = [*shlex.split(choice.ssh), *SSH_OPTIONS, "--", host.name, COMMAND]
        try:
            return Connection(host, command, orders, self._selector, self._tell_port)
        except OSError as error:
            raise UsageError(f"--ssh {command[0]}: {error.strerror}") from None

    def _tell_port(self, note: Mapping[str, Any]) -> None:
        """Tell all hosts but the first the port at which it listens."""
        for other in self._connections[1:]:
            other.order(note)

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        until = min(self._look_for_hosts_back(), self._look_for_silent_hosts(), self._end_by)
        patience = None if until == math.inf else max(until - time.monotonic(), 0.0)
        for key, _ in self._selector.select(patience):
            if key.fileobj in self._selector.get_map():  # not closed by one before it
                key.data()
        if not self._is_ending and any(one.has_failed for one in self._connections):
            self._is_ending = True
            grace_s = self._options.grace_s
            answer_s = ANSWER_S if self._options.elastic is None else ELASTIC_ANSWER_S
            self._end_by = min(self._end_by, time.monotonic() + grace_s + answer_s)
            for connection in self._connections:
                if connection.exit_code is None:
                    connection.order({"end": grace_s})
        if time.monotonic() >= self._end_by:
            for connection in self._connections:
                if not self._has_ended(connection):
                    connection.lose("does not answer")

    def _look_for_silent_hosts(self) -> float:
        """Say which hosts have not begun, and give up those that have not for too long; return
        when to look again.
        """
        now, silent = time.monotonic(), [one for one in self._connections if one.is_silent]
        for connection in silent:
            if now >= connection.begun_at + GREETING_S:
                connection.lose(
                    f"has not begun within {GREETING_S:g} s: ssh runs, but no answer has come (see"
                    f" whether `{self._choice.ssh} {connection.host.name} true` ends)"
                )
        waited_for = [one for one in silent if one.is_open]
        if waited_for and now >= self._tell_at:
            names = ", ".join(one.host.name for one in waited_for)
            say(f"waiting for {names} to begin: ssh runs, but no answer has come")
            self._tell_at = now + TELL_S
        if not silent:
            return math.inf
        ends = [one.begun_at + GREETING_S for one in silent]  # past, of those given up just now
        return min(self._tell_at, *ends)

    def _look_for_hosts_back(self) -> float:
        """Ask absent hosts, and stop the job to begin again with those that are back: only when its
        ranks have kept a newer step in memory than the one they began from, so that nothing is
        lost but the step under way. Return when to look again.
        """
        if self._is_ending or any(one.exit_code is not None for one in self._connections):
            return math.inf
        ask_at = self._absent.ask()
        if not self._absent.back:
            return ask_at
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            whole = whole_steps([one.kept for one in self._connections])
            if any(step > self._began_from.get(name, []) for name, step in whole.items()):
                # all ranks end as for SIGTERM to the launcher: a script that handles it saves
                self._grows = self._is_ending = True
                self._end_by = time.monotonic() + self._signal_grace_s + ELASTIC_ANSWER_S
                for connection in self._connections:
                    connection.order({"signal": signal.SIGTERM})
                return math.inf
            for connection in self._connections:
                connection.order({"tell": "kept"})
        return min(ask_at, self._look_at)

    def _take_signals(self, numbers: bytes) -> None:
        for number in numbers:
            self._signals += 1
            if self._signals == 1:
                self._ended_by, self._is_ending = number, True
                self._end_by = time.monotonic() + self._signal_grace_s + ANSWER_S
                for connection in [] if self._grows else self._connections:  # told already
                    connection.order({"signal": number})
            elif number == signal.SIGINT:
                self._end_by = time.monotonic()

    def _outcome(self) -> Outcome:
        outcomes = [one.outcome for one in self._connections if one.outcome is not None]
        failures = blame_order([one for two in outcomes for one in two.failures if not one.left])
        if failures and (failures[0].consequence or failures[0].stalled):
            left = sorted((one for two in outcomes for one in two.left), key=lambda one: one.at)
            failures = [*left, *failures]
        return replace(
            Outcome(failures, stalled=any(outcome.stalled for outcome in outcomes)),
            ended_by=self._ended_by,
        )

    def _tell(self) -> int:
        """Say how the job has ended; return the exit code."""
        outcome = self._outcome()
        losses = [one.loss for one in self._connections if one.loss is not None]
        if losses and not outcome.was_ended:
            loss = min(losses, key=lambda one: one.at)
            first = outcome.failures[0] if outcome.failures else None
            if first is None or blame_time(first) > loss.at - SIGNAL_LEAD_S or first.consequence:
                if self._has_told:
                    return loss.code
                for failure in outcome.failures:
                    if not failure.silent and not failure.left:
                        said = (failure.message or failure.how).splitlines()[0][:160]
                        say(f"{failure.name} failed too: {said}")
                say(f"{loss.reason} ({loss.at - self._begin:.2f} s after the start)")
                return loss.code
        if not self._has_told:
            outcome.tell(self._begin)
        return outcome.exit_code


def _orders(
    options: RunOptions, choice: HostChoice, hosts: Sequence[Host], node_rank: int
) -> dict[str, Any]:
    """Return what a host's guard starts its launcher with."""
    master = choice.master_addr or hosts[0].name
    place = HostPlace(node_rank, len(hosts), to_text(master), choice.master_port)
    own = replace(options, hosts=None, standalone=False, nproc=str(len(hosts[node_rank].slots)))
    data = asdict(own)
    data["script"] = to_text(options.script)
    data["args"] = [to_text(argument) for argument in options.args]
    return {"options": data, "place": asdict(place)}


def _devices(host: Host) -> dict[str, str]:
    """Return the variables that show the ranks of a host its slots, where they are not all: one
    for each type of device, since the host's is not known here.
    """
    slots = ",".join(map(str, host.slots))
    return {} if host.is_whole else dict.fromkeys(VISIBLE_DEVICES.values(), slots)


def beginning(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the input that makes `COMMAND` run `command` on a host, in a directory of the same
    path as this process's, with `environment` added to the environment of the host's shell.
    """
    if "\n" in command[0]:
        raise UsageError(f"the path of the interpreter, {command[0]!r}, has a line end")
    texts = {to_text(name): to_text(text) for name, text in environment.items()}
    job = [to_text(os.getcwd()), [to_text(word) for word in command], texts]
    return os.fsencode(command[0]) + b"\n" + line(job)


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
