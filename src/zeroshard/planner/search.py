"""Which rows, tiers and grids are planned: all rows of data parallel ranks or of one grid; where
axes are "auto", the best row of each of the grids that may be fastest.

A search over grids goes from the one whose computations take least, with what their order leaves
idle, to the one whose take most. It ends when eight grids were planned and the next one's least
time is more than the fastest step so far, or with twelve grids of which one fits. In a grid, states
leave the device only where no row fits on it; the three rows that move least are simulated, and
none after one whose step is within 2% of the grid's least. Data parallel ranks alone are always
planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.planner.axes import Axes, Grid, grids
from zeroshard.planner.exact import LaidOut, StateBytes, rest_bytes
from zeroshard.planner.grid import GridPlan, RankPlan
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape
from zeroshard.planner.rows import (
    PlannedRow,
    bytes_of,
    plan_on_grid,
    plan_row,
    rest_fits,
    short_of,
    takes,
    tiers_of,
)
from zeroshard.planner.training import Training

Policies = Callable[[Machine], Iterable[Policy]]

_GRIDS, _MOST_GRIDS = 8, 12  # planned by a search, where the fastest is known by then
_ROWS = 3  # simulated in a grid
_NEAR = 1.02  # of a grid's least seconds: faster is not looked for


@dataclass(frozen=True)
class Search:
    """What is planned of a model, on whatever machine and with whatever training."""

    model: ModelShape
    policies: Policies
    axes: Axes | None = None

    def rows(self, machine: Machine, training: Training) -> tuple[PlannedRow, ...]:
        """Return the planned lines, whether they fit or not. Raises ConfigError for axes that do
        not fit the machine or the model.
        """
        if self.axes is None:
            laid_out = LaidOut(self.model, machine.mesh, training.align)
            runnable = self._runnable(machine, training)
            return tuple(plan_row(laid_out, policy, machine, training) for policy in runnable)
        if not self.axes.is_auto:
            (grid,) = grids(self.axes, self.model, machine, training)
            plan = GridPlan(grid, self.model, machine, training)
            runnable = self._runnable(plan.share, training)
            return tuple(plan_on_grid(plan, policy) for policy in runnable)
        return tuple(self._best(machine, training))

    def fitting(self, machine: Machine, training: Training) -> list[PlannedRow]:
        """Return the lines that fit; the steps of others are not simulated."""
        if self.axes is None:
            laid_out = LaidOut(self.model, machine.mesh, training.align)
            fits = _that_fit(
                self._runnable(machine, training),
                machine,
                lambda policy: [rest_bytes(laid_out, policy, training)],
                lambda policy: bytes_of(laid_out, policy, machine, training),
            )
            return [plan_row(laid_out, policy, machine, training, sizes) for policy, sizes in fits]
        if self.axes.is_auto:
            return [row for row in self._best(machine, training) if row.fits]
        (grid,) = grids(self.axes, self.model, machine, training)
        plan = GridPlan(grid, self.model, machine, training)
        runnable = self._runnable(plan.share, training)
        fits = _that_fit(runnable, plan.share, plan.rests, plan.worst)
        return [plan_on_grid(plan, policy, sizes) for policy, sizes in fits]

    def peak_of(self, row: PlannedRow, machine: Machine, training: Training) -> int:
        """Return the peak on the device of the line that is `row`, with another `training`."""
        policy = ROWS[row.row].tiered(*(Tier(tier) for tier in row.tiers.values()))
        if self.axes is None:
            laid_out = LaidOut(self.model, machine.mesh, training.align)
            return bytes_of(laid_out, policy, machine, training).peak.total
        one = row.spread
        schedule = self.axes.pipeline if one.pp > 1 else PipelineOrder()
        grid = Grid(one.tp, one.pp, one.dp, schedule, one.micro_batches)
        return GridPlan(grid, self.model, machine, training).worst(policy).peak.total

    def least_bytes(self, machine: Machine, training: Training) -> int:
        """Return the peak of the line that takes least of a device."""
        if self.axes is not None:
            return min(row.peak_bytes["device"] for row in self.rows(machine, training))
        laid_out = LaidOut(self.model, machine.mesh, training.align)
        runnable = self._runnable(machine, training)
        return min(bytes_of(laid_out, one, machine, training).peak.total for one in runnable)

    def _runnable(self, machine: Machine, training: Training) -> list[Policy]:
        return [policy for policy in self.policies(machine) if takes(policy, training)]

    # ------------------------------------------------------------------------------ over grids

    def _best(self, machine: Machine, training: Training) -> Iterator[PlannedRow]:
        """Yield the best line of each grid, the fastest first."""
        assert self.axes is not None
        parts: dict[int, ModelShape] = {}
        plans = [
            GridPlan(grid, self.model, machine, training, parts)
            for grid in grids(self.axes, self.model, machine, training)
        ]
        plans.sort(key=lambda plan: plan.least_s)
        found: list[PlannedRow] = []
        fastest = float("inf")
        for number, plan in enumerate(plans):
            is_alone = plan.grid.tp == plan.grid.pp == 1
            is_over = number >= _GRIDS and plan.least_s > fastest
            if not is_alone and (is_over or (number >= _MOST_GRIDS and fastest < float("inf"))):
                continue
            row = self._row(plan, training)
            found.append(row)
            if row.fits:
                fastest = min(fastest, row.time.seconds)
        fits = sorted((row for row in found if row.fits), key=lambda row: row.time.seconds)
        yield from fits
        left = [row for row in found if not row.fits]
        yield from sorted(left, key=lambda row: row.peak_bytes["device"])

    def _row(self, plan: GridPlan, training: Training) -> PlannedRow:
        """Return the fastest row of a grid that fits, else the one that takes least."""
        runnable = self._runnable(plan.share, training)
        here = [policy for policy in runnable if not _offloads(policy)]
        away = [policy for policy in runnable if _offloads(policy)]
        for policies in (here, away):
            fits = _that_fit(policies, plan.share, plan.rests, plan.worst)
            if fits:
                return _fastest(plan, fits)
        least = min(here, key=lambda policy: plan.worst(policy).peak.total)
        return plan_on_grid(plan, least)


def _that_fit(
    policies: Iterable[Policy],
    machine: Machine,
    rests: Callable[[Policy], Iterable[StateBytes]],
    size: Callable[[Policy], RankPlan],
) -> list[tuple[Policy, RankPlan]]:
    """Return the rows that fit, with their bytes; what rests alone rules most others out before
    they are sized.
    """
    sized = [(policy, size(policy)) for policy in policies if rest_fits(rests(policy), machine)]
    return [one for one in sized if short_of(one[1].peak.by_tier, machine) is None]


def _fastest(plan: GridPlan, fits: Iterable[tuple[Policy, RankPlan]]) -> PlannedRow:
    """Return the fastest row; those that receive least are tried first."""
    order = sorted(fits, key=lambda one: plan.traffic(one[1].rank, one[0]).total)
    best = None
    for policy, sizes in order[:_ROWS]:
        time = plan.step(policy)
        if best is None or time.total < best[2].total:
            best = policy, sizes, time
        if time.total <= _NEAR * plan.least_s:
            break
    assert best is not None
    return plan_on_grid(plan, *best)


def _offloads(policy: Policy) -> bool:
    """Whether any state leaves the device."""
    return set(tiers_of(policy).values()) != {Tier.DEVICE.value}
