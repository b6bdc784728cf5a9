"""The directory of checkpoints: complete steps, the lock, commits and pruning.

Invariants: a directory ``step-N`` got its name by one rename after everything in it was on disk, so
one with a missing file is damaged. Names that begin with a dot are unfinished work and are never
read. One job writes at a time (a lock that is released with its process). No symbolic link is
followed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.manifest import BUFFER, HEAD_BYTES, MAX_BYTES, SHARD_NAME, Manifest
from zeroshard.core.placement import STATE
from zeroshard.errors import CheckpointError
from zeroshard.system.safe_files import NotReadable, open_descriptor

MANIFEST = "manifest.json"
# that must be free beyond the files of pieces: for the manifest or index, and the directory
SLACK_BYTES = 1 << 20
STEP_NAME = re.compile(r"step-(\d{10,19})")
_LEFTOVER = re.compile(r"\.(saving|removing)-.*")
_REPLACED = re.compile(r"\.replaced-step-(\d{10,19})")
_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_FDCWD = -100
# what file systems say of calls that they do not have, fsync of a directory among them
_MISSING = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LOCKS = (
    "the file system of the checkpoints has no locks (%s): nothing keeps two jobs from saving into"
    " one directory at a time. Give each job a directory of its own, or mount with locks (Lustre:"
    " -o flock)"
)
_NO_SYNC = (
    "the file system of the checkpoints cannot sync a directory (%s): files are on disk when a"
    " save ends, and a crash of the machine may undo their names"
)
_log = logging.getLogger("zeroshard")
_told: set[str] = set()


@contextmanager
def _where_it_can(otherwise: str) -> Iterator[None]:
    """Go on where a file system lacks the call in the context, and log `otherwise` once."""
    try:
        yield
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        if otherwise not in _told:
            _told.add(otherwise)
            _log.warning(otherwise, error.strerror)


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Convert an OSError in the context into a CheckpointError: `what`, and the system's words."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror}") from error


def step_path(directory: Path, step: int) -> Path:
    """Return where `step` is seen once it is complete."""
    return directory / f"step-{step:010d}"


def list_steps(directory: Path) -> dict[int, Path]:
    """Return the steps in `directory` by number; damage is found only by reading them."""
    found: dict[int, Path] = {}
    entries: list[os.DirEntry[str]] = []
    with os_errors(f"{directory} cannot be read"), suppress(FileNotFoundError):
        entries = list(os.scandir(directory))
    # a directory that was moved aside counts until its successor is there
    for pattern in (_REPLACED, STEP_NAME):
        for entry in entries:
            # read_manifest() refuses a link by name
            is_link = pattern is STEP_NAME and entry.is_symlink()
            match = pattern.fullmatch(entry.name)
            if match and (is_link or entry.is_dir(follow_symlinks=False)):
                found[int(match[1])] = Path(entry.path)
    return dict(sorted(found.items()))


def saved_order(directory: Path) -> list[tuple[int, int]]:
    """Return branch and number of the steps in `directory`, the one that was saved last at the end.

    A run that has gone back to an earlier step saves on a branch of its own from there on. Where
    damage hides the branch of a step, it counts to the branch of the folder that was changed before
    it: a load must not pass over the step unheard.
    """
    steps, found, branch = list_steps(directory), [], 0
    identities = {step: _identity(path) for step, path in steps.items()}
    for step in sorted(steps, key=lambda one: identities[one]):
        with suppress(CheckpointError, OSError):
            branch = _branch(steps[step], identities[step])
        found.append((branch, step))
    return sorted(found)


def _identity(path: Path) -> tuple[int, ...]:
    """Return when a folder was changed, and which it is."""
    with suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        return found.st_mtime_ns, found.st_dev, found.st_ino
    return (0,)


@lru_cache(4096)  # each save asks for all steps that are there
def _branch(path: Path, identity: tuple[int, ...]) -> int:
    """Return the branch of the step in a folder of this `identity`. Raises CheckpointError or
    OSError where its manifest cannot be read.
    """
    with ExitStack() as stack:
        files = StepFiles(path, stack)
        with os.fdopen(files.open(path / MANIFEST), "rb") as opened:
            branch = Manifest.branch_of(opened.read(HEAD_BYTES))
    if branch is None:
        raise CheckpointError(f"{path / MANIFEST} does not begin as a manifest")
    return branch


def open_regular(path: Path) -> int:
    """Open a regular file to read. Raises CheckpointError for links, pipes and devices."""
    try:
        return open_descriptor(path, follow=False)
    except NotReadable as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error.__cause__


class StepGone(CheckpointError):
    """A step was replaced or removed while it was read: it is not damaged."""


class StepFiles:
    """The files of the step in the folder `path`, all of one save, also where another one takes its
    name meanwhile. `stack` closes the folder. Raises CheckpointError.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        if path.is_symlink():
            raise CheckpointError(
                f"{path} cannot be read: it is a symbolic link, which is not followed"
            )
        with os_errors(f"{path / MANIFEST} cannot be read"):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._folder = os.open(path, flags)
        stack.callback(os.close, self._folder)

    def open(self, path: Path) -> int:
        """Open the file with the name of `path` to read. Raises CheckpointError for links, pipes
        and devices.
        """
        try:
            return open_descriptor(path.name, follow=False, folder=self._folder)
        except NotReadable as error:
            self._require_there(error)
            raise CheckpointError(f"{path} cannot be read: {error}") from error.__cause__

    def _require_there(self, error: Exception) -> None:
        """Raise CheckpointError where another step, or none, has the name of this one by now."""
        here, there = os.fstat(self._folder), None
        with suppress(OSError):
            there = os.stat(self.path, follow_symlinks=False)
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            how = "removed" if there is None else "replaced by another save"
            raise StepGone(f"{self.path} was {how} while it was read: read it again") from error

    def manifest(self) -> tuple[Manifest, bytes]:
        """Return the manifest, and its text. Raises CheckpointError."""
        file = self.path / MANIFEST
        with os.fdopen(self.open(file), "rb") as opened, os_errors(f"{file} cannot be read"):
            size = os.fstat(opened.fileno()).st_size
            if size > MAX_BYTES:
                raise CheckpointError(
                    f"{file} has {size} bytes, more than the {MAX_BYTES} that a manifest may have"
                )
            text = opened.read()
        manifest = Manifest.parse(text, str(file))
        match = STEP_NAME.fullmatch(self.path.name) or _REPLACED.fullmatch(self.path.name)
        if match and int(match[1]) != manifest.step:
            raise CheckpointError(
                f"{file} belongs to step {manifest.step}, and its directory says {int(match[1])}"
            )
        return manifest, text

    def names(self) -> list[str]:
        """Return the names of all files that are there."""
        with os_errors(f"{self.path} cannot be read"):
            return sorted(os.listdir(self._folder))

    def check(self, manifest: Manifest) -> None:
        """Raise CheckpointError for files of pieces that are missing or not the manifest's."""
        there = set(filter(SHARD_NAME.fullmatch, self.names()))
        expected = {entry.name for entry in manifest.files}
        for name in sorted(expected - there):
            missing = CheckpointError(f"{self.path / name} is missing")
            self._require_there(missing)
            raise missing
        for name in sorted(there - expected):
            raise CheckpointError(
                f"{self.path / name} is not of this checkpoint: its manifest does not know it"
            )


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of one step; raises CheckpointError."""
    with ExitStack() as stack:
        return StepFiles(path, stack).manifest()[0]


def working_path(directory: Path, step: int, nonce: str) -> Path:
    """Return where the save number `nonce` of `step` writes until it is complete."""
    return directory / f".saving-{step:010d}-{nonce}"


@contextmanager
def begin_step(directory: Path, step: int, nonce: str, num_bytes: int = 0) -> Iterator[Path]:
    """Hold the lock of `directory`, and yield the new `working_path` of `step`. The remains of
    killed saves are removed first, and space for `num_bytes` is required.
    """
    make_directory(directory)
    with lock(directory):
        _check_alone(directory)
        _remove_leftovers(directory)
        require_space(directory, num_bytes, f"step {step} in {directory}")
        working = working_path(directory, step, nonce)
        working.mkdir()
        yield working


@contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`; raise CheckpointError naming the process that has it."""
    path = directory / ".lock"
    fd = _open_lock(path)
    try:
        _take_lock(fd, path)
        yield
    except BaseException:  # the first error is the one to report
        with suppress(OSError):
            _unlock(fd)
        raise
    with os_errors(f"{path} cannot be let go"):
        _unlock(fd)


def _open_lock(path: Path) -> int:
    """Open the lock for those who may write in its directory, and for nobody else: whoever can open
    a file, even to read, can lock it.
    """
    folder = path.parent
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError:
        if path.exists() and os.access(folder, os.W_OK, effective_ids=True):
            raise CheckpointError(
                f"{path} belongs to uid {path.stat().st_uid} and cannot be opened by uid"
                f" {os.geteuid()}: remove it while no job saves there; the next save makes one for"
                " the directory's group"
            ) from None
        raise
    there, own = os.stat(folder), os.fstat(fd)
    shared = there.st_mode & stat.S_IWGRP and there.st_gid == own.st_gid
    with suppress(OSError):  # it is another member's; on some disks files have no modes
        os.fchmod(fd, 0o660 if shared else 0o600)
    return fd


def _take_lock(fd: int, path: Path) -> None:
    try:
        with _where_it_can(_NO_LOCKS):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = "another process"
        with suppress(OSError):
            holder = os.pread(fd, 200, 0).decode(errors="replace") or holder
        raise CheckpointError(
            f"{path.parent} is being written by {holder}: give each job a directory of its own"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be locked: {error.strerror}") from error
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)


def _unlock(fd: int) -> None:
    """Release the lock and close its file in any case; raise the first OSError."""
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        stack.enter_context(_where_it_can(_NO_LOCKS))
        # also where a fork of ours still has the file open
        stack.callback(fcntl.flock, fd, fcntl.LOCK_UN)
        os.ftruncate(fd, 0)


# by directory: the steps that lay there when this process last wrote or loaded there
_left: dict[str, dict[int, tuple[int, int]]] = {}


def remember_steps(directory: Path) -> None:
    """Note which steps lie in `directory` now that this process has written or loaded there."""
    name = os.path.realpath(directory)
    _left.pop(name, None)  # where they cannot be listed, nothing is known
    _left[name] = _identities(directory)


def _check_alone(directory: Path) -> None:
    """Raise CheckpointError, once, for steps another job wrote since our last save or load."""
    before = _left.get(os.path.realpath(directory))
    if before is None:
        return
    now = _identities(directory)
    foreign = [step for step, identity in now.items() if before.get(step) != identity]
    remember_steps(directory)
    if foreign:
        others = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        raise CheckpointError(
            f"step {foreign[0]}{others} in {directory} was written by another job since this one"
            " last saved or loaded there: give each job a directory of its own"
        )


def _identities(directory: Path) -> dict[int, tuple[int, int]]:
    out = {}
    for step, path in list_steps(directory).items():
        with suppress(OSError):
            status = os.stat(path, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                out[step] = (status.st_dev, status.st_ino)
    return out


def make_directory(path: Path) -> None:
    """Make `path` and its parents where they are missing, each on disk before this returns."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a parent that may be written and not read
            sync_directory(directory.parent)
    if not missing:
        path.mkdir(exist_ok=True)  # raises where it is no directory


def commit(working: Path, directory: Path, step: int) -> Path | None:
    """Make the complete `working` visible as `step` in one rename, and return where an older one
    is now; `settle` follows.
    """
    final = step_path(directory, step)
    with os_errors(f"{final} cannot be put in place"):
        sync_directory(working)
        if not final.exists():
            os.rename(working, final)
            return None
        aside = directory / f".replaced-{final.name}"
        remove_tree(aside)
        if _exchange(working, final):
            return working
        # without that system call the old one steps aside first, under a name that still counts
        os.rename(final, aside)
        os.rename(working, final)
        return aside


def settle(directory: Path, older: Path | None) -> None:
    """Write to disk that `commit` has made a step visible; then remove the `older` one."""
    with os_errors(f"{directory} cannot be synced, so a crash of the machine may undo the rename"):
        sync_directory(directory)
    if older is not None:
        _remove(older)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one system call; return whether this system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _MISSING:
        return False
    raise OSError(code, os.strerror(code))


def sync_directory(path: Path) -> None:
    """Write the entries of a directory to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _where_it_can(_NO_SYNC):
            os.fsync(fd)
    finally:
        os.close(fd)


def require_space(directory: Path, num_bytes: int, what: str) -> None:
    """Raise CheckpointError if `directory` lacks `num_bytes`, and SLACK_BYTES, for `what`."""
    space = os.statvfs(directory)
    free, needed = space.f_bavail * space.f_frsize, num_bytes + SLACK_BYTES
    if needed > free:
        raise CheckpointError(
            f"no space for {what}: it needs {needed} bytes ({num_bytes} and {SLACK_BYTES} for the"
            f" manifest and the directory), and {free} are free; what was there before is untouched"
        )


def _remove_leftovers(directory: Path) -> None:
    """Remove the remains of killed saves; the caller holds the lock."""
    steps = list_steps(directory)
    for entry in list(os.scandir(directory)):
        path, replaced = Path(entry.path), _REPLACED.fullmatch(entry.name)
        is_old = replaced is not None and steps.get(int(replaced[1])) != path
        if is_old or _LEFTOVER.fullmatch(entry.name):
            remove_tree(path)


def prune(
    directory: Path, *, keep_last: int | None, keep_every: int | None, written: int
) -> list[int]:
    """Remove all steps but those that were saved last, `keep_last` of them, multiples of
    `keep_every`, and `written`.

    Returns the steps that were removed. None keeps all.
    """
    if keep_last is None:
        return []
    steps = list_steps(directory)
    gone = [
        step
        for _, step in saved_order(directory)[:-keep_last]
        if step != written and (keep_every is None or step % keep_every)
    ]
    for step in gone:
        _remove(steps[step])
    return gone


def _remove(path: Path) -> None:
    """Hide a directory, then remove it: it is never seen in part."""
    hidden = path.with_name(f".removing-{path.name.lstrip('.')}")
    remove_tree(hidden)
    with suppress(OSError):
        os.rename(path, hidden)
        remove_tree(hidden)


def remove_tree(path: Path) -> None:
    """Remove a directory with all in it, as far as that can be done; of a link the link."""
    with suppress(OSError):  # rmtree() raises what close() says, even where it ignores errors
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


# -------------------------------------------------------------------------------- summary of a step
# The contents of a step as plain values for a table or JSON, from its manifest. No torch.


def is_step(path: Path) -> bool:
    """Return whether `path` is a step, and not a directory of steps."""
    return (path / MANIFEST).is_file() or STEP_NAME.fullmatch(path.resolve().name) is not None


def summarize(manifest: Manifest) -> dict[str, Any]:
    """Return the content of `manifest`, without the list of its tensors: number and bytes of those
    by kind and dtype, the largest first.
    """
    parameters = manifest.parameters.values()
    num_tensors: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for entry in manifest.tensors:
        kind = "buffer" if entry.kind.startswith(BUFFER) else "other"
        if (mark := f"|{STATE}") in entry.kind:
            kind = STATE + entry.kind.partition(mark)[2].removesuffix("@0")
        if entry.parameter is not None:
            kind = entry.kind
        num_tensors[kind, entry.dtype] += 1
        num_bytes[kind, entry.dtype] += entry.num_bytes
    in_files = Counter(entry.file for entry in manifest.tensors)
    optimizer = manifest.optimizer
    if optimizer is not None:
        groups = [
            {"parameters": len(group["params"]), "options": _plain(group["options"])}
            for group in optimizer["groups"]
        ]
        optimizer = {"class": optimizer["class"], "groups": groups}

    return {
        "step": manifest.step,
        "world": manifest.world,
        "policy": manifest.policy,
        "precision": manifest.precision,
        "written_by": manifest.written_by,
        "bytes": manifest.total_bytes(),
        "parameters": {
            "count": len(manifest.parameters),
            "trained": sum(entry.trained for entry in parameters),
            "tied": sum(bool(entry.aliases) for entry in parameters),
            "elements": sum(entry.numel for entry in parameters),
        },
        "tensors": [
            {"kind": kind, "dtype": dtype, "tensors": num_tensors[kind, dtype], "bytes": size}
            for (kind, dtype), size in num_bytes.most_common()
        ],
        "files": [
            {"name": file.name, "bytes": file.bytes, "tensors": in_files[number]}
            for number, file in enumerate(manifest.files)
        ],
        "optimizer": optimizer,
        "states": {
            name: "alike on all ranks" if "same" in state else "each rank its own"
            for name, state in manifest.states.items()
        },
    }


def _plain(value: Any) -> Any:
    """Return an encoded value (core/values.py) without its tags; a tuple becomes a list."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) == 1 and tag.startswith("$"):
        return _plain(value[tag][1] if tag == "$scalar" else value[tag])
    return {key: _plain(item) for key, item in value.items()}
