"""Block codecs: fewer bytes on the wire for weights and gradients (ZeRO++, arXiv 2306.10209,
sections 3.1 and 3.3).

A codec cuts a 1-D tensor into blocks of `block` elements and keeps one fp32 scale for each. The
encoding is interleaved::

    elements   |      block 0       |      block 1       | ... |  last one, padded with zeros  |
    bytes      | scale | packed     | scale | packed     | ... | scale | packed               |
               4 bytes   bits*block/8                            each pair is [stride] bytes long

Invariants: elements [a, b) on block boundaries are exactly bytes [a/block*stride, b/block*stride),
with the same bits whether they were encoded alone or within a whole, so any shard or slice travels
and decodes by itself. A value is off by half a step of its block at most (`error_bound`), zero
stays zero, and encoding what was decoded to fp32 gives the same bytes again (so does what went from
bf16 or fp16 back to it, where the codes are no finer than its denormals). A block with a NaN or an
Inf decodes to NaN in every element: what overflow detection looks for is never hidden.

Cost: ``stride/block`` bytes per element instead of 2 or 4, and one pass over source and encoding,
in tiles that stay in cache, with scratch of a tile and a half (1.5 MiB) per thread. On a GPU a
Triton kernel (comm/kernels.py) does the same where Triton is installed, with the same bits.
What it does not do: move anything, round stochastically, or feed errors back.
"""

from __future__ import annotations

import difflib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from zeroshard.comm import kernels_for
from zeroshard.core.layout import ALIGN, Range
from zeroshard.errors import ConfigError
from zeroshard.memory import reads_wait

SCALE_BYTES = 4
# elements; measured: 64 Ki cost half as much again in calls, 1 Mi gain a tenth
TILE = {"cpu": 1 << 18}
DEVICE_TILE = 1 << 24  # elements; on an accelerator a tile only bounds the scratch
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Codec(ABC):
    """Packs blocks of `block` elements (a positive multiple of 64). Equal codecs give
    equal bits on every device.
    """

    block: int = 256

    name: ClassVar[str]
    bits: ClassVar[int]  # per packed element
    largest: ClassVar[int]  # magnitude of the largest code: scale = amax / largest
    half_step: ClassVar[float]  # of the codes around `largest`, where it is widest
    has_kernel: ClassVar[bool] = False  # comm/kernels.py packs and unpacks it, too

    def __post_init__(self) -> None:
        if self.block <= 0 or self.block % ALIGN:
            raise ConfigError(
                f"codec {self.name}: block={self.block} is not a positive multiple of {ALIGN},"
                " where shards may be cut"
            )

    @property
    def stride(self) -> int:
        """Encoded bytes per block, scale included; a multiple of 4."""
        return SCALE_BYTES + self.block * self.bits // 8

    @property
    def smallest_scale(self) -> float:
        """The smallest scale: 2**-126. The quotient by a denormal one, of few bits, could be
        larger than the codes.
        """
        return torch.finfo(torch.float32).tiny

    @property
    def largest_scale(self) -> float:
        """The largest fp32 scale with which every code decodes to a finite number: the next one
        would make 3.4e38 an Inf.
        """
        mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / self.largest)
        return math.ldexp(math.floor(math.ldexp(mantissa, 24)), exponent - 24)

    def num_blocks(self, numel: int) -> int:
        """Return how many blocks hold `numel` elements; the last may be short."""
        return -(-numel // self.block)

    def encoded_bytes(self, numel: int) -> int:
        """Return the bytes that `numel` elements take; a short last block takes as many as a whole
        one.
        """
        return self.num_blocks(numel) * self.stride

    def bytes_of(self, elements: Range) -> Range:
        """Return which bytes of an encoding hold `elements`, which start on a block.

        A stop within a block takes that block whole, as the end of a tensor does. ValueError for a
        start within a block.
        """
        start, stop = elements
        if start % self.block:
            raise ValueError(
                f"codec {self.name}: element {start} is not the first of a block of {self.block}"
            )
        return self.encoded_bytes(start), self.encoded_bytes(stop)

    def error_bound(self, amax: float) -> float:
        """Return how far a decoded fp32 value may be off in a finite block with the largest
        magnitude `amax`: half a step, and fp32's rounding.

        For fp8 this is the bound of the largest values; smaller ones have smaller steps. bf16 and
        fp16 outputs add their own rounding.
        """
        scale = min(max(amax / self.largest, self.smallest_scale), self.largest_scale)
        return scale * (self.half_step + self.largest * 2.0**-22)

    def encode(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Encode `source` [n], fp32, bf16 or fp16, into `out` [encoded_bytes(n)], uint8, on the
        current stream.

        `out` is written whole and starts on a multiple of 4 bytes. ConfigError for another dtype.
        """
        self._check(source, out)
        source = source.detach()
        kernels = kernels_for(source)
        if kernels is not None and self.has_kernel:
            kernels.encode(self, source, out)
            return
        scratch = _scratch(self, source)
        for values, data in self._tiles(source, out):
            self._encode_tile(values, data, scratch)
        if tail := source.numel() % self.block:
            last = torch.zeros(self.block, dtype=source.dtype, device=source.device)
            last[:tail].copy_(source[-tail:])
            self._encode_tile(last.view(1, -1), out[-self.stride :].view(1, -1), scratch)

    def decode(self, data: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
        """Decode `data` [encoded_bytes(n)], uint8, into `out` [n], fp32, bf16 or fp16, on the
        current stream; or add it to `out`.

        Sums are formed in fp32, so `add` wants an fp32 `out`: ConfigError otherwise, and for other
        dtypes.
        """
        self._check(out, data)
        if add and out.dtype != torch.float32:
            raise ConfigError(
                f"codec {self.name}: adding to {out.dtype} would round every partial sum; use fp32,"
                " or decode_sum"
            )
        out = out.detach()
        kernels = kernels_for(out)
        if kernels is not None and self.has_kernel:
            kernels.decode(self, data, out, add=add)
            return
        scratch = _scratch(self, out)
        for values, encoded in self._tiles(out, data):
            self._decode_tile(encoded, values, scratch, add=add)
        if tail := out.numel() % self.block:
            last = torch.empty(1, self.block, dtype=torch.float32, device=out.device)
            self._decode_tile(data[-self.stride :].view(1, -1), last, scratch, add=False)
            rest = last[0, :tail]
            out[-tail:].add_(rest) if add else out[-tail:].copy_(rest)

    def decode_sum(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Store ``((parts[0] + parts[1]) + parts[2]) + ...`` in `out` [n]: each decoded to fp32,
        added in fp32, rounded to `out` once.

        With three ranks, block k of `out` is ``s0*q0 + s1*q1 + s2*q2`` in that order, every product
        rounded. Each of `parts` is [encoded_bytes(n)], uint8; partial sums stay in cache.
        ConfigError for other dtypes than fp32, bf16 and fp16.
        """
        assert parts, "a sum of no parts"
        tile = _tile_numel(self, out)
        total = (
            None
            if out.dtype == torch.float32
            else torch.empty(min(tile, out.numel()), dtype=torch.float32, device=out.device)
        )
        for part in parts:
            self._check(out, part)
        for start in range(0, out.numel(), tile):
            target = out[start : start + tile]
            first, last = self.bytes_of((start, start + target.numel()))
            partial = target if total is None else total[: target.numel()]
            for number, part in enumerate(parts):
                self.decode(part[first:last], partial, add=number > 0)
            if total is not None:
                target.detach().copy_(partial)

    def _check(self, values: torch.Tensor, data: torch.Tensor) -> None:
        if values.dtype not in DTYPES:
            raise ConfigError(
                f"codec {self.name} takes fp32, bf16 or fp16, not {values.dtype}: leave such"
                " tensors uncoded"
            )
        if data.dtype != torch.uint8:
            raise ConfigError(f"codec {self.name}: the encoding is torch.uint8, not {data.dtype}")
        assert (
            values.dim() == data.dim() == 1 and values.is_contiguous() and data.is_contiguous()
        ), (values.shape, data.shape)
        assert data.numel() == self.encoded_bytes(values.numel()), (
            self,
            values.numel(),
            data.numel(),
        )
        assert data.device == values.device, (data.device, values.device)
        # scales are read in place
        assert data.storage_offset() % SCALE_BYTES == 0, data.storage_offset()

    def _tiles(
        self, values: torch.Tensor, data: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the whole blocks, tile by tile: (values [k, block], encoding [k, stride])."""
        whole = values.numel() // self.block
        values = values[: whole * self.block].view(whole, self.block)
        data = data[: whole * self.stride].view(whole, self.stride)
        step = _tile_numel(self, values) // self.block
        for start in range(0, whole, step):
            yield values[start : start + step], data[start : start + step]

    def _encode_tile(self, source: torch.Tensor, data: torch.Tensor, scratch: torch.Tensor) -> None:
        """Encode `source` [k, block] into `data` [k, stride]."""
        values = scratch[: source.numel()].view(source.shape)
        direct = source.dtype == torch.float32
        torch.abs(source, out=values) if direct else values.copy_(source).abs_()
        amax = torch.amax(values, dim=1, keepdim=True)  # NaN if the block has one
        # a GPU multiplies by the reciprocal of a scalar, which rounds differently
        largest = torch.full_like(amax, self.largest)
        scale = (amax / largest).clamp_(self.smallest_scale, self.largest_scale)
        broken = ~amax.isfinite()
        scale.masked_fill_(broken, math.nan)
        data.view(torch.float32)[:, :1].copy_(scale)
        torch.div(source, scale, out=values) if direct else values.copy_(source).div_(scale)
        packed = data[:, SCALE_BYTES:]
        self._pack(values, packed)
        # a question to the device would stop the stream; on the CPU it saves a pass
        if reads_wait(data) or broken.any():
            packed.masked_fill_(broken, 0)  # what NaN is as an integer differs between processors

    def _decode_tile(
        self, data: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
    ) -> None:
        """Decode `data` [k, stride] into `out` [k, block], or add it."""
        if out.dtype == torch.float32 and not add:
            self._unpack(data, out, scratch)
            return
        values = scratch[: out.numel()].view(out.shape)
        self._unpack(data, values, scratch[out.numel() :])
        out.add_(values) if add else out.copy_(values)

    @abstractmethod
    def _pack(self, quotients: torch.Tensor, packed: torch.Tensor) -> None:
        """Round `quotients` [k, block], fp32 within +-largest, to codes in `packed` [k, stride -
        4], uint8; may overwrite `quotients`.
        """

    @abstractmethod
    def _unpack(self, data: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> None:
        """Store code times scale of `data` [k, stride], uint8, in `out` [k, block], fp32.
        `spare` [>= k * block / 2], fp32, is free.
        """


class Int8(Codec):
    """Whole numbers -127..127, rounded half to even; one byte each, two's complement."""

    name = "int8"
    bits = 8
    largest = 127
    half_step = 0.5
    has_kernel = True

    def _pack(self, quotients: torch.Tensor, packed: torch.Tensor) -> None:
        packed.view(torch.int8).copy_(quotients.round_())

    def _unpack(self, data: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> None:
        out.copy_(data[:, SCALE_BYTES:].view(torch.int8)).mul_(data.view(torch.float32)[:, :1])


class Int4(Codec):
    """Whole numbers -7..7, rounded half to even. Byte j of a block is
    ``q[j] + 16 * q[j + block/2]``, two's complement.

    The halves are planar, so packing reads and writes runs of block/2. The digits are signed: 3 and
    -1 pack to 3 - 16 = -13; its nearest multiple of 16 is -16, and the rest is 3. (With masks and
    shifts, as unsigned nibbles need, packing takes two passes more.)
    """

    name = "int4"
    bits = 4
    largest = 7
    half_step = 0.5
    has_kernel = True

    def _pack(self, quotients: torch.Tensor, packed: torch.Tensor) -> None:
        low, high = quotients.round_().chunk(2, dim=1)
        packed.view(torch.int8).copy_(low.add_(high, alpha=16))

    def _unpack(self, data: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> None:
        low, high = out.chunk(2, dim=1)
        low.copy_(data[:, SCALE_BYTES:].view(torch.int8))
        # never a tie, as low digits are 7 at most; and no -0.0
        torch.mul(low, 1 / 16, out=high).round_().add_(0.0)
        low.sub_(high, alpha=16)
        out.mul_(data.view(torch.float32)[:, :1])


class Fp8(Codec):
    """torch.float8_e4m3fn (4 bits of exponent, 3 of mantissa, no Inf), scaled so that the
    block's largest value is 448.

    Off by 1/16 of a value at most, or 2**-10 of the scale for values below 2**-6 of it. The cast
    turns what is beyond 464 into NaN and does not saturate; quotients are 448 and a rounding error
    at most.
    """

    name = "fp8"
    bits = 8
    largest = 448
    half_step = 16.0
    has_kernel = True

    def _pack(self, quotients: torch.Tensor, packed: torch.Tensor) -> None:
        packed.view(torch.float8_e4m3fn).copy_(quotients)

    def _unpack(self, data: torch.Tensor, out: torch.Tensor, spare: torch.Tensor) -> None:
        # As fp16 bits a code is its value / 256, subnormals included; torch's own cast to fp32
        # takes ten times as long on the CPU.
        halves = spare.view(torch.int16)[: out.numel()].view(out.shape)
        # the sign was extended over bit 14
        halves.copy_(data[:, SCALE_BYTES:].view(torch.int8)).mul_(128).bitwise_and_(-0x4080)
        out.copy_(halves.view(torch.float16)).mul_(data.view(torch.float32)[:, :1] * 256)


CODECS: dict[str, type[Codec]] = {cls.name: cls for cls in (Int8, Int4, Fp8)}


def codec(name: str, *, block: int = 256) -> Codec:
    """Return the codec called `name` with blocks of `block` elements.
    ConfigError, a ValueError, if there is none.
    """
    if name not in CODECS:
        near = difflib.get_close_matches(name, CODECS, n=1, cutoff=0.0)
        raise ConfigError(
            f"codec {name!r} is not one of {', '.join(CODECS)}; did you mean {near[0]!r}?"
        )
    return CODECS[name](block)


def engine_of(tensor: torch.Tensor) -> str:
    """Return what encodes and decodes tensors on this one's device, "triton" or "torch": same
    bits, another speed.
    """
    return "torch" if kernels_for(tensor) is None else "triton"


def _tile_numel(codec: Codec, tensor: torch.Tensor) -> int:
    """Return how many elements make a tile: whole blocks, at least one."""
    numel = TILE.get(tensor.device.type, DEVICE_TILE)
    return max(numel // codec.block, 1) * codec.block


class _Kept(threading.local):
    """The scratch of one thread, fp32; a larger block than any before replaces it."""

    values: torch.Tensor | None = None


_kept = _Kept()


def _scratch(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """Return fp32 scratch, a tile and a half: this thread's own on the CPU; elsewhere a new one,
    which belongs to the current stream.
    """
    numel = _tile_numel(codec, tensor) * 3 // 2
    if tensor.device.type != "cpu":
        return torch.empty(
            min(numel, tensor.numel() * 3 // 2 + 2 * codec.block),
            dtype=torch.float32,
            device=tensor.device,
        )
    if _kept.values is None or _kept.values.numel() < numel:
        # or a first call under inference mode would leave what training cannot write to
        with torch.inference_mode(False):
            _kept.values = torch.empty(numel, dtype=torch.float32, device="cpu")
    return _kept.values
