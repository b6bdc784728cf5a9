"""The timeline of a step: events on lanes, and bytes by state over time. The simulation of a plan
predicts them, the trace of a run measures them; one picture shows both. And the jobs on these
lanes, from which the simulation's events follow.

The lanes are the lanes of hops (core/work.py). On "compute" stand the model's "forward" and
"backward" by unit, the optimizer's "step", and every "wait for LANE": time in which compute had
nothing to do until that lane was done for that unit. On the others stand hops by their kind
("all_gather", "read", ...) with the bytes that they move.

The file format is Chrome's trace events (JSON), which Perfetto opens: a process per rank, a thread
per lane, a counter for memory. Nothing here reads a clock or a file, and torch is not imported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal, get_args

from zeroshard.core.work import Lane

# -------------------------------------------------------------------------------- events and levels

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


# ------------------------------------------------------------------------------------ jobs on lanes
# An event-driven schedule of one rank's step, or of all ranks of a pipeline.
#
# A lane of a rank (core/work.py: Lane, and those that send to other stages) runs its jobs one after
# another in the order in which they were enqueued, as a stream does. A job starts when it is the
# first of its lane, everything that it needs is over, and the resources of its rank that it takes
# are free: links, the disk, and, where the device is the host itself, its cores. Of two jobs that
# want the same resource, the one that could start earlier goes first, then the one that was
# enqueued earlier. Nothing is interrupted.
#
# Cost: a few microseconds per job. Bytes and seconds come from planner/durations.py, the order of
# jobs from planner/simulate.py and pipeline_time.py.

COMPUTE = "compute"  # what bounds a task that computes

AnyLane = Lane | Literal["send ahead", "send back"]  # to the next stage, and to the one before
_Queue = tuple[int, str]  # a rank's lane, or a resource of it


@dataclass(frozen=True, slots=True)
class LaneTask:
    """A piece of a lane's work, the same for each of many equal units."""

    lane: AnyLane
    name: str
    duration: float  # seconds
    num_bytes: float = 0.0  # moved
    takes: tuple[str, ...] = ()  # resources that other lanes take, too
    bound_by: str = COMPUTE  # what would have to be faster


@dataclass(slots=True)
class LaneJob:
    """A task of one unit; `needs` are the numbers of jobs that are over before it starts."""

    task: LaneTask
    unit: str
    needs: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class JobTimes:
    """The start of each of `jobs`, and the job for which it has waited last (-1: for none)."""

    jobs: Sequence[LaneJob]
    starts: Sequence[float]
    causes: Sequence[int]

    def stop(self, number: int) -> float:
        """Return when job `number` ends."""
        return self.starts[number] + self.jobs[number].task.duration

    @property
    def total(self) -> float:
        """The end of the last job."""
        return max(map(self.stop, range(len(self.jobs))), default=0.0)

    def waits(self, numbers: Iterable[int]) -> Iterator[tuple[float, float, int]]:
        """Yield when a lane with the jobs `numbers` had nothing to do: start, stop, and the job
        that waited.
        """
        idle_from = 0.0
        for number in numbers:
            if self.starts[number] > idle_from:
                yield idle_from, self.starts[number], number
            idle_from = self.stop(number)

    def waited_for(
        self, start: float, stop: float, cause: int
    ) -> Iterator[tuple[int, float, float]]:
        """Yield the jobs that took the time from `start` to `stop`, and from when to when each did:
        back from `cause` along what each has waited for.
        """
        while stop > start and cause >= 0:
            begin = max(start, self.starts[cause])
            yield cause, begin, stop
            stop, cause = begin, self.causes[cause]


def longest(shares: Mapping[str, float], total: float) -> str:
    """Return what bounds `total` seconds, which `shares` divides: compute where it is at least
    half, else what takes most of the rest.
    """
    others = {name: seconds for name, seconds in shares.items() if name != COMPUTE}
    if not others or 2 * shares[COMPUTE] >= total:
        return COMPUTE
    return max(others, key=lambda name: others[name])


class _Lanes:
    """The state of a schedule under way."""

    def __init__(self, jobs: Sequence[LaneJob]) -> None:
        self.jobs = jobs
        self.starts = [0.0] * len(jobs)
        self.causes = [-1] * len(jobs)
        self._queues: dict[int, dict[str, deque[int]]] = {}  # by rank and lane
        self._missing = [0] * len(jobs)  # how many jobs that it needs are not over
        self._ready = [0.0] * len(jobs)  # when they were
        self._followers: list[list[int]] = [[] for _ in jobs]
        self._busy: set[_Queue] = set()
        self._freed_by: dict[_Queue, int] = {}
        self._ends: list[tuple[float, int]] = []
        for number, job in enumerate(jobs):
            self._queues.setdefault(job.rank, {}).setdefault(job.task.lane, deque()).append(number)
            needs = set(job.needs)
            self._missing[number] = len(needs)
            for other in needs:
                self._followers[other].append(number)

    def run(self) -> None:
        """Run all jobs."""
        for rank in self._queues:
            self._start(0.0, rank)
        while self._ends:
            now = self._ends[0][0]
            ranks: dict[int, None] = {}  # they can start a job now
            while self._ends and self._ends[0][0] <= now:
                number = heappop(self._ends)[1]
                names = self._names(number)
                self._busy.difference_update(names)
                self._freed_by.update(dict.fromkeys(names, number))
                ranks[self.jobs[number].rank] = None
                for other in self._followers[number]:
                    self._missing[other] -= 1
                    self._ready[other] = now
                    self.causes[other] = number
                    ranks[self.jobs[other].rank] = None
            for rank in ranks:
                self._start(now, rank)
        left = any(queue for queues in self._queues.values() for queue in queues.values())
        assert not left, "jobs that wait for each other"

    def _start(self, now: float, rank: int) -> None:
        """Start every job of `rank` that can start `now`."""
        while True:
            first: tuple[float, int] | None = None
            for lane, queue in self._queues[rank].items():
                if not queue or (rank, lane) in self._busy:
                    continue
                number = queue[0]
                takes = self.jobs[number].task.takes
                if self._missing[number] or any((rank, one) in self._busy for one in takes):
                    continue
                # since when it is the first of its lane, and needs nothing more
                freed_by = self._freed_by.get((rank, lane), -1)
                mine = (max(self._ready[number], self._stopped(freed_by)), number)
                first = mine if first is None or mine < first else first
            if first is None:
                return
            number = first[1]
            task = self.jobs[number].task
            self._queues[rank][task.lane].popleft()
            names = self._names(number)
            if self._ready[number] < now:  # it has waited for its lane, or for a resource
                freed = (self._freed_by.get(name, -1) for name in names)
                self.causes[number] = max(freed, key=self._stopped)
            self.starts[number] = now
            self._busy.update(names)
            heappush(self._ends, (now + task.duration, number))

    def _names(self, number: int) -> list[_Queue]:
        job = self.jobs[number]
        return [(job.rank, name) for name in (job.task.lane, *job.task.takes)]

    def _stopped(self, number: int) -> float:
        return self.starts[number] + self.jobs[number].task.duration if number >= 0 else -1.0


def run_jobs(jobs: Sequence[LaneJob]) -> JobTimes:
    """Return when each job starts. On a lane, jobs run in their order in `jobs`."""
    lanes = _Lanes(jobs)
    lanes.run()
    return JobTimes(jobs, lanes.starts, lanes.causes)
