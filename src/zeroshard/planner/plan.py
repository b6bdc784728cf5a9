"""Every row of the policy table, on the tiers that make sense for it, and which of them to take.

The recommendation is the fastest row that fits, of equal ones the first. Where none fits, it is the
first change that makes one fit, of those tried from the cheapest on: recomputing activations,
smaller micro-batches, a disk, more GPUs. A sweep plans one model on more and more GPUs.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.wire import Wire
from zeroshard.errors import ConfigError
from zeroshard.planner.axes import Axes, Grid, grids
from zeroshard.planner.durations import Durations
from zeroshard.planner.exact import LaidOut
from zeroshard.planner.grid import GridPlan, RankPlan, RanksPlan
from zeroshard.planner.machine import Machine, presets
from zeroshard.planner.model import ModelShape, Training, fitted, with_adapters
from zeroshard.planner.rows import (
    PlannedRow,
    candidates,
    describe_row,
    plan_on,
    plan_row,
    rest_fits,
    short_of,
    takes,
    tiers_of,
)

# ------------------------------------------------------------------ rows and grids that are planned
# All rows of data parallel ranks or of one grid; where axes are "auto", the best row of each of the
# grids that may be fastest.
#
# A search over grids plans them by the time of their computations, with what their order leaves
# idle, the shortest first. It ends when eight grids were planned and the next one's least time is
# more than the fastest step so far, or with twelve grids where one of them fits. In a grid, states
# leave the device only where no row fits on it; the three rows that move least are simulated, and
# none after a step within 2% of the grid's least. Data parallel ranks alone are always planned.

Policies = Callable[[Machine], Iterable[Policy]]

_GRIDS, _MOST_GRIDS = 8, 12  # planned by a search, where the fastest is known by then
_ROWS = 3  # simulated in a grid
_NEAR = 1.02  # of a grid's least seconds: faster is not looked for


@dataclass(frozen=True)
class Search:
    """The lines that are planned of a model, on any machine and with any training."""

    model: ModelShape
    policies: Policies
    axes: Axes | None = None

    def rows(self, machine: Machine, training: Training) -> tuple[PlannedRow, ...]:
        """Return the planned lines, whether they fit or not. Raises ConfigError for axes that do
        not fit the machine or the model.
        """
        if self.axes is not None and self.axes.is_auto:
            return tuple(self._best(machine, training))
        plan = self._plan(machine, training)
        return tuple(plan_on(plan, policy) for policy in self._runnable(plan.share, training))

    def fitting(self, machine: Machine, training: Training) -> list[PlannedRow]:
        """Return the lines that fit; the steps of others are not simulated."""
        if self.axes is not None and self.axes.is_auto:
            return [row for row in self._best(machine, training) if row.fits]
        plan = self._plan(machine, training)
        fits = _that_fit(plan, self._runnable(plan.share, training))
        return [plan_on(plan, policy, sizes) for policy, sizes in fits]

    def peak_of(self, row: PlannedRow, machine: Machine, training: Training) -> int:
        """Return the peak on the device of the line that is `row`, with another `training`."""
        policy = ROWS[row.row].tiered(*(Tier(tier) for tier in row.tiers.values()))
        grid, one = None, row.spread
        if self.axes is not None:
            schedule = self.axes.pipeline if one.pp > 1 else PipelineOrder()
            grid = Grid(one.tp, one.pp, one.dp, schedule, one.micro_batches)
        return self._plan(machine, training, grid).worst(policy).peak.total

    def least_bytes(self, machine: Machine, training: Training) -> int:
        """Return the peak of the line that takes least of a device."""
        if self.axes is not None and self.axes.is_auto:
            return min(row.peak_bytes["device"] for row in self.rows(machine, training))
        plan = self._plan(machine, training)
        runnable = self._runnable(plan.share, training)
        return min(plan.worst(policy).peak.total for policy in runnable)

    def _plan(self, machine: Machine, training: Training, grid: Grid | None = None) -> RanksPlan:
        """Return the ranks that are planned; of axes `grid`, or the only one that they allow."""
        if self.axes is None:
            laid_out = LaidOut(self.model, machine.mesh, training.align)
            return RanksPlan(laid_out, machine, training)
        grid = grids(self.axes, self.model, machine, training)[0] if grid is None else grid
        return GridPlan(grid, self.model, machine, training)

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
        for policies in (here, [policy for policy in runnable if _offloads(policy)]):
            fits = _that_fit(plan, policies)
            if fits:
                # the fastest row: those that receive least are tried first
                order = sorted(fits, key=lambda one: plan.traffic(one[1].rank, one[0]).total)
                best = None
                for policy, sizes in order[:_ROWS]:
                    time = plan.step(policy)
                    if best is None or time.total < best[2].total:
                        best = policy, sizes, time
                    if time.total <= _NEAR * plan.least_s:
                        break
                assert best is not None
                return plan_on(plan, *best)
        least = min(here, key=lambda policy: plan.worst(policy).peak.total)
        return plan_on(plan, least)


def _that_fit(plan: RanksPlan, policies: Iterable[Policy]) -> list[tuple[Policy, RankPlan]]:
    """Return the rows that fit, with their bytes; what rests alone rules most others out before
    they are sized.
    """
    left = (policy for policy in policies if rest_fits(plan.rests(policy), plan.share))
    sized = [(policy, plan.worst(policy)) for policy in left]
    return [one for one in sized if short_of(one[1].peak.by_tier, plan.share) is None]


def _offloads(policy: Policy) -> bool:
    """Whether any state leaves the device."""
    return set(tiers_of(policy).values()) != {Tier.DEVICE.value}


# ----------------------------------------------------------------------------------------- the plan

_SUGGESTED_DISK = 3200 * 10**9  # bytes per node, where a disk is what is missing
_MOST_GPUS = 16_384
_ADAPTERS = "1%"  # of the parameters, as large adapters are
ALLOWED_FOR = "Python, torch, data loaders and the page cache"


@dataclass(frozen=True)
class Recommendation:
    """The row to take (None: no row fits), why, and what else to know."""

    row: PlannedRow | None
    reason: str
    smaller: str | None = None  # how it would be on half of the GPUs
    change: str | None = None  # where nothing fits: the cheapest change that would
    offer: str | None = None  # what gradients in the compute dtype would save
    adapters: str | None = None  # where nothing fits: the row that would if they alone are trained


@dataclass(frozen=True)
class Plan:
    """The result of ``zs.plan()``."""

    model: ModelShape
    machine: Machine
    training: Training
    rows: tuple[PlannedRow, ...]
    recommended: Recommendation
    axes: Axes | None = None

    def to_dict(self, *, price: float | None = None) -> dict[str, Any]:
        """Return the plan as ``zeroshard plan --json`` prints it; `price` of a GPU-hour: with what
        a billion tokens cost in the recommended row.
        """
        model, advice, training = self.model, self.recommended, self.training
        row = advice.row
        hours = None if row is None else row.gpu_hours_per_billion_tokens
        cost = None if hours is None or price is None else hours * price
        kept = 0.0 if training.master == "bf16" else training.formats(None).master.bytes_per_element
        states = {
            "weight": round(model.numel * Wire.of(training.precision).bytes_per_element),
            "grad": round(model.num_trained * Wire.of(training.accumulate).bytes_per_element),
            "optimizer": round(model.num_trained * (kept + training.moment_bytes)),
        }
        return {
            "model": {
                "name": model.name,
                "parameters": model.numel,
                "units": len(model.units),
                "decoder": None if model.decoder is None else asdict(model.decoder),
                "states_bytes": states,
                "note": model.note,
            },
            "machine": asdict(self.machine),
            "training": asdict(training),
            "axes": None if self.axes is None else asdict(self.axes),
            "rows": [one.to_dict() for one in self.rows],
            "recommended": {
                "row": None if row is None else row.row,
                "tiers": None if row is None else row.tiers,
                **{
                    axis: None if row is None else getattr(row.spread, axis)
                    for axis in ("tp", "pp", "dp")
                },
                **{
                    name: getattr(advice, name)
                    for name in ("reason", "smaller", "change", "offer", "adapters")
                },
            },
            **({} if price is None else {"price": {"gpu_hour": price, "billion_tokens": cost}}),
        }

    def config(self, *, disk_path: str = ".") -> dict[str, Any]:
        """Return the recommended row as a configuration that ``zs.shard(config=...)`` takes. The
        mesh is the script's: ``init_device_mesh(device_type, (pp, dp, tp), ...)``.

        States that rest on disk go to `disk_path`. Raises ConfigError where no row fits.
        """
        row, training = self.recommended.row, self.training
        if row is None:
            raise ConfigError(f"there is no configuration to write: {self.recommended.reason}")
        precision = {"compute": training.precision, "accumulate": training.accumulate}
        for name in ("master", "moments"):
            if getattr(training, name) != "fp32":
                precision[name] = getattr(training, name)
        out: dict[str, Any] = {"policy": row.row, "precision": precision}
        away = {state: tier for state, tier in row.tiers.items() if tier != Tier.DEVICE.value}
        if away:
            out["offload"] = dict(away)
            if Tier.DISK.value in away.values():
                out["offload"]["disk_path"] = disk_path
            if training.fraction < 1.0:
                out["offload"]["fraction"] = training.fraction
            if training.step_in_backward and away.get("optimizer") == Tier.HOST.value:
                out["offload"]["step_in_backward"] = True
        if row.whole_gradients:
            out["accumulation_budget"] = training.accumulation_bytes
        if training.leaves is not None:
            out["leaves"] = training.leaves
        comm = training.comm()
        machine = _share(row, self.machine)
        if machine.mesh.num_nodes > 1:
            comm["node_size"] = machine.node_size
        return {**out, "comm": comm} if comm else out


def make_plan(
    model: ModelShape,
    machine: Machine,
    training: Training,
    policies: Policies = candidates,
    axes: Axes | None = None,
) -> Plan:
    """Plan `training` of `model` on `machine`: all rows that `policies` gives for a machine, on
    data parallel ranks or on the grids that `axes` allows, and the one to take.

    Raises ConfigError for a codec that has no effect on this model or machine, and for axes that do
    not fit it.
    """
    model, training = fitted(model, training)
    if training.frozen_codec is not None and model.num_trained == model.numel:
        raise ConfigError(
            f"frozen_codec={training.frozen_codec!r} has no effect: every parameter of {model.name}"
            " is trained"
        )
    if training.grad_codec == "bf16" and machine.mesh.num_nodes == 1 < machine.gpus:
        raise ConfigError(
            "grad_codec='bf16' rounds sums over one node on their way to others: all"
            f" {machine.gpus} GPUs are one"
        )
    chosen = axes if axes is not None and axes != Axes() else None
    if chosen is not None and training.leaves is not None:
        raise ConfigError("leaves are planned for data parallel ranks alone: leave out tp and pp")
    if chosen is not None and training.accumulation_budget is not None:
        raise ConfigError(
            "accumulation_budget is planned for data parallel ranks alone: leave it out, or tp and"
            " pp"
        )
    search = Search(model, policies, chosen)
    rows = search.rows(machine, training)
    advice = _recommend(search, machine, training, rows)
    advice = replace(advice, offer=_offer(search, machine, training, advice.row))
    return Plan(model, machine, training, rows, advice, chosen)


def _share(row: PlannedRow, machine: Machine) -> Machine:
    """Return the part of `machine` that the data parallel ranks of `row` have."""
    one = row.spread
    if one.tp == one.pp == 1:
        return machine
    return Grid(one.tp, one.pp, one.dp, PipelineOrder(), one.micro_batches).share(machine)


# ------------------------------------------------------------------ which row to take


def _recommend(
    search: Search, machine: Machine, training: Training, rows: tuple[PlannedRow, ...]
) -> Recommendation:
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.peak_bytes["device"])
        share = _share(least, machine)
        what, needs, there = short_of(least.peak_bytes, share) or (least.bound_by, 0, 0)
        each, beside = "a GPU", ""
        if what != "device memory":
            part = share.node_size / machine.node_size  # other stages take as much, at most
            each, needs, there = "a node", needs / part, there / part
        if what == "host memory":
            allowance = machine.host_allowance / 1e9
            beside = f" beside the {allowance:,.3g} GB that {ALLOWED_FOR} take"
        reason = (
            f"nothing fits: {describe_row(least)}, which takes least, needs {needs / 1e9:,.4g} GB"
            f" of {what} {each} and has {there / 1e9:,.4g} GB{beside}"
        )
        change = (
            f"none of those tried helps: recomputing, smaller batches, disks, {_MOST_GPUS:,} GPUs"
        )
        for words, other, trained in _changes(search.model, machine, training):
            if fits := search.fitting(other, trained):
                change = f"{words}: {describe_row(_fastest(fits))} would fit"
                break
        adapters = _adapters(search, machine, training)
        return Recommendation(None, reason, change=change, adapters=adapters)
    best = _fastest(fitting)
    faster = [row for row in rows if row.time.seconds < best.time.seconds]
    if best.step_s is None:
        reason = f"of {len(fitting)} that fit, the one with the shortest transfers and step"
        faster = []
    else:
        reason = f"the fastest of {len(fitting)} that fit, bound by {best.bound_by}"
    if best.spread.bubble:
        reason += f" ({best.spread.bubble:.0%} bubble)"
    if search.axes is not None and search.axes.is_auto:
        alone = next((row for row in rows if row.spread.tp == row.spread.pp == 1), None)
        if alone is not None and alone is not best:
            times = alone.time.seconds / best.time.seconds
            took = f"({describe_row(alone)}) take {times:.3g} times as long"
            how = took if alone.fits else f"lack {alone.bound_by}"
            reason += f"; data parallel ranks alone {how}"
        elif alone is not None:
            reason += "; no grid with tp or pp is faster"
        # half of the GPUs would be another search
        return Recommendation(best, reason)
    if faster:
        first = _fastest(faster)
        reason += f"; {describe_row(first)} would be faster and lacks {first.bound_by}"
    return Recommendation(best, reason, smaller=_smaller(search, machine, training))


def _fastest(rows: list[PlannedRow]) -> PlannedRow:
    return min(rows, key=lambda row: row.time.seconds)


def _offer(
    search: Search, machine: Machine, training: Training, best: PlannedRow | None
) -> str | None:
    """Return what is saved where gradients rest in the compute dtype, None where nothing is."""
    if training.leaves is not None:
        return None
    dtype = training.precision
    other, what = replace(training, accumulate=dtype), f"gradients that rest in {dtype}"
    if other == training:
        return None
    sums = f"each micro-batch is then added in {dtype}"
    if best is None:
        rows = search.fitting(machine, other)
        return f"{what}: {describe_row(_fastest(rows))} would fit; {sums}" if rows else None
    saved = best.peak_bytes["device"] - search.peak_of(best, machine, other)
    return f"{what} save {saved / 1e9:.3g} GB of a GPU; {sums}" if saved > 0 else None


def _smaller(search: Search, machine: Machine, training: Training) -> str | None:
    """Return how it would be on half of the GPUs, None where they cannot be halved."""
    half = _with_gpus(machine, machine.gpus // 2)
    if machine.gpus % 2 or half is None:
        return None
    where = f"on half of the GPUs ({half.gpus})"
    try:
        fitting = search.fitting(half, training)
    except ConfigError:  # axes that take more GPUs
        return None
    if fitting:
        return f"{where} {describe_row(_fastest(fitting))} would fit"
    least = search.least_bytes(half, training)
    return f"{where} nothing fits: {least / 1e9:.3g} GB a GPU at least"


def _adapters(search: Search, machine: Machine, training: Training) -> str | None:
    """Return what would fit on this machine if adapters alone were trained (LoRA), if anything."""
    try:
        search = replace(search, model=with_adapters(search.model, _ADAPTERS))
    except ConfigError:  # traced, or with frozen parameters already
        return None
    on_it = ((words, one) for words, other, one in _changes(search.model, machine, training)
             if other is machine)  # fmt: skip
    for words, trained in [("", training), *on_it]:
        rows = search.fitting(machine, trained)
        if rows:
            words = f"{words}, --trainable {_ADAPTERS}" if words else f"--trainable {_ADAPTERS}"
            return f"{words} (LoRA): {describe_row(_fastest(rows))} would fit"
    return None


def _changes(
    model: ModelShape, machine: Machine, training: Training
) -> Iterator[tuple[str, Machine, Training]]:
    """Yield changes in words and as they are planned, the cheapest first; each keeps the changes of
    training before it. Activations change where they are known.
    """
    words: list[str] = []
    known = model.decoder is not None
    if known and not training.checkpointing:
        training, words = replace(training, checkpointing=True), ["checkpoint activations"]
        yield words[0], machine, training
    if known and training.batch > 1:
        fixed = words
        while training.batch > 1:
            training = replace(training, batch=training.batch // 2)
            words = [*fixed, f"a micro-batch of {training.batch}"]
            yield ", ".join(words), machine, training
    if not machine.disk:
        disk = f"{_SUGGESTED_DISK / 1e12:g} TB of disk a node"
        yield ", ".join([*words, disk]), replace(machine, disk=_SUGGESTED_DISK), training
    gpus = 2 * machine.gpus
    most = _MOST_GPUS if training.tree is None else min(_MOST_GPUS, training.tree.leaves)
    while gpus <= most:
        more = _with_gpus(machine, gpus)
        if more is not None:
            yield ", ".join([*words, f"{gpus} GPUs"]), more, training
        gpus *= 2


def _with_gpus(machine: Machine, gpus: int) -> Machine | None:
    """Return the machine with another number of GPUs, in nodes of the same size or in one smaller
    node; None where that is not possible.
    """
    full = max(machine.node_size, presets().get(machine.name, {}).get("node_size", 1))
    one_node = machine.gpus == machine.node_size
    node_size = min(gpus, full) if one_node else min(gpus, machine.node_size)
    if node_size < 1 or gpus % node_size:
        return None
    return replace(machine, gpus=gpus, node_size=node_size)


# ------------------------------------------------------------------ one model on more and more GPUs

_SWEEP = re.compile(r"gpus=(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class Point:
    """One row on one number of GPUs, all states on the device."""

    gpus: int
    row: str
    tokens_per_s_per_gpu: float | None  # None: of a model that takes no tokens
    efficiency: float  # seconds of forward and backward alone over seconds of the step
    rest_bytes: int  # of one GPU
    peak_bytes: int
    fits: bool
    bound_by: str  # as of PlannedRow


def parse_sweep(text: str) -> list[int]:
    """Return the numbers of GPUs that `text` ("gpus=8..16384") says, each twice the one before.

    Raises ConfigError for anything else.
    """
    found = _SWEEP.fullmatch(text)
    if found is None:
        raise ConfigError(f"sweep={text!r} is not of the form gpus=8..16384")
    first, last = int(found[1]), int(found[2])
    if not 1 <= first <= last:
        raise ConfigError(f"sweep={text!r} goes from {first} to {last}: nothing lies between them")
    out = [first]
    while out[-1] * 2 <= last:
        out.append(out[-1] * 2)
    return out


def make_sweep(
    model: ModelShape, machines: Sequence[Machine], training: Training
) -> tuple[Point, ...]:
    """Plan every row on each of the `machines`, whether it fits or not. Raises ConfigError for a
    model without known FLOPs.
    """
    model, training = fitted(model, training)
    if not model.is_timed:
        raise ConfigError(
            f"a sweep compares times, and the FLOPs of {model.name} are not known: have the factory"
            " return (module, inputs)"
        )
    points = []
    for machine in machines:
        laid_out = LaidOut(model, machine.mesh, training.align)
        compute_s = Durations(laid_out, machine, training.on(machine.gpus)).compute_s()
        for policy in (one for one in ROWS.values() if takes(one, training)):
            row = plan_row(laid_out, policy, machine, training)
            points.append(
                Point(
                    machine.gpus,
                    row.row,
                    None if row.tokens_per_s is None else row.tokens_per_s / machine.gpus,
                    compute_s / row.time.seconds,
                    row.rest_bytes[Tier.DEVICE.value],
                    row.peak_bytes[Tier.DEVICE.value],
                    row.fits,
                    row.bound_by,
                )
            )
    return tuple(points)


_MOST_SEQUENCES = 1 << 16


def largest_batches(
    model: ModelShape, machine: Machine, training: Training
) -> list[tuple[int, PlannedRow]]:
    """Return each row that fits with one sequence, planned at the largest micro-batch with which
    it still does, beside that; the fastest first. Raises ConfigError for a model without known
    activations.
    """
    model, training = fitted(model, training)
    if not model.is_timed or (model.decoder is None and model.trace is None):
        raise ConfigError(
            f"a sweep of batches needs activations and times, and those of {model.name} are not"
            " known: have the factory return (module, inputs)"
        )
    laid_out = LaidOut(model, machine.mesh, training.align)

    @cache
    def plan_of(batch: int) -> RanksPlan:
        return RanksPlan(laid_out, machine, replace(training, batch=batch))

    found: list[tuple[int, PlannedRow]] = []  # rows that differ in anything but their names
    for policy in (one for one in candidates(machine) if takes(one, training)):
        # the micro-batches that fit come first: their number is the largest of them
        batch = bisect_left(
            range(1, _MOST_SEQUENCES + 1), True,
            key=lambda batch: not _that_fit(plan_of(batch), [policy]),
        )  # fmt: skip
        if batch:
            row = plan_on(plan_of(batch), policy)
            if not any(replace(other, row=row.row) == row for _, other in found):
                found.append((batch, row))
    return sorted(found, key=lambda one: -(one[1].tokens_per_s or 0.0))
