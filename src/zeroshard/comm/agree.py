"""Compare what could differ between ranks before anything depends on it: an error on one rank alone is a hang on the others.

Every rank sends a short ordered report (name -> text); all ranks read all reports and raise the same PlanMismatch, which names the first
entry that differs and who holds what. A rank that has already failed sends its error instead, and the others raise that.

Cost: one all-gather of text, through the process group while there is no transport (`agree`), through the transport later (`compare`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from zeroshard.comm.transport import Transport
from zeroshard.core.digest import first_difference, holders
from zeroshard.errors import PlanMismatch, ZeroshardError

__all__ = ["agree", "compare"]


def agree(group: dist.ProcessGroup | None, report: Mapping[str, str], *, error: ZeroshardError | None = None) -> None:
    """Return when every rank of `group` sent the same `report`; collective.

    Raises this rank's own `error` if it has one, PlanMismatch with another rank's error, or PlanMismatch naming the first difference.
    """
    if group is None:
        if error is not None:
            raise error
        return
    mine = (list(report.items()), None if error is None else str(error))
    theirs: list[tuple[list[tuple[str, str]], str | None]] = [mine] * group.size()
    dist.all_gather_object(theirs, mine, group=group)
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(theirs):
        if failure is not None:
            raise PlanMismatch(f"rank {rank} refused: {failure}")
    _require_equal(
        [entries for entries, _ in theirs],
        "Build the same model with the same options on every rank (same seed), or use sync_from=0",
    )


def compare(transport: Transport, report: Mapping[str, str], *, remedy: str = "") -> None:
    """Return when every rank of `transport` sent the same `report`; else raise PlanMismatch on every rank, with the `remedy`. Collective."""
    answers = transport.exchange(json.dumps(list(report.items())).encode())
    _require_equal([json.loads(answer) for answer in answers], remedy)


def _require_equal(reports: Sequence[Sequence[tuple[str, str]]], remedy: str) -> None:
    position, entries = first_difference([[f"{name} = {text}" for name, text in report] for report in reports])
    if len(set(entries)) > 1:
        name = next(report[position][0] for report in reports if position < len(report))
        raise PlanMismatch(f"the ranks disagree, first about {name!r}: {holders(entries)}. {remedy}".rstrip(". "))
