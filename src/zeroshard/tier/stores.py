"""Stores by tier: host memory, and `make_store`, the one place that makes a store of any tier.

A store in host memory that can be stepped in place (``borrowed`` lends the memory itself) needs
nothing else; a store that lends copies, as the disk's does, is stepped through a ring of buffers
(runtime/step_tiles.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.sizes import any_of
from zeroshard.core.work import DoneWork, Probe, Work, wait_on_host
from zeroshard.errors import ConfigError, StorageError
from zeroshard.memory import MemoryCounter, host_memory, reads_wait, to_placeholder
from zeroshard.tier.store import Link, Store, link_of, operation_on

# -------------------------------------------------------------------------------------- host memory
# Pinned memory beside an accelerator; anonymous mappings on the CPU.
#
# On the CPU, device and host are the same RAM: state that should rest on the host but is read in
# place would give the right numbers. So a tensor on a storage's memory exists only inside
# ``borrowed`` (the host step) and during a copy, and reads as NaN afterwards.
#
# Cost: numel * itemsize bytes per storage, in pages of 4 KiB; a copy each way over the link.


class HostStore:
    """Host memory for the states of a model on `device`."""

    tier = Tier.HOST

    def __init__(self, device: torch.device, *, link: Link | None = None) -> None:
        self.account = MemoryCounter()
        self.probe = Probe()
        self.link = link_of(device) if link is None else link
        self._pinned = device.type != "cpu"
        self.storages: list[HostStorage] = []

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> HostStorage:
        num_bytes = numel * dtype.itemsize
        try:
            memory = self._memory(num_bytes)
        except (OSError, RuntimeError, ValueError) as error:
            raise StorageError(
                f"{key}: no {num_bytes} bytes of host memory ({error}): put less of it on the host"
            ) from None
        storage = HostStorage(self, key, numel, dtype, memory)
        self.storages.append(storage)
        self.account.add(num_bytes)
        return storage

    def _memory(self, num_bytes: int) -> memoryview:
        return host_memory(num_bytes, pinned=self._pinned)

    def remove(self, storage: HostStorage) -> None:
        """Stop counting `storage`, which was closed."""
        self.storages.remove(storage)
        self.account.remove(storage.numel * storage.dtype.itemsize)

    def close(self) -> None:
        for storage in list(self.storages):
            storage.close()
        self.link.close()


class HostStorage:
    """A range of host memory."""

    def __init__(
        self, store: HostStore, key: str, numel: int, dtype: torch.dtype, memory: memoryview
    ) -> None:
        self.key = key
        self.numel = numel
        self.dtype = dtype
        self.tier = store.tier
        self._store = store
        self._memory = memory
        self.version = 0  # how often numbers were written to it
        # copies: start, stop, whether it writes here
        self._under_way: list[tuple[int, int, bool, Work]] = []

    def _tensor(self, start: int, stop: int) -> torch.Tensor:
        assert 0 <= start <= stop <= self.numel, (self.key, start, stop, self.numel)
        itemsize = self.dtype.itemsize
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        return torch.frombuffer(self._memory[start * itemsize : stop * itemsize], dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, start: int, stop: int, out: torch.Tensor) -> Work:
        self._wait_for_opposite(start, stop, out, writes=False)
        return self._copy(start, stop, out, writes=False)

    def write(self, start: int, stop: int, source: torch.Tensor) -> Work:
        self._wait_for_opposite(start, stop, source, writes=True)
        work = self._copy(start, stop, source, writes=True)
        self.version += 1
        return work

    def _copy(self, start: int, stop: int, other: torch.Tensor, *, writes: bool) -> Work:
        recording, here = self._store.probe.recording, self._tensor(start, stop)
        since = None if recording is None else recording.now()
        if writes:
            work = self._store.link.copy(here, other, "to_host")
        else:
            work = self._store.link.copy(other, here, "to_device")
        if recording is not None:
            recording.note(operation_on(self, here.nbytes, writes=writes), since)
        if not isinstance(work, DoneWork):
            self._under_way = [copy for copy in self._under_way if not copy[3].done()]
            self._under_way.append((start, stop, writes, work))
        return work

    def _wait_for_opposite(
        self, start: int, stop: int, other: torch.Tensor, *, writes: bool
    ) -> None:
        """Wait for overlapping copies in the opposite direction; the link orders only its own. A
        copy from or to `other` memory of the host is not enqueued: the host itself waits.
        """
        is_enqueued = reads_wait(other)
        for low, high, other_writes, work in self._under_way:
            if low < stop and start < high and other_writes is not writes:
                work.wait() if is_enqueued else wait_on_host(work)

    def flush(self, start: int, stop: int, *, write: bool) -> None:
        """Wait, on the host, for writes to [start, stop), and with `write` for reads too."""
        for low, high, writes, work in self._under_way:
            if low < stop and start < high and (write or writes):
                wait_on_host(work)

    @contextmanager
    def borrowed(self, start: int, stop: int, *, write: bool) -> Iterator[torch.Tensor]:
        self.flush(start, stop, write=write)
        tensor = self._tensor(start, stop)
        try:
            yield tensor
        finally:
            self.version += write
            to_placeholder(tensor)

    def change_places(self, other: HostStorage) -> None:
        """Let the numbers of `other`, as many of the same dtype, rest here, and these there."""
        for one in (self, other):
            one.flush(0, one.numel, write=True)
            one.version += 1
        self._memory, other._memory = other._memory, self._memory

    def close(self) -> None:
        if self in self._store.storages:
            self.flush(0, self.numel, write=True)
            self._store.remove(self)
            self._memory = memoryview(b"")


# ---------------------------------------------------------------------------- a store for each tier


def make_store(
    tier: Tier,
    device: torch.device,
    *,
    disk_path: str | None = None,
    rank: int = 0,
    run: str = "run",
    verify: bool = False,
    link: Link | None = None,
) -> Store:
    """Return a new store of `tier` for the states of a model on `device`. The disk's has a
    directory of `run` and `rank` below `disk_path`: StorageError where none can be made.
    """
    if tier is Tier.HOST:
        return HostStore(device, link=link)
    from zeroshard.tier.disk import DiskStore  # lazily: it is rarely used
    from zeroshard.tier.swapdir import SwapDirectory

    assert tier is Tier.DISK and disk_path is not None, (tier, disk_path)
    directory = SwapDirectory(disk_path, rank=rank, run=run)
    return DiskStore(directory, device, verify=verify, link=link)


def tier_named(name: str, disk_path: str | None) -> Tier:
    """Return the tier of this name. Raises ConfigError, also where a disk has no directory, or
    another tier has one.
    """
    tiers = {one.value: one for one in Tier}
    if name not in tiers:
        raise ConfigError(f"tier={name!r} is not a tier: use {any_of(map(repr, tiers))}")
    if (tiers[name] is Tier.DISK) != (disk_path is not None):
        raise ConfigError("tier='disk' and disk_path=, a directory on a local disk, go together")
    return tiers[name]
