"""``Saver.keep``: this rank's part of a checkpoint, in memory that outlives the rank.

    collect . divide . empty the note of the other slot . write the pieces . [send them to another
    host] . write the note . all ranks say that they have

The pieces are those of a save, in the same format, with the same hashes; the memory is an anonymous
file whose descriptor the launcher holds (``system/keeper_client.py``).

Invariant: of two slots, the one that is written is never that of the last save that is whole: all
ranks have finished a slot before any begins the other. Cost: one pass over the bytes for the copy
and one for the hashes, five exchanges, the memory of two parts on this host, and with redundancy
their bytes once over the network and the memory of two more there.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from zeroshard.checkpoint.indices import heading_of, index_of
from zeroshard.checkpoint.kept import local_keeper, telling_keeper
from zeroshard.checkpoint.pieces import Stateful, collect, divide
from zeroshard.checkpoint.shards import write_shard
from zeroshard.checkpoint.stages import unite
from zeroshard.checkpoint.together import on_all_ranks, raise_on_all
from zeroshard.comm import memfd
from zeroshard.comm.copies import Copies
from zeroshard.core.kept import Part, note_of, partners
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.runtime.access import Ranks
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.system.keeper_client import Keeper

__all__ = ["Keeping", "copies_of"]

_log = logging.getLogger("zeroshard")
_CALL = "saver.keep()"
# by directory: the engine whose step was kept last
_kept: WeakValueDictionary[str, Engine] = WeakValueDictionary()


def copies_of(engine: Engine) -> Copies:
    """Return the way of files between the ranks of `engine`. Collective."""
    everyone = states_of(engine).everyone
    ranks = [int(answer) for answer in everyone.exchange(str(dist.get_rank()).encode(), _CALL)]
    return Copies(ranks, lambda payload: everyone.exchange(payload, _CALL))


class _Slot:
    """Two files that the keeper holds: pieces, and the note that says that they are complete."""

    def __init__(self) -> None:
        self.file, self.note = memfd.create(0), memfd.create(0)

    def empty(self) -> None:
        """Say that the pieces are not complete."""
        os.ftruncate(self.note, 0)

    def write(self, _: Path, num_bytes: int, parts: Iterable[Any]) -> None:
        """Write the pieces."""
        self.resize(num_bytes)
        position = 0
        for part in parts:
            data = memoryview(part)
            while data:
                count = os.pwrite(self.file, data, position)
                data, position = data[count:], position + count

    def resize(self, num_bytes: int) -> None:
        """Have memory for so many bytes of pieces. Raises OSError."""
        if os.fstat(self.file).st_size != num_bytes:
            os.ftruncate(self.file, num_bytes)
            try:
                memfd.reserve(self.file, 0, num_bytes)
            except OSError:
                os.ftruncate(self.file, 0)  # a hole would be a SIGBUS when it is written
                raise

    def seal(self, note: bytes) -> None:
        """Write the note: from now on the pieces count."""
        position = 0
        while position < len(note):
            position += os.pwrite(self.note, note[position:], position)

    def close(self) -> None:
        """Forget the files; the keeper has them."""
        os.close(self.file)
        os.close(self.note)


@dataclass
class _Place:
    """Where a writer's parts rest, found at its first keep."""

    keeper: Keeper
    directory: str
    writer: str
    homes: list[str]  # the keeper of each rank
    partner: int | None = None  # the rank on another host that has our copy
    wards: list[int] = field(default_factory=list)  # the ranks whose copies we have
    copies: Copies | None = None
    # by rank: two slots each, used in turn
    slots: dict[int, list[_Slot]] = field(default_factory=dict)
    turn: int = 0


class Keeping:
    """The memory of one Saver."""

    def __init__(self, directory: Path, engine: Engine, redundancy: int) -> None:
        if redundancy not in (0, 1):
            raise ConfigError(
                f"redundancy={redundancy!r}: each part rests on 0 or 1 other hosts beside its own"
            )
        self._directory = directory
        self._engine = engine
        self._redundancy = redundancy
        self._place: _Place | None = None
        self._found_by: Ranks | None = None  # the ranks that have looked for it

    @property
    def _ranks(self) -> Ranks:
        """All ranks of the mesh, as the engine lies now."""
        return states_of(self._engine).everyone

    def saved(self, step: int) -> None:
        """Tell the launcher that `step` is complete on disk, or was when we began."""
        keeper = local_keeper()
        if keeper is not None:
            keeper.saved(os.path.realpath(self._directory), step)

    def begin(self) -> bool:
        """Return whether there is memory that outlives the ranks. Collective."""
        if self._found_by is not self._ranks:  # a repartition has made others
            self.close()
            self._found_by = self._ranks
            self._place = self._find_place()
        return self._place is not None

    def keep(self, step: int, states: Mapping[str, Stateful], extra: Any, *, frozen: bool) -> None:
        """Copy the state. Collective; raises CheckpointError on every rank, and what was kept
        before is unchanged then.
        """
        assert self._place is not None
        with on_all_ranks(self._engine, _CALL, f"step {step} cannot be collected"):
            self._refuse_other_engine(self._place.directory)
            part = collect(self._engine, states, extra, frozen=frozen)
        unite(self._engine, part)
        divide(self._engine, part)
        nonce = self._ranks.exchange(secrets.token_hex(8).encode(), _CALL)[0].decode()
        place, rank = self._place, self._ranks.rank
        kept = Part(place.directory, place.writer, nonce, step, self._ranks.size, rank, 0)
        note = b""
        with on_all_ranks(self._engine, _CALL, f"step {step} cannot be kept"):
            slot = self._slot(rank)
            name = Path(f"rank-{rank:05d}-of-{self._ranks.size:05d}.safetensors")
            metadata = {"format": "zeroshard", "rank": str(rank), "step": str(step)}
            file, tensors = write_shard(name, rank, part.stored, metadata, write=slot.write)
            index = index_of(part, file, tensors)
            if rank == 0:
                index["heading"] = heading_of(self._engine, part, step)
            note = note_of(replace(kept, file_bytes=file.bytes), json.dumps(index).encode())
            if place.copies is None:
                slot.seal(note)
        if place.copies is not None:
            self._send(place.copies, slot, note)
        self._finish()

    def _refuse_other_engine(self, directory: str) -> None:
        """Raise CheckpointError where this step would take the place of another engine's."""
        other = _kept.setdefault(directory, self._engine)
        if other is not self._engine and not states_of(other).is_closed:
            raise CheckpointError(
                f"{directory} keeps the steps of another engine (of"
                f" {type(other.module).__name__}) in memory, and of one engine alone: give each"
                " engine a directory of its own, or close the other one"
            )
        _kept[directory] = self._engine

    def close(self) -> None:
        """Close our descriptors and connections; what is kept stays with the launcher."""
        place, self._place = self._place, None
        self._found_by = None
        if place is not None:
            for slot in (slot for pair in place.slots.values() for slot in pair):
                slot.close()
            if place.copies is not None:
                place.copies.close()

    def _finish(self) -> None:
        """All ranks have the new save: what others have left here is no longer needed."""
        place = self._place
        assert place is not None
        place.turn = 1 - place.turn
        with telling_keeper():
            place.keeper.drop(place.directory, but=place.writer)

    def _slot(self, rank: int) -> _Slot:
        """Return where this turn's part of `rank` goes, empty, and held by the keeper, which has
        dropped it where another Saver has kept a step since.
        """
        place = self._place
        assert place is not None
        if rank not in place.slots:
            place.slots[rank] = [_Slot(), _Slot()]
        slot = place.slots[rank][place.turn]
        slot.empty()
        where = [place.directory, place.writer, rank, place.turn]
        place.keeper.put(where, slot.file, slot.note)
        return slot

    def _find_place(self) -> _Place | None:
        keeper = local_keeper()
        mine = json.dumps(["" if keeper is None else keeper.address, secrets.token_hex(8)])
        answers = [json.loads(one) for one in self._ranks.exchange(mine.encode(), _CALL)]
        homes = [home for home, _ in answers]
        if keeper is None or not all(homes):
            if self._ranks.rank == 0:
                _log.info("saver.keep() keeps nothing without `zeroshard run --elastic`")
            return None
        place = _Place(keeper, os.path.realpath(self._directory), answers[0][1], homes)
        if self._redundancy:
            self._find_partners(place)
        return place

    def _find_partners(self, place: _Place) -> None:
        found = partners(place.homes)
        place.partner = found[self._ranks.rank]
        place.wards = [rank for rank, one in enumerate(found) if one == self._ranks.rank]
        if place.partner is not None:
            place.copies = copies_of(self._engine)
        elif self._ranks.rank == 0:
            _log.warning(
                "redundancy=1 has no other host: all ranks are on one, whose launcher keeps the"
                " state while it lives"
            )

    def _send(self, copies: Copies, slot: _Slot, note: bytes) -> None:
        """Send our part to the partner, take those of the wards, then seal all of them."""
        place = self._place
        assert place is not None and place.partner is not None
        sizes = json.dumps([os.fstat(slot.file).st_size, len(note)]).encode()
        everyone = [json.loads(one) for one in self._ranks.exchange(sizes, _CALL)]
        with on_all_ranks(self._engine, _CALL, "no memory for copies of other hosts"):
            theirs = {rank: self._slot(rank) for rank in place.wards}
            notes = {rank: memfd.create(everyone[rank][1]) for rank in place.wards}
            for rank, copy in theirs.items():
                copy.resize(everyone[rank][0])
            own = memfd.create(len(note))
            os.pwrite(own, note, 0)
        begun = []
        for rank, copy in theirs.items():
            begun += copies.receiving(rank, [copy.file, notes[rank]], everyone[rank])
        begun += copies.sending(place.partner, [slot.file, own])
        copies.wait(begun)
        slot.seal(note)
        for rank, copy in theirs.items():
            copy.seal(os.pread(notes[rank], everyone[rank][1], 0))
            os.close(notes[rank])
        os.close(own)
        raise_on_all(self._engine, None, _CALL)  # nobody begins the next before all have sealed
