"""Something under way: the one protocol of whatever is started now and waited for later, on the
wire (comm) or between tiers (tier).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


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
