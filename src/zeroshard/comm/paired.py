"""The transport of CPU ranks: near peers share memory with us, far peers exchange messages
(gloo); every pair of ranks is one or the other.

"shared_memory" is the case without far peers, "gloo" the one without near peers, "mixed" has both;
there is one implementation. A gather copies (or aliases) near slices and receives far ones
(``windows.py``). A reduce announces our slot to near peers, sends slices to far peers, and sums our
slice of everybody's part in the canonical order once it is complete (``parts.py``, ``ordered.py``).

Invariant: every blocking call serves the near peers while it waits (those of all engines of the
process), so ranks may run units in different order. One-sided without far peers: a gather needs
nothing from the peers' programs but that they have published. With far peers the n-th operation of
a key meets the n-th.

Cost per rank, N equal shares, buffer of B bytes: a gather and a reduce bring ``B (N-1)/N`` each; of
that, near gathers of aliased windows move nothing. One control record per near peer and operation,
one message per far peer. Calls are for one thread at a time.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeroshard.comm import serving
from zeroshard.comm.calls import framed, unframed
from zeroshard.comm.codec import Codec
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.dispatcher import Dispatcher, given_up
from zeroshard.comm.gloo_peers import GlooPeers, Subgroup, Transfer
from zeroshard.comm.links import Kind, Links
from zeroshard.comm.notices import Notices
from zeroshard.comm.rendezvous import HostGroups
from zeroshard.comm.spec import CommSpec
from zeroshard.comm.transport import GradBuffer, Traffic, Work
from zeroshard.comm.windows import GatherWork, PairedWindow, make_window
from zeroshard.core.layout import Range
from zeroshard.errors import PlanMismatch

__all__ = ["PairedTransport"]

_BROADCAST_BYTES = 16 << 20


class PairedTransport:
    """A Transport over shared memory, gloo messages, or both. `connections` are gloo's
    (``gloo_peers.connect``) where a peer is far.
    """

    def __init__(
        self,
        subgroup: Subgroup,
        neighbours: HostGroups,
        spec: CommSpec,
        traffic: Traffic,
        *,
        connections: Any,
        notices: Notices | None = None,
    ) -> None:
        self.rank = subgroup.rank
        self.size = subgroup.size
        self.members = subgroup.members
        self.near = [rank for rank in neighbours.group_of(self.rank) if rank != self.rank]
        self.far = [rank for rank in range(self.size) if rank not in neighbours.group_of(self.rank)]
        self.name = _name(neighbours.groups)
        self.one_sided = self.name == "shared_memory"
        self.keyed = True
        self.traffic = traffic
        self.mesh = spec.mesh
        self.stall_timeout_s = spec.stall_timeout_s
        self.alias = spec.alias
        self.windows: dict[int, PairedWindow] = {}
        self._num_windows = 0
        self._num_writes = 0
        self.collectives = Collectives(self, pool_bytes=spec.pool_bytes)
        links = Links(
            neighbours.sockets, members=self.members, stall_timeout_s=spec.stall_timeout_s
        )
        self.dispatcher = Dispatcher(
            self.rank, links, self.near, self.collectives.matching, self.collectives.slots.release
        )
        self.messages = GlooPeers(
            connections, self.rank, members=self.members, wake=links.wake, wait=self._wait_transfers
        )
        self._notices = notices if self.far else None
        self._has_given_up = False
        self._gathers: list[GatherWork] = []
        serving.register(self)

    # -------------------------------------------------------------------------------------- windows

    def window(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> PairedWindow:
        assert len(ranges) == self.size, (key, ranges, self.size)
        self._compare(
            f"{key} {list(ranges)} {dtype} {'replicated' if replicated else 'sharded'}",
            f"window {key}",
        )
        self.register(key)
        serial = self._num_windows
        self._num_windows += 1
        window = make_window(self, key, serial, tuple(ranges), dtype, device, replicated)
        self.windows[serial] = window
        return window

    def register(self, key: str) -> None:
        self.messages.register(key)

    def _compare(self, text: str, what: str) -> None:
        digests = self.exchange_quietly(
            hashlib.blake2b(text.encode(), digest_size=8).digest(), f"the making of {what}"
        )
        differ = [self.members[rank] for rank, digest in enumerate(digests) if digest != digests[0]]
        if differ:
            raise PlanMismatch(
                f"{what}: rank(s) {differ} ask for another key, cut, dtype or placement than rank"
                f" {self.members[0]}; here it is {text}"
            )

    def started(self, work: GatherWork) -> None:
        """Take a gather under way into care."""
        self._gathers.append(work)
        self.progress()

    def begin_write(self) -> None:
        for work in list(self._gathers):
            work.wait()
        self._num_writes += 1
        self.dispatcher.send(Kind.READ, self._num_writes)

        def missing() -> set[int]:
            reads = self.dispatcher.counts.reads
            return {peer for peer in self.near if reads.get(peer, 0) < self._num_writes}

        what = "waiting for all ranks to finish reading"
        self.wait_until(
            lambda: not missing(), what, near=missing, call="the writing of new weights"
        )

    # -------------------------------------------------------------------- reduces and loose gathers

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> GradBuffer:
        return self.collectives.grad_buffer(key, numel, dtype, device)

    def return_buffer(self, buffer: GradBuffer) -> None:
        self.collectives.slots.give_back(buffer)

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
        return self.collectives.reduce(
            key, buffer, ranges, out, wire_dtype=wire_dtype, accumulate=accumulate, codec=codec
        )

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        return self.collectives.all_gather(key, local, ranges, out)

    # -------------------------------------------------------------------------------------- waiting

    def progress(self) -> None:
        self.dispatcher.collect(0.0)
        self._gathers = [work for work in self._gathers if not work.advance()]
        self.collectives.progress()

    def check_peers(self, what: str) -> None:
        self.progress()
        self.dispatcher.links.require(self.near, what)

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        *,
        near: Callable[[], set[int]] = set,
        far: Callable[[], set[int]] = set,
        idle: Callable[[], None] | None = None,
        call: str | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        """Serve the peers, those of every transport of this process, until `ready()`; see
        Dispatcher.wait_until.

        `transfer` is what this waits for from far ranks, in `call`.
        """
        others, notices = serving.others(self), self._notices
        if notices is not None:
            notices.begin_wait()

        def listen() -> None:
            """Join the exchange of a far rank that waits there for us while we wait for it:
            under our own call, which ends both.
            """
            if transfer is not None and transfer.senders() & self.messages.listen(
                self.far, "the next exchange"
            ):
                assert call is not None
                self.exchange_quietly(b"", call)

        def progress() -> None:
            self.progress()
            serving.serve(others)
            ahead = (
                ()
                if notices is None
                else notices.ahead(self.dispatcher.links.generation, self.messages.run)
            )
            if ahead and not ready():
                raise given_up([self.members[rank] for rank in ahead], what)

        options: dict[str, Any] = {
            "idle": idle,
            "stall_timeout_s": self.stall_timeout_s,
            "patient": not others,
            "call": call,
        }
        options["listen"] = None if transfer is None else listen
        self.dispatcher.wait_until(ready, what, progress=progress, near=near, far=far, **options)

    @property
    def is_waiting(self) -> bool:
        return bool(self.near)

    def serve(self) -> None:
        self.progress()
        self.dispatcher.relieve_stuck()

    def _wait_transfers(self, transfers: Sequence[Transfer]) -> None:
        def ready() -> bool:
            return all(transfer.done() for transfer in transfers) or any(
                transfer.error for transfer in transfers
            )

        def awaited() -> set[int]:
            return set().union(*(transfer.awaited() for transfer in transfers))

        self.wait_until(ready, transfers[0].what, far=awaited)
        for transfer in sorted(transfers, key=lambda transfer: transfer.error is None):
            transfer.land()

    # --------------------------------------------------------------------------------- small things

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        parts = self.exchange_quietly(payload, call)
        self.count(
            "exchange", {rank: len(parts[rank]) for rank in range(self.size) if rank != self.rank}
        )
        return parts

    def count(
        self, operation: str, bytes_of: Mapping[int, int], *, near: str = "shared_memory"
    ) -> None:
        """Count what one call brought from each other rank; `near` is the link to near ones."""
        if self.size == 1:
            self.traffic.add(operation, "local", 0)
        for peers, link in ((self.near, near), (self.far, "gloo")):
            if peers:
                other_nodes = [peer for peer in peers if not self.mesh.same_node(peer, self.rank)]
                between = sum(bytes_of.get(peer, 0) for peer in other_nodes)
                self.traffic.add(
                    operation, link, sum(bytes_of.get(peer, 0) for peer in peers), between=between
                )

    def exchange_quietly(self, payload: bytes, call: str) -> list[bytes]:
        """Exchange what is not the engine's payload, and so is not counted."""
        frame = framed(call, payload)
        sequence = self.dispatcher.send_payload(frame)
        parts = {self.rank: frame}
        if self.far:
            parts |= self.messages.exchange(frame, self.far, f"exchange of {call}")

        def missing() -> set[int]:
            return self.dispatcher.payloads_missing(sequence)

        self.wait_until(lambda: not missing(), f"exchange of {call}", near=missing, call=call)
        parts |= self.dispatcher.take_payloads(sequence)
        return unframed([parts[rank] for rank in range(self.size)], self.members)

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
            self.count("broadcast", {source: flat.numel() * flat.element_size()})
            if flat is not tensor:
                tensor.copy_(flat)

    def _broadcast_near(self, part: torch.Tensor, source: int) -> None:
        """Pass one piece of a broadcast through a slot of the source's."""
        if self.rank == source:
            buffer = self.grad_buffer("broadcast", part.numel(), torch.uint8, torch.device("cpu"))
            buffer.data.copy_(part)
            self.collectives.slots.hand_over(buffer, set(self.near))
            self.dispatcher.send(Kind.BROADCAST, buffer.slot, part.numel())
            return
        queue = self.dispatcher.counts.broadcasts.setdefault(source, deque())
        self.wait_until(
            lambda: bool(queue),
            f"broadcast from rank {source}",
            near=lambda: {source},
            call=f"a broadcast from rank {source}",
        )
        slot, num_bytes = queue.popleft()
        if num_bytes != part.numel():
            raise PlanMismatch(
                f"broadcast: rank {source} sends {num_bytes} bytes where {part.numel()} are"
                " expected"
            )
        part.copy_(self.dispatcher.slot_of(source, slot)[:num_bytes])
        self.dispatcher.send(Kind.ACK, slot, to=[source])

    def give_up(self) -> None:
        if self._has_given_up:
            return
        self._has_given_up = True
        transfers = [work.transfer for work in self._gathers if work.transfer is not None]
        self.messages.abandon([*transfers, *self.collectives.forget()])
        self._gathers, self._num_writes = [], 0
        self.dispatcher.forget()
        for window in self.windows.values():
            window.epoch = 0
        self.dispatcher.send(Kind.ABANDON)
        if self._notices is not None:
            self._notices.give_up(self.dispatcher.links.generation)

    def abandon(self) -> None:
        self.give_up()
        self._has_given_up = False
        generation, stall_timeout_s = self.dispatcher.links.generation, self.stall_timeout_s

        def missing() -> set[int]:
            return {peer for peer in self.near if self.dispatcher.abandons[peer] < generation}

        self.stall_timeout_s *= 2  # the others may wait for us until they stall, and come then
        try:
            self.wait_until(
                lambda: not missing(), "meeting the other ranks after an error", near=missing
            )
            if self.far:
                self.messages.exchange(b"", self.far, "meeting the other ranks after an error")
        finally:
            self.stall_timeout_s = stall_timeout_s
        self.collectives.slots.forget()

    def close(self) -> None:
        serving.unregister(self)
        self.messages.close()
        self.dispatcher.close()
        self.collectives.close()
        self.windows.clear()
        self._gathers = []


def _name(groups: list[list[int]]) -> str:
    """Return the transport's name, the same on every rank."""
    if len(groups) == 1:
        return "shared_memory"
    return "gloo" if all(len(group) == 1 for group in groups) else "mixed"
