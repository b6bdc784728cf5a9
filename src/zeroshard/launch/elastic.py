"""``zeroshard run --elastic``: when a rank dies, the job starts again with those that are left.

The launcher ends what is left of the group and starts the script again with fewer ranks, which
resume by themselves: from memory that the launcher has kept for them (`KeeperServer`), else from
the newest checkpoint. `launch` does so on one host; on several `go_on` says which hosts are left.

Of several hosts one that was lost may come back (``hosts.py``): `grow` starts again with it.

Invariant: between two starts either the number of ranks has fallen, or all ranks have kept a newer
step; so a script that always fails ends. No torch here, but to count the devices of one host.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zeroshard.launch import worker
from zeroshard.launch.connection import Connection
from zeroshard.launch.options import ELASTIC, Host, RunOptions
from zeroshard.launch.outcome import Outcome, say
from zeroshard.launch.supervisor import (
    CONTRACT_EXIT_CODES,
    SIGNALS_OF_A_CONSEQUENCE,
    Failure,
)
from zeroshard.system.device import VISIBLE_DEVICES
from zeroshard.system.keeper_client import MAX_RECORD, KeptPart, newest, read_note
from zeroshard.system.this_host import raise_file_limit

_REFUSED = (2, 3)  # the command line or the configuration is wrong on a host


@dataclass(frozen=True)
class Loss:
    """A loss of ranks: the failure to name first, in words, and how many ranks are left."""

    reason: str  # "rank 1 died (killed by SIGKILL)"
    left: int
    of: int
    details: str = ""  # a traceback

    def tell(
        self, least: int, summaries: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[int]] | None:
        """Say who has died, and who goes on, from where by what the keepers of all hosts hold;
        return branch and number of the newest step in memory of each directory. None, which is
        said, where fewer than `least` are left.
        """
        goes_on = self.left >= least
        end = f"{self.left} rank(s) are left, and {ELASTIC}={least} needs {least}"
        if goes_on:
            end = f"{self.left} of {self.of} rank(s) go on, {source(summaries)}"
        say("\n".join(filter(None, [f"{self.reason}: {end}", self.details.rstrip()])))
        return whole_steps(summaries) if goes_on else None


def launch(options: RunOptions, run_ranks: Callable[[RunOptions], tuple[Outcome, int]]) -> int:
    """Run the script on this host until it ends, with fewer ranks after each death; return the
    exit code of ``zeroshard run``.
    """
    least, keeper = options.elastic or 1, KeeperServer()
    os.environ[worker.KEEPER] = keeper.address
    try:
        while True:
            begin = time.monotonic()
            outcome, num_ranks = run_ranks(options)
            dead = dead_ranks(outcome)
            if not dead:
                outcome.tell(begin)
                return outcome.exit_code
            loss = loss_of(outcome, dead, num_ranks - len(dead), num_ranks)
            if (whole := loss.tell(least, [keeper.summary()])) is None:
                return outcome.exit_code
            keeper.whole = whole
            _leave_devices(dead, num_ranks)
            options = replace(options, nproc=str(loss.left), elastic=min(least, loss.left))
    finally:
        keeper.close()


def dead_ranks(outcome: Outcome) -> set[int]:
    """Return the ranks that have died by themselves; none where the job as a whole has ended.

    That is the first to fail, and others that a signal has killed which no launcher and no lost
    peer sends, or that have failed with the same error. Other errors are taken for consequences.
    After a stall it is those that did not even answer: stopped, or in the kernel.
    """
    if outcome.ended_by is not None or not outcome.failures:
        return set()
    first = outcome.failures[0]
    if outcome.stalled or first.stalled:
        return {one.rank for one in outcome.failures if one.hung}
    if first.left or first.consequence or first.status in CONTRACT_EXIT_CODES:
        return set()
    dead = {first.rank}
    for one in outcome.failures:  # later ones that are deaths of their own
        same = bool(one.message) and one.message == first.message
        if _was_killed(one) or (same and not one.consequence):
            dead.add(one.rank)
    return dead


def _was_killed(failure: Failure) -> bool:
    """Whether a signal ended the rank which no launcher and no lost peer sends."""
    killed_by = -(failure.status or 0)
    return not failure.consequence and killed_by > 0 and killed_by not in SIGNALS_OF_A_CONSEQUENCE


def killed_ranks(outcome: Outcome) -> set[int]:
    """Return the ranks that have died by themselves where a host was lost: any other failure may
    be its consequence.
    """
    return {failure.rank for failure in outcome.failures if _was_killed(failure)}


def loss_of(outcome: Outcome, dead: set[int], left: int, of: int) -> Loss:
    """Return that the ranks `dead` are lost, with the name of the first to fail."""
    first = next(failure for failure in outcome.failures if failure.rank in dead)
    who = f"{first.name} and {len(dead) - 1} more" if len(dead) > 1 else first.name
    hint = " (often the kernel, out of memory)" if first.status == -signal.SIGKILL else ""
    reason = f"{who} died, {first.how}{hint}"
    if first.hung:
        reason = f"{who} hung: asked for its stacks, it did not answer"
    return Loss(reason, left, of, first.traceback)


def source(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return from where the ranks will go on, from what the keepers of all hosts say."""
    kept, saved = whole_steps(summaries), dict[str, list[int]]()
    for summary in summaries:
        for directory, step in summary["saved"].items():  # hosts heard of different saves
            saved[directory] = max(step, saved.get(directory, step))
    found = []
    for directory in sorted({*saved, *kept}):
        if kept.get(directory, []) >= saved.get(directory, []):
            found.append(f"memory (step {kept[directory][-1]})")
        else:
            found.append(f"checkpoint (step {saved[directory][-1]})")
    return f"from {', '.join(found)}" if found else "from the start: no step is saved"


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


def go_on(
    connections: Sequence[Connection], outcome: Outcome, least: int
) -> list[tuple[Connection, Host]] | None:
    """Return the hosts that go on, with the slots that they still have; none where they are too
    few. Either is said. None where nobody has died by whom the job could go on.

    A host is gone, with its memory, when its connection has ended or its last rank has died. The
    others keep their connection and their guard, which holds the memory of its host.
    """
    lost = [connection for connection in connections if not connection.waits]
    if any(has_refused(one) and not one.came_back for one in lost):
        return None
    dead = killed_ranks(outcome) if lost else dead_ranks(outcome)
    if not dead and (outcome.stalled or not lost):
        return None
    left, first_rank = list[tuple[Connection, Host]](), 0
    for connection in connections:
        host = connection.host
        slots = [slot for place, slot in enumerate(host.slots) if first_rank + place not in dead]
        first_rank += len(host.slots)
        if slots and connection not in lost:
            left.append((connection, replace(host, slots=tuple(slots))))
    num_left = sum(len(host.slots) for _, host in left)
    if losses := [one.loss for one in lost if one.loss is not None]:
        loss = Loss(min(losses, key=lambda one: one.at).reason, num_left, first_rank)
    elif not dead:
        loss = Loss(f"{lost[0].host.name} has left", num_left, first_rank)
    else:
        loss = loss_of(outcome, dead, num_left, first_rank)
    whole = loss.tell(least, [connection.kept for connection, _ in left])
    if whole is None:
        return []
    for connection, _ in left:
        connection.kept["whole"] = whole
    return left


def grow(
    connections: Sequence[Connection], back: Sequence[Connection]
) -> list[tuple[Connection, Host]] | None:
    """Return all hosts of a job that was stopped to begin again with those that are `back`, which
    is said; None where one was lost meanwhile. Ranks that have failed were told to end.
    """
    if not back or not all(one.waits for one in connections):
        return None
    summaries = [one.kept for one in connections]
    left = [(one, one.host) for one in [*connections, *back]]
    names = ", ".join(one.host.name for one in back)
    num_ranks = sum(len(host.slots) for _, host in left)
    say(f"{names} came back: {num_ranks} rank(s) go on, {source(summaries)}")
    whole = whole_steps(summaries)
    for connection, _ in left:
        connection.kept["whole"] = whole
        connection.came_back = connection.came_back or connection in back
    return left


def has_refused(connection: Connection) -> bool:
    """Whether the command line or the configuration is wrong on the host."""
    return connection.loss is not None and connection.loss.code in _REFUSED


def visible_devices(visible: Sequence[str], num_ranks: int, dead: Iterable[int]) -> list[str]:
    """Return the devices of `visible` for the ranks left: each rank had the device of its number,
    and the device of a dead rank may be broken. All where they are fewer than ranks.
    """
    gone = set(dead)
    if len(visible) < num_ranks:
        return list(visible)
    return [device for number, device in enumerate(visible) if number not in gone]


def _leave_devices(dead: Iterable[int], num_ranks: int) -> None:
    """Hide the devices of dead ranks of this host from the next ones."""
    import torch

    found = torch.accelerator.current_accelerator()
    variable = None if found is None else VISIBLE_DEVICES.get(found.type)
    if variable is None:
        return
    named = os.environ.get(variable)
    if named is None:
        visible = [str(number) for number in range(torch.accelerator.device_count())]
    else:
        visible = [device for device in named.split(",") if device]
    if visible:
        os.environ[variable] = ",".join(visible_devices(visible, num_ranks, dead))


# ------------------------------------------------------------------- memory that outlives the ranks
# A thread of the launcher, or on several hosts of each host's guard, keeps the descriptors of
# anonymous files that ranks have filled, by slot; ``system/keeper_client.py`` is the ranks' side
# and says what they ask. It reads the notes of parts and never their content.
#
# Invariant: only processes of this user are answered. A request that is not understood ends its
# connection and changes nothing. At the limit of open files, which is raised first, ranks are told
# so, and what is kept stays.

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
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if struct.unpack("3i", credentials)[1] == os.getuid():
                    try:
                        self._answer(connection)
                    except OSError as error:
                        if error.errno not in _FULL:
                            raise
                        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                        reason = (
                            "the launcher, which keeps this job's memory, has as many files open as"
                            f" it may ({limit}), two for each part of a checkpoint: raise its limit"
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
        elif "open" in request:
            found = {one.number: one for one in self._files.values()}[request["open"]]
            return [found.file, found.note]
        elif "parts" in request:
            return [self._table(request["parts"])]
        elif "whole" not in request:
            raise LookupError(request)
        return []

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
