"""What travels between the launcher and a host, both ways over one ssh connection.

To the host go lines of JSON. From the host, whose standard output carries this and nothing else,
comes a greeting and then frames: one byte that says what it is, four that say how long, the bytes
(`OUT` and `ERR`: output of the job; `NOTE`: JSON). A shell's greeting before ours is passed over.

Text of the system's (arguments, paths, the environment) is bytes; it becomes str as UTF-8 with
surrogateescape, whatever the locales of both sides are, so that all bytes come back as they went.
Standard library only.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

__all__ = ["ERR", "GREETING", "NOTE", "OUT", "Frames", "frame", "from_text", "line", "to_text"]

GREETING = b"\n\x01zeroshard 1\n"
OUT, ERR, NOTE = b"o", b"e", b"n"
_HEAD = struct.Struct("!cI")
_MAX_FRAME = 1 << 26
_MAX_BEFORE = 1 << 16


def to_text(data: bytes | str) -> str:
    """Return bytes of the system's, or a str that Python made of them, as text for JSON."""
    return os.fsencode(data).decode("utf-8", "surrogateescape")


def from_text(text: str) -> str:
    """Return what `to_text` was given, as Python shows it on this host."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def line(message: Any) -> bytes:
    """Return a message to the host."""
    return json.dumps(message).encode("ascii") + b"\n"


def frame(kind: bytes, data: bytes) -> bytes:
    """Return a frame from the host."""
    return _HEAD.pack(kind, len(data)) + data


class Frames:
    """Takes the bytes of a host as they come, and gives whole frames."""

    def __init__(self) -> None:
        self._unread = b""
        self.greeted = False

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the frames that are complete by now. Raises ValueError for bytes of others."""
        self._unread += data
        if not self.greeted:
            before, found, rest = self._unread.partition(GREETING)
            if not found:
                if len(before) > _MAX_BEFORE:
                    raise ValueError("its shell writes too much before the command")
                return []
            self.greeted, self._unread = True, rest
        frames = []
        while len(self._unread) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._unread)
            if kind not in (OUT, ERR, NOTE) or length > _MAX_FRAME:
                raise ValueError("it sent bytes that are not of zeroshard's protocol")
            if len(self._unread) < _HEAD.size + length:
                break
            frames.append((kind, self._unread[_HEAD.size : _HEAD.size + length]))
            self._unread = self._unread[_HEAD.size + length :]
        return frames
