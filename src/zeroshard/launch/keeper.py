"""Keep memory for the ranks of this host, so that it outlives them.

Runs as a thread of the launcher, or on several hosts of each host's guard. It holds the descriptors
of anonymous files that ranks have filled, by slot; ``system/keeper_client.py`` is the ranks' side
and says what they ask. It reads the notes of parts and never their content.

Invariant: only processes of this user are answered. A request that is not understood ends its
connection and changes nothing. At the limit of open files, which is raised first, ranks are told
so, and what is kept stays. No torch here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from zeroshard.system.keeper_client import MAX_RECORD, KeptPart, read_note
from zeroshard.system.sockets import raise_file_limit

_PATIENCE_S = 10.0  # for a rank that has connected and says nothing
_FULL = (errno.EMFILE, errno.ENFILE)
_FULL_PAUSE_S = 0.05


class _PartFiles:
    """A part's two files, as descriptors."""

    def __init__(self, number: int, directory: str, writer: str, files: list[int]) -> None:
        self.number = number
        self.directory, self.writer = directory, writer
        self.file, self.note = files

    def part(self) -> KeptPart | None:
        """Return the part, if it is complete."""
        found = read_note(os.pread(self.note, os.fstat(self.note).st_size, 0))
        return None if found is None else found[0]

    def close(self) -> None:
        """Give the memory back, unless a rank has it open."""
        os.close(self.file)
        os.close(self.note)


class KeeperServer:
    """The keeper of this host. `address` is where ranks ask it."""

    def __init__(self) -> None:
        self.address = f"zeroshard-keeper-{secrets.token_hex(16)}"
        # by directory: branch and number of the newest step that was whole on all hosts when the
        # ranks were started
        self.whole: dict[str, list[int]] = {}
        self._saved: dict[str, list[int]] = {}  # of the newest step that is known on disk
        self._files: dict[tuple[Any, ...], _PartFiles] = {}  # by slot
        self._count = 0
        self._lock = threading.Lock()
        raise_file_limit()  # two files for each part that is kept here
        self._spare: int | None = _nothing()  # given up to take a connection at the limit
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(4096)
        self._thread = threading.Thread(target=self._serve, name="zeroshard-keeper", daemon=True)
        self._thread.start()

    def summary(self) -> dict[str, Any]:
        """Return what is kept here, as JSON: complete parts, and steps known to be on disk."""
        with self._lock:
            parts = [asdict(part) for _, part in self._complete()]
            return {"parts": parts, "saved": dict(self._saved)}

    def close(self) -> None:
        """Give all memory back."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._give_up_spare()
        for files in self._files.values():
            files.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in _FULL:  # closed
                    return
                if self._spare is None:
                    time.sleep(_FULL_PAUSE_S)
                self._give_up_spare()
                continue
            # whatever a rank sends: the others' memory is here
            with connection, contextlib.suppress(Exception):
                connection.settimeout(_PATIENCE_S)
                if _is_ours(connection):
                    self._answer_or_refuse(connection)
            if self._spare is None:
                with contextlib.suppress(OSError):
                    self._spare = _nothing()

    def _give_up_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

    def _answer_or_refuse(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            reason = (
                f"the launcher, which keeps this job's memory, has as many files open as it may"
                f" ({limit}), two for each part of a checkpoint: raise its limit (ulimit -n)"
            )
            connection.send(json.dumps({"refused": reason}).encode())

    def _answer(self, connection: socket.socket) -> None:
        data, files, flags, _ = socket.recv_fds(connection, MAX_RECORD, 2, socket.MSG_CMSG_CLOEXEC)
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            request = json.loads(data)
            with self._lock:
                given = self._do(request, files)
                files = []
            answer = {"step": self.whole.get(request["whole"])} if "whole" in request else {}
            socket.send_fds(connection, [json.dumps(answer).encode()], given)
        finally:
            for descriptor in files:
                os.close(descriptor)
        if "parts" in request:
            os.close(given[0])

    def _do(self, request: dict[str, Any], files: list[int]) -> list[int]:
        """Do what a rank asks; return the descriptors that it gets."""
        if "put" in request:
            directory, writer, *place = request["put"]
            self._put((directory, writer, *place), files)
        elif "drop" in request:
            self._drop(request["drop"], request["but"])
        elif "saved" in request:
            self._saved[request["saved"]] = [int(number) for number in request["step"]]
        elif "open" in request:
            found = {one.number: one for one in self._files.values()}[request["open"]]
            return [found.file, found.note]
        elif "parts" in request:
            return [self._table(request["parts"])]
        elif "whole" not in request:
            raise LookupError(request)
        return []

    def _put(self, slot: tuple[Any, ...], files: list[int]) -> None:
        self._count += 1
        new = _PartFiles(self._count, slot[0], slot[1], files)
        old, self._files[slot] = self._files.get(slot), new
        if old is not None:
            old.close()

    def _drop(self, directory: str, but: str) -> None:
        for slot, files in list(self._files.items()):
            if files.directory == directory and files.writer != but:
                self._files.pop(slot).close()

    def _table(self, directory: str) -> int:
        """Return a file with the complete parts of `directory`: a record may be too short."""
        rows = [
            (number, asdict(part))
            for number, part in self._complete()
            if part.directory == directory
        ]
        table = os.memfd_create("zeroshard-parts", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(table), "wb") as file:
            file.write(json.dumps(rows).encode())
        os.lseek(table, 0, os.SEEK_SET)
        return table

    def _complete(self) -> Iterator[tuple[int, KeptPart]]:
        for files in self._files.values():
            part = files.part()
            if part is not None:
                yield files.number, part


def _nothing() -> int:
    """Return a descriptor of an empty file."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
