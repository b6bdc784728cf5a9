"""fp32 masters at rest as 16-bit remainders of their bf16 weights: 2 bytes an element beside the
weight, in place of 4, with every bit of the master.

    master, 32 bits       | top 16 bits | low 16 bits |      rounded to nearest even: the weight
    weight << 16          |  the weight |   0 ... 0   |
    remainder             master - (weight << 16), as integers: -32768 ... 32767 are kept,
                          32768 is not: a tie that was rounded down, kept by its place

A weight that is even has 65,537 masters that round to it, one that is odd 65,535, so that 16 bits
fall short by one number in 65,536: a master half-way between two weights, below the odd one. Such
a place rests in a list, with what the remainder lacks (one in 131,072 random masters, 12 bytes
each). Differences carry over exponents, signs and into infinity, since they are taken of the bits.
In the same list is whatever else 16 bits do not hold, if a device rounds otherwise than to nearest.

Invariant: read after a write gives the same bits, but for NaN, which comes back as some NaN, and
the weights are what ``master.to(torch.bfloat16)`` gives. Whoever writes masters here writes their
weights, too, and so may do it only where a step may. Cost: one pass to read and two to write,
``8`` bytes per element of what is lent; on an accelerator the host waits for one number per write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.resting import tiles
from zeroshard.core.work import DoneWork, Work
from zeroshard.state.state import DeviceMemory, State

_TILE = 1 << 20  # elements that are encoded at a time where they come from elsewhere
_BLOCK = 256


class RemainderStorage:
    """A Storage (tier/store.py) of fp32 masters on the device, beside their bf16 `weights`."""

    tier = Tier.DEVICE
    dtype = torch.float32

    def __init__(self, key: str, weights: State, memory: DeviceMemory) -> None:
        """The masters are the `weights`, which rest on the device, until they are written;
        `memory`: of what is lent.
        """
        assert weights.dtype is torch.bfloat16, weights.dtype
        self.key = key
        self.numel = weights.numel
        self.low = torch.zeros(weights.numel, dtype=torch.int16, device=weights.whole.device)
        self._weights, self._memory = weights, memory
        self._drop_places()

    def _drop_places(self) -> None:
        # where the remainder is not all that the weight lacks, and what is missing then
        self._places = self.low.new_empty(0, dtype=torch.int64)
        self._missing = self.low.new_empty(0, dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        return self.low.nbytes + self._places.nbytes + self._missing.nbytes

    def bits(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return what rests here of elements [start, stop) beside their weights: for a digest."""
        inside = (self._places >= start) & (self._places < stop)
        return [self.low[start:stop], self._places[inside] - start, self._missing[inside]]

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        out.copy_(self._decoded(start, stop))
        return DoneWork()

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        for low, high in tiles(start, stop, _TILE):
            self._encode(low, high, source[low - start : high - start].to(self.low.device))
        return DoneWork()

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        masters = self._decoded(start, stop)
        yield masters
        if write:
            self._encode(start, stop, masters)

    def close(self) -> None:
        self.low = self.low.new_empty(0)
        self._drop_places()

    def _rounded(self, start: int, stop: int) -> torch.Tensor:
        """Return the bits of weights in fp32."""
        bits = self._memory.empty(stop - start, torch.int32)
        return bits.copy_(self._weights.whole[start:stop].view(torch.int16)).bitwise_left_shift_(16)

    def _decoded(self, start: int, stop: int) -> torch.Tensor:
        bits = self._rounded(start, stop).add_(self.low[start:stop])
        if self._places.numel():
            _, places, missing = self.bits(start, stop)
            bits[places] += missing
        return bits.view(torch.float32)

    def _encode(self, start: int, stop: int, masters: torch.Tensor) -> None:
        low = self.low[start:stop]
        self._weights.whole[start:stop].copy_(masters)
        lacks = self._rounded(start, stop)
        torch.sub(masters.view(torch.int32), lacks, out=lacks)
        low.copy_(lacks.view(torch.int16)[::2])  # the low halves
        places = _beyond_16_bits(lacks)
        places = places[masters[places] == masters[places]]
        if self._places.numel():
            others = (self._places < start) | (self._places >= stop)
            self._places, self._missing = self._places[others], self._missing[others]
        if places.numel():
            self._places = torch.cat([self._places, places + start])
            self._missing = torch.cat([self._missing, lacks[places] - low[places]])


def _beyond_16_bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return the places of what 16 bits do not hold: looked for in the few blocks that have any,
    since looking at each number takes as long as all else.
    """
    whole = numbers.numel() // _BLOCK * _BLOCK
    rows = numbers[:whole].view(-1, _BLOCK)
    low, high = rows.amin(1), rows.amax(1)  # faster than both at once
    blocks = ((low < -32768) | (high > 32767)).nonzero().flatten()
    places = (blocks[:, None] * _BLOCK + torch.arange(_BLOCK, device=numbers.device)).flatten()
    places = torch.cat([places, torch.arange(whole, numbers.numel(), device=numbers.device)])
    found = numbers[places]
    return places[(found < -32768) | (found > 32767)]
