"""What traces say: where a step's time goes, who waits for whom, and what costs most.

From the timelines of all ranks (core/timeline.py) to figures, without a clock, a file or a picture.
Every figure is seconds of one step; a step lasts from the end of the one before (or from the first
event) to the end of the optimizer's step.

    exposed    seconds in which compute waits for a lane, by unit: what was not hidden behind work
    ranks      per rank: its step, and how long it waits for others: what it waits for the other
               ranks' gathers and reduces beyond what the rank that waits least does. That one is
               the late one
    costs      the parts of a step, the largest first, in words

It does not know how fast the machine could be: a lane that is full all the time looks like one that
is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zeroshard.core.timeline import Event, Timeline

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
    ranks = _rank_times(steps, waits)
    parts = {
        name: _mean([one.parts()[name] for one in steps])
        for name in ("forward", "backward", "step", "wait", "other")
    }
    report = TraceReport(
        num_steps=min(one.number for one in steps),
        step_s=_mean([one.step_s for one in steps]),
        parts_s=parts,
        exposed=tuple(
            Exposed(unit or _NO_UNIT.get(lane, "(all units)"), lane, seconds)
            for (unit, lane), seconds in by_length
        ),
        ranks=tuple(ranks),
        peak_bytes=_peak(steps[0].timeline),
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


def _rank_times(
    steps: Sequence[_StepSpans], waits: Sequence[Mapping[tuple[str, str], float]]
) -> Iterator[RankTimes]:
    on_wires = [sum(s for (_, lane), s in one.items() if lane in _WIRES) for one in waits]
    least, most = min(on_wires), max(on_wires)
    step_s = _mean([one.step_s for one in steps])
    for one, own, wire in zip(steps, waits, on_wires, strict=True):
        is_late = wire == least and most - least > _LATE * step_s
        yield RankTimes(one.timeline.rank, one.step_s, sum(own.values()), wire - least, is_late)


def _peak(timeline: Timeline) -> Mapping[str, float]:
    if not timeline.levels:
        return {}
    return max((level.num_bytes for level in timeline.levels), key=lambda by: sum(by.values()))


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
        found.append((seconds, _waiting(report, seconds, what, own, hint)))
    work = report.parts_s["forward"] + report.parts_s["backward"]
    for seconds, what, hint in (
        (
            work,
            f"The model's own forward ({_ms(report.parts_s['forward'])}) and backward"
            f" ({_ms(report.parts_s['backward'])}) take",
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


def _waiting(
    report: TraceReport, seconds: float, what: str, own: Sequence[Exposed], hint: str
) -> str:
    units = [one for one in own if not one.unit.startswith("(")]
    most = f", most of it for unit {units[0].unit!r}" if units else ""
    return f"Compute waits for {what}, {_of(report, seconds)}{most}: {hint}."


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
        f" its {where} takes {_ms(seconds)} more than theirs. Give it as much data as the others,"
        " and look what else runs there."
    )


def _of(report: TraceReport, seconds: float) -> str:
    share = seconds / report.step_s if report.step_s else 0.0
    return f"{_ms(seconds)} of a step of {_ms(report.step_s)} ({share:.0%})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
