"""Write a file as a whole or not at all, also into a directory in which others can write.

The draft lies beside the file under a name that nobody can know before, and is made anew
(``O_EXCL``), so that a link that waits there is never written through. Moving the draft to its
place replaces a link of that name, and not the file that the link points to.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["replacing"]


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
