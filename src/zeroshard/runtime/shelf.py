"""A shelf: tensors that rest on a tier, or in slices, between a forward and its backward.

    RestPlace    where: a tier, a group of ranks that each keep a slice, or both
    Shelf        the tensors of one call; knows the shelf of the call before, which backward comes
                 to next
    Shelved      what stands for one tensor

nn/checkpointing.py puts away the inputs of a checkpointed call, runtime/accumulate.py the inputs of
a micro-batch's visit. `ActivationStore` holds the bytes that have left the device.

Floating-point tensors of 4 KiB or more leave; parameters and their views, leaves that require a
gradient, expanded tensors and subclasses stay. A tensor of several calls is stored once, as long as
nothing is written to it.

Invariant: bits, shape and strides are kept. Cost: one copy of each tensor on the tier (1/T of it
with a group of T ranks); on the device, during backward, the tensors of two calls.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.comm.groups import all_gather_single
from zeroshard.comm.levels import ReadyHop
from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.errors import ConfigError, StateError, StorageError
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.streams import Streams, make_streams
from zeroshard.state.state import flatten, memory_stride
from zeroshard.tier.store import Storage, Store
from zeroshard.tier.stores import make_store, tier_named

# --------------------------------------------------------------------------------- activation store
# Tensors that rest on another tier between forward and backward (ZeRO-R's P_a+cpu,
# ZeRO-Infinity's 5.1.2).
#
#     put      source --Storage.write--> storage     the source is released once the copy has ended
#     ahead    arrival <--Storage.read-- storage     started before it is needed
#     fetch    arrival, waited for; the source itself if it is not released
#
# An **activation store** is one store with its storages, which are used again; a **saved
# activation** is one tensor's bytes in it, and ends with its last reference.
#
# Invariants. An activation store never holds more bytes than were in use at once, in size classes
# an eighth apart. Only the sources of the last `_MOST_LEAVING` + 1 calls are on the device. Copies
# run on the engine's lanes (runtime/streams.py): writes on "reduce", reads on "gather", each forked
# from compute and joined before memory is released or used. Writing to a source before its copy has
# ended is an error in backward: the copy may hold either value.
#
# Cost: a copy each way. Activation stores are closed when the program ends.


_MOST_LEAVING = 2  # calls that may still have their sources here while another one's begin to leave
_MOST_STORES = 8


def size_class(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to one of eight sizes between powers of two: 4097 -> 4608."""
    step = max(1 << max(num_bytes.bit_length() - 4, 0), 512)
    return -(-num_bytes // step) * step


class SavedActivation:
    """One tensor's bytes in an activation store."""

    __slots__ = (
        "__weakref__", "_arrival", "_arriving", "_leaving", "_num_bytes", "_source", "_spoiled",
        "_storage", "_store", "_version",
    )  # fmt: skip

    def __init__(self, store: ActivationStore, source: torch.Tensor) -> None:
        data = source.view(torch.uint8)
        self._store = store
        self._num_bytes = data.numel()
        self._source: torch.Tensor | None = source
        self._version = source._version
        self._spoiled = False
        self._arrival: torch.Tensor | None = None
        self._arriving: Flight | None = None
        self._storage = storage = store.take(self._num_bytes)
        write = partial(storage.write, 0, data.numel(), data)
        try:
            self._leaving = store.start("reduce", write)
        except BaseException:
            store.close_storage(storage)
            raise

    def try_release(self) -> bool:
        """Release the source if its copy has ended; return whether it is released."""
        if self._source is not None and self._leaving.done():
            self.release()
        return self._source is None

    def release(self) -> None:
        """Release the source, after its copy."""
        if self._source is None:
            return
        self._leaving.wait()
        self._spoiled = self._source._version != self._version
        self._source = None

    def ahead(self) -> None:
        """Start bringing the bytes back, unless they are here."""
        if not self.try_release() or self._arriving is not None or self._store.is_closed:
            return
        out = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._store.device)
        self._arrival = out
        read = partial(self._storage.read, 0, out.numel(), out)
        self._arriving = self._store.start("gather", read)

    def fetch(self) -> torch.Tensor:
        """Return the bytes [num_bytes] on the device, valid on compute; each call reads again."""
        spoiled = self._spoiled if self._source is None else self._source._version != self._version
        if spoiled:
            raise StateError(
                "an input of a checkpointed function was written to in place while its copy to"
                " another tier was under way, so its numbers are lost: write to a copy of it, or"
                " checkpoint on the device tier"
            )
        if self._source is not None:
            return self._source.view(torch.uint8)
        self.ahead()
        out, flight = self._arrival, self._arriving
        assert out is not None and flight is not None, "the activation store was closed"
        self._arrival = self._arriving = None
        flight.wait()
        return out

    def __del__(self) -> None:
        if hasattr(self, "_leaving"):  # else its copy never started
            pairs = ((self._leaving, self._source), (self._arriving, self._arrival))
            waited = [(flight, tensor) for flight, tensor in pairs if tensor is not None]
            self._store.returned.append((self._storage, waited))


class ActivationStore:
    """One store for tensors of `device`, and its storages."""

    def __init__(self, store: Store, device: torch.device, streams: Streams | None = None) -> None:
        self.store = store
        self.device = device
        self.streams: Streams = make_streams(device) if streams is None else streams
        self.is_closed = False
        self.used = 0  # bytes of storages that hold a saved activation
        self.most_used = 0
        # of saved activations that ended, perhaps in the garbage collector: `collect` takes them
        self.returned: deque[tuple[Storage, list[tuple[Flight | None, torch.Tensor]]]] = deque()
        self._idle: dict[int, list[Storage]] = {}  # by size
        # by call, oldest first
        self._leaving: deque[tuple[object, list[weakref.ref[SavedActivation]]]] = deque()
        self._num_storages = 0
        self._lock = threading.RLock()

    def put(self, source: torch.Tensor, call: object) -> SavedActivation:
        """Start copying `source` (1-D, contiguous), an input of `call`; wait for older sources."""
        with self._lock:
            saved = SavedActivation(self, source)
            if not self._leaving or self._leaving[-1][0] is not call:
                self._leaving.append((call, []))
            self._leaving[-1][1].append(weakref.ref(saved))
            self.poll()
            while len(self._leaving) > _MOST_LEAVING + 1:
                for reference in self._leaving.popleft()[1]:
                    late = reference()
                    if late is not None:
                        late.release()
            return saved

    def poll(self) -> None:
        """Release the sources that have been copied."""
        with self._lock:
            while self._leaving:
                left = [
                    reference
                    for reference in self._leaving[0][1]
                    if (saved := reference()) is not None and not saved.try_release()
                ]
                if left:
                    self._leaving[0][1][:] = left
                    return
                self._leaving.popleft()

    def start(
        self,
        lane: Literal["gather", "reduce"],
        copy: Callable[[], Work],
    ) -> Flight:
        """Start `copy` on `lane`, after everything that compute has been given."""
        with self._lock:
            flight = Flight([[ReadyHop(copy, "copy")]], self.streams, lane)
            flight.go(fork=True)
            return flight

    def take(self, num_bytes: int) -> Storage:
        """Return a storage of at least `num_bytes`. Raises StorageError when the tier is full."""
        with self._lock:
            self.collect()
            size = size_class(num_bytes)
            storage = self._idle[size].pop() if self._idle.get(size) else self._new(size)
            self.used += size
            self.most_used = max(self.most_used, self.used)
            return storage

    def _new(self, size: int) -> Storage:
        most = max(self.most_used, self.used + size)
        for storages in self._idle.values():  # of other sizes: this one has none
            while storages and self.store.account.live + size > most:
                storages.pop().close()
        self._num_storages += 1
        return self.store.allocate(f"activations.{self._num_storages}", size, torch.uint8)

    def collect(self) -> None:
        """Take back the storages of saved activations that have ended."""
        while self.returned:
            storage, waited = self.returned.popleft()
            try:
                for flight, _ in waited:
                    assert flight is not None
                    flight.wait()
            except StorageError:  # a storage stays lost after a failed write
                self.close_storage(storage)
            else:
                self.used -= storage.numel
                self._idle.setdefault(storage.numel, []).append(storage)

    def close_storage(self, storage: Storage) -> None:
        """Close a storage that was taken."""
        self.used -= storage.numel
        storage.close()

    def close(self) -> None:
        """Close the store; its contents are lost."""
        self.is_closed = True
        self.store.close()
        self._idle.clear()


# ------------------------------------------------------------------ the program's activation stores

_Key = tuple[Tier, torch.device, str]
_stores: dict[_Key, ActivationStore] = {}
_lock = threading.Lock()


def activation_store_for(
    tier: Tier, device: torch.device, disk_path: str | None
) -> ActivationStore:
    """Return the program's activation store on `tier` for `device`, made at its first use.

    Raises ConfigError when more than a few are in use, and StorageError where it cannot be made.
    """
    key = (tier, device, disk_path or "")
    with _lock:
        if key not in _stores:
            _make_room()
            rank = dist.get_rank() if dist.is_initialized() else 0
            store = make_store(tier, device, disk_path=disk_path, rank=rank, run="activations")
            _stores[key] = ActivationStore(store, device)
        return _stores[key]


def _make_room() -> None:
    for key, store in list(_stores.items()):
        if len(_stores) < _MOST_STORES:
            return
        store.collect()
        if not store.used:
            _stores.pop(key).close()
    if len(_stores) >= _MOST_STORES:
        places = sorted({path or tier.value for tier, _, path in _stores})
        raise ConfigError(
            f"checkpointed inputs rest in {_MOST_STORES} places already ({', '.join(places)}): use"
            " fewer values of disk_path"
        )


@atexit.register
def _close_all() -> None:
    while _stores:
        _stores.popitem()[1].close()


# -------------------------------------------------------------------------------------------- shelf

_LEAST_BYTES = 4096  # below this a tensor is not worth a copy
_Kept = SavedActivation | torch.Tensor  # the tensor: this rank's slice, on the device


@dataclass(frozen=True)
class RestPlace:
    """The place where tensors rest: a tier, a group of ranks that each keep a slice, or both."""

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
        """Return the flat numbers of `kept`, gathered where it is a slice; start bringing back the
        numbers of the call before.
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
    """Stands for one tensor; the bytes rest as long as this is referred to."""

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
