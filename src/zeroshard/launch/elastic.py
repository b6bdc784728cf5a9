"""``zeroshard run --elastic``: when a rank dies, the job starts again with those that are left.

The launcher ends what is left of the group and starts the script again with fewer ranks, which
resume by themselves: from memory that the launcher has kept for them (`KeeperServer`), else from
the newest checkpoint. `launch` does so on one host; on several `go_on` says which hosts are left.

Of several hosts one that was lost may come back (``hosts.py``): `grow` starts again with it.

Invariant: between two starts either the number of ranks has fallen, or all ranks have kept a newer
step; so a script that always fails ends. No torch here, but to count the devices of one host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroshard.launch import worker
from zeroshard.launch.connection import Connection
from zeroshard.launch.options import ELASTIC, Host, RunOptions
from zeroshard.launch.outcome import Outcome, say
from zeroshard.launch.supervisor import (
    CONTRACT_EXIT_CODES,
    SIGNALS_OF_A_CONSEQUENCE,
    Failure,
)
from zeroshard.system.device import VISIBLE_DEVICES
from zeroshard.system.keeper import KeeperServer
from zeroshard.system.keeper_client import whole_steps

_REFUSED = (2, 3)  # the command line or the configuration is wrong on a host


@dataclass(frozen=True)
class Loss:
    """A loss of ranks: the failure to name first, in words, and how many ranks are left."""

    reason: str  # "rank 1 died (killed by SIGKILL)"
    left: int
    of: int
    details: str = ""  # a traceback

    def tell(
        self, least: int, summaries: Sequence[Mapping[str, Any]]
    ) -> dict[str, list[int]] | None:
        """Say who has died, and who goes on, from where by what the keepers of all hosts hold;
        return branch and number of the newest step in memory of each directory. None, which is
        said, where fewer than `least` are left.
        """
        goes_on = self.left >= least
        end = f"{self.left} rank(s) are left, and {ELASTIC}={least} needs {least}"
        if goes_on:
            end = f"{self.left} of {self.of} rank(s) go on, {source(summaries)}"
        say("\n".join(filter(None, [f"{self.reason}: {end}", self.details.rstrip()])))
        return whole_steps(summaries) if goes_on else None


def launch(options: RunOptions, run_ranks: Callable[[RunOptions], tuple[Outcome, int]]) -> int:
    """Run the script on this host until it ends, with fewer ranks after each death; return the
    exit code of ``zeroshard run``.
    """
    least, keeper = options.elastic or 1, KeeperServer()
    os.environ[worker.KEEPER] = keeper.address
    try:
        while True:
            begin = time.monotonic()
            outcome, num_ranks = run_ranks(options)
            dead = dead_ranks(outcome)
            if not dead:
                outcome.tell(begin)
                return outcome.exit_code
            loss = loss_of(outcome, dead, num_ranks - len(dead), num_ranks)
            if (whole := loss.tell(least, [keeper.summary()])) is None:
                return outcome.exit_code
            keeper.whole = whole
            _leave_devices(dead, num_ranks)
            options = replace(options, nproc=str(loss.left), elastic=min(least, loss.left))
    finally:
        keeper.close()


def dead_ranks(outcome: Outcome) -> set[int]:
    """Return the ranks that have died by themselves; none where the job as a whole has ended.

    That is the first to fail, and others that a signal has killed which no launcher and no lost
    peer sends, or that have failed with the same error. Other errors are taken for consequences.
    After a stall it is those that did not even answer: stopped, or in the kernel.
    """
    if outcome.ended_by is not None or not outcome.failures:
        return set()
    first = outcome.failures[0]
    if outcome.stalled or first.stalled:
        return {one.rank for one in outcome.failures if one.hung}
    if first.left or first.consequence or first.status in CONTRACT_EXIT_CODES:
        return set()
    dead = {first.rank}
    for one in outcome.failures:  # later ones that are deaths of their own
        same = bool(one.message) and one.message == first.message
        if _was_killed(one) or (same and not one.consequence):
            dead.add(one.rank)
    return dead


def _was_killed(failure: Failure) -> bool:
    """Whether a signal ended the rank which no launcher and no lost peer sends."""
    killed_by = -(failure.status or 0)
    return not failure.consequence and killed_by > 0 and killed_by not in SIGNALS_OF_A_CONSEQUENCE


def killed_ranks(outcome: Outcome) -> set[int]:
    """Return the ranks that have died by themselves where a host was lost: any other failure may
    be its consequence.
    """
    return {failure.rank for failure in outcome.failures if _was_killed(failure)}


def loss_of(outcome: Outcome, dead: set[int], left: int, of: int) -> Loss:
    """Return that the ranks `dead` are lost, with the name of the first to fail."""
    first = next(failure for failure in outcome.failures if failure.rank in dead)
    who = f"{first.name} and {len(dead) - 1} more" if len(dead) > 1 else first.name
    hint = " (often the kernel, out of memory)" if first.status == -signal.SIGKILL else ""
    reason = f"{who} died, {first.how}{hint}"
    if first.hung:
        reason = f"{who} hung: asked for its stacks, it did not answer"
    return Loss(reason, left, of, first.traceback)


def source(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return from where the ranks will go on, from what the keepers of all hosts say."""
    kept, saved = whole_steps(summaries), dict[str, list[int]]()
    for summary in summaries:
        for directory, step in summary["saved"].items():  # hosts heard of different saves
            saved[directory] = max(step, saved.get(directory, step))
    found = []
    for directory in sorted({*saved, *kept}):
        if kept.get(directory, []) >= saved.get(directory, []):
            found.append(f"memory (step {kept[directory][-1]})")
        else:
            found.append(f"checkpoint (step {saved[directory][-1]})")
    return f"from {', '.join(found)}" if found else "from the start: no step is saved"


def go_on(
    connections: Sequence[Connection], outcome: Outcome, least: int
) -> list[tuple[Connection, Host]] | None:
    """Return the hosts that go on, with the slots that they still have; none where they are too
    few. Either is said. None where nobody has died by whom the job could go on.

    A host is gone, with its memory, when its connection has ended or its last rank has died. The
    others keep their connection and their guard, which holds the memory of its host.
    """
    lost = [connection for connection in connections if not connection.waits]
    if any(has_refused(one) and not one.came_back for one in lost):
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
    num_left = sum(len(host.slots) for _, host in left)
    if losses := [one.loss for one in lost if one.loss is not None]:
        loss = Loss(min(losses, key=lambda one: one.at).reason, num_left, first_rank)
    elif not dead:
        loss = Loss(f"{lost[0].host.name} has left", num_left, first_rank)
    else:
        loss = loss_of(outcome, dead, num_left, first_rank)
    whole = loss.tell(least, [connection.kept for connection, _ in left])
    if whole is None:
        return []
    for connection, _ in left:
        connection.kept["whole"] = whole
    return left


def grow(
    connections: Sequence[Connection], back: Sequence[Connection]
) -> list[tuple[Connection, Host]] | None:
    """Return all hosts of a job that was stopped to begin again with those that are `back`, which
    is said; None where one was lost meanwhile. Ranks that have failed were told to end.
    """
    if not back or not all(one.waits for one in connections):
        return None
    summaries = [one.kept for one in connections]
    left = [(one, one.host) for one in [*connections, *back]]
    names = ", ".join(one.host.name for one in back)
    num_ranks = sum(len(host.slots) for _, host in left)
    say(f"{names} came back: {num_ranks} rank(s) go on, {source(summaries)}")
    whole = whole_steps(summaries)
    for connection, _ in left:
        connection.kept["whole"] = whole
        connection.came_back = connection.came_back or connection in back
    return left


def has_refused(connection: Connection) -> bool:
    """Whether the command line or the configuration is wrong on the host."""
    return connection.loss is not None and connection.loss.code in _REFUSED


def visible_devices(visible: Sequence[str], num_ranks: int, dead: Iterable[int]) -> list[str]:
    """Return the devices of `visible` for the ranks left: each rank had the device of its number,
    and the device of a dead rank may be broken. All where they are fewer than ranks.
    """
    gone = set(dead)
    if len(visible) < num_ranks:
        return list(visible)
    return [device for number, device in enumerate(visible) if number not in gone]


def _leave_devices(dead: Iterable[int], num_ranks: int) -> None:
    """Hide the devices of dead ranks of this host from the next ones."""
    import torch

    found = torch.accelerator.current_accelerator()
    variable = None if found is None else VISIBLE_DEVICES.get(found.type)
    if variable is None:
        return
    named = os.environ.get(variable)
    if named is None:
        visible = [str(number) for number in range(torch.accelerator.device_count())]
    else:
        visible = [device for device in named.split(",") if device]
    if visible:
        os.environ[variable] = ",".join(visible_devices(visible, num_ranks, dead))
