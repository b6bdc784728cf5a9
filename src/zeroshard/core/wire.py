"""In which format numbers travel and rest: as a dtype, or packed by a codec in blocks with one
scale each (comm/codec.py encodes them; ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3).

``Wire`` is one format, ``Formats`` are those of one group of parameters. Formats are names and
sizes, and ``BlockCodec`` is what the engine asks of a codec: nothing here encodes, and torch is not
imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zeroshard.core.cost import Wires

if TYPE_CHECKING:
    import torch

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

        `reduce` (default: `compute`) and `accumulate` are those of ``Precision``; `weight_codec`,
        `grad_codec` ("bf16" rounds node sums and packs nothing) and `block` those of ``Comm``;
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
        """The bytes per element that ``cost.step_bytes`` takes."""
        wires = (self.gather, self.reduce, self.node_sum, self.grad)
        return Wires(*(wire.bytes_per_element for wire in wires))
