"""Read a step whole and report everything that is wrong: which file, parameter and elements.

Invariant: if nothing is reported, every byte of every file has the hash in the manifest, and the
manifest the one in its own last line. Cost: one pass over the bytes; memory for one chunk.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.manifest import Manifest, ShardEntry, TensorEntry
from zeroshard.checkpoint.shard_files import ShardReader, describe_range
from zeroshard.checkpoint.steps import MANIFEST, StepFiles, StepGone
from zeroshard.errors import CheckpointError

# ELOOP: a link, which no save leaves
_NOT_THERE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong."""

    file: str
    what: str
    parameter: str | None = None
    kind: str | None = None  # of the tensor
    unreadable: bool = False  # the system refused to read: the bytes may be right


def verify(step: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> list[Damage]:
    """Return everything wrong with a step, by file; `progress(n)` is called after n bytes. Raises
    StepGone where another save has taken its place.
    """
    with ExitStack() as stack:
        try:
            files = StepFiles(step, stack)
            manifest, _ = files.manifest()
        except StepGone:
            raise
        except CheckpointError as error:
            return [Damage(MANIFEST, str(error), unreadable=_refused(error))]
        found: list[Damage] = []
        tensors: dict[int, list[TensorEntry]] = {}
        for entry in manifest.tensors:
            tensors.setdefault(entry.file, []).append(entry)
        for number, file in enumerate(manifest.files):
            found += _check_file(files, file, tensors.get(number, []), manifest, progress)
        expected = {MANIFEST, *(file.name for file in manifest.files)}
        found += [
            Damage(name, f"{step / name} does not belong to the checkpoint")
            for name in files.names()
            if name not in expected
        ]
        return found


def _check_file(
    files: StepFiles,
    file: ShardEntry,
    tensors: list[TensorEntry],
    manifest: Manifest,
    progress: Callable[[int], None],
) -> Iterator[Damage]:
    """Yield the damage of one file; after a wrong size or header still check each tensor."""
    path, size = files.path / file.name, file.bytes
    options: Any = {"chunk_bytes": manifest.chunk_bytes, "open_file": files.open}
    try:
        with ShardReader(path, file, **options):
            pass
    except StepGone:
        raise
    except CheckpointError as error:
        yield Damage(file.name, str(error), unreadable=_refused(error))
        if error.__cause__ is not None or path.is_symlink() or not path.is_file():
            return
        size = path.stat().st_size
    with ShardReader(path, replace(file, bytes=size), verify=False, **options) as reader:
        for entry in tensors:
            yield from _check_tensor(reader, entry, size - file.header_bytes)
            progress(entry.num_bytes)


def _check_tensor(reader: ShardReader, entry: TensorEntry, data_bytes: int) -> Iterator[Damage]:
    """Yield the damage of a tensor in a file with so many bytes of data."""
    path, tensor, refused = reader.path, describe_range(entry, 0, entry.num_bytes), False
    try:
        if entry.offset + entry.num_bytes > data_bytes:
            found = [f"{path} ends before the end of {tensor}"]
        else:
            found = [f"{path} is damaged: {what}" for what in reader.check(entry)]
    except CheckpointError as error:
        found, refused = [f"{error} ({tensor})"], _refused(error)
    for what in found:
        yield Damage(path.name, what, entry.parameter, entry.kind, refused)


def _refused(error: CheckpointError) -> bool:
    """Return whether the operating system refused to read a file that is there."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno not in _NOT_THERE
