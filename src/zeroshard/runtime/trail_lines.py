"""The lines of a trail: the hashes of one step, and the file of one rank to which they are added.

Of a device, hashes stay there until the line is written. What cannot be written ends the trail of
this rank, and not the step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

from zeroshard.core.sliced_digest import MASK, BlockTotals
from zeroshard.errors import StorageError
from zeroshard.system.safe_files import open_to_add

_log = logging.getLogger("zeroshard")
_Number: TypeAlias = int | torch.Tensor  # of 64 bits; on a device one that nobody has waited for
# a phase and a unit, and for the slice of a rank of a replayed run that rank
_Key: TypeAlias = tuple[str, str, int | None]


class StepHashes:
    """The hashes of one step, by phase and unit, as numbers to be added."""

    def __init__(self, step: int, seed: int) -> None:
        self.step = step
        self.texts: dict[str, dict[str, str]] = {"seed": {"": str(seed)}}
        self._numbers: dict[_Key, list[_Number]] = {}
        self._totals = BlockTotals[_Key]()
        self._same: list[tuple[str, str, str]] = []  # a phase, that of the same hash, a unit

    def add(self, phase: str, unit: str, number: _Number, ranks: Iterable[int] = ()) -> None:
        """Add `number` to the hash of `unit` in `phase`, and to those of `ranks`."""
        for rank in (None, *ranks):
            self._numbers.setdefault((phase, unit, rank), []).append(number)

    def add_slice(
        self, phase: str, unit: str, numbers: torch.Tensor, place: int, ranks: Iterable[int]
    ) -> None:
        """Add the total of `numbers`, which begin at `place` (core/sliced_digest.py)."""
        self._totals.add([(phase, unit, rank) for rank in (None, *ranks)], numbers, place)

    def has(self, phase: str, unit: str) -> bool:
        """Whether there is one that `add` has added to."""
        return (phase, unit, None) in self._numbers

    def copy(self, source: str, phase: str, unit: str) -> None:
        """Take the hashes of `unit` in phase `source` for those in `phase`."""
        self._same.append((source, phase, unit))

    def read(self) -> dict[str, Any]:
        """Return them as the line of a file."""
        found = {key: sum(map(int, numbers)) for key, numbers in self._numbers.items()}
        for key, total in self._totals.read().items():
            found[key] = found.get(key, 0) + total
        for source, phase, unit in self._same:
            there = [key for key in found if key[:2] == (source, unit)]
            found |= {(phase, unit, key[2]): found[key] for key in there}
        hashes: dict[str, Any] = dict(self.texts)
        slices: dict[str, dict[str, dict[str, str]]] = {}
        for (phase, unit, rank), number in found.items():
            text = f"{number & MASK:016x}"
            if rank is None:
                hashes.setdefault(phase, {})[unit] = text
            else:
                slices.setdefault(phase, {}).setdefault(unit, {})[str(rank)] = text
        line = {"step": self.step, "hashes": hashes}
        return line | {"slices": slices} if slices else line


class TrailFile:
    """The file of one rank."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self._path = path
        self.failure: StorageError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open_to_add(path)
            if self._file.tell():
                self._file.seek(-1, 2)
                if self._file.read(1) != b"\n":  # a process was killed in the middle of a line
                    self._file.write(b"\n")
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> StorageError:
        return StorageError(
            f"trail {self._path}: cannot write it ({error.strerror or error}): name another"
            " directory"
        )

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; the first failure is kept, and nothing is written after it."""
        if self.failure is not None:
            return
        with self.losing():
            try:
                self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                self._file.flush()
            except OSError as error:
                raise self._error(error) from None

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Keep the first StorageError of the body as the `failure`: the other ranks go on."""
        try:
            yield
        except StorageError as error:
            if self.failure is None:
                self.failure = error
                _log.warning("the trail ends here: %s", error)

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or self._error(error)
