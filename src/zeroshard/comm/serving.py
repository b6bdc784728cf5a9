"""Who has to be served while this process waits: peers need our part of what is under way, in
whatever transport of ours it is.

Two engines in one backward may have one rank wait in the first for a rank that waits in the second;
an operation of two levels needs the second one started. So a wait in one transport serves all
others. Invariant: serving never blocks, and what goes wrong there is not the error of who waits
here: its own waits meet it again. Registration is weak.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Protocol

from zeroshard.errors import ZeroshardError

__all__ = ["Served", "others", "register", "serve", "unregister"]


class Served(Protocol):
    """A transport that needs our attention while we wait elsewhere."""

    @property
    def is_waiting(self) -> bool:
        """Whether there is, or may come, anything to do."""

    def serve(self) -> None:
        """Do what has become possible."""


_all: weakref.WeakSet[Served] = weakref.WeakSet()


def register(transport: Served) -> None:
    """Have `transport` served by every wait of this process."""
    _all.add(transport)


def unregister(transport: Served) -> None:
    """Stop serving `transport`. Idempotent."""
    _all.discard(transport)


def others(transport: Served) -> list[Served]:
    """Return those that a wait in `transport` has to serve."""
    return [other for other in _all if other is not transport and other.is_waiting]


def serve(transports: Iterable[Served]) -> None:
    """Do what has become possible in `transports`, which are not those of who waits."""
    for transport in transports:
        with contextlib.suppress(ZeroshardError):
            transport.serve()
