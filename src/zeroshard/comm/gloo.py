"""Ranks on different hosts: paired sends over gloo's sockets.

A gather is one send of our slice to, and one receive of its slice from, every peer. A reduce sends every peer its slice of our buffer,
receives our slice of theirs, and forms the canonical sum on arrival (``comm/ordered.py``). On gloo this is also the fast path: its own
reduce-scatter is an all-reduce inside (twice the bytes), its all-gather takes up to twice as long as paired sends.

Invariant: the n-th operation of one key meets the n-th of the same key, whatever else is under way (``comm/gloo_peers.py``). Two-sided: a
gather needs the peers to call it too; nobody reads our memory by itself, so `begin_write` only waits for sends of ours under way.

Cost per rank, N equal shares, buffer of B bytes: each receives and sends ``B (N-1)/N`` in N-1 messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from zeroshard.comm.gloo_peers import ALL_GATHER, REDUCE_SCATTER, GlooPeers, Transfer
from zeroshard.comm.ordered import ordered_sum
from zeroshard.comm.pool import TensorPool
from zeroshard.comm.transport import GradBuffer, Traffic, Work
from zeroshard.core.layout import Range

__all__ = ["GlooTransport"]


class GlooWindow:
    """One slice per rank, in private memory."""

    def __init__(
        self, transport: GlooTransport, key: str, ranges: Sequence[Range], dtype: torch.dtype, device: torch.device, replicated: bool
    ) -> None:
        self.key = key
        self.ranges = tuple(ranges)
        self.aliased = False
        start, stop = self.ranges[transport.rank]
        self.full = torch.zeros(self.ranges[-1][1], dtype=dtype, device=device) if replicated else None
        self.local = torch.zeros(stop - start, dtype=dtype, device=device) if self.full is None else self.full[start:stop]
        self._transport = transport

    def gather(self, out: torch.Tensor | None = None) -> Work:
        transport = self._transport
        target = self.full if out is None else out
        assert target is not None, f"window {self.key} rests sharded: gather needs `out`"
        if out is not None:
            out[slice(*self.ranges[transport.rank])].copy_(self.local)
        receives = {peer: target[slice(*self.ranges[peer])] for peer in transport.peers}
        tag = transport.links.tag(self.key, ALL_GATHER)
        transfer = transport.links.post(f"gather of {self.key}", tag, {peer: self.local for peer in transport.peers}, receives)
        transport.traffic.add("all_gather", "gloo", sum(t.numel() * t.element_size() for t in receives.values()))
        return transport.started(_GatherWork(transport, transfer))

    def publish(self) -> None: ...

    def close(self) -> None:
        self.full, self.local = None, torch.empty(0)


class _GatherWork:
    def __init__(self, transport: GlooTransport, transfer: Transfer) -> None:
        self._transport = transport
        self.transfer = transfer
        self.is_gather = True

    def wait(self) -> None:
        if not self.transfer.done():
            self.transfer.wait()
        self._transport.finished(self)

    def done(self) -> bool:
        return self.transfer.done()


class _ReduceWork:
    """Slices under way; the sum is formed once they are here."""

    def __init__(
        self,
        transport: GlooTransport,
        transfer: Transfer,
        contributions: list[torch.Tensor | None],
        out: torch.Tensor,
        accumulate: bool,
        loans: list[torch.Tensor],
    ) -> None:
        self._transport = transport
        self.transfer = transfer
        self.is_gather = False
        self._contributions = contributions  # per rank, our slice
        self._out = out
        self._accumulate = accumulate
        self._loans = loans  # temporaries and the gradient buffer, given back at the end
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        self.transfer.wait()
        ordered_sum(self._contributions, self._out, node_size=self._transport.node_size, accumulate=self._accumulate)
        for tensor in self._loans:
            self._transport.pool.give(tensor)
        self._contributions, self._loans, self._done = [], [], True
        self._transport.finished(self)

    def done(self) -> bool:
        return self._done


class GlooTransport:
    """A Transport over a gloo process group (or one with a gloo backend for CPU tensors)."""

    def __init__(
        self, group: dist.ProcessGroup, *, node_size: int | None = None, stall_timeout_s: float = 300.0, pool_bytes: int | None = None
    ) -> None:
        self.name = "gloo"
        self.rank = group.rank()
        self.size = group.size()
        self.one_sided = False
        self.traffic = Traffic()
        self.stall_timeout_s = stall_timeout_s
        self.node_size = node_size
        self.links = GlooPeers(group, stall_timeout_s=stall_timeout_s)
        self.pool = TensorPool(pool_bytes)
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self._under_way: list[_GatherWork | _ReduceWork] = []

    def window(self, key: str, ranges: Sequence[Range], dtype: torch.dtype, device: torch.device, *, replicated: bool) -> GlooWindow:
        assert len(ranges) == self.size, (key, ranges, self.size)
        self.links.register(key)
        return GlooWindow(self, key, ranges, dtype, device, replicated)

    def grad_buffer(self, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> GradBuffer:
        return GradBuffer(self.pool.take(numel, dtype, device))

    def return_buffer(self, buffer: GradBuffer) -> None:
        self.pool.give(buffer.data)

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
        loans = [] if buffer is None else [buffer.data]
        start, stop = ranges[self.rank]
        receives = {peer: self.pool.take(stop - start, wire_dtype, out.device) for peer in self.peers}
        loans += receives.values()
        if buffer is None:
            zeros = torch.zeros(max(b - a for a, b in ranges), dtype=wire_dtype, device=out.device)
            sends = {peer: zeros[: ranges[peer][1] - ranges[peer][0]] for peer in self.peers}
        else:
            assert buffer.data.dtype == wire_dtype, (key, buffer.data.dtype, wire_dtype)
            sends = {peer: buffer.data[slice(*ranges[peer])] for peer in self.peers}
        transfer = self.links.post(f"reduce of {key}", self.links.tag(key, REDUCE_SCATTER), sends, receives)
        self.traffic.add("reduce_scatter", "gloo", (stop - start) * wire_dtype.itemsize * len(self.peers))
        contributions: list[torch.Tensor | None] = [receives.get(rank) for rank in range(self.size)]
        contributions[self.rank] = None if buffer is None else buffer.data[start:stop]
        return self.started(_ReduceWork(self, transfer, contributions, out, accumulate, loans))

    def started(self, work: _GatherWork | _ReduceWork) -> Work:
        self._under_way.append(work)
        return work

    def finished(self, work: _GatherWork | _ReduceWork) -> None:
        self._under_way = [other for other in self._under_way if other is not work]

    def begin_write(self) -> None:
        for work in list(self._under_way):
            if work.is_gather:
                work.wait()

    def exchange(self, payload: bytes) -> list[bytes]:
        theirs = self.links.exchange(payload)
        self.traffic.add("exchange", "gloo", sum(len(part) for part in theirs.values()))
        return [payload if rank == self.rank else theirs[rank] for rank in range(self.size)]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self.links.broadcast(tensor, source)
        self.traffic.add("broadcast", "gloo", 0 if self.rank == source else tensor.numel() * tensor.element_size())

    def progress(self) -> None: ...

    def abandon(self) -> None:
        left, self._under_way = self._under_way, []
        self.links.abandon([work.transfer for work in left])

    def close(self) -> None:
        self.pool.clear()
