"""Tensors that rest on another tier between forward and backward (ZeRO-R's P_a+cpu,
ZeRO-Infinity's 5.1.2).

    put      source --Storage.write--> storage     the source is released once the copy has ended
    ahead    arrival <--Storage.read-- storage     started before it is needed
    fetch    arrival, waited for; the source itself if it is not released

An **activation store** is one store with its storages, which are used again; a **saved activation**
is one tensor's bytes in it, and ends with its last reference.

Invariants. An activation store never holds more bytes than were in use at once, in size classes an
eighth apart. Only the sources of the last `_MOST_LEAVING` + 1 calls are on the device. Copies run
on the engine's lanes (runtime/streams.py): writes on "reduce", reads on "gather", each forked from
compute and joined before memory is released or used. Writing to a source before its copy has ended
is an error in backward: the copy may hold either value.

Cost: a copy each way. Activation stores are closed when the program ends.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from zeroshard.comm.levels import ReadyHop
from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.errors import ConfigError, StateError, StorageError
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.streams import Streams, make_streams
from zeroshard.tier.store import Storage, Store
from zeroshard.tier.stores import make_store

_MOST_LEAVING = 2  # calls whose sources may still be here while another one's begin to leave
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
        """Release the sources whose copies have ended."""
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
            except StorageError:  # a storage whose write failed stays lost
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
