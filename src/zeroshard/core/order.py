"""Decide which units to prefetch and which to evict, from the order in which units ran in the last
pass.

ZeRO-Infinity, section 6.2, prefetches by a trace of operators; here by a trace of units, one per
phase ("forward", "backward")::

    recorded by the last pass   a  b  c  b  head
    this pass                   a  b .
                                    ^ position: predicts c, then head (b is live), up to the budget

It is a whole trace because a unit that runs twice (b above) has two successors, and a wrong gather
costs bytes on the wire. A unit that the trace does not contain predicts nothing.

Invariants: a prediction names no unit twice, no live unit, and no more bytes than the budget. It is
right if this pass repeats the last one; skipped units are followed at once. Traces may differ
between ranks: compare before a two-sided collective for a predicted unit.

Cost: one or two microseconds per unit and phase. Units and phases are any hashable names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)  # unit


def advance(trace: Sequence[U], position: int, unit: U) -> int | None:
    """Return the index of `unit`'s next run in `trace` after `position`, or None.

    Units between the two were skipped by this pass. ``advance("abcb", 0, "b") == 1``,
    ``advance("abcb", 1, "b") == 3``.
    """
    following = position + 1
    if following < len(trace) and trace[following] == unit:
        return following
    try:
        return trace.index(unit, following)
    except ValueError:
        return None


def fitting(
    trace: Sequence[U],
    start: int,
    *,
    sizes: Mapping[U, int],
    free_bytes: int,
    is_live: Callable[[U], bool],
) -> list[U]:
    """Return the units of ``trace[start:]`` to gather, up to the first too large for the rest.

    Units that are `is_live` are gathered already: left out and not counted.
    """
    units: list[U] = []
    for index in range(start, len(trace)):
        unit = trace[index]
        if is_live(unit) or unit in units:
            continue
        free_bytes -= sizes[unit]
        if free_bytes < 0:
            break
        units.append(unit)
    return units


def to_evict(
    prefetched: Iterable[U], upcoming: Sequence[U], *, sizes: Mapping[U, int], excess_bytes: int
) -> list[U]:
    """Return which `prefetched` units, none in use, to release for `excess_bytes`.

    First those that are not `upcoming` at all, oldest first; then those needed last (Belady's
    rule). Returns all of them when that is not enough: a needed unit is gathered in any case.
    """
    if excess_bytes <= 0:
        return []
    next_run = {unit: index for index, unit in reversed(list(enumerate(upcoming)))}
    evicted: list[U] = []
    last_first = sorted(prefetched, key=lambda unit: -next_run.get(unit, len(upcoming)))
    for unit in last_first:
        evicted.append(unit)
        excess_bytes -= sizes[unit]
        if excess_bytes <= 0:
            break
    return evicted


@dataclass
class _Pass(Generic[U]):
    """One phase: the last pass's trace, this pass's position in it, and its units so far."""

    trace: list[U] = field(default_factory=list)
    position: int = -1
    so_far: list[U] = field(default_factory=list)
    # the same two with the units that were kept for a backward; None before any pass
    last_uses: list[U] | None = None
    uses: list[U] = field(default_factory=list)


class Order(Generic[U]):
    """The traces of all phases: ``begin`` a pass, ``record`` its units, ``predict``."""

    def __init__(self) -> None:
        self._passes: dict[Hashable, _Pass[U]] = {}

    def begin(self, phase: Hashable) -> None:
        """Start a pass: the last pass becomes the trace."""
        current = self._passes.get(phase)
        if current is None:
            self._passes[phase] = _Pass()
        else:
            last_uses = current.uses or current.last_uses or []
            self._passes[phase] = _Pass(current.so_far or current.trace, last_uses=last_uses)

    def last_uses(self, phase: Hashable) -> list[U] | None:
        """Return the units of the last complete pass that gathered any, in order, kept ones
        included: none where no pass has, and None before any pass.
        """
        current = self._passes.get(phase)
        return None if current is None else list(current.uses) or current.last_uses

    def seed(self, phase: Hashable, trace: Sequence[U]) -> None:
        """Take `trace` for the pass before the first."""
        self._passes[phase] = _Pass(trace=list(trace), last_uses=list(trace))

    def record(self, phase: Hashable, unit: U) -> None:
        """Say that `unit` runs now. The first call for a phase starts its first pass."""
        current = self._passes.get(phase)
        if current is None:
            current = self._passes[phase] = _Pass()
        current.so_far.append(unit)
        current.uses.append(unit)
        trace, following = current.trace, current.position + 1
        if following < len(trace) and trace[following] == unit:
            current.position = following  # as in the last pass
        elif (position := advance(trace, current.position, unit)) is not None:
            current.position = position

    def resume(self, phase: Hashable, unit: U) -> None:
        """Say that `unit` runs now, which was kept: that predicts no gather."""
        self._passes.setdefault(phase, _Pass()).uses.append(unit)

    def predict(
        self,
        phase: Hashable,
        unit: U,
        *,
        sizes: Mapping[U, int],
        live_bytes: int,
        budget_bytes: int,
        is_live: Callable[[U], bool] | None = None,
        around: bool = False,
    ) -> list[U]:
        """Return the units to prefetch after `unit`, in the order in which they are needed;
        `around`: after the last unit come the units of a next pass like this one.

        `sizes` are gathered bytes. `is_live` says of a unit whether it is gathered now, as `unit`
        is (default: it alone), with `live_bytes` in all; live and predicted units together never
        exceed `budget_bytes`.
        """
        start = self._after(phase, unit)
        if start is None:
            return []
        trace = self._passes[phase].trace
        return fitting(
            trace[start:] + trace[:start] if around else trace,
            0 if around else start,
            sizes=sizes,
            free_bytes=budget_bytes - live_bytes,
            is_live=unit.__eq__ if is_live is None else is_live,
        )

    def upcoming(self, phase: Hashable, unit: U, *, around: bool = False) -> list[U]:
        """Return the units expected after `unit` in this pass, repeats included; `around`: and the
        units of a next pass like this one, up to `unit`.
        """
        start = self._after(phase, unit)
        if start is None:
            return []
        trace = self._passes[phase].trace
        return trace[start:] + trace[:start] if around else trace[start:]

    def _after(self, phase: Hashable, unit: U) -> int | None:
        current = self._passes.get(phase)
        if current is None:
            return None
        trace, position = current.trace, current.position
        is_there = position >= 0 and trace[position] == unit
        found = position if is_there else advance(trace, position, unit)
        return None if found is None else found + 1
