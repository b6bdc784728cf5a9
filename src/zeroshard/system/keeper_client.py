"""The keeper as a rank asks it: parts of a checkpoint in memory that outlives the rank.

A keeper runs on each host (``keeper.py``). Requests are records on an abstract Unix socket, a
connection each; files travel as descriptors. A part is two anonymous files: pieces, and a note.

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
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from zeroshard.errors import CheckpointError
from zeroshard.system.this_host import starter_of

MAX_RECORD = 1 << 16
_TIMEOUT_S = 60.0
_START_S = 10.0
_RAYS_PATIENCE_S = 600.0
_HOLDER = "the process that keeps this job's memory"
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

    def is_there(self) -> bool:
        """Whether somebody answers at the address."""
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
            return connection.connect_ex("\0" + self.address) == 0

    def start(self, starter: int, patience_s: float) -> None:
        """Start it, unless another rank has: it ends with the process `starter`. Raises
        CheckpointError.
        """
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        words = [self.address, str(starter), str(patience_s)]
        null = subprocess.DEVNULL
        until = time.monotonic() + _START_S
        try:
            subprocess.run(
                [sys.executable, "-P", "-m", "zeroshard.system.keeper", *words],
                env={**os.environ, "PYTHONPATH": path},
                stdin=null,
                stdout=null,
                stderr=null,
                start_new_session=True,
            )
        except OSError as error:
            raise CheckpointError(f"{_HOLDER} cannot be started: {error}") from error
        while not self.is_there():
            if time.monotonic() > until:
                raise CheckpointError(f"{_HOLDER} did not start within {_START_S:g} s")
            time.sleep(0.01)

    def put(self, slot: list[Any], file: int, note: int) -> None:
        """Give the keeper two files, in place of those that it held for this `slot`."""
        self._ask({"put": slot}, [file, note])

    def parts(self, directory: str | None = None) -> list[tuple[int, KeptPart]]:
        """Return the complete parts of saves for `directory`, or all, by the keeper's numbers."""
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

    def tell_whole(self, whole: Mapping[str, Sequence[int]]) -> None:
        """Tell which steps are whole on all hosts: see `whole_steps`."""
        self._ask({"agreed": whole})

    def leave(self) -> None:
        """Tell that this rank has ended its work well, and needs nothing of what is kept."""
        self._ask({"left": True})

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
                if peer_of(connection)[1] != os.getuid():  # the name may be known to others
                    raise CheckpointError(f"{_HOLDER} is another user's: nothing is kept there")
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


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


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


def whole_steps(summaries: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return, by directory, branch and number of the newest step that is whole in the memory of all
    hosts together.
    """
    by_directory: dict[str, list[KeptPart]] = {}
    for summary in summaries:
        for raw in summary["parts"]:
            by_directory.setdefault(raw["directory"], []).append(KeptPart(**raw))
    found = {directory: newest(parts) for directory, parts in by_directory.items()}
    return {directory: [*save[:2]] for directory, save in found.items() if save is not None}


def who_restarts(environ: Mapping[str, str]) -> tuple[int, float] | None:
    """Return the process that starts the ranks of this host again when some have died, and for how
    many seconds what they have kept waits for that; None where it is known of nobody.

    torchrun's agent does where it may (``--max-restarts``), and ends with its job. Ray's raylet may
    at any time, and outlives the job.
    """
    with suppress(OSError, ValueError):
        if int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            return starter_of("TORCHELASTIC_MAX_RESTARTS"), math.inf
        if "RAY_RAYLET_PID" in environ:
            return int(environ["RAY_RAYLET_PID"]), _RAYS_PATIENCE_S
    return None


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
