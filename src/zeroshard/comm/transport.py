"""The one protocol between the engine and the wire.

The engine knows two kinds of memory that other ranks take part in, and both are made by the
transport, because a transport may be able to let a peer read them where they lie:

* a **window** holds the resting shards of one segment: every rank owns the slice ``ranges[rank]``
  of one logical buffer. ``gather`` brings the peers' slices together (all-gather). A window may
  rest *replicated* (the whole buffer is here, our slice of it is ours to write and the others'
  slices are brought up to date by ``gather``), or *sharded* (only our slice is here).
* a **gradient buffer** is a temporary whole-segment buffer out of a bounded pool. ``reduce``
  submits it: every rank ends with the sum over ranks of its own slice (reduce-scatter), and the
  buffer returns to the pool by itself.

The reduction is the tree of ``comm/ordered.py``, in fp32: over the ranks of each node, and over the
nodes; in a run with leaves, over these.

Invariants. Every call returns a Work or is small and blocking. Nothing here divides by the number
of ranks. A slice of a window is only written between ``begin_write()`` (all ranks have finished
reading) and ``window.publish()`` (all ranks may read again). Payload bytes are counted in
``Transport.traffic`` by (operation, link class), once, here.

Cost per rank, N equal shares, buffer of B bytes: ``gather`` and ``reduce`` receive (and send)
``B (N-1)/N`` each.

    call           CPU ranks of one host and of several    NCCL (native_transport.py)
    window.gather  cpu/windows.py PairedWindow.gather      none: the engine calls all_gather
    all_gather     cpu/collectives.py Collectives          NativeTransport.all_gather
    reduce         cpu/collectives.py Collectives          NativeTransport.reduce
    grad_buffer    cpu/collectives.py, slots.py SlotPool   NativeTransport.grad_buffer
    begin_write    cpu/windows.py Windows.begin_write      NativeTransport.begin_write
    progress       cpu/control.py PeerControl.progress     nothing to do

One process alone: select.py OneProcess.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from zeroshard.comm.ranks import Ranks
from zeroshard.core.digest import Digest
from zeroshard.core.layout import Range, end_of
from zeroshard.core.placement import Mesh
from zeroshard.core.tree import Expression
from zeroshard.core.wire import BlockCodec
from zeroshard.core.work import DoneWork, Work
from zeroshard.errors import ZeroshardError

__all__ = [
    "CommSpec", "DoneWork", "ReduceRequest", "Served", "Traffic", "Transport",
    "Window", "Work", "serve", "serve_while_waiting", "served_beside", "stop_serving",
]  # fmt: skip


@dataclass(frozen=True)
class CommSpec:
    """The request for a transport; every rank gives an equal one."""

    mesh: Mesh  # of the group's ranks: its nodes shape the sum
    # "auto" takes what fits the device; "one_process", "shared_memory", "gloo", "mixed" and "nccl"
    # are made or refused
    name: str = "auto"
    # sum by the tree also where the backend has a faster sum of its own
    ordered: bool | None = None
    separate_reduce_group: bool = False  # NCCL's: else gathers and reduces share a communicator
    stall_timeout_s: float = 300.0
    # of the gradient buffers; at least one is always given; None: twice the largest
    pool_bytes: int | None = None
    # let sharded windows of one host be one mapping, which is the full buffer
    alias: bool = True
    # collectives go in two levels, inside nodes and between; None: where fewer bytes leave a host
    two_level: bool | None = None
    columns: bool = False  # the row keeps columns
    node_sums: bool = False  # the row keeps sums of nodes
    hop_dtype: torch.dtype = torch.float32  # in which sums of nodes travel
    made: Callable[[Ranks], None] | None = None  # is told of each control plane
    # what errors call the ranks; (): their numbers in the group
    members: tuple[int, ...] = ()


class Window(Protocol):
    """The resting shards of one segment, one slice per rank."""

    key: str
    ranges: tuple[Range, ...]
    # [ranges[rank] length] this rank's slice, at rest; ours to write between begin_write() and
    # publish()
    local: torch.Tensor
    # [numel] where the whole buffer rests here: replicated windows, or a mapping of all ranks'
    # shards
    full: torch.Tensor | None
    # full is a mapping of the peers' own memory (or there is no peer): gather moves nothing, nobody
    # may write full
    aliased: bool

    def gather(self, out: torch.Tensor | None = None) -> Work:
        """Bring every rank's slice together in `out` [numel] (default: ``full``, in place).

        Valid once the peers have published as often as we have. With ``aliased`` and no `out` it
        copies nothing.
        """

    def publish(self) -> None:
        """Say that our slice is written and may be read. Never blocks."""

    def close(self) -> None:
        """Release the memory (peers keep theirs). Tensors handed out stay valid as long as
        somebody holds them.
        """


@dataclass(frozen=True)
class ReduceRequest:
    """The sum that a reduce forms, the same on every rank: of buffers in `dtype`; rank r takes the
    elements ``ranges[r]``.

    With `codec` the buffers are encodings of those elements; the edges of `ranges` lie on blocks.
    With `sums`, several sums are formed, each of the ranks that it names: `out` has a row for each,
    and what other ranks send is left out.
    """

    key: str
    ranges: Sequence[Range]
    dtype: torch.dtype
    codec: BlockCodec | None = None
    sums: tuple[Expression, ...] = ()

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of the buffers: uint8 for encodings."""
        return self.dtype if self.codec is None else torch.uint8

    @cached_property
    def wire_numel(self) -> int:
        """The elements of each buffer."""
        return end_of(self.wire_ranges)

    def numel_of(self, rank: int) -> int:
        """Return the elements that `rank` takes, of all sums."""
        start, stop = self.ranges[rank]
        return (stop - start) * max(len(self.sums), 1)

    @cached_property
    def wire_ranges(self) -> Sequence[Range]:
        """The ranges, counted in elements of the buffers."""
        codec = self.codec
        return self.ranges if codec is None else [codec.bytes_of(span) for span in self.ranges]


@dataclass
class Traffic:
    """Payload bytes received from other ranks and calls, by (operation, link class): the one
    place where they are counted.
    """

    bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    # by operation: of these bytes, those from other nodes of the mesh
    between: dict[str, int] = field(default_factory=dict)

    def add(self, operation: str, link: str, num_bytes: int, *, between: int = 0) -> None:
        """Count `num_bytes` of payload of one call of `operation` ("all_gather", "reduce_scatter",
        ...) over `link`, `between` of them from other nodes.

        Links are "shared_memory", "mapped", "gloo", "nccl" and "local". "mapped" is what an aliased
        gather made readable without moving it, so that sums over links mean the same on every
        transport.
        """
        key = (operation, link)
        self.bytes[key] = self.bytes.get(key, 0) + num_bytes
        self.calls[key] = self.calls.get(key, 0) + 1
        self.between[operation] = self.between.get(operation, 0) + between

    def reset(self) -> None:
        """Set all counts to zero."""
        self.bytes.clear()
        self.calls.clear()
        self.between.clear()


class Transport(Protocol):
    """The exchange of bytes between the ranks of one group. Made collectively, with the same
    arguments on every rank.
    """

    name: str  # "one_process", "shared_memory", "gloo", "mixed", "nccl"
    rank: int
    size: int
    # gathers need nothing from the peer's program: ranks may gather different units at different
    # times
    one_sided: bool
    keyed: bool  # operations meet by key; else all of them meet in the order in which they begin
    traffic: Traffic
    # adds up a tensor of the device over all ranks, in place, as an operation of the current
    # stream; None where the host waits for collectives
    device_sum: Callable[[torch.Tensor], None] | None

    @property
    def control(self) -> Ranks:
        """The same ranks, for small messages, which never touch a device."""

    def window(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> Window:
        """Allocate one segment's resting memory (collective; zero-filled). `key` is unique among
        live windows and names it in errors.
        """

    def register(self, key: str) -> None:
        """Assign `key` a number, in the same order on all ranks. Unregistered keys are hashed; the
        keys of windows are registered.
        """

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Borrow a buffer [numel] from the pool, its contents undefined.

        Where the pool is full, wait for a reduce under way and serve the peers meanwhile; never
        deadlocks, even when ranks run units in opposite order and the pool holds one buffer.
        """

    def return_buffer(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool that was never submitted to `reduce`."""

    def reduce(
        self,
        request: ReduceRequest,
        buffer: torch.Tensor | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> Work:
        """Sum every rank's buffer over ranks by the tree, and store (or add) our slice of it in
        `out`.

        Encoded parts are decoded and added in fp32, in the same order but for the nodes of a flat
        exchange.

        The n-th reduce of one key on this rank meets the n-th of the same key on every other
        rank. `buffer` None contributes zeros. `out` [ranges[rank] length], with ``request.sums``
        [sums x length], is fp32 (or the dtype in which gradients rest); it must not be touched
        before the Work is waited for. Sums are formed in fp32.
        """

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        """Bring every rank's `local` [ranges[rank] length], memory that is no window, together
        in `out` [numel].

        `local` may be our own slice of `out`. The n-th call of one key meets the n-th on every
        other rank. Neither may be touched before the Work is waited for.
        """

    def begin_write(self) -> None:
        """Return when every rank has called it: all reads of all windows are over, slices may be
        written.
        """

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Copy `tensor` from rank `source` of the group into every other rank's, in place.
        Blocking.
        """

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None:
        """Watch for stalls where no host waits for collectives: errors say what every rank has
        entered last, by its `digest`. `is_idle`: whether all collectives of this rank have ended.
        """

    @property
    def progress(self) -> Callable[[], None] | None:
        """Takes note of what has arrived and does the sums that have become possible. Never blocks.
        None where that goes on by itself.
        """

    def give_up(self) -> None:
        """After an exception: leave everything under way. The other ranks' waits for this one
        raise StateError. Never blocks.
        """

    def abandon(self) -> None:
        """`give_up`, meet the other ranks, which must come, too, and be usable again.
        Collective.
        """

    def close(self) -> None:
        """Release threads, sockets and memory. Idempotent."""


class Served(Protocol):
    """Work that needs our attention while we wait in another transport: peers need our part of what
    is under way, in whatever transport of ours it is.

    Two engines in one backward may have one rank wait in the first for a rank that waits in the
    second; an operation of two levels needs the second one started. So a wait in one transport
    serves all others.
    """

    @property
    def is_waiting(self) -> bool:
        """Whether there is, or may come, anything to do."""

    @property
    def descriptors(self) -> Sequence[int]:
        """Become readable when there is, but for what another one that is served makes possible."""

    def serve(self) -> None:
        """Do what has become possible."""


_served: weakref.WeakSet[Served] = weakref.WeakSet()


def serve_while_waiting(transport: Served) -> None:
    """Have `transport` served by every wait of this process, for as long as somebody holds it."""
    _served.add(transport)


def stop_serving(transport: Served) -> None:
    """Stop serving `transport`. Idempotent."""
    _served.discard(transport)


def served_beside(transport: Served) -> list[Served]:
    """Return those that a wait in `transport` has to serve."""
    return [other for other in _served if other is not transport and other.is_waiting]


def serve(transports: Iterable[Served]) -> None:
    """Do what has become possible in `transports`, on which the caller does not wait. Never blocks.

    What goes wrong there is not the error of who waits here: its own waits meet it again.
    """
    for transport in transports:
        with contextlib.suppress(ZeroshardError):
            transport.serve()
