"""Each wait and each hold of docs/design/streams.md, left out one at a time, changes a number under
some schedule of the pretended device: with it there, none does (test_matrix.py).

`python -m tests.device.table --waits` prints which schedule finds which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from tests.device.omission import Omission
from tests.device.programs import CASES, FIFO, Schedule, trained
from zeroshard.errors import ZeroshardError
from zeroshard.runtime import bucket
from zeroshard.runtime.bucket import Reduction
from zeroshard.runtime.segment import Segment


@contextmanager
def _reduces_hold_nothing() -> Iterator[None]:
    """A reduce holds its bucket until that is asked for, and nothing else."""

    class Forgetful(Reduction):
        def __init__(self, flight: Any, buffer: Any, loan: Any, uses: Any) -> None:
            super().__init__(flight, buffer, loan, ())

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "buffer":
                self.buffer = None
            return value

    with mock.patch.object(bucket, "Reduction", Forgetful):
        yield


@contextmanager
def _tiles_on_the_device_leave_no_mark() -> Iterator[None]:
    bring = Segment.bring

    def unmarked(self: Segment, start: int, stop: int, *args: Any) -> Any:
        return [] if stop <= self.aliased else bring(self, start, stop, *args)

    with mock.patch.object(Segment, "bring", unmarked):
        yield


@contextmanager
def _tiles_on_the_device_hold_no_gradient() -> Iterator[None]:
    bring = Segment.bring

    def forgetful(self: Segment, start: int, stop: int, master: Any, stays: bool, *_: Any) -> Any:
        return bring(self, start, stop, master, stays)

    with mock.patch.object(Segment, "bring", forgetful):
        yield


HOLDS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "Reduction.uses": _reduces_hold_nothing,
    "the mark of Segment.bring": _tiles_on_the_device_leave_no_mark,
    "the gradient of Segment.bring": _tiles_on_the_device_hold_no_gradient,
}


def met(rank: int, world: int, case: str) -> dict[str, int]:
    """Return the waits of a case, and how often each is met."""
    with Omission().active() as omission:
        trained(CASES[case].program, rank, world, FIFO)
    return dict(Counter(omission.waits))


def finds(
    rank: int,
    world: int,
    wait: str,
    case: str,
    schedules: Sequence[Schedule],
    first: bool = False,
) -> list[Schedule]:
    """Return the schedules (or the `first` of them) under which a run without `wait` has other
    numbers, or none at all.
    """
    program = CASES[case].program
    expected = trained(program, rank, world, FIFO)
    found = []
    for schedule in schedules:
        if found and first:
            break
        without = HOLDS[wait]() if wait in HOLDS else Omission([wait]).active()
        try:
            with without:
                run = trained(program, rank, world, schedule)
        except (ZeroshardError, ValueError):
            found.append(schedule)  # numbers that nobody can go on with
        else:
            if run.differs_from(expected):
                found.append(schedule)
    return found
