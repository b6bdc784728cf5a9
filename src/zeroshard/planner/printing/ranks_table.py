"""``zeroshard plan --shares`` and unequal ``--gpu-memory``: a table per row, rank by rank."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from zeroshard.terminal.console import Table, print_json, say, say_facts, three_digits
from zeroshard.terminal.declared import UsageError

if TYPE_CHECKING:
    from zeroshard.planner import Machine, ModelShape, Training
    from zeroshard.planner.uneven import UnevenRow

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
    "row", "elsewhere", "rank", "share", "rest", "peak", "of", "host", "disk", "moved", "fits",
)  # fmt: skip
_MAYBE = ("host", "disk")  # columns that are left out where they are empty


def is_uneven(arguments: argparse.Namespace) -> bool:
    """Whether the options describe ranks that are not alike."""
    return arguments.shares is not None or "," in (arguments.gpu_memory or "")


def leave_out(arguments: argparse.Namespace, why: str, *names: str) -> None:
    """Raise UsageError for the first of the options `names` that is given, and say why."""
    for name in names:
        if getattr(arguments, name) != {"tp": 1, "pp": 1}.get(name):
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
    from zeroshard.planner.uneven import plan_uneven

    shares: Any = arguments.shares
    if shares not in (None, "memory", "auto"):
        try:
            shares = [float(text) for text in shares.split(",")]
        except ValueError:
            raise UsageError(
                f"plan: --shares {shares!r} is not numbers such as 0.1,0.9, memory or auto"
            ) from None
    rows = plan_uneven(model, machine, training, shares=shares, gpu_memory=memories)
    if arguments.json:
        sizes = {"name": model.name, "parameters": model.numel}
        print_json({"model": sizes, "rows": [row.to_dict() for row in rows]})
    else:
        _print(model, machine, rows)
    return 1 if all(row.short for row in rows) else 0  # nothing fits


def _print(model: ModelShape, machine: Machine, rows: Sequence[UnevenRow]) -> None:
    nodes = machine.gpus // machine.node_size
    facts = f"{machine.gpus} x {machine.name} in {nodes} node(s) of {machine.node_size}"
    say_facts([("model", f"{model.name}: {model.numel:,} parameters"), ("machine", facts)], width=9)
    say("GB of each rank: at rest and received per step (exact), at peak (modelled)")
    lines = [
        ((row.row, elsewhere(row.tiers)) if not number else ("", ""), texts, row.fits)
        for row in rows
        for number, texts in enumerate(_lines(row))
    ]
    cells = [dict(zip(_COLUMNS, (*first, *texts), strict=True)) for first, texts, _ in lines]
    empty = {name for name in _MAYBE if all(one[name] == "-" for one in cells)}
    shown = [name for name in _COLUMNS if name not in empty]
    Table(
        shown,
        [[one[name] for name in shown] for one in cells],
        text=("row", "elsewhere", "fits"),
        folded=("elsewhere", "fits"),
        is_framed=False,
        styles=["" if fits else "dim" for *_, fits in lines],
    ).print(width=WIDTH)
    if any(is_below_rest(rank.peak_bytes, rank.rest_bytes) for row in rows for rank in row.ranks):
        say(BELOW_REST)


def is_below_rest(peak: Mapping[str, int], rest: Mapping[str, int]) -> bool:
    """Whether a step takes less of the device than rests there between micro-batches."""
    return peak["device"] < rest["device"]


def _lines(row: UnevenRow) -> list[list[str]]:
    """Return a line per run of ranks that are alike."""
    out = []
    short = set(row.short)
    for rank, group in groupby(enumerate(row.ranks), key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        name = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        sizes = [rank.rest_bytes["device"], rank.peak_bytes["device"], rank.memory]
        sizes += [rank.rest_bytes["host"], rank.rest_bytes["disk"], rank.traffic_bytes]
        is_short = any(f"device memory of rank {number}" in short for number in numbers)
        fits = "no: memory" if is_short else "yes"
        left = [one for one in row.short if " of node " in one]
        if left and not is_short:
            fits = f"no: {left[0]}"
        texts = [three_digits(size / 1e9) for size in sizes]
        out.append([name, f"{rank.share:.3g}", *texts, fits])
    return out


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
