"""The pictures of ``zeroshard report``: lanes and memory over one step. Needs matplotlib, which is
imported when a picture is drawn.

    lanes.png     a panel per timeline, a row per lane; a unit has one colour, its backward is
                  hatched, waits are red, all panels have one axis of milliseconds
    memory.png    the bytes of one rank by state, one on the other

Timelines come cut to what is to be seen (trace_figures.py: within).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from zeroshard.core.timeline import LANES, Event, Timeline
from zeroshard.system.safe_files import printable, replacing

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
    figures, patches = _figures(), _patches()
    rows = {title: _rows(timeline) for title, timeline in panels.items()}
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
                _draw(axes, row, event, colours, stop)
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


def _patches() -> Any:
    import matplotlib.patches

    return matplotlib.patches


def _rows(timeline: Timeline) -> list[str]:
    used = {event.lane for event in timeline.events}
    return [lane for lane in LANES if lane in used]


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


def _draw(axes: Any, row: int, event: Event, colours: Mapping[str, Any], stop: float) -> None:
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
