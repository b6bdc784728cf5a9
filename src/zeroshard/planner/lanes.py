"""Jobs on lanes: an event-driven schedule of one rank's step, or of all ranks of a pipeline.

A lane of a rank (core/work.py: Lane, and those that send to other stages) runs its jobs one
after another in the order in which they were enqueued, as a stream does. A job starts when it is
the first of its lane, everything that it needs is over, and the resources of its rank that it takes
are free: links, the disk, and, where the device is the host itself, its cores. Of two jobs that
want the same resource, the one that could start earlier goes first, then the one that was enqueued
earlier. Nothing is interrupted.

Cost: a few microseconds per job. Bytes and seconds come from durations.py, the order of jobs from
simulate.py and pipeline_time.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from zeroshard.core.route import Lane

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
                ranks |= self._end(heappop(self._ends)[1], now)
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

    def _end(self, number: int, now: float) -> dict[int, None]:
        """End a job; return the ranks that may start others."""
        names = self._names(number)
        self._busy.difference_update(names)
        self._freed_by.update(dict.fromkeys(names, number))
        ranks = {self.jobs[number].rank: None}
        for other in self._followers[number]:
            self._missing[other] -= 1
            self._ready[other] = now
            self.causes[other] = number
            ranks[self.jobs[other].rank] = None
        return ranks


def run(jobs: Sequence[LaneJob]) -> JobTimes:
    """Return when each job starts. On a lane, jobs run in their order in `jobs`."""
    lanes = _Lanes(jobs)
    lanes.run()
    return JobTimes(jobs, lanes.starts, lanes.causes)
