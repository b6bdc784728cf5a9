"""The transports of one engine: that of all data parallel ranks, and those of parameters with a
mesh of their own (experts).

Invariant: what concerns memory that peers read concerns every transport, in the same order on every
rank; agreements go over `main` alone. A wait in one serves the others (serving.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zeroshard.comm.transport import Transport
from zeroshard.core.digest import Digest

__all__ = ["Transports"]


@dataclass(frozen=True)
class Transports:
    """The transports of one engine; methods are those of Transport, on each."""

    main: Transport
    own: tuple[Transport, ...] = ()

    def __iter__(self) -> Iterator[Transport]:
        return iter((self.main, *self.own))

    def begin_write(self) -> None:
        """Return when every rank has called it."""
        for transport in self:
            transport.begin_write()

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None:
        """Watch for stalls."""
        for transport in self:
            transport.watch(digest, is_idle)

    def progress(self) -> None:
        """Take note of what has arrived. Never blocks."""
        for transport in self:
            transport.progress()

    def abandon(self) -> None:
        """After an exception: give up in all, before this rank waits in one of them."""
        if self.own:
            for transport in self:
                transport.give_up()
        for transport in self:
            transport.abandon()

    def close(self) -> None:
        """Release threads, sockets and memory."""
        for transport in self:
            transport.close()
