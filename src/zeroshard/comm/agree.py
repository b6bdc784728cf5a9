"""What could differ between ranks, or has failed on one, raised on every rank: an error on one
rank alone is a hang on the others.

Every rank sends a short ordered report (name -> text); all ranks read all reports and raise the
same PlanMismatch, which names the first entry that differs and who holds what. A rank that has
already failed sends its error instead, and the others raise that (`failures`).

All of this goes through one `Exchange`: a transport's control plane, or (`through`) the process
group while there is no transport. Cost: one all-gather of text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch.distributed as dist

from zeroshard.comm.plain import gather_bytes
from zeroshard.core.digest import first_difference, holders
from zeroshard.errors import PlanMismatch, ZeroshardError

__all__ = ["REMEDY", "Exchange", "Groups", "agree", "differing", "failures", "through"]

Groups = tuple[tuple[int, ...], ...]  # of ranks, inside which something is the same
_EVERYWHERE: Mapping[str, Groups] = {}

REMEDY = "Build the same model with the same options on every rank (same seed), or use sync_from=0"


class Exchange(Protocol):
    """Give every rank's payload to every rank, in rank order; `call` names the call."""

    def __call__(self, payload: bytes, /, call: str) -> list[bytes]: ...


def through(group: dist.ProcessGroup | None) -> Exchange:
    """Return the exchange of the ranks of `group`; None: of this one rank."""

    def exchange(payload: bytes, /, call: str) -> list[bytes]:
        return [payload] if group is None else gather_bytes(group, payload)

    return exchange


def failures(exchange: Exchange, reason: str | None, *, call: str) -> dict[int, str]:
    """Return, by rank, why something has failed there; None or "": it has not. Collective."""
    answers = exchange((reason or "").encode(), call)
    return {rank: answer.decode() for rank, answer in enumerate(answers) if answer}


def agree(
    exchange: Exchange,
    report: Mapping[str, str],
    *,
    call: str,
    error: ZeroshardError | None = None,
    remedy: str = "",
    refusal: type[ZeroshardError] = PlanMismatch,
    within: Mapping[str, Groups] = _EVERYWHERE,
) -> None:
    """Return when every rank sent the same `report`; collective. Entries of the names `within` are
    the same inside each of these groups of ranks.

    Raises this rank's own `error` if it has one, a `refusal` with another rank's error, or
    PlanMismatch naming the first difference, with the caller's `remedy`.
    """
    entries = [f"{name} = {text}" for name, text in report.items()]
    everyone = exchange(json.dumps([entries, None if error is None else str(error)]).encode(), call)
    if error is not None:
        raise error
    answers = [json.loads(answer) for answer in everyone]
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            raise refusal(f"rank {rank} refused: {failure}")
    reports = [entries for entries, _ in answers]
    if not within:
        _refuse_difference(reports, remedy)
        return
    all_ranks = (tuple(range(len(reports))),)
    for groups in (None, *dict.fromkeys(within.values())):
        chosen = [
            [entry for entry in report if within.get(_name(entry)) == groups] for report in reports
        ]
        for ranks in groups or all_ranks:
            _refuse_difference([chosen[rank] for rank in ranks], remedy, ranks)


def _name(entry: str) -> str:
    return entry.split(" = ")[0]


def _refuse_difference(
    reports: Sequence[Sequence[str]], remedy: str, ranks: Sequence[int] | None = None
) -> None:
    position, entries = first_difference(reports)
    if len(set(entries)) > 1:
        entry = next(report[position] for report in reports if position < len(report))
        raise PlanMismatch(
            f"the ranks disagree, first about {_name(entry)!r}: {holders(entries, ranks)}."
            f" {remedy}".rstrip(". ")
        )


def differing(
    exchange: Exchange,
    report: Mapping[str, str],
    *,
    call: str,
    within: Mapping[str, Groups] = _EVERYWHERE,
) -> dict[str, str]:
    """Return the entries of `report` that are not the same on every rank (or `within` groups of
    ranks), with who holds what; all have the same names. Collective.
    """
    answers = [json.loads(answer) for answer in exchange(json.dumps(report).encode(), call)]
    found: dict[str, str] = {}
    all_ranks = (tuple(range(len(answers))),)
    for name in report:
        for ranks in within.get(name, all_ranks):
            texts = [answers[rank][name] for rank in ranks]
            if len(set(texts)) > 1:
                found.setdefault(name, holders(texts, ranks))
    return found
