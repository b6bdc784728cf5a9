"""Results as tables: on the terminal, in markdown for docs/benchmarks.md, and as plain values
for programs.

All three are made from one list of rows of text, so that they cannot disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.plan import MEMORY_CLAIMS
from benchmarks.results import ComparisonResult, ContenderResult, Report, Run
from benchmarks.stats import bootstrap_median, judge
from zeroshard.terminal import Table, print_json

__all__ = ["grid", "grids", "markdown", "notes", "publish", "show", "summary"]

WIDTH = 140  # of tables that do not go to a terminal
MB = 1e6
LOSS_REFERENCES = ("torch-ddp", "plain", "ddp", "zero2", "zero3")
TIERS = ("device", "host", "disk")


def publish(
    report: dict[str, Any],
    tables: Iterable[Table],
    notes: Iterable[str],
    *,
    out: Path | None,
    as_json: bool,
) -> int:
    """Save a report as JSON where `out` says, and print it, or its tables; return the exit code."""
    if out is not None:
        out.write_text(json.dumps(report, indent=1))
    if as_json:
        print_json(report)
    else:
        show(tables, notes)
    return 0


def show(tables: Iterable[Table], notes: Iterable[str], console: Console | None = None) -> None:
    """Print tables, then notes; elsewhere than on a terminal as for a wide one."""
    console = console or Console()
    console = console if console.is_terminal or console.width > WIDTH else Console(width=WIDTH)
    for table in tables:
        console.print(table.rich())
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def grid(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, num_text: int = 1
) -> Table:
    """Return a table of numbers, whose first columns say what they are of."""
    return Table(columns, rows, title, text=columns[:num_text], folded=columns[1:])


def markdown(report: Report) -> str:
    """Return every table of `report` as markdown."""
    machine = report.machine
    load = (
        f"{machine['load_before'][0]:.1f} before,"
        f" {machine.get('load_after', [float('nan')])[0]:.1f} after"
    )
    lines = [
        (
            f"`{' '.join(report.command)}`, {report.started}; {machine['processor']}"
            f" ({machine['flags']}), {machine['cores']} cores, {machine['memory_gib']} GiB, Linux"
            f" {machine['kernel']}, Python {machine['python']}, {_versions(report)}; load average"
            f" {load}."
        ),
        "",
    ]
    lines += [table.markdown() for table in grids(report)]
    lines += [f"- {note}" for note in notes(report)]
    return "\n".join(lines) + "\n"


def summary(report: Report) -> dict[str, Any]:
    """Return medians, intervals and verdicts without the raw numbers."""
    runs = []
    for run in report.runs:
        comparisons = [
            {
                "contender": c.contender,
                "reference": c.reference,
                "ratio": asdict(c.ratio),
                "difference_s": asdict(c.difference_s),
                "target": c.target,
                "pairs": len(c.pairs),
                "verdict": _verdict(c),
            }
            for c in run.comparisons
        ]
        names = ("size", "precision", "num_ranks", "threads", "device", "num_parameters", "tokens")
        runs.append({name: getattr(run, name) for name in names} | {"comparisons": comparisons})
    return {"kind": report.kind, "started": report.started, "runs": runs}


def grids(report: Report) -> list[Table]:
    """Return every table of `report`."""
    found = []
    for run in report.runs:
        if not run.tokens:
            contenders = _alone_grid(run)
        else:
            contenders = _tier_grid(run) if report.kind == "offload" else _contender_grid(run)
        found += [contenders, _comparison_grid(run)]
    found.append(_largest_grid(report))
    return [table for table in found if table.rows]


def _title(run: Run) -> str:
    ranks = f"{run.num_ranks} ranks" if run.num_ranks > 1 else "one process"
    if not run.tokens:
        return (
            f"{run.size}, {run.num_parameters / 2**20:.1f} Mi elements, {run.precision}, {ranks} x"
            f" {run.threads} threads, {run.device}"
        )
    return (
        f"{run.size}, {run.num_parameters / 1e6:.1f}M parameters, {run.precision}, {ranks} x"
        f" {run.threads} threads, {run.tokens} tokens per rank and step, {run.device}"
    )


def _contender_grid(run: Run) -> Table:
    header = ("contender", "ms/step", "tokens/s", "held B/param", "at rest B/param", "peak MB",
              "sent MB/step", "loss - reference")  # fmt: skip
    rows = []
    for c in run.contenders:
        if c.skipped or not c.step_s:
            continue
        median_s = bootstrap_median(c.step_s).median
        rows.append(
            (
                c.name,
                f"{median_s * 1000:.1f}",
                f"{run.tokens * run.num_ranks / median_s:.0f}",
                f"{_held(c, 'after_backward') / run.num_parameters:.1f}",
                f"{_held(c, 'after_update') / run.num_parameters:.1f}",
                f"{c.above_imports / MB:.0f}",
                f"{c.wire_bytes / MB:.1f}" + ("" if c.wire_exclusive else " (shared interface)"),
                _loss_difference(run, c),
            )
        )
    return grid(_title(run), header, rows)


def _tier_grid(run: Run) -> Table:
    """Steps with states on several tiers. Bytes per parameter: at the end of a backward / after
    the step.
    """
    tiers = (f"{tier} B/param" for tier in TIERS)
    header = ("contender", "ms/step", "tokens/s", *tiers, "peak MB", "loss - reference")
    cuda = run.device == "cuda"
    rows = []
    for c in run.contenders:
        if c.skipped or not c.step_s:
            continue
        median_s = bootstrap_median(c.step_s).median
        row = [
            c.name,
            f"{median_s * 1000:.1f}",
            f"{run.tokens * run.num_ranks / median_s:.0f}",
            *_tier_cells(run, c),
        ]
        row += [
            f"{c.above_imports / MB:.0f}",
            *([f"{c.device_peak_bytes / MB:.0f}"] if cuda else []),
            _loss_difference(run, c),
        ]
        rows.append(tuple(row))
    if cuda:
        header = (*header[:-1], "device peak MB", header[-1])
    return grid(_title(run), header, rows)


def _tier_cells(run: Run, contender: ContenderResult) -> list[str]:
    """Return what rests per parameter on each tier, by this library's own account, or by the
    device of live tensors.

    On a CPU a peer's device and host are one memory: what it holds stands between the two.
    """
    moments = ("after_backward", "after_update")
    by_tier = {
        when: contender.memory[when]["tiers"]
        for when in moments
        if "tiers" in contender.memory.get(when, {})
    }
    if by_tier:
        held = [
            [sum(state.get(tier, 0) for state in by_tier[when].values()) for when in moments]
            for tier in TIERS
        ]
    elif run.device == "cpu":
        both = [
            contender.live_after_backward / run.num_parameters,
            contender.live_after_update / run.num_parameters,
        ]
        return [f"{both[0]:.1f} / {both[1]:.1f} in all", "", ""]
    else:
        live = contender.live_by_device
        held = [
            [live.get(when, {}).get(device, 0) for when in moments]
            for device in (run.device, "cpu")
        ]
    cells = [
        (
            f"{before / run.num_parameters:.1f} / {after / run.num_parameters:.1f}"
            if before or after
            else "0"
        )
        for before, after in held
    ]
    return cells + [""] * (len(TIERS) - len(cells))


def _alone_grid(run: Run) -> Table:
    """Steps by themselves."""
    rows = []
    for c in run.contenders:
        median_s, num_bytes = bootstrap_median(c.step_s).median, c.facts.get("bytes", 0)
        speed = f"{num_bytes / median_s / 1e9:.2f}" if num_bytes else ""
        rows.append(
            (c.name, f"{median_s * 1000:.1f}", f"{run.num_parameters / median_s / 1e6:.0f}", speed)
        )
    return grid(_title(run), ("what", "ms", "M elements/s", "GB/s moved"), rows)


def _largest_grid(report: Report) -> Table:
    header = ("states on", "contender", "layers", "billion parameters", "s/step", "card's peak GiB",
              "of GiB", "then")  # fmt: skip
    rows = [
        (
            found.tier,
            found.contender,
            str(found.layers),
            f"{found.num_parameters / 1e9:.2f}",
            f"{found.step_s:.2f}",
            f"{found.device_peak_bytes / 2**30:.1f}",
            f"{found.device_bytes / 2**30:.1f}" if found.device_bytes else "all",
            found.stopped,
        )
        for found in report.largest
    ]
    return grid("The largest model that trains, by doubling its layers", header, rows)


def _held(contender: ContenderResult, when: str) -> int:
    """Bytes of the states: live tensor storages, or this library's own account, since memory
    shared by ranks is mapped more than once.
    """
    own = contender.memory.get(when)
    return sum(own["at_rest"].values()) if own else int(getattr(contender, f"live_{when}"))


def _comparison_grid(run: Run) -> Table:
    header = ("contender / reference", "times as fast", "95% interval", "pairs x steps", "target",
              "verdict")  # fmt: skip
    rows = []
    for c in run.comparisons:
        ratio = c.ratio
        target = f">= {c.target:.3g}" if c.target is not None else ""
        rows.append((
            f"{c.contender} / {c.reference}", f"{ratio.median:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}", f"{len(c.pairs)} x {c.steps}", target,
            _verdict(c),
        ))  # fmt: skip
    for name, reference in MEMORY_CLAIMS:
        ours, theirs = run.contender(name), run.contender(reference)
        if ours and theirs and theirs.above_imports > 0:
            share = ours.above_imports / theirs.above_imports
            what, verdict = f"{name} / {reference}: peak memory", "holds" if share < 1 else "misses"
            rows.append((what, f"{share:.3f}", "", "1", "< 1", verdict))
    return grid("Compared: " + _title(run), header, rows)


def _verdict(comparison: ComparisonResult) -> str:
    if comparison.target is None:
        return ""
    return str(judge(comparison.ratio, comparison.target, num_pairs=len(comparison.pairs)))


def _loss_difference(run: Run, contender: ContenderResult) -> str:
    """The largest difference from the reference over the first losses."""
    reference = next(
        (c for name in LOSS_REFERENCES if (c := run.contender(name)) is not None), None
    )
    if reference is None or not contender.facts.get("trains", True):
        return ""
    if reference.name == contender.name:
        return "reference"
    difference = max(
        (abs(a - b) for a, b in zip(contender.losses, reference.losses, strict=False)), default=0.0
    )
    return "equal" if difference == 0 else f"{difference:.1e}"


def _versions(report: Report) -> str:
    versions: dict[str, str] = {}
    for run in report.runs:
        for contender in run.contenders:
            versions |= contender.facts.get("versions", {})
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def notes(report: Report) -> list[str]:
    """Return what the tables do not say."""
    said = [f"Skipped: {what}" for what in report.left_out]
    for run in report.runs:
        for c in run.contenders:
            if c.skipped:
                said.append(f"{'FAILED' if c.failed else 'Skipped'}: {c.skipped}")
            if c.operators:
                top = "; ".join(
                    f"{name} {ms:.1f} ms x {calls:.0f}" for name, ms, calls in c.operators[:8]
                )
                said.append(
                    f"{run.size} {run.precision} {c.name}, own time per step of its operators in"
                    f" the calling thread: {top}"
                )
    for run in report.runs:
        for comparison in run.comparisons:
            units = next(
                (c.facts.get("units") for c in run.contenders if c.name == comparison.contender),
                None,
            )
            if report.kind == "overhead" and comparison.target is None and units:
                over = comparison.difference_s
                us = [value * 1e6 / units for value in (over.median, over.low, over.high)]
                said.append(
                    f"The engine's own time: {us[0]:.0f} µs per unit and step (95% interval"
                    f" {us[1]:.0f} to {us[2]:.0f}; {units} units)"
                )
    return said
