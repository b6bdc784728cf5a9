"""Errors of one rank's disk or host memory, raised on every rank.

A read that fails on one rank must not end its forward there: the others would wait in their next collective. So it is noted, the pass goes on with
NaNs, and all ranks are told where they meet anyway: at the end of a forward of the model, and at a step.

Invariant: nothing computed from a failed read reaches a master: the step asks first. Cost: one small exchange per forward and step, where states
rest on another tier.
"""

from __future__ import annotations

from zeroshard.comm.transport import Transport
from zeroshard.errors import StorageError

__all__ = ["Faults"]


class Faults:
    """What has gone wrong on this rank and has not been told."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._error: StorageError | None = None

    def note(self, error: StorageError) -> None:
        """Keep the first error until the ranks meet."""
        self._error = self._error or error

    def agree(self, error: StorageError | None = None) -> None:
        """Raise on every rank where one has an error. Collective."""
        own, self._error = self._error or error, None
        answers = [answer.decode() for answer in self._transport.exchange(b"" if own is None else str(own).encode())]
        if own is not None:
            raise own
        for rank, answer in enumerate(answers):
            if answer:
                raise StorageError(f"rank {rank}: {answer}")
