"""The operations of a step, and how they are waited for and observed.

A `Hop` is one operation of a route on a buffer, with its lane and its bytes. It counts them from
the elements of the buffer, how they are shared, the ranks of its axis and its format; it uses no
closed forms of core/wire.py and knows neither rows nor cells. `Work` is the one protocol of
whatever is started now and waited for later, on the wire (comm) or between tiers (tier). A `Probe`
lets a trace observe it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, runtime_checkable

from zeroshard.core.placement import Mesh, Portion, Scope, Tier
from zeroshard.core.wire import LinkBytes, Wire

# Where a hop runs: the streams of runtime/streams.py, the two directions of a tier's link or disk,
# and the host's cores, which add to and step what rests off the device.
Lane = Literal["compute", "gather", "reduce", "tier read", "tier write", "host"]


class Kind(Enum):
    """The operation of a hop."""

    READ = "read"  # from another tier
    ENCODE = "encode"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    DECODE = "decode"  # after a reduce-scatter: each rank's part, added in fp32
    ADD = "add"  # to an earlier sum, where no collective does it
    CAST = "cast"
    WRITE = "write"  # to another tier
    KEEP = "keep"  # a copy for the backward


class Axis(Enum):
    """Over which ranks a collective runs."""

    NODE = "between nodes"  # the ranks with one local index
    LOCAL = "inside nodes"
    FLAT = "all ranks"

    def num_ranks(self, mesh: Mesh) -> int:
        """Return how many ranks take part in one collective."""
        return {Axis.NODE: mesh.num_nodes, Axis.LOCAL: mesh.node_size, Axis.FLAT: mesh.size}[self]


class When(Enum):
    """In which passes a hop of a reduce is taken."""

    ALWAYS = "always"
    HELD = "held"  # sums of earlier micro-batches inside no_sync wait here
    FIRST = "first"  # no sum rests yet where the gradient rests
    AGAIN = "again"  # one does


@dataclass(frozen=True)
class Place:
    """The part of a buffer that a rank holds, and its memory."""

    scope: Scope
    tier: Tier = Tier.DEVICE

    def __str__(self) -> str:
        name = self.scope.name.lower().replace("_", " ")
        return name if self.tier is Tier.DEVICE else f"{name} ({self.tier.value})"


@dataclass(frozen=True)
class TierBytes:
    """The bytes that one rank reads from other tiers than the device, and writes to them."""

    read: float = 0.0
    write: float = 0.0

    def __add__(self, other: TierBytes) -> TierBytes:
        return TierBytes(self.read + other.read, self.write + other.write)


@dataclass(frozen=True)
class Hop:
    """One operation on a buffer, as one rank of `mesh` sees it."""

    kind: Kind
    source: Place
    target: Place
    wire: Wire  # the format that moves, or into which it is turned
    lane: Lane
    mesh: Mesh
    axis: Axis | None = None  # of a collective
    when: When = When.ALWAYS

    def __post_init__(self) -> None:
        assert (self.axis is not None) == (self.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))

    @property
    def after(self) -> Place:
        """The place of the buffer afterwards; a copy that is kept lies beside it."""
        return self.source if self.kind is Kind.KEEP else self.target

    def _portion(self, buffer: float | Portion) -> Portion:
        return buffer if isinstance(buffer, Portion) else self.mesh.portion(buffer)

    def held_bytes(self, place: Place, buffer: float | Portion) -> float:
        """Return the bytes of this rank's part, at `place`, of `buffer`: as many elements, shared
        equally, or this rank's portion of them.
        """
        return self._portion(buffer).held(place.scope) * self.wire.bytes_per_element

    def link_bytes(self, buffer: float | Portion) -> LinkBytes:
        """Return what this rank receives for `buffer` (and, of equal shares, sends).

        Every other rank of the axis sends the part that it holds (a gather) or what this rank is
        to hold (a reduce).
        """
        if self.axis is None:
            return LinkBytes()
        has, nodes, local = self._portion(buffer), self.mesh.num_nodes, self.mesh.node_size
        if self.kind is Kind.ALL_GATHER:
            moved = {
                Axis.FLAT: LinkBytes(has.node - has.own, has.whole - has.node),
                Axis.LOCAL: LinkBytes(inside=has.whole - has.column),
                Axis.NODE: LinkBytes(between=has.column - has.own),
            }
        else:
            moved = {
                Axis.FLAT: LinkBytes(has.own * (local - 1), has.own * local * (nodes - 1)),
                Axis.LOCAL: LinkBytes(inside=has.column * (local - 1)),
                Axis.NODE: LinkBytes(between=has.own * (nodes - 1)),
            }
        return moved[self.axis] * self.wire.bytes_per_element

    def tier_bytes(self, buffer: float | Portion) -> TierBytes:
        """Return what this rank reads from other tiers and writes to them; adding to what is on
        another tier than the addend does both.
        """
        moved = self.held_bytes(self.target, buffer)
        arrives = self.kind is Kind.ADD and self.source.tier is not self.target.tier
        return TierBytes(
            moved if self.kind is Kind.READ or arrives else 0.0,
            moved if self.kind is Kind.WRITE or arrives else 0.0,
        )

    def __str__(self) -> str:
        over = "" if self.axis is None else f" {self.axis.value}"
        when = "" if self.when is When.ALWAYS else f" if {self.when.value}"
        return f"{self.kind.value}{over} {self.wire} -> {self.target}{when}"


# ----------------------------------------------------------------------------------- work under way


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
# The one recording is runtime/trace.py; it writes the events of core/timeline.py. An operation is
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
