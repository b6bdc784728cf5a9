"""A step that is kept in memory, on its way back: which one, from which hosts, and its files.

Each rank asks the keeper of its own host (``system/keeper_client.py``) which parts lie there, and
tells the others; all choose the newest save that is whole. A host gets the parts that it lacks from
one that has them.

Invariant: every rank chooses the same save, and reads what has the hashes of its manifest. Cost:
where hosts lack parts, their bytes over the network, and the checkpoint's in the memory of each
host until the next `keep`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.indices import manifest_of
from zeroshard.checkpoint.manifest import Manifest, digest
from zeroshard.checkpoint.steps import os_errors
from zeroshard.comm import memfd
from zeroshard.comm.copies import Copies
from zeroshard.comm.launched import keeper_address
from zeroshard.core.kept import Part, newest, read_note
from zeroshard.errors import CheckpointError
from zeroshard.system.keeper_client import Keeper

__all__ = [
    "Holdings", "KeptStep", "local_keeper", "newest_kept_step", "own_holdings", "telling_keeper",
]  # fmt: skip

_log = logging.getLogger("zeroshard")


def local_keeper() -> Keeper | None:
    """Return the keeper of this host, None where the launcher runs none."""
    address = keeper_address()
    return None if address is None else Keeper(address)


@contextmanager
def telling_keeper() -> Iterator[None]:
    """Log a CheckpointError of the body, in which one rank tells its keeper something that others
    do not wait for.
    """
    try:
        yield
    except CheckpointError as error:
        _log.warning("%s", error)


def newest_kept_step(directory: Path) -> int | None:
    """Return the newest step of `directory` that was in memory when the ranks were started. No
    host knows by itself what lies on others; the launcher did.
    """
    keeper = local_keeper()
    return None if keeper is None else keeper.whole_step(os.path.realpath(directory))


@dataclass
class Holdings:
    """What one rank has found in the memory of its host."""

    home: str  # the keeper's address; "" without one
    parts: list[Part]

    def to_json(self) -> dict[str, Any]:
        """Return it for `from_json` on another rank."""
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Holdings:
        """Return what `to_json` was called on."""
        return Holdings(raw["home"], [Part(**part) for part in raw["parts"]])


def own_holdings(directory: Path) -> Holdings:
    """Return what the memory of this host has for `directory`."""
    keeper = local_keeper()
    if keeper is None:
        return Holdings("", [])
    return Holdings(keeper.address, [part for _, part in keeper.parts(os.path.realpath(directory))])


class KeptStep:
    """The newest save of `directory` in memory that is whole."""

    def __init__(self, directory: Path, save: tuple[int, str, int]) -> None:
        self.step, self._nonce, self._world = save
        self.path = directory / f"step-{self.step:010d} in memory"
        self._directory = os.path.realpath(directory)
        self._numbers: dict[int, int] = {}  # by rank: the keeper's number of its part

    @staticmethod
    def find(directory: Path, everyone: Sequence[Holdings]) -> KeptStep | None:
        """Return the newest one, from what all ranks have found; the same on all ranks."""
        if any(not holdings.home for holdings in everyone):
            return None
        found = newest(part for holdings in everyone for part in holdings.parts)
        return None if found is None else KeptStep(directory, found)

    def fetch(
        self,
        everyone: Sequence[Holdings],
        rank: int,
        make_copies: Callable[[], AbstractContextManager[Copies]],
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Have every part on this host. Collective, as are `make_copies`, and the end of
        `together`, which raises on every rank what fails on one.
        """
        journeys = self._journeys(everyone)
        if journeys:
            mine = [journey for journey in journeys if rank in journey[:2]]
            with ExitStack() as stack:
                with together():  # nobody waits for a rank that has no memory
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
                            self._hold(part, pair)
        with together():
            self._numbers = self._at_home()

    def _files_of(self, rank: int, journey: tuple[int, int, Part], stack: ExitStack) -> list[int]:
        """Return the two files that are sent, or new ones to be filled; `stack` closes them."""
        source, _, part = journey
        if rank == source:
            files = list(self._open(part.rank))
        else:
            files = [memfd.create(size) for size in (part.file_bytes, part.note_bytes)]
        for descriptor in files:
            stack.callback(os.close, descriptor)
        return files

    def _hold(self, part: Part, files: Sequence[int]) -> None:
        """Have the keeper of this host hold a part that came from another."""
        keeper = local_keeper()
        assert keeper is not None
        keeper.put([self._directory, part.writer, part.rank, part.nonce, "fetched"], *files)

    def _journeys(self, everyone: Sequence[Holdings]) -> list[tuple[int, int, Part]]:
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

    def _is_of(self, part: Part) -> bool:
        return part.save == (self.step, self._nonce, self._world)

    def _at_home(self) -> dict[int, int]:
        keeper = local_keeper()
        assert keeper is not None
        parts = keeper.parts(self._directory)
        return {part.rank: number for number, part in parts if self._is_of(part)}

    def _open(self, rank: int) -> tuple[int, int]:
        keeper, numbers = local_keeper(), self._numbers or self._at_home()
        assert keeper is not None
        with os_errors(f"{self.path} cannot be opened"):
            return keeper.open(numbers[rank])

    # ------------------------------------------------------------------ as a step that is read

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
        text = manifest_of(heading, indices).dump()
        return Manifest.parse(text, str(self.path)), digest(text)

    def open_file(self, path: Path) -> int:
        """Return a descriptor of the file with this name, the caller's to close."""
        rank = int(path.name.split("-")[1])
        file, note = self._open(rank)
        os.close(note)
        return file
