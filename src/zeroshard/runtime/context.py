"""What every part of one engine shares, and the plan of one segment.

[Note: dtypes] A model in one floating dtype computes in the precision's, but for batch norms: their
running statistics are fp32 and torch's kernels want the weights alike (FSDP leaves them out, too).
A model given in several floating dtypes is taken as it is: fp32 norms in a bf16 model, or fp32
adapters on a bf16 base, were meant. How fp32 buffers and inputs meet half-precision weights:
guards.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from zeroshard.comm.levels import Levels, Transports
from zeroshard.comm.quantized import Codecs
from zeroshard.comm.ranks import AlongAxes, MeshRanks
from zeroshard.comm.transport import Transport
from zeroshard.core.layout import Layout
from zeroshard.core.part import Part
from zeroshard.core.placement import Cell, Cells, Mesh, Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.precision import Precision
from zeroshard.core.route import Routes, routes
from zeroshard.core.wire import BlockCodec, Formats, Wire
from zeroshard.memory import MemoryCounter
from zeroshard.optim.scaler import LossScaler
from zeroshard.runtime.faults import Faults
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.streams import Streams
from zeroshard.runtime.tiering import Tiering
from zeroshard.state.full import memory_stride
from zeroshard.state.local import local_of, part_of
from zeroshard.state.state import DeviceMemory, State

if TYPE_CHECKING:  # made in sharding/, and only handed on by this room
    from zeroshard.core.dims import Holders
    from zeroshard.core.shares import Shares


@dataclass(frozen=True)
class Dtypes:
    """In which dtype each parameter of a model computes. See [Note: dtypes]."""

    of: dict[int, torch.dtype]  # by id of the parameter
    as_given: bool  # whether the model's own dtypes stand, so that its inputs are left alone, too

    def widest(self, precision: Precision) -> int:
        """Return the bytes of the widest gradient element on the wire."""
        return max(
            (
                precision.at(dtype).wire.itemsize
                for dtype in set(self.of.values())
                if dtype.is_floating_point
            ),
            default=1,
        )


@dataclass(frozen=True)
class Options:
    """What the user wants done beside what the policy says."""

    strict: bool  # compare what was written to released parameters by value
    verify_every: int | None  # steps between comparisons of replicated state
    broadcast_buffers: bool  # every forward takes rank 0's buffers
    clip_norm: float | None  # what a step clips to where the user has not clipped
    loss_scaler: LossScaler | None  # of fp16
    trains: bool  # an optimizer is there, or will be: masters are kept
    codecs: Codecs = field(default_factory=Codecs)
    batch_shares: tuple[float, ...] = ()  # what a rank's loss counts; empty: all the same
    shares: Shares | None = None  # of each rank, of what is sharded; None: equal
    sums_ranks: bool = False  # gradients are the ranks' sum, not their mean


@dataclass(frozen=True)
class Context:
    """What every part of one engine shares; of units that lie over a mesh of their own, what these
    units share.
    """

    policy: Policy
    precision: Precision
    dtypes: Dtypes
    levels: Levels
    mesh: Mesh
    everyone: MeshRanks
    holders: Holders  # of these parameters, among all data parallel ranks
    streams: Streams
    meter: MemoryCounter
    memory: DeviceMemory
    faults: Faults
    options: Options
    # gives a segment's parameters their initial values
    prepare: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None
    tiering: Tiering = field(default_factory=Tiering)
    own: Mapping[str, Context] = field(default_factory=dict)  # of units with a mesh of their own
    leaves: Leaves | None = None  # of a run whose sums do not depend on the ranks
    first_step_over: Callable[[], None] = lambda: None  # others are waited for less from here on

    def of(self, pattern: str) -> Context:
        """Return the context of units of `pattern`, "" for those over all ranks."""
        return self.own[pattern] if pattern else self

    @cached_property
    def transport(self) -> Transport:
        """The transport of all ranks at once."""
        return self.levels.flat

    @cached_property
    def transports(self) -> Transports:
        """All transports of the engine."""
        return Transports(self.levels, tuple(one.levels for one in self.own.values()))

    @cached_property
    def held(self) -> tuple[list[tuple[tuple[int, ...], ...]], list[tuple[int, ...]]]:
        """The groups of ranks that hold the same parameters, for each way in which some are held,
        and the group of this rank in each.
        """
        every = {one.holders.groups: one.holders.members for one in (self, *self.own.values())}
        return list(every), list(every.values())

    @property
    def weights_leave(self) -> bool:
        """Whether any weights rest on another tier than the device, on any rank."""
        return self.policy.weights_leave_the_device or "weight" in self.tiering.away

    def close(self) -> None:
        """Release transports, sockets and stores."""
        self.transports.close()
        self.axes.close()
        self.tiering.close()

    @property
    def axes(self) -> AlongAxes:
        """This rank's peers in the other data parallel groups."""
        return self.everyone.axes

    @property
    def steps_into_forward(self) -> bool:
        """Whether weights may still be on their way when a forward begins: not where a peer
        reads this rank's memory as it is.
        """
        return self.transport.size == 1 or self.streams.enqueues

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self.memory.device


@dataclass(frozen=True)
class SegmentPlan:
    """One segment to be."""

    key: str
    unit: str
    members: dict[str, nn.Parameter]  # of a DTensor its local tensor is laid out
    dtype: torch.dtype
    trainable: bool
    cells: Cells
    layout: Layout
    rank: int

    @property
    def num_stepped(self) -> int:
        """Elements whose master rests on this rank."""
        return self._held(self.cells.optim)

    @property
    def num_weights(self) -> int:
        """Elements whose weights rest on this rank."""
        return self._held(self.cells.weight)

    def _held(self, cell: Cell) -> int:
        return self.layout.held(self.rank, cell)

    @property
    def sums_micro_batches(self) -> bool:
        """Whether gradients inside no_sync are added before ranks are."""
        cell = self.cells.grad
        return cell.is_partial and self.layout.scope(cell) is Scope.FULL

    @property
    def strides(self) -> list[tuple[int, ...]]:
        """The stride of each parameter in the flat buffer."""
        return [memory_stride(local_of(parameter)) for parameter in self.members.values()]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Which part of each parameter is here."""
        return tuple(part_of(name, parameter) for name, parameter in self.members.items())

    def counted(self, context: Context) -> tuple[bool, ...] | None:
        """Return of which parameters the elements count here, where others have the same, too;
        None: of all.
        """
        alike = [axis.name for axis in context.mesh.others if axis.alike]
        counts = tuple(part.counts(alike, context.axes.place.first_along) for part in self.parts)
        return None if all(counts) else counts

    def precision(self, context: Context) -> Precision:
        """Return the dtypes of the segment's gradients."""
        return context.precision.at(self.dtype) if self.trainable else context.precision

    def codec(self, context: Context) -> BlockCodec | None:
        """Return the codec in which the weights travel."""
        if not Wire.of(self.dtype).may_be_packed or self.cells.weight.scope is not Scope.SHARD:
            return None
        codecs = context.options.codecs
        return codecs.frozen if codecs.frozen is not None and not self.trainable else codecs.weight

    def rest_codec(self, context: Context) -> BlockCodec | None:
        """Return the codec in which the weights rest: frozen ones alone rest encoded."""
        frozen = context.options.codecs.frozen
        return None if self.trainable or frozen is None else self.codec(context)

    def grad_codec(self, context: Context) -> BlockCodec | None:
        """Return the codec in which the gradients travel."""
        travels = Wire.of(self.precision(context).wire)
        return context.options.codecs.grad if travels.may_be_packed else None

    def routes(self, context: Context, rest: State, *, reads: bool) -> Routes:
        """Return the routes of weights that rest as `rest` and of their gradients; `reads`: the
        weights of some rank rest on another tier, and its peers wait for its read as for theirs.
        """
        precision, codec = self.precision(context), self.codec(context)
        grad_codec = self.grad_codec(context)
        levels = context.levels
        gather, plain = _wire(self.dtype, codec), Wire.of(self.dtype)
        formats = Formats(
            weight=gather if rest.is_encoded else plain,
            gather=gather,
            reduce=_wire(precision.wire, grad_codec),
            node_sum=_wire(levels.hop_dtype, grad_codec),
            grad=Wire.of(precision.accumulate),
            master=Wire.of(context.precision.master),
        )
        cells = self.cells
        # a fraction may leave a whole segment on the device; a rank whose own part is there reads
        # as from any other tier
        away = {Tier.DEVICE: Tier.HOST}.get(cells.weight.tier, cells.weight.tier)
        tier = away if reads else Tier.DEVICE
        cells = replace(cells, weight=replace(cells.weight, tier=tier))
        return routes(
            cells,
            context.mesh,
            formats,
            two_level=levels.two_level,
            node_sums=levels.node_sums,
        )


def _wire(dtype: torch.dtype, codec: BlockCodec | None) -> Wire:
    return Wire.of(dtype) if codec is None else Wire.of(dtype, codec.name, block=codec.block)
