"""Compare what could differ between ranks before anything depends on it: an error on one rank alone is a hang on the others.

Every rank sends a short ordered report (name -> text); all ranks read all reports and raise the same PlanMismatch, which names the first
entry that differs and who holds what. A rank that has already failed sends its error instead, and the others raise that.

Cost: one all-gather of text at ``shard()``; never called in a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from zeroshard.errors import PlanMismatch, ZeroshardError

__all__ = ["agree"]


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
    reports = [entries for entries, _ in theirs]
    for position in range(max(len(entries) for entries in reports)):
        column = [entries[position] if position < len(entries) else ("nothing more", "") for entries in reports]
        if len(set(column)) > 1:
            raise PlanMismatch(_describe(column))


def _describe(column: list[tuple[str, str]]) -> str:
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, entry in enumerate(column):
        holders.setdefault(entry, []).append(rank)
    shown = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {name} = {text}" for (name, text), ranks in holders.items()
    )
    first = column[0][0]
    return f"the ranks disagree, first about {first!r}: {shown}. Build the same model with the same options on every rank (same seed), or use sync_from=0"
