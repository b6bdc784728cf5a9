"""Reduces, and gathers of memory that is no window: operations that need a part of every rank.

A reduce submits our slot: READY tells near peers where their slice of it lies, ACK that they no
longer need it; far peers are sent theirs. Our own slice of everybody's part is summed in the
canonical order once it is complete (``slots.py``)::

    rank 0's slot |  s0  |  s1  |   READY(key, n, slot, range) -->   rank 1 adds s1 of every slot,
                                                                     in order, into `out`
    rank 1's slot |  s0  |  s1  |   <-- ACK(slot)                    with the last ACK the slot is
                                                                     idle again

Invariant: the n-th operation of a key meets the n-th of every rank. Cost per rank, N equal shares,
B bytes: ``B (N-1)/N`` read in place from near peers or received from far ones; one control record
per near peer each way, one message per far peer.

[Note: ahead] Relief lets a rank go on before the others have come. If it then blocks in a
collective of the program's own (tokens for experts, an all-reduce of the loss), it reads no slot
until they have come there, too, and they may need one before. So a rank takes memory beyond the
pool while all its readers are ahead of it, at most as much as they are ahead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from zeroshard.comm import memfd
from zeroshard.comm.cpu.control import PeerControl, PeerOperation, Plane
from zeroshard.comm.cpu.gloo_peers import LOOSE_GATHER, REDUCE_SCATTER, Transfer
from zeroshard.comm.cpu.links import Message, MessageKind
from zeroshard.comm.cpu.slots import (
    FAR,
    Contribution,
    Matching,
    Pending,
    PoolSlot,
    SlotPool,
    checked_parts,
)
from zeroshard.comm.ordered import sum_parts
from zeroshard.comm.transport import ReduceRequest, Work
from zeroshard.core.layout import Range
from zeroshard.memory import Pool

# how long a full pool waits for far peers, which cannot say whether they are slow or need another
# unit first, and for near ones that are ahead ([Note: ahead])
_SPILL_AFTER_S = 0.1
_BROADCAST_BYTES = 16 << 20


class Collectives(Plane):
    """The gradient pool of one rank and the operations under way."""

    def __init__(self, control: PeerControl, *, pool_bytes: int | None) -> None:
        self.matching = Matching()
        self.slots = SlotPool(
            self._send_slot if control.near else None, self._send_drop, pool_bytes
        )
        # far parts, and what to do when they are here
        self._arriving: list[tuple[Transfer, Callable[[], None]]] = []
        self._control = control
        self._rank = control.rank
        self._size = control.size
        self._node_size = control.mesh.node_size
        self._far_pool = Pool(pool_bytes)
        # (rank, slot) -> its memory, mapped here
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._stuck: set[int] = set()  # ranks to relieve when we are blocked
        control.messages.register("broadcast")
        control.dispatcher.on(
            {
                MessageKind.SLOT: self._take_slot,
                MessageKind.DROP: self._drop_slot,
                MessageKind.READY: self._take_part,
                MessageKind.NONE: self._take_part,
                MessageKind.ACK: lambda message: self.slots.release(message.a, message.peer),
                MessageKind.STUCK: lambda message: self._stuck.add(message.peer),
            }
        )
        control.attach(self)

    def _take_slot(self, message: Message) -> None:
        assert message.fd is not None, message
        self._mapped[message.peer, message.a] = memfd.map_bytes(message.fd, message.b)
        os.close(message.fd)

    def _drop_slot(self, message: Message) -> None:
        self._mapped.pop((message.peer, message.a), None)

    def _take_part(self, message: Message) -> None:
        peer, part = message.peer, Contribution(None)
        if message.kind is MessageKind.READY:
            data = self._mapped[peer, message.b][message.c : message.c + message.d]
            release = partial(self._control.dispatcher.links.send, peer, MessageKind.ACK, message.b)
            part = Contribution(data, release, near=True)
        self.matching.contribute(message.tail.decode(), message.a, peer, part)

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        buffer = self.slots.take(numel, dtype, device)
        if buffer is not None:
            return buffer
        begin = time.monotonic()
        found: list[torch.Tensor] = []

        def free() -> bool:
            # ranks in reset() read nothing any more, and this one may be at the end of their step
            for peer in self._control.dispatcher.ahead():
                self.slots.forget(peer)
            readers = self.slots.readers()
            is_late = time.monotonic() - begin > _SPILL_AFTER_S
            spill = not readers or (is_late and (FAR in readers or self._are_ahead(readers)))
            taken = self.slots.take(numel, dtype, device, spill=spill)
            found.extend([] if taken is None else [taken])
            return bool(found)

        asked: set[int] = set()

        def idle() -> None:
            """Ask for relief once, and relieve ourselves once the peers have ([Note: relief])."""
            stuck_on = self.slots.readers() - {FAR, self._rank}
            self._control.dispatcher.send(MessageKind.STUCK, to=sorted(stuck_on - asked))
            asked.update(stuck_on)
            if any(slot.readers == {self._rank} for slot in self.slots.slots.values()):
                self.matching.relieve(self._rank)

        self._control.wait_until(
            free,
            f"a gradient buffer for {key}",
            near=lambda: self.slots.readers() - {FAR, self._rank},
            idle=idle,
        )
        return found[0]

    def _are_ahead(self, readers: set[int]) -> bool:
        """Whether near ranks that read our slots have contributed to all that we have begun."""
        near = readers - {self._rank}
        return bool(near) and not near & self.matching.awaited()

    def reduce(
        self,
        request: ReduceRequest,
        buffer: torch.Tensor | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> Work:
        key, dtype, ranges = request.key, request.wire_dtype, request.wire_ranges
        slot = None if buffer is None else self._slot_of(buffer, dtype)
        assert out.numel() == request.numel_of(self._rank), (request, out.numel())
        start, stop = ranges[self._rank]
        what, name, far = f"reduce of {key}", f"reduce {key}", self._control.far
        sequence = self.matching.next_sequence(name)
        shares = {peer: ranges[peer] for peer in self._control.near}
        readers = self._send_near(name, sequence, slot, shares, dtype)
        own_bytes = (stop - start) * dtype.itemsize
        if own_bytes:
            own = self._own_part(buffer, slot, start, stop)
            self.matching.contribute(name, sequence, self._rank, own)
            readers.add(self._rank)
        loans = {
            peer: self._far_pool.take(stop - start, dtype, out.device)
            for peer in (far if own_bytes else ())
        }
        if far:
            readers.add(FAR)
            self._post(
                what,
                self._control.messages.tag(key, REDUCE_SCATTER),
                _slices(buffer, {peer: ranges[peer] for peer in far}, dtype),
                loans,
                lambda: self._far_parts_came(name, sequence, loans, slot),
            )
        if slot is not None:
            self.slots.submit(slot, readers)

        def consume(parts: dict[int, Contribution]) -> None:
            if own_bytes:
                data = checked_parts(parts, what, self._control.members, num_bytes=own_bytes)
                typed = [None if d is None else d.view(dtype) for d in data]
                sum_parts(
                    typed,
                    out,
                    codec=request.codec,
                    node_size=self._node_size,
                    accumulate=accumulate,
                    sums=request.sums,
                )
            for tensor in loans.values():
                self._far_pool.give(tensor)
            came = [
                *loans,
                *(rank for rank, part in parts.items() if part.near and part.data is not None),
            ]
            self._control.count("reduce_scatter", dict.fromkeys(came, own_bytes))

        contributors = range(self._size) if own_bytes else ()
        return self._begin(name, what, sequence, contributors, consume)

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        def count() -> None:
            itemsize = out.element_size()
            bytes_of = {
                rank: (stop - start) * itemsize for rank, (start, stop) in enumerate(ranges)
            }
            self._control.count("all_gather", bytes_of)

        what = f"gather of {key}"
        return self._gather(key, local, ranges, out, what=what, count=count)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy `tensor` from rank `source` into every other rank's. Blocking; a gather of shares,
        all but one of them empty, piece by piece.
        """
        tensor = tensor.detach()
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        data, what = flat.view(-1).view(torch.uint8), f"broadcast from rank {source}"
        for start in range(0, data.numel(), _BROADCAST_BYTES):
            out = data[start : start + _BROADCAST_BYTES]
            ranges = [(0, out.numel() if rank == source else 0) for rank in range(self._size)]
            local = out[slice(*ranges[self._rank])]
            self._gather("broadcast", local, ranges, out, what=what, call=f"a {what}").wait()
        if self._rank != source:
            self._control.count("broadcast", {source: data.numel()})
            if flat is not tensor:
                tensor.copy_(flat)

    def _gather(
        self,
        key: str,
        local: torch.Tensor,
        ranges: Sequence[Range],
        out: torch.Tensor,
        *,
        what: str,
        call: str | None = None,
        count: Callable[[], None] = lambda: None,
    ) -> Work:
        own, far = out[slice(*ranges[self._rank])], self._control.far
        assert local.numel() == own.numel(), (key, local.numel(), ranges[self._rank])
        name = f"gather {key}"
        sequence = self.matching.next_sequence(name)
        if own.numel() and own.data_ptr() != local.data_ptr():
            own.copy_(local)
        if local.numel() and self._control.near:
            buffer = self.grad_buffer(key, local.numel(), local.dtype, torch.device("cpu"))
            buffer.copy_(local)
            slot = self._slot_of(buffer, local.dtype)
            shares = dict.fromkeys(self._control.near, (0, local.numel()))
            readers = self._send_near(name, sequence, slot, shares, local.dtype)
            self.slots.submit(slot, readers)
        contributors = {rank for rank in self._control.near if ranges[rank][1] > ranges[rank][0]}
        if far:
            self._post(
                what,
                self._control.messages.tag(key, LOOSE_GATHER),
                dict.fromkeys(far, local),
                {peer: out[slice(*ranges[peer])] for peer in far},
                lambda: self.matching.contribute(name, sequence, FAR, Contribution(None)),
            )
            contributors.add(FAR)

        def consume(parts: dict[int, Contribution]) -> None:
            for rank in contributors - {FAR}:
                target = out[slice(*ranges[rank])]
                data = parts[rank].checked(
                    target.numel() * target.element_size(), what, self._control.members[rank]
                )
                assert data is not None, (what, rank)
                target.copy_(data.view(target.dtype))
            count()

        return self._begin(name, what, sequence, contributors, consume, call)

    def _post(
        self,
        what: str,
        tag: int,
        sends: dict[int, torch.Tensor],
        receives: dict[int, torch.Tensor],
        then: Callable[[], None],
    ) -> None:
        """Exchange messages with the far peers, and do `then` once they have come."""
        transfer = self._control.messages.post(what, tag, sends, receives)
        self._arriving.append((transfer, then))

    def _begin(
        self,
        name: str,
        what: str,
        sequence: int,
        contributors: Iterable[int],
        consume: Callable[[dict[int, Contribution]], None],
        call: str | None = None,
    ) -> Work:
        transfer = self._arriving[-1][0] if self._control.far else None
        pending = self.matching.begin(name, sequence, contributors, consume)
        self._control.progress()
        return PartsWork(
            self._control,
            pending,
            f"{what} (number {sequence})",
            call or f"the {what} (number {sequence})",
            lambda: self._missing(name, sequence),
            transfer,
        )

    def _send_near(
        self,
        name: str,
        sequence: int,
        slot: PoolSlot | None,
        shares: dict[int, Range],
        dtype: torch.dtype,
    ) -> set[int]:
        """Send that our part lies in `slot` to the near peers with a share of it; return the peers
        that will read it.
        """
        readers = set()
        for peer, share in shares.items():
            start, stop = share[0] * dtype.itemsize, share[1] * dtype.itemsize
            if start == stop:
                continue
            if slot is None:
                self._control.dispatcher.links.send(
                    peer, MessageKind.NONE, sequence, tail=name.encode()
                )
            else:
                self._control.dispatcher.links.send(
                    peer,
                    MessageKind.READY,
                    sequence,
                    slot.number,
                    start,
                    stop - start,
                    tail=name.encode(),
                )
                readers.add(peer)
        return readers

    def _slot_of(self, buffer: torch.Tensor, dtype: torch.dtype) -> PoolSlot:
        slot = self.slots.lent(buffer)
        assert slot is not None, "a gradient buffer that is not on loan"
        assert buffer.dtype == dtype, (buffer.dtype, dtype)
        return slot

    def _own_part(
        self, buffer: torch.Tensor | None, slot: PoolSlot | None, start: int, stop: int
    ) -> Contribution:
        if buffer is None or slot is None:
            return Contribution(None)
        part = buffer[start:stop].view(torch.uint8)
        return Contribution(part, partial(self.slots.release, slot.number, self._rank))

    def _far_parts_came(
        self, name: str, sequence: int, loans: dict[int, torch.Tensor], slot: PoolSlot | None
    ) -> None:
        for peer, tensor in loans.items():
            self.matching.contribute(name, sequence, peer, Contribution(tensor.view(torch.uint8)))
        if slot is not None:
            self.slots.release(slot.number, FAR)

    def _missing(self, name: str, sequence: int) -> set[int]:
        return self.matching.missing(name, sequence).intersection(self._control.near)

    def _send_slot(self, number: int, num_bytes: int, fd: int) -> None:
        self._control.dispatcher.send(MessageKind.SLOT, number, num_bytes, fd=fd)

    def _send_drop(self, number: int) -> None:
        self._control.dispatcher.send(MessageKind.DROP, number)

    def progress(self) -> None:
        arriving = self._arriving
        for transfer, then in [one for one in arriving if one[0].done()] if arriving else ():
            transfer.finish()
            self._arriving = [entry for entry in self._arriving if entry[0] is not transfer]
            then()
        while self.matching.advance():
            self._control.dispatcher.collect(0.0)

    def relieve(self) -> None:
        while self._stuck:
            self.matching.relieve(self._stuck.pop())

    def reset(self) -> None:
        """Leave everything under way, but not yet the slots, which peers may still read."""
        self._arriving = []
        self._stuck.clear()
        self.matching.reset()

    def restart(self) -> None:
        self.slots.reset()

    def close(self) -> None:
        self.reset()
        self._mapped.clear()
        self.slots.slots.clear()
        self._far_pool.clear()


class PartsWork(PeerOperation):
    """An operation that needs a part of every rank; `missing` names the near peers that have sent
    none.
    """

    def __init__(
        self,
        control: PeerControl,
        pending: Pending,
        what: str,
        call: str,
        missing: Callable[[], set[int]],
        transfer: Transfer | None,
    ) -> None:
        super().__init__(control, what, call, transfer)
        self._pending = pending
        self._missing = missing

    def is_over(self) -> bool:
        return self._pending.done

    def missing(self) -> set[int]:
        return self._missing()


def _slices(
    buffer: torch.Tensor | None, shares: dict[int, Range], dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """Return each peer's share of `buffer`; None stands for zeros."""
    if buffer is not None:
        return {peer: buffer[slice(*share)] for peer, share in shares.items()}
    zeros = torch.zeros(max(stop - start for start, stop in shares.values()), dtype=dtype)
    return {peer: zeros[: stop - start] for peer, (start, stop) in shares.items()}
