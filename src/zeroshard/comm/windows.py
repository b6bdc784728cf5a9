"""Windows of ranks that are near (mapped memory), far (messages), or both.

How the slices of a 3-rank window rest, and what `gather` costs::

    sharded, all near          one memfd | rank 0 | rank 1 | rank 2 | mapped by all *is* full
                               (aliased): gather copies nothing
    sharded, otherwise         a memfd per rank, of its slice; near peers map it; gather copies near
                               slices, receives far ones
    replicated                 a memfd per rank, of the whole buffer; near peers map it and copy our
                               slice out of it
    without near peers         private memory; all slices are received

Invariant: a slice is written only between `begin_write` (every near rank has finished reading) and
`publish`, which raises its epoch; a gather copies from a near peer once that peer has published as
often as we have, and checks that the epoch did not move meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zeroshard.comm import memfd
from zeroshard.comm.dispatcher import WindowMemory
from zeroshard.comm.gloo_peers import ALL_GATHER, Transfer
from zeroshard.comm.links import Kind
from zeroshard.comm.transport import Work
from zeroshard.core.layout import Range, end_of
from zeroshard.errors import ConfigError, StateError

if TYPE_CHECKING:
    from zeroshard.comm.paired import PairedTransport

__all__ = ["GatherWork", "PairedWindow", "make_window"]


class PairedWindow:
    """One segment's shards. `near` holds the mapped slices of the near peers where they are not
    part of `full` already.
    """

    def __init__(
        self,
        transport: PairedTransport,
        key: str,
        serial: int,
        ranges: tuple[Range, ...],
        full: torch.Tensor | None,
        local: torch.Tensor,
    ) -> None:
        self.key = key
        self.ranges = ranges
        self.full = full
        self.local = local
        self.aliased = False
        self.serial = serial
        self.epoch = 0
        self.near: dict[int, torch.Tensor] = {}
        self._transport = transport

    def gather(self, out: torch.Tensor | None = None) -> Work:
        transport = self._transport
        target = self.full if out is None else out
        if target is None:
            raise StateError(f"window {self.key} rests sharded: gather needs `out`")
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, from), for near slices
        if self.aliased and out is not None:
            assert self.full is not None, self.key
            copies = [(out, self.full)]
        elif not self.aliased:
            copies = [(target[slice(*self.ranges[peer])], data) for peer, data in self.near.items()]
            if out is not None:
                out[slice(*self.ranges[transport.rank])].copy_(self.local)
        work = GatherWork(transport, self, copies, self._post(target))
        self._count(bool(copies))
        transport.started(work)
        return work

    def _post(self, target: torch.Tensor) -> Transfer | None:
        transport = self._transport
        if not transport.far:
            return None
        receives = {peer: target[slice(*self.ranges[peer])] for peer in transport.far}
        tag = transport.messages.tag(self.key, ALL_GATHER)
        return transport.messages.post(
            f"gather of {self.key}", tag, dict.fromkeys(transport.far, self.local), receives
        )

    def _count(self, copied: bool) -> None:
        """Count what a gather brings here. What is mapped moves nothing, but is what other
        transports would have moved.
        """
        itemsize = self.local.element_size()
        bytes_of = {
            rank: itemsize * (stop - start) for rank, (start, stop) in enumerate(self.ranges)
        }
        self._transport.count("all_gather", bytes_of, near="shared_memory" if copied else "mapped")

    def publish(self) -> None:
        self.epoch += 1
        self._transport.dispatcher.send(Kind.PUBLISHED, self.serial, self.epoch)

    def peer_epochs(self) -> dict[int, int]:
        """Return how often each near peer that owns something has published."""
        epochs = self._transport.dispatcher.counts.epochs
        return {
            r: epochs.get((self.serial, r), 0)
            for r in self._transport.near
            if self.ranges[r][1] > self.ranges[r][0]
        }

    def close(self) -> None:
        self._transport.windows.pop(self.serial, None)
        self.full, self.local, self.near = None, torch.empty(0), {}


class GatherWork:
    """A gather under way: near slices are copied once published, far ones arrive by themselves."""

    def __init__(
        self,
        transport: PairedTransport,
        window: PairedWindow,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        transfer: Transfer | None,
    ) -> None:
        self.transfer = transfer
        self._transport = transport
        self._window = window
        self._epoch = window.epoch
        self._copies = copies
        self._near_done = False
        self._far_done = transfer is None

    def advance(self) -> bool:
        """Do what has become possible; return whether the gather is finished."""
        if not self._near_done and not self._unpublished():
            before = self._window.peer_epochs()
            for target, source in self._copies:
                target.copy_(source)
            self._transport.dispatcher.collect(0.0)
            if self._window.peer_epochs() != before:
                raise StateError(
                    f"gather of {self._window.key}: a slice was published during the copy; call"
                    " begin_write() before writing"
                )
            self._near_done = True
            self._copies = []
        if not self._far_done and self.transfer is not None and self.transfer.done():
            self.transfer.land()
            self._far_done = True
        return self._near_done and self._far_done

    def _unpublished(self) -> set[int]:
        return {rank for rank, epoch in self._window.peer_epochs().items() if epoch < self._epoch}

    def wait(self) -> None:
        if not (self._near_done and self._far_done):
            self._transport.wait_until(
                lambda: self._near_done and self._far_done,
                f"gather of {self._window.key} (epoch {self._epoch})",
                call=f"the gather of {self._window.key}",
                near=lambda: set() if self._near_done else self._unpublished(),
                far=lambda: set() if self.transfer is None else self.transfer.awaited(),
                transfer=self.transfer,
            )

    def done(self) -> bool:
        if not (self._near_done and self._far_done):
            self._transport.progress()
        return self._near_done and self._far_done


def make_window(
    transport: PairedTransport,
    key: str,
    serial: int,
    ranges: tuple[Range, ...],
    dtype: torch.dtype,
    device: torch.device,
    replicated: bool,
) -> PairedWindow:
    """Allocate a window and map the near peers' memory. Collective; memory that is short on one
    rank is a ConfigError on every rank.
    """
    start, stop = ranges[transport.rank]
    numel = end_of(ranges)
    if not transport.near:
        full = torch.zeros(numel, dtype=dtype, device=device) if replicated else None
        local = (
            torch.zeros(stop - start, dtype=dtype, device=device)
            if full is None
            else full[start:stop]
        )
        return PairedWindow(transport, key, serial, ranges, full, local)
    if device.type != "cpu":
        raise ConfigError(f"window {key}: shared memory serves CPU tensors, not {device}")
    if not replicated and transport.alias and not transport.far:
        return _make_aliased(transport, key, serial, ranges, dtype)
    return _make_mapped(transport, key, serial, ranges, dtype, replicated)


def _make_aliased(
    transport: PairedTransport, key: str, serial: int, ranges: tuple[Range, ...], dtype: torch.dtype
) -> PairedWindow:
    """One memfd, made by the first rank and mapped by all; each reserves its own part, near its
    own processor.
    """
    num_bytes = end_of(ranges) * dtype.itemsize
    if transport.rank == 0:
        own = _offer(transport, serial, num_bytes, reserved=False)
    else:
        own = _await_memory(transport, key, serial, [0])[0]
    start, stop = (edge * dtype.itemsize for edge in ranges[transport.rank])
    reason = own.reason if transport.rank == 0 else ""
    if own.fd is not None:
        try:
            memfd.reserve(own.fd, start, stop)
        except OSError as error:
            reason = str(error)
    _agree_on_memory(transport, key, num_bytes, [own], reason)
    assert own.fd is not None, own
    full = memfd.map_bytes(own.fd, num_bytes).view(dtype)
    os.close(own.fd)
    window = PairedWindow(
        transport, key, serial, ranges, full, full[slice(*ranges[transport.rank])]
    )
    window.aliased = True
    return window


def _make_mapped(
    transport: PairedTransport,
    key: str,
    serial: int,
    ranges: tuple[Range, ...],
    dtype: torch.dtype,
    replicated: bool,
) -> PairedWindow:
    """A memfd per rank, of its slice or (replicated) of the whole buffer."""
    start, stop = ranges[transport.rank]
    num_bytes = (end_of(ranges) if replicated else stop - start) * dtype.itemsize
    own = _offer(transport, serial, num_bytes, reserved=True)
    theirs = _await_memory(transport, key, serial, transport.near)
    _agree_on_memory(transport, key, num_bytes, [own, *theirs], own.reason)
    assert own.fd is not None, own
    whole = memfd.map_bytes(own.fd, num_bytes).view(dtype)
    window = PairedWindow(
        transport,
        key,
        serial,
        ranges,
        whole if replicated else None,
        whole[start:stop] if replicated else whole,
    )
    for peer, memory in zip(transport.near, theirs, strict=True):
        assert memory.fd is not None, memory
        mapped = memfd.map_bytes(memory.fd, memory.num_bytes).view(dtype)
        window.near[peer] = mapped[slice(*ranges[peer])] if replicated else mapped
    for memory in (own, *theirs):
        assert memory.fd is not None, memory
        os.close(memory.fd)
    return window


def _offer(
    transport: PairedTransport, serial: int, num_bytes: int, *, reserved: bool
) -> WindowMemory:
    """Make memory and send its descriptor to the near peers, or the reason why there is none."""
    try:
        own = WindowMemory(memfd.create(num_bytes, reserved=reserved), num_bytes, "")
    except OSError as error:
        own = WindowMemory(None, 0, str(error))
    transport.dispatcher.send(Kind.WINDOW, serial, num_bytes, fd=own.fd, tail=own.reason.encode())
    return own


def _await_memory(
    transport: PairedTransport, key: str, serial: int, peers: Sequence[int]
) -> list[WindowMemory]:
    memory = transport.dispatcher.memory

    def missing() -> set[int]:
        return {peer for peer in peers if (serial, peer) not in memory}

    transport.wait_until(
        lambda: not missing(),
        f"making window {key}",
        near=missing,
        call=f"the making of window {key}",
    )
    return [memory.pop((serial, peer)) for peer in peers]


def _agree_on_memory(
    transport: PairedTransport, key: str, num_bytes: int, memories: list[WindowMemory], reason: str
) -> None:
    """Raise ConfigError on every rank when any rank has a `reason` why it lacks memory; closes
    the descriptors then.
    """
    answers = [
        answer.decode()
        for answer in transport.exchange_quietly(reason.encode(), f"the making of window {key}")
    ]
    short = {rank: answer for rank, answer in enumerate(answers) if answer}
    if short:
        for memory in memories:
            if memory.fd is not None:
                os.close(memory.fd)
        raise ConfigError(
            f"window {key}: no shared memory for {num_bytes} bytes on rank(s) {sorted(short)}"
            f" ({next(iter(short.values()))})"
        )
