"""Windows of ranks that are near (mapped memory), far (messages), or both.

How the slices of a 3-rank window rest, and what `gather` costs::

    sharded, all near          one memfd | rank 0 | rank 1 | rank 2 | mapped by all *is* full
                               (aliased): gather copies nothing
    sharded, otherwise         a memfd per rank, of its slice; near peers map it; gather copies near
                               slices, receives far ones
    replicated                 a memfd per rank, of the whole buffer; near peers map it, and publish
                               copies our slice into theirs
    without near peers         private memory; all slices are received

Invariant: a slice is written only between `begin_write` (every near rank has finished reading) and
`publish`, which raises its epoch; a gather copies from a near peer once that peer has published as
often as we have, and checks that the epoch did not move meanwhile. Of a replicated window nobody
reads a peer's memory: from `publish` on what a rank has belongs to its user, who may write to it.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.comm import memfd
from zeroshard.comm.cpu.control import PeerControl, PeerOperation, Plane
from zeroshard.comm.cpu.gloo_peers import ALL_GATHER, Transfer
from zeroshard.comm.cpu.links import Message, MessageKind
from zeroshard.comm.levels import private
from zeroshard.comm.transport import Work
from zeroshard.core.layout import Range, end_of
from zeroshard.core.work import DoneWork
from zeroshard.errors import ConfigError, StateError

_OVER = DoneWork()


@dataclass(frozen=True)
class _WindowMemory:
    """The memory of a window, as this rank sees it."""

    full: torch.Tensor | None
    local: torch.Tensor
    # the near peers' mapped slices, where they are not part of full already; of a replicated window
    # where our slice lies in their memory
    near: Mapping[int, torch.Tensor] = field(default_factory=dict)
    aliased: bool = False


@dataclass(frozen=True)
class _Offer:
    """A rank's memory for a window, or why there is none."""

    fd: int | None
    num_bytes: int
    reason: str

    def close(self) -> None:
        """Close the descriptor; mappings stay."""
        if self.fd is not None:
            os.close(self.fd)


class Windows(Plane):
    """The windows of one rank, and the gathers under way in them.

    `alias` lets sharded windows of one host be one mapping, which is the full buffer.
    """

    def __init__(
        self, control: PeerControl, *, alias: bool, sums: Mapping[tuple[str, int], object]
    ) -> None:
        """`sums`: the reduces under way, which go on where a gather begins."""
        self.control = control
        self.sums = sums
        self._alias = alias
        self._memory: dict[tuple[int, int], _Offer] = {}  # (window serial, rank)
        # window serial -> near rank -> times published
        self._epochs: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._reads: dict[int, int] = {}  # rank -> begin_writes
        self._num_windows = 0
        self._num_writes = 0
        self._windows: dict[int, PairedWindow] = {}
        self._gathers: list[GatherWork] = []
        control.dispatcher.on(
            {
                MessageKind.WINDOW: self._take_memory,
                MessageKind.PUBLISHED: self._take_epoch,
                MessageKind.READ: self._take_read,
            }
        )
        control.attach(self)

    def _take_memory(self, message: Message) -> None:
        memory = _Offer(message.fd, message.b, message.tail.decode())
        self._memory[message.a, message.peer] = memory

    def _take_epoch(self, message: Message) -> None:
        self._epochs[message.a][message.peer] = message.b

    def _take_read(self, message: Message) -> None:
        self._reads[message.peer] = message.a

    def make(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> PairedWindow:
        """Allocate a window and map the near peers' memory. Collective; memory that is short on
        one rank is a ConfigError on every rank.
        """
        assert len(ranges) == self.control.size, (key, ranges, self.control.size)
        ranges, call = tuple(ranges), f"the making of window {key}"
        cut = hashlib.blake2b(str(list(ranges)).encode(), digest_size=8).hexdigest()
        kind = f"{dtype}, {'replicated' if replicated else 'sharded'}, cut {cut}"
        self.control.quietly.agree({f"window {key}": kind}, call)
        self.control.messages.register(key)
        serial = self._num_windows
        self._num_windows += 1
        if not self.control.near:
            rank = self.control.rank
            memory = _WindowMemory(*private(ranges, rank, dtype, device, replicated=replicated))
        elif device.type != "cpu":
            raise ConfigError(f"window {key}: shared memory serves CPU tensors, not {device}")
        elif not replicated and self._alias and not self.control.far:
            memory = self._map_one(key, serial, ranges, dtype)
        else:
            memory = self._map_each(key, serial, ranges, dtype, replicated)
        epochs = self._epochs[serial]
        window = self._windows[serial] = PairedWindow(self, key, serial, ranges, memory, epochs)
        return window

    def _map_one(
        self, key: str, serial: int, ranges: tuple[Range, ...], dtype: torch.dtype
    ) -> _WindowMemory:
        """One memfd, made by the first rank and mapped by all; each reserves its own part, near
        its own processor.
        """
        num_bytes = end_of(ranges) * dtype.itemsize
        if self.control.rank == 0:
            own = self._offer(serial, num_bytes, reserved=False)
        else:
            own = self._memory_of(key, serial, [0])[0]
        start, stop = (edge * dtype.itemsize for edge in ranges[self.control.rank])
        reason = own.reason if self.control.rank == 0 else ""
        if own.fd is not None:
            try:
                memfd.reserve(own.fd, start, stop)
            except OSError as error:
                reason = str(error)
        self._agree_on_memory(key, num_bytes, [own], reason)
        assert own.fd is not None, own
        full = memfd.map_bytes(own.fd, num_bytes).view(dtype)
        own.close()
        return _WindowMemory(full, full[slice(*ranges[self.control.rank])], aliased=True)

    def _map_each(
        self,
        key: str,
        serial: int,
        ranges: tuple[Range, ...],
        dtype: torch.dtype,
        replicated: bool,
    ) -> _WindowMemory:
        """A memfd per rank, of its slice or (replicated) of the whole buffer."""
        start, stop = ranges[self.control.rank]
        num_bytes = (end_of(ranges) if replicated else stop - start) * dtype.itemsize
        own = self._offer(serial, num_bytes, reserved=True)
        theirs = self._memory_of(key, serial, self.control.near)
        self._agree_on_memory(key, num_bytes, [own, *theirs], own.reason)
        whole, *mapped = (
            memfd.map_bytes(memory.fd, memory.num_bytes).view(dtype)
            for memory in (own, *theirs)
            if memory.fd is not None
        )
        for memory in (own, *theirs):
            memory.close()
        near = dict(zip(self.control.near, mapped, strict=True))
        if not replicated:
            return _WindowMemory(None, whole, near)
        ours = {peer: data[start:stop] for peer, data in near.items()}
        return _WindowMemory(whole, whole[start:stop], ours)

    def _offer(self, serial: int, num_bytes: int, *, reserved: bool) -> _Offer:
        """Make memory and send its descriptor to the near peers, or why there is none."""
        try:
            own = _Offer(memfd.create(num_bytes, reserved=reserved), num_bytes, "")
        except OSError as error:
            own = _Offer(None, 0, str(error))
        self.control.dispatcher.send(
            MessageKind.WINDOW, serial, num_bytes, fd=own.fd, tail=own.reason.encode()
        )
        return own

    def _memory_of(self, key: str, serial: int, peers: Sequence[int]) -> list[_Offer]:
        """Return what `peers` offer, once all of it is here."""

        def missing() -> set[int]:
            return {peer for peer in peers if (serial, peer) not in self._memory}

        what = f"making of window {key}"
        self.control.wait_until(lambda: not missing(), what, near=missing, call=f"the {what}")
        return [self._memory.pop((serial, peer)) for peer in peers]

    def _agree_on_memory(
        self, key: str, num_bytes: int, memories: list[_Offer], reason: str
    ) -> None:
        """Raise ConfigError on every rank when any rank has a `reason` why it lacks memory; closes
        the descriptors then.
        """
        call = f"the making of window {key}"
        reasons = self.control.quietly.share(reason, call)
        short = [rank for rank, text in enumerate(reasons) if text]
        if short:
            for memory in memories:
                memory.close()
            raise ConfigError(
                f"window {key}: no shared memory for {num_bytes} bytes on rank(s)"
                f" {short} ({reasons[short[0]]})"
            )

    def start(self, work: GatherWork) -> None:
        """Track a gather that has begun."""
        self._gathers.append(work)
        self.control.progress()

    def begin_write(self) -> None:
        """Return when every near rank has called it: all reads of all windows are over."""
        for work in list(self._gathers):
            work.wait()
        self._num_writes += 1
        self.control.dispatcher.send(MessageKind.READ, self._num_writes)

        def missing() -> set[int]:
            return {
                peer for peer in self.control.near if self._reads.get(peer, 0) < self._num_writes
            }

        what, call = "waiting for all ranks to finish reading", "the writing of new weights"
        self.control.wait_until(lambda: not missing(), what, near=missing, call=call)

    def progress(self) -> None:
        if self._gathers:
            self._gathers = [work for work in self._gathers if not work.advance()]

    def reset(self) -> None:
        self._gathers, self._num_writes, self._reads = [], 0, {}
        for epochs in self._epochs.values():
            epochs.clear()
        for window in self._windows.values():
            window.epoch = 0

    def remove(self, window: PairedWindow) -> None:
        """Stop tracking a window that is closed."""
        self._windows.pop(window.serial, None)
        self._epochs.pop(window.serial, None)

    def close(self) -> None:
        self._windows.clear()
        self._gathers = []
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()


class PairedWindow:
    """One segment's shards."""

    def __init__(
        self,
        windows: Windows,
        key: str,
        serial: int,
        ranges: tuple[Range, ...],
        memory: _WindowMemory,
        epochs: Mapping[int, int],
    ) -> None:
        """`epochs`: how often each near peer has published it."""
        self.key = key
        self.ranges = ranges
        self.full = memory.full
        self.local = memory.local
        self.aliased = memory.aliased
        self.serial = serial
        self.epoch = 0
        self._near = memory.near
        self._windows = windows
        self._control = windows.control
        self._epochs = epochs
        self._owners = [rank for rank in self._control.near if ranges[rank][1] > ranges[rank][0]]
        # what a gather brings here. What is mapped moves nothing, but is what other transports
        # would have moved
        size = memory.local.element_size()
        self._bytes_of = {rank: size * (stop - start) for rank, (start, stop) in enumerate(ranges)}

    def gather(self, out: torch.Tensor | None = None) -> Work:
        target = self.full if out is None else out
        if target is None:
            raise StateError(f"window {self.key} rests sharded: gather needs `out`")
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (to, from), for near slices
        if self.aliased and target is not self.full:
            assert self.full is not None, self.key
            copies = [(target, self.full)]
        elif target is not self.full:
            for peer, slot in self._near.items():
                span = slice(*self.ranges[peer])
                copies.append((target[span], slot if self.full is None else self.full[span]))
            target[slice(*self.ranges[self._control.rank])].copy_(self.local)
        far, transfer = self._control.far, None
        if far:
            messages = self._control.messages
            receives = {peer: target[slice(*self.ranges[peer])] for peer in far}
            tag, sends = messages.tag(self.key, ALL_GATHER), dict.fromkeys(far, self.local)
            transfer = messages.post(f"gather of {self.key}", tag, sends, receives)
        link = "shared_memory" if copies or self._near else "mapped"
        self._control.count("all_gather", self._bytes_of, near=link)
        if not (copies or far or self.unpublished(self.epoch)):
            if self._windows.sums:
                self._control.progress()
            return _OVER
        work = GatherWork(self._control, self, copies, transfer)
        self._windows.start(work)
        return work

    def publish(self) -> None:
        if self.full is not None:  # else peers copy our slice when they need it
            for theirs in self._near.values():
                theirs.copy_(self.local)
        self.epoch += 1
        self._control.dispatcher.send(MessageKind.PUBLISHED, self.serial, self.epoch)

    def peer_epochs(self) -> list[int]:
        """Return how often each near peer that owns something has published."""
        return [self._epochs.get(rank, 0) for rank in self._owners]

    def unpublished(self, epoch: int) -> set[int]:
        """Return the near peers that own something and have not published `epoch` times."""
        return {rank for rank in self._owners if self._epochs.get(rank, 0) < epoch}

    def close(self) -> None:
        self._windows.remove(self)
        self.full, self.local, self._near = None, torch.empty(0), {}


class GatherWork(PeerOperation):
    """A gather under way: near slices are copied once published, far ones arrive by themselves."""

    def __init__(
        self,
        control: PeerControl,
        window: PairedWindow,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        transfer: Transfer | None,
    ) -> None:
        what, epoch = f"gather of {window.key}", window.epoch
        super().__init__(control, f"{what} (epoch {epoch})", f"the {what}", transfer)
        self._window = window
        self._epoch = epoch
        self._copies = copies
        self._near_done = False
        self._far_done = transfer is None

    def is_over(self) -> bool:
        return self._near_done and self._far_done

    def missing(self) -> set[int]:
        return set() if self._near_done else self._window.unpublished(self._epoch)

    def advance(self) -> bool:
        """Do what has become possible; return whether the gather is over."""
        if not self._near_done and not self._window.unpublished(self._epoch):
            before = self._window.peer_epochs()
            for target, source in self._copies:
                target.copy_(source)
            self._control.dispatcher.collect(0.0)
            if self._window.peer_epochs() != before:
                raise StateError(
                    f"gather of {self._window.key}: a slice was published during the copy; call"
                    " begin_write() before writing"
                )
            self._near_done = True
            self._copies = []
        if not self._far_done and self.transfer is not None and self.transfer.done():
            self.transfer.finish()
            self._far_done = True
        return self.is_over()
