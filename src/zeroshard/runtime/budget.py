"""How many bytes of gathered weights and of gradient buffers one engine may have in use at a time.

    2 x the largest unit + prefetch_bytes     (default: the largest unit once more; two of them
                                              where weights are read around the end of a forward)

That is the unit in use, the next one, and either what is gathered ahead or the buffer of a reduce.
Where the host runs ahead of the lanes (``Streams.enqueues``) it is the largest unit once more, so
that two reduces are under way: with one, the backward of every unit would wait for the reduce of
the one before.

Weights make room in it by releasing, reductions by waiting; what they hold is counted in one meter.
Weights that a row keeps from the forward to the backward (``zero3-keep``) come on top: were they
part of it, nothing would be gathered ahead once they fill it, and every reduce would be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.memory import MemoryCounter
from zeroshard.runtime.unit import Unit

__all__ = ["Budget"]


class Budget:
    """The bytes that weights and gradients in use share."""

    def __init__(
        self,
        units: Sequence[Unit],
        meter: MemoryCounter,
        prefetch_bytes: int | None,
        *,
        enqueues: bool = False,
        around: bool = False,
    ) -> None:
        """`around`: weights are read around the end of a forward (prefetch.py)."""
        largest = max((unit.nominal_bytes for unit in units), default=0)
        # a second unit on its way keeps a disk's queue filled while the first one arrives
        chosen = (1 + around) * largest
        self.prefetch_bytes = chosen if prefetch_bytes is None else prefetch_bytes
        self.num_bytes = (2 + enqueues) * largest + self.prefetch_bytes
        self._kept: dict[int, int] = {}  # bytes of units that wait for their backward, by index
        self._kept_bytes = 0
        self._meter = meter

    @property
    def left(self) -> int:
        """The bytes that are not in use; below zero where one pass needs more at the same time."""
        return self.num_bytes + self._kept_bytes - self._meter.live

    def keep(self, unit: Unit, *, kept: bool) -> None:
        """Note whether `unit`, which is gathered, waits for its backward."""
        if kept != (unit.index in self._kept):
            if kept:
                self._kept[unit.index] = unit.full_bytes
                self._kept_bytes += unit.full_bytes
            else:
                self._kept_bytes -= self._kept.pop(unit.index)

    def abandon(self) -> None:
        """Forget what is kept: every unit is back at rest."""
        self._kept.clear()
        self._kept_bytes = 0
