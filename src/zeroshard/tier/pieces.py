"""How one transfer is cut into pieces for worker threads. Pure arithmetic.

A unit is the least that the disk moves: its block, or the range that one checksum covers. A piece
never covers parts of two units, so that only the first and the last can be ragged, and everything
between goes straight between disk and memory::

    unit          |-------|-------|-------|-------|-------|
    transfer         =========================
    pieces           |hhhh|mmmmmmmmmmmmmmm|tttt             m at most `chunk` bytes each; h and t
                                                     inside one unit: read, change, write
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.tier.direct_io import BLOCK, round_up


@dataclass(frozen=True, slots=True)
class DiskPiece:
    """Bytes [start, stop) of a storage, inside the whole units [low, high) of its file."""

    start: int
    stop: int
    low: int
    high: int

    @property
    def whole(self) -> bool:
        """Whether it is all of its units."""
        return self.start == self.low and self.stop == self.high


def cut(start: int, stop: int, *, storage_bytes: int, unit: int, chunk: int) -> list[DiskPiece]:
    """Return the pieces of bytes [start, stop); the last unit ends with the file's last block."""
    assert 0 <= start <= stop <= storage_bytes, (start, stop, storage_bytes)
    assert chunk % unit == 0 and unit % BLOCK == 0, (chunk, unit, BLOCK)
    file_bytes = round_up(storage_bytes, BLOCK)
    pieces = []
    while start < stop:
        if start % unit:
            end = round_up(start, unit)
        else:
            end = (start // chunk + 1) * chunk
            if stop < min(end, file_bytes) and stop - stop % unit > start:
                end = stop - stop % unit
        end = min(end, stop)
        low, high = start - start % unit, min(round_up(end, unit), file_bytes)
        pieces.append(DiskPiece(start, end, low, high))
        start = end
    return pieces
