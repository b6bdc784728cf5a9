"""The transports of one engine: that of all data parallel ranks, and those of parameters with a
mesh of their own (experts).

Invariant: what concerns memory that peers read concerns every transport, in the same order on every
rank; agreements go over `main` alone. A wait in one serves the others (serving.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zeroshard.comm.levels import Levels
from zeroshard.core.digest import Digest

__all__ = ["Transports"]


@dataclass(frozen=True)
class Transports:
    """The transports of one engine; methods are those of Levels, on each."""

    main: Levels
    own: tuple[Levels, ...] = ()

    def __iter__(self) -> Iterator[Levels]:
        return iter((self.main, *self.own))

    def begin_write(self) -> None:
        """Return when every rank has called it."""
        for levels in self:
            levels.begin_write()

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None:
        """Watch for stalls."""
        for levels in self:
            levels.watch(digest, is_idle)

    def progress(self) -> None:
        """Take note of what has arrived. Never blocks."""
        for levels in self:
            levels.progress()

    def abandon(self) -> None:
        """After an exception: give up in all, before this rank waits in one of them."""
        if self.own:
            for levels in self:
                levels.give_up()
        for levels in self:
            levels.abandon()

    def close(self) -> None:
        """Release threads, sockets and memory."""
        for levels in self:
            levels.close()
