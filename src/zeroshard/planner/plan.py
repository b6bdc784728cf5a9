"""Every row of the policy table, on the tiers that make sense for it, and which of them to take.

The recommendation is the fastest row that fits, of equal ones the first. Where none fits, it is the
first change that makes one fit, of those tried from the cheapest on: recomputing activations,
smaller micro-batches, a disk, more GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.wire import Wire
from zeroshard.errors import ConfigError
from zeroshard.planner.checkpoint import checkpoint_bytes, checkpoint_times
from zeroshard.planner.exact import LaidOut, StateBytes, rest_bytes, traffic_bytes
from zeroshard.planner.machine import Machine, presets
from zeroshard.planner.model import ModelShape
from zeroshard.planner.peak import Peak, peak_bytes
from zeroshard.planner.simulate import step_time
from zeroshard.planner.training import Training

__all__ = [
    "Plan",
    "PlannedRow",
    "Recommendation",
    "candidates",
    "describe_row",
    "make_plan",
    "plan_row",
    "takes",
]

_Policies = Callable[[Machine], Iterable[Policy]]

_DEVICE, _HOST, _DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
_SUGGESTED_DISK = 3200 * 10**9  # bytes per node, where a disk is what is missing
_MOST_GPUS = 16_384

# tiers of weight, grad and optimizer -> the rows for which they are planned
_MIXES: dict[tuple[Tier, Tier, Tier], tuple[str, ...]] = {
    (_DEVICE, _DEVICE, _DEVICE): tuple(ROWS),
    (_DEVICE, _DEVICE, _HOST): ("zero1", "zero2", "zero3"),
    (_DEVICE, _HOST, _HOST): ("zero2", "zero3"),
    (_HOST, _HOST, _HOST): ("zero3",),
    (_DEVICE, _HOST, _DISK): ("zero3",),
    (_DISK, _DISK, _DISK): ("zero3",),
}


@dataclass(frozen=True)
class PlannedRow:
    """One row on one mix of tiers; bytes are those of one rank."""

    row: str
    tiers: dict[str, str]  # "weight", "grad", "optimizer" -> tier
    rest_bytes: dict[str, int]  # by tier: model states between micro-batches, exact
    peak_bytes: dict[str, int]  # by tier, modelled
    parts: dict[str, int]  # what the device's peak is made of: peak.Peak
    traffic_bytes: dict[str, int]  # "local", "node": received per step, exact
    step_s: float
    tokens_per_s: float  # of all GPUs together
    fits: bool
    bound_by: str  # what takes longest, or what there is too little of
    checkpoint_bytes: dict[str, int]  # "all", "rank": what a save writes, exact
    load_s: float
    save_s: dict[str, float]  # "foreground" (zs.save), "background" (what zs.Saver holds up)


@dataclass(frozen=True)
class Recommendation:
    """The row to take (None: no row fits), why, and what else to know."""

    row: PlannedRow | None
    reason: str
    smaller: str | None = None  # how it would be on half of the GPUs
    change: str | None = None  # where nothing fits: the cheapest change that would


@dataclass(frozen=True)
class Plan:
    """What ``zs.plan()`` returns."""

    model: ModelShape
    machine: Machine
    training: Training
    rows: tuple[PlannedRow, ...]
    recommended: Recommendation

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as ``zeroshard plan --json`` prints it."""
        model, advice, training = self.model, self.recommended, self.training
        states = {
            "weight": round(model.numel * Wire.of(training.precision).bytes_per_element),
            "grad": round(model.num_trained * Wire.of(training.resting).bytes_per_element),
            "optimizer": round(model.num_trained * (4 + training.moment_bytes)),
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
            "training": {**asdict(training), "accumulate": training.resting},
            "rows": [asdict(one) for one in self.rows],
            "recommended": {
                "row": None if advice.row is None else advice.row.row,
                "tiers": None if advice.row is None else advice.row.tiers,
                "reason": advice.reason,
                "smaller": advice.smaller,
                "change": advice.change,
            },
        }

    def config(self, *, disk_path: str = ".") -> dict[str, Any]:
        """Return the recommended row as a configuration that ``zs.shard(config=...)`` takes.

        States that rest on disk go to `disk_path`. Raises ConfigError where no row fits.
        """
        row, training = self.recommended.row, self.training
        if row is None:
            raise ConfigError(f"there is no configuration to write: {self.recommended.reason}")
        precision = {"compute": training.precision, "accumulate": training.resting}
        out: dict[str, Any] = {"policy": row.row, "precision": precision}
        away = {state: tier for state, tier in row.tiers.items() if tier != _DEVICE.value}
        if away:
            out["offload"] = dict(away)
            if _DISK.value in away.values():
                out["offload"]["disk_path"] = disk_path
            if training.fraction < 1.0:
                out["offload"]["fraction"] = training.fraction
        comm = training.comm()
        if self.machine.mesh.num_nodes > 1:
            comm["node_size"] = self.machine.node_size
        return {**out, "comm": comm} if comm else out


def candidates(machine: Machine) -> Iterator[Policy]:
    """Yield the rows of the table on the tiers that make sense on `machine`."""
    for tiers, names in _MIXES.items():
        if (_HOST in tiers and not machine.accelerator) or (_DISK in tiers and not machine.disk):
            continue
        for name in names:
            yield ROWS[name].tiered(*tiers)


def takes(policy: Policy, training: Training) -> bool:
    """Whether `policy` runs with the codecs of `training`: config/native.py refuses the others."""
    encodes_weights = training.weight_codec is not None or training.frozen_codec is not None
    return not encodes_weights or policy.default.weight.scope is Scope.SHARD


def make_plan(
    model: ModelShape, machine: Machine, training: Training, policies: _Policies = candidates
) -> Plan:
    """Plan `training` of `model` on `machine`: all rows that `policies` gives for a machine, and
    the one to take.

    Raises ConfigError for a codec that has no effect on this model or machine.
    """
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
    laid_out = LaidOut(model, machine.mesh, training.align)
    runnable = _runnable(policies, machine, training)
    rows = tuple(plan_row(laid_out, policy, machine, training) for policy in runnable)
    advice = _recommend(model, machine, training, policies, rows)
    return Plan(model, machine, training, rows, advice)


def _fitting(
    model: ModelShape, machine: Machine, training: Training, policies: _Policies
) -> list[PlannedRow]:
    """Return the rows that fit; the others' steps are not simulated."""
    laid_out, fitting = LaidOut(model, machine.mesh, training.align), []
    for policy in _runnable(policies, machine, training):
        rest, peak = _bytes_of(laid_out, policy, machine, training)
        if _short_of(peak.by_tier, machine) is None:
            fitting.append(_planned(laid_out, policy, machine, training, rest, peak))
    return fitting


def _runnable(policies: _Policies, machine: Machine, training: Training) -> list[Policy]:
    return [policy for policy in policies(machine) if takes(policy, training)]


def _bytes_of(
    laid_out: LaidOut, policy: Policy, machine: Machine, training: Training
) -> tuple[StateBytes, Peak]:
    """Return the bytes of one rank at rest, and the most during a step."""
    rest = rest_bytes(laid_out, policy, training)
    return rest, peak_bytes(laid_out, policy, machine, training, rest)


def plan_row(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> PlannedRow:
    """Plan one row on one mix of tiers."""
    sizes = _bytes_of(laid_out, policy, machine, training)
    return _planned(laid_out, policy, machine, training, *sizes)


def _planned(
    laid_out: LaidOut,
    policy: Policy,
    machine: Machine,
    training: Training,
    rest: StateBytes,
    peak: Peak,
) -> PlannedRow:
    cells = policy.default
    links = traffic_bytes(laid_out, policy, training)
    files = checkpoint_times(laid_out, policy, machine, training)
    time = step_time(laid_out, policy, machine, training)
    short = _short_of(peak.by_tier, machine)
    tokens = training.tokens * training.micro_batches * machine.gpus
    states = {"weight": cells.weight, "grad": cells.grad, "optimizer": cells.optim}
    return PlannedRow(
        row=policy.name,
        tiers={state: cell.tier.value for state, cell in states.items()},
        rest_bytes={
            tier.value: sum(by_tier.get(tier, 0) for by_tier in rest.values()) for tier in Tier
        },
        peak_bytes=peak.by_tier,
        parts=peak.parts,
        traffic_bytes={"local": round(links.inside), "node": round(links.between)},
        step_s=time.total,
        tokens_per_s=tokens / time.total,
        fits=short is None,
        bound_by=time.bound_by if short is None else short[0],
        checkpoint_bytes={
            "all": checkpoint_bytes(laid_out, training),
            "rank": checkpoint_bytes(laid_out, training, 0),
        },
        load_s=files.load,
        save_s={"foreground": files.save, "background": files.background},
    )


def _short_of(peak: dict[str, int], machine: Machine) -> tuple[str, float, float] | None:
    """Return of which memory there is too little (the first of device, host, disk), the bytes that
    are needed and those that there are; None where all fits. Hosts and disks are shared by the
    ranks of a node.
    """
    device, ranks = peak["device"], machine.node_size
    on_host = peak["host"] + (0 if machine.accelerator else device)
    memories = (
        ("device memory", device, machine.gpu_memory),
        ("host memory", on_host * ranks, machine.host_memory),
        ("disk space", peak["disk"] * ranks, machine.disk),
    )
    return next((one for one in memories if one[1] > one[2]), None)


# ------------------------------------------------------------------ which row to take


def _recommend(
    model: ModelShape,
    machine: Machine,
    training: Training,
    policies: _Policies,
    rows: tuple[PlannedRow, ...],
) -> Recommendation:
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.peak_bytes["device"])
        reason = f"nothing fits: {describe_row(least)}, which takes least, {_lack(least, machine)}"
        return Recommendation(None, reason, change=_change(model, machine, training, policies))
    best = _fastest(fitting)
    faster = [row for row in rows if row.step_s < best.step_s]
    reason = f"the fastest of {len(fitting)} that fit, bound by {best.bound_by}"
    if faster:
        first = _fastest(faster)
        reason += f"; {describe_row(first)} would be faster and lacks {first.bound_by}"
    return Recommendation(best, reason, smaller=_smaller(model, machine, training, policies))


def _fastest(rows: list[PlannedRow]) -> PlannedRow:
    return min(rows, key=lambda row: row.step_s)


def describe_row(row: PlannedRow) -> str:
    """Return the row with the states that leave the device: "zero3, optimizer on host"."""
    if len(set(row.tiers.values())) == 1:
        tier = row.tiers["weight"]
        return row.row if tier == _DEVICE.value else f"{row.row}, all on {tier}"
    by_tier: dict[str, list[str]] = {}
    for state, tier in row.tiers.items():
        if tier != _DEVICE.value:
            by_tier.setdefault(tier, []).append(state)
    parts = [f"{' and '.join(states)} on {tier}" for tier, states in by_tier.items()]
    return ", ".join([row.row, *parts])


def _lack(row: PlannedRow, machine: Machine) -> str:
    """Return how much `row`, which does not fit, needs of what memory, and how much there is."""
    what, needs, there = _short_of(row.peak_bytes, machine) or (row.bound_by, 0, 0)
    whose = "GPU" if what == "device memory" else "node"
    return f"needs {needs / 1e9:,.4g} GB of {what} a {whose} and has {there / 1e9:,.4g} GB"


def _smaller(
    model: ModelShape, machine: Machine, training: Training, policies: _Policies
) -> str | None:
    """Return how it would be on half of the GPUs, None where they cannot be halved."""
    half = _with_gpus(machine, machine.gpus // 2)
    if machine.gpus % 2 or half is None:
        return None
    where = f"on half of the GPUs ({half.gpus})"
    fitting = _fitting(model, half, training, policies)
    if fitting:
        return f"{where} {describe_row(_fastest(fitting))} would fit"
    laid_out = LaidOut(model, half.mesh, training.align)
    runnable = _runnable(policies, half, training)
    peaks = [_bytes_of(laid_out, policy, half, training)[1].total for policy in runnable]
    return f"{where} nothing fits: {min(peaks) / 1e9:.3g} GB a GPU at least"


def _change(model: ModelShape, machine: Machine, training: Training, policies: _Policies) -> str:
    """Return the cheapest change with which a row fits, or that none of those tried helps."""
    for words, other, trained in _changes(model, machine, training):
        rows = _fitting(model, other, trained, policies)
        if rows:
            return f"{words}: {describe_row(_fastest(rows))} would fit"
    return f"none of those tried helps: recomputing, smaller batches, disks, {_MOST_GPUS:,} GPUs"


def _changes(
    model: ModelShape, machine: Machine, training: Training
) -> Iterator[tuple[str, Machine, Training]]:
    """Yield changes in words and as they are planned, the cheapest first; each keeps those of
    training before it. Those of activations where they are known.
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
    while gpus <= _MOST_GPUS:
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
