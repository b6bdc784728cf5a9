"""Paired sends and receives over gloo, matched by key instead of by order of arrival.

The connections are the transport's own (`Connections`), beside the connections of the process group
it serves: a message can meet neither the user's traffic, nor another engine's, nor what an earlier
transport left under way.

Two ranks that gather different units at the same time would mix them silently if messages were
matched by order alone, so every message carries a tag made of (generation, key, operation). Gloo
keeps the messages of one tag in order (tried: 50 receives posted before 50 sends), so the n-th
operation of a key meets the n-th of the same key without a sequence number. Gloo takes tags of 31
bits and keeps no state per tag (3000 tags cost as much as one)::

    bit 30: ours | 29..22: generation | 21..2: key | 1..0: operation

Windows' keys are numbered in the order of their (collective) making. Another key is hashed into the
upper half of the 20 bits; two that meet there are refused with ConfigError. The generation grows
with every `abandon`, so that the ranks can meet beside what was left under way; then they `renew`
the connections, which ends that.

Cost: one message per slice that is not empty; tensors on an accelerator are staged through one host
copy each way. The host waits for the stream that is current when a transfer begins: whichever is
current when it ends may then write what arrives.

[Note: gloo waits] A paired gloo work completes only inside its ``wait``, may be waited for once,
and a wait that times out closes the connection (all tried on torch 2.13). So every transfer is
waited for, without a time limit, by a thread that does nothing else; the caller looks at what the
thread reports. Then `done` is true, a stall leaves the connection whole, and no order of arrival
can block another.

[Note: works that are gone] Gloo reads nothing more from a peer after its message has met a receive
that nobody holds any more. A signal's handler may raise wherever Python runs (a caught Ctrl-C): so
a transfer is held before it begins, and the work that gloo returns is put away by the same call in
C.

[Note: hanging up] A thread that waits for a message which never comes is ended by closing the
connections, and gloo closes all of a group where one wait times out. So `renew` closes them, and
the end of the interpreter: a thread that comes back from C++ after that is unwound there, and
aborts the process. Otherwise they live until nothing is under way, since what this rank has sent
may be on its way yet.

A rank may be connected to a peer that is still connecting, which raises "Connection closed by peer"
if the rank then hangs up (tried). So ranks that connect anew meet before one of them goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import struct
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from zeroshard.errors import ConfigError, PeerLostError, StallError
from zeroshard.memory import drain

# ------------------------------------------------------------------------- notes in the job's store
# Ranks of one host say so on their sockets (links.py). A rank elsewhere that waits for a message
# which will never come cannot be told by one: it would wait until its stall timeout, and the rank
# in ``reset()`` with it. So a rank that gives up a step leaves a note in the job's store, and a
# rank that has waited for a while looks there. A rank that has entered nothing for a while says
# there where it is (control.py: StallWatch).
#
# Cost: nothing, but for a look twice a second by a thread of its own while a rank waits for longer
# than a quarter of a second.


_FIRST_LOOK_S = 0.25
_EVERY_S = 0.5


class Notices:
    """The notes of the ranks of one transport, by generation (which grows with every reset).
    `store` is theirs alone.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._owner = store
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._gave_up: tuple[int, list[int]] = (0, [])  # generation entered, ranks
        self._is_looking = False
        self._look_at = 0.0

    def give_up(self, generation: int) -> None:
        """Say that this rank enters `generation`."""
        try:
            self._store.set(f"{generation}/{self._rank}", b"1")
            self._store.set(f"{generation}", b"1")
        except RuntimeError:  # whoever held the store is gone: the others stall
            return

    def place(self, text: str) -> None:
        """Say where this rank is, "" where that changes all the time."""
        with contextlib.suppress(RuntimeError):  # as above: nobody can read it
            self._store.set(f"place/{self._rank}", text.encode())

    def places(self) -> dict[int, str]:
        """Return where each rank has said it is. Waits for the store, and for ranks that have
        never said anything.
        """
        ranks = sorted([*self._peers, self._rank])
        with contextlib.suppress(RuntimeError):
            said = self._store.multi_get([f"place/{rank}" for rank in ranks])
            return {rank: text.decode() for rank, text in zip(ranks, said, strict=True)}
        return {}

    @cached_property
    def _store(self) -> Any:
        """A connection of its own, made when it is first needed: the owner's may be blocked in a
        call.
        """
        return self._owner.clone()

    def begin_wait(self) -> None:
        """A wait begins."""
        self._look_at = time.monotonic() + _FIRST_LOOK_S

    def ahead(self, generation: int, run: Callable[[Callable[[], None]], None]) -> Sequence[int]:
        """Return the ranks known to have left `generation`; now and then have another thread
        look (`run` starts it).
        """
        now = time.monotonic()
        if now >= self._look_at and not self._is_looking:
            self._look_at = now + _EVERY_S
            run(lambda: self._look(generation + 1))
        entered, ranks = self._gave_up
        return ranks if entered > generation else ()

    def _look(self, generation: int) -> None:
        self._is_looking = True  # here: a signal's handler may raise before this thread is asked
        try:
            if self._store.check([f"{generation}"]):
                self._gave_up = (
                    generation,
                    [peer for peer in self._peers if self._store.check([f"{generation}/{peer}"])],
                )
        except RuntimeError:
            return
        finally:
            self._is_looking = False


# ------------------------------------------------------------------------------- sends and receives

ALL_GATHER, REDUCE_SCATTER, CONTROL, LOOSE_GATHER = 0, 1, 2, 3

_KEY_BITS = 20
_HASHED = 1 << (_KEY_BITS - 1)
# a receive that was left behind must not meet a message of as many generations later
_GENERATIONS = 256
_HEAD = struct.Struct("<QQ")  # bytes of the payload, messages sent to this peer before
_INLINE = 256 - _HEAD.size  # payload bytes that travel with the head in one message
_FOREVER = timedelta(days=20)  # fits gloo's 31 bits of milliseconds
_PROBE_S = 0.05
_AT_EXIT_S = 0.5
_HANG_UP_S = 5.0  # a few milliseconds, on a machine that is not loaded


class Waiters:
    """Daemon threads that run blocking jobs, as many as block at one time. Idle ones end with
    `close`, or with the last reference to this.
    """

    def __init__(self) -> None:
        self._crew = _Crew()
        self._end = weakref.finalize(self, self._crew.close)
        self._end.atexit = False

    def run(self, job: Callable[[], None]) -> None:
        """Run `job` on an idle thread, or on a new one."""
        self._crew.run(job)

    def close(self) -> None:
        """End the idle threads now and the others when their job ends."""
        self._end()


class _Crew:
    """State of the threads, which do not know their owner: they must not keep it alive."""

    everyone: weakref.WeakSet[_Crew] = weakref.WeakSet()

    def __init__(self) -> None:
        self.everyone.add(self)
        self.num_busy = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # `close` may be called by the garbage collector, in a thread that holds it
        self._lock = threading.RLock()
        self._idle = 0
        self._closed = False

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            self.num_busy += 1
            if self._idle:
                self._idle -= 1
                self._jobs.put(job)
                return
        threading.Thread(
            target=self._serve, args=([job],), name="zeroshard-gloo", daemon=True
        ).start()

    def _serve(self, first: list[Callable[[], None]]) -> None:
        job: Callable[[], None] | None = first.pop()  # a thread keeps its arguments
        while job is not None:
            job()
            # it holds tensors, and maybe the last reference to connections, which take a while to
            # end in C++, or to objects that would close us
            job = None
            with self._lock:
                self.num_busy -= 1
                if self._closed:
                    return
                self._idle += 1
            job = self._jobs.get()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._jobs.put(None)


@atexit.register
def _end_jobs() -> None:
    """Wait a moment for jobs under way, then end them by hanging up ([Note: hanging up])."""
    if not _wait_for_jobs(_AT_EXIT_S):
        for connections in list(Connections.everyone):
            connections.close()
        _wait_for_jobs(_HANG_UP_S)


def _wait_for_jobs(timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(crew.num_busy for crew in _Crew.everyone):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _in_child() -> None:
    """In a forked child there are no threads, and the sockets are the parent's."""
    _Crew.everyone = weakref.WeakSet()
    Connections.everyone = weakref.WeakSet()


os.register_at_fork(after_in_child=_in_child)


class Transfer:
    """The sends and receives of one operation of one key ([Note: gloo waits])."""

    def __init__(
        self, what: str, waiters: Waiters, wake: Callable[[], None], members: Sequence[int]
    ) -> None:
        self.what = what
        self._members = members
        self.error: PeerLostError | None = None
        self._waiters = waiters
        self._wake = wake
        self._connections: Connections | None = None  # they live as long as we are under way
        # (peer, dist.Work, whether it receives) that no thread waits for yet
        self._todo: deque[tuple[int, Any, bool]] = deque()
        self._unfinished: list[int] = []  # peers, once per message
        self._receiving: list[int] = []  # of these, the messages that come from them
        self.on_receive: Callable[[int], None] = lambda peer: None
        self.on_finish: Callable[[Transfer], None] = lambda transfer: None
        self._lock = threading.Lock()
        self._alive: list[torch.Tensor] = []  # gloo reads and writes these until the works are done
        self._arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []  # (device tensor, host copy)

    def send(self, connections: Connections, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Start sending `tensor` to `peer`."""
        host = tensor if tensor.device.type == "cpu" else tensor.cpu()
        self._connections = connections
        self._add(peer, host, connections.send, tag, receives=False)

    def receive(self, connections: Connections, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Start receiving from `peer`; `tensor` is filled by the end of the transfer."""
        host = tensor
        if tensor.device.type != "cpu":
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._arrivals.append((tensor, host))
        self._connections = connections
        self._add(peer, host, connections.recv, tag, receives=True)

    def _add(self, peer: int, host: torch.Tensor, call: Any, tag: int, *, receives: bool) -> None:
        self._alive.append(host)
        self._unfinished.append(peer)
        self._receiving += [peer] * receives
        begun = map(call, ([host],), (peer,), (tag,))
        try:
            # [Note: works that are gone]
            self._todo.extend(zip((peer,), begun, (receives,), strict=True))
        except RuntimeError as error:
            self.error = _lost(self.what, self._members[peer], error)

    def start(self) -> None:
        """Have a thread wait for what was added."""
        if self._todo:
            self._waiters.run(self._serve)

    def _serve(self) -> None:
        while True:
            try:
                peer, work, receives = self._todo.popleft()
            except IndexError:
                return
            error = None
            try:
                work.wait(_FOREVER)
            except RuntimeError as failure:
                error = _lost(self.what, self._members[peer], failure)
            del work  # it holds the tensor; who is told below may release that, or measure
            with self._lock:
                self._unfinished.remove(peer)
                if receives and error is None:
                    self._receiving.remove(peer)
                    self.on_receive(peer)
                self.error = self.error or error
                if not self._unfinished or self.error:
                    self._wake()

    def done(self) -> bool:
        """Whether everything sent has left and everything awaited has come, or can no longer
        come.
        """
        return not self._unfinished or self.error is not None

    def awaited(self) -> set[int]:
        """Return the ranks with messages that have not come or gone; takes 50 ms, since only a
        thread of its own can tell.
        """
        for _ in range(len(self._todo)):
            self._waiters.run(self._serve)
        time.sleep(_PROBE_S)
        return set(self._unfinished)

    def senders(self) -> set[int]:
        """Return the ranks that have not sent their messages, as far as is known; takes no time."""
        with self._lock:
            return set(self._receiving)

    def finish(self) -> None:
        """End a transfer that is `done`: raise what went wrong, move staged arrivals to their
        device.
        """
        if self.error is not None:
            raise self.error
        assert not self._unfinished, (self.what, self._unfinished)
        for tensor, host in self._arrivals:
            tensor.copy_(host)
        self._alive, self._arrivals = [], []
        self.on_finish(self)


def _lost(what: str, peer: int, error: Exception) -> PeerLostError:
    return PeerLostError(f"{what}: rank {peer} has ended or given up ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split("] ")[-1][:120]


@dataclass(frozen=True)
class Subgroup:
    """Ranks that make connections of their own: `rank` of `size`, under a `name` that no other
    subgroup has.
    """

    name: str
    rank: int
    size: int
    members: tuple[int, ...]  # what errors call its ranks

    def part(self, ranks: Sequence[int]) -> Subgroup:
        """Return the subgroup of some of our `ranks`, this one among them."""
        return Subgroup(
            f"{self.name}/{'-'.join(map(str, ranks))}",
            ranks.index(self.rank),
            len(ranks),
            tuple(self.members[rank] for rank in ranks),
        )


class Connections:
    """Gloo connections between the ranks of `subgroup`, theirs alone. Collective. They live until
    nothing is under way and nothing refers to this, or until `close`.
    """

    everyone: weakref.WeakSet[Connections] = weakref.WeakSet()

    def __init__(self, subgroup: Subgroup, *, stall_timeout_s: float, generation: int = 0) -> None:
        """Connect to a bare ProcessGroupGloo under the subgroup's name in the job's store, not
        registered with torch.distributed: new_group would have every rank of the job take part, or
        reuse the store entries of a destroyed group of the same ranks (tried).
        """
        self._subgroup = subgroup
        store = _store_of(subgroup, f"/{generation}")
        timeout = timedelta(seconds=stall_timeout_s)
        group: Any = dist.ProcessGroupGloo(store, subgroup.rank, subgroup.size, timeout)
        self.send, self.recv = group.send, group.recv
        self.everyone.add(self)

    def renewed(self, generation: int, *, stall_timeout_s: float) -> Connections:
        """Return other connections, and close these with whatever is on its way there. Collective,
        after every rank has sent and received the last message that it needs of these.
        """
        try:
            new = Connections(
                self._subgroup, stall_timeout_s=stall_timeout_s, generation=generation
            )
        except RuntimeError as error:
            raise StallError(
                "connecting anew after an error: not every rank came within"
                f" {stall_timeout_s:g} s ({_first_line(error)})"
            ) from None
        self.close()
        return new

    def close(self) -> None:
        """Hang up: whatever waits for a message ends with an error ([Note: hanging up])."""
        for peer in range(self._subgroup.size):
            if peer != self._subgroup.rank:
                with contextlib.suppress(RuntimeError):
                    self.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))


def notices_of(subgroup: Subgroup) -> Notices:
    """Return the notes that the ranks of `subgroup` leave each other in the job's store."""
    return Notices(
        distributed_c10d.PrefixStore("given up", _store_of(subgroup)), subgroup.rank, subgroup.size
    )


def _store_of(subgroup: Subgroup, suffix: str = "") -> distributed_c10d.PrefixStore:
    return distributed_c10d.PrefixStore(
        f"zeroshard/{subgroup.name}{suffix}", distributed_c10d._get_default_store()
    )


Heads = tuple[dict[int, torch.Tensor], list[Transfer]]  # of one exchange, by peer, on their way


class GlooPeers:
    """Tags, transfers and small exchanges over `connections` (None where there is no peer to
    reach).

    `wake` is called by another thread when a transfer ends; `finish` waits until all of some
    transfers are done and finishes them.
    """

    def __init__(
        self,
        connections: Connections | None,
        rank: int,
        *,
        members: Sequence[int],
        wake: Callable[[], None],
        finish: Callable[[Sequence[Transfer]], None],
    ) -> None:
        self._connections = connections
        self._members = members
        self._rank = rank
        self._wake = wake
        self._finish = finish
        self._waiters = Waiters()
        self._generation = 0
        self._key_ids: dict[str, int] = {}
        self._hashed: dict[int, str] = {}
        # those under way ([Note: works that are gone]), and those left behind: gloo may still write
        # into their tensors
        self._posted: set[Transfer] = set()
        self._abandoned: list[Transfer] = []
        # of the next exchange, by peer, where we listen for it
        self._heads: dict[int, tuple[Transfer, torch.Tensor]] = {}
        # messages to each peer in this generation, exchanges aside
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._lock = threading.Lock()

    def register(self, key: str) -> None:
        """Number `key`; collective, in the same order on every rank."""
        if key not in self._key_ids:
            assert len(self._key_ids) + 1 < _HASHED, len(self._key_ids)
            self._key_ids[key] = len(self._key_ids) + 1  # 0 is CONTROL's

    def tag(self, key: str, operation: int) -> int:
        """Return the tag of `operation` of `key`."""
        number = self._key_ids.get(key)
        if number is None:
            number = _HASHED | (zlib.crc32(key.encode()) & (_HASHED - 1))
            other = self._hashed.setdefault(number, key)
            if other != key:
                raise ConfigError(
                    f"keys {other!r} and {key!r} share one message tag; make a window of either"
                    " name first"
                )
        return self._tag(number, operation)

    def _tag(self, number: int, operation: int) -> int:
        generation = self._generation % _GENERATIONS
        return 1 << 30 | generation << (_KEY_BITS + 2) | number << 2 | operation

    def post(
        self,
        what: str,
        tag: int,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, torch.Tensor],
    ) -> Transfer:
        """Start sending and receiving contiguous tensors to and from peers. Empty ones are left
        out, on both sides.
        """
        for device in {tensor.device for tensor in (*sends.values(), *receives.values())}:
            drain(device)
        transfer = Transfer(what, self._waiters, self._wake, self._members)
        self._posted.add(transfer)
        transfer.on_finish = self._posted.discard
        if tag != self._tag(0, CONTROL):
            transfer.on_receive = partial(_count, self._received, self._lock)
            self._sent.update(peer for peer, tensor in sends.items() if tensor.numel())
        assert self._connections is not None, what
        for peer, tensor in receives.items():
            if tensor.numel():
                transfer.receive(self._connections, peer, tensor, tag)
        for peer, tensor in sends.items():
            if tensor.numel():
                transfer.send(self._connections, peer, tensor, tag)
        transfer.start()
        return transfer

    def exchange(self, payload: bytes, peers: Sequence[int], what: str) -> dict[int, bytes]:
        """Give `payload` to `peers` and return theirs; `what` is its name in errors. Blocking; a
        second round where a payload exceeds 248 bytes.
        """
        return self.end_exchange(payload, self.begin_exchange(payload, peers, what), what)

    def begin_exchange(self, payload: bytes, peers: Sequence[int], what: str) -> Heads:
        """Send the first 248 bytes of `payload`; return what the `peers` send. Never waits; the
        next exchange begins when this one has ended.
        """
        listening, self._heads = self._heads, {}
        heads = {
            peer: torch.empty(_HEAD.size + _INLINE, dtype=torch.uint8)
            for peer in peers
            if peer not in listening
        }
        sends = {peer: self._head(payload, peer) for peer in peers}
        transfer = self.post(what, self._tag(0, CONTROL), sends, heads)
        heads |= {peer: head for peer, (_, head) in listening.items()}
        return heads, [transfer, *(waiting for waiting, _ in listening.values())]

    def end_exchange(self, payload: bytes, begun: Heads, what: str) -> dict[int, bytes]:
        """Send the rest of `payload`, and return the peers' payloads."""
        heads, transfers = begun
        peers, tag = list(heads), self._tag(0, CONTROL)
        self._finish(transfers)
        sizes = {peer: _HEAD.unpack(_to_bytes(heads[peer][: _HEAD.size]))[0] for peer in peers}
        rests = {
            peer: torch.empty(max(sizes[peer] - _INLINE, 0), dtype=torch.uint8) for peer in peers
        }
        rest = (
            torch.frombuffer(bytearray(payload[_INLINE:]), dtype=torch.uint8)
            if len(payload) > _INLINE
            else torch.empty(0, dtype=torch.uint8)
        )
        self._finish([self.post(what, tag, dict.fromkeys(peers, rest), rests)])
        return {
            peer: _to_bytes(torch.cat([heads[peer][_HEAD.size :], rests[peer]]))[: sizes[peer]]
            for peer in peers
        }

    def _head(self, payload: bytes, peer: int) -> torch.Tensor:
        head = _HEAD.pack(len(payload), self._sent[peer]) + payload[:_INLINE]
        return torch.frombuffer(
            bytearray(head.ljust(_HEAD.size + _INLINE, b"\0")), dtype=torch.uint8
        )

    def listen(self, peers: Sequence[int], what: str) -> set[int]:
        """Be ready for the next exchange; return the `peers` that have begun it and have nothing
        else on its way to us.

        What we await of those, beside that exchange, will not come before we take part in it.
        """
        for peer in peers:
            if peer not in self._heads:
                head = torch.empty(_HEAD.size + _INLINE, dtype=torch.uint8)
                self._heads[peer] = self.post(what, self._tag(0, CONTROL), {}, {peer: head}), head
        begun = {
            peer: head
            for peer, (transfer, head) in self._heads.items()
            if transfer.done() and transfer.error is None
        }
        with self._lock:
            return {
                peer
                for peer, head in begun.items()
                if _HEAD.unpack(_to_bytes(head[: _HEAD.size]))[1] == self._received[peer]
            }

    def abandon(self) -> None:
        """Leave behind what is under way: what is sent from now on meets nothing sent before. All
        ranks must call it, and `renew` when they have met.
        """
        self._abandoned.extend(self._posted)
        self._posted.clear()
        self._heads = {}
        with self._lock:
            self._sent, self._received = Counter(), Counter()
        self._generation += 1

    def renew(self, *, stall_timeout_s: float) -> None:
        """End what was left behind. Collective."""
        assert self._connections is not None
        self._connections = self._connections.renewed(
            self._generation, stall_timeout_s=stall_timeout_s
        )
        self._abandoned = []

    def run(self, job: Callable[[], None]) -> None:
        """Run a blocking `job` in another thread."""
        self._waiters.run(job)

    def close(self) -> None:
        """End the threads and, once nothing is under way, the connections."""
        self._waiters.close()
        if self._connections is not None and (self._abandoned or self._heads):
            self._connections.close()
        self._connections = None
        self._posted.clear()


def _count(received: Counter[int], lock: threading.Lock, peer: int) -> None:
    with lock:
        received[peer] += 1


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
