"""Norms of gradients, and whether they are finite: on an accelerator one table, read once.

    slices of all gradients here    | s0 | s1 | s2 | ... |      blocks of 64, halved to their sums
    their sums of squares            [ q0,  q1,  q2, ... ]      one read by the host

[Note: order-free norm] The sum of squares is one number for any cut of the gradient. It is defined
on blocks of 64 elements, counted from the first element of each parameter; every cut inside a
parameter is a multiple of 64 (core/layout.py). Squares are formed in fp64, exactly. A block, filled
up with zeros where the parameter ends, is added in halves::

    64 -> 32 -> 16 -> 8 -> 4 -> 2 -> 1      element i of a half to element i of the other half

Every step is an elementwise addition, so no vectorised reduction chooses an order, and all devices
agree. The sums of blocks are then added exactly, as integers, wherever they were formed, and the
total is rounded once (`ExactSum`).

On the device the 53 bits of a block's sum are cut in two, and each part is added to the bin of its
exponent, an integer. For the host, four bins make one: the parts have 32 bits then, so int64 holds
the sums of 2^30 blocks. Squares of fp32 numbers lie between 2^-298 and 2^262: 146 bins, 1.2 kB.

No square of a finite number in fp32 overflows in fp64, so the same table says whether all of them
are finite and what the norm is. A read waits for all work that is queued on the device, which is
why there is one per step. The host reads its own memory for nothing, so that nothing is collected
on the CPU. Where Triton serves the device, a slice is one kernel (comm/kernels.py: add_squares) and
needs no scratch; elsewhere scratch is one chunk in fp64, and a quarter of it for each of five
vectors of integers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from zeroshard.comm import kernels_for
from zeroshard.core.layout import ALIGN
from zeroshard.memory import reads_wait

# --------------------------------------------------------------------------------------- exact sums
# A sum of fp64 numbers does not depend on the order of addition where it is an integer, rounded
# once, when it is read.
#
# Every finite fp64 number is a multiple of 2^-1074, so a sum of them is an integer number of these
# units. Integers have one sum in every order and under every cut, so ranks that add their sums get
# the sum that one rank would have formed::
#
#     fp64        2^53 + 1.0 + 1.0 - 2^53      = 0.0 or 2.0, by the order
#     ExactSum    (2^1127 + 2^1074 + 2^1074 - 2^1127) units = 2.0
#
# Infinities and NaN are carried beside the integer, as fp64 adds them. Invariant: ``float`` of a
# sum of finite numbers is what ``math.fsum`` returns. Cost: an integer of at most 266 bytes and a
# few bits; on the wire its lowest zero bytes are left out, so that sums of squares of gradients
# take about 30.


_UNIT = -1074  # exponent of the smallest positive fp64 number
_HEAD = struct.Struct("<dH")  # `odd`, lowest bytes of the integer that are zero


@dataclass(frozen=True)
class ExactSum:
    """A sum of fp64 numbers, not rounded."""

    units: int = 0  # multiples of 2^-1074
    odd: float = 0.0  # the sum of the numbers that are not finite

    @classmethod
    def of(cls, value: float) -> ExactSum:
        """Return `value` as a sum of one number."""
        if not math.isfinite(value):
            return cls(odd=value)
        numerator, denominator = value.as_integer_ratio()  # a power of two
        return cls((numerator << -_UNIT) // denominator)

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.odd + other.odd)

    def __float__(self) -> float:
        """Return the sum rounded once to fp64, to nearest. Raises OverflowError beyond fp64."""
        return self.units / (1 << -_UNIT) if self.is_finite else self.odd

    @property
    def is_finite(self) -> bool:
        """Whether all numbers were finite."""
        return self.odd == 0.0

    def pack(self) -> bytes:
        """Return it as bytes."""
        lowest = (self.units & -self.units).bit_length() - 1
        zeros = max(lowest, 0) // 8
        units = self.units >> 8 * zeros
        length = units.bit_length() // 8 + 1  # and a bit for the sign
        return _HEAD.pack(self.odd, zeros) + units.to_bytes(length, "little", signed=True)

    @classmethod
    def unpack(cls, payload: bytes) -> ExactSum:
        """Return what `pack` has packed."""
        odd, zeros = _HEAD.unpack_from(payload)
        units = int.from_bytes(payload[_HEAD.size :], "little", signed=True)
        return cls(units << 8 * zeros, odd)


# ----------------------------------------------------------------------------- squares of gradients

_CHUNK = 1 << 17  # elements of fp32 that stay in a core's own cache
_BLOCKS = 1 << 18  # that are halved together on an accelerator without Triton: few kernels
_BATCH = 16  # chunks; their blocks are added to the bins together

_MANTISSA = 52  # stored bits, of fp64
_INFINITY = 2047 << _MANTISSA  # as an integer; NaN is larger
_LOW = 24  # bits of the lower part
_WIDTH = 4  # exponents of one bin that the host reads; divides _LOW
_LEAST = 725  # the biased exponent of 2^-298, the square of the smallest number of fp32
_PLACES = 560  # exponents from there on, up to 2^262
_ODD = _WIDTH + _PLACES  # place of infinity; below _WIDTH: nothing, after it: NaN
_BINS = (_PLACES + _LOW) // _WIDTH  # of both parts


@dataclass(frozen=True)
class SquaresRequest:
    """A slice with a sum of squares that the host has yet to learn, or whether it is finite."""

    numbers: torch.Tensor  # [n], on the device of all others that are asked for with it
    learn: Callable[[ExactSum | bool], None]


def squares_of(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of `slices` (of at most fp32, each from the beginning of a block
    on) in bins, int64 [len(slices), bins], on their device; nothing is read.
    """
    sums = _BlockSums(slices[0], len(slices), sum(_num_blocks(one) for one in slices))
    for row, one in enumerate(slices):
        sums.add(one, row)
    return sums.table()


def read_squares(requests: Sequence[SquaresRequest], *, exactly: bool = True) -> None:
    """Tell each of `requests` (at least one) its sum of squares: one table, one read. Not
    `exactly`: whether it is finite, in a few kernels for all.
    """
    if not exactly:
        norms = torch._foreach_norm([one.numbers for one in requests], 2, dtype=torch.float64)
        for one, value in zip(requests, torch.stack(norms).square_().tolist(), strict=True):
            one.learn(math.isfinite(value))
        return
    rows = squares_of([one.numbers for one in requests]).tolist()
    for one, row in zip(requests, rows, strict=True):
        one.learn(_exact(row))


def digits_of(table: torch.Tensor) -> torch.Tensor:
    """Return the sums that rows of a `table` hold as digits to the base of 2^_WIDTH that may be
    added, int64 [rows, digits + 2]: an entry takes 2^55 sums of any size. Nothing is read.
    """
    return torch.cat((_spread(table[:, :-2]), table[:, -2:]), 1)


def total_of(digits: torch.Tensor) -> torch.Tensor:
    """Return the sum that is there in `digits` [digits + 2], rounded once to fp64, 0-d: what
    ``float(ExactSum)`` is. Nothing is read.
    """
    infinite, nan = digits[-2:].unbind()
    parts = _spread(_spread(digits[None, :-2]))[0]  # none above 2 * 15
    place = torch.arange(len(parts), device=parts.device)
    # a carry goes through places of 15: the last other one before says whether there is one
    ends = (2 * place + (parts > 15)) * (parts != 15)
    carries = (ends * (place <= place[:, None])).amax(1) & 1
    parts = (parts + pad(carries, (1, -1))) & 15
    top = (place * (parts > 0)).max()
    kept = pad(parts, (14, 0))[top + 14 - torch.arange(15, device=parts.device)]
    rest = ((place < top - 14) & (parts > 0)).any()  # where there is more, no tie is one
    # 57 bits at least, and one for the rest: the cast rounds to 53, and the power is exact
    number = ((kept << torch.arange(56, -1, -_WIDTH, device=parts.device)).sum() << 1) + rest
    power = (_WIDTH * top + _LEAST - _MANTISSA - 57) << _MANTISSA
    total = number.double() * power.view(torch.float64)
    return total.masked_fill(infinite > 0, math.inf).masked_fill(nan > 0, math.nan)


def _spread(sums: torch.Tensor) -> torch.Tensor:
    """Return sums [rows, digits] with each cut into 16 digits that are added in their places,
    [rows, digits + 15].
    """
    rows, width = sums.shape
    cut = (sums[..., None] >> torch.arange(0, 64, _WIDTH, device=sums.device)) & 15
    # a row longer by one than it is read moves each digit one place on
    sheared = pad(cut, (0, width)).flatten(1)[:, : width * (width + 15)]
    return sheared.view(rows, width, width + 15).sum(1)


class SquaresSum:
    """The sum of squares of slices on any devices: one read of each."""

    def __init__(self) -> None:
        self._known = ExactSum()
        self._blocks: dict[torch.device, _BlockSums] = {}

    def add(self, numbers: torch.Tensor) -> None:
        """Add the squares of a slice, which is read now, and begins where a block does."""
        blocks = self._blocks.get(numbers.device)
        if blocks is None:
            blocks = self._blocks[numbers.device] = _BlockSums(numbers)
        blocks.add(numbers)

    def add_known(self, squares: ExactSum) -> None:
        """Add a sum of squares."""
        self._known += squares

    def read(self) -> ExactSum:
        """Return the sum."""
        rows = [blocks.table().tolist()[0] for blocks in self._blocks.values()]
        return sum(map(_exact, rows), self._known)


def _exact(row: Sequence[int]) -> ExactSum:
    """Return the sum of squares that a row of a table holds."""
    *bins, infinite, nan = row
    # bin 0 counts 2^-350, the last of the 53 bits of 2^-298; ExactSum counts 2^-1074
    units = sum([count << _WIDTH * place for place, count in enumerate(bins) if count])
    return ExactSum(units << _LEAST - 1, math.nan if nan else math.inf if infinite else 0.0)


def _num_blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() // ALIGN)


class _BlockSums:
    """Sums of squares on one device, formed block by block and added to bins.

    Blocks are collected in `_wide` [blocks, 64] until it is full, then halved to `_sums`; those are
    collected, too, since every call of a kernel has its price.
    """

    def __init__(self, like: torch.Tensor, num_sums: int = 1, most: int = 1 << 62) -> None:
        """Make `num_sums` sums on the device of `like`, for at most `most` blocks."""
        self._kernels = kernels_for(like)
        # lower and higher parts, by row and exponent
        shape = (self._kernels.COPIES if self._kernels else 1, 2, num_sums, _ODD + 2)
        self._bins = torch.zeros(shape, dtype=torch.int64, device=like.device)
        self._filled = self._summed = 0
        if self._kernels:
            return
        size = max(min(most, _BLOCKS if reads_wait(like) else _chunk() // ALIGN), 1)
        self._wide = torch.empty(size, ALIGN, dtype=torch.float64, device=like.device)
        self._flat = self._wide.view(-1)
        self._halves = _halves(self._wide)
        self._sums = self._flat.new_empty(min(max(most, 1), _BATCH * size))
        # of each sum of a block: its row
        self._rows = torch.zeros_like(self._sums, dtype=torch.int64) if num_sums > 1 else None

    def add(self, numbers: torch.Tensor, row: int = 0) -> None:
        """Add the squares of `numbers` [n] to the squares of `row`."""
        assert numbers.dtype is not torch.float64, "its squares are not exact"
        if self._kernels:
            bins, least = self._bins[:, :, row], _LEAST - _WIDTH
            self._kernels.add_squares(numbers, bins, least=least, last=_ODD, low=_LOW)
            return
        for part in torch.split(numbers, len(self._flat)):
            blocks, numel = _num_blocks(part), part.numel()
            if self._filled + blocks > len(self._wide):
                self._halve()
            first, self._filled = self._filled, self._filled + blocks
            self._flat[first * ALIGN : first * ALIGN + numel].copy_(part)
            if numel % ALIGN:
                self._flat[first * ALIGN + numel : self._filled * ALIGN].zero_()
            if row:
                assert self._rows is not None
                self._rows[self._summed + first : self._summed + self._filled].fill_(row)

    def _halve(self) -> None:
        """Add up the blocks that are there."""
        wide, halves = self._wide, self._halves
        if self._filled < len(wide):
            wide = wide[: self._filled]
            halves = _halves(wide)
        wide.mul_(wide)
        for half, other in halves[:-1]:
            half.add_(other)
        first, self._summed = self._summed, self._summed + self._filled
        torch.add(*halves[-1], out=self._sums[first : self._summed])
        self._filled = 0
        if len(self._sums) - self._summed < len(self._wide):
            self._collect()

    def _collect(self) -> None:
        """Add the sums of blocks to the bins."""
        bits = self._sums[: self._summed].view(torch.int64)
        bits.bitwise_and_((1 << 63) - 1)  # NaN may have a sign
        # zeros are below all places, infinity is above them, and NaN next to it
        place = (bits >> _MANTISSA).sub_(_LEAST - _WIDTH).clamp_(0, _ODD).add_(bits > _INFINITY)
        if self._rows is not None:
            place.add_(self._rows[: self._summed], alpha=_ODD + 2)
            self._rows.zero_()
        lower, higher = self._bins.view(2, -1)
        lower.index_add_(0, place, bits & (1 << _LOW) - 1)
        high = _MANTISSA - _LOW
        bits.bitwise_right_shift_(_LOW).bitwise_and_((1 << high) - 1).bitwise_or_(1 << high)
        higher.index_add_(0, place, bits)
        self._summed = 0

    def table(self) -> torch.Tensor:
        """Return the bins of all that was added, int64 [num_sums, bins + 2]; the last two are
        positive where there was infinity or NaN.
        """
        if not self._kernels:
            self._halve()
            self._collect()
        parts = self._bins.sum(0)
        table = parts.new_zeros(parts.shape[1], _BINS + 2)
        finite = parts[:, :, _WIDTH:_ODD].reshape(2, len(table), -1, _WIDTH)
        low, high = (finite << torch.arange(_WIDTH, device=finite.device)).sum(3)
        table[:, : low.shape[1]] = low
        table[:, -2 - high.shape[1] : -2] += high
        table[:, -2:] = parts[1, :, _ODD:]
        return table


def _halves(wide: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the halves of `wide` [blocks, 64], of its first half, and so on."""
    sizes = [ALIGN >> step for step in range(1, ALIGN.bit_length() - 1)]
    pairs = [(wide[:, :size], wide[:, size : 2 * size]) for size in sizes]
    return [*pairs, (wide[:, 0], wide[:, 1])]


def _chunk() -> int:
    """Return how many elements a pass on the CPU takes at a time: a call of a kernel costs as many
    threads the more, and each has a cache.
    """
    return _CHUNK * torch.get_num_threads()


def chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut `tensor` for cache-sized passes on CPU; other devices take it whole."""
    return (tensor,) if reads_wait(tensor) else torch.split(tensor, _chunk())


def passes(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group `tensors`, cut like `chunks`, so that what is done to a group, one operation after
    another, stays in a cache; other devices take all at once.
    """
    group, left = list[torch.Tensor](), 0
    size = sum(map(torch.Tensor.numel, tensors)) if any(map(reads_wait, tensors[:1])) else _chunk()
    for tensor in tensors:
        for part in torch.split(tensor, size) if tensor.numel() > size else (tensor,):
            if part.numel() > left and group:
                yield group
                group = []
            left = (left if group else size) - part.numel()
            group.append(part)
    if group:
        yield group


def divide(sums: Sequence[torch.Tensor], averages: Sequence[torch.Tensor], divisor: float) -> bool:
    """Divide `sums` by `divisor`, in place; return whether they and `averages` are known to be
    finite: not where the host would wait for it, or where squares overflow.
    """
    waits = any(map(reads_wait, (*sums[:1], *averages[:1])))
    norms: list[torch.Tensor] = []
    for tensors, by in (sums, divisor), (averages, 1.0):
        for group in passes(tensors):
            if by != 1.0 and waits and math.frexp(by)[0] != 0.5:
                # a device multiplies by 1 / by: of a power of two alone that has the same bits
                for one in group:
                    one.div_(by)
            elif by != 1.0:
                torch._foreach_div_(group, by)
            norms += [] if waits else torch._foreach_norm(group, 2, dtype=torch.float32)
    return not waits and (not norms or math.isfinite(torch.stack(norms).sum()))


class RunningSum:
    """The sum of all numbers that have passed by, on the host and on a device: it is not finite
    where one of them is not.
    """

    def __init__(self) -> None:
        self._totals: dict[bool, torch.Tensor] = {}  # by whether the host waits for it

    def add(self, numbers: torch.Tensor) -> None:
        """Add all of `numbers`, on their device."""
        for chunk in chunks(numbers):
            self._hold(chunk.sum(dtype=torch.float32))

    def _hold(self, more: torch.Tensor) -> None:
        waits = reads_wait(more)
        held = self._totals.get(waits)
        self._totals[waits] = more if held is None else held + more

    def is_finite(self) -> bool:
        """Whether it is finite, as far as the host knows: what is `unread` is not known yet."""
        known = self._totals.get(False)
        return known is None or bool(torch.isfinite(known))

    def unread(self) -> list[SquaresRequest]:
        """Return what the host has yet to read of an accelerator to know whether it is finite."""
        total = self._totals.get(True)
        return [] if total is None else [SquaresRequest(total.reshape(1), self._learn)]

    def _learn(self, found: ExactSum | bool) -> None:
        """Keep on the host whether what the numbers that passed the device add up to is finite."""
        del self._totals[True]
        finite = found if isinstance(found, bool) else found.is_finite
        self._hold(torch.tensor(0.0 if finite else math.nan, dtype=torch.float64))
