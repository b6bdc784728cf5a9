"""The keeper as a rank asks it: anonymous files that stay when the rank is gone.

``zeroshard run --elastic`` runs a keeper on each host (``launch/keeper.py``). Requests are records
on an abstract Unix socket, a connection each; files travel as descriptors.

Invariant: a file that `put` has returned for stays until `drop`, whatever happens to this process.
Cost: some 100 us a request.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from zeroshard.core.kept import Part
from zeroshard.errors import CheckpointError

__all__ = ["MAX_RECORD", "Keeper"]

MAX_RECORD = 1 << 16
_TIMEOUT_S = 60.0
_HOLDER = "the launcher that keeps this job's memory"


class Keeper:
    """The keeper of this host at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def put(self, slot: list[Any], file: int, note: int) -> None:
        """Have the keeper hold two files, for those that it held for this `slot`."""
        self._ask({"put": slot}, [file, note])

    def parts(self, directory: str) -> list[tuple[int, Part]]:
        """Return the complete parts of saves for `directory`, by the keeper's numbers for them."""
        _, (table,) = self._ask({"parts": directory})
        with os.fdopen(table, "rb") as file:
            return [(number, Part(**raw)) for number, raw in json.loads(file.read())]

    def open(self, number: int) -> tuple[int, int]:
        """Return descriptors of a part's file and note, the caller's to close."""
        _, (file, note) = self._ask({"open": number})
        return file, note

    def drop(self, directory: str, *, but: str) -> None:
        """Give up what other writers than `but` have put for `directory`."""
        self._ask({"drop": directory, "but": but})

    def saved(self, directory: str, step: int) -> None:
        """Tell that `step` is complete on disk."""
        self._ask({"saved": directory, "step": step})

    def whole_step(self, directory: str) -> int | None:
        """Return the newest whole step of `directory` when the ranks were started, on all hosts."""
        answer, _ = self._ask({"whole": directory})
        step: int | None = answer["step"]
        return step

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> tuple[Any, list[int]]:
        """Send a request with `files`; return the answer, and its descriptors. Raises
        CheckpointError.
        """
        try:
            with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect("\0" + self.address)
                socket.send_fds(connection, [json.dumps(request).encode()], files)
                data, received, flags, _ = socket.recv_fds(
                    connection, MAX_RECORD, 2, socket.MSG_CMSG_CLOEXEC
                )
        except ConnectionRefusedError:
            raise CheckpointError(f"{_HOLDER} is gone") from None
        except OSError as error:
            raise CheckpointError(f"{_HOLDER} cannot be asked: {error}") from error
        answer = json.loads(data) if data else {"refused": f"{_HOLDER} gave no answer"}
        if flags & socket.MSG_CTRUNC:
            answer["refused"] = "this rank has as many files open as it may: raise ulimit -n"
        if "refused" in answer:
            for descriptor in received:
                os.close(descriptor)
            raise CheckpointError(answer["refused"])
        return answer, received
