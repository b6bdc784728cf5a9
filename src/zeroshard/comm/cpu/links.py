"""Control messages between ranks of one host: a full mesh of Unix sockets that also carry
descriptors.

Bulk data lies in shared memory; who may read or write it is said by small records on these sockets.
So ordering comes from system calls, not from a memory model; who waits sleeps in the kernel; and a
peer that dies hangs up at once. The sockets have abstract names, known only to this job and gone
with their last descriptor.

A peer has ended when its socket hangs up or its process does (pidfd): a data loader's worker forked
off it may keep the socket open.

Invariant: records of one peer arrive whole and in the order they were sent. `send` never waits
without draining our own inbox, so two ranks with full buffers cannot wait for each other.

The `Dispatcher` gives each record to who asked for its kind; exchanges and errors become state
there. Every exchange says which call of the program it belongs to, so that two calls that differ
never take each other's payloads: the name of the call ("zs.save()") travels in front of the
payload. Ranks that meet under different names raise PlanMismatch at once, and so does a rank that
waits for one that waits for it in another call: neither would ever go on.

Handling a record never blocks, never sums and never copies bulk data, so it may happen inside any
call. A record of an older generation (sent before a `reset`) is dropped, but for those that say
which memory exists.

Cost: one system call per record, 33 bytes and a tail; an exchange also has the bytes of its call's
name, some twenty per rank.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from zeroshard.errors import PeerLostError, PlanMismatch, StallError, StateError

MAX_TAIL = 32 * 1024
_HEADER = struct.Struct("<BIQQQQ")  # kind, generation, a, b, c, d
_ZEROS = (0, 0, 0, 0)
_LENGTH = struct.Struct("<H")  # of the name of a call, in bytes
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_RECORD_BYTES = _HEADER.size + MAX_TAIL
_FD_SPACE = socket.CMSG_LEN(4)


class MessageKind(IntEnum):
    """The meaning of a record; (a, b, c, d, tail) in brackets."""

    SLOT = 1  # a gradient slot exists [number, bytes] + descriptor
    DROP = 2  # an idle slot is gone [number]
    READY = 3  # our part of a reduce lies in a slot [sequence, slot, first byte, bytes; key]
    NONE = 4  # we have no part in a reduce [sequence; key]
    ACK = 5  # we need your slot no longer [slot]
    # the memory of a window [serial, bytes] + descriptor, or the reason why there is none [serial,
    # 0; text]
    WINDOW = 6
    PUBLISHED = 7  # our slice of a window may be read [serial, epoch]
    READ = 8  # we have finished reading all windows [count]
    EXCHANGE = 9  # part of a payload [sequence, whole size; bytes]
    STUCK = 11  # we cannot go on before you need our slots no longer
    ABANDON = 12  # we have left everything before this generation [1: say so again]
    # we have given up, since the ranks are in different calls [exchanges ended before; text]
    REFUSED = 13


_KINDS = {int(kind): kind for kind in MessageKind}
_OF_EVERY_GENERATION = (MessageKind.SLOT, MessageKind.DROP, MessageKind.WINDOW)


@dataclass(slots=True)
class Message:
    """One record as received. A descriptor that came along is the receiver's to close."""

    peer: int
    kind: MessageKind
    generation: int
    a: int
    b: int
    c: int
    d: int
    tail: bytes
    fd: int | None


class Links:
    """The sockets of one rank, by peer. `wake_fd` is an eventfd that other threads write to end
    a `receive` early.
    """

    def __init__(
        self, sockets: dict[int, socket.socket], *, members: Sequence[int], stall_timeout_s: float
    ) -> None:
        self.members = members  # what errors call the ranks
        self.lost: set[int] = set()
        self.generation = 0
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self.stall_timeout_s = stall_timeout_s
        self._sockets = sockets
        self._peer_of = {sock.fileno(): peer for peer, sock in sockets.items()}
        self._processes: dict[int, int] = {}  # peer -> pidfd
        self._inbox: deque[Message] = deque()
        self._poll = select.epoll()
        self._poll.register(self.wake_fd, select.EPOLLIN)
        for peer, sock in sockets.items():
            sock.setblocking(False)
            self._poll.register(sock, select.EPOLLIN)
            try:  # readable when the peer's process ends
                process = os.pidfd_open(peer_credentials(sock)[0])
            except (OSError, OverflowError):  # its pid is hidden from us
                continue
            self._processes[peer], self._peer_of[process] = process, peer
            self._poll.register(process, select.EPOLLIN)
        # also where nobody calls `close`: an engine may be dropped
        descriptors = [self.wake_fd, *self._processes.values()]
        self._close_descriptors = weakref.finalize(self, _close_all, descriptors)
        self._close_descriptors.atexit = False

    def send(
        self, peer: int, kind: MessageKind, *numbers: int, tail: bytes = b"", fd: int | None = None
    ) -> None:
        """Send one record of up to four `numbers`. Does nothing for a peer that has ended: whoever
        waits for it finds out.
        """
        assert len(tail) <= MAX_TAIL, len(tail)
        record = _HEADER.pack(kind, self.generation, *numbers, *_ZEROS[len(numbers) :]) + tail
        deadline = 0.0
        while peer not in self.lost:
            try:
                if fd is None:
                    self._sockets[peer].send(record, socket.MSG_NOSIGNAL)
                else:
                    socket.send_fds(self._sockets[peer], [record], [fd], socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                deadline = deadline or time.monotonic() + self.stall_timeout_s
                self._make_room(peer, kind, deadline)
            except (BrokenPipeError, ConnectionError):
                self._drain(peer)  # what it said before it ended still counts
                self._lose(peer)

    def _make_room(self, peer: int, kind: MessageKind, deadline: float) -> None:
        """Wait until `peer` reads, and read meanwhile what others send to us."""
        if time.monotonic() > deadline:
            raise StallError(
                f"rank {self.members[peer]} reads no messages ({kind.name}) since"
                f" {self.stall_timeout_s:g} s"
            )
        self._poll.modify(self._sockets[peer], select.EPOLLIN | select.EPOLLOUT)
        self._fill_inbox(self._poll.poll(0.1))
        if peer not in self.lost:
            self._poll.modify(self._sockets[peer], select.EPOLLIN)

    @property
    def descriptors(self) -> Sequence[int]:
        """Become readable when `receive` would return something."""
        return () if self._poll.closed else (self._poll.fileno(),)

    def receive(self, timeout_s: float, beside: Sequence[int] = ()) -> list[Message]:
        """Return what has arrived, waiting up to `timeout_s` for the first record, hang-up or
        wake-up, or until one of the descriptors `beside` can be read.
        """
        if beside and timeout_s and not self._inbox:
            poll = select.poll()
            for descriptor in (*self.descriptors, *beside):
                poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1000)
            timeout_s = 0.0
        if events := self._poll.poll(0.0 if self._inbox else timeout_s):
            self._fill_inbox(events)
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def _fill_inbox(self, events_of: Sequence[tuple[int, int]]) -> None:
        for number, events in events_of:
            if number == self.wake_fd:
                os.eventfd_read(self.wake_fd)
                continue
            peer = self._peer_of[number]
            ended = number == self._processes.get(peer)
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and (
                not self._drain(peer) or ended
            ):
                self._lose(peer)

    def _drain(self, peer: int) -> bool:
        """Move everything `peer` has sent into the inbox; False once it has hung up."""
        resets = 0
        while True:
            try:
                record, ancillary, _, _ = self._sockets[peer].recvmsg(
                    _RECORD_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return True
            except ConnectionError:
                # said once when the peer closed with records of ours unread; what it sent before is
                # still in the queue
                resets += 1
                if resets > 1:
                    return False
                continue
            if not record:
                return False
            fd = None
            for level, what, data in ancillary:
                if level == socket.SOL_SOCKET and what == socket.SCM_RIGHTS:
                    fd = int.from_bytes(data[:4], sys.byteorder)
            kind, generation, a, b, c, d = _HEADER.unpack_from(record)
            tail = record[_HEADER.size :]
            self._inbox.append(Message(peer, _KINDS[kind], generation, a, b, c, d, tail, fd))

    def _lose(self, peer: int) -> None:
        if peer not in self.lost:
            self.lost.add(peer)
            self._poll.unregister(self._sockets[peer])
            if peer in self._processes:
                self._poll.unregister(self._processes[peer])

    def wake(self) -> None:
        """End a `receive` under way (any thread)."""
        with self._wake_lock:
            if self.wake_fd >= 0:
                os.eventfd_write(self.wake_fd, 1)

    def require(self, peers: Sequence[int], what: str) -> None:
        """Raise PeerLostError when one of `peers` has ended."""
        lost = sorted(self.lost.intersection(peers))
        if lost:
            raise PeerLostError(
                f"{what}: rank(s) {[self.members[peer] for peer in lost]} ended without finishing;"
                " see their output for the first error"
            )

    def close(self) -> None:
        """Hang up. Idempotent."""
        for message in self._inbox:
            if message.fd is not None:
                os.close(message.fd)
        self._inbox.clear()
        for sock in self._sockets.values():
            sock.close()
        self._processes.clear()
        self.lost.update(self._sockets)
        self._poll.close()
        with self._wake_lock:
            self.wake_fd = -1
            self._close_descriptors()


class Dispatcher:
    """The records of one rank's near peers."""

    def __init__(self, rank: int, links: Links, peers: Sequence[int]) -> None:
        self.rank = rank
        self.links = links
        self.peers = tuple(peers)
        self._abandons = dict.fromkeys(peers, 0)  # rank -> generation it has entered
        self._handlers: dict[MessageKind, Callable[[Message], None]] = {
            MessageKind.EXCHANGE: self._take_payload,
            MessageKind.REFUSED: self._take_refusal,
        }
        # of this generation:
        # exchange -> rank -> (whole size, so far)
        self._payloads: dict[int, dict[int, tuple[int, bytearray]]] = {}
        # how many exchanges a peer had ended when it gave up what we may be waiting for, and why
        self._refusal: tuple[int, str] | None = None
        self._num_exchanges = self._num_ended = 0  # begun and ended here
        self._call = ""  # of the last exchange

    def on(self, handlers: Mapping[MessageKind, Callable[[Message], None]]) -> None:
        """Have records of these kinds handled so, in the order in which they arrive."""
        self._handlers |= handlers

    def send(
        self,
        kind: MessageKind,
        *numbers: int,
        to: Sequence[int] | None = None,
        tail: bytes = b"",
        fd: int | None = None,
    ) -> None:
        """Send one record to `to` (default: all peers)."""
        for peer in self.peers if to is None else to:
            self.links.send(peer, kind, *numbers, tail=tail, fd=fd)

    def collect(self, timeout_s: float, beside: Sequence[int] = ()) -> bool:
        """Take note of what has arrived, waiting up to `timeout_s` for a first record, or for the
        descriptors `beside`; return whether there was a record.
        """
        messages = self.links.receive(timeout_s, beside)
        for message in messages:
            if message.kind is MessageKind.ABANDON:
                self._abandons[message.peer] = message.generation
                if message.a and message.generation == self.links.generation:
                    self.send(MessageKind.ABANDON, to=[message.peer])
            elif (
                message.generation == self.links.generation or message.kind in _OF_EVERY_GENERATION
            ):
                self._handlers[message.kind](message)
            else:
                assert message.generation < self.links.generation, (message, self.links.generation)
        return bool(messages)

    def _take_payload(self, message: Message) -> None:
        arrived = self._payloads.setdefault(message.a, {})
        _, so_far = arrived.setdefault(message.peer, (message.b, bytearray()))
        so_far.extend(message.tail)

    def _take_refusal(self, message: Message) -> None:
        self._refusal = message.a, message.tail.decode()

    def send_payload(self, payload: bytes) -> int:
        """Send `payload`, framed with its call, to all peers; return the number under which
        theirs arrive.
        """
        sequence = self._num_exchanges
        self._num_exchanges += 1
        self._call = _call_of(payload)
        for start in range(0, max(len(payload), 1), MAX_TAIL):
            self.send(
                MessageKind.EXCHANGE, sequence, len(payload), tail=payload[start : start + MAX_TAIL]
            )
        return sequence

    def payloads_missing(self, sequence: int) -> set[int]:
        """Return the peers that have not sent their whole payload of that exchange."""
        arrived = self._payloads.get(sequence, {})
        return {
            peer
            for peer in self.peers
            if peer not in arrived or len(arrived[peer][1]) < arrived[peer][0]
        }

    def take_payloads(self, sequence: int) -> dict[int, bytes]:
        """Return the peers' payloads of a finished exchange."""
        self._num_ended = self._num_exchanges
        return {
            peer: bytes(so_far) for peer, (_, so_far) in self._payloads.pop(sequence, {}).items()
        }

    def require_same_generation(self, peers: Sequence[int], what: str) -> None:
        """Raise StateError when one of `peers` has given up what we wait for."""
        if ahead := self.ahead().intersection(peers):
            raise given_up([self.links.members[peer] for peer in sorted(ahead)], what)

    def require_same_call(self, awaited: Sequence[int], call: str) -> None:
        """Raise PlanMismatch where a peer is in our exchange with another call, or one of the
        ranks `awaited` in an exchange that we have not begun.
        """
        last, members = self._num_exchanges - 1, self.links.members
        if self._refusal is not None:
            passed, reason = self._refusal
            # else all payloads of our exchange are on their way: the next call fails
            if not self._num_ended <= last < passed:
                self._refusal = None
                # a rank that hears from us before it hears from the first must know why we give up
                self._refuse(reason)
        for sequence, arrived in self._payloads.items():
            if sequence < last:  # was refused
                continue
            calls = {peer: _call_of(frame) for peer, (_, frame) in arrived.items()}
            # their wait ends only when we come to this exchange, ours only when they go on
            ahead = sequence > last
            others = {
                members[peer]: other
                for peer, other in calls.items()
                if (peer in awaited if ahead else other != self._call)
            }
            if others:
                error = _different_calls({members[self.rank]: call, **others})
                if ahead:  # else the peers find it out by themselves
                    self._refuse(str(error))
                self._num_ended = self._num_exchanges
                raise error

    def _refuse(self, reason: str) -> NoReturn:
        """Send every peer that ranks wait for each other in different calls, and raise it."""
        self.send(MessageKind.REFUSED, self._num_ended, tail=reason.encode()[:MAX_TAIL])
        self._num_ended = self._num_exchanges
        raise PlanMismatch(reason)

    def ahead(self) -> set[int]:
        """Return the peers that have given up this generation, and read nothing of it."""
        return {
            peer
            for peer, generation in self._abandons.items()
            if generation > self.links.generation
        }

    def behind(self) -> set[int]:
        """Return the peers that have not entered this generation."""
        return {
            peer
            for peer, generation in self._abandons.items()
            if generation < self.links.generation
        }

    def reset(self) -> None:
        """Enter the next generation: records sent before it no longer count."""
        self.links.generation += 1
        self._payloads, self._refusal = {}, None
        self._num_exchanges = self._num_ended = 0

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.links.close()


def given_up(ranks: Sequence[int], what: str) -> StateError:
    """Return the error of a rank that waits for `what` while others wait in ``engine.reset()``."""
    return StateError(
        f"{what}: rank(s) {list(ranks)} gave up this step after an exception and wait in"
        " engine.reset(): call it here too"
    )


def framed(call: str, payload: bytes) -> bytes:
    """Return `payload` with the name of its call in front."""
    name = call.encode()  # it may have a parameter's path in it, which has any length
    return _LENGTH.pack(len(name)) + name + payload


def unframed(frames: Sequence[bytes], members: Sequence[int]) -> list[bytes]:
    """Return the payloads of all ranks. Raises PlanMismatch where they are of different calls;
    `members` are the ranks' numbers.
    """
    calls = [_call_of(frame) for frame in frames]
    if len(set(calls)) > 1:
        raise _different_calls(dict(zip(members, calls, strict=True)))
    return [frame[_LENGTH.size + _LENGTH.unpack_from(frame)[0] :] for frame in frames]


def _call_of(frame: bytes | bytearray) -> str:
    """Return the name of the call in the first bytes of a frame."""
    (length,) = _LENGTH.unpack_from(frame)
    return bytes(frame[_LENGTH.size : _LENGTH.size + length]).decode()


def _different_calls(calls: Mapping[int, str]) -> PlanMismatch:
    """Return the error for ranks that wait for each other in different `calls`, by rank."""
    said = ", ".join(f"rank {rank} is in {call}" for rank, call in sorted(calls.items()))
    return PlanMismatch(
        f"the ranks wait for each other in different calls: {said}. Every rank has to make the same"
        " calls in the same order: make this one on all ranks, not under a condition that holds on"
        " some of them"
    )


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid
