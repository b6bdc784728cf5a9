"""Reduces, and gathers of memory that is no window: operations that need a part of every rank.

A reduce hands our slot over: near peers are told where their slice of it lies (READY) and say when
they no longer need it (ACK), far peers are sent theirs. Our own slice of everybody's part is summed
in the canonical order once it is complete (``parts.py``)::

    rank 0's slot |  s0  |  s1  |   READY(key, n, slot, range) -->   rank 1 adds s1 of every slot,
                                                                     in order, into `out`
    rank 1's slot |  s0  |  s1  |   <-- ACK(slot)                    with the last ACK the slot is
                                                                     idle again

Invariant: the n-th operation of a key meets the n-th of every rank. Cost per rank, N equal shares,
B bytes: ``B (N-1)/N`` read in place from near peers or received from far ones; one control record
per near peer each way, one message per far peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from zeroshard.comm.codec import Codec
from zeroshard.comm.gloo_peers import LOOSE_GATHER, REDUCE_SCATTER, Transfer
from zeroshard.comm.links import Kind
from zeroshard.comm.matching import Matching, Part, Pending, checked_parts, sum_parts
from zeroshard.comm.slots import FAR, SlotPool
from zeroshard.comm.transport import GradBuffer, Work
from zeroshard.core.layout import Range
from zeroshard.memory import Pool

if TYPE_CHECKING:
    from zeroshard.comm.paired import PairedTransport

__all__ = ["Collectives"]

# how long a full pool waits for far peers, which cannot say whether they are slow or need another
# unit first
_SPILL_AFTER_S = 0.1


class Collectives:
    """The gradient pool of one transport and what is under way in it."""

    def __init__(self, transport: PairedTransport, *, pool_bytes: int | None) -> None:
        self.matching = Matching()
        self.slots = SlotPool(
            self._announce_slot if transport.near else None, self._withdraw_slot, pool_bytes
        )
        # far parts, and what to do when they are here
        self.arriving: list[tuple[Transfer, Callable[[], None]]] = []
        self._transport = transport
        self._rank = transport.rank
        self._size = transport.size
        self._node_size = transport.mesh.node_size
        self._far_pool = Pool(pool_bytes)

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> GradBuffer:
        buffer = self.slots.take(numel, dtype, device)
        if buffer is not None:
            return buffer
        begin = time.monotonic()
        found: list[GradBuffer] = []

        def free() -> bool:
            readers = self.slots.readers()
            spill = not readers or (FAR in readers and time.monotonic() - begin > _SPILL_AFTER_S)
            taken = self.slots.take(numel, dtype, device, spill=spill)
            found.extend([] if taken is None else [taken])
            return bool(found)

        told: set[int] = set()

        def idle() -> None:
            """Ask for relief once, and relieve ourselves once the peers have ([Note: relief])."""
            stuck_on = self.slots.readers() - {FAR, self._rank}
            self._transport.dispatcher.send(Kind.STUCK, to=sorted(stuck_on - told))
            told.update(stuck_on)
            if any(slot.readers == {self._rank} for slot in self.slots.slots.values()):
                self.matching.relieve(self._rank)

        self._transport.wait_until(
            free,
            f"a gradient buffer for {key}",
            near=lambda: self.slots.readers() - {FAR, self._rank},
            idle=idle,
        )
        return found[0]

    def reduce(
        self,
        key: str,
        buffer: GradBuffer | None,
        ranges: Sequence[Range],
        out: torch.Tensor,
        *,
        wire_dtype: torch.dtype,
        accumulate: bool,
        codec: Codec | None = None,
    ) -> Work:
        assert buffer is None or buffer.data.dtype == wire_dtype, (key, wire_dtype)
        start, stop = ranges[self._rank]
        assert out.numel() == stop - start, (key, out.numel(), ranges[self._rank])
        if codec is not None:
            ranges = [codec.bytes_of(span) for span in ranges]
            start, stop = ranges[self._rank]
        what, name = f"reduce of {key}", f"reduce {key}"
        sequence = self.matching.next_sequence(name)
        readers = self._tell_near(
            name,
            sequence,
            buffer,
            {peer: ranges[peer] for peer in self._transport.near},
            wire_dtype,
        )
        own_bytes = (stop - start) * wire_dtype.itemsize
        if own_bytes:
            own = Part(None) if buffer is None else self._own_part(buffer, start, stop)
            self.matching.contribute(name, sequence, self._rank, own)
            readers.add(self._rank)
        loans = (
            {
                peer: self._far_pool.take(stop - start, wire_dtype, out.device)
                for peer in self._transport.far
            }
            if own_bytes
            else {}
        )
        if self._transport.far:
            zeros = (
                None
                if buffer is not None
                else torch.zeros(max(b - a for a, b in ranges), dtype=wire_dtype)
            )
            sends = {peer: _slice(buffer, zeros, ranges[peer]) for peer in self._transport.far}
            readers.add(FAR)
            transfer = self._transport.messages.post(
                what, self._transport.messages.tag(key, REDUCE_SCATTER), sends, loans
            )
            self.arriving.append(
                (transfer, lambda: self._far_parts_came(name, sequence, loans, buffer))
            )
        if buffer is not None:
            self.slots.hand_over(buffer, readers)

        def consume(parts: dict[int, Part]) -> None:
            if own_bytes:
                data = checked_parts(parts, what, self._transport.members, num_bytes=own_bytes)
                typed = [None if d is None else d.view(wire_dtype) for d in data]
                sum_parts(typed, out, codec=codec, node_size=self._node_size, accumulate=accumulate)
            for tensor in loans.values():
                self._far_pool.give(tensor)
            came = [
                *loans,
                *(rank for rank, part in parts.items() if part.near and part.data is not None),
            ]
            self._transport.count("reduce_scatter", dict.fromkeys(came, own_bytes))

        return self._begin(name, what, sequence, range(self._size) if own_bytes else (), consume)

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        own = out[slice(*ranges[self._rank])]
        assert local.numel() == own.numel(), (key, local.numel(), ranges[self._rank])
        what, name = f"gather of {key}", f"gather {key}"
        sequence = self.matching.next_sequence(name)
        if own.numel() and own.data_ptr() != local.data_ptr():
            own.copy_(local)
        if local.numel() and self._transport.near:
            buffer = self.grad_buffer(key, local.numel(), local.dtype, torch.device("cpu"))
            buffer.data.copy_(local)
            readers = self._tell_near(
                name,
                sequence,
                buffer,
                dict.fromkeys(self._transport.near, (0, local.numel())),
                local.dtype,
            )
            self.slots.hand_over(buffer, readers)
        contributors = {rank for rank in self._transport.near if ranges[rank][1] > ranges[rank][0]}
        receives = {peer: out[slice(*ranges[peer])] for peer in self._transport.far}
        if self._transport.far:
            transfer = self._transport.messages.post(
                what,
                self._transport.messages.tag(key, LOOSE_GATHER),
                dict.fromkeys(self._transport.far, local),
                receives,
            )
            self.arriving.append(
                (
                    transfer,
                    lambda: self.matching.contribute(name, sequence, FAR, Part(None)),
                )
            )
            contributors.add(FAR)

        def consume(parts: dict[int, Part]) -> None:
            for rank in contributors - {FAR}:
                target = out[slice(*ranges[rank])]
                data = parts[rank].checked(
                    target.numel() * target.element_size(), what, self._transport.members[rank]
                )
                assert data is not None, (what, rank)
                target.copy_(data.view(target.dtype))
            self._transport.count(
                "all_gather",
                {
                    rank: (stop - start) * out.element_size()
                    for rank, (start, stop) in enumerate(ranges)
                },
            )

        return self._begin(name, what, sequence, contributors, consume)

    def _begin(
        self,
        name: str,
        what: str,
        sequence: int,
        contributors: Iterable[int],
        consume: Callable[[dict[int, Part]], None],
    ) -> Work:
        transfer = self.arriving[-1][0] if self._transport.far else None
        pending = self.matching.begin(name, sequence, contributors, consume)
        self._transport.progress()
        return PartsWork(
            self._transport,
            pending,
            f"{what} (number {sequence})",
            lambda: self._missing(name, sequence),
            transfer,
        )

    def _tell_near(
        self,
        name: str,
        sequence: int,
        buffer: GradBuffer | None,
        shares: dict[int, Range],
        dtype: torch.dtype,
    ) -> set[int]:
        """Announce our part to the near peers whose share of it is not empty; return those that
        will read our slot.
        """
        readers = set()
        for peer, share in shares.items():
            start, stop = (edge * dtype.itemsize for edge in share)
            if start == stop:
                continue
            if buffer is None:
                self._transport.dispatcher.links.send(peer, Kind.NONE, sequence, tail=name.encode())
            else:
                self._transport.dispatcher.links.send(
                    peer, Kind.READY, sequence, buffer.slot, start, stop - start, tail=name.encode()
                )
                readers.add(peer)
        return readers

    def _own_part(self, buffer: GradBuffer, start: int, stop: int) -> Part:
        return Part(
            buffer.data[start:stop].view(torch.uint8),
            lambda: self.slots.release(buffer.slot, self._rank),
        )

    def _far_parts_came(
        self, name: str, sequence: int, loans: dict[int, torch.Tensor], buffer: GradBuffer | None
    ) -> None:
        for peer, tensor in loans.items():
            self.matching.contribute(name, sequence, peer, Part(tensor.view(torch.uint8)))
        if buffer is not None:
            self.slots.release(buffer.slot, FAR)

    def _missing(self, name: str, sequence: int) -> set[int]:
        return self.matching.missing(name, sequence).intersection(self._transport.near)

    def _announce_slot(self, number: int, num_bytes: int, fd: int) -> None:
        self._transport.dispatcher.send(Kind.SLOT, number, num_bytes, fd=fd)

    def _withdraw_slot(self, number: int) -> None:
        self._transport.dispatcher.send(Kind.DROP, number)

    def progress(self) -> None:
        """Take in far parts that have come, and finish what has become possible."""
        landed = [entry for entry in self.arriving if entry[0].done()]
        for transfer, then in landed:
            transfer.land()
            self.arriving = [entry for entry in self.arriving if entry[0] is not transfer]
            then()
        while self.matching.finish_ripe():
            self._transport.dispatcher.collect(0.0)

    def forget(self) -> list[Transfer]:
        """Drop what is under way, but not yet the slots, which peers may still read; return the
        transfers left behind.
        """
        left = [transfer for transfer, _ in self.arriving]
        self.arriving = []
        self.matching.forget()
        return left

    def close(self) -> None:
        """Let go of the memory."""
        self.forget()
        self.slots.slots.clear()
        self._far_pool.clear()


class PartsWork:
    """An operation under way; `missing` names the near peers whose part has not come."""

    def __init__(
        self,
        transport: PairedTransport,
        pending: Pending,
        what: str,
        missing: Callable[[], set[int]],
        transfer: Transfer | None,
    ) -> None:
        self._transport = transport
        self._pending = pending
        self._what = what
        self._missing = missing
        self._transfer = transfer

    def wait(self) -> None:
        if not self._pending.done:
            far = set if self._transfer is None else self._transfer.awaited
            self._transport.wait_until(
                lambda: self._pending.done,
                self._what,
                near=self._missing,
                far=far,
                call=f"the {self._what}",
                transfer=self._transfer,
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
