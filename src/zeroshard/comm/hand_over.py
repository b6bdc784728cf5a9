"""Numbers that change hands between two layouts: every rank gives what it alone holds, and takes
what it will hold (core/boxes.py says which elements go from whom to whom).

The ranks are those of the old and the new layout together. They send to each other through a
process group, not over a transport: those of either layout know only its own ranks.

Before each state the ranks say that they have come so far. A rank whose part ends by an exception
says that instead, so that the others do not wait for it.

Invariant: what is held is each element at most once, what is wanted is a range per rank. Cost: the
bytes of what crosses between ranks, one message per pair that shares elements. Numbers of an
accelerator go through the host: this is done between two steps, and seldom.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zeroshard.comm.plain import on_cpu, ranks_through
from zeroshard.core.boxes import sends
from zeroshard.core.layout import Range
from zeroshard.errors import StateError

_CALL = "engine.repartition()"


class HandOverError(StateError):
    """Another rank has ended a hand-over by an exception."""


class HandOver:
    """The ranks of an old and a new layout together: those of `group` (None: this one)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks_through(group)
        self.rank = self.ranks.rank
        self._group = None if group is None or group.size() == 1 else on_cpu(group)
        self._members = [0] if group is None else dist.get_process_group_ranks(group)

    def move(
        self,
        held: Sequence[Range],
        wanted: Sequence[Range],
        mine: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Bring the elements that each rank has `wanted` there from the ranks that `held` them.

        `mine` holds this rank's own, `out` counts from element 0; both are on the host.
        Collective; every rank passes the same ranges, () being (0, 0). Raises HandOverError where
        another rank has come to its end by an exception.
        """
        first, members = held[self.rank][0], self._members
        operations: list[dist.P2POp] = []
        for part in sends(self.rank, held, wanted):
            given, taken = mine[part.start - first : part.stop - first], out[part.start : part.stop]
            if part.source == part.target:
                taken.copy_(given)
            elif part.source == self.rank:
                operation = dist.P2POp(dist.isend, given, members[part.target], self._group)
                operations.append(operation)
            else:
                operation = dist.P2POp(dist.irecv, taken, members[part.source], self._group)
                operations.append(operation)
        self.meet()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def meet(self, reason: str = "", *, ended: bool = False) -> None:
        """Come to the next state, or to the end because of an exception, for the `reason` (that of
        another rank: ""). Collective; raises HandOverError where another rank has `ended`.
        """
        answers = self.ranks.share([ended, reason], _CALL)
        ranks = [rank for rank, (has_ended, _) in enumerate(answers) if has_ended]
        others = [rank for rank in ranks if rank != self.rank]
        if others:
            told = [rank for rank in others if answers[rank][1]] or others
            raise HandOverError(
                f"{_CALL}: rank {self._members[told[0]]} ended while states moved"
                f" ({answers[told[0]][1] or 'see its output'}): make model and engine anew, and"
                " call zs.load()"
            )

    def give(self, tensor: torch.Tensor, source: int) -> None:
        """Copy a `tensor` of rank `source` into every other rank's, in place. Collective."""
        self.meet()
        if self._group is None:
            return
        here = tensor.detach().cpu().contiguous()
        dist.broadcast(here, self._members[source], group=self._group)
        if self.rank != source:
            tensor.detach().copy_(here)
