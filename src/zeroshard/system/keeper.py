"""The keeper of a host: a process that holds memory for ranks, and outlives them.

``zeroshard run --elastic`` runs a keeper as a thread of the launcher, or on several hosts of each
host's guard. Under any other launcher that starts ranks again (torchrun, Ray, a restarted pod) the
first rank of a host that keeps a step starts a process of its own for it:

    python -m zeroshard.system.keeper ADDRESS STARTER SECONDS

It ends with the process STARTER, which starts the ranks of this host; once all ranks have ended
well; and SECONDS after they have ended otherwise, where nobody has started them again.

It keeps the descriptors of anonymous files that ranks have filled, by slot; ``keeper_client.py`` is
the ranks' side and says what they ask. It reads the notes of parts and never their content.

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
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeroshard.system.keeper_client import MAX_RECORD, KeptPart, peer_of, read_note
from zeroshard.system.this_host import raise_file_limit

_PATIENCE_S = 10.0  # for a rank that has connected and says nothing
_FULL = (errno.EMFILE, errno.ENFILE)
_FULL_PAUSE_S = 0.05
_LOOK_S = 0.5  # between two looks at the ranks


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
    """The keeper of this host. `address` is where ranks ask it: a new one, if none is given.
    Raises OSError where another one is there.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or f"zeroshard-keeper-{secrets.token_hex(16)}"
        # by directory: branch and number of the newest step that was whole on all hosts when the
        # ranks were started
        self.whole: dict[str, list[int]] = {}
        # by process id of a rank that has kept something: whether it has ended its work well
        self.ranks: dict[int, bool] = {}
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
                pid, user = peer_of(connection)
                if user == os.getuid():
                    try:
                        self._answer(connection, pid)
                    except OSError as error:
                        if error.errno not in _FULL:
                            raise
                        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                        reason = (
                            "the process that keeps this job's memory has as many files open as it"
                            f" may ({limit}), two for each part of a checkpoint: raise its limit"
                            " (ulimit -n)"
                        )
                        connection.send(json.dumps({"refused": reason}).encode())
            if self._spare is None:
                with contextlib.suppress(OSError):
                    self._spare = _nothing()

    def _give_up_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)

    def _answer(self, connection: socket.socket, pid: int) -> None:
        data, files, flags, _ = socket.recv_fds(connection, MAX_RECORD, 2, socket.MSG_CMSG_CLOEXEC)
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            request = json.loads(data)
            with self._lock:
                given = self._do(request, files)
                files = []
                if "put" in request or "left" in request:
                    self.ranks = {one: well for one, well in self.ranks.items() if _is_there(one)}
                    self.ranks[pid] = "left" in request
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
            slot = (directory, writer, *place)
            self._count += 1
            new = _PartFiles(self._count, directory, writer, files)
            old, self._files[slot] = self._files.get(slot), new
            if old is not None:
                old.close()
        elif "drop" in request:
            for slot, one in list(self._files.items()):
                if one.directory == request["drop"] and one.writer != request["but"]:
                    self._files.pop(slot).close()
        elif "saved" in request:
            self._saved[request["saved"]] = [int(number) for number in request["step"]]
        elif "agreed" in request:
            self.whole = dict(request["agreed"])
        elif "open" in request:
            found = {one.number: one for one in self._files.values()}[request["open"]]
            return [found.file, found.note]
        elif "parts" in request:
            return [self._table(request["parts"])]
        elif "whole" not in request and "left" not in request:
            raise LookupError(request)
        return []

    def _table(self, directory: str | None) -> int:
        """Return a file with the complete parts of `directory`, or all: a record may be too
        short.
        """
        rows = [
            (number, asdict(part))
            for number, part in self._complete()
            if directory in (part.directory, None)
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


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def main(address: str, starter: str, seconds: str) -> None:
    """Keep what ranks give, until nobody needs it any more."""
    try:
        server, watch = KeeperServer(address), select.poll()
        watch.register(os.pidfd_open(int(starter)), select.POLLIN)
    except OSError:  # another rank was faster, or the job has ended
        return
    needed_at = time.monotonic()
    while not watch.poll(1000 * _LOOK_S):
        ranks = dict(server.ranks)
        if any(_is_there(pid) for pid in ranks):
            needed_at = time.monotonic()
        elif (ranks and all(ranks.values())) or time.monotonic() > needed_at + float(seconds):
            break
    server.close()


if __name__ == "__main__":
    os.chdir("/")
    if os.fork() == 0:  # a child of the rank would be ended with it
        main(*sys.argv[1:])
