"""The transport of CPU ranks: near peers share memory with us, far peers exchange messages (gloo); every pair of ranks is one or the other.

"shared_memory" is the case without far peers, "gloo" the one without near peers, "mixed" has both; there is one implementation. A gather
copies (or aliases) near slices and receives far ones (``windows.py``). A reduce announces our slot to near peers, sends slices to far
peers, and sums our slice of everybody's part in the canonical order once it is complete (``parts.py``, ``ordered.py``).

Invariant: every blocking call serves the near peers while it waits, so ranks may run units in different order. One-sided without far
peers: a gather needs nothing from the peers' programs but that they have published. With far peers the n-th operation of a key meets the
n-th.

Cost per rank, N equal shares, buffer of B bytes: a gather and a reduce bring ``B (N-1)/N`` each; of that, near gathers of aliased windows
move nothing. One control record per near peer and operation, one message per far peer. Calls are for one thread at a time.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zeroshard.comm.gloo_peers import LOOSE_GATHER, REDUCE_SCATTER, GlooPeers, Transfer
from zeroshard.comm.links import Kind, Links
from zeroshard.comm.mailroom import Mailroom
from zeroshard.comm.parts import Contribution, Meetings, Pending, sum_parts
from zeroshard.comm.pool import TensorPool
from zeroshard.comm.rendezvous import Neighbours
from zeroshard.comm.slots import FAR, SlotPool
from zeroshard.comm.transport import GradBuffer, Traffic, Work
from zeroshard.comm.windows import GatherWork, PairedWindow, make_window
from zeroshard.core.layout import Range
from zeroshard.errors import PlanMismatch

__all__ = ["PairedTransport"]

_BROADCAST_BYTES = 16 << 20
_SPILL_AFTER_S = 0.1  # how long a full pool waits for far peers, which cannot say whether they are slow or need another unit first


class PairedTransport:
    """A Transport over shared memory, gloo messages, or both. `connections` are gloo's (``gloo_peers.connect``) where a peer is far."""

    def __init__(
        self,
        rank: int,
        size: int,
        neighbours: Neighbours,
        *,
        connections: Any,
        node_size: int | None = None,
        stall_timeout_s: float = 300.0,
        pool_bytes: int | None = None,
        alias: bool = True,
    ) -> None:
        self.rank = rank
        self.size = size
        self.near = [rank for rank in neighbours.group_of(self.rank) if rank != self.rank]
        self.far = [rank for rank in range(self.size) if rank not in neighbours.group_of(self.rank)]
        self.name = _name(neighbours.groups)
        self.one_sided = self.name == "shared_memory"
        self.traffic = Traffic()
        self.stall_timeout_s = stall_timeout_s
        self.alias = alias
        self.windows: dict[int, PairedWindow] = {}
        self._num_windows = 0
        self._num_writes = 0
        self._node_size = node_size
        self._meetings = Meetings()
        self._slots = SlotPool(self._announce_slot if self.near else None, self._withdraw_slot, pool_bytes)
        links = Links(neighbours.sockets, stall_timeout_s=stall_timeout_s)
        self.mail = Mailroom(links, self.near, self._meetings, lambda slot, peer: self._slots.release(slot, peer))
        self.messages = GlooPeers(connections, rank, wake=links.wake, wait=self._wait_transfer)
        self._far_pool = TensorPool(pool_bytes)
        self._gathers: list[GatherWork] = []
        self._arriving: list[tuple[Transfer, Callable[[], None]]] = []  # far parts of reduces, and what to do when they are here

    # ------------------------------------------------------------------------------------------------ windows

    def window(self, key: str, ranges: Sequence[Range], dtype: torch.dtype, device: torch.device, *, replicated: bool) -> PairedWindow:
        assert len(ranges) == self.size, (key, ranges, self.size)
        self._compare(f"{key} {list(ranges)} {dtype} {'replicated' if replicated else 'sharded'}", f"window {key}")
        self.messages.register(key)
        serial = self._num_windows
        self._num_windows += 1
        window = make_window(self, key, serial, tuple(ranges), dtype, device, replicated)
        self.windows[serial] = window
        return window

    def _compare(self, text: str, what: str) -> None:
        digests = self.exchange_quietly(hashlib.blake2b(text.encode(), digest_size=8).digest())
        differ = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differ:
            raise PlanMismatch(f"{what}: rank(s) {differ} ask for another key, cut, dtype or placement than rank 0; here it is {text}")

    def started(self, work: GatherWork) -> None:
        """Take a gather under way into care."""
        self._gathers.append(work)
        self.progress()

    def begin_write(self) -> None:
        for work in list(self._gathers):
            work.wait()
        self._num_writes += 1
        self.mail.tell(Kind.READ, self._num_writes)

        def missing() -> set[int]:
            return {peer for peer in self.near if self.mail.counts.reads.get(peer, 0) < self._num_writes}

        self.wait_until(lambda: not missing(), "waiting for all ranks to finish reading", near=missing)

    # ------------------------------------------------------------------------------------------------ reduces

    def grad_buffer(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> GradBuffer:
        buffer = self._slots.take(numel, dtype, device)
        if buffer is not None:
            return buffer
        begin = time.monotonic()
        found: list[GradBuffer] = []

        def free() -> bool:
            readers = self._slots.readers()
            spill = not readers or (FAR in readers and time.monotonic() - begin > _SPILL_AFTER_S)
            taken = self._slots.take(numel, dtype, device, spill=spill)
            found.extend([] if taken is None else [taken])
            return bool(found)

        told: set[int] = set()

        def idle() -> None:
            """Ask for relief once, and relieve ourselves once the peers have ([Note: relief])."""
            stuck_on = self._slots.readers() - {FAR, self.rank}
            self.mail.tell(Kind.STUCK, to=sorted(stuck_on - told))
            told.update(stuck_on)
            if any(slot.readers == {self.rank} for slot in self._slots.slots.values()):
                self._meetings.relieve(self.rank)

        self.wait_until(free, f"a gradient buffer for {key}", near=lambda: self._slots.readers() - {FAR, self.rank}, idle=idle)
        return found[0]

    def return_buffer(self, buffer: GradBuffer) -> None:
        self._slots.give_back(buffer)

    def reduce(
        self,
        key: str,
        buffer: GradBuffer | None,
        ranges: Sequence[Range],
        out: torch.Tensor,
        *,
        wire_dtype: torch.dtype,
        accumulate: bool,
    ) -> Work:
        assert buffer is None or buffer.data.dtype == wire_dtype, (key, wire_dtype)
        start, stop = ranges[self.rank]
        assert out.numel() == stop - start, (key, out.numel(), ranges[self.rank])
        what, name = f"reduce of {key}", f"reduce {key}"
        sequence = self._meetings.next_sequence(name)
        readers = self._tell_near(name, sequence, buffer, {peer: ranges[peer] for peer in self.near}, wire_dtype)
        own_bytes = (stop - start) * wire_dtype.itemsize
        if own_bytes:
            own = Contribution(None) if buffer is None else self._own_part(buffer, start, stop)
            self._meetings.contribute(name, sequence, self.rank, own)
            readers.add(self.rank)
        loans = {peer: self._far_pool.take(stop - start, wire_dtype, out.device) for peer in self.far} if own_bytes else {}
        if self.far:
            zeros = None if buffer is not None else torch.zeros(max(b - a for a, b in ranges), dtype=wire_dtype)
            sends = {peer: _slice(buffer, zeros, ranges[peer]) for peer in self.far}
            readers.add(FAR)
            transfer = self.messages.post(what, self.messages.tag(key, REDUCE_SCATTER), sends, loans)
            self._arriving.append((transfer, lambda: self._far_parts_came(name, sequence, loans, buffer)))
        if buffer is not None:
            self._slots.hand_over(buffer, readers)

        def consume(parts: dict[int, Contribution]) -> None:
            if own_bytes:
                sum_parts(parts, out, what, size=self.size, node_size=self._node_size, wire_dtype=wire_dtype, accumulate=accumulate)
            for tensor in loans.values():
                self._far_pool.give(tensor)
            near_bytes = sum(own_bytes for part in parts.values() if part.near and part.data is not None)
            self._count("reduce_scatter", near_bytes, own_bytes * len(loans))

        return self._begin(name, what, sequence, range(self.size) if own_bytes else (), consume)

    def all_gather(self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor) -> Work:
        own = out[slice(*ranges[self.rank])]
        assert local.numel() == own.numel(), (key, local.numel(), ranges[self.rank])
        what, name = f"gather of {key}", f"gather {key}"
        sequence = self._meetings.next_sequence(name)
        if own.numel() and own.data_ptr() != local.data_ptr():
            own.copy_(local)
        if local.numel() and self.near:
            buffer = self.grad_buffer(key, local.numel(), local.dtype, torch.device("cpu"))
            buffer.data.copy_(local)
            readers = self._tell_near(name, sequence, buffer, dict.fromkeys(self.near, (0, local.numel())), local.dtype)
            self._slots.hand_over(buffer, readers)
        contributors = {rank for rank in self.near if ranges[rank][1] > ranges[rank][0]}
        receives = {peer: out[slice(*ranges[peer])] for peer in self.far}
        if self.far:
            transfer = self.messages.post(what, self.messages.tag(key, LOOSE_GATHER), dict.fromkeys(self.far, local), receives)
            self._arriving.append((transfer, lambda: self._meetings.contribute(name, sequence, FAR, Contribution(None))))
            contributors.add(FAR)

        def consume(parts: dict[int, Contribution]) -> None:
            num_bytes = 0
            for rank in contributors - {FAR}:
                target = out[slice(*ranges[rank])]
                data = parts[rank].checked(target.numel() * target.element_size(), what, rank)
                assert data is not None, (what, rank)
                target.copy_(data.view(target.dtype))
                num_bytes += data.numel()
            self._count("all_gather", num_bytes, sum(t.numel() * t.element_size() for t in receives.values()))

        return self._begin(name, what, sequence, contributors, consume)

    def _begin(
        self, name: str, what: str, sequence: int, contributors: Iterable[int], consume: Callable[[dict[int, Contribution]], None]
    ) -> Work:
        transfer = self._arriving[-1][0] if self.far else None
        pending = self._meetings.begin(name, sequence, contributors, consume)
        self.progress()
        return PartsWork(self, pending, name, sequence, what, transfer)

    def _tell_near(self, name: str, sequence: int, buffer: GradBuffer | None, shares: dict[int, Range], dtype: torch.dtype) -> set[int]:
        """Announce our part to the near peers whose share of it is not empty; return those that will read our slot."""
        readers = set()
        for peer, share in shares.items():
            start, stop = (edge * dtype.itemsize for edge in share)
            if start == stop:
                continue
            if buffer is None:
                self.mail.links.send(peer, Kind.NONE, sequence, tail=name.encode())
            else:
                self.mail.links.send(peer, Kind.READY, sequence, buffer.slot, start, stop - start, tail=name.encode())
                readers.add(peer)
        return readers

    def _own_part(self, buffer: GradBuffer, start: int, stop: int) -> Contribution:
        return Contribution(buffer.data[start:stop].view(torch.uint8), lambda: self._slots.release(buffer.slot, self.rank))

    def _far_parts_came(self, name: str, sequence: int, loans: dict[int, torch.Tensor], buffer: GradBuffer | None) -> None:
        for peer, tensor in loans.items():
            self._meetings.contribute(name, sequence, peer, Contribution(tensor.view(torch.uint8)))
        if buffer is not None:
            self._slots.release(buffer.slot, FAR)

    def _count(self, operation: str, near_bytes: int, far_bytes: int) -> None:
        if self.near:
            self.traffic.add(operation, "shared_memory", near_bytes)
        if self.far:
            self.traffic.add(operation, "gloo", far_bytes)
        if self.size == 1:
            self.traffic.add(operation, "local", 0)

    def missing_parts(self, name: str, sequence: int) -> set[int]:
        """Return the near peers whose part of an operation of ours has not come."""
        return self._meetings.missing(name, sequence).intersection(self.near)

    def _announce_slot(self, number: int, num_bytes: int, fd: int) -> None:
        self.mail.tell(Kind.SLOT, number, num_bytes, fd=fd)

    def _withdraw_slot(self, number: int) -> None:
        self.mail.tell(Kind.DROP, number)

    # ------------------------------------------------------------------------------------------------ waiting

    def progress(self) -> None:
        self.mail.collect(0.0)
        self._gathers = [work for work in self._gathers if not work.advance()]
        landed = [entry for entry in self._arriving if entry[0].done()]
        for entry in landed:
            entry[0].land()
            self._arriving.remove(entry)
            entry[1]()
        while self._meetings.finish_ripe():
            self.mail.collect(0.0)

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        *,
        near: Callable[[], set[int]] = set,
        far: Callable[[], set[int]] = set,
        idle: Callable[[], None] | None = None,
    ) -> None:
        """Serve the peers until `ready()`; see Mailroom.wait_until."""
        self.mail.wait_until(ready, what, progress=self.progress, near=near, far=far, idle=idle, stall_timeout_s=self.stall_timeout_s)

    def _wait_transfer(self, transfer: Transfer) -> None:
        self.wait_until(transfer.done, transfer.what, far=transfer.awaited)
        transfer.land()

    # ------------------------------------------------------------------------------------------------ small things

    def exchange(self, payload: bytes) -> list[bytes]:
        parts = self.exchange_quietly(payload)
        for ranks, link in ((self.near, "shared_memory"), (self.far, "gloo")):
            if ranks:
                self.traffic.add("exchange", link, sum(len(parts[rank]) for rank in ranks))
        return parts

    def exchange_quietly(self, payload: bytes) -> list[bytes]:
        """Exchange what is not the engine's payload, and so is not counted."""
        sequence = self.mail.send_payload(payload)
        parts = {self.rank: payload}
        if self.far:
            parts |= self.messages.exchange(payload, self.far)

        def missing() -> set[int]:
            return self.mail.payloads_missing(sequence)

        self.wait_until(lambda: not missing(), "exchange", near=missing)
        parts |= self.mail.take_payloads(sequence)
        return [parts[rank] for rank in range(self.size)]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        tensor = tensor.detach()
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        if self.rank == source or source in self.near:
            data = flat.view(-1).view(torch.uint8)
            for start in range(0, data.numel() if self.near else 0, _BROADCAST_BYTES):
                self._broadcast_near(data[start : start + _BROADCAST_BYTES], source)
        if self.far and (self.rank == source or source in self.far):
            self.messages.broadcast(flat, source, self.far)
        if self.rank != source:
            self.traffic.add("broadcast", "gloo" if source in self.far else "shared_memory", flat.numel() * flat.element_size())
            if flat is not tensor:
                tensor.copy_(flat)

    def _broadcast_near(self, part: torch.Tensor, source: int) -> None:
        """Pass one piece of a broadcast through a slot of the source's."""
        if self.rank == source:
            buffer = self.grad_buffer("broadcast", part.numel(), torch.uint8, torch.device("cpu"))
            buffer.data.copy_(part)
            self._slots.hand_over(buffer, set(self.near))
            self.mail.tell(Kind.BROADCAST, buffer.slot, part.numel())
            return
        queue = self.mail.counts.broadcasts.setdefault(source, deque())
        self.wait_until(lambda: bool(queue), f"broadcast from rank {source}", near=lambda: {source})
        slot, num_bytes = queue.popleft()
        if num_bytes != part.numel():
            raise PlanMismatch(f"broadcast: rank {source} sends {num_bytes} bytes where {part.numel()} are expected")
        part.copy_(self.mail.slot_of(source, slot)[:num_bytes])
        self.mail.tell(Kind.ACK, slot, to=[source])

    def abandon(self) -> None:
        transfers = [work.transfer for work in self._gathers if work.transfer is not None]
        self.messages.abandon([*transfers, *(transfer for transfer, _ in self._arriving)])
        self._gathers, self._arriving, self._num_writes = [], [], 0
        self._meetings.forget()
        self.mail.forget()
        for window in self.windows.values():
            window.epoch = 0
        generation = self.mail.links.generation
        self.mail.tell(Kind.ABANDON)

        def missing() -> set[int]:
            return {peer for peer in self.near if self.mail.abandons[peer] < generation}

        self.wait_until(lambda: not missing(), "meeting the other ranks after an error", near=missing)
        if self.far:
            self.messages.exchange(b"", self.far)
        self._slots.forget()

    def close(self) -> None:
        self.messages.close()
        self.mail.close()
        self._far_pool.clear()
        self._slots.slots.clear()
        self.windows.clear()
        self._gathers, self._arriving = [], []


class PartsWork:
    """An operation under way that needs a part of every rank."""

    def __init__(
        self, transport: PairedTransport, pending: Pending, name: str, sequence: int, what: str, transfer: Transfer | None
    ) -> None:
        self._transport = transport
        self._pending = pending
        self._name = name
        self._sequence = sequence
        self._what = what
        self._transfer = transfer

    def wait(self) -> None:
        if not self._pending.done:
            self._transport.wait_until(
                lambda: self._pending.done,
                f"{self._what} (number {self._sequence})",
                near=lambda: self._transport.missing_parts(self._name, self._sequence),
                far=lambda: set() if self._transfer is None else self._transfer.awaited(),
            )

    def done(self) -> bool:
        if not self._pending.done:
            self._transport.progress()
        return self._pending.done


def _slice(buffer: GradBuffer | None, zeros: torch.Tensor | None, share: Range) -> torch.Tensor:
    if buffer is not None:
        return buffer.data[slice(*share)]
    assert zeros is not None
    return zeros[: share[1] - share[0]]


def _name(groups: list[list[int]]) -> str:
    """Return the transport's name, the same on every rank."""
    if len(groups) == 1:
        return "shared_memory"
    return "gloo" if all(len(group) == 1 for group in groups) else "mixed"
