"""The things that all parts of one engine share, and the plan of one segment.

[Note: dtypes] A model in one floating dtype computes in the precision's, but for batch norms: their
running statistics are fp32 and torch's kernels want the weights alike (FSDP leaves them out, too).
A model given in several floating dtypes is taken as it is: fp32 norms in a bf16 model, or fp32
adapters on a bf16 base, were meant. How fp32 buffers and inputs meet half-precision weights:
guards.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from zeroshard.comm.levels import Levels, Transports
from zeroshard.comm.quantized import Codecs
from zeroshard.comm.ranks import AlongAxes, MeshRanks
from zeroshard.comm.transport import Transport
from zeroshard.core.layout import ALIGN, Layout
from zeroshard.core.placement import Cell, Cells, Mesh, Part, Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.precision import Precision
from zeroshard.core.resting import splits
from zeroshard.core.route import Routes, routes
from zeroshard.core.schedule import STAGING_BYTES
from zeroshard.core.wire import BlockCodec, Formats, Wire
from zeroshard.errors import PlanMismatch, StateError, StorageError
from zeroshard.memory import MemoryCounter, Trimmer
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.streams import Streams
from zeroshard.state.local import local_of, part_of
from zeroshard.state.state import DeviceMemory, State, memory_stride
from zeroshard.tier.store import Direct, Link, Store

if TYPE_CHECKING:  # made in sharding/, and only handed on by this room
    from zeroshard.comm.device_mesh import Holders
    from zeroshard.core.loss_scale import LossScaler
    from zeroshard.core.shares import Shares, WholeParameters


# ------------------------------------------------------------------------------------------- faults
# Errors of one rank's disk or host memory, raised on every rank.
#
# A read that fails on one rank must not end its forward there: the others would wait in their next
# collective. So it is noted, the pass goes on with NaNs, and all ranks are told where they meet
# anyway::
#
#     what fails                     goes on with  told at                     refused until
#     a read of weights              NaN           end of the forward, or step engine.reset()
#     a read or write of a gradient  NaN           next forward, or step       engine.reset()
#     a write of state (a step, ...) nothing       end of the step, load, ...  zs.load()
#
# Refused are forwards and steps. After a failed gradient no master has been written; after a failed
# write of state what rests is *lost*, half old and half new.
#
# Also here: parameters of a deferred model that the ranks have built with different values. Only
# files can give them values that are the same.
#
# Invariant: nothing computed from a failed read reaches a master: the step asks first. Cost: one
# small exchange per forward where weights leave the device, and three per step where any state
# does. What it does not do: retry, or look after errors that are no StorageError.


_RESET = (
    "call engine.reset() on every rank, which drops the gradients, and go on with the next batch"
)
_UNTOUCHED = "shard() has failed on every rank, and the model is as it was"
_ANEW = "shard() has failed on every rank: build the model and the optimizer anew"
_LOAD = "what rests is half old and half new: load a checkpoint with zs.load()"


class Faults:
    """Faults of this rank that have not been told yet, and what is refused since all
    ranks were told.
    """

    def __init__(self, transport: Transport, *, active: bool, differing: Mapping[int, str]) -> None:
        """Made inside shard(); `differing`: how values differ between ranks, by id of the
        parameter; the same keys on every rank.
        """
        self.refusal: str | None = None  # why forwards and steps are refused, on every rank
        self._differing = dict(differing)
        self._in_shard = True  # there is no engine yet
        # on some rank what rests is not whole: told, and so known on every rank
        self.is_lost = False
        self.is_suspect = False  # something has failed since the last repair: files may be damaged
        self._since = "a tier failed"
        self._transport = transport
        self._active = active  # some state rests on another tier
        self._error: StorageError | None = None  # the first, not yet told
        self._loses = False  # whether what rests is lost with one not yet told

    def end_shard(self) -> None:
        """There is an engine."""
        self._in_shard = False

    def note(self, error: StorageError, *, lost: bool = False) -> None:
        """Keep the first error until the ranks meet; `lost`: what rests is no longer whole."""
        if self._error is None:
            error.__traceback__ = None  # its frames hold tensors
            self._error = error
        self._loses = self._loses or lost

    @contextmanager
    def noted(self, *, lost: bool = False) -> Iterator[None]:
        """Note a StorageError of the body instead of raising it."""
        try:
            yield
        except StorageError as error:
            self.note(error, lost=lost)

    @contextmanager
    def together(self, *, lost: bool = False) -> Iterator[None]:
        """`agree` at the end of the body. Collective."""
        with self.noted(lost=lost):
            yield
        self.agree()

    @property
    def unsaved(self) -> str | None:
        """The reason not to save what rests here, if there is one: told or not."""
        if self.is_lost:
            return self.refusal
        return f"{self._error}; {_LOAD}" if self._error is not None and self._loses else None

    def agree(self) -> None:
        """Raise StorageError on every rank where one has noted an error: its own, or the first of
        the others'. Collective.
        """
        if not self._active:
            return
        own, loses = self._error, self._loses
        self._error, self._loses = None, False
        mine = "" if own is None else f"{'!' if loses else '?'}{own}"
        answers = self._transport.control.exchange(mine.encode(), "the exchange of tier errors")
        told = {rank: answer.decode() for rank, answer in enumerate(answers) if answer}
        if not told:
            return
        self.is_suspect = True
        self.is_lost = self.is_lost or any(reason.startswith("!") for reason in told.values())
        first = next(iter(told))
        if self._in_shard:
            remedy = _ANEW if self.is_lost else _UNTOUCHED
        else:
            remedy = _LOAD if self.is_lost else _RESET
        self.refusal = f"rank {first}: {told[first][1:]}; {remedy}"
        raise StorageError(self.refusal if own is None else f"{own}; {remedy}")

    def check(self, *, passes: bool = True) -> None:
        """Raise StateError, the same on every rank, where forwards and steps are refused
        (`passes` off: only where what rests is lost).

        Raises PlanMismatch where the ranks have built different values and nothing has overwritten
        them.
        """
        if self._differing:
            raise PlanMismatch(next(iter(self._differing.values())))
        if self.refusal is not None and (passes or self.is_lost):
            raise StateError(f"refused since {self._since}: {self.refusal}")

    def lose(self, since: str, reason: str) -> None:
        """States are incomplete since `since`; all ranks agree. Only a full load repairs them."""
        if not self.is_lost:
            self._since, self.refusal, self.is_lost = since, f"{reason}; {_LOAD}", True

    def overwritten(self, parameters: Iterable[int]) -> None:
        """Every rank has read the same values for these parameters, given by id."""
        for key in parameters:
            self._differing.pop(key, None)

    def reset(self) -> None:
        """The pass in which something failed is given up; what is lost stays lost."""
        if not self._loses:
            self._error = None
        if not self.is_lost:
            self.refusal = None

    def repaired(self) -> None:
        """Everything that rests has been written anew."""
        self.refusal, self.is_lost, self.is_suspect, self._since = (
            None,
            False,
            False,
            "a tier failed",
        )
        self._differing.clear()
        self._error, self._loses = None, False


# ------------------------------------------------------------------------------------------ tiering
# The stores of one engine, and what share of each state rests there.
#
# ZeRO-Offload (section 4), ZeRO-Infinity (section 5) and Offload++ are rows of the policy table
# with cells on another tier than DEVICE; this is the memory behind those cells. A fraction below 1
# leaves the first elements of a state on the device (core/resting.py).


STATES = ("weight", "grad", "optimizer")


@dataclass(frozen=True)
class Tiering:
    """The tiers beyond the device on which states rest: none, by default."""

    stores: Mapping[Tier, Store] = field(default_factory=dict)  # of this rank
    # the states that leave the device on any rank: their tier, or one per rank where ranks differ
    away: Mapping[str, tuple[Tier, ...]] = field(default_factory=dict)
    # of "weight", "grad", "optimizer"; 1.0 where nothing is said
    fractions: Mapping[str, float] = field(default_factory=dict)
    link: Link = field(default_factory=Direct)
    staging_bytes: int = STAGING_BYTES
    automatic: bool = False  # the optimizer's fraction follows what is measured
    least: float = 0.0  # of that fraction: what the device has no room for
    delayed_update: int | None = None  # steps before updates are applied one step late; None: never
    step_in_backward: bool = False  # the host steps what has come, ahead (drafts.py)

    @cached_property
    def trimmer(self) -> Trimmer:
        """Keeps the allocator from holding on to temporaries: where state rests on disk,
        memory is what is short.
        """
        return Trimmer(self.staging_bytes if Tier.DISK in self.stores else None)

    def store(self, tier: Tier) -> Store | None:
        """Return the store of `tier`, None for the device."""
        return None if tier is Tier.DEVICE else self.stores[tier]

    def differs(self, state: str) -> bool:
        """Whether ranks rest `state` on different tiers."""
        return len(self.away.get(state, ())) > 1

    def splits(
        self, state: str, tiers: Sequence[Tier], numels: Sequence[int], *, align: int = ALIGN
    ) -> list[int]:
        """Return, per segment of `numels` elements on this rank, how many of `state` rest on the
        device, given the tiers of their cells; cuts fall on multiples of `align`.
        """
        away = [index for index, tier in enumerate(tiers) if tier is not Tier.DEVICE]
        out, held = list(numels), [numels[index] for index in away]
        cuts = splits(held, self.fractions.get(state, 1.0), align)
        for index, split in zip(away, cuts, strict=True):
            out[index] = split
        return out

    def close(self) -> None:
        """Give every store back."""
        for store in self.stores.values():
            store.close()
        self.link.close()


# ------------------------------------------------------------------------------------------ context


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
    """The options of the user beside the policy."""

    strict: bool  # compare what was written to released parameters by value
    verify_every: int | None  # steps between comparisons of replicated state
    broadcast_buffers: bool  # every forward takes rank 0's buffers
    clip_norm: float | None  # what a step clips to where the user has not clipped
    loss_scaler: LossScaler | None  # of fp16
    trains: bool  # an optimizer is there, or will be: masters are kept
    codecs: Codecs = field(default_factory=Codecs)
    batch_shares: tuple[float, ...] = ()  # what a rank's loss counts; empty: all the same
    shares: Shares | WholeParameters | None = None  # of each rank, of what is sharded; None: equal
    sums_ranks: bool = False  # gradients are the ranks' sum, not their mean


@dataclass(frozen=True)
class Context:
    """The things that all parts of one engine share; of units that lie over a mesh of their own,
    what these units share.
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
    leaves: Leaves | None = None  # of a run with sums that do not depend on the ranks
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
    rank: int  # of this one, in the layout
    places: Sequence[int]  # of all data parallel ranks there

    @property
    def num_stepped(self) -> int:
        """Elements that have their master on this rank."""
        return self._held(self.cells.optim)

    @property
    def num_weights(self) -> int:
        """Elements that have their weights on this rank."""
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
        """The part of each parameter that is here."""
        return tuple(part_of(name, parameter) for name, parameter in self.members.items())

    def counted(self, context: Context) -> tuple[bool, ...] | None:
        """Return for each parameter whether its elements count here, where others have the same,
        too; None: all do.
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
            master=Wire.of(context.precision.stepped),
        )
        cells = self.cells
        # a fraction may leave a whole segment on the device; a rank with its own part there reads
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
