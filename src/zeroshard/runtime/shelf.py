"""A shelf: tensors that rest on a tier, or in slices, between a forward and its backward.

    RestPlace    where: a tier, a group of ranks that each keep a slice, or both
    Shelf        the tensors of one call; knows the shelf of the call before, which backward comes
                 to next
    Shelved      what stands for one tensor

nn/checkpointing.py puts away the inputs of a checkpointed call, runtime/boundary.py those of a
micro-batch's visit. activation_store.py holds the bytes that have left the device.

Floating-point tensors of 4 KiB or more leave; parameters and their views, leaves that require a
gradient, expanded tensors and subclasses stay. A tensor of several calls is stored once, as long as
nothing is written to it.

Invariant: bits, shape and strides are kept. Cost: one copy of each tensor on the tier (1/T of it
with a group of T ranks); on the device, during backward, the tensors of two calls.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.comm.compat import all_gather_single
from zeroshard.core.placement import Tier
from zeroshard.errors import ConfigError
from zeroshard.runtime.activation_store import SavedActivation, activation_store_for
from zeroshard.state.full import flatten, memory_stride
from zeroshard.tier.stores import tier_named

_LEAST_BYTES = 4096  # below this a tensor is not worth a copy
_Kept = SavedActivation | torch.Tensor  # the tensor: this rank's slice, on the device


@dataclass(frozen=True)
class RestPlace:
    """Where tensors rest: a tier, a group of ranks that each keep a slice, or both."""

    tier: Tier
    group: dist.ProcessGroup | None
    disk_path: str | None

    @classmethod
    def of(cls, tier: str, partition: Any, disk_path: str | None) -> RestPlace:
        """Check the user's arguments. Raises ConfigError."""
        known = tier_named(tier, disk_path)
        if partition is not None and not isinstance(partition, dist.ProcessGroup):
            raise ConfigError(
                f"partition is a {type(partition).__name__}, not a torch ProcessGroup that this"
                " rank is in"
            )
        alone = partition is None or dist.get_world_size(partition) == 1
        return cls(known, None if alone else partition, disk_path)

    @property
    def is_elsewhere(self) -> bool:
        """Whether tensors leave the device, or are cut over a group."""
        return self.leaves_the_device or self.group is not None

    @property
    def leaves_the_device(self) -> bool:
        """Whether tensors, or slices of them, go to another tier."""
        return self.tier is not Tier.DEVICE


class Shelf:
    """The tensors of one call at rest."""

    def __init__(self, place: RestPlace, *, chained: bool = True) -> None:
        """`chained`: backward comes to the calls in reverse order."""
        self._place = place
        self._chained = chained
        self._kept: list[weakref.ref[_Kept]] = []
        self._before: weakref.ref[Shelf] | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Put `tensor` away; return what stands for it, or `tensor` itself where that stays."""
        if not self._place.is_elsewhere or not _may_leave(tensor):
            return tensor
        if self._chained and not self._kept:
            self._before = _last.get()
            _last.set(weakref.ref(self))
        kept = self._put(tensor)
        self._kept.append(weakref.ref(kept))
        is_dense = memory_stride(tensor) == tensor.stride()
        return Shelved(self, kept, tensor.shape, tensor.stride(), tensor.dtype, is_dense)

    @staticmethod
    def unpack(packed: Any) -> torch.Tensor:
        """Return the tensor that `pack` gave this for."""
        tensor: torch.Tensor = packed.fetch() if isinstance(packed, Shelved) else packed
        return tensor

    def _put(self, tensor: torch.Tensor) -> _Kept:
        place, geometry = self._place, (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = (place, tensor.storage_offset(), *geometry, tensor._version)
        stored = _stored.setdefault(tensor.untyped_storage(), {})
        known = stored.get(key, lambda: None)()
        if known is not None:
            return known
        flat = flatten(tensor.detach())
        if place.group is not None:
            flat = _slice_of(flat, place.group)
        kept: _Kept = flat
        if place.leaves_the_device:
            store = activation_store_for(place.tier, tensor.device, place.disk_path)
            kept = store.put(flat, self)
        for gone in [one for one, reference in stored.items() if reference() is None]:
            del stored[gone]
        stored[key] = weakref.ref(kept)
        return kept

    def ahead(self) -> None:
        """Start bringing everything back."""
        for reference in self._kept:
            kept = reference()
            if isinstance(kept, SavedActivation):
                kept.ahead()

    def bring(self, kept: _Kept) -> torch.Tensor:
        """Return the flat numbers of `kept`, gathered where it is a slice; start bringing back
        those of the call before.
        """
        if isinstance(kept, SavedActivation):
            kept.ahead()
        before = None if self._before is None else self._before()
        if before is not None:
            before.ahead()
        data = kept.fetch() if isinstance(kept, SavedActivation) else kept.view(torch.uint8)
        group = self._place.group
        if group is None:
            return data
        parts = data.new_empty(data.numel() * dist.get_world_size(group))
        all_gather_single(parts, data, group=group)
        return parts


# of this thread: the last shelf that got something
_last: ContextVar[weakref.ref[Shelf] | None] = ContextVar("_last", default=None)
_stored: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[Any, weakref.ref[_Kept]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True, eq=False)
class Shelved:
    """What stands for one tensor; the bytes rest as long as this is referred to."""

    shelf: Shelf
    kept: _Kept
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_dense: bool

    def fetch(self) -> torch.Tensor:
        """Return the tensor, in the memory order in which it came."""
        flat = self.shelf.bring(self.kept).view(self.dtype)[: self.shape.numel()]
        if self.is_dense:
            return flat.as_strided(self.shape, self.stride)
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=flat.device)
        return out.copy_(flat.view(self.shape))


def _may_leave(tensor: torch.Tensor) -> bool:
    """Whether a tensor is worth a copy, and one can stand for it."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False  # parameters and other subclasses
    if not tensor.is_floating_point() or tensor.nbytes < _LEAST_BYTES:
        return False
    if tensor.is_inference() or tensor.is_neg():
        return False
    if (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor._base, nn.Parameter):
        return False  # they stay in memory in any case
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size < 2 for size, stride in sizes)


def _slice_of(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part [ceil(n / T)] of `flat` [n], zero-padded at the end."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    share = -(-flat.numel() // world)
    mine = flat[rank * share : (rank + 1) * share]
    out = flat.new_zeros(share)
    out[: mine.numel()] = mine
    return out
