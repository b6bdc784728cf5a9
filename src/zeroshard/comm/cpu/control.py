"""The control plane: small messages between the ranks of one group, over sockets on this host and
over gloo to other hosts. It never touches a device, beside NCCL either.

Here a rank waits, whatever for, asleep until it hears something; here it learns that others have
ended, given up or are in another call. A wait serves the data plane of the same ranks (`attach`),
and the other control planes of this process (`Served`), so ranks may run units in different order.

Invariant: whatever ends a wait on one rank by an error ends it on every rank that waits for that
one. Cost: an exchange is one socket record per near peer and 32 KiB, and one gloo message (two
beyond 248 bytes) per far one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from zeroshard.comm.cpu.gloo_peers import Connections, GlooPeers, Heads, Notices, Subgroup, Transfer
from zeroshard.comm.cpu.links import Dispatcher, Links, MessageKind, framed, given_up, unframed
from zeroshard.comm.cpu.rendezvous import HostGroups
from zeroshard.comm.job import end_process
from zeroshard.comm.ranks import Ranks
from zeroshard.comm.transport import (
    Traffic,
    serve,
    serve_while_waiting,
    served_beside,
    stop_serving,
)
from zeroshard.core.digest import Digest
from zeroshard.core.placement import Mesh
from zeroshard.errors import PlanMismatch, StallError, ZeroshardError

# a rank that waits for a slot and hears nothing for so long is stuck ([Note: relief])
_IDLE_S = 0.0002
_PATIENT_S = 0.1
_LAST_S = 10.0  # for which a program that ends waits for what other ranks have posted
_LISTEN_AFTER_S = 1.0  # when a wait begins to ask whether it can ever end

# the call, our frame, its number for near ranks, and what far ones send
_Exchange = tuple[str, bytes, int, Heads | None]


class Plane:
    """A part of the data plane: does what the control plane asks; by default nothing."""

    def progress(self) -> None:
        """Do what has become possible. Never blocks."""

    def relieve(self) -> None:
        """This rank is blocked: help the peers that are stuck on it."""

    def reset(self) -> None:
        """Leave everything under way."""

    def restart(self) -> None:
        """Every rank has called `reset`."""

    def explain_stall(self) -> str:
        """Return what the error of a stall should say beside the rank."""
        return ""

    def close(self) -> None:
        """The control plane is closed: release memory and threads. Idempotent."""


class PeerOperation:
    """The Work of an operation under way; `transfer` holds its messages to and from far ranks.

    `call` names it where ranks wait for each other in different calls.
    """

    def __init__(
        self, control: PeerControl, what: str, call: str, transfer: Transfer | None
    ) -> None:
        self.transfer = transfer
        self._control = control
        self._what = what
        self._call = call

    def is_over(self) -> bool:
        """Whether everything has come and is where it belongs."""
        raise NotImplementedError

    def missing(self) -> set[int]:
        """Return the near ranks awaited."""
        raise NotImplementedError

    def wait(self) -> None:
        if not self.is_over():
            far = set if self.transfer is None else self.transfer.awaited
            self._control.wait_until(
                self.is_over,
                self._what,
                near=self.missing,
                far=far,
                call=self._call,
                transfer=self.transfer,
            )

    def done(self) -> bool:
        if not self.is_over():
            self._control.progress()
        return self.is_over()


class PeerControl(Ranks):
    """The control plane of one rank of `subgroup`.

    `connections` are gloo's; `mesh` says which bytes of `traffic` come
    from other nodes.
    """

    def __init__(
        self,
        subgroup: Subgroup,
        hosts: HostGroups,
        mesh: Mesh,
        traffic: Traffic,
        *,
        connections: Connections | None,
        notices: Notices | None = None,
        stall_timeout_s: float,
    ) -> None:
        super().__init__(subgroup.rank, subgroup.size)
        self.members = subgroup.members
        host = hosts.group_of(self.rank)
        self.near = [rank for rank in host if rank != self.rank]
        self.far = [rank for rank in range(self.size) if rank not in host]
        self.name = _name(hosts.groups)
        self.mesh = mesh
        self._other_nodes = {
            rank for rank in range(self.size) if not mesh.same_node(rank, self.rank)
        }
        self.traffic = traffic
        self.stall_timeout_s = stall_timeout_s
        links = Links(hosts.sockets, members=self.members, stall_timeout_s=stall_timeout_s)
        self.dispatcher = Dispatcher(self.rank, links, self.near)
        self.messages = GlooPeers(
            connections, self.rank, members=self.members, wake=links.wake, finish=self._finish
        )
        self.notices = notices
        self._far_notices = notices if self.far else None  # near ranks are told on their sockets
        self._has_given_up = False
        self._posted: Callable[[], None] | None = None  # reads what was posted, and is unread
        self._has_posted = False
        self._planes: list[Plane] = []
        serve_while_waiting(self)

    def limit_waits(self, stall_timeout_s: float) -> None:
        """Wait for at most `stall_timeout_s` from here on."""
        self.stall_timeout_s = self.dispatcher.links.stall_timeout_s = stall_timeout_s

    def attach(self, plane: Plane) -> None:
        """Have every wait serve `plane`, and every `give_up` reset it."""
        self._planes.append(plane)

    def count(
        self, operation: str, bytes_of: Mapping[int, int], *, near: str = "shared_memory"
    ) -> None:
        """Count what one call brought from each other rank; `near` is the link to near ones."""
        if self.size == 1:
            self.traffic.add(operation, "local", 0)
        for peers, link in ((self.near, near), (self.far, "gloo")):
            if peers:
                received = between = 0
                for peer in peers:
                    num_bytes = bytes_of.get(peer, 0)
                    received += num_bytes
                    between += num_bytes if peer in self._other_nodes else 0
                self.traffic.add(operation, link, received, between=between)

    # ------------------------------------------------------------------------------------- messages

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        parts = self.exchange_quietly(payload, call)
        self.count(
            "exchange", {rank: len(parts[rank]) for rank in range(self.size) if rank != self.rank}
        )
        return parts

    @property
    def quietly(self) -> Ranks:
        """The same ranks; their exchanges are not counted."""
        return Ranks(self.rank, self.size, self.exchange_quietly)

    def exchange_quietly(self, payload: bytes, call: str) -> list[bytes]:
        """Exchange what is not the engine's payload, and so is not counted."""
        self.read_posted()
        return self._end_exchange(self._begin_exchange(payload, call))

    def _begin_exchange(self, payload: bytes, call: str) -> _Exchange:
        """Send `payload`. Never waits; the next exchange begins when this one has ended."""
        frame = framed(call, payload)
        sequence, heads = self.dispatcher.send_payload(frame), None
        if self.far:
            heads = self.messages.begin_exchange(frame, self.far, f"exchange of {call}")
        return call, frame, sequence, heads

    def _end_exchange(self, begun: _Exchange) -> list[bytes]:
        """Return every rank's payload."""
        call, frame, sequence, heads = begun
        parts = {self.rank: frame}
        if heads is not None:
            parts |= self.messages.end_exchange(frame, heads, f"exchange of {call}")

        def missing() -> set[int]:
            return self.dispatcher.payloads_missing(sequence)

        self.wait_until(lambda: not missing(), f"exchange of {call}", near=missing, call=call)
        parts |= self.dispatcher.take_payloads(sequence)
        return unframed([parts[rank] for rank in range(self.size)], self.members)

    def post(self, payload: bytes, call: str, read: Callable[[list[bytes]], None]) -> None:
        """Send `payload`, and let `read` have every rank's when the next exchange or post begins,
        in `read_posted`, or at the end of the program. Never waits for what is posted here.
        """
        self.read_posted()
        if not self._has_posted:
            self._has_posted = True
            atexit.register(_read_at_exit, weakref.ref(self), os.getpid())
        begun = self._begin_exchange(payload, call)
        self._posted = lambda: read(self._end_exchange(begun))

    def read_posted(self) -> None:
        """Wait for what every rank has posted last, if it was not read, and raise what its reader
        raises.
        """
        if (read := self._posted) is not None:
            self._posted = None
            read()

    def check_peers(self, what: str) -> None:
        self.progress()
        self.dispatcher.links.require(self.near, what)

    # -------------------------------------------------------------------------------------- waiting

    def progress(self) -> None:
        """Take note of what has arrived, and let the data plane do what has become possible."""
        self.dispatcher.collect(0.0)
        for plane in self._planes:
            plane.progress()

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        *,
        near: Callable[[], set[int]] = set,
        far: Callable[[], set[int]] = set,
        idle: Callable[[], None] | None = None,
        call: str | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """Return when `ready()`; until then serve the peers, in all transports of this process,
        and relieve those that are stuck.

        `near` and `far` name the ranks awaited; `far` may be slow and is asked only for the error.
        `idle` is called when nothing was heard for `_IDLE_S`. `call` names this wait where nothing
        but a call of the awaited ranks' programs can end it; `transfer` is what it awaits from far
        ranks then. Raises StallError, PeerLostError, PlanMismatch where an awaited rank waits for
        us in another call, and StateError where one has given up what we wait for.
        """
        others, begin, patience_s = served_beside(self), time.monotonic(), _IDLE_S
        deadline = begin + self.stall_timeout_s
        if self._far_notices is not None:
            self._far_notices.begin_wait()
        while True:
            self.progress()
            serve(others)
            if ready():
                return
            awaited = sorted(near())
            self._require(awaited, what, call)
            now = time.monotonic()
            if now > deadline:
                names = [self.members[rank] for rank in sorted(near() | far())]
                raise StallError(
                    f"{what}: rank(s) {names} did not come within {deadline - begin:g} s; see what"
                    " they are doing, or raise stall_timeout_s if they are only slow"
                    f"{self.explain_stall()}"
                )
            if transfer is not None and now > begin + _LISTEN_AFTER_S:
                self._listen(transfer, call)
            self._relieve()
            beside = [descriptor for other in others for descriptor in other.descriptors]
            if self.dispatcher.collect(min(patience_s, deadline - now + 0.001), beside):
                patience_s = _IDLE_S
            elif time.monotonic() - now >= _IDLE_S:
                patience_s = _PATIENT_S
                if idle is not None:
                    idle()

    def explain_stall(self) -> str:
        """Return what the error of a stall should say beside the ranks."""
        return "".join(plane.explain_stall() for plane in self._planes)

    def _require(self, awaited: Sequence[int], what: str, call: str | None) -> None:
        """Raise why the near ranks `awaited`, or a far one, will never come."""
        generation = self.dispatcher.links.generation
        if self._far_notices is not None:
            ahead = self._far_notices.ahead(generation, self.messages.run)
            if ahead:
                raise given_up([self.members[rank] for rank in ahead], what)
        if call is not None:
            self.dispatcher.require_same_call(awaited, call)
        self.dispatcher.links.require(awaited, what)
        self.dispatcher.require_same_generation(awaited, what)

    def _listen(self, transfer: Transfer, call: str | None) -> None:
        """Join the exchange of a far rank that waits there for us while we wait for it: under our
        own call, which ends both.
        """
        if transfer.senders() & self.messages.listen(self.far, "the next exchange"):
            assert call is not None
            self.exchange_quietly(b"", call)

    def _finish(self, transfers: Sequence[Transfer]) -> None:
        def ready() -> bool:
            return all(transfer.done() for transfer in transfers) or any(
                transfer.error for transfer in transfers
            )

        def awaited() -> set[int]:
            return set().union(*(transfer.awaited() for transfer in transfers))

        self.wait_until(ready, transfers[0].what, far=awaited)
        for transfer in sorted(transfers, key=lambda transfer: transfer.error is None):
            transfer.finish()

    @property
    def is_waiting(self) -> bool:
        return bool(self.near)

    @property
    def descriptors(self) -> Sequence[int]:
        return self.dispatcher.links.descriptors

    def serve(self) -> None:
        self.progress()
        self._relieve()

    def _relieve(self) -> None:
        for plane in self._planes:
            plane.relieve()

    # ------------------------------------------------------------------------------- after an error

    def give_up(self) -> None:
        if self._has_given_up:
            return
        self._has_given_up, self._posted = True, None
        for plane in self._planes:
            plane.reset()
        self.messages.abandon()
        self.dispatcher.reset()
        self.dispatcher.send(MessageKind.ABANDON)
        if self._far_notices is not None:
            self._far_notices.give_up(self.dispatcher.links.generation)

    def abandon(self) -> None:
        self.give_up()
        self._has_given_up = False
        what, stall_timeout_s = "meeting the other ranks after an error", self.stall_timeout_s

        def missing() -> set[int]:
            return self.dispatcher.behind()

        # a signal's handler that raised may have lost what they said
        self.dispatcher.send(MessageKind.ABANDON, 1, to=sorted(missing()))
        self.stall_timeout_s *= 2  # the others may wait for us until they stall, and come then
        try:
            self.wait_until(lambda: not missing(), what, near=missing)
            if self.far:
                self.messages.exchange(b"", self.far, what)
                self.messages.renew(stall_timeout_s=self.stall_timeout_s)
                self.exchange_quietly(b"", what)  # [Note: hanging up]
        finally:
            self.stall_timeout_s = stall_timeout_s
        for plane in self._planes:
            plane.restart()

    def close(self) -> None:
        stop_serving(self)
        self._posted = None
        self.messages.close()
        self.dispatcher.close()
        for plane in self._planes:
            plane.close()


def _read_at_exit(control: weakref.ref[PeerControl], pid: int) -> None:
    """Read what the process `pid` has posted last, which no exchange has followed: end it with the
    error that this would have raised.
    """
    posting, failed = control(), sys.exc_info()[1] or getattr(sys, "last_value", None)
    if posting is None or posting._posted is None or failed is not None or os.getpid() != pid:
        return
    posting.limit_waits(min(posting.stall_timeout_s, _LAST_S))
    try:
        posting.read_posted()
    except ZeroshardError as error:  # else another rank has ended, or goes on: it is told there
        if isinstance(error, PlanMismatch):
            end_process(error)


def _name(groups: list[list[int]]) -> str:
    """Return how the ranks are connected, the same on every rank."""
    if len(groups) == 1:
        return "shared_memory"
    return "gloo" if all(len(group) == 1 for group in groups) else "mixed"


# ---------------------------------------------------------------------------- stalls of collectives
# A collective of an accelerator is enqueued, so a rank that never comes raises nothing there.
# Another rank's host runs ahead, until it waits
#
#     for the control plane   StallError after `stall_timeout_s`, as everywhere
#     for the device          in a read (the norm, the user's ``loss.item()``) that nothing can end
#
# and so a thread looks, every `every` seconds. A rank that has entered nothing since its last look
# says so in the job's store: where it is, and since when. One that has entered nothing for
# `stall_timeout_s`, with collectives under way, is stuck on its device: the thread says where all
# ranks are and ends the process with the exit code of a StallError, before the backend's own
# timeout.
#
# Invariant: a rank that has ended its collectives is never killed, however long it computes, saves
# or sleeps. Cost: nothing per unit but the note of ``core/digest.py``; no message while a rank
# moves. What it does not do: say which rank is to blame. The one that has been silent longest comes
# first.


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
    """Watches the rank of `control`; `digest` holds its last event. `is_idle` says whether all of
    its collectives have ended, in any thread.
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
                what = f"rank {self._control.rank}: collectives have not ended on the device"
                why = f"a rank did not come{self.explain_stall()}"
                end_process(StallError(f"{what} {silent_s:.1f} s after {place}: {why}"))

    def _is_stuck(self) -> bool:
        try:
            return not self._is_idle() and not self._closed.is_set()
        except RuntimeError:  # the device has failed: whoever waits for it is told
            return False


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
