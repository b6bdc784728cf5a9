"""What the peers on this host have said: records become state here, and here a rank waits.

Invariant: handling a record never blocks, never sums and never copies bulk data, so it may happen
inside any call. A record of an older generation (sent before an `abandon`) is dropped, but for
those that say which memory exists. Cost: none beyond ``links.py``.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch

from zeroshard.comm import memfd
from zeroshard.comm.calls import call_of, different_calls
from zeroshard.comm.links import MAX_TAIL, Kind, Links, Message
from zeroshard.comm.matching import Matching, Part
from zeroshard.errors import PlanMismatch, StallError, StateError

__all__ = ["IDLE_S", "Dispatcher", "WindowMemory", "given_up"]

# a rank that waits for a slot and hears nothing for so long is stuck ([Note: relief])
IDLE_S = 0.0002
_POLL_S = 0.002  # how often to look after what cannot wake us
_PATIENT_S = 0.1
_LISTEN_AFTER_S = 1.0  # when a wait begins to ask whether it can ever end


@dataclass
class WindowMemory:
    """A peer's memory for a window, or why there is none."""

    fd: int | None
    num_bytes: int
    reason: str


@dataclass
class Counts:
    """What is forgotten with each generation."""

    # (window serial, rank) -> times published
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)  # rank -> begin_writes
    # exchange -> rank -> (whole size, so far)
    payloads: dict[int, dict[int, tuple[int, bytearray]]] = field(default_factory=dict)
    # how many exchanges a peer had ended when it gave up what we may be waiting for, and why
    refusal: tuple[int, str] | None = None
    # rank -> (slot, bytes), in order
    broadcasts: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)  # ranks to relieve when we are blocked


class Dispatcher:
    """The records of one rank's near peers."""

    def __init__(
        self,
        rank: int,
        links: Links,
        peers: Sequence[int],
        matching: Matching,
        on_ack: Callable[[int, int], None],
    ) -> None:
        self.rank = rank
        self.links = links
        self.peers = tuple(peers)
        self.counts = Counts()
        self.abandons: dict[int, int] = dict.fromkeys(peers, 0)  # rank -> generation it has entered
        self.memory: dict[tuple[int, int], WindowMemory] = {}  # (window serial, rank)
        self._matching = matching
        self._on_ack = on_ack  # (slot, rank)
        # (rank, slot) -> its memory, mapped here
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._num_exchanges = self._num_ended = 0  # begun and ended here
        self._call = ""  # of the last exchange

    def send(
        self,
        kind: Kind,
        a: int = 0,
        b: int = 0,
        *,
        to: Sequence[int] | None = None,
        tail: bytes = b"",
        fd: int | None = None,
    ) -> None:
        """Send one record to `to` (default: all peers)."""
        for peer in self.peers if to is None else to:
            self.links.send(peer, kind, a, b, tail=tail, fd=fd)

    def collect(self, timeout_s: float) -> bool:
        """Take note of what has arrived, waiting up to `timeout_s` for a first record; return
        whether there was one.
        """
        messages = self.links.receive(timeout_s)
        for message in messages:
            self._handle(message)
        return bool(messages)

    def _handle(self, message: Message) -> None:
        peer, kind = message.peer, message.kind
        if kind is Kind.SLOT:
            assert message.fd is not None, message
            self._slots[peer, message.a] = memfd.map_bytes(message.fd, message.b)
            os.close(message.fd)
        elif kind is Kind.DROP:
            self._slots.pop((peer, message.a), None)
        elif kind is Kind.WINDOW:
            self.memory[message.a, peer] = WindowMemory(
                message.fd, message.b, message.tail.decode()
            )
        elif kind is Kind.ABANDON:
            self.abandons[peer] = message.generation
        elif message.generation == self.links.generation:
            self._handle_current(message)
        else:
            assert message.generation < self.links.generation, (message, self.links.generation)

    def _handle_current(self, message: Message) -> None:
        peer, kind, counts = message.peer, message.kind, self.counts
        if kind is Kind.READY:
            data = self._slots[peer, message.b][message.c : message.c + message.d]
            part = Part(data, partial(self.links.send, peer, Kind.ACK, message.b), near=True)
            self._matching.contribute(message.tail.decode(), message.a, peer, part)
        elif kind is Kind.NONE:
            self._matching.contribute(message.tail.decode(), message.a, peer, Part(None))
        elif kind is Kind.ACK:
            self._on_ack(message.a, peer)
        elif kind is Kind.PUBLISHED:
            counts.epochs[message.a, peer] = message.b
        elif kind is Kind.READ:
            counts.reads[peer] = message.a
        elif kind is Kind.EXCHANGE:
            _, so_far = counts.payloads.setdefault(message.a, {}).setdefault(
                peer, (message.b, bytearray())
            )
            so_far.extend(message.tail)
        elif kind is Kind.REFUSED:
            counts.refusal = message.a, message.tail.decode()
        elif kind is Kind.STUCK:
            counts.stuck.add(peer)
        elif kind is Kind.BROADCAST:
            counts.broadcasts.setdefault(peer, deque()).append((message.a, message.b))

    def slot_of(self, peer: int, number: int) -> torch.Tensor:
        """Return the memory of a peer's slot."""
        return self._slots[peer, number]

    def send_payload(self, payload: bytes) -> int:
        """Send `payload`, framed with its call, to all peers; return the number under which
        theirs arrive.
        """
        sequence = self._num_exchanges
        self._num_exchanges += 1
        self._call = call_of(payload)
        for start in range(0, max(len(payload), 1), MAX_TAIL):
            self.send(Kind.EXCHANGE, sequence, len(payload), tail=payload[start : start + MAX_TAIL])
        return sequence

    def payloads_missing(self, sequence: int) -> set[int]:
        """Return the peers whose payload of that exchange is not here in full."""
        arrived = self.counts.payloads.get(sequence, {})
        return {
            peer
            for peer in self.peers
            if peer not in arrived or len(arrived[peer][1]) < arrived[peer][0]
        }

    def take_payloads(self, sequence: int) -> dict[int, bytes]:
        """Return the peers' payloads of a finished exchange."""
        self._num_ended = self._num_exchanges
        return {
            peer: bytes(so_far)
            for peer, (_, so_far) in self.counts.payloads.pop(sequence, {}).items()
        }

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        *,
        progress: Callable[[], None],
        near: Callable[[], set[int]],
        far: Callable[[], set[int]] = set,
        idle: Callable[[], None] | None = None,
        stall_timeout_s: float,
        patient: bool = True,
        call: str | None = None,
        listen: Callable[[], None] | None = None,
    ) -> None:
        """Return when `ready()`; until then call `progress`, serve the peers and relieve those
        that are stuck.

        `near` and `far` name the ranks awaited; `far` may be slow and is asked only for the error.
        `idle` is called when nothing was heard for `IDLE_S`; not `patient`: look again every 2 ms,
        since `progress` serves others than those who can wake us. `call` names this wait where
        nothing but a call of the near ranks' programs can end it; `listen`, called from the first
        second on, may raise. Raises StallError, PeerLostError, PlanMismatch where an awaited rank
        waits for us in another call, and StateError where one has abandoned this generation.
        """
        deadline = time.monotonic() + stall_timeout_s
        patience_s = IDLE_S
        while True:
            progress()
            if ready():
                return
            awaited = sorted(near())
            if call is not None:
                self._require_same_call(awaited, call)
            self.links.require(awaited, what)
            self._require_same_generation(awaited, what)
            now = time.monotonic()
            if now > deadline:
                names = [self.links.members[rank] for rank in sorted(near() | far())]
                raise StallError(
                    f"{what}: rank(s) {names} did not come within {stall_timeout_s:g} s; see what"
                    " they are doing, or raise stall_timeout_s if they are only slow"
                )
            if listen is not None and now > deadline - stall_timeout_s + _LISTEN_AFTER_S:
                listen()
            self.relieve_stuck()
            if self.collect(min(patience_s, deadline - now + 0.001)):
                patience_s = IDLE_S
            elif time.monotonic() - now >= IDLE_S:
                patience_s = _PATIENT_S if patient else _POLL_S
                if idle is not None:
                    idle()

    def relieve_stuck(self) -> None:
        """Copy out what lies in the slots of ranks that are stuck ([Note: relief]); we are
        blocked.
        """
        while self.counts.stuck:
            self._matching.relieve(self.counts.stuck.pop())

    def _require_same_generation(self, peers: Sequence[int], what: str) -> None:
        """Raise StateError when one of `peers` has forgotten what we wait for."""
        ahead = [
            self.links.members[peer]
            for peer in peers
            if self.abandons[peer] > self.links.generation
        ]
        if ahead:
            raise given_up(ahead, what)

    def _require_same_call(self, awaited: Sequence[int], call: str) -> None:
        """Raise PlanMismatch where a peer is in our exchange with another call, or one of the
        ranks `awaited` in an exchange that we have not begun.
        """
        last, members = self._num_exchanges - 1, self.links.members
        if self.counts.refusal is not None:
            passed, reason = self.counts.refusal
            # else all payloads of our exchange are on their way: the next call fails
            if not self._num_ended <= last < passed:
                self.counts.refusal = None
                # a rank that hears from us before it hears from the first must know why we give up
                self._refuse(reason)
        for sequence, arrived in self.counts.payloads.items():
            if sequence < last:  # was refused
                continue
            calls = {peer: call_of(frame) for peer, (_, frame) in arrived.items()}
            # their wait ends only when we come to this exchange, ours only when they go on
            ahead = sequence > last
            others = {
                members[peer]: other
                for peer, other in calls.items()
                if (peer in awaited if ahead else other != self._call)
            }
            if others:
                error = different_calls({members[self.rank]: call, **others})
                if ahead:  # else the peers find it out by themselves
                    self._refuse(str(error))
                self._num_ended = self._num_exchanges
                raise error

    def _refuse(self, reason: str) -> NoReturn:
        """Tell every peer that ranks wait for each other in different calls, and raise it."""
        self.send(Kind.REFUSED, self._num_ended, tail=reason.encode()[:MAX_TAIL])
        self._num_ended = self._num_exchanges
        raise PlanMismatch(reason)

    def forget(self) -> None:
        """Enter the next generation: whatever was said before it no longer counts."""
        self.links.generation += 1
        self.counts = Counts()
        self._num_exchanges = self._num_ended = 0

    def close(self) -> None:
        """Hang up and unmap. Idempotent."""
        self.links.close()
        self._slots.clear()
        for memory in self.memory.values():
            if memory.fd is not None:
                os.close(memory.fd)
        self.memory.clear()


def given_up(ranks: Sequence[int], what: str) -> StateError:
    """Return the error of a rank that waits for `what` while others wait in ``engine.reset()``."""
    return StateError(
        f"{what}: rank(s) {list(ranks)} gave up this step after an exception and wait in"
        " engine.reset(): call it here too"
    )
