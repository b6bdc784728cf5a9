"""``zeroshard plan --sweep gpus=8..16384``: one model on more and more GPUs, in tables, as JSON and
as a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.terminal.console import Table, say, say_facts, three_digits
from zeroshard.terminal.declared import UsageError

if TYPE_CHECKING:
    from zeroshard.planner import Machine, ModelShape
    from zeroshard.planner.sweep import Point


def print_sweep(
    model: ModelShape, machine: Machine, points: Sequence[Point], price: float | None = None
) -> None:
    """Print efficiency and memory by number of GPUs (`machine` has the most) and row, what bounds
    each row, and the fewest GPUs on which one fits; `price`, of a GPU-hour: and where a billion
    tokens cost least.
    """
    numbers = list(dict.fromkeys(point.gpus for point in points))
    rows = _by_row(points)
    span = f"{numbers[0]} to {numbers[-1]} x {machine.name}, {machine.node_size} in a node"
    say_facts([("model", f"{model.name}: {model.numel:,} parameters"), ("machine", span)], width=9)
    best = max(points, key=lambda point: point.efficiency)
    speed = ""
    if best.tokens_per_s_per_gpu is not None:
        per_gpu = best.tokens_per_s_per_gpu / best.efficiency
        speed = f" 100% are {per_gpu:,.0f} tokens/s a GPU;"
    for title, text_of in (
        (
            f"efficiency, %: forward and backward alone over the step;{speed} (does not fit)",
            _percent,
        ),
        (f"GB of one GPU at peak, of {machine.gpu_memory / 1e9:.3g}", _gigabytes),
    ):
        say(title)
        lines = zip(*(map(text_of, line) for line in rows.values()), strict=True)
        cells = [(f"{gpus:,}", *line) for gpus, line in zip(numbers, lines, strict=True)]
        Table(("GPUs", *rows), cells, is_framed=False).print()
    say("bound by, on how many GPUs")
    say_facts(((name, _bounds(line)) for name, line in rows.items()), width=10)
    fitting = [point for point in points if point.fits]
    if price is not None:
        say_facts([("cheapest", _cheapest(fitting, price))], width=10)
    fewest = f"no number of GPUs from {numbers[0]} to {numbers[-1]} holds any row on its devices"
    if fitting:
        least = fitting[0].gpus
        names = ", ".join(point.row for point in fitting if point.gpus == least)
        fewest = f"{least:,} GPUs, with {names}"
    say_facts([("fewest", fewest)], width=10)


def _cheapest(fitting: Sequence[Point], price: float) -> str | None:
    """Return where a billion tokens cost least; None where nothing fits or tokens are not known."""
    costs = {
        point: 1e9 / point.tokens_per_s_per_gpu / 3600 * price
        for point in fitting
        if point.tokens_per_s_per_gpu is not None
    }
    if not costs:
        return None
    best = min(costs, key=costs.__getitem__)
    cost = three_digits(costs[best])
    return f"{best.gpus:,} GPUs, {best.row}: {cost} for a billion tokens at {price:g} a GPU-hour"


def _by_row(points: Sequence[Point]) -> dict[str, list[Point]]:
    rows: dict[str, list[Point]] = {}
    for point in points:
        rows.setdefault(point.row, []).append(point)
    return rows


def _percent(point: Point) -> str:
    text = f"{100 * point.efficiency:.3g}"
    return text if point.fits else f"({text})"


def _gigabytes(point: Point) -> str:
    return three_digits(point.peak_bytes / 1e9)


def _bounds(line: Sequence[Point]) -> str:
    """Return what bounds a row: "8-16 device memory; 32-512 compute"."""
    parts = []
    for bound_by, group in groupby(line, key=lambda point: point.bound_by):
        gpus = [point.gpus for point in group]
        span = f"{gpus[0]}" if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"
        parts.append(f"{span} {bound_by}")
    return "; ".join(parts)


def _efficiency(point: Point) -> float:
    return 100 * point.efficiency


def _memory(point: Point) -> float:
    return point.peak_bytes / 1e9


def plot_sweep(file: Path, model: ModelShape, machine: Machine, points: Sequence[Point]) -> None:
    """Draw efficiency and memory against the number of GPUs into the PNG `file`. Raises UsageError
    without matplotlib, and where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "plan: --plot needs matplotlib: pip install '.[report]' in a checkout of zeroshard"
        ) from None
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = list(dict.fromkeys(point.gpus for point in points))
    # rows whose lines lie on each other are told apart by style, width and marker
    styles = zip(("-", "--", "-.", ":") * 2, "osD^vPX*", strict=True)
    for (name, line), (style, marker) in zip(_by_row(points).items(), styles, strict=True):
        fitting = [point for point in line if point.fits]
        for axes, value in ((left, _efficiency), (right, _memory)):
            (drawn,) = axes.plot(
                [point.gpus for point in line],
                [value(point) for point in line],
                style,
                marker=marker,
                fillstyle="none",
                label=name,
                alpha=0.85,
            )
            axes.plot(
                [point.gpus for point in fitting],
                [value(point) for point in fitting],
                marker,
                color=drawn.get_color(),
            )
    left.set(title="efficiency", ylabel="forward and backward alone / step, %", ylim=(0, 103))
    right.set(title="memory at peak", ylabel="GB of one GPU", yscale="log")
    limit = machine.gpu_memory / 1e9
    right.axhline(limit, color="black", linewidth=1)
    right.annotate(
        f"{machine.name}: {limit:.3g} GB",
        (numbers[-1], limit),
        (0, 3),
        textcoords="offset points",
        horizontalalignment="right",
    )
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [f"{number:,}" for number in numbers], rotation=45)
        axes.set_xlabel("GPUs")
        axes.grid(visible=True, which="major", alpha=0.3)
    left.legend(title="hollow: does not fit", fontsize=9, ncols=2)
    figure.suptitle(f"{model.name} on {machine.name}, {machine.node_size} GPUs in a node")
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"plan: --plot {file}: {error.strerror}") from None
