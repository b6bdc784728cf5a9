"""The pool of gradient buffers: a few slots of memory that peers on this host can read, reused
for ever.

A slot is lent to the engine (`take`), handed to a reduce (`submit`: it now waits for everyone
who reads it) and comes back by itself when the last of them has finished (`release`)::

    idle --take--> lent --submit--> awaiting {readers} --release of each--> idle
                    \\--give--> idle

Invariant: a slot is idle only when nobody reads it; all slots together stay within `limit_bytes`,
but for a single slot, which may be larger, and slots that were `spill`ed, which vanish when they
come back. Cost: none per use; a slot is reserved and published once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from zeroshard.comm import memfd
from zeroshard.errors import ConfigError

_PAGE_BYTES = 4096
FAR = -1  # a reader that stands for all peers reached by messages


@dataclass
class PoolSlot:
    """One buffer of the pool. `fd` is open only while the slot is being published."""

    number: int
    memory: torch.Tensor  # uint8
    loan: torch.Tensor | None = None  # a part of the memory
    # who still reads it: ranks (ours included), or FAR
    readers: set[int] = field(default_factory=set)
    spilled: bool = False

    @property
    def idle(self) -> bool:
        """Whether the slot is neither lent nor read."""
        return self.loan is None and not self.readers


class SlotPool:
    """The slots of one rank.

    With `publish` (called with number, size and descriptor of each new slot) they are shared
    memory, else private memory. `withdraw` is called with the number of a slot that is dropped.
    `limit_bytes` None: twice the largest buffer asked for.
    """

    def __init__(
        self,
        publish: Callable[[int, int, int], None] | None,
        withdraw: Callable[[int], None],
        limit_bytes: int | None,
    ) -> None:
        self._publish = publish
        self._withdraw = withdraw
        self._limit_bytes = limit_bytes
        self._largest_bytes = 0
        self._next_number = 0
        self.slots: dict[int, PoolSlot] = {}

    def take(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, spill: bool = False
    ) -> torch.Tensor | None:
        """Lend a buffer, or return None when the pool is full and `spill` is off."""
        num_bytes = max(-(-numel * dtype.itemsize // _PAGE_BYTES), 1) * _PAGE_BYTES
        self._largest_bytes = max(self._largest_bytes, num_bytes)
        slot = self._fit(num_bytes, device)
        if slot is None and (spill or self._make_room(num_bytes)):
            slot = self._create(num_bytes, device)
            slot.spilled = spill
        if slot is None:
            return None
        slot.loan = slot.memory[: numel * dtype.itemsize].view(dtype)
        return slot.loan

    def _fit(self, num_bytes: int, device: torch.device) -> PoolSlot | None:
        fits = [
            s
            for s in self.slots.values()
            if s.idle and s.memory.numel() >= num_bytes and s.memory.device == device
        ]
        return min(fits, key=lambda slot: slot.memory.numel(), default=None)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop idle slots (all too small, or on another device) until `num_bytes` more are
        within the limit.
        """
        limit = 2 * self._largest_bytes if self._limit_bytes is None else self._limit_bytes
        room = limit - sum(slot.memory.numel() for slot in self.slots.values())
        for slot in [slot for slot in self.slots.values() if slot.idle]:
            if room >= num_bytes:
                break
            room += slot.memory.numel()
            self._drop(slot)
        return room >= num_bytes or not self.slots

    def _create(self, num_bytes: int, device: torch.device) -> PoolSlot:
        number = self._next_number
        self._next_number += 1
        if self._publish is None or device.type != "cpu":
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            try:
                fd = memfd.create(num_bytes)
            except OSError as error:
                raise ConfigError(
                    f"no memory for a gradient buffer of {num_bytes} bytes ({error}): lower"
                    " prefetch_bytes or cut smaller units"
                ) from error
            try:
                memory = memfd.map_bytes(fd, num_bytes)
                self._publish(number, num_bytes, fd)
            finally:
                os.close(fd)
        slot = self.slots[number] = PoolSlot(number, memory)
        return slot

    def lent(self, buffer: torch.Tensor) -> PoolSlot | None:
        """Return the slot that `buffer` was lent from, if it is on loan."""
        return next((slot for slot in self.slots.values() if slot.loan is buffer), None)

    def submit(self, slot: PoolSlot, readers: set[int]) -> None:
        """End the loan of `slot`; it is idle again once each of `readers` has been released."""
        slot.loan, slot.readers = None, set(readers)
        self._drop_spilled(slot)

    def release(self, number: int, reader: int) -> None:
        """Note that `reader` has finished with slot `number`."""
        slot = self.slots[number]
        slot.readers.remove(reader)
        self._drop_spilled(slot)

    def give(self, buffer: torch.Tensor) -> None:
        """End the loan of a buffer that nobody will read. Buffers from before `reset` are
        ignored.
        """
        slot = self.lent(buffer)
        if slot is not None:
            slot.loan = None
            self._drop_spilled(slot)

    def reset(self) -> None:
        """Make every slot idle: nobody reads any longer, and loans are void."""
        for slot in list(self.slots.values()):
            slot.loan, slot.readers = None, set()
            self._drop_spilled(slot)

    def _drop_spilled(self, slot: PoolSlot) -> None:
        if slot.spilled and slot.idle:
            self._drop(slot)

    def _drop(self, slot: PoolSlot) -> None:
        del self.slots[slot.number]
        self._withdraw(slot.number)

    def readers(self) -> set[int]:
        """Return who reads any slot."""
        return {reader for slot in self.slots.values() for reader in slot.readers}

    def total_bytes(self) -> int:
        """Return the size of all slots together."""
        return sum(slot.memory.numel() for slot in self.slots.values())
