"""One host of ``zeroshard run --hostfile``: its ssh process, what it writes, what is known of it.

Invariant: a host whose connection ends has ended its part of the job, or ends it now. No torch
here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from zeroshard.launch import wire
from zeroshard.launch.hostfile import Host
from zeroshard.launch.reports import Outcome
from zeroshard.launch.supervisor import Failure

__all__ = ["EXIT_IO", "Connection", "HostLoss"]

EXIT_IO = 74


@dataclass(frozen=True)
class HostLoss:
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


class Connection:
    """The ssh process of one host, and what is known of the host."""

    def __init__(self, host: Host, command: list[str], orders: bytes) -> None:
        self.host = host
        self.outcome: Outcome | None = None
        self.loss: HostLoss | None = None
        self.exit_code: int | None = None  # of its launcher
        self.kept: dict[str, Any] = {"parts": [], "saved": {}}  # in the host's memory
        self.is_open, self.begun_at = True, time.monotonic()
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
    def is_silent(self) -> bool:
        """Whether the command has not begun on the host, as far as is known."""
        return self.is_open and not self._frames.greeted

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
        self.kept = note.get("kept", self.kept)
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
        self.loss = HostLoss(time.monotonic(), reason, code)

    def lose(self, reason: str) -> None:
        """Note that nothing more will come from this host, and why."""
        self.loss = self.loss or HostLoss(time.monotonic(), f"{self.host.name} {reason}", EXIT_IO)

    @property
    def waits(self) -> bool:
        """Whether its part of the job has ended, and it could begin another."""
        return self.is_open and self.exit_code is not None and self.loss is None

    def begin_again(self, host: Host, orders: Mapping[str, Any]) -> None:
        """Have the host start a launcher once more, for the slots that `host` still has."""
        self.host, self.outcome, self.exit_code = host, None, None
        self._asked_to_end, self._error = False, ""
        self.order({"again": {**orders, "whole": self.kept["whole"]}})

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
