"""The files that the ranks of a run have written into one directory: traces, trails."""

from __future__ import annotations

from pathlib import Path

from zeroshard.terminal.declared import UsageError


def files_of_ranks(command: str, directory: Path, kind: str, ending: str) -> list[Path]:
    """Return the ``rank-*`` files in `directory`, in order: what ``engine.KIND(directory)`` has
    written. Raises UsageError, in the name of `command`, where there are none.
    """
    if not directory.is_dir():
        raise UsageError(f"{command}: {directory} is not a directory")
    paths = sorted(directory.glob(f"rank-*{ending}"))
    if not paths:
        raise UsageError(
            f"{command}: {directory} has no {kind} (rank-00000{ending}, ...): write one with `with"
            f" engine.{kind}(directory):`"
        )
    return paths
