"""The ranks of a mesh with several axes: all of them, and along the axes that are not data
parallel.

The ranks of a data parallel group agree first, on their own. Then each meets its peers: the ranks
with its place among the data parallel ones, one of every group. Mesh (pp 2, dp 2)::

                  dp 0   dp 1
            pp 0   0 ---- 1      a group: numbered as in the job
                   |      |      along the axes: 0 and 2, 1 and 3
            pp 1   2 ---- 3      a group

Invariant: what a rank says along the axes is the same on every rank of its group, so all ranks of
the mesh come to one answer. Cost: one small exchange along the axes beside that of a group; none
where a mesh has no other axes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch.distributed as dist

from zeroshard.comm.ranks import Groups, Ranks
from zeroshard.core.placement import MeshPlace
from zeroshard.errors import ZeroshardError


class AlongAxes(Ranks):
    """This rank's peers, one of every data parallel group, in mesh order. An error inside
    `together` is one that this rank's group agrees on.
    """

    def __init__(
        self,
        places: Sequence[MeshPlace] = (MeshPlace(),),
        place: MeshPlace | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`places` of all groups, of which `place` is this rank's; `ranks`: the way to them."""
        self.place = places[0] if place is None else place
        super().__init__(places.index(self.place), len(places))
        self.places = places
        self._ranks = Ranks() if ranks is None else ranks
        stages = [one.stage for one in places]
        # replicas (plain parameters are alike along 'tp') are the peers of one stage
        self.replicas: Groups = tuple(
            tuple(rank for rank, other in enumerate(stages) if other == stage)
            for stage in dict.fromkeys(stages)
        )

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        return self._ranks.exchange(payload, call)

    def name(self, what: str) -> str:
        """Return what other groups call `what` of this one; "" where it is nothing."""
        return f"{what} at {self.place.text}" if what and self.place.text else what

    def check_peers(self, what: str) -> None:
        self._ranks.check_peers(what)

    def give_up(self) -> None:
        self._ranks.give_up()

    def abandon(self) -> None:
        self._ranks.abandon()

    def close(self) -> None:
        self._ranks.close()

    def _describe_failure(self, rank: int, failure: str, refusal: type[ZeroshardError]) -> str:
        return f"at {self.places[rank].text} of the mesh: {failure}"

    def _difference(
        self, name: str, entries: Sequence[str], ranks: Sequence[int], *, inside: bool
    ) -> str:
        by_text: dict[str, list[str]] = {}
        for rank, entry in zip(ranks, entries, strict=True):
            text = entry.removeprefix(f"{name} = ")
            by_text.setdefault(text, []).append(self.places[rank].text)
        shown = "; ".join(f"{' and '.join(at)}: {text}" for text, at in by_text.items())
        replicas = "between replicas (plain parameters are alike along 'tp')"
        where = replicas if inside else "along the mesh"
        return f"{name} differs {where} ({shown}): set it alike on every rank"


class MeshRanks(Ranks):
    """All ranks of the mesh, numbered as in the job. Made by all of them together."""

    def __init__(self, group: Ranks, axes: AlongAxes) -> None:
        super().__init__(group.rank, group.size)
        self.axes = axes
        self.places: tuple[str, ...] = ()  # of each rank; () where all are data parallel
        self._group = group
        self._order: list[int] = []  # by number: which of the groups' payloads, in mesh order
        if axes.size > 1:
            place = f"dp={group.rank}, {axes.place.text}"
            answers = self._of_groups(json.dumps([dist.get_rank(), place]).encode(), "shard()")
            known = [json.loads(answer) for answer in answers]
            self._order = sorted(range(len(known)), key=lambda index: known[index][0])
            self.places = tuple(known[index][1] for index in self._order)
            self.rank, self.size = self.places.index(place), len(known)

    @property
    def stage(self) -> str:
        """Where others have other parameters: "pp=1"."""
        return self.axes.place.stage

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        if self.axes.size == 1:
            return self._group.exchange(payload, call)
        answers = self._of_groups(payload, call)
        return [answers[index] for index in self._order]

    def check_peers(self, what: str) -> None:
        self._group.check_peers(what)
        self.axes.check_peers(what)

    def _of_groups(self, payload: bytes, call: str) -> list[bytes]:
        """Return the payloads of all ranks, group by group in mesh order."""
        with self.axes.together(call) as meeting:
            own = self._group.exchange(payload, call)
            meeting.give([answer.decode("latin-1") for answer in own])
        return [answer.encode("latin-1") for group in meeting.answers for answer in group]
