"""The timeline of a step: events on lanes, and bytes by state over time. The simulation of a plan
predicts them, the trace of a run measures them; one picture shows both.

The lanes are the lanes of hops (core/work.py). On "compute" stand the model's "forward" and
"backward" by unit, the optimizer's "step", and every "wait for LANE": time in which compute had
nothing to do until that lane was done for that unit. On the others stand hops by their kind
("all_gather", "read", ...) with the bytes that they move.

The file format is Chrome's trace events (JSON), which Perfetto opens: a process per rank, a thread
per lane, a counter for memory. Nothing here reads a clock or a file, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from zeroshard.core.work import Lane

LANES: tuple[Lane, ...] = get_args(Lane)
WAIT = "wait for "  # and the lane, as the name of an event on compute
_MOST = 1e20  # bytes, microseconds


@dataclass(frozen=True, slots=True)
class Event:
    """Something that one lane does from `start` on, for `duration`, both in seconds."""

    lane: Lane
    name: str
    unit: str  # "": of no unit
    start: float
    duration: float
    num_bytes: float = 0.0  # moved

    @property
    def stop(self) -> float:
        """The time at which it ends."""
        return self.start + self.duration

    @property
    def waits_for(self) -> str:
        """The lane that compute waits for; "" where this is no wait."""
        return self.name.removeprefix(WAIT) if self.name.startswith(WAIT) else ""


@dataclass(frozen=True, slots=True)
class Level:
    """The bytes of one rank by state, from second `at` on."""

    at: float
    num_bytes: Mapping[str, float]


@dataclass(frozen=True)
class Timeline:
    """The events and levels of one rank; seconds count from `origin`."""

    rank: int = 0
    origin: float = 0.0  # seconds since the epoch; 0 where it is predicted
    events: tuple[Event, ...] = ()
    levels: tuple[Level, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # "policy", "model", ...

    @property
    def stop(self) -> float:
        """The time at which the last event ends."""
        return max((event.stop for event in self.events), default=0.0)

    def to_chrome(self) -> dict[str, Any]:
        """Return it as a JSON object in Chrome's trace event format (microseconds)."""
        head: dict[str, Any] = {"pid": self.rank}
        written = [
            {**head, "ph": "M", "name": "process_name", "args": {"name": f"rank {self.rank}"}}
        ]
        for number, lane in enumerate(LANES):
            thread = {**head, "tid": number, "ph": "M"}
            written.append({**thread, "name": "thread_name", "args": {"name": lane}})
            written.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})
        for one in self.events:
            written.append(
                {
                    **head,
                    "tid": LANES.index(one.lane),
                    "ph": "X",
                    "name": f"{one.name} {one.unit}".rstrip(),
                    "ts": one.start * 1e6,
                    "dur": one.duration * 1e6,
                    "args": {"event": one.name, "unit": one.unit, "bytes": one.num_bytes},
                }
            )
        for level in self.levels:
            args = dict(level.num_bytes)
            written.append({**head, "ph": "C", "name": "bytes", "ts": level.at * 1e6, "args": args})
        about = {"rank": self.rank, "origin": self.origin, **self.labels}
        return {"traceEvents": written, "displayTimeUnit": "ms", "otherData": about}

    @classmethod
    def from_chrome(cls, trace: Mapping[str, Any]) -> Timeline:
        """Return what `to_chrome` has written. Raises ValueError for anything else, also for
        numbers that no run has (negative or endless times and sizes).
        """
        try:
            about = dict(trace["otherData"])
            written = trace["traceEvents"]
            events = tuple(
                Event(
                    LANES[one["tid"]],
                    _text(one["args"]["event"]),
                    _text(one["args"]["unit"]),
                    _number(one["ts"]) / 1e6,
                    _number(one["dur"]) / 1e6,
                    _number(one["args"]["bytes"]),
                )
                for one in written
                if one["ph"] == "X"
            )
            levels = tuple(
                Level(
                    _number(one["ts"]) / 1e6,
                    {_text(name): _number(size) for name, size in one["args"].items()},
                )
                for one in written
                if one["ph"] == "C"
            )
            rank, origin = int(_number(about.pop("rank"))), _number(about.pop("origin"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"not a trace of zeroshard: {error!r}") from None
        return cls(rank, origin, events, levels, {name: str(text) for name, text in about.items()})


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where a name is expected")
    return value


def _number(value: Any) -> float:
    """Return a number of bytes, of microseconds, or of seconds since the epoch."""
    if not 0 <= value <= _MOST:  # TypeError: it is no number
        raise ValueError(f"a time or a size in it is negative or is not finite: {value!r:.40}")
    return float(value)
