"""``zeroshard run --elastic --hostfile``: which hosts and slots go on after a death.

A host whose connection has ended is gone, with its memory; so is one whose last rank has died. The
others keep their connection and their guard, which holds the memory of its host.

Invariant: the number of slots falls with each start. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeroshard.launch.connection import Connection
from zeroshard.launch.elastic import (
    Loss,
    dead_ranks,
    killed_ranks,
    loss_of,
    say_again,
    say_too_few,
)
from zeroshard.launch.hostfile import Host
from zeroshard.launch.reports import Outcome

__all__ = ["go_on"]

_REFUSED = (2, 3)  # the command line or the configuration is wrong on a host


def go_on(
    connections: Sequence[Connection], outcome: Outcome, least: int
) -> list[tuple[Connection, Host]] | None:
    """Return the hosts that go on, with the slots that they still have; none where they are too
    few. Either is said. None where nobody has died by whom the job could go on.
    """
    lost = [connection for connection in connections if not connection.waits]
    if any(one.loss is not None and one.loss.code in _REFUSED for one in lost):
        return None
    dead = killed_ranks(outcome) if lost else dead_ranks(outcome)
    if not dead and (outcome.stalled or not lost):
        return None
    left, first_rank = list[tuple[Connection, Host]](), 0
    for connection in connections:
        host = connection.host
        slots = [slot for place, slot in enumerate(host.slots) if first_rank + place not in dead]
        first_rank += len(host.slots)
        if slots and connection not in lost:
            left.append((connection, replace(host, slots=tuple(slots))))
    loss = _loss(lost, outcome, dead, sum(len(host.slots) for _, host in left), first_rank)
    if loss.left < least:
        say_too_few(loss, least)
        return []
    whole = say_again(loss, [connection.kept for connection, _ in left])
    for connection, _ in left:
        connection.kept["whole"] = whole
    return left


def _loss(lost: Sequence[Connection], outcome: Outcome, dead: set[int], left: int, of: int) -> Loss:
    losses = [one.loss for one in lost if one.loss is not None]
    if losses:
        return Loss(min(losses, key=lambda one: one.at).reason, left, of)
    if not dead:
        return Loss(f"{lost[0].host.name} has left", left, of)
    return loss_of(outcome, dead, left, of)
