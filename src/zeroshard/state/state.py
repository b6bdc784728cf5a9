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

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from zeroshard.core.layout import Layout
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

    def __init__(
        self, tensor: torch.Tensor | None, *away: Storage | None, link: Link | None = None
    ) -> None:
        """`tensor` [split], on its device and written over `link`, comes before what is `away`."""
        self._link, self._others = link, tuple(filter(None, away))
        # the part on the device [split], if there is one
        self.tensor = tensor
        first = self._others[0] if tensor is None else tensor
        self.dtype, self.numel = first.dtype, 0 if tensor is None else tensor.numel()
        # whether any of it rests on another tier than the device
        self.rests_elsewhere = False
        for part in self._others:
            assert part.dtype is self.dtype, self._others
            self.numel += part.numel
            self.rests_elsewhere = self.rests_elsewhere or part.tier is not Tier.DEVICE
        # whether all of it is one device tensor: `whole`
        self.on_device = not self._others

    @property
    def parts(self) -> tuple[Storage, ...]:
        """The parts, in order."""
        near = () if self.tensor is None else (DeviceStorage(self.tensor, self._link),)
        return (*near, *self._others)

    @property
    def split(self) -> int:
        """The number of first elements that lie in a device tensor."""
        return 0 if self.tensor is None else self.tensor.numel()

    @property
    def is_encoded(self) -> bool:
        """Whether it rests as blocks of a codec, all of it."""
        return self.tensor is None and isinstance(self._others[0], EncodedStorage)

    @property
    def align(self) -> int:
        """On multiples of how many elements its ranges start."""
        first = None if self.tensor is not None else self._others[0]
        return first.codec.block if isinstance(first, EncodedStorage) else 1

    @property
    def whole(self) -> torch.Tensor:
        """The tensor [numel] of a state that is one."""
        assert self.tensor is not None and self.on_device, "part of it rests away"
        return self.tensor

    @property
    def away(self) -> Storage | None:
        """The part that is no device tensor, if there is one."""
        return self._others[0] if self._others else None

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
        for part in self._others:
            if isinstance(part, EncodedStorage) and part.tier is store.tier:
                part.renew(store)
            elif part.tier is store.tier:
                other = store.allocate(part.key, part.numel, part.dtype)
                self._others = tuple(other if old is part else old for old in self._others)
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
        """Give back memory of other tiers, except the memory of the state `kept`."""
        for part in self._others:
            if kept is None or part not in kept._others:
                part.close()

    def release(self) -> None:
        """Give back all memory, whoever refers to the state: its numbers rest elsewhere."""
        self.close()
        self.tensor, self._others = torch.empty(0, dtype=self.dtype), ()
        self.on_device, self.rests_elsewhere = True, False


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


# -------------------------------------------------------------------------------- a gathered buffer
# All parameters of a segment lie in one flat buffer (core/layout.py), so an all-gather writes the
# buffer as it is and nothing is copied in or out. While the segment rests, the buffer keeps its
# *storage object* with size 0.
#
# [Note: storage, not objects] Gathering resizes the same storage again instead of making a new
# tensor. Whatever autograd saved in forward (the parameter, or a view of it such as ``weight.t()``)
# refers to that storage, so it is valid again in backward, however often the buffer was released in
# between. Such a view must not be read while it is released: torch raises in some places and
# crashes in others. Parameters themselves are guarded (runtime/released.py).
#
# [Note: views that leave] A view of a parameter that leaves its module (``return
# self.position[:n]``) may be read, and saved by autograd, while the unit is released. Release
# therefore leaves the storage to such views and makes another one for the next gather: the memory
# lives as long as anything refers to it, and holds the numbers from before the next step. Without
# gradients autograd saves nothing, so any reference that is not ours is a view that has left. So it
# is after `mark_user_views`, inside ``gathered()``: a graph that refers to it as well finds the
# same numbers there. With gradients the views are looked for in what a module returns
# (runtime/hooks.py), and `leave` is called. A storage that torch lets nobody resize has left, too:
# ``.numpy()`` and ``share_memory_()`` of any view do that, for as long as the storage lives.
#
# [Note: pages of a gather] Without gradients nobody will look for the numbers in that storage
# later. A gather that reads a disk then takes pages that are used again, at an address that the
# disk accepts, so that it writes into them straight; the parameters are views of these pages, and
# the storage waits without memory. It takes the storage itself where anything refers to that: a
# graph before its backward.
#
# Where the transport maps the peers' memory (or there is no peer), and where every rank keeps the
# whole, the buffer *is* the weights at rest: taking and releasing it does nothing.
#
# Cost: ``numel * itemsize`` bytes while taken. It does not know what is in it, nor other ranks.


_BLOCK = 4096  # bytes: where a disk may write to


def memory_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride `tensor` keeps in a flat buffer: its own where it is dense
    (channels_last), else contiguous.
    """
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`'s elements [numel] in the order in which a flat buffer holds them; a view
    where it is dense.
    """
    if memory_stride(tensor) == tensor.stride():
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1)


class FullBuffer:
    """Memory for `layout` [numel], and every parameter as a view of it."""

    def __init__(
        self,
        layout: Layout,
        strides: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        tensor: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.strides = tuple(strides)
        self.dtype = dtype
        self.device = device
        self.is_ours = tensor is None  # not memory at rest
        self.num_bytes = layout.numel * dtype.itemsize if tensor is None else 0  # that `take` takes
        self._places = [
            (slot.shape, stride, slot.offset)
            for slot, stride in zip(layout.slots, self.strides, strict=True)
        ]
        self._has_left = False  # whether a view of it is known to be used elsewhere
        self._has_user_views = False  # whether the user may have taken views of what is here
        # the tensor without memory and its views, while pages stand for them
        self._home: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]] | None = None
        self._use(tensor)

    def _use(self, tensor: torch.Tensor | None) -> None:
        """Take `tensor`, or make another that holds no memory yet."""
        ours = tensor is None
        if tensor is None:
            tensor = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        self._show(tensor)
        self.storage = tensor.untyped_storage()  # ours: resized to `num_bytes` where it is taken
        if ours:
            self.storage.resize_(0)
        self._own_references = self._references()

    def _show(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # [numel]
        self.bytes = tensor.data.view(torch.uint8)  # for collectives, which count no version here
        self.views = self.views_of(tensor)

    def _references(self) -> int:
        """Return how many tensors and storage objects refer to the memory."""
        return torch._C._storage_Use_Count(self.storage._cdata)

    def take_pages(self, memory: DeviceMemory, start: int) -> None:
        """Take pages of `memory`, with element `start` on a block of a disk; the storage itself
        where autograd could miss its memory: [Note: pages of a gather].
        """
        if (
            torch.is_grad_enabled()  # references may be autograd's own
            or torch._C._current_graph_task_id() >= 0
            or self._references() > self._own_references
        ):
            self.storage.resize_(self.num_bytes)
            return
        skipped = -start % (_BLOCK // self.dtype.itemsize)
        self._home = self.tensor, self.bytes, self.views
        with torch.inference_mode(False):
            self._show(memory.empty_for_disk(skipped + self.layout.numel, self.dtype)[skipped:])

    def release(self) -> int:
        """Give the memory back, or leave it to views that are used elsewhere. Returns the bytes
        that the allocator has got.
        """
        if not self.is_ours:
            return 0
        if self._home is not None:
            # the pages go with the last view of them
            (self.tensor, self.bytes, self.views), self._home = self._home, None
            self._has_left = self._has_user_views = False
            return 0
        watched = self._has_user_views or not (
            torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0
        )
        if (
            self._has_left
            or not self.storage.resizable()
            or (watched and self._references() > self._own_references)
        ):
            with torch.inference_mode(False):  # else only another inference could write to it
                self._use(None)  # see [Note: views that leave]
        else:
            self.storage.resize_(0)
        self._has_left = self._has_user_views = False
        return self.num_bytes

    @property
    def is_forgotten(self) -> bool:
        """Whether no graph and no view finds again, in released memory, what is gathered next."""
        return self.is_ours and self._references() <= self._own_references

    def close(self) -> None:
        """Let go of memory at rest, which is given back: nothing is gathered here any more."""
        self.tensor = self.bytes = torch.empty(0, dtype=self.dtype)
        self.storage, self.views = self.tensor.untyped_storage(), []

    def mark_user_views(self) -> None:
        """Leave the memory, at the next release, to whatever else refers to it then."""
        self._has_user_views = True

    def leave(self) -> None:
        """Leave the memory, at the next release, to a view of it that is used elsewhere."""
        self._has_left = True

    def view_in(self, part: torch.Tensor, index: int) -> torch.Tensor:
        """Return parameter `index` [its shape] as a view of `part`, its own elements alone."""
        return part.as_strided(
            self.layout.slots[index].shape, self.strides[index], part.storage_offset()
        )

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return every parameter as a view of `flat` [numel], laid out as this buffer is."""
        base = flat.storage_offset()
        return [
            flat.as_strided(shape, stride, offset + base) for shape, stride, offset in self._places
        ]
