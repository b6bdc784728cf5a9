"""Weights that rest encoded: a storage whose elements are kept as blocks of a codec in a
storage of bytes, on whatever tier (MixZ++, for frozen weights; ZeRO-Inference).

    bytes      | scale | codes | scale | codes | ...  what rests, is read, and travels in a gather
    borrowed   |  decoded elements  |                 what checkpoints read and write: encoding them
                                                      again gives the same bytes

Invariant: reads give what the last write was decoded to. Ranges start on a block and end on one, or
at the end of a parameter, after which its last block is padding. Cost: ``stride/block`` bytes per
element; a copy of what is read. It does not know other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.wire import BlockCodec
from zeroshard.core.work import DoneWork, Work
from zeroshard.tier.store import Storage, Store


class EncodedStorage:
    """A Storage (tier/store.py) of `numel` elements, encoded in `rest`, a Storage of
    ``codec.encoded_bytes(numel)`` bytes.
    """

    def __init__(self, numel: int, dtype: torch.dtype, codec: BlockCodec, rest: Storage) -> None:
        assert rest.dtype is torch.uint8 and rest.numel == codec.encoded_bytes(numel), rest.key
        self.key = rest.key
        self.numel = numel
        self.dtype = dtype
        self.tier = rest.tier
        self.codec = codec
        self._rest = rest

    @property
    def num_bytes(self) -> int:
        return self._rest.num_bytes

    @property
    def encoded(self) -> torch.Tensor:
        """The encoding [encoded_bytes(numel)] of a storage on the device."""
        assert self.tier is Tier.DEVICE, (self.key, self.tier)
        with self._rest.borrowed(0, self._rest.numel, write=True) as there:
            return there

    def read_encoded(self, out: torch.Tensor) -> Work:
        """Start copying the encoding into `out` [encoded_bytes(numel)]."""
        return self._rest.read(0, self._rest.numel, out)

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        with self.borrowed(start, stop, write=False) as decoded:
            out.copy_(decoded)
        return DoneWork()

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        low, high = self.codec.bytes_of((start, stop))
        encoded = torch.empty(high - low, dtype=torch.uint8, device=source.device)
        self.codec.encode(source, encoded)
        return self._rest.write(low, high, encoded)

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        low, high = self.codec.bytes_of((start, stop))
        with self._rest.borrowed(low, high, write=write) as encoded:
            decoded = torch.empty(stop - start, dtype=self.dtype, device=encoded.device)
            self.codec.decode(encoded, decoded)
            yield decoded
            if write:
                self.codec.encode(decoded, encoded)

    def renew(self, store: Store) -> None:
        """Take other memory of `store` for the bytes; its contents are undefined. Raises
        StorageError.
        """
        other = store.allocate(self._rest.key, self._rest.numel, torch.uint8)
        self._rest.close()
        self._rest = other

    def close(self) -> None:
        self._rest.close()
