"""Stream and event work, behind one small protocol, so that it can be checked without an accelerator.

Three lanes: ``compute`` (the user's current stream), ``gather`` and ``reduce``. The engine follows one discipline, FSDP2's without
``record_stream``: a buffer is allocated and freed in the compute lane's order; another lane that uses it first waits for compute
(``fork``), and compute waits for the lane's event before it touches or frees the buffer (``join``).

    compute:  alloc(full) . fork ............... join . read(full) ... free(full)
    gather:                  \\_ write(full) _ mark _/

Invariant: any two accesses of one buffer, one of which writes (allocation and freeing count as writes), are ordered by a chain of program
order and events. CheckingStreams proves it with vector clocks on CPU; NoStreams does nothing; AcceleratorStreams enqueues for real.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

__all__ = ["Event", "Lane", "Streams"]

Lane = Literal["compute", "gather", "reduce"]
Event = Any  # opaque to the engine


class Streams(Protocol):
    """What the engine may say about streams. `buffer` is any hashable name of one piece of memory."""

    def fork(self, lane: Lane) -> None:
        """Let `lane` wait for everything enqueued on compute so far."""

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """Enqueue what the body does (and what it reports) on `lane`; outside, everything is on compute."""

    def mark(self, lane: Lane) -> Event:
        """Return an event that comes after everything enqueued on `lane` so far."""

    def join(self, event: Event) -> None:
        """Let compute wait for `event`."""

    def alloc(self, buffer: Hashable) -> None:
        """Report that `buffer`'s memory was taken, on the current lane."""

    def free(self, buffer: Hashable) -> None:
        """Report that `buffer`'s memory was given back, on the current lane."""

    def read(self, buffer: Hashable) -> None:
        """Report a read of `buffer` on the current lane."""

    def write(self, buffer: Hashable) -> None:
        """Report a write of `buffer` on the current lane."""
