"""Compare what could differ between ranks before anything depends on it: an error on one rank
alone is a hang on the others.

Every rank sends a short ordered report (name -> text); all ranks read all reports and raise the
same PlanMismatch, which names the first entry that differs and who holds what. A rank that has
already failed sends its error instead, and the others raise that.

Cost: one all-gather of text, through the process group while there is no transport (`agree`),
through the transport later (`compare`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from zeroshard.comm.plain import gather_bytes
from zeroshard.comm.transport import Transport
from zeroshard.core.digest import first_difference, holders
from zeroshard.errors import PlanMismatch, ZeroshardError

__all__ = ["REMEDY", "agree", "compare", "differing"]

REMEDY = "Build the same model with the same options on every rank (same seed), or use sync_from=0"


def agree(
    group: dist.ProcessGroup | None,
    report: Mapping[str, str],
    *,
    error: ZeroshardError | None = None,
    refusal: type[ZeroshardError] = PlanMismatch,
) -> None:
    """Return when every rank of `group` sent the same `report`; collective.

    Raises this rank's own `error` if it has one, a `refusal` with another rank's error, or
    PlanMismatch naming the first difference.
    """
    if group is None:
        if error is not None:
            raise error
        return
    answers = gather_bytes(group, _packed(report, error).encode())
    _settle([answer.decode() for answer in answers], error, REMEDY, refusal)


def differing(group: dist.ProcessGroup | None, report: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `report` that are not the same on every rank, with who holds what;
    all have the same names. Collective.
    """
    if group is None:
        return {}
    answers = [
        json.loads(answer)
        for answer in gather_bytes(group, json.dumps(list(report.values())).encode())
    ]
    entries = dict(zip(report, zip(*answers, strict=True), strict=True))
    return {name: holders(texts) for name, texts in entries.items() if len(set(texts)) > 1}


def compare(
    transport: Transport,
    report: Mapping[str, str],
    *,
    call: str,
    error: ZeroshardError | None = None,
    remedy: str = "",
) -> None:
    """As `agree`, through a transport, in `call` (see Transport.exchange), with a `remedy` of
    the caller's.
    """
    _settle(
        [answer.decode() for answer in transport.exchange(_packed(report, error).encode(), call)],
        error,
        remedy,
    )


def _packed(report: Mapping[str, str], error: ZeroshardError | None) -> str:
    return json.dumps(
        [
            [f"{name} = {text}" for name, text in report.items()],
            None if error is None else str(error),
        ]
    )


def _settle(
    everyone: Sequence[str],
    error: ZeroshardError | None,
    remedy: str,
    refusal: type[ZeroshardError] = PlanMismatch,
) -> None:
    if error is not None:
        raise error
    answers = [json.loads(answer) for answer in everyone]
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            raise refusal(f"rank {rank} refused: {failure}")
    position, entries = first_difference([report for report, _ in answers])
    if len(set(entries)) > 1:
        name = next(report[position] for report, _ in answers if position < len(report)).split(
            " = "
        )[0]
        raise PlanMismatch(
            f"the ranks disagree, first about {name!r}: {holders(entries)}. {remedy}".rstrip(". ")
        )
