"""Ranks that act together: an error on one rank alone is a hang on the others, in their next
collective. So what fails, or differs, on one of them is raised on all.

    ranks.share(value, call)                 every rank's value, on every rank
    ranks.agree({"policy": "zero2"}, call)   the same on every rank, or PlanMismatch on every rank
    with ranks.together(call) as meeting:    done on every rank, or an error on every rank

All of it goes through one `exchange` of bytes: a control plane's (comm/cpu/control.py), or a
process group's (`groups.ranks_through`) while there is no control plane. `call` names the call of
the program, as errors show it.

Invariant: every rank leaves `agree` and `together` in the same way: with all answers, or with an
error. Cost: one exchange each, of a few bytes where there is nothing to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zeroshard.core.digest import first_difference, holders
from zeroshard.core.placement import MeshPlace
from zeroshard.errors import PeerLostError, PlanMismatch, StallError, ZeroshardError

Exchange = Callable[[bytes, str], list[bytes]]  # payload, call -> every rank's payload, in order
Groups = tuple[tuple[int, ...], ...]  # of ranks, inside which something is the same
_EVERYWHERE: Mapping[str, Groups] = {}


@dataclass
class Meeting:
    """The message of a rank at the end of `Ranks.together`, and the messages of all ranks."""

    value: Any = None
    answers: list[Any] = field(default_factory=list)  # after the end: every rank's value
    report: dict[str, str] = field(default_factory=dict)
    within: dict[str, Groups] = field(default_factory=dict)

    def give(self, value: Any) -> None:
        """Give all ranks this rank's `value`, anything JSON holds, at the end."""
        self.value = value

    def compare(self, report: Mapping[str, str], within: Groups | None = None) -> None:
        """At the end, raise PlanMismatch unless `report` is the same on every rank, or inside each
        of the groups `within`.
        """
        self.report |= report
        if within is not None:
            self.within |= dict.fromkeys(report, within)


class Ranks:
    """The ranks that one rank acts together with, itself included."""

    def __init__(self, rank: int = 0, size: int = 1, exchange: Exchange | None = None) -> None:
        self.rank, self.size = rank, size
        self._exchange = exchange  # None: this is the only rank

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        """Give every rank's `payload` (any sizes, small) to every rank, in rank order. Blocking;
        a control plane serves peers meanwhile, and raises PlanMismatch, on every rank, where other
        ranks are in another `call`.
        """
        return [payload] if self._exchange is None else self._exchange(payload, call)

    def share(self, value: Any, call: str) -> list[Any]:
        """Give every rank's `value`, anything JSON holds, to every rank, in rank order."""
        return [json.loads(answer) for answer in self.exchange(json.dumps(value).encode(), call)]

    def agree(
        self,
        report: Mapping[str, str],
        call: str,
        *,
        error: Exception | None = None,
        value: Any = None,
        remedy: str = "",
        refusal: type[ZeroshardError] = PlanMismatch,
        within: Mapping[str, Groups] = _EVERYWHERE,
    ) -> list[Any]:
        """Return every rank's `value` where all have sent the same `report` and none an `error`.
        Entries of the names `within` are the same inside each of these groups of ranks.

        Raises this rank's own `error` if it has one, a `refusal` with the first other rank's, or
        PlanMismatch naming the first difference and who holds what, with the caller's `remedy`.
        """
        everyone = []
        if self.size > 1:
            failure = None if error is None else str(error)
            everyone = self.exchange(_packed(report, within, failure, value), call)
        if error is not None:
            raise error
        if not everyone:
            return [value]
        answers = _unpacked(everyone)
        for rank, (_, _, failure, _) in enumerate(answers):
            if failure is not None:
                raise refusal(self._describe_failure(rank, failure, refusal))
        everywhere, inside, _, values = zip(*answers, strict=True)
        self._compare(everywhere, None, remedy)
        for groups in dict.fromkeys(within.values()):
            # a name that this rank has not belongs to other ranks: compared in their groups
            chosen = [
                [entry for entry in entries if within.get(_name(entry), groups) == groups]
                for entries in inside
            ]
            self._compare(chosen, groups, remedy)
        return list(values)

    @contextmanager
    def together(
        self,
        call: str,
        what: str = "",
        *,
        refusal: type[ZeroshardError] = PlanMismatch,
        remedy: str = "",
    ) -> Iterator[Meeting]:
        """Raise on every rank where the body fails on any: this rank's own error, or else a
        `refusal` with the first other rank's. At the end the ranks meet as in `agree`, about what
        the body has left in the `Meeting`.

        Errors of the body are ZeroshardErrors; with `what`, which is being done, any Exception,
        and what is no `refusal` becomes the cause of one. Of a lost peer and a stall who waits for
        this rank hears in the same way.
        """
        meeting = Meeting()
        try:
            yield meeting
        except (PeerLostError, StallError):
            raise
        except Exception as failed:
            if not what and not isinstance(failed, ZeroshardError):
                raise
            told = None
            if what and not isinstance(failed, refusal):
                told = refusal(f"{what}: {type(failed).__name__}: {failed}")
            if self.size > 1:
                with suppress(ZeroshardError):
                    self.exchange(_packed({}, {}, str(told or failed), None), call)
            if told is None:
                raise
            raise told from failed
        meeting.answers = self.agree(
            meeting.report,
            call,
            value=meeting.value,
            remedy=remedy,
            refusal=refusal,
            within=meeting.within,
        )

    def check_peers(self, what: str) -> None:
        """Raise PeerLostError, saying that it was during `what`, where another rank is known to
        have ended. Never blocks.
        """

    def give_up(self) -> None:
        """After an exception: leave everything under way. The other ranks' waits for this one
        raise StateError. Never blocks.
        """

    def abandon(self) -> None:
        """`give_up`, meet the other ranks, which must come, too, and be usable again."""

    def close(self) -> None:
        """Release sockets and threads."""

    def _describe_failure(self, rank: int, failure: str, refusal: type[ZeroshardError]) -> str:
        """Return what the `refusal` says of another rank's failure."""
        return f"rank {rank}{' refused' if refusal is PlanMismatch else ''}: {failure}"

    def _compare(
        self, reports: Sequence[Sequence[str]], groups: Groups | None, remedy: str
    ) -> None:
        for ranks in groups or (tuple(range(self.size)),):
            position, entries = first_difference([reports[rank] for rank in ranks])
            if len(set(entries)) > 1:
                rank = next(rank for rank in ranks if position < len(reports[rank]))
                name, inside = _name(reports[rank][position]), groups is not None
                said = self._difference(name, entries, ranks, inside=inside)
                raise PlanMismatch(f"{said}. {remedy}".rstrip(". "))

    def _difference(
        self, name: str, entries: Sequence[str], ranks: Sequence[int], *, inside: bool
    ) -> str:
        """Say which of `ranks` hold what: of all, or `inside` of a group of them."""
        return f"the ranks disagree, first about {name!r}: {holders(entries, ranks)}"


def _name(entry: str) -> str:
    return entry.split(" = ")[0]


def _packed(
    report: Mapping[str, str], within: Mapping[str, Groups], failure: str | None, value: Any
) -> bytes:
    """Return what one rank says in `agree`; nothing, where it has nothing to say."""
    if not report and failure is None and value is None:
        return b""
    everywhere = [f"{name} = {text}" for name, text in report.items() if name not in within]
    inside = [f"{name} = {text}" for name, text in report.items() if name in within]
    return json.dumps([everywhere, inside, failure, value]).encode()


def _unpacked(answers: Sequence[bytes]) -> list[Any]:
    """Return what each rank has packed, in one parse: there may be many ranks."""
    nothing = b"[[], [], null, null]"
    unpacked: list[Any] = json.loads(b"[%s]" % b",".join(answer or nothing for answer in answers))
    return unpacked


# ---------------------------------------------------------------- ranks of a mesh with several axes
# The ranks of a data parallel group agree first, on their own. Then each meets its peers: the ranks
# with its place among the data parallel ones, one of every group. Mesh (pp 2, dp 2)::
#
#                   dp 0   dp 1
#             pp 0   0 ---- 1      a group: numbered as in the job
#                    |      |      along the axes: 0 and 2, 1 and 3
#             pp 1   2 ---- 3      a group
#
# Invariant: all ranks of a group say the same along the axes, so all ranks of the mesh come to one
# answer. Cost: one small exchange along the axes beside the group's; none where a mesh has no other
# axes.


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
        """`places` of all groups; `place` is this rank's; `ranks`: the way to them."""
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
        """The place along the axes on which ranks have other parameters: "pp=1"."""
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
