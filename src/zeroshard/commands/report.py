"""``zeroshard report DIRECTORY``: what the traces of a run say (``engine.trace(DIRECTORY)``).

    zeroshard report traces                     text, lanes.png and memory.png
    zeroshard report traces --json              the figures, for programs; no pictures
    zeroshard report traces --predicted FILE    a simulated timeline above the measured one

The pictures are of the last whole step. Without matplotlib, which is imported when one is drawn,
the text is printed, and one line says what to install.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from zeroshard.core.timeline import LANES, Event, Timeline
from zeroshard.system.safe_files import printable, read_json, replacing
from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    Table,
    UsageError,
    files_of_ranks,
    note,
    print_json,
    say,
)

_MOST_PANELS = 4
_MOST_ROWS = 12
_MOST_BYTES = 1 << 30  # of one trace
_NO_PICTURES = (
    "report: no pictures without matplotlib: pip install '.[report]' in a checkout of zeroshard"
)


def _report(arguments: argparse.Namespace) -> int:
    timelines = [
        _read(path) for path in files_of_ranks("report", arguments.directory, "trace", ".json")
    ]
    ranks = [timeline.rank for timeline in timelines]
    if len(set(ranks)) < len(ranks):
        raise UsageError(
            f"report: {arguments.directory} has two traces of one rank (ranks {ranks})"
        )
    predicted = None if arguments.predicted is None else _read(arguments.predicted)
    report = analyse(timelines)
    if arguments.json:
        figures = report.to_dict()
        if predicted is not None:
            figures["predicted_step_s"] = analyse([predicted]).step_s
        print_json(figures)
        return 0
    first = timelines[0]
    about = ", ".join(f"{name} {text}" for name, text in first.labels.items() if name != "steps")
    say(about)
    say(
        f"{report.num_steps} step(s) of {_ms(report.step_s)} ms, {len(report.ranks)} rank(s): "
        + ", ".join(f"{name} {_ms(seconds)}" for name, seconds in report.parts_s.items())
    )
    if predicted is not None:
        say(f"predicted: {_ms(analyse([predicted]).step_s)} ms")
    _print_exposed(report)
    rows = [
        (one.rank, *map(_ms, (one.step_s, one.waits_s, one.others_s)), "late" * one.is_late)
        for one in report.ranks
    ]
    columns = ("rank", "step", "waits", "for others", "")
    Table(columns, rows, "ranks: ms of a step", text=("rank", ""), is_framed=False).print()
    say("What costs most:")
    for number, sentence in enumerate(report.costs, 1):
        say(f"{number}. {sentence}")
    try:
        drawn = _draw(arguments.directory, timelines, predicted)
    except ImportError:
        note(_NO_PICTURES)
        return 0
    for path in drawn:
        print(f"wrote {path}")
    return 0


# ------------------------------------------------------------------ files


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


# ------------------------------------------------------------------ pictures


def _draw(directory: Path, timelines: Sequence[Timeline], predicted: Timeline | None) -> list[Path]:
    """Draw both pictures of the last step that is whole; return where they are."""

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


# ------------------------------------------------------------------------------------------ figures
# From the timelines of all ranks (core/timeline.py) to figures, without a clock, a file or a
# picture. Every figure is seconds of one step; a step lasts from the end of the one before (or from
# the first event) to the end of the optimizer's step.
#
#     exposed    seconds in which compute waits for a lane, by unit: what was not hidden behind work
#     ranks      per rank: its step, and how long it waits for others: what it waits for the other
#                ranks' gathers and reduces beyond what the rank that waits least does. That one is
#                the late one
#     costs      the parts of a step, the largest first, in words
#
# A lane that is full all the time looks like one that is slow: nobody says how fast the machine
# could be.

_WIRES = ("gather", "reduce")
# a rank is late where the others wait this share of a step for it
_LATE = 0.03
_NO_UNIT = {"gather": "(the other ranks)", "reduce": "(the other ranks)"}  # else "(all units)"
_WAITS = {
    "gather": (
        "gathered weights",
        "gather further ahead (prefetch_bytes), keep them between forward and backward"
        " (policy='zero3-keep'), send fewer bytes (zs.Comm(weight_codec='int8')), or give each rank"
        " more tokens",
    ),
    "reduce": (
        "reduced gradients",
        "accumulate micro-batches inside engine.no_sync(), send fewer bytes (reduce in bf16,"
        " zs.Comm(grad_codec=...)), or give each rank more tokens",
    ),
    "tier read": (
        "weights from the host or disk",
        "keep a larger fraction on the device (zs.Offload(fraction=...)), or read further ahead"
        " (prefetch_bytes)",
    ),
    "tier write": (
        "gradients on their way to the host or disk",
        "keep gradients on the device, or a larger fraction of them",
    ),
    "host": (
        "the optimizer's step on the host",
        "leave a part of the state on the device (zs.Offload(fraction='auto')), or apply it a step"
        " late (delayed_update)",
    ),
}


@dataclass(frozen=True)
class Exposed:
    """Time in which compute waits for one lane to be done for one unit, mean over the ranks."""

    unit: str  # or "(the other ranks)", "(all units)"
    lane: str
    seconds: float  # of a step


@dataclass(frozen=True)
class RankTimes:
    """The step of one rank, in seconds."""

    rank: int
    step_s: float
    waits_s: float  # of compute, for whatever lane
    others_s: float  # of these, for ranks that come later
    is_late: bool  # the others wait for it


@dataclass(frozen=True)
class TraceReport:
    """The figures of all ranks' traces."""

    num_steps: int
    step_s: float  # mean over ranks and steps
    parts_s: Mapping[
        str, float
    ]  # "forward", "backward", "step", "wait", "other": they add up to it
    exposed: tuple[Exposed, ...]  # the longest first
    ranks: tuple[RankTimes, ...]
    peak_bytes: Mapping[str, float]  # of rank 0 by state, where they are most together
    costs: tuple[str, ...]  # sentences, what costs most first

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values: seconds and bytes."""
        return asdict(self)


def analyse(timelines: Sequence[Timeline]) -> TraceReport:
    """Return the figures of the `timelines` of one run, at least one, each of another rank."""
    steps = [_StepSpans.of(timeline) for timeline in sorted(timelines, key=lambda one: one.rank)]
    waits = [one.waits() for one in steps]
    exposed = {
        where: _mean([one.get(where, 0.0) for one in waits])
        for where in sorted(set().union(*waits))
    }
    by_length = sorted(exposed.items(), key=lambda item: -item[1])
    on_wires = [sum(s for (_, lane), s in one.items() if lane in _WIRES) for one in waits]
    least, step_s = min(on_wires), _mean([one.step_s for one in steps])
    is_uneven = max(on_wires) - least > _LATE * step_s
    ranks = tuple(
        RankTimes(
            one.timeline.rank,
            one.step_s,
            sum(own.values()),
            wire - least,
            wire == least and is_uneven,
        )
        for one, own, wire in zip(steps, waits, on_wires, strict=True)
    )
    parts = {
        name: _mean([one.parts()[name] for one in steps])
        for name in ("forward", "backward", "step", "wait", "other")
    }
    report = TraceReport(
        num_steps=min(one.number for one in steps),
        step_s=step_s,
        parts_s=parts,
        exposed=tuple(
            Exposed(unit or _NO_UNIT.get(lane, "(all units)"), lane, seconds)
            for (unit, lane), seconds in by_length
        ),
        ranks=ranks,
        peak_bytes=max(
            (level.num_bytes for level in steps[0].timeline.levels),
            key=lambda by: sum(by.values()),
            default={},
        ),
        costs=(),
    )
    return replace(report, costs=tuple(_costs(report, steps)))


def step_spans(timeline: Timeline) -> list[tuple[float, float]]:
    """Return from when to when each step lasts, in seconds; one span of everything where no
    optimizer's step has ended.
    """
    compute = [event for event in timeline.events if event.lane == "compute"]
    if not compute:
        return [(0.0, timeline.stop)]
    spans: list[tuple[float, float]] = []
    begin = compute[0].start
    end: float | None = None
    for event in compute:
        if end is not None and event.name in ("forward", "backward"):
            spans.append((begin, end))
            begin, end = end, None
        if event.name == "step":
            end = event.stop
    if end is not None:
        spans.append((begin, compute[-1].stop))  # with a last wait for the host
    return spans or [(begin, timeline.stop)]


def within(timeline: Timeline, begin: float, end: float) -> Timeline:
    """Return the part of a timeline between two seconds, which becomes second 0 on; events that
    reach beyond are cut.
    """
    events = [
        replace(
            event,
            start=max(event.start, begin) - begin,
            duration=min(event.stop, end) - max(event.start, begin),
        )
        for event in timeline.events
        if event.stop > begin and event.start < end
    ]
    before = [level for level in timeline.levels if level.at <= begin][-1:]
    levels = [
        replace(level, at=max(0.0, level.at - begin))
        for level in (*before, *(one for one in timeline.levels if begin < one.at <= end))
    ]
    return replace(
        timeline, origin=timeline.origin + begin, events=tuple(events), levels=tuple(levels)
    )


@dataclass(frozen=True)
class _StepSpans:
    """The compute lane of one rank, from the first step's begin to the last one's end."""

    timeline: Timeline
    number: int
    begin: float
    end: float

    @classmethod
    def of(cls, timeline: Timeline) -> _StepSpans:
        spans = step_spans(timeline)
        return cls(timeline, len(spans), spans[0][0], spans[-1][1])

    @property
    def step_s(self) -> float:
        return (self.end - self.begin) / self.number

    def _compute(self) -> Iterator[Event]:
        for event in self.timeline.events:
            if event.lane == "compute" and self.begin <= event.start < self.end:
                yield event

    def waits(self) -> dict[tuple[str, str], float]:
        """Return the seconds of a step that compute waits, by unit and lane."""
        out: dict[tuple[str, str], float] = {}
        for event in self._compute():
            if event.waits_for:
                where = (event.unit, event.waits_for)
                out[where] = out.get(where, 0.0) + event.duration / self.number
        return out

    def parts(self) -> dict[str, float]:
        """Return the seconds of a step by what compute does; "other": nothing of the engine's."""
        out = dict.fromkeys(("forward", "backward", "step", "wait"), 0.0)
        for event in self._compute():
            name = "wait" if event.waits_for else event.name
            out[name] = out.get(name, 0.0) + event.duration / self.number
        return out | {"other": max(0.0, self.step_s - sum(out.values()))}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ------------------------------------------------------------------ in words


def _costs(report: TraceReport, steps: Sequence[_StepSpans]) -> list[str]:
    """Return a sentence for each of the three that cost most."""
    waited = [one.others_s for one in report.ranks]
    others = _mean(waited)
    on_wires = sum(one.seconds for one in report.exposed if one.lane in _WIRES)
    share = 1.0 - others / on_wires if on_wires else 1.0  # of waits on a wire: not for late ranks
    found = [(max(waited), _late_ranks(report, steps))]
    for lane, (what, hint) in _WAITS.items():
        own = [one for one in report.exposed if one.lane == lane]
        seconds = sum(one.seconds for one in own) * (share if lane in _WIRES else 1.0)
        units = [one.unit for one in own if not one.unit.startswith("(")]
        most = f", most of it for unit {units[0]!r}" if units else ""
        sentence = f"Compute waits for {what}, {_of(report, seconds)}{most}: {hint}."
        found.append((seconds, sentence))
    work = report.parts_s["forward"] + report.parts_s["backward"]
    for seconds, what, hint in (
        (
            work,
            f"The model's own forward ({_ms(report.parts_s['forward'])} ms) and backward"
            f" ({_ms(report.parts_s['backward'])} ms) take",
            "it is the work itself: faster kernels, a smaller precision, or no recomputation",
        ),
        (
            report.parts_s["step"],
            "The optimizer's step, with averaging and clipping, takes",
            "a fused optimizer, or more ranks over which its state is sharded",
        ),
        (
            report.parts_s["other"],
            "What lies between the engine's parts (clipping, data, logging, other code) takes",
            "load data in the background, and read losses less often",
        ),
    ):
        found.append((seconds, f"{what} {_of(report, seconds)}: {hint}."))
    longest = sorted((one for one in found if one[0] > 0.0), key=lambda one: -one[0])
    return [sentence for _, sentence in longest[:3]]


def _late_ranks(report: TraceReport, steps: Sequence[_StepSpans]) -> str:
    late = [one.rank for one in report.ranks if one.is_late]
    if not late:
        return (
            "The ranks wait for one another in turn,"
            f" at most {_of(report, max(one.others_s for one in report.ranks))}: look for other"
            " programs on the machine, or uneven batches."
        )
    parts = {one.timeline.rank: one.parts() for one in steps}
    own, rest = parts[late[0]], [parts[rank] for rank in parts if rank != late[0]]
    more = {name: own[name] - _mean([one[name] for one in rest]) for name in own if name != "wait"}
    name, seconds = max(more.items(), key=lambda item: item[1])
    where = {"step": "optimizer's step", "other": "time outside the engine"}.get(name, name)
    return (
        f"The others wait for rank {late[0]}, {_of(report, max(o.others_s for o in report.ranks))}:"
        f" its {where} takes {_ms(seconds)} ms more than theirs. Give it as much data as the"
        " others, and look what else runs there."
    )


def _of(report: TraceReport, seconds: float) -> str:
    share = seconds / report.step_s if report.step_s else 0.0
    return f"{_ms(seconds)} ms of a step of {_ms(report.step_s)} ms ({share:.0%})"


# ----------------------------------------------------------------------------------------- pictures
#     lanes.png     a panel per timeline, a row per lane; a unit has one colour, its backward is
#                   hatched, waits are red, all panels have one axis of milliseconds
#     memory.png    the bytes of one rank by state, one on the other
#
# Timelines come cut to what is to be seen (`within`).

_DPI = 130
_MOST_IN_LEGEND = 16
_MOST_IN_LABEL = 60  # characters
_GREY, _WAIT = "#9a9a9a", "#d62728"
_STATES = {  # from the bottom up
    "weight": "#4c72b0",
    "master": "#55a868",
    "optimizer": "#8172b3",
    "residual": "#937860",
    "grad": "#dd8452",
    "gathered": "#c44e52",
}


def draw_lanes(panels: Mapping[str, Timeline], path: Path) -> None:
    """Draw the lanes of timelines, each under its title, into `path`. Raises ImportError without
    matplotlib.
    """
    import matplotlib.patches

    figures, patches = _figures(), matplotlib.patches
    rows = {
        title: [lane for lane in LANES if any(event.lane == lane for event in one.events)]
        for title, one in panels.items()
    }
    stop = max(timeline.stop for timeline in panels.values()) * 1e3
    units = list(dict.fromkeys(e.unit for one in panels.values() for e in one.events if e.unit))
    colours = _colours(units)
    heights = [len(lanes) + 0.8 for lanes in rows.values()]
    figure = figures.Figure(figsize=(13, 1.6 + 0.55 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, (title, timeline) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(len(rows[title])), rows[title])
        axes.set_ylim(len(rows[title]) - 0.4, -0.6)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        for row, lane in enumerate(rows[title]):
            for event in _joined([one for one in timeline.events if one.lane == lane]):
                _draw_event(axes, row, event, colours, stop)
    all_axes[-1].set_xlim(0.0, stop)
    all_axes[-1].set_xlabel("ms from the beginning of the step")
    looks = [_look(event, colours) for event in _SHOWN]
    handles = [
        patches.Patch(label=name, **look)
        for name, look in zip(("the model, outside units", "backward (hatched)",
                               "optimizer's step", "compute waits"), looks, strict=True)
    ]  # fmt: skip
    handles += [
        patches.Patch(facecolor=colours[unit], label=_label(unit))
        for unit in units[:_MOST_IN_LEGEND]
    ]
    if len(units) > _MOST_IN_LEGEND:
        more = f"and {len(units) - _MOST_IN_LEGEND} more units"
        handles.append(patches.Patch(facecolor="none", label=more))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    _save(figure, path)


def draw_memory(timeline: Timeline, path: Path) -> None:
    """Draw the bytes of a timeline that has levels, by state, into `path`. Raises ImportError
    without matplotlib.
    """
    figures = _figures()
    levels = timeline.levels
    most = max(sum(level.num_bytes.values()) for level in levels)
    unit, size = ("GB", 1e9) if most >= 1e8 else ("MB", 1e6)
    names = [
        name
        for state in _STATES
        for name in sorted({name for level in levels for name in level.num_bytes})
        if name.partition(" ")[0] == state
        and any(level.num_bytes.get(name, 0.0) for level in levels)
    ]
    times = [level.at * 1e3 for level in levels] + [timeline.stop * 1e3]
    heights = [
        [level.num_bytes.get(name, 0.0) / size for level in (*levels, levels[-1])] for name in names
    ]
    figure = figures.Figure(figsize=(13, 5), layout="constrained")
    axes = figure.subplots()
    areas = axes.stackplot(
        times,
        heights,
        step="post",
        labels=list(map(_label, names)),
        colors=[_STATES[name.partition(" ")[0]] for name in names],
        alpha=0.9,
    )
    for name, area in zip(names, areas, strict=True):
        if " (" in name:  # on another tier than the device
            area.set_hatch("//")
            area.set_edgecolor("white")
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0.0, 1.08 * most / size)
    axes.axhline(most / size, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"at most {most / size:,.3g} {unit}", (0.005, most / size), fontsize=9,
        xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
    )  # fmt: skip
    axes.set_xlabel("ms from the beginning of the step")
    axes.set_ylabel(f"memory of rank {timeline.rank}, {unit}")
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    _save(figure, path)


# ------------------------------------------------------------------ helpers

_SHOWN = (
    Event("compute", "forward", "", 0.0, 0.0),
    Event("compute", "backward", "", 0.0, 0.0),
    Event("compute", "step", "", 0.0, 0.0),
    Event("compute", "wait for gather", "", 0.0, 0.0),
)


def _figures() -> Any:
    """Return matplotlib's figures, which need neither a display nor a state of their own."""
    import matplotlib.figure

    return matplotlib.figure


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=_DPI)


def _label(name: str) -> str:
    """Return a name from a trace as matplotlib draws it: no formulas, one line."""
    line = printable(name).replace("\n", " ").replace("\t", " ")
    return line[:_MOST_IN_LABEL].replace("$", r"\$")


def _colours(units: Sequence[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    few = list(colormaps["tab20"].colors)  # type: ignore[attr-defined]
    del few[14:16]  # grey: outside units
    if len(units) <= len(few):
        return dict(zip(units, [*few[::2], *few[1::2]], strict=False))
    return {unit: colormaps["turbo"](i / len(units)) for i, unit in enumerate(units)}


def _joined(events: Sequence[Event]) -> list[Event]:
    """Join what follows on itself: parts of compute that nothing lies between."""
    out: list[Event] = []
    for _, group in groupby(events, key=lambda event: (event.name, event.unit)):
        for event in group:
            gap = event.start - out[-1].stop if out else 1.0
            if out and (out[-1].name, out[-1].unit) == (event.name, event.unit) and gap < 1e-6:
                last = out.pop()
                event = Event(last.lane, last.name, last.unit, last.start, event.stop - last.start)
            out.append(event)
    return out


def _look(event: Event, colours: Mapping[str, Any]) -> dict[str, Any]:
    if event.waits_for:
        return {"facecolor": "white", "edgecolor": _WAIT, "hatch": "xxxx", "linewidth": 0.6}
    if event.name == "step" and event.lane == "compute":
        return {"facecolor": "#333333", "edgecolor": "white", "linewidth": 0.2}
    colour = colours.get(event.unit, _GREY)
    if event.name == "backward":
        return {"facecolor": colour, "edgecolor": "white", "hatch": "///", "linewidth": 0.2}
    return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.2}


def _draw_event(axes: Any, row: int, event: Event, colours: Mapping[str, Any], stop: float) -> None:
    start, width = event.start * 1e3, event.duration * 1e3
    height, look = 0.8 if not event.waits_for else 0.5, _look(event, colours)
    if width < stop * 1e-3:  # thinner than its edge
        look |= {"edgecolor": _WAIT if event.waits_for else look["facecolor"], "linewidth": 0.6}
    axes.broken_barh([(start, width)], (row - height / 2, height), **look)
    label = _label(event.unit.removesuffix(".weight"))
    if label and width > stop * 0.0052 * len(label) and not event.waits_for:
        axes.text(
            start + width / 2, row, label, ha="center", va="center", fontsize=7, clip_on=True,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip
