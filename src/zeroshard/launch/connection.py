"""One host of ``zeroshard run --hostfile``: its ssh process, its state, and the wire format.

To the host go lines of JSON. From the host comes a greeting and then frames, and nothing else on
its standard output: one byte that says what it is, four that say how long, the bytes (`OUT` and
`ERR`: output of the job; `NOTE`: JSON). A shell's greeting before ours is passed over.

Text of the system's (arguments, paths, the environment) is bytes; it becomes str as UTF-8 with
surrogateescape, whatever the locales of both sides are, so that all bytes come back as they went.

Invariant: where a connection ends, its host has ended its part of the job, or ends it now. No torch
here.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from zeroshard.launch.options import Host
from zeroshard.launch.outcome import Outcome
from zeroshard.launch.supervisor import Failure
from zeroshard.system.this_host import is_loopback
from zeroshard.terminal import EXIT_IO, UsageError

GREETING = b"\n\x01zeroshard 1\n"
OUT, ERR, NOTE = b"o", b"e", b"n"
_HEAD = struct.Struct("!cI")
_MAX_FRAME = 1 << 26
_MAX_BEFORE = 1 << 16


def to_text(data: bytes | str) -> str:
    """Return bytes of the system's, or a str that Python made of them, as text for JSON."""
    return os.fsencode(data).decode("utf-8", "surrogateescape")


def from_text(text: str) -> str:
    """Return what `to_text` was given, as Python shows it on this host."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def line(message: Any) -> bytes:
    """Return a message to the host."""
    return json.dumps(message).encode("ascii") + b"\n"


def frame(kind: bytes, data: bytes) -> bytes:
    """Return a frame from the host."""
    return _HEAD.pack(kind, len(data)) + data


class Frames:
    """Takes the bytes of a host as they come, and gives whole frames."""

    def __init__(self) -> None:
        self._unread = b""
        self.greeted = False

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the frames that are complete by now. Raises ValueError for bytes of others."""
        self._unread += data
        if not self.greeted:
            before, found, rest = self._unread.partition(GREETING)
            if not found:
                if len(before) > _MAX_BEFORE:
                    raise ValueError("its shell writes too much before the command")
                return []
            self.greeted, self._unread = True, rest
        frames = []
        while len(self._unread) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._unread)
            if kind not in (OUT, ERR, NOTE) or length > _MAX_FRAME:
                raise ValueError("it sent bytes that are not of zeroshard's protocol")
            if len(self._unread) < _HEAD.size + length:
                break
            frames.append((kind, self._unread[_HEAD.size : _HEAD.size + length]))
            self._unread = self._unread[_HEAD.size + length :]
        return frames


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
    """The ssh process of one host, and what is known of the host. It serves its own descriptors in
    the loop of `selector`: its keys hold the function to call. `tell_port` gets the note with the
    port of the first host.
    """

    def __init__(
        self,
        host: Host,
        command: list[str],
        orders: bytes,
        selector: selectors.BaseSelector,
        tell_port: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.host = host
        self.outcome: Outcome | None = None
        self.loss: HostLoss | None = None
        self.exit_code: int | None = None  # of its launcher
        self.kept: dict[str, Any] = {"parts": [], "saved": {}}  # in the host's memory
        self.came_back = False  # after the job had gone on without the host
        self.is_open, self.begun_at = True, time.monotonic()
        self._asked_to_end = False
        self._error = ""
        self._complaints = b""  # ssh's own
        self._orders = bytearray()
        self._frames = Frames()
        self._outputs = {
            OUT: _Lines(host.name, sys.stdout.buffer),
            ERR: _Lines(host.name, sys.stderr.buffer),
        }
        self._selector, self._tell_port = selector, tell_port
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(
            # not in our group: the terminal's Ctrl-C is passed on, and must not cut the line
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        self._streams = (process.stdin, process.stdout, process.stderr)
        self._stdin, self._stdout, self._stderr = (stream.fileno() for stream in self._streams)
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
        self._pidfd = os.pidfd_open(process.pid)
        self._serve(self._stdout, self._read_frames)
        self._serve(self._stderr, self._read_complaints)
        self._serve(self._pidfd, self._end)
        self._send(orders)

    def _serve(self, descriptor: int, serve: Callable[[], object]) -> None:
        event = selectors.EVENT_WRITE if descriptor == self._stdin else selectors.EVENT_READ
        if descriptor not in self._selector.get_map():
            self._selector.register(descriptor, event, serve)

    def _ignore(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)

    @property
    def has_failed(self) -> bool:
        """Whether this host's part is a reason to end the others."""
        return self.loss is not None or self.exit_code not in (None, 0)

    @property
    def is_silent(self) -> bool:
        """Whether the command has not begun on the host, as far as is known."""
        return self.is_open and not self._frames.greeted

    @property
    def waits(self) -> bool:
        """Whether its part of the job has ended, and it could begin another."""
        return self.is_open and self.exit_code is not None and self.loss is None

    def order(self, order: Mapping[str, Any]) -> None:
        """Have an order written."""
        self._asked_to_end = self._asked_to_end or "end" in order or "signal" in order
        self._send(line(order))

    def begin_again(self, host: Host, orders: Mapping[str, Any]) -> None:
        """Have the host start a launcher once more, for the slots that `host` still has."""
        self.host, self.outcome, self.exit_code = host, None, None
        self._asked_to_end, self._error = False, ""
        self.order({"again": {**orders, "whole": self.kept["whole"]}})

    def _send(self, orders: bytes) -> None:
        if self.is_open:
            self._orders += orders
            self._serve(self._stdin, self._write)

    def _write(self) -> None:
        """Write as much of the orders as ssh takes now."""
        try:
            del self._orders[: os.write(self._stdin, self._orders[: 1 << 16])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # ssh has ended, which is noticed by itself
            self._orders.clear()
        if not self._orders:
            self._ignore(self._stdin)

    def _read(self, descriptor: int) -> bytes:
        """Return what there is to read, b"" for nothing."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return b""
        if not data:
            self._ignore(descriptor)
        return data

    def _read_complaints(self) -> bool:
        """Take ssh's own messages; return whether there were some."""
        data = self._read(self._stderr)
        self._complaints = (self._complaints + data)[-(1 << 14) :]
        return bool(data)

    def _read_frames(self) -> bool:
        """Pass on output and take notes; return whether there was something to read."""
        data = self._read(self._stdout)
        try:
            frames = self._frames.feed(data)
            notes = [json.loads(content) for kind, content in frames if kind == NOTE]
        except ValueError as error:
            self.lose(f"cannot be understood: {error}")
            return False
        for kind, content in frames:
            if kind != NOTE:
                self._outputs[kind].write(content)
        for note in notes:
            self._note(note)
        return bool(data)

    def _note(self, note: Mapping[str, Any]) -> None:
        """Take a note of the host's."""
        if "port" in note:
            self._tell_port(note)
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
        """Note that nothing more will come from this host, and why; end the connection."""
        self.loss = self.loss or HostLoss(time.monotonic(), f"{self.host.name} {reason}", EXIT_IO)
        self.close()

    def _end(self) -> None:
        """ssh has ended: take what is left to read, then the end."""
        for read in (self._read_complaints, self._read_frames):
            while self.is_open and read():
                pass
        if not self.is_open:
            return
        self._process.wait()
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
        self._ignore(self._stdin, self._stdout, self._stderr, self._pidfd)
        for output in self._outputs.values():
            output.close()
        for stream in self._streams:
            stream.close()
        if self._process.poll() is None:
            self._process.terminate()
        os.close(self._pidfd)


# ------------------------------------------------------ the address at which the first host listens


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at `port` (0: a free one) of this host's `address`.

    It listens at that address alone. Many systems give a host's own name the address 127.0.1.1,
    which no other host reaches: then it listens at all addresses.

    Raises:
        UsageError: the port is taken, or the address is not this host's.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"{address} is not known here ({error.strerror}): --master-addr names this host as the"
            " others reach it"
        ) from None
    # IPv4 where there is a choice: every host has it
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    family, kind, protocol, _, where = found[0]
    if is_loopback(str(where[0])) and not is_loopback(address):
        family, where = socket.AF_INET, ("", port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        remedy = "--master-addr names this host as the others reach it"
        if port:
            remedy = f"--master-port {port} cannot be used; leave it out to get a free one"
        raise UsageError(f"cannot listen at {address}:{port}: {error.strerror}; {remedy}") from None
    return listener
