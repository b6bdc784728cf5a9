"""Files and text that other people wrote, and files that are written whole or not at all.

A file is read only where it is a regular one (a read of a pipe waits, and opening a device may act
on it), up to a number of bytes. JSON has at most `DEPTH` levels, since what reads it later calls
itself for each. Text is printed without the characters that a terminal obeys.

Every error is a `NotReadable`; its text is a reason in one line, without the file's name: the
caller raises an error of its own that names file and remedy. Links are followed, as caches of
models are made of them; `open_descriptor` can refuse them.

A file is written through a draft beside it, also into a directory in which others can write. Nobody
can know the draft's name before, and it is made anew (``O_EXCL``), so that a link that waits there
is never written through. Moving the draft to its place replaces a link of that name, and not the
file that the link points to.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

DEPTH = 100
_MOST_BYTES = 64 << 20
# they change the order of the text around them, or end a line
_MISLEADING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029}


def has_transformers() -> bool:
    """Whether Transformers is installed, and no older than 5.3: older ones run code that a model's
    config.json names, though they are told not to (CVE-2026-4372, CVE-2026-5241).
    """
    from importlib.metadata import PackageNotFoundError, version  # takes as long as a command

    try:
        major, minor = version("transformers").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (5, 3)


class NotReadable(ValueError):
    """A file that cannot be read, or holds something else; its text is the reason."""


def open_descriptor(path: str | Path, *, follow: bool = True, folder: int | None = None) -> int:
    """Open a regular file to read, in the `folder` with this descriptor if one is given; without
    `follow` not through a link. Raises NotReadable.

    The file is checked through a descriptor that opens nothing (O_PATH): opening a device may
    already act on it.
    """
    try:
        flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        found = os.open(path, flags, dir_fd=folder)
        try:
            mode = os.fstat(found).st_mode
            if stat.S_ISLNK(mode):
                raise NotReadable("it is a symbolic link, which is not followed")
            if not stat.S_ISREG(mode):
                raise NotReadable("it is not a regular file")
            # the same file, whatever has the name by now
            with suppress(FileNotFoundError):  # no /proc
                return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
            # by its path; neither a pipe nor a device there waits
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
            opened = os.open(path, flags, dir_fd=folder)
            if os.path.samestat(os.fstat(opened), os.fstat(found)):
                return opened
            os.close(opened)
            raise NotReadable("it was replaced while it was opened")
        finally:
            os.close(found)
    except OSError as error:
        raise NotReadable(error.strerror or str(error)) from error
    except ValueError as error:  # a path with a zero in it
        raise NotReadable(str(error)) from None


def open_to_add(path: str | Path) -> BinaryIO:
    """Open a regular file, or a new one, to read it and add bytes to it; not through a link. Raises
    OSError.
    """
    # a pipe does not make it wait
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(descriptor, "a+b")


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file to read bytes. Raises NotReadable."""
    return os.fdopen(open_descriptor(path), "rb")


def read_file(path: str | Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return what is in a regular file of at most `most_bytes`. Raises NotReadable."""
    with open_file(path) as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise NotReadable(error.strerror or str(error)) from None
    if len(data) > most_bytes:
        raise NotReadable(f"it has more than {most_bytes} bytes")
    return data


def read_json(path: str | Path, most_bytes: int = _MOST_BYTES) -> Any:
    """Return the JSON in a regular file of at most `most_bytes`. Raises NotReadable."""
    return from_json(read_file(path, most_bytes))


def from_json(data: bytes) -> Any:
    """Return the JSON that `data` is. Raises NotReadable."""
    try:
        read = json.loads(data)
    except RecursionError:
        raise NotReadable(f"it is nested deeper than {DEPTH} levels") from None
    except ValueError as error:
        raise NotReadable(f"it is not JSON: {printable(str(error))}") from None
    check_depth(read)
    return read


def check_depth(data: object) -> None:
    """Raise NotReadable where lists and dictionaries are nested deeper than `DEPTH`."""
    if is_deeper(data, DEPTH):
        raise NotReadable(f"it is nested deeper than {DEPTH} levels")


def is_deeper(data: object, depth: int) -> bool:
    """Return whether lists and dictionaries are nested deeper than `depth`."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(depth):
        inside = (one.values() if isinstance(one, dict) else one for one in level)
        level = [child for one in inside for child in one if isinstance(child, dict | list)]
    return bool(level)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for bytes that has the name `path` where the block ends well, and is removed
    where it does not. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def printable(text: str) -> str:
    """Return `text` with escapes, as in a string of Python's, for the characters that move a
    terminal's cursor, colour it, turn the order of a text around, or cannot be encoded. Line ends
    and tabs stay.
    """
    return "".join(
        char.encode("unicode_escape").decode()
        if (unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t")
        or ord(char) in _MISLEADING
        else char
        for char in text
    )
