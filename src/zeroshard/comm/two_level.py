"""Two levels: exchanges between nodes, among the ranks with one local index, and inside nodes
make up the collectives of the whole mesh.

    gather   SHARD --between--> NODE_SHARD --inside--> FULL
    reduce   FULL --inside--> sum of a node, NODE_SHARD --between--> SHARD

Shares are dealt out column by column (docs/design/traffic.md, with the bytes), so both levels move
contiguous ranges of the buffer and nothing is reordered. Node sums travel in fp32: two levels are
the canonical tree (comm/ordered.py), hop by hop, and give the bits of a flat exchange. Encoded
gradients (ZeRO++, arXiv 2306.10209, section 3.3) are decoded, added in fp32 and encoded again
between the levels.

Invariant: the second level of an operation starts when its first has ended, after those of earlier
operations of its key, so that it meets its peers by key like every operation. `lowering` chooses
flat or two levels per operation, from what all ranks know. Cost beyond a flat exchange: a column of
fp32 per reduce under way, a copy of the column inside the node. It allocates no memory that peers
map: weights rest privately.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from zeroshard.comm import serving
from zeroshard.comm.private_window import PrivateWindow
from zeroshard.comm.transport import GradBuffer, ReduceRequest, Traffic, Transport, Window, Work
from zeroshard.core.cost import all_gather, cheapest, reduce_scatter
from zeroshard.core.digest import Digest
from zeroshard.core.layout import Range, end_of
from zeroshard.core.placement import Mesh, Scope
from zeroshard.core.route import Axis
from zeroshard.memory import Pool

__all__ = ["ColumnWindow", "Lowering", "TwoLevelTransport", "gather_over", "mesh_of"]


@dataclass(frozen=True)
class Lowering:
    """Which operations go in two levels: all (`two_level` True), none, or (None) those that move
    fewer bytes between nodes so.
    """

    mesh: Mesh
    two_level: bool | None = None
    node_sums: bool = False  # the row keeps sums of nodes: reduces always do
    # in which node sums travel; another than fp32 rounds them
    hop_dtype: torch.dtype = torch.float32

    @cached_property
    def ever(self) -> bool:
        """Whether any operation does."""
        return self.gathers or any(self.reduces(dtype) for dtype in (torch.float32, torch.bfloat16))

    @property
    def gather_axes(self) -> tuple[Axis, ...]:
        """The levels of a gather over all ranks."""
        return (Axis.NODE, Axis.LOCAL) if self.gathers else (Axis.FLAT,)

    @cached_property
    def gathers(self) -> bool:
        """Whether gathers do."""
        if self.two_level is not None:
            return self.two_level
        flat, deep = (
            all_gather(self.mesh, Scope.SHARD, Scope.FULL, 1.0, two_level=levels)
            for levels in (False, True)
        )
        return cheapest(flat, deep)

    def reduces(self, wire_dtype: torch.dtype) -> bool:
        """Whether reduces of buffers in `wire_dtype` (uint8: encoded, as node sums are then) do."""
        if self.node_sums or self.two_level is not None:
            return self.node_sums or bool(self.two_level)
        whole = float(wire_dtype.itemsize)
        hop = whole if wire_dtype is torch.uint8 else float(self.hop_dtype.itemsize)
        flat, deep = (
            reduce_scatter(self.mesh, Scope.SHARD, whole, hop, two_level=levels)
            for levels in (False, True)
        )
        return cheapest(flat, deep)


@functools.lru_cache(maxsize=4096)  # a segment's ranges, each time that it is gathered or reduced
def _columns_of(
    mesh: Mesh, rank: int, ranges: tuple[Range, ...]
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Return the range of every column, and the ranges of the ranks of `rank`'s column inside it,
    in node order.
    """
    columns = []
    for local in range(mesh.node_size):
        members = [ranges[member] for member in mesh.column(local)]
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(members)), (
            local,
            ranges,
        )
        columns.append((members[0][0], members[-1][1]))
    base = columns[rank % mesh.node_size][0]
    own = ((ranges[member][0] - base, ranges[member][1] - base) for member in mesh.column(rank))
    return tuple(columns), tuple(own)


class TwoLevelTransport:
    """The Transport of a mesh, out of those of all ranks (`flat`), of this node (`inside`) and
    of this column (`between`).
    """

    def __init__(
        self,
        flat: Transport,
        inside: Transport,
        between: Transport,
        *,
        mesh: Mesh,
        lowering: Lowering,
    ) -> None:
        assert (flat.size, inside.size, between.size) == (
            mesh.size,
            mesh.node_size,
            mesh.num_nodes,
        ), mesh
        self.name = f"{inside.name} in nodes, {between.name} between"
        self.rank = flat.rank
        self.size = flat.size
        self.one_sided = False
        self.keyed = inside.keyed and between.keyed
        self.traffic: Traffic = flat.traffic
        self.control = flat.control
        self.mesh = mesh
        self.lowering = lowering
        self._flat = flat
        self._inside = inside
        self._between = between
        # which transport takes whole buffers of a dtype
        self._reducers: dict[torch.dtype, Transport] = {}
        self._under_way: list[_Chain] = []
        # columns of node sums on their way into an encoding; as many as reduces are under way
        self._sums = Pool()
        serving.register(self)

    @property
    def stall_timeout_s(self) -> float:
        """Seconds until a wait raises StallError, on both levels."""
        return self._flat.stall_timeout_s

    @stall_timeout_s.setter
    def stall_timeout_s(self, seconds: float) -> None:
        for transport in (self._flat, self._inside, self._between):
            transport.stall_timeout_s = seconds

    # -------------------------------------------------------------------------------------- gathers

    def window(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> PrivateWindow:
        self._prepare(key, ranges, dtype, "replicated" if replicated else "sharded")
        return PrivateWindow(self, key, ranges, dtype, device, replicated=replicated)

    def _prepare(self, key: str, ranges: Sequence[Range], dtype: torch.dtype, kind: str) -> None:
        """Make `key` known. Raises PlanMismatch where the ranks ask for another key, cut, dtype
        or placement.
        """
        assert len(ranges) == self.size, (key, ranges, self.size)
        told = {f"window {key}": f"{list(ranges)} {dtype} {kind}"}
        self.control.agree(told, f"the making of window {key}")
        self.register(key)

    def register(self, key: str) -> None:
        for transport in (self._flat, self._inside, self._between):
            transport.register(key)

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        return self.gather(self.lowering.gather_axes, key, local, ranges, out)

    def gather(
        self,
        axes: tuple[Axis, ...],
        key: str,
        local: torch.Tensor,
        ranges: Sequence[Range],
        out: torch.Tensor,
    ) -> Work:
        """Bring together what the ranks of `axes` hold, in this order; as `all_gather` otherwise.

        Over NODE alone `out` is this rank's column, over LOCAL alone `local` is.
        """
        if axes == (Axis.FLAT,):
            return self._begin(
                f"gather {key}", lambda: self._flat.all_gather(key, local, ranges, out)
            )
        columns, own = self._columns(ranges)
        column = local if axes[0] is Axis.LOCAL else out
        if axes == (Axis.NODE, Axis.LOCAL):
            column = out[slice(*columns[self._inside.rank])]
        stages = {
            Axis.NODE: lambda: self._between.all_gather(key, local, own, column),
            Axis.LOCAL: lambda: self._inside.all_gather(key, column, columns, out),
        }
        return self._begin(f"gather {key}", *(stages[axis] for axis in axes))

    def column_window(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        written: Scope,
    ) -> ColumnWindow:
        """Allocate one segment's resting memory where a rank keeps its column; it writes
        `written` of it: SHARD, or all of it.
        """
        self._prepare(key, ranges, dtype, "by columns")
        columns, own = self._columns(ranges)
        inner = self._inside.window(key, columns, dtype, device, replicated=False)
        return ColumnWindow(self, inner, tuple(ranges), own[self._between.rank], written)

    def _columns(self, ranges: Sequence[Range]) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Return `_columns_of` this rank's `ranges`."""
        return _columns_of(self.mesh, self.rank, tuple(ranges))

    def begin_write(self) -> None:
        for chain in [chain for chain in self._under_way if chain.key.startswith("gather ")]:
            chain.wait()
        self._flat.begin_write()
        self._inside.begin_write()

    # -------------------------------------------------------------------------------------- reduces

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> GradBuffer:
        return self._reducer(dtype).grad_buffer(key, numel, dtype, device)

    def return_buffer(self, buffer: GradBuffer) -> None:
        self._reducer(buffer.data.dtype).return_buffer(buffer)

    def _reducer(self, dtype: torch.dtype) -> Transport:
        """Return the transport that takes whole buffers of `dtype`."""
        if dtype not in self._reducers:
            self._reducers[dtype] = self._inside if self.lowering.reduces(dtype) else self._flat
        return self._reducers[dtype]

    def reduce(
        self,
        request: ReduceRequest,
        buffer: GradBuffer | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
        partial: torch.Tensor | None = None,
    ) -> Work:
        """As the protocol says; `partial`, where reduces go in two levels, is an earlier sum of
        this node (our column), added to this one.
        """
        if self._reducer(request.wire_dtype) is self._flat:
            assert partial is None, request
            return self._flat.reduce(request, buffer, out, accumulate=accumulate)
        key, codec = request.key, request.codec
        columns, own = self._columns(request.ranges)
        of_columns = replace(request, ranges=columns)
        of_shards = ReduceRequest(key, own, self.lowering.hop_dtype, codec)
        hop = self._between.grad_buffer(
            key, end_of(of_shards.wire_ranges), of_shards.wire_dtype, out.device
        )
        column = (
            hop.data if codec is None else self._sums.take(end_of(own), torch.float32, out.device)
        )

        def inside() -> Work:
            return self._inside.reduce(of_columns, buffer, column, accumulate=False)

        def between() -> Work:
            if partial is not None:
                column.add_(partial)
            if codec is not None:
                codec.encode(column, hop.data)
                self._sums.give(column)
            return self._between.reduce(of_shards, hop, out, accumulate=accumulate)

        return self._begin(
            f"reduce {key}", inside, between, unused=lambda: self._between.return_buffer(hop)
        )

    def reduce_inside(
        self,
        request: ReduceRequest,
        buffer: GradBuffer | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> Work:
        """Sum the buffers of this node's ranks, and store (or add) our column of it in `out`; as
        `reduce` otherwise.
        """
        columns, _ = self._columns(request.ranges)
        of_columns = replace(request, ranges=columns)
        return self._begin(
            f"reduce {request.key}",
            lambda: self._inside.reduce(of_columns, buffer, out, accumulate=accumulate),
        )

    # --------------------------------------------------------------------------------- small things

    def _begin(
        self, key: str, *stages: Callable[[], Work], unused: Callable[[], None] = lambda: None
    ) -> Work:
        self.serve()
        before = next((chain for chain in reversed(self._under_way) if chain.key == key), None)
        chain = _Chain(key, stages, before=before, unused=unused)
        self._under_way.append(chain)
        if not self.keyed:
            # enqueued behind one another, at a time that is the same on every rank
            chain.start_all()
        return chain

    @property
    def is_waiting(self) -> bool:
        return bool(self._under_way)

    def serve(self) -> None:
        """Start every second level that has become possible."""
        self._under_way = [chain for chain in self._under_way if not chain.advance()]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self._flat.broadcast(tensor, source)

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None:
        self._flat.watch(digest, is_idle)

    def progress(self) -> None:
        for transport in (self._flat, self._inside, self._between):
            transport.progress()
        self.serve()

    def give_up(self) -> None:
        left, self._under_way = self._under_way, []
        for chain in left:
            chain.abandon()
        for transport in (self._inside, self._between, self._flat):
            transport.give_up()

    def abandon(self) -> None:
        self.give_up()  # in all three, before this rank waits in one of them
        for transport in (self._inside, self._between, self._flat):
            transport.abandon()

    def close(self) -> None:
        serving.unregister(self)
        self._under_way = []
        for transport in (self._inside, self._between, self._flat):
            transport.close()


def mesh_of(transport: Transport) -> TwoLevelTransport:
    """Return `transport`, which serves a mesh of nodes: rows with columns have no other."""
    assert isinstance(transport, TwoLevelTransport), transport.name
    return transport


def gather_over(
    transport: Transport,
    axes: tuple[Axis, ...],
    key: str,
    local: torch.Tensor,
    ranges: Sequence[Range],
    out: torch.Tensor,
) -> Work:
    """Start the gather of `transport` over `axes`."""
    if axes == (Axis.FLAT,) and not isinstance(transport, TwoLevelTransport):
        return transport.all_gather(key, local, ranges, out)
    return mesh_of(transport).gather(axes, key, local, ranges, out)


class ColumnWindow:
    """A rank's column, in memory that its node's ranks may be able to read where it lies (`inner`).

    Where a rank writes only its shard, `publish` starts bringing the other nodes' shards, and the
    next gather tells this node when they are here.
    """

    def __init__(
        self,
        transport: TwoLevelTransport,
        inner: Window,
        ranges: tuple[Range, ...],
        own: Range,
        written: Scope,
    ) -> None:
        self.key = inner.key
        self.ranges = ranges
        self.rest = inner.local
        self.local = inner.local[slice(*own)]
        self.full = inner.full
        self.aliased = inner.aliased
        self._transport = transport
        self._inner = inner
        self._written = written
        self._coming: Work | None = None

    def gather(self, out: torch.Tensor | None = None) -> Work:
        self.wait_published()
        return self._inner.gather(out)

    def publish(self) -> None:
        self.wait_published()
        if self._written is Scope.SHARD:
            self._coming = self._transport.gather(
                (Axis.NODE,), self.key, self.local, self.ranges, self.rest
            )
        else:
            self._inner.publish()

    def wait_published(self) -> None:
        """Return when what the other nodes have published is here."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
            self._inner.publish()

    def close(self) -> None:
        self._inner.close()
        self.full, self.local, self.rest = None, torch.empty(0), torch.empty(0)


class _Chain:
    """Operations of one key of which each starts when the one before has ended, and after its
    like of the chain `before` this one.
    """

    def __init__(
        self,
        key: str,
        stages: Sequence[Callable[[], Work]],
        *,
        before: _Chain | None,
        unused: Callable[[], None],
    ) -> None:
        self.key = key
        self._before = before
        self._unused = unused  # gives back what a last stage that never started would have taken
        self._stages = deque(stages)
        self._starting = False
        self._start()

    def _start(self) -> None:
        self._starting = True  # it may wait for memory, and serve us meanwhile
        self._work = self._stages.popleft()()
        self._starting = False
        if not self._stages:
            self._before = None

    @property
    def is_over(self) -> bool:
        return self._all_started and self._work.done()

    @property
    def _all_started(self) -> bool:
        return not self._starting and not self._stages

    def advance(self) -> bool:
        """Start what can start; return whether everything has ended."""
        while (
            not self._starting
            and self._stages
            and self._work.done()
            and (self._before is None or self._before._all_started)
        ):
            self._work.wait()
            self._start()
        return self.is_over

    def start_all(self) -> None:
        """Return when every stage has started."""
        while self._stages:
            work = self._work
            work.wait()  # serves us, too: the next stage may have started
            if self._before is not None:
                self._before.start_all()
            if self._stages and work is self._work:
                self._start()

    def wait(self) -> None:
        self.start_all()
        self._work.wait()

    def done(self) -> bool:
        return self.advance()

    def abandon(self) -> None:
        if self._stages:
            self._stages.clear()
            self._unused()
