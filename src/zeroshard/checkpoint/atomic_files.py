"""Files for other programs: written under a hidden name, synced, and renamed; removed on failure.

Invariant: a file or directory with its final name is complete. `published` never overwrites, and
removes what a killed process has left of the same name: a folder whose lock nobody holds. Cost: one
rename, one fsync per file and directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.steps import (
    make_directory,
    remove_tree,
    require_space,
    sync_directory,
)
from zeroshard.errors import CheckpointError, ConfigError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def published(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a path in a hidden folder beside `out` for `num_bytes`; rename it to `out`, or remove
    it on error.

    Raises ConfigError where `out` is there already (an empty directory does not count),
    CheckpointError where there is no space.
    """
    out = Path(os.path.abspath(out))
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: name a new directory, or remove what is there")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"{out} exists: name a path that does not, or remove it")
    make_directory(out.parent)
    require_space(out.parent, num_bytes, str(out))
    _remove_leftovers(out)
    folder = out.parent / f".exporting-{out.name}-{secrets.token_hex(4)}"
    working = folder / out.name
    with ExitStack() as stack:
        stack.callback(remove_tree, folder)
        folder.mkdir()
        _hold(folder, stack)
        yield working
        if working.is_dir():
            sync_directory(working)
        elif out.is_dir():
            out.rmdir()
        os.rename(working, out)
        sync_directory(out.parent)


def _remove_leftovers(out: Path) -> None:
    """Remove what killed exports to `out` have left."""
    name = re.compile(re.escape(f".exporting-{out.name}-") + "[0-9a-f]{8}")
    with suppress(OSError):  # a folder that may be written and not read
        for path in [out.parent / one for one in os.listdir(out.parent) if name.fullmatch(one)]:
            with ExitStack() as stack:
                if _hold(path, stack):
                    remove_tree(path)


def _hold(path: Path, stack: ExitStack) -> bool:
    """Lock a folder until `stack` ends; return whether nobody else holds it, and it can be held."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_new(path: Path, num_bytes: int, parts: Iterable[Any]) -> None:
    """Write `parts` (buffers of bytes, `num_bytes` in all) to the new file `path` and fsync it.
    The umask says who may read it.

    The space is reserved first. Raises CheckpointError when there is none, or the disk fails; the
    file may be left behind.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _reserve(fd, num_bytes)
            for part in parts:
                _write(fd, memoryview(part))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _cannot_write(path, num_bytes, error) from error


def _reserve(fd: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise
            with suppress(OSError):  # this file system cannot reserve
                os.ftruncate(fd, 0)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _cannot_write(path: Path, num_bytes: int, error: OSError) -> CheckpointError:
    if error.errno not in _NO_SPACE:
        return CheckpointError(f"{path} cannot be written: {error.strerror}")
    try:
        space = os.statvfs(path.parent)
        free = f", and {space.f_bavail * space.f_frsize} are free"
    except OSError:
        free = ""
    return CheckpointError(
        f"no space for {path}: it needs {num_bytes} bytes{free} ({error.strerror}); what was there"
        " before is untouched"
    )
