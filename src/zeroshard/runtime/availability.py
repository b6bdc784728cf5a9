"""The states of an engine that may be used now, and the reason why others may not.

    state          weights are gathered     the numbers that rest are written, stepped, saved
    at rest        yes                      yes
    swapped        yes, the averages        no: trained numbers would be mixed with averages
    paused         no                       no: off the device, or half a step is taken
    refused        no                       no, for ever (a forked child, a rank without a part)

Whoever reads or writes numbers asks here, and nobody else decides: a gather (`check_gather`), and
what needs trained numbers (`check_trained`), a step, a backward, a save.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.errors import StateError

_SWAPPED = (
    "the weights are swapped for their average: train, save, load, change weights and step outside"
    " EMA.swapped(); inside it are forwards without a backward, engine.gathered() and"
    " engine.full_state_dict()"
)


class Availability:
    """Whether the states of one engine may be used; it is in one of the states above."""

    def __init__(self) -> None:
        self.refusal: str | None = None  # why nothing may be used, for ever
        self.is_given_up = False  # nothing of the engine is left but to close it
        self._paused: str | None = None  # why nothing may be used for now
        self.is_swapped = False  # averages rest in the place of the trained numbers

    def refuse(self, why: str) -> None:
        """Raise StateError with `why` at every later use."""
        self.refusal = why

    def give_up(self, why: str) -> None:
        """The same, but for the engine's close(): what rests is not whole, or not here."""
        self.refusal, self.is_given_up = why, True

    def pause(self, why: str | None) -> None:
        """Raise StateError with `why` at every use, until it is None."""
        self._paused = why

    def check_open(self) -> None:
        """Raise StateError where nothing may be used any more."""
        if self.refusal is not None:
            raise StateError(self.refusal)

    def check_gather(self) -> None:
        """Raise StateError where weights cannot be gathered."""
        self.check_open()
        if self._paused is not None:
            raise StateError(self._paused)

    def check_trained(self) -> None:
        """Raise StateError where what rests is not what is trained, or not there."""
        self.check_gather()
        if self.is_swapped:
            raise StateError(_SWAPPED)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, averages rest in the place of the trained numbers."""
        self.check_trained()
        self.is_swapped = True
        try:
            yield
        finally:
            self.is_swapped = False
