"""The tables of a plan on a terminal: what is planned, a line per row, what to take and why; with
``--shares`` and unequal ``--gpu-memory`` a table per row, rank by rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, get_args

from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS
from zeroshard.core.shares import Ownership
from zeroshard.terminal import (
    Table,
    UsageError,
    count_text,
    print_json,
    say,
    say_facts,
    size_text,
    three_digits,
)

if TYPE_CHECKING:
    from zeroshard.planner import Axes, Machine, ModelShape, Plan, PlannedRow, Training


# ----------------------------------------------------------------------------------------- the plan

_FITS = "fits"
_AWAY = [tier.value for tier in Tier if tier is not Tier.DEVICE]  # columns, left out where empty
_ALWAYS = ("row", "rest", "peak")  # columns that are there even if they are empty
_LEGEND = {
    "zero3-keep": "zero3 with weights that stay gathered from forward to backward",
    "hpz": "zero3 with backwards that gather weights inside the node (ZeRO++)",
    "mics": "zero3 inside each node, the same in all of them (MiCS)",
    "hfsdp": "mics with optimizer states over all GPUs (hybrid FSDP)",
}


def print_plan(plan: Plan, price: float | None = None) -> None:
    """Print what is planned, a line per row, what to take and why; `price`: of a GPU-hour."""
    say_facts(_facts(plan), width=9)
    say("GB of one GPU: at rest, received (exact), at peak (modelled); seconds of a step")
    rows: list[PlannedRow] = []  # that differ in anything but their names
    equal: dict[str, dict[str, None]] = {}  # the names of others, by the first that they equal
    for row in plan.rows:
        first = next((one for one in rows if replace(one, row=row.row) == row), None)
        if first is None:
            rows.append(row)
        elif not ROWS[row.row].keeps_columns:  # rows of nodes have nothing to say on one
            where = elsewhere(row.tiers)
            key = first.row if where == "-" else f"{first.row}, {where}"
            equal.setdefault(key, {})[row.row] = None
    cells = [_cells(row, plan.axes) for row in rows]
    shown = [name for name in cells[0] if name in _ALWAYS or any(one[name] != "-" for one in cells)]
    best = plan.recommended.row
    Table(
        shown,
        [[texts[name] for name in shown] for texts in cells],
        text=("row", "elsewhere", _FITS),
        folded=("elsewhere", _FITS),
        is_framed=False,
        styles=["bold" if row is best else ("" if row.fits else "dim") for row in rows],
    ).print(width=WIDTH)
    if len(rows) < len(plan.rows) and plan.axes is None and rows[0].spread.dp == 1:
        say("one GPU: all rows are equal, one stands for them on each mix of tiers")
    else:
        for key, others in equal.items():
            say(f"{', '.join(others)}: equal to {key} here")
    if any(is_below_rest(row.peak_bytes, row.rest_bytes) for row in rows):
        say(BELOW_REST)
    names = dict.fromkeys(row.row for row in rows)
    say_facts(((name, _LEGEND.get(name)) for name in names), width=10)
    say("")
    say_facts(_advice(plan, price), width=9)


def _advice(plan: Plan, price: float | None) -> Iterator[tuple[str, str | None]]:
    from zeroshard.planner.rows import describe_row

    advice, row = plan.recommended, plan.recommended.row
    words = "none" if row is None else describe_row(row)
    yield "take", f"{words}: {advice.reason}"
    if row is not None:
        parts = (f"{three_digits(size / 1e9)} {part}" for part, size in row.parts.items() if size)
        yield "peak", f"{' + '.join(parts)} = {size_text(row.peak_bytes['device'])}"
        whole, mine = (size_text(row.checkpoint_bytes[part]) for part in ("all", "rank"))
        save, behind = row.save_s["foreground"], row.save_s["background"]
        times = [] if save is None else [f"{three_digits(save)} s"]
        times += [] if behind is None else [f"in the background {three_digits(behind)} s"]
        timed = row.load_s is not None and f"load {three_digits(row.load_s)} s"
        times.append(timed or "load and save are timed with a --disk")
        yield "save", f"{whole}, {mine} of a rank: {', '.join(times)}"
        if price is not None:
            hours = row.gpu_hours_per_billion_tokens
            priced = "not known: the model's FLOPs are not, or it takes no tokens"
            if hours is not None:
                cost = f"{three_digits(hours * price)} at {price:g} each"
                priced = f"a billion tokens take {three_digits(hours)} GPU-hours: {cost}"
            yield "price", priced
    yield "smaller", advice.smaller
    yield "adapters", advice.adapters
    yield "change", advice.change
    if advice.offer is not None:
        yield "offer", f"--accumulate {plan.training.precision}: {advice.offer}"


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    from zeroshard.planner.machine import presets
    from zeroshard.planner.plan import ALLOWED_FOR

    model, machine, training = plan.to_dict()["model"], plan.machine, plan.training
    note = f", {model['note']}" if model["note"] else ""
    yield "model", f"{model['name']}: {model['parameters']:,} parameters{note}"
    states = {name: size_text(num_bytes) for name, num_bytes in model["states_bytes"].items()}
    yield (
        "states",
        f"weights {states['weight']}, gradients {states['grad']}, master and moments"
        f" {states['optimizer']}: {size_text(sum(model['states_bytes'].values()))} unsharded",
    )
    yield (
        "machine",
        f"{machine.gpus} x {machine.name} of {size_text(machine.gpu_memory)}"
        f" ({machine.gpu_memory / 2**30:.4g} GiB) in {machine.mesh.num_nodes} node(s) of"
        f" {machine.node_size}; {size_text(machine.host_memory)} of host memory"
        f" ({size_text(machine.host_allowance)} of it for {ALLOWED_FOR}),"
        f" {size_text(machine.disk) if machine.disk else 'no'} disk a node",
    )
    if machine.note:
        yield "note", machine.note
    encoded = ", ".join(f"{name}={value}" for name, value in training.comm().items())
    if encoded:
        yield "codecs", f"{encoded}; without the rows that take none"
    if training.fraction < 1.0:
        yield "fraction", f"{training.fraction:g} of each state that leaves the device does"
    axes, node = plan.axes, plan.machine.node_size
    if axes is not None:
        schedule = f", schedule {axes.schedule or '1f1b'}" if axes.pp != 1 else ""
        best = (
            "; the best row of each grid, all with the same tokens a step" if axes.is_auto else ""
        )
        yield "axes", f"tp {axes.tp}, pp {axes.pp}{schedule}{best}"
        if any(node % row.spread.tp for row in plan.rows):
            far = f"tp {axes.tp} does not fit in a node of {node}"
            yield "note", f"{far}: its all-reduces go over the network, slowly"
    counted = f"{training.micro_batches} micro-batch(es)"
    of = "a step and GPU"
    if training.leaves is not None:
        counted, of = f"{training.leaves} leaves", "a step"
    if plan.model.takes_tokens:
        counted += f" x {training.batch} sequence(s) x {training.sequence} tokens"
    activations = "recomputed" if training.checkpointing else "kept"
    if training.accumulation_bytes is not None:
        held = f"{size_text(training.accumulation_bytes)} of gradients between micro-batches"
        most = f"up to {max(row.whole_gradients for row in plan.rows)} of {len(plan.model.units)}"
        yield "budget", f"{held}: {most} units keep theirs whole"
    masters = {"fp32": "", "bf16": ", masters are the weights"}.get(
        training.master, ", masters as remainders"
    )
    masters += ", moments in bf16" if training.moments != "fp32" else ""
    yield (
        "training",
        f"{training.precision}, gradients rest in {training.accumulate}{masters},"
        f" {training.optimizer}; {counted} {of}, activations {activations}",
    )
    if machine.accelerator and machine.gpus > 1:
        several = "up to 3 groups a rank (all; inside and between nodes)"
        groups = "1 group a rank" if machine.mesh.num_nodes == 1 else several
        yield (
            "NCCL",
            f"{groups}: what their connections take is in the allowance of peaks, not planned;"
            " zs.memory_table() has it as measured",
        )
    if training.precision == "bf16" and not presets().get(machine.name, {}).get("bf16", True):
        yield "note", f"{machine.name} has no bf16 arithmetic: times are fp16's, take fp16 there"
    if training.optimizer == "adam-8bit":
        yield "note", "8-bit Adam runs with ownership='whole': --shares whole plans each rank"
    # a traced pass is of the whole model, not of its stages
    trace = plan.model.trace
    lacks_activations = plan.model.decoder is None and (trace is None or axes is not None)
    lacks = ["peaks are without activations"] if lacks_activations else []
    if any(row.step_s is None for row in plan.rows):
        lacks.append("steps are without times")
    if lacks:
        why = "no decoder's sizes and no inputs are known: have the factory return (module, inputs)"
        if trace is not None:
            why = "no matrix product or convolution was counted"
            why = "what was traced is not cut along tp and pp" if axes is not None else why
        yield "note", f"{', '.join(lacks)}: {why}"


def _cells(row: PlannedRow, axes: Axes | None) -> dict[str, str]:
    """Return the texts of one line of the table, by column."""
    spread, along, bubble = row.spread, dict[str, str](), dict[str, str]()
    if axes is not None:
        along = {axis: str(getattr(spread, axis)) for axis in ("tp", "pp", "dp")}
        bubble = {"idle": f"{spread.bubble:.0%}" if spread.bubble else "-"}
    sizes = {"rest": row.rest_bytes["device"], "peak": row.peak_bytes["device"]}
    sizes |= {tier: row.rest_bytes[tier] for tier in _AWAY} | row.traffic_bytes
    bound_by = SHORT.get(row.bound_by, row.bound_by)
    fits = f"{'yes' if row.fits else 'no'}: {bound_by}"
    return {
        **along,
        "row": row.row,
        "elsewhere": elsewhere(row.tiers),
        **{name: three_digits(size / 1e9) for name, size in sizes.items()},
        **bubble,
        "step": "-" if row.step_s is None else three_digits(row.step_s),
        "tok/s": "-" if row.tokens_per_s is None else count_text(row.tokens_per_s),
        _FITS: "yes" if row.fits and row.step_s is None else fits,
    }


# ------------------------------------------------------------------------------------- uneven ranks

WIDTH = 80  # columns of tables
# what bounds a row, or lacks, as tables say it
SHORT = {
    "device memory": "memory",
    "optimizer step": "optimizer",
    "latency of collectives": "latency",
    "links inside nodes": "local links",
    "links between nodes": "network",
}
BELOW_REST = (
    "a rest above the peak counts whole gradients, which lie between micro-batches:\n"
    "with one micro-batch a step each is reduced as it comes, and they never do"
)
_COLUMNS = (
    "row", "elsewhere", "rank", "share", "rest", "peak", "of", *_AWAY, "moved", "fits"
)  # fmt: skip


def is_uneven(arguments: argparse.Namespace) -> bool:
    """Whether the options describe ranks that are not alike."""
    return arguments.shares is not None or "," in (arguments.gpu_memory or "")


def leave_out(arguments: argparse.Namespace, why: str, *names: str) -> None:
    """Raise UsageError for the first of the options `names` that is given, and say why."""
    for name in names:
        if getattr(arguments, name) != {"tp": 1, "pp": 1, "batch": 1}.get(name):
            raise UsageError(f"plan: {why}: leave --{name.replace('_', '-')} out")


def memories_of(arguments: argparse.Namespace) -> list[int]:
    """Return the memory of each GPU where several are given, and take them from the options.
    Raises ConfigError, and UsageError for options that plan other things.
    """
    from zeroshard.core.sizes import parse_bytes

    why = "--shares and unequal --gpu-memory plan every rank of one machine"
    leave_out(arguments, why, "tp", "pp", "sweep", "plot", "write", "price")
    texts = (arguments.gpu_memory or "").split(",")
    if len(texts) == 1:
        return []
    arguments.gpu_memory = None
    if arguments.gpus is None:
        arguments.gpus = len(texts)
    return [parse_bytes(text, "gpu_memory") for text in texts]


def plan_and_print(
    arguments: argparse.Namespace,
    model: ModelShape,
    machine: Machine,
    training: Training,
    memories: Sequence[int],
) -> int:
    """Plan every rank of every row, and print it."""
    from zeroshard.planner.rows import imbalance, plan_uneven

    shares: Any = arguments.shares
    if shares not in (None, "memory", "auto", *get_args(Ownership)):
        try:
            shares = [float(text) for text in shares.split(",")]
        except ValueError:
            raise UsageError(
                f"plan: --shares {shares!r} is not numbers such as 0.1,0.9, memory, auto, whole or"
                " whole_by_cost"
            ) from None
    rows = plan_uneven(model, machine, training, shares=shares, gpu_memory=memories)
    if arguments.json:
        described = {"name": model.name, "parameters": model.numel}
        print_json({"model": described, "rows": [row.to_dict() for row in rows]})
        return 1 if all(row.short for row in rows) else 0  # nothing fits
    nodes = f"{machine.mesh.num_nodes} node(s) of {machine.node_size}"
    facts = [("machine", f"{machine.gpus} x {machine.name} in {nodes}")]
    say_facts([("model", f"{model.name}: {model.numel:,} parameters"), *facts], width=9)
    say("GB of each rank: at rest and received per step (exact), at peak (modelled)")
    cells, styles = [], []
    for row in rows:
        named, left = (
            (row.row, elsewhere(row.tiers)),
            [one for one in row.short if " of node " in one],
        )
        for rank, group in groupby(enumerate(row.ranks), key=lambda pair: pair[1]):  # alike
            numbers = [number for number, _ in group]
            name = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
            sizes = [rank.rest_bytes["device"], rank.peak_bytes["device"], rank.memory]
            sizes += [*(rank.rest_bytes[tier] for tier in _AWAY), rank.traffic_bytes]
            fits = f"no: {left[0]}" if left else "yes"
            if any(f"device memory of rank {number}" in row.short for number in numbers):
                fits = "no: memory"
            texts = [three_digits(size / 1e9) for size in sizes]
            line = (*named, name, f"{rank.share:.3g}", *texts, fits)
            cells.append(dict(zip(_COLUMNS, line, strict=True)))
            styles.append("" if row.fits else "dim")
            named = "", ""
    empty = {name for name in _AWAY if all(one[name] == "-" for one in cells)}
    shown = [name for name in _COLUMNS if name not in empty]
    Table(
        shown,
        [[one[name] for name in shown] for one in cells],
        text=("row", "elsewhere", "fits"),
        folded=("elsewhere", "fits"),
        is_framed=False,
        styles=styles,
    ).print(width=WIDTH)
    if any(is_below_rest(rank.peak_bytes, rank.rest_bytes) for row in rows for rank in row.ranks):
        say(BELOW_REST)
    if shares in get_args(Ownership) and training.optimizer == "muon":
        for name in get_args(Ownership):
            by_cost = name == "whole_by_cost"
            elements, products = imbalance(model, machine, training, by_cost=by_cost)
            say(f"{name}: the largest rank owns {elements:.2f} of the mean, and computes"
                f" {products:.2f} of the mean of Muon's products")  # fmt: skip
    return 1 if all(row.short for row in rows) else 0  # nothing fits


def is_below_rest(peak: Mapping[str, int], rest: Mapping[str, int]) -> bool:
    """Whether a step takes less of the device than rests there between micro-batches."""
    return peak["device"] < rest["device"]


def elsewhere(tiers: Mapping[str, str]) -> str:
    """Return which states of a row rest off the device, and where, by state."""
    by_tier: dict[str, list[str]] = {}
    for state, tier in tiers.items():
        if tier != "device":
            by_tier.setdefault(tier, []).append("optim" if state == "optimizer" else state)
    parts = [
        f"{'all' if len(states) == len(tiers) else '+'.join(states)} {tier}"
        for tier, states in by_tier.items()
    ]
    return ", ".join(parts) or "-"
