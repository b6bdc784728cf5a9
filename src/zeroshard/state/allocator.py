"""Where resting gradients (state/gradient.py) get their memory, and who keeps it between steps.

Invariant: every storage of another tier that is handed out comes back, or is closed. Cost: as much
of the other tier as one gradient of each segment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroshard.errors import StorageError
from zeroshard.state.gradient import RestingGradient
from zeroshard.state.state import DeviceMemory, State
from zeroshard.tier.store import Storage, Store

__all__ = ["GradientAllocator"]


class GradientAllocator:
    """Makes the resting gradients of one segment, and keeps the memory of another tier from one
    step to the next.
    """

    def __init__(
        self,
        key: str,
        numel: int,
        dtype: torch.dtype,
        memory: DeviceMemory,
        *,
        split: int,
        store: Store | None,
        note: Callable[[StorageError], None],
    ) -> None:
        self.tiered = split < numel
        assert not self.tiered or store is not None, key
        self._key = key
        self._numel = numel
        self._dtype = dtype
        self._split = split
        self._store = store
        self._memory = memory
        self._note = note
        self._idle: list[Storage] = []

    def open(self) -> RestingGradient:
        """Return memory for a gradient, its contents undefined."""
        near, away, lost = None, None, None
        if self.tiered:
            try:
                away = self._take_storage()
            except StorageError as error:
                lost = error
        if self._split or away is None:
            near = self._memory.empty(self._split, self._dtype)
        return RestingGradient(
            State.of(near, away, link=self._memory.link),
            self._memory,
            keep=self._take_back,
            note=self._note,
            lost=lost,
        )

    def _take_storage(self) -> Storage:
        assert self._store is not None
        if self._idle:
            return self._idle.pop()
        numel = self._numel - self._split
        return self._store.allocate(f"{self._key} gradient", numel, self._dtype)

    def release_idle(self) -> None:
        """Close what is kept for the next gradient: something may be wrong with it."""
        while self._idle:
            self._idle.pop().close()

    def _take_back(self, storage: Storage) -> None:
        if storage.numel == self._numel - self._split:
            self._idle.append(storage)
        else:
            storage.close()

    def move(self, split: int) -> None:
        """Let the gradients to come rest on the device up to `split`."""
        idle, self._idle, self._split = self._idle, [], split
        self.tiered = split < self._numel
        for storage in idle:
            storage.close()
