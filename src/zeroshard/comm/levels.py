"""The transports of a mesh by axis: over all ranks at once, inside a node, and between nodes.

    gather   SHARD --between--> NODE_SHARD --inside--> FULL
    reduce   FULL --inside--> sum of a node, NODE_SHARD --between--> SHARD

A route says over which axes a collective runs (core/route); a hop over an axis is one collective of
that axis's transport. Shares are dealt out column by column (docs/design/routes.md, with the
bytes), so every level moves contiguous ranges of the buffer and nothing is reordered. Node sums
travel in fp32: two levels are the tree (comm/ordered.py), hop by hop, and give the bits
of a flat exchange. Encoded gradients (ZeRO++, arXiv 2306.10209, section 3.3) are decoded, added in
fp32 and encoded again between the levels.

What starts here is a `ReadyHop`; whoever runs the hops of an operation one after another (a flight,
runtime/flight.py) says so with `follow`, and is served by every wait of the process: the second
level starts as soon as the first has ended. Invariant: operations of one key do not overlap, so
that each level meets its peers by key. Cost beyond a flat exchange: a column of fp32 per reduce
under way, a copy of the column inside the node. It allocates no memory that peers map: weights rest
in a `PrivateWindow`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch

from zeroshard.comm.transport import (
    CommSpec,
    ReduceRequest,
    Transport,
    Window,
    Work,
    serve_while_waiting,
    stop_serving,
)
from zeroshard.core.digest import Digest
from zeroshard.core.layout import Range, end_of
from zeroshard.core.placement import Mesh, Scope
from zeroshard.core.route import Axis
from zeroshard.core.wire import all_gather, goes_deep
from zeroshard.core.work import Operation
from zeroshard.errors import StateError
from zeroshard.memory import Pool


def private(
    ranges: Sequence[Range],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    replicated: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return zeros for the whole buffer where it rests `replicated`, and for `rank`'s slice of
    it.
    """
    start, stop = ranges[rank]
    if not replicated:
        return None, torch.zeros(stop - start, dtype=dtype, device=device)
    full = torch.zeros(end_of(ranges), dtype=dtype, device=device)
    return full, full[start:stop]


class PrivateWindow:
    """One slice per rank, on `device`. Not mapped by peers; gather() is an all-gather."""

    def __init__(
        self,
        transport: Transport,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
        aliased: bool = False,
    ) -> None:
        self.key = key
        self.ranges = tuple(ranges)
        self.aliased = aliased
        self.full, self.local = private(
            self.ranges, transport.rank, dtype, device, replicated=replicated
        )
        self._transport = transport

    def gather(self, out: torch.Tensor | None = None) -> Work:
        target = self.full if out is None else out
        if target is None:
            raise StateError(f"window {self.key} rests sharded: gather needs `out`")
        return self._transport.all_gather(self.key, self.local, self.ranges, target)

    def publish(self) -> None: ...

    def close(self) -> None:
        self.full, self.local = None, torch.empty(0)


# ------------------------------------------------------------------------ collectives by their axis


Start = Callable[[], Work | None]  # None: nothing is left to wait for


@dataclass(frozen=True, slots=True)
class ReadyHop:
    """A hop, or a part of one, ready to be started."""

    start: Start
    # "wire": a collective; "read": of this rank's own tier, which ends at another time on each
    # rank; "copy": another copy between tiers; "here": done once started, with what has been
    # brought
    kind: str = "wire"
    describe: Callable[[], Operation] | None = None  # for a trace
    unused: Callable[[], None] | None = None  # gives back what it was to use, if it never starts
    between: bool = False  # whether it is a collective over nodes, on another wire

    def __repr__(self) -> str:
        return self.kind if self.describe is None else "{0.name} {0.key}".format(self.describe())


class Follower(Work, Protocol):
    """An operation of several collectives under way."""

    def start_all(self) -> None:
        """Start every level, the last one included."""

    def serve(self) -> bool:
        """Start the collective that has become possible; return whether any is left."""

    def leave(self) -> None:
        """Start nothing any more: the transports have given up."""


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


class Levels:
    """The transports of one mesh: of all ranks (`flat`), of this node (`inside`) and of this
    column (`between`). Where everything goes at once, there is the first alone.
    """

    def __init__(
        self,
        flat: Transport,
        inside: Transport | None = None,
        between: Transport | None = None,
        *,
        spec: CommSpec,
    ) -> None:
        self.is_deep = inside is not None
        self.flat = flat
        self.inside = flat if inside is None else inside
        self.between = flat if between is None else between
        self.mesh = mesh = spec.mesh
        if self.is_deep:
            sizes = (flat.size, self.inside.size, self.between.size)
            assert sizes == (mesh.size, mesh.node_size, mesh.num_nodes), (sizes, mesh)
        # what `routes` is asked for
        self.two_level = spec.two_level if self.is_deep else False
        self.node_sums = spec.node_sums and self.is_deep
        self.hop_dtype = spec.hop_dtype if self.is_deep else torch.float32
        self.one_sided = flat.one_sided and not self.is_deep
        self.keyed = all(transport.keyed for transport in self)
        self._followed: list[Follower] = []
        self._published: list[Follower] = []  # operations that writing waits for
        # columns of node sums on their way into an encoding; as many as reduces are under way
        self._sums = Pool()

    def __iter__(self) -> Iterator[Transport]:
        return iter((self.inside, self.between, self.flat) if self.is_deep else (self.flat,))

    @property
    def name(self) -> str:
        """The names of its transports."""
        if not self.is_deep:
            return self.flat.name
        return f"{self.inside.name} in nodes, {self.between.name} between"

    # -------------------------------------------------------------------------------------- windows

    def memory(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        scope: Scope,
    ) -> tuple[Window, torch.Tensor]:
        """Allocate one segment's resting memory; return its window and the `scope` that rests here.
        A column's window is among this node's ranks. See Transport.window. Collective.
        """
        if scope is Scope.NODE_SHARD:
            self._prepare(key, ranges, dtype, "by columns")
            columns = self._columns(ranges)[0]
            window = self.inside.window(key, columns, dtype, device, replicated=False)
            return window, window.local
        replicated = scope is Scope.FULL
        if self.is_deep:
            self._prepare(key, ranges, dtype, "replicated" if replicated else "sharded")
            window = PrivateWindow(self.flat, key, ranges, dtype, device, replicated=replicated)
        else:
            window = self.flat.window(key, ranges, dtype, device, replicated=replicated)
        if scope is Scope.SHARD:
            return window, window.local
        assert window.full is not None, key
        return window, window.full

    def _prepare(self, key: str, ranges: Sequence[Range], dtype: torch.dtype, kind: str) -> None:
        """Make `key` known. Raises PlanMismatch where the ranks ask for another key, cut, dtype
        or placement.
        """
        assert self.is_deep and len(ranges) == self.flat.size, (key, ranges, self.flat.size)
        facts = {f"window {key}": f"{list(ranges)} {dtype} {kind}"}
        self.flat.control.agree(facts, f"the making of window {key}")
        for transport in self:
            transport.register(key)

    def _columns(self, ranges: Sequence[Range]) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """Return `_columns_of` this rank's `ranges`."""
        return _columns_of(self.mesh, self.flat.rank, tuple(ranges))

    def begin_write(self) -> None:
        """Return when every rank has called it; see Transport. What nodes have published is here
        then, and gathers in two levels are over.
        """
        for operation in (*self._published, *self._followed):
            operation.wait()
        self._published = []
        self.flat.begin_write()
        if self.is_deep:
            self.inside.begin_write()

    # -------------------------------------------------------------------------------------- gathers

    def gathers(
        self,
        axes: Sequence[Axis],
        key: str,
        local: torch.Tensor,
        ranges: Sequence[Range],
        out: torch.Tensor,
    ) -> list[Start]:
        """Return the starts of a gather over `axes`, in this order, of what the ranks hold
        (`local`) in `out`; `ranges` are the shares in the whole buffer. Over NODE alone `out` is
        this rank's column, over LOCAL alone `local` is.
        """
        if axes[0] is Axis.FLAT:
            return [partial(self.flat.all_gather, key, local, ranges, out)]
        starts: list[Start] = []
        columns, own = self._columns(ranges)
        if axes[0] is Axis.NODE:
            column = out if len(axes) == 1 else out[slice(*columns[self.inside.rank])]
            starts.append(partial(self.between.all_gather, key, local, own, column))
            local = column
        if axes[-1] is Axis.LOCAL:
            starts.append(partial(self.inside.all_gather, key, local, columns, out))
        return starts

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of a gather of every rank's share, as in `routes`."""
        deep = goes_deep(self.mesh, self.two_level, all_gather, Scope.SHARD, Scope.FULL, 1.0)
        levels = (Axis.NODE, Axis.LOCAL) if deep else (Axis.FLAT,)
        return tuple(axis for axis in levels if axis.num_ranks(self.mesh) > 1) or (Axis.FLAT,)

    # -------------------------------------------------------------------------------------- reduces

    def reduce_inside(self, request: ReduceRequest) -> ReduceRequest:
        """Return what `inside` is asked for in a reduce: each rank takes its column."""
        return replace(request, ranges=self._columns(request.ranges)[0])

    def node_sum(self, request: ReduceRequest) -> NodeSum:
        """Return the reduces of one segment in two levels, one after another."""
        _, own = self._columns(request.ranges)
        of_shards = ReduceRequest(request.key, own, self.hop_dtype, request.codec)
        return NodeSum(self, of_shards, self._sums)

    # ------------------------------------------------------------------------------------ all of it

    def follow(self, operation: Follower) -> None:
        """Serve `operation` until no collective of it is left to start."""
        assert self.is_deep, self.name
        serve_while_waiting(self)
        self._followed.append(operation)

    def hold_writes(self, operation: Follower) -> None:
        """Let `begin_write` wait for `operation`, a publish."""
        self._published.append(operation)

    @property
    def is_waiting(self) -> bool:
        """Whether a second level is still to be started."""
        return bool(self._followed)

    @property
    def descriptors(self) -> Sequence[int]:
        return ()  # the first level's end is heard by the transport that it goes over

    def serve(self) -> None:
        """Start every second level that has become possible."""
        self._followed = [operation for operation in self._followed if operation.serve()]

    def start_all(self) -> None:
        """Return when every collective has started its last level: ranks that wait for it then wait
        for nothing that is still to be done here, where code of the user's may block next.
        """
        for operation in self._followed:
            operation.start_all()

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None:
        """Watch for stalls; see Transport."""
        self.flat.watch(digest, is_idle)

    @cached_property
    def progress(self) -> tuple[Callable[[], None], ...]:
        """The calls that take note of what has arrived. They never block."""
        calls = [transport.progress for transport in self if transport.progress is not None]
        return (*calls, self.serve) if self.is_deep else tuple(calls)

    def give_up(self) -> None:
        """After an exception: leave everything under way; see Transport."""
        left = [*self._published, *self._followed]
        self._published, self._followed = [], []
        for operation in left:
            operation.leave()
        for transport in self:
            transport.give_up()

    def abandon(self) -> None:
        """`give_up` in all, before this rank waits in one of them, and be usable again.
        Collective.
        """
        if self.is_deep:
            self.give_up()
        for transport in self:
            transport.abandon()

    def close(self) -> None:
        """Release threads, sockets and memory. Idempotent."""
        stop_serving(self)
        self._published, self._followed = [], []
        for transport in self:
            transport.close()


@dataclass(frozen=True)
class Transports:
    """The transports of one engine: one of all data parallel ranks, and one for each mesh of
    parameters with a mesh of their own (experts). Methods do what those in Levels do, on each.

    Invariant: what concerns memory that peers read concerns every transport, in the same order on
    every rank; agreements go over `main` alone. A wait in one serves the others (`Served`).
    """

    main: Levels
    own: tuple[Levels, ...] = ()

    def __iter__(self) -> Iterator[Levels]:
        return iter((self.main, *self.own))

    def begin_write(self) -> None:
        """Return when every rank has called it."""
        for levels in self:
            levels.begin_write()

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None:
        """Watch for stalls."""
        for levels in self:
            levels.watch(digest, is_idle)

    @cached_property
    def progress(self) -> tuple[Callable[[], None], ...]:
        """The calls that take note of what has arrived. They never block."""
        return tuple(call for levels in self for call in levels.progress)

    def start_all(self) -> None:
        """Return when every collective has started its last level."""
        for levels in self:
            levels.start_all()

    def abandon(self) -> None:
        """After an exception: give up in all, before this rank waits in one of them."""
        if self.own:
            for levels in self:
                levels.give_up()
        for levels in self:
            levels.abandon()

    def close(self) -> None:
        """Release threads, sockets and memory."""
        for levels in self:
            levels.close()


class NodeSum:
    """The reduces of one segment in two levels: the sum of a node's ranks, and the sum of the
    nodes. The next one begins when both are over.
    """

    def __init__(self, levels: Levels, of_shards: ReduceRequest, sums: Pool) -> None:
        """`of_shards` is what `levels.between` is asked for."""
        self._levels = levels
        self._of_shards = of_shards
        self._sums = sums
        # of the reduce under way: what travels between nodes, the node's sum of our column, and
        # where the sum of the nodes goes (and whether it is added there)
        self._under_way: tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool] | None = None

    def inside(
        self,
        of_columns: ReduceRequest,
        buffer: torch.Tensor | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> Work:
        """Start summing the node's buffers; each rank's column of the sum stays here, until
        `between` brings our slice to `out`. `of_columns`: see `reduce_inside`.
        """
        request, device = self._of_shards, out.device
        hop = column = self._levels.between.grad_buffer(
            request.key, request.wire_numel, request.wire_dtype, device
        )
        if request.codec is not None:
            column = self._sums.take(end_of(request.ranges), torch.float32, device)
        self._under_way = hop, column, out, accumulate
        return self._levels.inside.reduce(of_columns, buffer, column, accumulate=False)

    def between(self, held: torch.Tensor | None) -> Work:
        """Start summing the nodes' sums; `inside` has been waited for. `held` is an earlier sum of
        this node (our column), which is added to this one.
        """
        assert self._under_way is not None, self._of_shards.key
        (hop, column, out, accumulate), self._under_way = self._under_way, None
        if held is not None:
            column.add_(held)
        codec = self._of_shards.codec
        if codec is not None:
            codec.encode(column, hop)
            self._sums.give(column)
        return self._levels.between.reduce(self._of_shards, hop, out, accumulate=accumulate)

    def unused(self) -> None:
        """`between` never starts: give back what it would have taken."""
        if self._under_way is not None:
            self._levels.between.return_buffer(self._under_way[0])
            self._under_way = None
