"""The inputs of a checkpointed call at rest: which of them leave the device, and how they return.

    Rest       where: a tier, a group of ranks that each keep a slice, or both
    Call       the inputs of one call; knows the call before it, which backward comes to next
    Input      what torch holds in place of one input

Floating-point tensors of 4 KiB or more leave; parameters and their views, leaves that require a
gradient, expanded tensors and subclasses stay. An input of several calls is stored once, as long as
nothing is written to it.

Invariant: bits, shape and strides are kept. Cost: one copy of each input on the tier (1/T of it
with a group of T ranks); on the device, during backward, the inputs of two calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.core.placement import Tier
from zeroshard.core.sizes import any_of
from zeroshard.errors import ConfigError
from zeroshard.nn.activation_store import activation_store_for
from zeroshard.state.full import flatten, memory_stride

__all__ = ["Call", "Input", "Rest", "shelves", "unpack"]

_LEAST_BYTES = 4096  # below this a tensor is not worth a copy


@dataclass(frozen=True)
class Rest:
    """Where inputs rest."""

    tier: Tier
    group: dist.ProcessGroup | None
    disk_path: str | None

    @classmethod
    def of(cls, tier: str, partition: Any, disk_path: str | None) -> Rest:
        """Check the user's arguments. Raises ConfigError."""
        tiers = {one.value: one for one in Tier}
        if tier not in tiers:
            raise ConfigError(f"tier={tier!r} is not a tier: use {any_of(map(repr, tiers))}")
        if (tiers[tier] is Tier.DISK) != (disk_path is not None):
            raise ConfigError(
                "tier='disk' and disk_path=, a directory on a local disk, go together"
            )
        if partition is not None and not isinstance(partition, dist.ProcessGroup):
            raise ConfigError(
                f"partition is a {type(partition).__name__}, not a torch ProcessGroup that this"
                " rank is in"
            )
        alone = partition is None or dist.get_world_size(partition) == 1
        return cls(tiers[tier], None if alone else partition, disk_path)

    @property
    def is_elsewhere(self) -> bool:
        """Whether inputs leave the device, or are cut over a group."""
        return self.tier is not Tier.DEVICE or self.group is not None


class _Bytes(Protocol):
    """Bytes at rest: a SavedActivation of nn/activation_store.py, or `_Here`."""

    def ahead(self) -> None: ...

    def fetch(self) -> torch.Tensor: ...


class _Here:
    """Bytes that stay on the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def ahead(self) -> None: ...

    def fetch(self) -> torch.Tensor:
        return self._tensor.view(torch.uint8)


class Call:
    """One checkpointed call: its inputs at rest, and the call before it (next in backward)."""

    def __init__(self, rest: Rest, *, chained: bool = True) -> None:
        """`chained`: backward comes to the calls in reverse order."""
        self._rest = rest
        self._chained = chained
        self._saved: list[weakref.ref[_Bytes]] = []
        self._before: weakref.ref[Call] | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Store an input; torch keeps the returned object in its place."""
        if not self._rest.is_elsewhere or not _may_leave(tensor):
            return tensor
        if self._chained and not self._saved:
            self._before, _thread.last = getattr(_thread, "last", None), weakref.ref(self)
        saved = self._put(tensor)
        self._saved.append(weakref.ref(saved))
        return Input(self, saved, tensor, self._rest.group)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that `pack` gave this for."""
        return unpack(packed)

    def _put(self, tensor: torch.Tensor) -> _Bytes:
        rest, geometry = self._rest, (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        key = (rest, tensor.storage_offset(), *geometry, tensor._version)
        stored = _stored.setdefault(tensor.untyped_storage(), {})
        known = stored.get(key, lambda: None)()
        if known is not None:
            return known
        flat = flatten(tensor.detach())
        if rest.group is not None:
            flat = _slice_of(flat, rest.group)
        saved: _Bytes = _Here(flat)
        if rest.tier is not Tier.DEVICE:
            saved = activation_store_for(rest.tier, tensor.device, rest.disk_path).put(flat, self)
        for gone in [one for one, reference in stored.items() if reference() is None]:
            del stored[gone]
        stored[key] = weakref.ref(saved)
        return saved

    def ahead(self) -> None:
        """Start bringing the inputs back."""
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.ahead()

    def ahead_of_before(self) -> None:
        """Start bringing the inputs of the call before this one back."""
        before = None if self._before is None else self._before()
        if before is not None:
            before.ahead()


_thread = threading.local()  # .last: the last call that put something away
_stored: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[Any, weakref.ref[_Bytes]]] = (
    weakref.WeakKeyDictionary()
)


def shelves(tier: str, disk_path: str | None) -> Callable[[], Call]:
    """Return what makes places on `tier` for inputs of calls that come back in any order. Raises
    ConfigError for a tier that does not exist, or a disk without a directory.
    """
    rest = Rest.of(tier, None, disk_path)
    return lambda: Call(rest, chained=False)


class Input:
    """The object that torch holds in place of an input."""

    __slots__ = ("_call", "_dtype", "_group", "_is_dense", "_saved", "_shape", "_stride")

    def __init__(
        self, call: Call, saved: _Bytes, tensor: torch.Tensor, group: dist.ProcessGroup | None
    ) -> None:
        self._call, self._saved, self._group = call, saved, group
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._is_dense = memory_stride(tensor) == tensor.stride()

    def fetch(self) -> torch.Tensor:
        """Return the input, in the memory order in which it came."""
        self._saved.ahead()
        self._call.ahead_of_before()
        data = self._saved.fetch()
        if self._group is not None:
            parts = data.new_empty(data.numel() * dist.get_world_size(self._group))
            dist.all_gather_into_tensor(parts, data, group=self._group)
            data = parts
        flat = data.view(self._dtype)[: self._shape.numel()]
        if self._is_dense:
            return flat.as_strided(self._shape, self._stride)
        out = torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=flat.device)
        return out.copy_(flat.view(self._shape))


def unpack(packed: Any) -> torch.Tensor:
    """Return the tensor that `Call.pack` gave this for."""
    return packed.fetch() if isinstance(packed, Input) else packed


def _may_leave(tensor: torch.Tensor) -> bool:
    """Whether an input is worth a copy, and one can stand for it."""
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
