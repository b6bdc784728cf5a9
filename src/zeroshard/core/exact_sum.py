"""Sums of fp64 numbers that do not depend on the order of addition: each is an integer, rounded
once, when it is read.

Every finite fp64 number is a multiple of 2^-1074, so a sum of them is an integer number of these
units. Integers have one sum in every order and under every cut, so ranks that add their sums get
the sum that one rank would have formed::

    fp64        2^53 + 1.0 + 1.0 - 2^53      = 0.0 or 2.0, by the order
    ExactSum    (2^1127 + 2^1074 + 2^1074 - 2^1127) units = 2.0

Infinities and NaN are carried beside the integer, as fp64 adds them. Invariant: ``float`` of a sum
of finite numbers is what ``math.fsum`` returns. Cost: an integer of at most 266 bytes and a few
bits; on the wire its lowest zero bytes are left out, so that sums of squares of gradients take
about 30.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

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
