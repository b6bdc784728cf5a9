"""xxh3-64 of what was last written to each unit of a storage, kept in memory.

Because the sums are not on the disk, a lost or misplaced write is found as surely as a flipped bit.
A unit that was never written has no sum. Cost: 8 bytes per MiB, and one pass over the bytes of
every read and write, beside the disk and without the GIL.
"""

from __future__ import annotations

import xxhash

UNIT = 1 << 20  # bytes that one sum covers


class Checksums:
    """The sums of `num_bytes` bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._sums: list[int | None] = [None] * -(-num_bytes // UNIT)

    def note(self, low: int, data: memoryview) -> None:
        """Remember `data`, whole units from byte `low` on."""
        for index, unit in self._units(low, data):
            self._sums[index] = xxhash.xxh3_64_intdigest(unit)

    def first_difference(self, low: int, data: memoryview) -> tuple[int, int] | None:
        """Return the byte range of the first unit of `data` with another sum, None without one."""
        for index, unit in self._units(low, data):
            expected = self._sums[index]
            if expected is not None and xxhash.xxh3_64_intdigest(unit) != expected:
                return index * UNIT, index * UNIT + len(unit)
        return None

    @staticmethod
    def _units(low: int, data: memoryview) -> list[tuple[int, memoryview]]:
        assert low % UNIT == 0, low
        starts = range(0, len(data), UNIT)
        return [((low + start) // UNIT, data[start : start + UNIT]) for start in starts]
