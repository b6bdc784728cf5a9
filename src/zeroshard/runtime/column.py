"""The column of one segment that stays on the device between a forward and its backward.

ZeRO++'s secondary shard (arXiv 2306.10209, section 3.2): with it the backward gathers inside the
node alone. Where weights travel encoded, the encoded column of the forward's gather is kept, so
that both passes compute with the same numbers.

Cost: ``numel / node_size`` elements per segment, from its forward to its backward. It gathers
nothing; runtime/flat_weights.py does.
"""

from __future__ import annotations

import torch

from zeroshard.comm.codec import Codec
from zeroshard.core.layout import Range
from zeroshard.runtime.streams import Streams

__all__ = ["KeptColumn"]


class KeptColumn:
    """Memory for this rank's column, if the routes of a segment keep one."""

    def __init__(
        self, key: str, span: Range, codec: Codec | None, streams: Streams, *, is_wanted: bool
    ) -> None:
        self.tensor: torch.Tensor | None = None
        self._key = key
        self._span = span
        self._codec = codec
        self._streams = streams
        self._is_wanted = is_wanted
        # the encoded column of what is gathered now
        self._arrived: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """What streams call the memory, and transports its gather."""
        return f"{self._key}.column"

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        return 0 if self.tensor is None else self.tensor.nbytes

    def arrive(self, encoded: torch.Tensor) -> None:
        """Note a copy of the column in the `encoded` buffer that a gather has filled."""
        if self._codec is not None:
            self._arrived = encoded[slice(*self._codec.bytes_of(self._span))].clone()

    def keep(self, full: torch.Tensor) -> None:
        """Keep the column of the gathered weights `full`: as it has arrived, where they travel
        encoded.
        """
        if not self._is_wanted or self.tensor is not None:
            return
        if self._codec is not None and self._arrived is None:
            return
        self._streams.alloc(self.name)
        self._streams.read(self._key)
        self.tensor = full[slice(*self._span)].clone() if self._arrived is None else self._arrived
        self._streams.write(self.name)

    def end_gather(self) -> None:
        """The gathered weights are released: what has arrived and is not kept goes."""
        self._arrived = None

    def release(self) -> None:
        """Release the memory."""
        if self.tensor is not None:
            self._streams.free(self.name)
            self.tensor = None
