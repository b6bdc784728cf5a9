"""The gathered buffer of one segment: memory for all of its parameters, while they are computed
with.

All parameters of a segment lie in one flat buffer (core/layout.py), so an all-gather writes the
buffer as it is and nothing is copied in or out. While the segment rests, the buffer keeps its
*storage object* with size 0.

[Note: storage, not objects] Gathering resizes the same storage again instead of making a new
tensor. Whatever autograd saved in forward (the parameter, or a view of it such as ``weight.t()``)
refers to that storage, so it is valid again in backward, however often the buffer was released in
between. Such a view must not be read while it is released: torch raises in some places and crashes
in others. Parameters themselves are guarded (runtime/released.py).

[Note: views that leave] A view of a parameter that leaves its module (``return self.position[:n]``)
may be read, and saved by autograd, while the unit is released. Release therefore leaves the storage
to such views and makes another one for the next gather: the memory lives as long as anything refers
to it, and holds the numbers from before the next step. Without gradients autograd saves nothing, so
any reference that is not ours is a view that has left. So it is after `mark_user_views`,
inside ``gathered()``: a graph that refers to it as well finds the same numbers there. With
gradients the views are looked for in what a module returns (runtime/hooks.py), and `leave` is
called. A storage that torch lets nobody resize has left, too: ``.numpy()`` and ``share_memory_()``
of any view do that, for as long as the storage lives.

[Note: pages of a gather] Without gradients nobody will look for the numbers in that storage later.
A gather that reads a disk then takes pages that are used again, and whose address the disk accepts,
so that it writes into them straight; the parameters are views of these pages, and the storage waits
without memory. It takes the storage itself where anything refers to that: a graph whose backward is
to come.

Where the transport maps the peers' memory (or there is no peer), and where every rank keeps the
whole, the buffer *is* the weights at rest: taking and releasing it does nothing.

Cost: ``numel * itemsize`` bytes while taken. It does not know what is in it, nor other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.core.layout import Layout
from zeroshard.state.state import DeviceMemory

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
        self._home: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._use(tensor)

    def _use(self, tensor: torch.Tensor | None) -> None:
        """Take `tensor`, or make another that holds no memory yet."""
        if tensor is None:
            self.tensor = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        else:
            self.tensor = tensor  # [numel]
        self.views = self.views_of(self.tensor)
        if tensor is None:
            self.tensor.untyped_storage().resize_(0)
        self._own_references = self._references()

    def _references(self) -> int:
        """Return how many tensors and storage objects refer to the memory."""
        return torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)

    def take(self, memory: DeviceMemory | None = None, start: int = 0) -> None:
        """Take the memory, its contents undefined; where autograd cannot miss it, pages of
        `memory` whose element `start` lies on a block of a disk: [Note: pages of a gather].
        """
        if not self.is_ours:
            return
        if (
            memory is None
            or torch.is_grad_enabled()  # references may be autograd's own
            or torch._C._current_graph_task_id() >= 0
            or self._references() > self._own_references
        ):
            self.tensor.untyped_storage().resize_(self.num_bytes)
            return
        skipped = -start % (_BLOCK // self.dtype.itemsize)
        self._home = self.tensor, self.views
        with torch.inference_mode(False):
            self.tensor = memory.empty_for_disk(skipped + self.layout.numel, self.dtype)[skipped:]
            self.views = self.views_of(self.tensor)

    def release(self) -> int:
        """Give the memory back, or leave it to views that are used elsewhere. Returns the bytes
        that the allocator has got.
        """
        if not self.is_ours:
            return 0
        if self._home is not None:
            # the pages go with the last view of them
            (self.tensor, self.views), self._home = self._home, None
            self._has_left = self._has_user_views = False
            return 0
        watched = self._has_user_views or not (
            torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0
        )
        if (
            self._has_left
            or not self.tensor.untyped_storage().resizable()
            or (watched and self._references() > self._own_references)
        ):
            with torch.inference_mode(False):  # else only another inference could write to it
                self._use(None)  # see [Note: views that leave]
        else:
            self.tensor.untyped_storage().resize_(0)
        self._has_left = self._has_user_views = False
        return self.num_bytes

    @property
    def is_forgotten(self) -> bool:
        """Whether no graph and no view finds again, in released memory, what is gathered next."""
        return self.is_ours and self._references() <= self._own_references

    def close(self) -> None:
        """Let go of memory at rest, which is given back: nothing is gathered here any more."""
        self.tensor = torch.empty(0, dtype=self.dtype)
        self.views = []

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
