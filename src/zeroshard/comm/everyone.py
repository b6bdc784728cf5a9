"""All ranks of a mesh, for messages: along its data parallel axes and then along the others
(comm/other_axes.py). Checkpoints are written and read by all of them together.

    mesh (dp 2, tp 2)      tp 0   tp 1
                  dp 0      0      1       numbered as in the job, whichever group they are in
                  dp 1      2      3

Invariant: `exchange` gives the same list on every rank. Cost: an exchange of the data parallel
ranks, and one of each rank with its peers, of its group's payloads; the second only where there are
other axes.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from zeroshard.comm.other_axes import OtherAxes
from zeroshard.comm.transport import Control

__all__ = ["Everyone"]

_CALL = "shard()"


class Everyone:
    """All ranks of the mesh as one Control. Made by all of them together."""

    def __init__(self, control: Control, axes: OtherAxes) -> None:
        self.axes = axes
        self._control = control
        self.rank, self.size = control.rank, control.size
        self.places: tuple[str, ...] = ()  # of each rank; () where all are data parallel
        self._order: list[int] = []  # by number: which of the groups' payloads, in mesh order
        if axes.size > 1:
            place = f"dp={control.rank}, {axes.place.text}"
            answers = self._of_groups(json.dumps([dist.get_rank(), place]).encode(), _CALL)
            known = [json.loads(answer) for answer in answers]
            self._order = sorted(range(len(known)), key=lambda index: known[index][0])
            self.places = tuple(known[index][1] for index in self._order)
            self.rank, self.size = self.places.index(place), len(known)

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        """Return every rank's `payload`, in the order of their numbers. Collective; PlanMismatch,
        on every rank, where other ranks are in another `call`.
        """
        if self.axes.size == 1:
            return self._control.exchange(payload, call)
        answers = self._of_groups(payload, call)
        return [answers[index] for index in self._order]

    def check_peers(self, what: str) -> None:
        """Raise PeerLostError, saying that it was during `what`, where a rank of the same group,
        or a peer, is known to have ended. Never blocks.
        """
        self._control.check_peers(what)
        self.axes.check(what)

    def _of_groups(self, payload: bytes, call: str) -> list[bytes]:
        """Return the payloads of all ranks, group by group in mesh order."""
        with self.axes.telling(call):
            own = self._control.exchange(payload, call)
        groups = self.axes.share([answer.decode("latin-1") for answer in own], call)
        return [answer.encode("latin-1") for group in groups for answer in group]
