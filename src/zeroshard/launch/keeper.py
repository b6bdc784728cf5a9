"""Keep memory for the ranks of this host, so that it outlives them.

Runs as a thread of the launcher, or on several hosts of each host's guard. It holds the descriptors
of anonymous files that ranks have filled, by slot; ``core/keeper.py`` is the ranks' side and says
what they ask. It reads the notes of parts (``core/kept.py``) and never their content.

Invariant: only processes of this user are answered. A request that is not understood ends its
connection and changes nothing. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from zeroshard.core.keeper import MAX_RECORD
from zeroshard.core.kept import Part, read_note

__all__ = ["KeeperServer"]

_PATIENCE_S = 10.0  # for a rank that has connected and says nothing


class _Files:
    """A part's two files, as descriptors."""

    def __init__(self, number: int, directory: str, writer: str, files: list[int]) -> None:
        self.number = number
        self.directory, self.writer = directory, writer
        self.file, self.note = files

    def part(self) -> Part | None:
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
        # by directory: the newest step that was whole on all hosts when the ranks were started
        self.whole: dict[str, int] = {}
        self._saved: dict[str, int] = {}  # by directory: the newest step that is known on disk
        self._files: dict[tuple[Any, ...], _Files] = {}  # by slot
        self._count = 0
        self._lock = threading.Lock()
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
        for files in self._files.values():
            files.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                connection.settimeout(_PATIENCE_S)
                if _is_ours(connection):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        data, files, _, _ = socket.recv_fds(connection, MAX_RECORD, 2, socket.MSG_CMSG_CLOEXEC)
        try:
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
            self._saved[request["saved"]] = int(request["step"])
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
        new = _Files(self._count, slot[0], slot[1], files)
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

    def _complete(self) -> Iterator[tuple[int, Part]]:
        for files in self._files.values():
            part = files.part()
            if part is not None:
                yield files.number, part


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())
