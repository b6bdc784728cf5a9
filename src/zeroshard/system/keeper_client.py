"""The keeper as a rank asks it: parts of a checkpoint in memory that outlives the rank.

``zeroshard run --elastic`` runs a keeper on each host (``launch/elastic.py``). Requests are records
on an abstract Unix socket, a connection each; files travel as descriptors. A part is two anonymous
files: pieces, and a note.

    note = hash of the rest . newline . the part as JSON . newline . index

The note is emptied before the part changes, and written after it. So a note with the right hash
stands for a part that is complete. A save is whole when the parts of all its ranks are there; there
is no other commit.

Invariant: a file that `put` has returned for stays until `drop`, whatever happens to this process.
`newest` never returns a save with a part that is missing or torn. Cost: some 100 us a request. No
torch here.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from zeroshard.errors import CheckpointError

MAX_RECORD = 1 << 16
_TIMEOUT_S = 60.0
_HOLDER = "the launcher that keeps this job's memory"
_HASH_BYTES = 32


KeptSave = tuple[int, int, str, int]  # branch, step, nonce, number of ranks: in order of saves


@dataclass(frozen=True)
class KeptPart:
    """One rank's part of one save in memory."""

    directory: str  # of the checkpoints that the save belongs to
    writer: str  # the Saver, the same on all ranks
    nonce: str  # the save, the same on all ranks
    step: int
    world: int
    rank: int
    file_bytes: int
    note_bytes: int = 0  # known once it is written
    branch: int = 0  # the later one was kept last (`Manifest.branch`)

    @property
    def save(self) -> KeptSave:
        """The save that it is a part of."""
        return self.branch, self.step, self.nonce, self.world


class Keeper:
    """The keeper of this host at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address

    def put(self, slot: list[Any], file: int, note: int) -> None:
        """Give the keeper two files, in place of those that it held for this `slot`."""
        self._ask({"put": slot}, [file, note])

    def parts(self, directory: str) -> list[tuple[int, KeptPart]]:
        """Return the complete parts of saves for `directory`, by the keeper's numbers for them."""
        _, (table,) = self._ask({"parts": directory})
        with os.fdopen(table, "rb") as file:
            return [(number, KeptPart(**raw)) for number, raw in json.loads(file.read())]

    def open(self, number: int) -> tuple[int, int]:
        """Return descriptors of a part's file and note, the caller's to close."""
        _, (file, note) = self._ask({"open": number})
        return file, note

    def drop(self, directory: str, *, but: str) -> None:
        """Give up what other writers than `but` have put for `directory`."""
        self._ask({"drop": directory, "but": but})

    def saved(self, directory: str, branch: int, step: int) -> None:
        """Tell that `step` of `branch` is complete on disk."""
        self._ask({"saved": directory, "step": [branch, step]})

    def whole_step(self, directory: str) -> tuple[int, int] | None:
        """Return branch and number of the newest whole step of `directory` when the ranks were
        started, on all hosts.
        """
        answer, _ = self._ask({"whole": directory})
        return None if answer["step"] is None else (answer["step"][0], answer["step"][1])

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


def note_of(part: KeptPart, index: bytes) -> bytes:
    """Return the note of a part that is complete; `index` is its part of the manifest."""
    rest = json.dumps(asdict(part)).encode() + b"\n" + index
    return xxhash.xxh3_128_hexdigest(rest).encode() + b"\n" + rest


def read_note(note: bytes) -> tuple[KeptPart, bytes] | None:
    """Return what `note_of` was given; None where the part is not complete."""
    own, rest = note[:_HASH_BYTES], note[_HASH_BYTES + 1 :]
    if xxhash.xxh3_128_hexdigest(rest).encode() != own:
        return None
    head, _, index = rest.partition(b"\n")
    return KeptPart(**{**json.loads(head), "note_bytes": len(note)}), index


def newest(parts: Iterable[KeptPart]) -> KeptSave | None:
    """Return the newest save that is whole; None: there is none.

    A part may be there several times, on several hosts.
    """
    ranks: dict[KeptSave, set[int]] = {}
    for part in parts:
        ranks.setdefault(part.save, set()).add(part.rank)
    return max((save for save, found in ranks.items() if len(found) == save[-1]), default=None)


def partners(homes: list[str]) -> list[int | None]:
    """Return, for each rank, the rank of the next host that holds its copy; None on one host.

    `homes` names the host of each rank. Ranks of a host are spread over the ranks of the next one.
    """
    hosts: dict[str, list[int]] = {}
    for rank, home in enumerate(homes):
        hosts.setdefault(home, []).append(rank)
    groups = list(hosts.values())
    found: list[int | None] = [None] * len(homes)
    for number, group in enumerate(groups):
        others = groups[(number + 1) % len(groups)]
        for place, rank in enumerate(group):
            found[rank] = others[place % len(others)] if len(groups) > 1 else None
    return found
