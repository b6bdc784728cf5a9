"""One rank's directory of files, which goes when its process ends, and whole blocks of such a file.

    <disk_path>/zeroshard-swap-<run>-<rank>-<pid>-<nonce>/    mode 0700
        lock                                                  flock is held for the life of the
                                                              process
        0003-blocks.3_fp32_exp_avg.storage

`remove` deletes it when the store is closed or collected, or at a normal exit. A killed process
leaves it and loses the lock: the next process that makes a directory here removes those without a
held lock.

[Note: taking a name] A directory is made under a hidden name and renamed once its lock is held, so
a directory with its final name and no held lock is abandoned. Of two ranks that find it, the one
that gets the lock removes it, the lock last. A process killed before the rename leaves a hidden,
empty directory, which is removed an hour later.

Only directories with our pattern and uid are opened, never through a symbolic link, and only our
files are removed: a directory with any other file stays, and is logged. A forked child removes
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path

from zeroshard.errors import StorageError

# --------------------------------------------------------------------------- whole blocks of a file
# Blocks pass by the page cache where the file system allows it: O_DIRECT with ``os.preadv`` and
# ``os.pwritev`` from several threads, which release the GIL, is as fast as libaio
# (docs/offload.md). State on disk is larger than memory and used once a step: the page cache
# would only copy it and evict other pages.
#
# Invariant: offsets, lengths and, with O_DIRECT, addresses are multiples of `BLOCK`; a read or
# write is whole or an OSError. Nothing is synced to the disk or retried.


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


# ------------------------------------------------------------------------ the directory of one rank

_log = logging.getLogger("zeroshard")
_PATTERN = re.compile(r"(\.?)zeroshard-swap-[A-Za-z0-9._+=-]+-\d+-\d+-[0-9a-f]{8}")
_LOCK, _SUFFIX = "lock", ".storage"
_HIDDEN_S = 3600.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def safe_name(text: str) -> str:
    """Return `text` as part of a file name: "blocks.3:fp32 m" -> "blocks.3_fp32_m"."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", text)[:150] or "_"


def free_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user may still write there."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


class SwapDirectory:
    """A new directory of this rank below `parent`; abandoned ones there are removed. Raises
    StorageError when none can be made there.
    """

    def __init__(self, parent: str | Path, *, rank: int, run: str = "run") -> None:
        parent = Path(parent)
        self.rank = rank
        self._pid = os.getpid()
        self._parent_fd = _open_parent(parent)
        self._name = f"zeroshard-swap-{safe_name(run)}-{rank}-{self._pid}-{secrets.token_hex(4)}"
        self.path = parent / self._name
        self._num_files = 0
        try:
            _remove_abandoned(self._parent_fd, parent)
            self.fd, self._lock_fd = _claim(self._parent_fd, self._name)
        except OSError as error:
            os.close(self._parent_fd)
            raise StorageError(
                f"disk_path {parent}: no directory can be made there ({error.strerror})"
            ) from error
        self._removed = False

    def create(self, key: str, num_bytes: int, *, direct: bool) -> tuple[int, str]:
        """Return (fd, name) of a new, allocated file. Raises StorageError naming `key`."""
        name = f"{self._num_files:04}-{safe_name(key)}{_SUFFIX}"
        self._num_files += 1
        fd = -1
        try:
            fd = open_new(name, self.fd, direct=direct)
            reserve(fd, num_bytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                os.unlink(name, dir_fd=self.fd)
            raise self._refusal(key, num_bytes, error) from error
        return fd, name

    def _refusal(self, key: str, num_bytes: int, error: OSError) -> StorageError:
        if error.errno in _NO_SPACE:
            why = (
                f"{num_bytes} bytes are needed, {free_bytes(self.path)} are free"
                f" ({error.strerror}): free some, or put less on disk"
            )
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            why = f"{error.strerror}: each state on disk needs one, raise `ulimit -n`"
        else:
            why = f"no file of {num_bytes} bytes can be made ({error.strerror})"
        return StorageError(f"{key}: {self.path}: {why}")

    def check_process(self, key: str) -> None:
        """Raise StorageError in a forked child, which has no worker threads."""
        if os.getpid() != self._pid:
            raise StorageError(
                f"{key}: {self.path} belongs to process {self._pid}; a forked child cannot use what"
                " rests on disk"
            )

    def unlink(self, name: str) -> None:
        """Remove one file; nothing happens if it is gone already, or in a forked child."""
        if not self._removed and os.getpid() == self._pid:
            _unlink(name, self.fd)

    def remove(self) -> None:
        """Remove the directory. Idempotent; nothing happens in a forked child."""
        if self._removed or os.getpid() != self._pid:
            return
        self._removed = True
        _empty(self.fd)
        _rmdir(self._name, self._parent_fd, self.path)
        for fd in (self.fd, self._lock_fd, self._parent_fd):
            os.close(fd)


def _open_parent(parent: Path) -> int:
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise StorageError(
            f"disk_path {parent} does not exist: create it, or name a directory on a local disk"
        ) from None
    except NotADirectoryError:
        raise StorageError(f"disk_path {parent} is not a directory") from None
    except OSError as error:
        raise StorageError(f"disk_path {parent} cannot be opened ({error.strerror})") from None
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
        os.close(fd)
        raise StorageError(
            f"disk_path {parent} cannot be written to by uid {os.geteuid()}: allow it, or name"
            " another directory"
        )
    return fd


def _claim(parent_fd: int, name: str) -> tuple[int, int]:
    """Make the directory `name`; return its and its held lock's fd ([Note: taking a name])."""
    hidden = f".{name}"
    os.mkdir(hidden, 0o700, dir_fd=parent_fd)
    fd = lock_fd = -1
    try:
        fd = os.open(hidden, _FOLDER, dir_fd=parent_fd)
        lock_fd = open_new(_LOCK, fd, direct=False)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(hidden, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
    except OSError:
        if fd >= 0:
            _empty(fd)
            os.close(fd)
        if lock_fd >= 0:
            os.close(lock_fd)
        os.rmdir(hidden, dir_fd=parent_fd)
        raise
    return fd, lock_fd


def _remove_abandoned(parent_fd: int, parent: Path) -> None:
    for name in os.listdir(parent_fd):
        found = _PATTERN.fullmatch(name)
        if found is None:
            continue
        try:
            _remove_if_abandoned(name, parent_fd, parent, hidden=bool(found.group(1)))
        except OSError as error:  # another rank was faster, or it is not ours to touch
            _log.debug("left %s alone: %s", parent / name, error)


def _remove_if_abandoned(name: str, parent_fd: int, parent: Path, *, hidden: bool) -> None:
    fd = os.open(name, _FOLDER, dir_fd=parent_fd)
    try:
        facts = os.fstat(fd)
        if facts.st_uid != os.geteuid() or (hidden and time.time() - facts.st_mtime < _HIDDEN_S):
            return
        lock_fd = _lock_of(fd)
        try:
            _empty(fd)
            if _rmdir(name, parent_fd, parent / name):
                _log.info("removed %s, left by a process that was killed", parent / name)
        finally:
            if lock_fd >= 0:
                os.close(lock_fd)
    finally:
        os.close(fd)


def _lock_of(fd: int) -> int:
    """Take the lock of a directory, -1 if it has none. Raises BlockingIOError if held."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock_fd = os.open(_LOCK, flags, dir_fd=fd)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise
    return lock_fd


def _empty(fd: int) -> None:
    """Remove the files that we make, the lock last."""
    for name in os.listdir(fd):
        if name.endswith(_SUFFIX):
            mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                _unlink(name, fd)
    _unlink(_LOCK, fd)


def _unlink(name: str, folder_fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder_fd)


def _rmdir(name: str, parent_fd: int, path: Path) -> bool:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except FileNotFoundError:
        return False
    except OSError as error:
        reason = "it holds files that zeroshard did not make"
        _log.warning("%s cannot be removed (%s): %s", path, error.strerror, reason)
        return False
    return True
