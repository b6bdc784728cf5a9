"""Hosts that a job goes on without, asked at an interval whether they are back.

A host is asked as a start asks it: ssh, the interpreter, the directory and ``on_host.py``, whose
greeting is the answer. The connection that has brought the greeting stays open, and takes the
orders of the next start. A host that does not answer is asked again, and nothing is said of it.

Invariant: asking starts no part of the job, and a connection is open to a host once. No torch here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from zeroshard.launch.connection import Connection
from zeroshard.launch.hostfile import Host
from zeroshard.launch.options import UsageError


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
        """Ask the hosts whose time has come; return when to call again."""
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
