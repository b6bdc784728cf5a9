"""A state at rest on this rank: elements of one dtype, in parts that may lie on different tiers.

    |<------ device tensor ------>|<---- host, disk or encoded ---->|
    0                           split                             numel

Weights at rest, masters, gradients and the sums on their way to them are states. Most have one
part; a fraction cuts one segment of the model in two (Offload++, Twin-Flow). The cut falls on a
multiple of the layout's align, so that every element is stepped with the same bits on either side.

Invariant: outside ``borrowed`` no tensor refers to memory of another tier. Cost: none for a part on
the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.resting import tiles
from zeroshard.core.work import DoneWork, Work, wait_on_host
from zeroshard.memory import Pages
from zeroshard.system.device import Device
from zeroshard.tier.store import Direct, EncodedStorage, Link, Storage, Store

_TILE = 1 << 20  # elements that move at a time


@dataclass(frozen=True)
class DeviceMemory:
    """The device of one engine: where its tensors come from, and the link to the host."""

    device: torch.device
    pages: Pages
    link: Link
    for_disks: Pages = field(default_factory=partial(Pages, yielding=False))

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return undefined memory [numel] on the device."""
        return self.pages.empty(numel, dtype, self.device)

    def empty_for_disk(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the same; where it is large, a disk may write to it straight."""
        return self.for_disks.empty(numel, dtype, self.device)

    def release_idle(self) -> None:
        """Give memory that nothing uses back to the system: another process may need it."""
        self.pages.clear()
        self.for_disks.clear()
        if self.device.type != "cpu":
            Device.of(self.device).module.empty_cache()


class DeviceStorage:
    """A Storage (tier/store.py) that is a device tensor [numel]; written over `link`."""

    key = "device"
    tier = Tier.DEVICE

    def __init__(self, tensor: torch.Tensor, link: Link | None = None) -> None:
        self.tensor = tensor
        self.numel = tensor.numel()
        self.dtype = tensor.dtype
        self._link = Direct() if link is None else link

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        out.copy_(self.tensor[start:stop])
        return DoneWork()

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        return self._link.copy(self.tensor[start:stop], source, "to_device")

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        yield self.tensor[start:stop]

    def close(self) -> None: ...


class State:
    """`numel` elements of one dtype at rest, in `parts`, one after another."""

    def __init__(self, *parts: Storage) -> None:
        self.dtype, self.numel = parts[0].dtype, 0
        for part in parts:
            assert part.dtype is self.dtype, parts
            self.numel += part.numel
        self._rest(parts)

    @classmethod
    def of(
        cls, tensor: torch.Tensor | None, away: Storage | None = None, *, link: Link | None = None
    ) -> State:
        """Return the state that is `tensor` [split], on its device, and what is `away`."""
        near = [] if tensor is None else [DeviceStorage(tensor, link)]
        return cls(*near, *([] if away is None else [away]))

    def _rest(self, parts: tuple[Storage, ...]) -> None:
        """Rest in `parts`. What is asked often is worked out here."""
        self.parts = parts
        first = parts[0]
        # the part on the device [split], if there is one
        self.tensor = first.tensor if isinstance(first, DeviceStorage) else None
        # whether all of it is one device tensor: `whole`
        self.on_device = self.tensor is not None and len(parts) == 1
        # whether any of it rests on another tier than the device
        self.rests_elsewhere = not self.on_device and any(
            part.tier is not Tier.DEVICE for part in parts
        )

    @property
    def split(self) -> int:
        """The number of first elements that lie in a device tensor."""
        return 0 if self.tensor is None else self.tensor.numel()

    @property
    def is_encoded(self) -> bool:
        """Whether it rests as blocks of a codec, all of it."""
        return isinstance(self.parts[0], EncodedStorage)

    @property
    def align(self) -> int:
        """On multiples of how many elements its ranges start."""
        first = self.parts[0]
        return first.codec.block if isinstance(first, EncodedStorage) else 1

    @property
    def whole(self) -> torch.Tensor:
        """The tensor [numel] of a state that is one."""
        assert self.tensor is not None and len(self.parts) == 1, "part of it rests away"
        return self.tensor

    @property
    def away(self) -> Storage | None:
        """The part that is no device tensor, if there is one."""
        return next((part for part in self.parts if not isinstance(part, DeviceStorage)), None)

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes at rest on each tier."""
        out: dict[Tier, int] = {}
        for part in self.parts:
            out[part.tier] = out.get(part.tier, 0) + part.num_bytes
        return {tier: num_bytes for tier, num_bytes in out.items() if num_bytes}

    def _cover(self, start: int, stop: int) -> Iterator[tuple[Storage, int, int, slice]]:
        """Yield each part that holds some of [start, stop): the part, from where to where in it,
        and where that lies in the range.
        """
        base = 0
        for part in self.parts:
            low, high = max(start, base), min(stop, base + part.numel)
            if low < high:
                yield part, low - base, high - base, slice(low - start, high - start)
            base += part.numel

    def read(self, start: int, stop: int, out: torch.Tensor) -> list[Work]:
        """Start copying elements [start, stop) into `out` [stop - start]."""
        return [
            part.read(low, high, out[place]) for part, low, high, place in self._cover(start, stop)
        ]

    def read_encoded(self, out: torch.Tensor) -> list[Work]:
        """Start copying the encoding of all of it into `out`, bytes."""
        works, low = [], 0
        for part in self.parts:
            assert isinstance(part, EncodedStorage), part.key
            works.append(part.read_encoded(out[low : low + part.num_bytes]))
            low += part.num_bytes
        return works

    def write(self, start: int, stop: int, source: torch.Tensor) -> list[Work]:
        """Start copying `source` [stop - start] of the same dtype, on the host or the device,
        into elements [start, stop).
        """
        return [
            part.write(low, high, source[place])
            for part, low, high, place in self._cover(start, stop)
        ]

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        """Lend elements [start, stop) as one tensor: where they lie in one part, there (disk: a
        copy), else a copy on the host.
        """
        covered = list(self._cover(start, stop))
        if len(covered) == 1:
            part, low, high, _ = covered[0]
            with part.borrowed(low, high, write=write) as there:
                yield there
            return
        with ExitStack() as stack:
            lent = [
                stack.enter_context(part.borrowed(low, high, write=write))
                for part, low, high, _ in covered
            ]
            none = [torch.empty(0, dtype=self.dtype)]
            together = torch.cat([part.cpu() for part in lent] or none)
            yield together
            if write:
                sizes = [part.numel() for part in lent]
                for target, edited in zip(lent, torch.split(together, sizes), strict=True):
                    target.copy_(edited)

    def renew(self, store: Store) -> None:
        """Take other memory of `store` in place of what rests there, in which something may be
        wrong; its contents are undefined. Raises StorageError.
        """
        for part in self.parts:
            if isinstance(part, EncodedStorage) and part.tier is store.tier:
                part.renew(store)
            elif part.tier is store.tier:
                other = store.allocate(part.key, part.numel, part.dtype)
                self._rest(tuple(other if old is part else old for old in self.parts))
                part.close()

    def put(self, start: int, stop: int, numbers: torch.Tensor) -> None:
        """Copy `numbers` [stop - start], of any dtype, into elements [start, stop). Blocks until
        they are there.
        """
        if self.on_device:
            self.whole[start:stop].copy_(numbers)
            return
        for work in self.write(start, stop, numbers.to(self.dtype)):
            wait_on_host(work)

    def close(self, kept: State | None = None) -> None:
        """Give back memory of other tiers, but for that of the state `kept`."""
        for part in self.parts:
            if kept is None or part not in kept.parts:
                part.close()

    def release(self) -> None:
        """Give back all memory, whoever refers to the state: its numbers rest elsewhere."""
        self.close()
        self._rest((DeviceStorage(torch.empty(0, dtype=self.dtype)),))


def move(source: State, target: State, start: int = 0) -> None:
    """Copy the elements of `source` from `start` on into `target`, which has as many, a tile at a
    time; each cast to the target's dtype. Blocks until they are there.
    """
    assert source.numel == target.numel, (source.numel, target.numel)
    with torch.no_grad():
        for low, high in tiles(start, source.numel, _TILE):
            with (
                source.borrowed(low, high, write=False) as numbers,
                target.borrowed(low, high, write=True) as there,
            ):
                there.copy_(numbers)
