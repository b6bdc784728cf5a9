"""Tensors put away on another tier between forward and backward, and brought back ahead of their
use (ZeRO-R's P_a+cpu, ZeRO-Infinity's 5.1.2).

    put      source --Slab.write--> slab           the source is let go once the copy has landed
    ahead    arrival <--Slab.read-- slab           started before it is needed
    fetch    arrival, waited for; the source itself where it is still here

A **depot** is one store with its slabs, which are used again; a **parcel** is one tensor's bytes in
it, and goes with its last reference.

Invariants. A depot never holds more bytes than were in use at once at some time, in size classes an
eighth apart, so steps that repeat do not grow. Of the sources only those of the last
`_MOST_LEAVING` + 1 calls are still here. Copies run on the engine's discipline of lanes
(runtime/streams.py): writes on "reduce", reads on "gather", each forked from compute and joined
before memory is given back or used. A source that was written to before its copy had landed is
refused in backward: the copy may hold either.

Cost: a copy each way; on the device the sources that leave and what was read ahead. Depots are
closed when the program ends.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from zeroshard.buffer import Flight, Lanes
from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.errors import ConfigError, StateError, StorageError
from zeroshard.runtime.streams import make_streams
from zeroshard.tier.host import HostStore
from zeroshard.tier.store import Slab, Store

__all__ = ["Depot", "Parcel", "depot_for", "size_class", "using"]

_MOST_LEAVING = 2  # calls whose sources may still be here while another one's begin to leave
_MOST_DEPOTS = 8


def size_class(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to one of eight sizes between powers of two: 4097 -> 4608."""
    step = max(1 << max(num_bytes.bit_length() - 4, 0), 512)
    return -(-num_bytes // step) * step


class Parcel:
    """One tensor's bytes in a depot."""

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_arriving",
        "_depot",
        "_leaving",
        "_num_bytes",
        "_slab",
        "_source",
        "_spoiled",
        "_version",
    )

    def __init__(self, depot: Depot, source: torch.Tensor) -> None:
        data = source.view(torch.uint8)
        self._depot = depot
        self._num_bytes = data.numel()
        self._source: torch.Tensor | None = source
        self._version = source._version
        self._spoiled = False
        self._arrival: torch.Tensor | None = None
        self._arriving: Flight | None = None
        self._slab = slab = depot.take(self._num_bytes)
        depot.streams.alloc(id(self))
        try:
            self._leaving = depot.start(
                "reduce", lambda: slab.write(0, data.numel(), data), reads=id(self), writes=slab.key
            )
        except BaseException:
            depot.drop(slab)
            raise

    def landed(self) -> bool:
        """Whether the source has been let go, which happens here once its copy is over."""
        if self._source is not None and self._leaving.done():
            self.let_go()
        return self._source is None

    def let_go(self) -> None:
        """Let the source go, after its copy."""
        if self._source is None:
            return
        self._leaving.wait()
        self._spoiled = self._source._version != self._version
        self._depot.streams.free(id(self))
        self._source = None

    def ahead(self) -> None:
        """Start bringing the bytes back, unless they are here."""
        if not self.landed() or self._arriving is not None or self._depot.is_closed:
            return
        out = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._depot.device)
        streams, slab = self._depot.streams, self._slab
        streams.alloc(id(out))
        self._arrival = out
        self._arriving = self._depot.start(
            "gather", lambda: slab.read(0, out.numel(), out), reads=slab.key, writes=id(out)
        )

    def fetch(self) -> torch.Tensor:
        """Return the bytes [num_bytes] on the device, valid on compute; the next `fetch` reads
        them again.
        """
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
        assert out is not None and flight is not None, "the depot was closed under its parcels"
        self._arrival = self._arriving = None
        flight.wait()
        self._depot.streams.read(id(out))
        return out

    def __del__(self) -> None:
        if hasattr(self, "_leaving"):  # else its copy never started
            flights = [
                flight
                for flight, tensor in (
                    (self._leaving, self._source),
                    (self._arriving, self._arrival),
                )
                if tensor is not None
            ]
            self._depot.returned.append((self._slab, flights, (self._source, self._arrival)))


class Depot:
    """One store for tensors of `device`, and its slabs."""

    def __init__(self, store: Store, device: torch.device, streams: Lanes | None = None) -> None:
        self.store = store
        self.device = device
        self.streams: Lanes = make_streams(device) if streams is None else streams
        self.is_closed = False
        self.used = 0  # bytes of slabs that hold a parcel
        self.most_used = 0
        # Parcels end wherever the last reference does, in the garbage collector too: they only
        # leave word here.
        self.returned: deque[tuple[Slab, list[Flight | None], object]] = deque()
        self._idle: dict[int, list[Slab]] = {}  # by size
        # by call, oldest first
        self._leaving: deque[tuple[object, list[weakref.ref[Parcel]]]] = deque()
        self._num_slabs = 0
        self._lock = threading.RLock()

    def put(self, source: torch.Tensor, call: object) -> Parcel:
        """Start copying `source` (1-D, contiguous) away, as an input of `call`; wait for the
        sources of older calls.
        """
        with self._lock:
            parcel = Parcel(self, source)
            if not self._leaving or self._leaving[-1][0] is not call:
                self._leaving.append((call, []))
            self._leaving[-1][1].append(weakref.ref(parcel))
            self.poll()
            while len(self._leaving) > _MOST_LEAVING + 1:
                for reference in self._leaving.popleft()[1]:
                    late = reference()
                    if late is not None:
                        late.let_go()
            return parcel

    def poll(self) -> None:
        """Let sources go whose copies have landed."""
        with self._lock:
            while self._leaving:
                left = [
                    reference
                    for reference in self._leaving[0][1]
                    if (parcel := reference()) is not None and not parcel.landed()
                ]
                if left:
                    self._leaving[0][1][:] = left
                    return
                self._leaving.popleft()

    def start(
        self,
        lane: Literal["gather", "reduce"],
        copy: Callable[[], Work],
        *,
        reads: object,
        writes: object,
    ) -> Flight:
        """Start `copy` on `lane`, after everything that compute has been given."""
        with self._lock:
            self.streams.fork(lane)
            with self.streams.on(lane):
                self.streams.read(reads)
                self.streams.write(writes)
                work = copy()
                event = self.streams.mark(lane)
            return Flight([work], self.streams, event)

    def take(self, num_bytes: int) -> Slab:
        """Return a slab of at least `num_bytes` bytes. Raises StorageError where the tier is
        full.
        """
        with self._lock:
            self.collect()
            size = size_class(num_bytes)
            slab = self._idle[size].pop() if self._idle.get(size) else self._new(size)
            self.used += size
            self.most_used = max(self.most_used, self.used)
            return slab

    def _new(self, size: int) -> Slab:
        most = max(self.most_used, self.used + size)
        for slabs in self._idle.values():  # of other sizes: this one has none
            while slabs and self.store.account.live + size > most:
                slabs.pop().close()
        self._num_slabs += 1
        return self.store.slab(f"activations.{self._num_slabs}", size, torch.uint8)

    def collect(self) -> None:
        """Take back the slabs of parcels that have ended."""
        while self.returned:
            slab, flights, _ = self.returned.popleft()
            try:
                for flight in flights:
                    if flight is not None:
                        flight.wait()
            except StorageError:  # nobody will read it, but a slab whose write failed stays lost
                self.drop(slab)
            else:
                self.used -= slab.numel
                self._idle.setdefault(slab.numel, []).append(slab)

    def drop(self, slab: Slab) -> None:
        """Close a slab that was taken."""
        self.used -= slab.numel
        slab.close()

    def close(self) -> None:
        """Close the store. What still rests there is lost."""
        self.is_closed = True
        self.store.close()
        self._idle.clear()


# ----------------------------------------------------------------------------- the program's depots

_Key = tuple[Tier, torch.device, str]
_depots: dict[_Key, Depot] = {}
_lock = threading.Lock()


def depot_for(tier: Tier, device: torch.device, disk_path: str | None) -> Depot:
    """Return the program's depot on `tier` for tensors of `device`, made when it is first asked
    for.

    Raises ConfigError when more than a few are in use, and StorageError where it cannot be made.
    """
    key = (tier, device, disk_path or "")
    with _lock:
        if key not in _depots:
            _make_room()
            _depots[key] = Depot(_make_store(tier, device, disk_path), device)
        return _depots[key]


def _make_store(tier: Tier, device: torch.device, disk_path: str | None) -> Store:
    if tier is Tier.HOST:
        return HostStore(device)
    from zeroshard.tier.disk import DiskStore  # its threads and files are for those who use it

    assert tier is Tier.DISK and disk_path is not None, (tier, disk_path)
    return DiskStore(
        disk_path, device, run="activations", rank=dist.get_rank() if dist.is_initialized() else 0
    )


def _make_room() -> None:
    for key, depot in list(_depots.items()):
        if len(_depots) < _MOST_DEPOTS:
            return
        depot.collect()
        if not depot.used:
            _depots.pop(key).close()
    if len(_depots) >= _MOST_DEPOTS:
        places = sorted({path or tier.value for tier, _, path in _depots})
        raise ConfigError(
            f"checkpointed inputs rest in {_MOST_DEPOTS} places already ({', '.join(places)}): use"
            " fewer values of disk_path"
        )


@contextmanager
def using(depot: Depot, tier: Tier = Tier.HOST, disk_path: str | None = None) -> Iterator[Depot]:
    """Have `depot` stand for the program's own one inside the context; it is closed at the end."""
    key = (tier, depot.device, disk_path or "")
    before = _depots.get(key)
    _depots[key] = depot
    try:
        yield depot
    finally:
        depot.close()
        _depots.pop(key)
        if before is not None:
            _depots[key] = before


@atexit.register
def _close_all() -> None:
    while _depots:
        _depots.popitem()[1].close()
