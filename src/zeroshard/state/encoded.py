"""Weights that rest encoded: a storage on the device whose elements are kept as blocks of int8,
int4 or fp8 (MixZ++, for frozen weights).

    encoded   | scale | codes | scale | codes | ...  what rests, and what travels in a gather
    borrowed  |  decoded elements  |                 what checkpoints read and write: encoding them
                                                     again gives the same bytes

Invariant: reads give what the last write was decoded to. Ranges start on a block and end on one, or
at the end of a parameter, after which its last block is padding. Cost: ``stride/block`` bytes per
element; a copy of what is read. It does not know other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.comm.codec import Codec
from zeroshard.core.placement import Tier
from zeroshard.core.work import DoneWork, Work

__all__ = ["EncodedStorage"]


class EncodedStorage:
    """A Storage (tier/store.py) of `numel` elements, encoded on `device`."""

    tier = Tier.DEVICE

    def __init__(
        self, key: str, numel: int, dtype: torch.dtype, codec: Codec, device: torch.device
    ) -> None:
        self.key = key
        self.numel = numel
        self.dtype = dtype
        self.codec = codec
        # zeros decode to zeros
        self.encoded = torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        return self.encoded.numel()

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        self.codec.decode(self._at(start, stop), out)
        return DoneWork()

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        self.codec.encode(source.to(self.encoded.device), self._at(start, stop))
        return DoneWork()

    def _at(self, start: int, stop: int) -> torch.Tensor:
        return self.encoded[slice(*self.codec.bytes_of((start, stop)))]

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        decoded = torch.empty(stop - start, dtype=self.dtype, device=self.encoded.device)
        self.read(start, stop, decoded)
        yield decoded
        if write:
            self.write(start, stop, decoded)

    def close(self) -> None:
        self.encoded = torch.empty(0, dtype=torch.uint8)
