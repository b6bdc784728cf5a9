"""Something under way: the one protocol of whatever is started now and waited for later, on the
wire (comm) or between tiers (tier); and the probes by which a trace observes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from zeroshard.core.route.hop import Lane


@runtime_checkable
class Work(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Return when the result is valid, on accelerators in stream order. Idempotent.

        Raises what went wrong: of a collective, StallError naming the operation's key and the ranks
        awaited after the transport's ``stall_timeout_s``, and PeerLostError when such a rank has
        ended; of a copy to or from a tier, StorageError naming file and tensor.
        """

    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; may make progress."""


class DoneWork:
    """A Work that was finished when it was made."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


def wait_on_host(work: Work) -> None:
    """Return when the result is valid for the host, too: `wait` alone orders a stream after it."""
    getattr(work, "synchronize", work.wait)()


# --------------------------------------------------------------------------------- observing a step
# Whoever moves bytes or waits holds a `Probe`, and looks once per operation, never per parameter,
# whether a `Recording` is in it::
#
#     recording = self._probe.recording
#     since = None if recording is None else recording.now()
#     work = ...                                    # start it
#     if recording is not None:
#         work = recording.watch(work, Operation("gather", "all_gather", key, num_bytes), since)
#
#     with self._probe.waiting("host", key):
#         ...                                       # what nobody holds a Work for
#
# The one recording is runtime/trace.py, whose events are those of core/timeline.py. An operation is
# named by the key of its segment or of a state of it (``KEY master``); the recording knows the
# units. Nothing here reads a clock.


# a time: seconds of the host's clock, or an event of a device's; the recording reads it
Stamp = Any


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that a lane does for one segment."""

    lane: Lane
    name: str  # the value of a hop's kind, "step", or "": only waits for it are noted
    key: str  # of the segment; "": of none
    num_bytes: float = 0.0


class Recording(Protocol):
    """A trace under way, which is told of operations and waits."""

    def now(self) -> Stamp:
        """Return the time on the lane that is current."""

    def watch(self, work: Work, operation: Operation, since: Stamp) -> Work:
        """`operation` was started at `since` as `work`: note when it ends, and who waits for it.
        Return the Work to use instead.
        """

    def note(self, operation: Operation, since: Stamp) -> None:
        """`operation`, begun at `since`, has just ended. Any thread may say so."""

    def by_pieces(
        self, run: Callable[..., None], num_pieces: int, operation: Operation
    ) -> Callable[..., None]:
        """Return `run`, which any thread calls for each of `num_pieces` parts of `operation`,
        so that the operation lasts from the first call to the end of the last.
        """

    def waiting(self, lane: Lane, key: str) -> AbstractContextManager[None]:
        """Compute waits inside for what `lane` does for `key` ("": for the other ranks)."""

    def marked(self, event: object) -> None:
        """A lane will reach `event` after what was noted last."""

    def joined(self, event: object, since: Stamp) -> None:
        """Compute waits, from `since` until now, for a marked `event`."""


_NOBODY = nullcontext()


class Probe:
    """A place where a recording may be."""

    __slots__ = ("recording",)

    def __init__(self) -> None:
        self.recording: Recording | None = None  # None: nothing is traced

    def waiting(self, lane: Lane, key: str = "") -> AbstractContextManager[None]:
        """Return a context in which compute waits for what `lane` does for `key` ("": for the other
        ranks).
        """
        return _NOBODY if self.recording is None else self.recording.waiting(lane, key)

    def start(self, recording: Recording) -> None:
        """Tell `recording` what happens from now on."""
        self.recording = recording

    def stop(self) -> None:
        """Tell nobody."""
        self.recording = None
