"""The pool of gradient buffers, a few slots of memory that peers on this host can read and that are
used again and again; and the contributions of all ranks to one sum.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.comm import memfd
from zeroshard.errors import ConfigError, PlanMismatch
from zeroshard.memory import drain

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
        slot, smallest = None, 0
        for one in self.slots.values():
            if one.idle and one.memory.device == device:
                size = one.memory.numel()
                if size >= num_bytes and (slot is None or size < smallest):
                    slot, smallest = one, size
        if slot is None and (spill or self._make_room(num_bytes)):
            slot = self._create(num_bytes, device)
            slot.spilled = spill
        if slot is None:
            return None
        slot.loan = slot.memory[: numel * dtype.itemsize].view(dtype)
        return slot.loan

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
        for slot in self.slots.values():
            if slot.loan is buffer:
                return slot
        return None

    def submit(self, slot: PoolSlot, readers: set[int]) -> None:
        """End the loan of `slot`; it is idle again once each of `readers` has been released."""
        slot.loan, slot.readers = None, set(readers)
        self._drop_spilled(slot)

    def release(self, number: int, reader: int) -> None:
        """Note that `reader` has finished with slot `number`."""
        slot = self.slots[number]
        slot.readers.remove(reader)
        self._drop_spilled(slot)

    def forget(self, reader: int) -> None:
        """Note that `reader` has finished with every slot."""
        for slot in [slot for slot in self.slots.values() if reader in slot.readers]:
            self.release(slot.number, reader)

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


# ------------------------------------------------------------------------------------ contributions
# An operation that needs a part of every rank sums (or copies) the parts once everyone has
# contributed. A contribution lies where its owner put it: in our own slot, in a peer's slot that we
# map, or in a buffer it was received into. Nothing is copied until all are there; then a reduce
# sums our slice of each straight into `out` (``comm/ordered.py``), a gather copies them side by
# side, and the parts are released to their owners.
#
# Invariant: the n-th operation of a key here takes exactly the n-th contribution to that key of
# every rank. Cost: each is read once.
#
# [Note: relief] A rank may hold a slot of ours that it cannot free, because its sum waits for our
# part, which we cannot give before somebody frees a slot of *ours* (units in opposite order, pools
# of one). So a rank that waits for a slot says that it is stuck, and a rank that is itself blocked,
# in whatever call, answers by copying what it owes that rank into private memory and acknowledging
# it (`relieve`); a rank that is busy will come to its sums, or be blocked and then answer. So every
# slot becomes free, whatever the order. A rank that is merely slow costs no copies where nobody
# else is blocked; ranks that are stuck on one slow rank together copy slices for each other while
# they idle.


@dataclass
class Contribution:
    """One rank's part of an operation, as far as it concerns us; `data` None stands for zeros."""

    data: torch.Tensor | None  # uint8
    release: Callable[[], None] | None = None  # releases `data` to its owner
    near: bool = False  # it came from another rank in shared memory

    def close(self) -> None:
        """Release `data` to its owner, once."""
        if self.release is not None:
            self.release()
            self.release = None

    def copy_out(self) -> None:
        """Move the data to private memory, so that its owner may have the slot back
        ([Note: relief]).
        """
        if self.release is not None and self.data is not None:
            self.data = self.data.clone()
            drain(self.data.device)
            self.close()

    def checked(self, num_bytes: int, what: str, rank: int) -> torch.Tensor | None:
        """Return the data, which must be `num_bytes` long."""
        if self.data is not None and self.data.numel() != num_bytes:
            raise PlanMismatch(
                f"{what}: rank {rank} contributes {self.data.numel()} bytes where {num_bytes} are"
                " expected; the ranks cut or cast this unit differently"
            )
        return self.data


Parts = dict[int, Contribution]


@dataclass
class Pending:
    """One operation of ours that lacks contributions, or has not been looked at since they came."""

    lacks: set[int]  # ranks that have not sent their part
    consume: Callable[[Parts], None]
    done: bool = False


@dataclass
class Matching:
    """Contributions and pending operations of one rank, by (key, sequence number)."""

    contributions: dict[tuple[str, int], Parts] = field(default_factory=dict)
    pending: dict[tuple[str, int], Pending] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)

    def next_sequence(self, key: str) -> int:
        """Return the number of this rank's next operation of `key`."""
        sequence = self.sequences.get(key, 0)
        self.sequences[key] = sequence + 1
        return sequence

    def contribute(self, key: str, sequence: int, rank: int, contribution: Contribution) -> None:
        """Note `rank`'s part of an operation, which we need not have begun."""
        parts = self.contributions.setdefault((key, sequence), {})
        assert rank not in parts, (key, sequence, rank)
        parts[rank] = contribution
        if (pending := self.pending.get((key, sequence))) is not None:
            pending.lacks.discard(rank)

    def begin(
        self, key: str, sequence: int, contributors: Iterable[int], consume: Callable[[Parts], None]
    ) -> Pending:
        """Have `consume` called, inside `advance`, once all `contributors` have contributed."""
        lacks = {*contributors}.difference(self.contributions.get((key, sequence), ()))
        pending = self.pending[key, sequence] = Pending(lacks, consume)
        return pending

    def missing(self, key: str, sequence: int) -> set[int]:
        """Return the ranks that have not sent their part of a pending operation."""
        pending = self.pending.get((key, sequence))
        return set() if pending is None else set(pending.lacks)

    def awaited(self) -> set[int]:
        """Return the ranks that lack in any pending operation."""
        return set().union(*(pending.lacks for pending in self.pending.values()))

    def advance(self) -> bool:
        """Finish every operation that has become possible, oldest first; return whether there
        was one.
        """
        if not self.pending:
            return False
        ripe = [name for name, pending in self.pending.items() if not pending.lacks]
        for name in ripe:
            pending, parts = self.pending.pop(name), self.contributions.pop(name, {})
            pending.consume(parts)
            # any stream may be current, and others will use the result and the slots
            for device in {part.data.device for part in parts.values() if part.data is not None}:
                drain(device)
            for part in parts.values():
                part.close()
            pending.done = True
        return bool(ripe)

    def relieve(self, rank: int) -> None:
        """Copy out what lies in `rank`'s slots ([Note: relief])."""
        for parts in self.contributions.values():
            if rank in parts:
                parts[rank].copy_out()

    def reset(self) -> None:
        """Leave everything under way; owners get no release."""
        self.contributions.clear()
        self.pending.clear()
        self.sequences.clear()


def checked_parts(
    parts: Parts, what: str, members: Sequence[int], *, num_bytes: int
) -> list[torch.Tensor | None]:
    """Return all ranks' parts, uint8 [num_bytes] each, in rank order; PlanMismatch, calling
    ranks as in `members`, for one of another length.
    """
    return [parts[rank].checked(num_bytes, what, name) for rank, name in enumerate(members)]
