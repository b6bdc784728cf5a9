"""``zeroshard report DIRECTORY``: what the traces of a run say (``engine.trace(DIRECTORY)``).

    zeroshard report traces                     text, lanes.png and memory.png
    zeroshard report traces --json              the figures, for programs; no pictures
    zeroshard report traces --predicted FILE    a simulated timeline above the measured one

The figures are those of timeline.py, the pictures those of pictures.py, of the last whole step.
Without matplotlib the text is printed, and one line says what to install.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zeroshard.core.timeline import Timeline
from zeroshard.launch.rank_files import files_of_ranks
from zeroshard.launch.trace_figures import TraceReport, analyse, step_spans, within
from zeroshard.system.safe_files import read_json
from zeroshard.terminal.console import Table, note, print_json, say
from zeroshard.terminal.declared import JSON, Option, Subcommand, UsageError

_MOST_PANELS = 4
_MOST_ROWS = 12
_MOST_BYTES = 1 << 30  # of one trace
_NO_PICTURES = (
    "report: no pictures without matplotlib: pip install '.[report]' in a checkout of zeroshard"
)


def _report(arguments: argparse.Namespace) -> int:
    timelines = _read_all(arguments.directory)
    predicted = None if arguments.predicted is None else _read(arguments.predicted)
    report = analyse(timelines)
    if arguments.json:
        figures = report.to_dict()
        if predicted is not None:
            figures["predicted_step_s"] = analyse([predicted]).step_s
        print_json(figures)
        return 0
    _print(report, timelines[0], predicted)
    try:
        drawn = _draw(arguments.directory, timelines, predicted)
    except ImportError:
        note(_NO_PICTURES)
        return 0
    for path in drawn:
        print(f"wrote {path}")
    return 0


# ------------------------------------------------------------------ files


def _read_all(directory: Path) -> list[Timeline]:
    """Return the timelines of all ranks in `directory`, in their order."""
    timelines = [_read(path) for path in files_of_ranks("report", directory, "trace", ".json")]
    ranks = [timeline.rank for timeline in timelines]
    if len(set(ranks)) < len(ranks):
        raise UsageError(f"report: {directory} has two traces of one rank (ranks {ranks})")
    return timelines


def _read(path: Path) -> Timeline:
    try:
        timeline = Timeline.from_chrome(read_json(path, _MOST_BYTES))
        if not any(event.lane == "compute" for event in timeline.events):
            raise ValueError("nothing was computed inside it")
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"report: {path} is no trace of zeroshard, or torn: {reason}") from None
    return timeline


# ------------------------------------------------------------------ text


def _print(report: TraceReport, first: Timeline, predicted: Timeline | None) -> None:
    about = ", ".join(f"{name} {text}" for name, text in first.labels.items() if name != "steps")
    say(about)
    say(
        f"{report.num_steps} step(s) of {_ms(report.step_s)} ms, {len(report.ranks)} rank(s): "
        + ", ".join(f"{name} {_ms(seconds)}" for name, seconds in report.parts_s.items())
    )
    if predicted is not None:
        say(f"predicted: {_ms(analyse([predicted]).step_s)} ms")
    _print_exposed(report)
    _print_ranks(report)
    say("What costs most:")
    for number, sentence in enumerate(report.costs, 1):
        say(f"{number}. {sentence}")


def _print_exposed(report: TraceReport) -> None:
    lanes = list(dict.fromkeys(one.lane for one in report.exposed))
    units: dict[str, dict[str, float]] = {}
    for one in report.exposed:
        units.setdefault(one.unit, {})[one.lane] = one.seconds
    longest = sorted(units.items(), key=lambda item: -sum(item[1].values()))
    rows = [
        (unit, *(_ms(by.get(lane, 0.0)) for lane in lanes), _ms(sum(by.values())))
        for unit, by in longest[:_MOST_ROWS]
    ]
    if len(longest) > _MOST_ROWS:
        rest = [by for _, by in longest[_MOST_ROWS:]]
        sums = [sum(by.get(lane, 0.0) for by in rest) for lane in lanes]
        rows.append((f"{len(rest)} more units", *map(_ms, sums), _ms(sum(sums))))
    title = "exposed: ms of a step that compute waits, by unit and lane, mean over ranks"
    Table(("unit", *lanes, "together"), rows, title, text=("unit",), is_framed=False).print()


def _print_ranks(report: TraceReport) -> None:
    rows = [
        (one.rank, *map(_ms, (one.step_s, one.waits_s, one.others_s)), "late" * one.is_late)
        for one in report.ranks
    ]
    columns = ("rank", "step", "waits", "for others", "")
    Table(columns, rows, "ranks: ms of a step", text=("rank", ""), is_framed=False).print()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


# ------------------------------------------------------------------ pictures


def _draw(directory: Path, timelines: Sequence[Timeline], predicted: Timeline | None) -> list[Path]:
    """Draw both pictures of the last step that is whole; return where they are."""
    from zeroshard.launch.pictures import draw_lanes, draw_memory

    begin, end = step_spans(timelines[0])[-1]
    first = timelines[0]
    panels = {}
    if predicted is not None:
        panels["predicted"] = within(predicted, *step_spans(predicted)[-1])
    for timeline in timelines[: 1 if predicted is not None else _MOST_PANELS]:
        shift = first.origin - timeline.origin  # ranks of one host have one clock
        title = f"rank {timeline.rank}" if predicted is None else f"measured, rank {timeline.rank}"
        panels[title] = within(timeline, begin + shift, end + shift)
    lanes, memory = directory / "lanes.png", directory / "memory.png"
    draw_lanes(panels, lanes)
    if not first.levels:
        return [lanes]
    draw_memory(within(first, begin, end), memory)
    return [lanes, memory]


_OPTIONS = (
    Option("DIRECTORY", "with rank-*.json", Path, dest="directory"),
    JSON,
    Option("--predicted FILE", "a trace of a simulated step, drawn above the measured one", Path),
)  # fmt: skip
COMMAND = Subcommand(
    "report", "read the traces of a run: what waits for what, who is late",
    "zeroshard run --nproc 2 examples/train_gpt.py --trace traces\nzeroshard report traces/ZeRO-3",
    _OPTIONS, _report,
    description="Read the traces that engine.trace(DIRECTORY) has written, one per rank.",
)  # fmt: skip
