"""Stalls of collectives that no host waits for: which rank is where, and the end of a process that
nothing else would end.

A collective of an accelerator is enqueued, so a rank that never comes raises nothing there. Another
rank's host runs ahead, until it waits

    for the control plane   StallError after `stall_timeout_s`, as everywhere (control.py)
    for the device          in a read (the norm, the user's ``loss.item()``) that nothing can end

and so a thread looks, every `every` seconds. A rank that has entered nothing since its last look
says so in the job's store: where it is, and since when. One that has entered nothing for
`stall_timeout_s`, with collectives under way, is stuck on its device: the thread says where all
ranks are and ends the process with the exit code of a StallError, before the backend's own timeout.

Invariant: a rank whose collectives have ended is never ended, however long it computes, saves or
sleeps. Cost: nothing per unit but the note of ``core/digest.py``; no message while a rank moves.
What it does not do: say which rank is to blame. The one that has been silent longest comes first.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping

from zeroshard.comm.cpu.control import PeerControl, Plane
from zeroshard.comm.cpu.notices import Notices
from zeroshard.comm.launched import end_process
from zeroshard.core.digest import Digest
from zeroshard.errors import StallError

_EVERY_S = 5.0
_ANSWER_S = 1.0  # how long the store may take
_NUM_RANKS, _NUM_PLACES, _NUM_STARTED = 8, 8, 3  # named in an error
_REMEDY = (
    "Collectives that were enqueued cannot be left, so nothing goes on after this: end the job and"
    " start it again from its last checkpoint"
)


def every(stall_timeout_s: float) -> float:
    """Return the seconds between two looks."""
    return min(stall_timeout_s / 4, _EVERY_S)


class StallWatch(Plane):
    """Watches the rank of `control`, whose last event `digest` holds. `is_idle` says whether all
    of its collectives have ended, in any thread.
    """

    def __init__(
        self,
        control: PeerControl,
        notices: Notices,
        digest: Digest,
        is_idle: Callable[[], bool],
    ) -> None:
        self._control = control
        self._notices = notices
        self._is_idle = is_idle
        self._closed = closed = threading.Event()
        # an engine that is dropped ends the thread
        self._digest = weakref.ref(digest, lambda _: closed.set())
        self._notices.place("")  # so that whoever reads never waits for a rank that moves
        threading.Thread(target=self._watch, name="zeroshard-stalls", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def explain_stall(self) -> str:
        found: list[Mapping[int, str]] = []
        reader = threading.Thread(target=lambda: found.append(self._notices.places()), daemon=True)
        reader.start()
        reader.join(_ANSWER_S)
        return f". {_describe_places(found[0] if found else {})}. {_REMEDY}"

    def _watch(self) -> None:
        said = None
        while not self._closed.wait(every(self._control.stall_timeout_s)):
            digest, timeout_s = self._digest(), self._control.stall_timeout_s
            if digest is None:
                return
            entered = digest.entered
            *_, at = entered
            silent_s = time.monotonic() - at
            is_silent = silent_s > every(timeout_s)
            place = _place(digest) if is_silent else ""
            del digest  # while we sleep
            to_say = entered if is_silent else None
            if said is not to_say:
                said = to_say
                since = f"{time.time() - silent_s:.1f} {place}"
                self._notices.place(since if said is not None else "")
            # a wait of the host, which can raise, ends before
            if silent_s > timeout_s + every(timeout_s) and self._is_stuck():
                end_process(self._error(place, silent_s))

    def _is_stuck(self) -> bool:
        try:
            return not self._is_idle() and not self._closed.is_set()
        except RuntimeError:  # the device has failed: whoever waits for it is told
            return False

    def _error(self, place: str, silent_s: float) -> StallError:
        return StallError(
            f"rank {self._control.rank}: collectives have not ended on the device {silent_s:.1f} s"
            f" after {place}: a rank did not come{self.explain_stall()}"
        )


def _place(digest: Digest) -> str:
    event, unit, step, _ = digest.entered
    place = f"{event} of unit {unit!r} in step {step}" if unit else f"{event} in step {step}"
    started = digest.last(_NUM_STARTED)
    return f"{place} (collectives started last: {', '.join(started)})" if started else place


def _describe_places(places: Mapping[int, str]) -> str:
    """Return which ranks have entered what last, the longest silent ones first."""
    ranks_at: dict[str, list[int]] = {}
    since: dict[str, float] = {}
    for rank, note in places.items():
        at, _, place = note.partition(" ")
        if place:
            ranks_at.setdefault(place, []).append(rank)
            since[place] = min(since.get(place, float("inf")), float(at))
    if not ranks_at:
        return "No rank has said what it entered last"
    first = sorted(ranks_at, key=lambda place: since[place])[:_NUM_PLACES]
    return "Entered last: " + "; ".join(
        f"{_named(ranks_at[place])} {place}, {max(time.time() - since[place], 0):.0f} s ago"
        for place in first
    )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NUM_RANKS]))
    more = f" and {len(ranks) - _NUM_RANKS} more" if len(ranks) > _NUM_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
