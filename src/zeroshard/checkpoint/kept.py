"""Steps that are kept in memory that outlives the ranks: ``Saver.keep`` writes one, ``zs.load``
reads one.

    keep    collect . divide . empty the note of the other slot . write the pieces . [send them to
            another host] . write the note . all ranks say that they have
    load    each rank asks the keeper of its host which parts lie there . all choose the newest
            save that is whole . a host gets the parts that it lacks from one that has them

The pieces are the same as in a save, in the same format, with the same hashes; the memory is an
anonymous file, and the keeper of the host holds its descriptor (``system/keeper.py``).

Invariant: of two slots, the one that is written never holds the last save that is whole: all ranks
have finished a slot before any begins the other. Every rank loads the same save, and verifies it by
the hashes of its manifest.

Cost of `keep`: one pass over the bytes for the copy and one for the hashes, five exchanges, the
memory of two parts on this host, and with redundancy their bytes once over the network and the
memory of two more there. Of a load: where hosts lack parts, their bytes over the network, and the
checkpoint's in the memory of each host until the next `keep`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from zeroshard.checkpoint.manifest import Manifest, digest, shard_name
from zeroshard.checkpoint.pipeline_stages import unite
from zeroshard.checkpoint.rank_part import Stateful, collect, divide
from zeroshard.checkpoint.shard_files import write_shard
from zeroshard.checkpoint.steps import os_errors, saved_order
from zeroshard.comm import memfd
from zeroshard.comm.groups import make_group
from zeroshard.comm.job import keeper_address
from zeroshard.comm.ranks import Meeting, MeshRanks
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.system.keeper_client import (
    Keeper,
    KeptPart,
    KeptSave,
    newest,
    note_of,
    partners,
    read_note,
    who_restarts,
    whole_steps,
)

# --------------------------------------------------------------------------- copies on another host
# Anonymous files of one rank are copied to a rank of another host.
#
# The messages travel over a gloo group of their own, made when the first file does, on the CPU
# beside any backend of the job's. Where a peer ends, gloo's error ends the copy.
#
# Invariant: ranks that copy call in the same order. Cost: each byte once over the network, without
# a copy on either side: the files are mapped.


class Copies:
    """Copies between `ranks`, which are given by their place in it. Made by all of them together;
    `ranks` are numbers in the job, and `exchange` takes a few bytes of each.
    """

    def __init__(self, ranks: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> None:
        self._ranks = list(ranks)
        self._exchange = exchange
        self._group = make_group(ranks, exchange, backend="gloo")

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._exchange(b"")  # all that was sent has come
        self.close()

    def close(self) -> None:
        """Give back the group, its threads and descriptors. No copy is under way on any rank."""
        with suppress(ValueError):  # with the job's own group it has gone
            dist.destroy_process_group(self._group)

    def sending(self, peer: int, files: Sequence[int]) -> list[Any]:
        """Begin to send whole files to `peer`; return what `wait` takes."""
        maps = [memfd.map_bytes(file, os.fstat(file).st_size) for file in files]
        return [self._begin(dist.isend, data, peer) for data in maps if len(data)]

    def receiving(self, peer: int, files: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """Begin to receive the first `sizes` bytes of files from `peer`; return what `wait`
        takes.
        """
        maps = [memfd.map_bytes(file, size) for file, size in zip(files, sizes, strict=True)]
        return [self._begin(dist.irecv, data, peer) for data in maps if len(data)]

    def wait(self, begun: Sequence[Any]) -> None:
        """Wait for everything that was begun."""
        for work, _ in begun:
            work.wait()

    def _begin(self, call: Callable[..., Any], data: torch.Tensor, peer: int) -> tuple[Any, Any]:
        # the mapping must live until the work is done
        return call(data, self._ranks[peer], group=self._group), data


# --------------------------------------------------------------------------------------- kept steps

_log = logging.getLogger("zeroshard")
_CALL = "saver.keep()"
# by directory: the engine that kept a step last
_kept: WeakValueDictionary[str, Engine] = WeakValueDictionary()


def local_keeper(*, start: bool = False) -> Keeper | None:
    """Return the keeper of this host. None where nobody would start the ranks again, or where no
    rank has kept anything yet: `start` starts one then. Raises CheckpointError.
    """
    address, restarter = keeper_address(), who_restarts(os.environ)
    if address is None:
        return None
    keeper = Keeper(address)
    if restarter is not None and not keeper.is_there():
        if not start:
            return None
        keeper.start(*restarter)
    return keeper


def tell_keepers(everyone: MeshRanks) -> None:
    """Tell the keepers of all hosts which steps in memory are whole, for `latest_step`: the ranks
    may have been started again, and some hosts may be new. Collective; `everyone` is all ranks of
    the job, else nothing is done.
    """
    if keeper_address() is None or (
        dist.is_initialized() and everyone.size < dist.get_world_size()
    ):
        return
    parts = list[tuple[int, KeptPart]]()
    with telling_keeper():
        if (keeper := local_keeper()) is not None:
            parts = keeper.parts()
    summaries = everyone.share({"parts": [asdict(part) for _, part in parts]}, "shard()")
    whole = whole_steps(summaries)
    with telling_keeper():
        if (keeper := local_keeper(start=bool(whole))) is not None:
            keeper.tell_whole(whole)


def tell_saved(directory: Path, branch: int, step: int) -> None:
    """Tell the launcher that `step` of `directory` is complete on disk. Raises CheckpointError."""
    keeper = local_keeper()
    if keeper is not None:
        keeper.saved(os.path.realpath(directory), branch, step)


def next_branch(directory: Path, step: int, *, in_memory: bool = False) -> int:
    """Return the branch on which `step` is newer than all that is in `directory` and in the memory
    of this host, and log where the run has gone back. `in_memory`: the step is kept there, perhaps
    beside an older one of the same number.
    """
    keeper = local_keeper()
    parts = [] if keeper is None else keeper.parts(os.path.realpath(directory))
    kept = [(part.branch, part.step) for _, part in parts]
    newest_one = max([*saved_order(directory)[-1:], *kept], default=(0, step))
    if step < newest_one[1]:
        _log.warning(
            "step %d is saved after step %d of %s: the run has gone back, and zs.load() takes what"
            " was saved last",
            step,
            newest_one[1],
            directory,
        )
    is_lower = step < newest_one[1] or (in_memory and (newest_one[0], step) in kept)
    return newest_one[0] + is_lower


@contextmanager
def telling_keeper() -> Iterator[None]:
    """Log a CheckpointError of the body, in which one rank tells its keeper something that others
    do not wait for.
    """
    try:
        yield
    except CheckpointError as error:
        _log.warning("%s", error)


def copies_of(engine: Engine) -> Copies:
    """Return a connection for files between the ranks of `engine`. Collective."""
    everyone = states_of(engine).everyone
    ranks = everyone.share(dist.get_rank(), _CALL)
    return Copies(ranks, lambda payload: everyone.exchange(payload, _CALL))


# ------------------------------------------------------------------ Saver.keep


class _KeptFiles:
    """Two files that the keeper holds: pieces, and the note that says that they are complete."""

    def __init__(self) -> None:
        self.file, self.note = memfd.create(0), memfd.create(0)

    def write(self, _: Path, num_bytes: int, parts: Iterable[Any]) -> None:
        """Write the pieces."""
        self.resize(num_bytes)
        _write(self.file, parts)

    def resize(self, num_bytes: int) -> None:
        """Reserve memory for `num_bytes` of pieces. Raises OSError."""
        if os.fstat(self.file).st_size != num_bytes:
            os.ftruncate(self.file, num_bytes)
            try:
                memfd.reserve(self.file, 0, num_bytes)
            except OSError:
                os.ftruncate(self.file, 0)  # a hole would be a SIGBUS when it is written
                raise

    def seal(self, note: bytes) -> None:
        """Write the note: from now on the pieces count."""
        _write(self.note, [note])

    def close(self) -> None:
        """Close our descriptors; the keeper has its own."""
        os.close(self.file)
        os.close(self.note)


def _write(fd: int, parts: Iterable[Any]) -> None:
    position = 0
    for part in parts:
        data = memoryview(part)
        while data:
            count = os.pwrite(fd, data, position)
            data, position = data[count:], position + count


class _KeptMemory:
    """The parts that this rank writes, in slots used in turn: its own, and copies for other hosts'
    ranks (`wards`). `homes` names the keeper of each rank.
    """

    def __init__(self, keeper: Keeper, directory: str, writer: str, homes: list[str]) -> None:
        self.keeper, self.directory, self.writer, self.homes = keeper, directory, writer, homes
        self.partner: int | None = None  # the rank on another host that has our copy
        self.wards: list[int] = []
        self.copies: Copies | None = None
        self._slots: dict[int, list[_KeptFiles]] = {}  # by rank: two each
        self._turn = 0

    def slot(self, rank: int) -> _KeptFiles:
        """Return where this turn's part of `rank` goes, empty, and held by the keeper, which has
        dropped it where another Saver has kept a step since.
        """
        if rank not in self._slots:
            self._slots[rank] = [_KeptFiles(), _KeptFiles()]
        slot = self._slots[rank][self._turn]
        os.ftruncate(slot.note, 0)  # the pieces are not complete
        where = [self.directory, self.writer, rank, self._turn]
        self.keeper.put(where, slot.file, slot.note)
        return slot

    def finish(self) -> None:
        """Drop the parts of other writers: all ranks have the new save."""
        self._turn = 1 - self._turn
        with telling_keeper():
            self.keeper.drop(self.directory, but=self.writer)

    def close(self) -> None:
        """Close our descriptors and connections; what is kept stays with the keeper."""
        for slot in (slot for pair in self._slots.values() for slot in pair):
            slot.close()
        if self.copies is not None:
            self.copies.close()


class Keeping:
    """The memory of one Saver."""

    def __init__(self, directory: Path, engine: Engine, redundancy: int) -> None:
        if redundancy not in (0, 1):
            raise ConfigError(
                f"redundancy={redundancy!r}: each part rests on 0 or 1 other hosts beside its own"
            )
        self._directory = directory
        self._engine = engine
        self.redundancy = redundancy
        self._memory: _KeptMemory | None = None
        self._found_by: MeshRanks | None = None  # the ranks that have looked for it

    @property
    def _ranks(self) -> MeshRanks:
        """All ranks of the mesh, as the engine lies now."""
        return states_of(self._engine).everyone

    def _together(self, what: str) -> AbstractContextManager[Meeting]:
        return self._ranks.together(_CALL, what, refusal=CheckpointError)

    def begin(self) -> bool:
        """Return whether there is memory that outlives the ranks. Collective."""
        if self._found_by is not self._ranks:  # a repartition has made others
            self.close()
            self._found_by = self._ranks
            self._memory = self._find_memory()
        return self._memory is not None

    def keep(self, step: int, states: Mapping[str, Stateful], extra: Any, *, frozen: bool) -> None:
        """Copy the state. Collective; raises CheckpointError on every rank, and what was kept
        before is unchanged then.
        """
        memory = self._memory
        assert memory is not None
        rank, world, branch = self._ranks.rank, self._ranks.size, 0
        with self._together(f"step {step} cannot be collected"):
            other = _kept.setdefault(memory.directory, self._engine)
            if other is not self._engine and not states_of(other).is_closed:
                raise CheckpointError(
                    f"{memory.directory} keeps the steps of another engine (of"
                    f" {type(other.module).__name__}) in memory, and of one engine alone: give"
                    " each engine a directory of its own, or close the other one"
                )
            _kept[memory.directory] = self._engine
            if rank == 0:
                branch = next_branch(self._directory, step, in_memory=True)
            part = collect(self._engine, states, extra, frozen=frozen)
        unite(self._engine, part)
        divide(self._engine, part)
        nonce, branch = self._ranks.share([secrets.token_hex(8), branch], _CALL)[0]
        note = b""
        with self._together(f"step {step} cannot be kept"):
            slot = memory.slot(rank)
            metadata = {"format": "zeroshard", "rank": str(rank), "step": str(step)}
            name = Path(shard_name(rank, world))
            file, tensors = write_shard(name, rank, part.stored, metadata, write=slot.write)
            index = part.index(file, tensors)
            if rank == 0:
                index["heading"] = part.heading(self._engine, step, branch)
            place = (memory.directory, memory.writer, nonce, step, world, rank, file.bytes)
            note = note_of(KeptPart(*place, branch=branch), json.dumps(index).encode())
            if memory.copies is None:
                slot.seal(note)
        if memory.copies is not None:
            self._send(memory, memory.copies, slot, note)
        memory.finish()

    def leave(self) -> None:
        """Tell the keeper that this rank has ended its work well."""
        if self._memory is not None:
            with telling_keeper():
                self._memory.keeper.leave()

    def close(self) -> None:
        """Close our descriptors and connections; what is kept stays with the keeper."""
        memory, self._memory, self._found_by = self._memory, None, None
        if memory is not None:
            memory.close()

    def _find_memory(self) -> _KeptMemory | None:
        with self._together("no process for the memory of this host") as meeting:
            keeper = local_keeper(start=True)
            meeting.give(["" if keeper is None else keeper.address, secrets.token_hex(8)])
        answers = meeting.answers
        homes = [home for home, _ in answers]
        if keeper is None or not all(homes):
            if self._ranks.rank == 0:
                _log.info("saver.keep() keeps nothing: nobody would start these ranks again")
            return None
        memory = _KeptMemory(keeper, os.path.realpath(self._directory), answers[0][1], homes)
        if not self.redundancy:
            return memory
        found = partners(memory.homes)
        memory.partner = found[self._ranks.rank]
        memory.wards = [rank for rank, one in enumerate(found) if one == self._ranks.rank]
        if memory.partner is not None:
            memory.copies = copies_of(self._engine)
        elif self._ranks.rank == 0:
            _log.warning(
                "redundancy=1 has no other host: all ranks are on one, and its launcher keeps the"
                " state while it lives"
            )
        return memory

    def _send(self, memory: _KeptMemory, copies: Copies, slot: _KeptFiles, note: bytes) -> None:
        """Send our part to the partner, take the parts of the wards, then seal all of them."""
        assert memory.partner is not None
        everyone = self._ranks.share([os.fstat(slot.file).st_size, len(note)], _CALL)
        with self._together("no memory for copies of other hosts"):
            theirs = {rank: memory.slot(rank) for rank in memory.wards}
            notes = {rank: memfd.create(everyone[rank][1]) for rank in memory.wards}
            for rank, copy in theirs.items():
                copy.resize(everyone[rank][0])
            own = memfd.create(len(note))
            os.pwrite(own, note, 0)
        begun = []
        for rank, copy in theirs.items():
            begun += copies.receiving(rank, [copy.file, notes[rank]], everyone[rank])
        begun += copies.sending(memory.partner, [slot.file, own])
        copies.wait(begun)
        slot.seal(note)
        for rank, copy in theirs.items():
            copy.seal(os.pread(notes[rank], everyone[rank][1], 0))
            os.close(notes[rank])
        os.close(own)
        self._ranks.exchange(b"", _CALL)  # nobody begins the next before all have sealed


# ------------------------------------------------------------------ zs.load


def newest_kept_step(directory: Path) -> tuple[int, int] | None:
    """Return branch and number of the newest step of `directory` that was in memory when the ranks
    were started. No host knows by itself what lies on others; the launcher did.
    """
    keeper = local_keeper()
    return None if keeper is None else keeper.whole_step(os.path.realpath(directory))


@dataclass
class Holdings:
    """The parts that one rank has found in the memory of its host."""

    home: str  # the keeper's address; "" without one
    parts: list[KeptPart]

    @classmethod
    def of(cls, directory: Path) -> Holdings:
        """Return those for `directory` in the memory of this host."""
        keeper = local_keeper()
        found = [] if keeper is None else keeper.parts(os.path.realpath(directory))
        return Holdings(keeper_address() or "", [part for _, part in found])


class KeptStep:
    """The newest save of `directory` in memory that is whole."""

    def __init__(self, directory: Path, keeper: Keeper, save: KeptSave) -> None:
        self.branch, self.step, self._nonce, self._world = save
        self.path = directory / f"step-{self.step:010d} in memory"
        self._directory = os.path.realpath(directory)
        self._keeper = keeper
        self._numbers: dict[int, int] = {}  # by rank: the keeper's number of its part

    @staticmethod
    def find(directory: Path, everyone: Sequence[Holdings]) -> KeptStep | None:
        """Return the newest one, from what all ranks have found; the same on all ranks."""
        found = newest(part for holdings in everyone for part in holdings.parts)
        if found is None or not all(holdings.home for holdings in everyone):
            return None
        return KeptStep(directory, Keeper(str(keeper_address())), found)

    def fetch(
        self,
        everyone: Sequence[Holdings],
        rank: int,
        make_copies: Callable[[], AbstractContextManager[Copies]],
        together: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Copy to this host the parts that it lacks. Collective, as are `make_copies`, and the end
        of `together`, which raises on every rank what fails on one.
        """
        journeys = self._journeys(everyone)
        if journeys:
            mine = [journey for journey in journeys if rank in journey[:2]]
            with ExitStack() as stack:
                with together():  # nobody waits for a rank that has no memory
                    local_keeper(start=True)
                    files = [self._files_of(rank, journey, stack) for journey in mine]
                with make_copies() as copies:
                    for (source, target, part), pair in zip(mine, files, strict=True):
                        if rank == source:
                            copies.wait(copies.sending(target, pair))
                        else:
                            sizes = [part.file_bytes, part.note_bytes]
                            copies.wait(copies.receiving(source, pair, sizes))
                with together():
                    for (_, target, part), pair in zip(mine, files, strict=True):
                        if rank == target:
                            slot = [self._directory, part.writer, part.rank, part.nonce, "fetched"]
                            self._keeper.put(slot, *pair)
        with together():
            self._numbers = self._at_home()

    def _files_of(
        self, rank: int, journey: tuple[int, int, KeptPart], stack: ExitStack
    ) -> list[int]:
        """Return the two files that are sent, or new ones to be filled; `stack` closes them."""
        source, _, part = journey
        if rank == source:
            files = list(self._open(part.rank))
        else:
            files = [memfd.create(size) for size in (part.file_bytes, part.note_bytes)]
        for descriptor in files:
            stack.callback(os.close, descriptor)
        return files

    def _journeys(self, everyone: Sequence[Holdings]) -> list[tuple[int, int, KeptPart]]:
        """Return which parts travel, from which rank to which: the first ranks of their hosts."""
        first: dict[str, int] = {}
        for rank, holdings in enumerate(everyone):
            first.setdefault(holdings.home, rank)
        held = {
            home: {part.rank: part for part in everyone[rank].parts if self._is_of(part)}
            for home, rank in first.items()
        }
        out = []
        for number in range(self._world):
            home = next(home for home in first if number in held[home])
            for other, target in first.items():
                if number not in held[other]:
                    out.append((first[home], target, held[home][number]))
        return out

    def _is_of(self, part: KeptPart) -> bool:
        return part.save == (self.branch, self.step, self._nonce, self._world)

    def _at_home(self) -> dict[int, int]:
        parts = self._keeper.parts(self._directory)
        return {part.rank: number for number, part in parts if self._is_of(part)}

    def _open(self, rank: int) -> tuple[int, int]:
        numbers = self._numbers or self._at_home()
        with os_errors(f"{self.path} cannot be opened"):
            return self._keeper.open(numbers[rank])

    def manifest(self) -> tuple[Manifest, str]:
        """Return the manifest, and the hash of its text. Raises CheckpointError."""
        heading, indices = dict[str, Any](), []
        for rank in range(self._world):
            file, note = self._open(rank)
            os.close(file)
            with os.fdopen(note, "rb") as opened:
                found = read_note(os.pread(note, os.fstat(opened.fileno()).st_size, 0))
            if found is None or not self._is_of(found[0]):
                raise CheckpointError(f"{self.path} is damaged: the note of rank {rank}")
            index = json.loads(found[1])
            heading = index.pop("heading", heading)
            indices.append(index)
        text = Manifest.of_ranks(heading, indices).dump()
        return Manifest.parse(text, str(self.path)), digest(text)

    def open_file(self, path: Path) -> int:
        """Return a descriptor of the file with this name, the caller's to close."""
        rank = int(path.name.split("-")[1])
        file, note = self._open(rank)
        os.close(note)
        return file
