"""Whole blocks of a file, past the page cache where the file system allows it.

O_DIRECT with ``os.preadv`` and ``os.pwritev`` from several threads, which release the GIL, is as
fast as libaio (docs/benchmarks.md). State on disk is larger than memory and used once a step: the
page cache would only copy it and evict other pages.

Invariant: offsets, lengths and, with O_DIRECT, addresses are multiples of `BLOCK`; a read or write
is whole or an OSError. Nothing is synced to the disk or retried.
"""

from __future__ import annotations

import errno
import os

from zeroshard.core.layout import round_up

__all__ = [
    "BLOCK", "accepts_direct", "open_new", "read_blocks", "reserve", "round_up", "write_blocks",
]  # fmt: skip

BLOCK = 4096  # bytes; a multiple of the logical block of every usual disk
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


def open_new(name: str, folder_fd: int, *, direct: bool) -> int:
    """Return a descriptor of the new file `name`. Raises OSError, also if it exists."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags | (_DIRECT if direct else 0), 0o600, dir_fd=folder_fd)


def accepts_direct(folder_fd: int, block: memoryview) -> bool:
    """Return whether O_DIRECT works here, tried with an aligned `block` [BLOCK].

    Some file systems refuse the open, some the first write. Raises OSError for what has nothing to
    do with O_DIRECT, such as a full disk.
    """
    if not _DIRECT:
        return False
    try:
        fd = open_new("probe.storage", folder_fd, direct=True)
        try:
            write_blocks(fd, block, 0)
            read_blocks(fd, block, 0)
        finally:
            os.close(fd)
            os.unlink("probe.storage", dir_fd=folder_fd)
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    return True


def reserve(fd: int, num_bytes: int) -> None:
    """Allocate the file's bytes, so that no later write lacks space. Raises OSError."""
    if num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)


def read_blocks(fd: int, out: memoryview, offset: int) -> None:
    """Fill `out` from `offset` on. Raises OSError, also when the file ends before."""
    done = 0
    while done < len(out):
        num = os.preadv(fd, [out[done:]], offset + done)
        if num <= 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset + done}: it was cut off")
        done += num


def write_blocks(fd: int, source: memoryview, offset: int) -> None:
    """Write `source` from `offset` on. Raises OSError."""
    done = 0
    while done < len(source):
        num = os.pwritev(fd, [source[done:]], offset + done)
        if num <= 0:
            raise OSError(errno.EIO, "nothing was written")
        done += num
