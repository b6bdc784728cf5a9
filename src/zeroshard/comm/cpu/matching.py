"""Operations that need a part of every rank: who has contributed what, and the sum (or the copy)
once everyone has.

A contribution lies where its owner put it: in our own slot, in a peer's slot that we map, or in a
buffer it was received into. Nothing is copied until all are there; then a reduce sums our slice of
each straight into `out` (``comm/ordered.py``), a gather copies them side by side, and the parts
are released to their owners.

Invariant: the n-th operation of a key here takes exactly the n-th contribution to that key of every
rank. Cost: each is read once.

[Note: relief] A rank may hold a slot of ours that it cannot free, because its sum waits for our
part, which we cannot give before somebody frees a slot of *ours* (units in opposite order, pools of
one). So a rank that waits for a slot says that it is stuck, and a rank that is itself blocked, in
whatever call, answers by copying what it owes that rank into private memory and acknowledging it
(`relieve`); a rank that is busy will come to its sums, or be blocked and then answer. So every slot
becomes free, whatever the order. A rank that is merely slow costs no copies where nobody else is
blocked; ranks that are stuck on one slow rank together copy slices for each other while they idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.errors import PlanMismatch
from zeroshard.memory import drain


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

    contributors: frozenset[int]  # ranks whose part it needs
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

    def begin(
        self, key: str, sequence: int, contributors: Iterable[int], consume: Callable[[Parts], None]
    ) -> Pending:
        """Have `consume` called, inside `advance`, once all `contributors` have contributed."""
        pending = self.pending[key, sequence] = Pending(frozenset(contributors), consume)
        return pending

    def missing(self, key: str, sequence: int) -> set[int]:
        """Return the ranks whose part of a pending operation has not come."""
        pending = self.pending.get((key, sequence))
        return (
            set()
            if pending is None
            else set(pending.contributors - self.contributions.get((key, sequence), {}).keys())
        )

    def awaited(self) -> set[int]:
        """Return the ranks that lack in any pending operation."""
        return set().union(*(self.missing(*name) for name in self.pending))

    def advance(self) -> bool:
        """Finish every operation that has become possible, oldest first; return whether there
        was one.
        """
        ripe = [name for name in self.pending if not self.missing(*name)]
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
