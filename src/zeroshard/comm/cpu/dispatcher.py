"""The records of the peers on this host: each goes to who asked for its kind, exchanges and errors
become state here.

Every exchange says which call of the program it belongs to, so that two calls that differ never
take each other's payloads: the name of the call ("zs.save()") travels in front of the payload.
Ranks that meet under different names raise PlanMismatch at once, and so does a rank that waits for
one that waits for it in another call: neither would ever go on.

Invariant: handling a record never blocks, never sums and never copies bulk data, so it may happen
inside any call. A record of an older generation (sent before a `reset`) is dropped, but for those
that say which memory exists. Cost: beyond ``links.py`` the bytes of the name, some twenty, per
exchange and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from zeroshard.comm.cpu.links import MAX_TAIL, Links, Message, MessageKind
from zeroshard.errors import PlanMismatch, StateError

__all__ = ["Dispatcher", "framed", "given_up", "unframed"]

_OF_EVERY_GENERATION = (MessageKind.SLOT, MessageKind.DROP, MessageKind.WINDOW)


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

    def collect(self, timeout_s: float) -> bool:
        """Take note of what has arrived, waiting up to `timeout_s` for a first record; return
        whether there was one.
        """
        messages = self.links.receive(timeout_s)
        for message in messages:
            if message.kind is MessageKind.ABANDON:
                self._abandons[message.peer] = message.generation
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
        """Return the peers whose payload of that exchange is not here in full."""
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
        ahead = [
            self.links.members[peer]
            for peer in peers
            if self._abandons[peer] > self.links.generation
        ]
        if ahead:
            raise given_up(ahead, what)

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
    name = call.encode()
    assert len(name) < 256, call
    return bytes([len(name)]) + name + payload


def unframed(frames: Sequence[bytes], members: Sequence[int]) -> list[bytes]:
    """Return the payloads of all ranks. Raises PlanMismatch where they are of different calls;
    `members` are the ranks' numbers.
    """
    calls = [_call_of(frame) for frame in frames]
    if len(set(calls)) > 1:
        raise _different_calls(dict(zip(members, calls, strict=True)))
    return [frame[1 + frame[0] :] for frame in frames]


def _call_of(frame: bytes | bytearray) -> str:
    """Return the name of the call in the first bytes of a frame."""
    return bytes(frame[1 : 1 + frame[0]]).decode()


def _different_calls(calls: Mapping[int, str]) -> PlanMismatch:
    """Return the error for ranks that wait for each other in different `calls`, by rank."""
    said = ", ".join(f"rank {rank} is in {call}" for rank, call in sorted(calls.items()))
    return PlanMismatch(
        f"the ranks wait for each other in different calls: {said}. Every rank has to make the same"
        " calls in the same order: make this one on all ranks, not under a condition that holds on"
        " some of them"
    )
