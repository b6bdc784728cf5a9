"""Control messages between ranks of one host: a full mesh of Unix sockets that also carry
descriptors.

Bulk data lies in shared memory; who may read or write it is said by small records on these sockets.
So ordering comes from system calls, not from a memory model; waiting is poll(), not spinning; and a
peer that dies hangs up at once. The sockets have abstract names, known only to this job and gone
with their last descriptor.

A peer has ended when its socket hangs up or its process does (pidfd): a data loader's worker forked
off it may keep the socket open.

Invariant: records of one peer arrive whole and in the order they were sent. `send` never waits
without draining our own inbox, so two ranks whose buffers are full cannot wait for each other.

Cost: one system call per record, 33 bytes and a tail.
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
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from zeroshard.errors import PeerLostError, StallError

__all__ = ["MAX_TAIL", "Links", "Message", "MessageKind"]

MAX_TAIL = 32 * 1024
_HEADER = struct.Struct("<BIQQQQ")  # kind, generation, a, b, c, d
_ZEROS = (0, 0, 0, 0)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_RECORD_BYTES = _HEADER.size + MAX_TAIL


class MessageKind(IntEnum):
    """What a record says; (a, b, c, d, tail) in brackets."""

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
    ABANDON = 12  # we have left everything before this generation
    # we have given up, since the ranks are in different calls [exchanges ended before; text]
    REFUSED = 13


@dataclass(frozen=True)
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
        self._stall_timeout_s = stall_timeout_s
        self._sockets = sockets
        self._peer_of = {sock.fileno(): peer for peer, sock in sockets.items()}
        self._processes: dict[int, int] = {}  # peer -> pidfd
        self._inbox: deque[Message] = deque()
        self._poll = select.poll()
        self._poll.register(self.wake_fd, select.POLLIN)
        for peer, sock in sockets.items():
            sock.setblocking(False)
            self._poll.register(sock, select.POLLIN)
            process = _open_process(sock)
            if process is not None:
                self._processes[peer], self._peer_of[process] = process, peer
                self._poll.register(process, select.POLLIN)
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
                send_record(self._sockets[peer], record, fd)
                return
            except BlockingIOError:
                deadline = deadline or time.monotonic() + self._stall_timeout_s
                self._make_room(peer, kind, deadline)
            except (BrokenPipeError, ConnectionError):
                self._drain(peer)  # what it said before it ended still counts
                self._lose(peer)

    def _make_room(self, peer: int, kind: MessageKind, deadline: float) -> None:
        """Wait until `peer` reads, and read meanwhile what others send to us."""
        if time.monotonic() > deadline:
            raise StallError(
                f"rank {self.members[peer]} reads no messages ({kind.name}) since"
                f" {self._stall_timeout_s:g} s"
            )
        self._poll.modify(self._sockets[peer], select.POLLIN | select.POLLOUT)
        self._fill_inbox(0.1)
        if peer not in self.lost:
            self._poll.modify(self._sockets[peer], select.POLLIN)

    def receive(self, timeout_s: float) -> list[Message]:
        """Return what has arrived, waiting up to `timeout_s` for the first record, hang-up or
        wake-up.
        """
        self._fill_inbox(0.0 if self._inbox else timeout_s)
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def _fill_inbox(self, timeout_s: float) -> None:
        for number, events in self._poll.poll(timeout_s * 1000):
            if number == self.wake_fd:
                os.eventfd_read(self.wake_fd)
                continue
            peer = self._peer_of[number]
            ended = number == self._processes.get(peer)
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and (
                not self._drain(peer) or ended
            ):
                self._lose(peer)

    def _drain(self, peer: int) -> bool:
        """Move everything `peer` has sent into the inbox; False once it has hung up."""
        resets = 0
        while True:
            try:
                received = receive_record(self._sockets[peer])
            except BlockingIOError:
                return True
            except ConnectionError:
                # said once when the peer closed with records of ours unread; what it sent before is
                # still in the queue
                resets += 1
                if resets > 1:
                    return False
                continue
            if received is None:
                return False
            record, fd = received
            kind, generation, a, b, c, d = _HEADER.unpack_from(record)
            self._inbox.append(
                Message(peer, MessageKind(kind), generation, a, b, c, d, record[_HEADER.size :], fd)
            )

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
        self._poll = select.poll()
        with self._wake_lock:
            self.wake_fd = -1
            self._close_descriptors()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid


def _open_process(sock: socket.socket) -> int | None:
    """Return a descriptor that becomes readable when the peer's process ends; None where its pid
    is hidden from us.
    """
    try:
        return os.pidfd_open(peer_credentials(sock)[0])
    except (OSError, OverflowError):
        return None


def send_record(sock: socket.socket, record: bytes, fd: int | None) -> None:
    """Send one record, with a descriptor where `fd` is given."""
    if fd is None:
        sock.send(record, socket.MSG_NOSIGNAL)
    else:
        socket.send_fds(sock, [record], [fd], socket.MSG_NOSIGNAL)


def receive_record(sock: socket.socket) -> tuple[bytes, int | None] | None:
    """Return the next record and the descriptor that came with it; None at the end."""
    record, ancillary, _, _ = sock.recvmsg(
        _RECORD_BYTES, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
    )
    if not record:
        return None
    fds = [
        data
        for level, kind, data in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
    ]
    return record, int.from_bytes(fds[0][:4], sys.byteorder) if fds else None
