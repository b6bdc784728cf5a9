"""Formats in which numbers travel and rest, and their bytes on the wire. A format is a dtype, or
blocks that a codec packs with one scale each (comm/codec.py encodes them; ZeRO++, arXiv 2306.10209,
sections 3.1 and 3.3).

``Wire`` is one format, ``Formats`` are the formats of one group of parameters. Formats are names
and sizes, and ``BlockCodec`` is what the engine asks of a codec: nothing here encodes, and torch is
not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zeroshard.core.placement import Cells, Mesh, Placement, Portion, Scope

if TYPE_CHECKING:
    import torch

    from zeroshard.core.precision import Precision

# -------------------------------------------------------------- bytes of a gather, a reduce, a step
# Closed forms of row, mesh, bytes per element and lowering (docs/design/routes.md).
#
# The mesh has M nodes of L ranks. A rank holds a SHARD of a buffer, 1/(M L), a NODE_SHARD, 1/L, or
# all of it, FULL; a transition is a gather or a reduce between two of these scopes. One between
# SHARD and FULL is lowered flat (every rank from every rank) or in two levels, through NODE_SHARD.
# ZeRO, section 7; ZeRO++ (arXiv 2306.10209), section 3; MiCS (arXiv 2205.00119), section 3.
#
# Where ranks own unequal shares, a rank with the share s of a buffer, in a column with c and a node
# with n of it, receives 1 - s of it in a gather and s (M L - 1) in a reduce; `Portion` says s, c,
# n. The lowering does not depend on shares: all ranks take the same.


@dataclass(frozen=True)
class LinkBytes:
    """Payload that one rank receives (and sends), by where it comes from."""

    inside: float = 0.0  # from ranks of its node
    between: float = 0.0  # from ranks of other nodes

    @property
    def total(self) -> float:
        """The bytes inside nodes and between them."""
        return self.inside + self.between

    def __add__(self, other: LinkBytes) -> LinkBytes:
        return LinkBytes(self.inside + other.inside, self.between + other.between)

    def __mul__(self, times: float) -> LinkBytes:
        return LinkBytes(self.inside * times, self.between * times)


@dataclass(frozen=True)
class WireBytes:
    """Payload that one rank receives (and sends) per step, by state."""

    gather: LinkBytes  # weights, before forward and backward
    reduce: LinkBytes  # gradients
    publish: LinkBytes  # weights after the step, or averages where several ranks step the same

    @property
    def links(self) -> LinkBytes:
        """The bytes of gathers, reduces and publishing together, by link."""
        return self.gather + self.reduce + self.publish

    @property
    def total(self) -> float:
        """The bytes of everything over all links."""
        return self.links.total

    def leaving_a_node(self, mesh: Mesh) -> float:
        """Return the bytes that leave one node per step, all its ranks together."""
        return self.links.between * mesh.node_size


@dataclass(frozen=True)
class Wires:
    """Bytes per element as they travel, scales included."""

    weight: float
    grad: float
    hop: float  # sums over a node on their way to other nodes
    average: float = 4.0  # in the dtype in which gradients rest

    @classmethod
    def of(
        cls,
        precision: Precision,
        *,
        weight: float | None = None,
        grad: float | None = None,
        hop: float | None = None,
    ) -> Wires:
        """Return the bytes in `precision`; `weight`, `grad` and `hop` override with a codec's."""
        return cls(
            precision.compute.itemsize if weight is None else weight,
            precision.wire.itemsize if grad is None else grad,
            (4.0 if grad is None else grad) if hop is None else hop,
            precision.accumulate.itemsize,
        )


def all_gather(
    mesh: Mesh,
    source: Scope,
    target: Scope,
    whole: float,
    *,
    two_level: bool,
    has: Portion | None = None,
) -> LinkBytes:
    """Return the bytes that gathering `whole` bytes from `source` to `target` moves to a rank
    that `has` so much of it (default: an equal share).
    """
    if mesh.num_nodes == 1:
        source = max(source, Scope.NODE_SHARD)
    if source >= target:
        return LinkBytes()
    has = _equal(mesh) if has is None else has
    per_part = whole / has.whole
    if source is Scope.SHARD and target is Scope.FULL and not two_level:
        return LinkBytes(has.node - has.own, has.whole - has.node) * per_part
    between = has.column - has.own if source is Scope.SHARD else 0
    inside = has.whole - has.column if target is Scope.FULL else 0
    return LinkBytes(inside, between) * per_part


def reduce_scatter(
    mesh: Mesh,
    target: Scope,
    whole: float,
    hop: float,
    *,
    two_level: bool,
    has: Portion | None = None,
) -> LinkBytes:
    """Return the bytes that summing buffers of `whole` bytes into `target` moves to a rank that is
    to have `has` of them (default: an equal share); `hop`: the bytes of node sums.

    NODE_SHARD is the sum of one node's ranks only: a partial sum (P S).
    """
    nodes, local = mesh.num_nodes, mesh.node_size
    has = _equal(mesh) if has is None else has
    per_part, hop_per_part = whole / has.whole, hop / has.whole
    inside = per_part * has.column * (local - 1)
    if target is Scope.NODE_SHARD or nodes == 1:
        return LinkBytes(inside)
    if not two_level:
        own = per_part * has.own
        return LinkBytes(own * (local - 1), own * local * (nodes - 1))
    return LinkBytes(inside, hop_per_part * has.own * (nodes - 1))


def _equal(mesh: Mesh) -> Portion:
    """Return an equal share of a buffer of as many parts as ranks."""
    return Portion(1, mesh.num_nodes, mesh.node_size, mesh.size)


def cheapest(flat: LinkBytes, two_level: LinkBytes) -> bool:
    """Return whether two levels move fewer bytes between nodes (then: inside them)."""
    return (two_level.between, two_level.inside) < (flat.between, flat.inside)


def goes_deep(
    mesh: Mesh, two_level: bool | None, moved: Callable[..., LinkBytes], *args: Any
) -> bool:
    """Return whether `moved` (`all_gather` or `reduce_scatter`, with its `args`) goes in two
    levels: as `two_level` says, or (None) where that is `cheapest`.
    """
    if two_level is not None:
        return two_level
    return cheapest(*(moved(mesh, *args, two_level=levels) for levels in (False, True)))


def step_bytes(
    cells: Cells,
    *,
    numel: float | Portion,
    mesh: Mesh,
    wires: Wires,
    micro_batches: int = 1,
    no_sync: bool = False,
    two_level: bool | None = None,
) -> WireBytes:
    """Return the bytes per rank and step of parameters that rest in `cells`: `numel`, shared
    equally, or this rank's portion of them.

    `micro_batches` forwards and backwards before the step; `no_sync`: all but the last ran inside
    ``engine.no_sync()``. `two_level` None takes the cheapest lowering of each transition.
    """
    weight, between, optim = cells.weight.scope, cells.between.scope, cells.optim.scope
    has = numel if isinstance(numel, Portion) else None
    whole = numel.whole if isinstance(numel, Portion) else numel
    psi, averages = whole * wires.weight, whole * wires.average

    def lowered(moved: Callable[..., LinkBytes], *args: Any) -> LinkBytes:
        deep = goes_deep(mesh, two_level, moved, *args)
        return moved(mesh, *args, two_level=deep, has=has)

    def gather(source: Scope, target: Scope, num_bytes: float) -> LinkBytes:
        return lowered(all_gather, source, target, num_bytes)

    def reduce(target: Scope) -> LinkBytes:
        return lowered(reduce_scatter, target, whole * wires.grad, whole * wires.hop)

    gathers = (gather(weight, Scope.FULL, psi) + gather(between, Scope.FULL, psi)) * micro_batches
    # micro-batches that wait for the last before their sums over ranks
    held_back = micro_batches - 1 if no_sync and cells.grad.is_partial else 0
    inside = reduce(Scope.NODE_SHARD) if cells.grad.local is Placement.SHARD else LinkBytes()
    whole_sum = reduce(Scope.SHARD)
    if cells.grad.is_partial and cells.grad.local is Placement.SHARD:  # node sums are there
        sums = whole * wires.grad, whole * wires.hop
        whole_sum = reduce_scatter(mesh, Scope.SHARD, *sums, two_level=True, has=has)
    reduces = inside * held_back + whole_sum * (micro_batches - held_back)
    publish = gather(Scope.SHARD, optim, averages) + gather(optim, weight, psi)
    return WireBytes(gathers, reduces, publish)


# ------------------------------------------------------------------------------------------ formats

CODEC_BITS = {"int8": 8, "int4": 4, "fp8": 8}  # per packed element
_SCALE_BYTES = 4  # per block
_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class BlockCodec(Protocol):
    """Packs 1-D tensors in blocks of `block` elements, on the current stream (comm/codec.py)."""

    @property
    def name(self) -> str:
        """Its name in `CODEC_BITS`."""

    @property
    def block(self) -> int:
        """Elements with one scale."""

    def encoded_bytes(self, numel: int) -> int:
        """Return the bytes that `numel` elements take."""

    def bytes_of(self, elements: tuple[int, int]) -> tuple[int, int]:
        """Return which bytes of an encoding hold `elements`, which start on a block."""

    def encode(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Encode `source` [n] into `out` [encoded_bytes(n)], uint8."""

    def decode(self, data: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """Decode `data` [encoded_bytes(n)] into `out` [n], or add it to `out`."""

    def decode_sum(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Store the sum of `parts`, each decoded to fp32, in `out` [n], rounded once."""


@dataclass(frozen=True)
class Wire:
    """One format: `dtype` (short name), packed by `codec` where there is one."""

    dtype: str
    codec: str | None
    bytes_per_element: float  # scales included

    @classmethod
    def of(cls, dtype: str | torch.dtype, codec: str | None = None, *, block: int = 256) -> Wire:
        """Return the format of `dtype` (short name or torch.dtype), packed by `codec` if given.

        Raises ValueError for an unknown name.
        """
        long = str(dtype).removeprefix("torch.")
        name = _SHORT.get(long, long)
        size = _SIZES.get(name) if isinstance(dtype, str) else dtype.itemsize
        if size is None:
            raise ValueError(f"dtype {name!r} is not one of {', '.join(_SIZES)}")
        if codec is None:
            return cls(name, None, float(size))
        if codec not in CODEC_BITS:
            raise ValueError(f"codec {codec!r} is not one of {', '.join(CODEC_BITS)}")
        return cls(name, codec, CODEC_BITS[codec] / 8 + _SCALE_BYTES / block)

    @property
    def may_be_packed(self) -> bool:
        """Whether codecs take numbers of this dtype."""
        return self.dtype in _SIZES

    @property
    def plain(self) -> Wire:
        """The format without its codec."""
        return self if self.codec is None else Wire.of(self.dtype)

    def __str__(self) -> str:
        return self.codec or self.dtype


@dataclass(frozen=True)
class Formats:
    """The formats of one group's states, at rest and on the wire."""

    weight: Wire  # at rest and in computation; frozen weights may rest packed (MixZ++)
    gather: Wire  # weights in gathers
    reduce: Wire  # gradients in sums over ranks
    node_sum: Wire  # sums over one node, on their way to other nodes
    grad: Wire  # gradients at rest
    master: Wire

    @classmethod
    def of(
        cls,
        compute: str | torch.dtype,
        *,
        reduce: str | torch.dtype | None = None,
        accumulate: str | torch.dtype = "fp32",
        weight_codec: str | None = None,
        grad_codec: str | None = None,
        block: int = 256,
        rests_packed: bool = False,
    ) -> Formats:
        """Return the formats of a group that computes in `compute`.

        `reduce` (default: `compute`) and `accumulate` are as in ``Precision``; `weight_codec`,
        `grad_codec` ("bf16" rounds node sums and packs nothing) and `block` as in ``Comm``;
        `rests_packed`: the weights rest in `weight_codec` as well (``Comm.frozen_codec``).
        """
        gather = Wire.of(compute, weight_codec, block=block)
        packed = None if grad_codec == "bf16" else grad_codec
        summed = Wire.of(compute if reduce is None else reduce, packed, block=block)
        hop = Wire.of("bf16" if grad_codec == "bf16" else "fp32", packed, block=block)
        weight = gather if rests_packed else Wire.of(compute)
        return cls(weight, gather, summed, hop, Wire.of(accumulate), Wire.of("fp32"))

    @property
    def wires(self) -> Wires:
        """The bytes per element that ``step_bytes`` takes."""
        wires = (self.gather, self.reduce, self.node_sum, self.grad)
        return Wires(*(wire.bytes_per_element for wire in wires))
