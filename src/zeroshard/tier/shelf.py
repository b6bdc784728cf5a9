"""One state of one segment at rest on this rank: the first `split` elements in a device tensor,
the others in a slab on another tier.

    |<------ device tensor ------>|<---------- slab ---------->|
    0                           split                        numel

Most states lie on one tier as a whole (split is numel, or 0); a fraction cuts one segment of the
model in two (Offload++, Twin-Flow). The cut falls on a multiple of the layout's align, so that
every element is stepped with the same bits on either side.

Invariant: outside ``borrowed`` no tensor refers to the slab's memory. Cost: none for the device
part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.tier.link import Direct, Link
from zeroshard.tier.store import Slab, Store

__all__ = ["Shelf"]


class Shelf:
    """`numel` elements of one dtype at rest."""

    def __init__(
        self, tensor: torch.Tensor | None, slab: Slab | None = None, *, link: Link | None = None
    ) -> None:
        assert tensor is not None or slab is not None
        self.tensor = tensor  # [split], or None
        self.slab = slab  # [numel - split], or None
        self.split = 0 if tensor is None else tensor.numel()
        self.numel = self.split + (0 if slab is None else slab.numel)
        self.dtype = slab.dtype if tensor is None and slab is not None else self._device_part.dtype
        self._link = Direct() if link is None else link

    @property
    def _device_part(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor

    @property
    def whole(self) -> torch.Tensor:
        """The tensor of a state that lies on the device as a whole."""
        assert self.on_device, "part of this state rests on another tier"
        return self._device_part

    @property
    def on_device(self) -> bool:
        """Whether all of it lies on the device."""
        return self.slab is None or self.slab.numel == 0

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes at rest on each tier."""
        out = {Tier.DEVICE: self.split * self.dtype.itemsize}
        if self.slab is not None:
            out[self.slab.tier] = out.get(self.slab.tier, 0) + self.slab.num_bytes
        return {tier: num_bytes for tier, num_bytes in out.items() if num_bytes}

    def renew(self, store: Store) -> None:
        """Take another slab of `store` in place of the one here, in which something may be
        wrong; its contents are undefined. Raises StorageError.
        """
        assert self.slab is not None
        old, self.slab = self.slab, store.slab(self.slab.key, self.slab.numel, self.slab.dtype)
        old.close()

    def _slab_range(self, start: int, stop: int) -> tuple[Slab, int, int] | None:
        """Return what of [start, stop) lies in the slab, in the slab's own elements."""
        if stop <= self.split or start == stop:
            return None
        assert self.slab is not None, (start, stop, self.split)
        return self.slab, max(start, self.split) - self.split, stop - self.split

    def read(self, start: int, stop: int, out: torch.Tensor) -> list[Work]:
        """Start copying elements [start, stop) into `out` [stop - start]."""
        if start < self.split:
            end = min(stop, self.split)
            out[: end - start].copy_(self._device_part[start:end])
        there = self._slab_range(start, stop)
        if there is None:
            return []
        slab, low, high = there
        return [slab.read(low, high, out[out.numel() - (high - low) :])]

    def write(self, start: int, stop: int, source: torch.Tensor) -> list[Work]:
        """Start copying `source` [stop - start] of the same dtype, on the host or the device,
        into elements [start, stop).
        """
        works: list[Work] = []
        if start < self.split:
            end = min(stop, self.split)
            target, part = self._device_part[start:end], source[: end - start]
            works.append(self._link.copy(target, part, "to_device"))
        there = self._slab_range(start, stop)
        if there is not None:
            slab, low, high = there
            works.append(slab.write(low, high, source[source.numel() - (high - low) :]))
        return works

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        """Lend elements [start, stop) as one tensor: where they lie on one tier, there (disk: a
        copy), else a copy on the host.
        """
        there = self._slab_range(start, stop)
        if there is None:
            yield (
                self._device_part[start:stop]
                if self.tensor is not None
                else torch.empty(0, dtype=self.dtype)
            )
            return
        slab, low, high = there
        with slab.borrowed(low, high, write=write) as far:
            if start >= self.split:
                yield far
                return
            near = self._device_part[start:]
            both = torch.cat([near.cpu(), far])
            yield both
            if write:
                near.copy_(both[: near.numel()])
                far.copy_(both[near.numel() :])
