# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The codecs (comm/codec.py), the canonical sum (comm/ordered.py) and the sum of squares
(state/norms.py) as Triton kernels: one pass from source to encoding, and back; one pass over what
all ranks have sent; one over a gradient. Bits are the same as the torch code's.

Same bits, because every step is one IEEE operation: division rounds to nearest (``div_rn``;
Triton's ``/`` does not), products and sums are not contracted (``enable_fp_fusion=False``),
rounding half to even is the addition of a number with a last bit that is worth 1, fp8 is made of
integer operations, so that it needs no hardware for it, and so are casts to and from bf16, which
Triton's interpreter truncates. Maxima are taken over the bits of the magnitudes: as integers they
have the same order, and NaN is the largest.

A program of a codec takes a `tile`: so many blocks, and the power of 2 that their bytes span. A
program of the sum takes a run of elements and loops over ranks. The number of bits of their number
is compiled in: a binary counter holds a sum for each. A program of squares takes some blocks of 64
elements, and adds the integers of all blocks with one exponent at once. Elements are counted in 64
bits, and rows by moving the pointer. Under ``TRITON_INTERPRET=1`` the kernels run on the CPU:
tests/unit/comm/test_codec_kernels.py, test_sum_kernel.py, state/test_squares_kernel.py. Importing
this file needs Triton; comm/codec.py, comm/ordered.py and state/norms.py do without
(`kernels_for`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

import torch
import triton
import triton.language as tl

OPTIONS = {"enable_fp_fusion": False}  # of every launch
_ELEMENTS = 4096  # per program of a codec, about
# elements per program of the sum: with 4 warps, 16 bytes of bf16 per thread and load
_RUN = tl.constexpr(1024)
COPIES = 16  # of the bins of squares: programs that add to one address wait for one another
_COPIES = tl.constexpr(COPIES)
_ROWS = tl.constexpr(64)  # blocks per program of the squares
MOST = 255  # ranks of a node, and nodes, of a sum: eight bits


class Coded(Protocol):
    """The part of a codec (comm/codec.py) that the kernels need."""

    name: ClassVar[str]
    bits: ClassVar[int]
    largest: ClassVar[int]

    @property
    def block(self) -> int:
        """Elements of a block."""

    @property
    def smallest_scale(self) -> float:
        """The smallest scale of a block."""

    @property
    def largest_scale(self) -> float:
        """The largest scale of a block."""

    def num_blocks(self, numel: int) -> int:
        """Return how many blocks hold `numel` elements."""


@triton.jit
def _round(x):
    """Round |x| < 2**22 to whole numbers, half to even."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2**23, and its bits


@triton.jit
def _fp8_code(x):
    """Round |x| <= 448 to the bits of float8_e4m3fn, half to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # exponents start at 127 - 7
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # its last bit is worth 2**-9
    subnormal = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(bits < (121 << 23), subnormal, normal) | sign


@triton.jit
def _fp8_value(code):
    """Return what the bits of a float8_e4m3fn mean."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # 2**-9
    return (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _highest(values):
    """Return the bits of the largest magnitude of each row."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def _load(source, at, inside):
    values = tl.load(source + at, mask=inside, other=0)
    if source.dtype.element_ty == tl.int16:  # bits of bf16
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _scales(data, row, run):
    """Return where the scales of blocks `row` lie, of `run` packed bytes each."""
    return data.to(tl.pointer_type(tl.int32), bitcast=True) + row * (run // 4 + 1)


@triton.jit
def _codes(data, row, column, run):
    """Return where the packed bytes of these blocks lie."""
    return data + row[:, None] * (run + 4) + 4 + column


@triton.jit
def _encode(
    source, data, numel, limits, block: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr
):
    largest, smallest_scale, largest_scale = limits
    rows: tl.constexpr = tile[0]
    width: tl.constexpr = tile[1]
    run: tl.constexpr = block // 2 if kind == "int4" else block  # packed bytes
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, width)[None, :]
    there = row * block < numel
    inside = there[:, None] & (column < run)
    at = row[:, None] * block + column
    low = _load(source, at, inside & (at < numel))
    amax = _highest(low)
    if kind == "int4":
        high = _load(source, at + run, inside & (at + run < numel))
        amax = tl.maximum(amax, _highest(high))
    finite = amax < 0x7F800000
    scale = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full([rows], largest, tl.float32))
    scale = tl.minimum(tl.maximum(scale, smallest_scale), largest_scale)
    tl.store(
        _scales(data, row, run),
        tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000),
        mask=there,
    )
    divisor = tl.broadcast_to(scale[:, None], [rows, width])
    if kind == "fp8":
        code = _fp8_code(tl.div_rn(low, divisor))
    else:
        code = _round(tl.div_rn(low, divisor))
    if kind == "int4":
        code += 16 * _round(tl.div_rn(high, divisor))
    code = tl.where(finite[:, None], code, 0)
    tl.store(_codes(data, row, column, run), code.to(tl.uint8), mask=inside)


@triton.jit
def _store(out, at, inside, value, add: tl.constexpr):
    if add:
        value = _load(out, at, inside) + value
    if out.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(value != value, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        tl.store(out + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decode(
    data, out, numel,
    block: tl.constexpr, tile: tl.constexpr, kind: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    rows: tl.constexpr = tile[0]
    width: tl.constexpr = tile[1]
    run: tl.constexpr = block // 2 if kind == "int4" else block
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, width)[None, :]
    there = row * block < numel
    inside = there[:, None] & (column < run)
    at = row[:, None] * block + column
    scale = tl.load(_scales(data, row, run), mask=there, other=0)
    scale = scale.to(tl.float32, bitcast=True)[:, None]
    code = tl.load(_codes(data, row, column, run), mask=inside, other=0).to(tl.int32)
    if kind == "fp8":
        _store(out, at, inside & (at < numel), _fp8_value(code) * scale, add)
    else:
        code = (code << 24) >> 24  # signed
        if kind == "int4":
            high = (code + 8) >> 4
            _store(out, at + run, inside & (at + run < numel), high.to(tl.float32) * scale, add)
            code -= high * 16
        _store(out, at, inside & (at < numel), code.to(tl.float32) * scale, add)


@triton.jit
def _push(x, i, sums, levels: tl.constexpr):
    """Add number `i` to a binary counter: sums of 1, 2, 4, ... numbers. Two sums of as many numbers
    are added, the earlier one first. A sum of 2 ** k rests in sk.
    """
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    if levels > 1 and i & 1 == 1:
        x = s0 + x
    if levels > 2 and i & 3 == 3:
        x = s1 + x
    if levels > 3 and i & 7 == 7:
        x = s2 + x
    if levels > 4 and i & 15 == 15:
        x = s3 + x
    if levels > 5 and i & 31 == 31:
        x = s4 + x
    if levels > 6 and i & 63 == 63:
        x = s5 + x
    if levels > 7 and i & 127 == 127:
        x = s6 + x
    if levels > 0 and i & 1 == 0:
        s0 = x
    if levels > 1 and i & 3 == 1:
        s1 = x
    if levels > 2 and i & 7 == 3:
        s2 = x
    if levels > 3 and i & 15 == 7:
        s3 = x
    if levels > 4 and i & 31 == 15:
        s4 = x
    if levels > 5 and i & 63 == 31:
        s5 = x
    if levels > 6 and i & 127 == 63:
        s6 = x
    if levels > 7 and i & 255 == 127:
        s7 = x
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def _fold(sums, size, levels: tl.constexpr):
    """Return the sum of what a counter of `size` numbers holds, the last ones first."""
    s0, s1, s2, s3, s4, s5, s6, s7 = sums
    total = s0
    if levels > 1 and size & 2:
        total = s1 if size & 1 == 0 else s1 + total
    if levels > 2 and size & 4:
        total = s2 if size & 3 == 0 else s2 + total
    if levels > 3 and size & 8:
        total = s3 if size & 7 == 0 else s3 + total
    if levels > 4 and size & 16:
        total = s4 if size & 15 == 0 else s4 + total
    if levels > 5 and size & 32:
        total = s5 if size & 31 == 0 else s5 + total
    if levels > 6 and size & 64:
        total = s6 if size & 63 == 0 else s6 + total
    if levels > 7 and size & 128:
        total = s7 if size & 127 == 0 else s7 + total
    return total


@triton.jit
def _sum_node(rows, stride, at, inside, node_size, levels: tl.constexpr):
    """Return the sum of one node's rows, and where the next node's begin."""
    x = _load(rows, at, inside)
    sums = _push(x, 0, (x, x, x, x, x, x, x, x), levels)
    i = 1  # no range(): the interpreter takes none over what a launch passes
    while i < node_size:
        rows += stride
        sums = _push(_load(rows, at, inside), i, sums, levels)
        i += 1
    return _fold(sums, node_size, levels), rows + stride


@triton.jit(do_not_specialize=["num_nodes", "node_size"])
def _sum(rows, out, numel, stride, num_nodes, node_size, how: tl.constexpr):
    """`how`: the bits of `node_size` and of `num_nodes`, and whether to add to `out`."""
    levels: tl.constexpr = how[0]
    node_levels: tl.constexpr = how[1]
    at = tl.program_id(0).to(tl.int64) * _RUN + tl.arange(0, _RUN)
    inside = at < numel
    x, rows = _sum_node(rows, stride, at, inside, node_size, levels)
    sums = _push(x, 0, (x, x, x, x, x, x, x, x), node_levels)
    i = 1
    while i < num_nodes:
        x, rows = _sum_node(rows, stride, at, inside, node_size, levels)
        sums = _push(x, i, sums, node_levels)
        i += 1
    _store(out, at, inside, _fold(sums, num_nodes, node_levels), how[2])


def sum_rows(rows: torch.Tensor, out: torch.Tensor, *, node_size: int, accumulate: bool) -> None:
    """Store (or add) the sum of `rows` [ranks, n], each contiguous, in `out` [n] as
    ``ordered_sum`` does, which has checked both: up to MOST ranks in a node, and nodes.
    """
    numel, num_nodes = out.numel(), rows.shape[0] // node_size
    assert max(num_nodes, node_size) <= MOST, (num_nodes, node_size)
    if numel == 0:
        return
    with _current(out):
        _sum[(triton.cdiv(numel, _RUN.value),)](
            _bits_of_bf16(rows), _bits_of_bf16(out), numel, rows.stride(0), num_nodes, node_size,
            how=(node_size.bit_length(), num_nodes.bit_length(), accumulate), **OPTIONS,
        )  # fmt: skip


@triton.jit
def _halve(x, rows: tl.constexpr, width: tl.constexpr):
    """Add element i of the first half of each row to element i of the second."""
    return tl.sum(tl.reshape(x, [rows, 2, width]), axis=1)


@triton.jit
def _squares(numbers, bins, numel, strides, least, last, low: tl.constexpr):
    """`strides`: between copies of the bins, and between their lower and higher parts; `least`: the
    exponent of bin 0; `last`: the bin of infinity; `low`: bits of the lower part.
    """
    copies, parts = strides
    row = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    at = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = _load(numbers, at, at < numel).to(tl.float64)
    x = x * x
    x = _halve(x, _ROWS, 32)
    x = _halve(x, _ROWS, 16)
    x = _halve(x, _ROWS, 8)
    x = _halve(x, _ROWS, 4)
    x = _halve(x, _ROWS, 2)
    bits = tl.sum(x, axis=1).to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF  # NaN may have a sign
    place = tl.minimum(tl.maximum((bits >> 52) - least, 0), last)
    place += tl.where(bits > 0x7FF0000000000000, 1, 0)
    first = bits & ((1 << low) - 1)
    second = ((bits >> low) & ((1 << (52 - low)) - 1)) | (1 << (52 - low))
    bins += (tl.program_id(0) % _COPIES) * copies
    there = row * 64 < numel
    highest = tl.max(tl.where(there, place, -1), axis=0)
    while highest >= 0:  # exponents: a few
        here = there & (place == highest)
        tl.atomic_add(bins + highest, tl.sum(tl.where(here, first, 0), axis=0), sem="relaxed")
        tl.atomic_add(
            bins + parts + highest, tl.sum(tl.where(here, second, 0), axis=0), sem="relaxed"
        )
        there = there & (place != highest)
        highest = tl.max(tl.where(there, place, -1), axis=0)


def add_squares(
    numbers: torch.Tensor, bins: torch.Tensor, *, least: int, last: int, low: int
) -> None:
    """Add the sums of squares of the blocks of `numbers` [n] to `bins`, int64 [COPIES, 2, places]:
    the lower `low` bits of each to the first, the rest to the second, at the place of its exponent;
    to which copy is of no matter (state/norms.py).
    """
    if numbers.numel() == 0:
        return
    with _current(numbers):
        _squares[(triton.cdiv(numbers.numel(), 64 * _ROWS.value),)](
            _bits_of_bf16(numbers), bins, numbers.numel(), bins.stride()[:2], least, last, low=low,
            **OPTIONS,
        )  # fmt: skip


def encode(codec: Coded, source: torch.Tensor, out: torch.Tensor) -> None:
    """Encode `source` [n] into `out` [encoded_bytes(n)] as ``codec.encode`` does, which has
    checked both.
    """
    if source.numel() == 0:
        return
    numel, tile = source.numel(), tile_of(codec)
    limits = float(codec.largest), codec.smallest_scale, codec.largest_scale
    with _current(source):
        _encode[(triton.cdiv(codec.num_blocks(numel), tile[0]),)](
            _bits_of_bf16(source), out, numel, limits,
            block=codec.block, tile=tile, kind=codec.name, **OPTIONS,
        )  # fmt: skip


def decode(codec: Coded, data: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Decode `data` [encoded_bytes(n)] into `out` [n], or add it, as ``codec.decode`` does,
    which has checked both.
    """
    if out.numel() == 0:
        return
    numel, tile = out.numel(), tile_of(codec)
    with _current(out):
        _decode[(triton.cdiv(codec.num_blocks(numel), tile[0]),)](
            data, _bits_of_bf16(out), numel,
            block=codec.block, tile=tile, kind=codec.name, add=add, **OPTIONS,
        )  # fmt: skip


def tile_of(codec: Coded) -> tuple[int, int]:
    """Return (blocks per program, columns that a program spans); Triton's spans are powers of
    2.
    """
    width = triton.next_power_of_2(codec.block * codec.bits // 8)
    return max(_ELEMENTS // width, 1), width


def _bits_of_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _current(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
