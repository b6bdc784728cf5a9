"""One optimizer step, predicted: an event-driven simulation of the routes in the engine's order.

    Program         the jobs of one rank, in the order in which the engine enqueues them
    simulate(...)   the events and levels of one rank, as a trace measures them (core/timeline.py)
    step_time(...)  how long the step takes, and what bounds it

core/timeline.py runs the jobs for as long as durations.py says. Many micro-batches are alike:
`step_time` runs four and adds the time of the others.

Invariant: each hop of ``exact.step_routes`` is one task, once. The host's own time, the exchange
before a step, and clipping are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

from zeroshard.core.placement import Tier
from zeroshard.core.policy import Policy
from zeroshard.core.route import Hop, Kind, Lane, Route
from zeroshard.core.schedule import RELEASES, TILE_BUFFERS, TILES_AHEAD, Command, Op
from zeroshard.core.timeline import (
    COMPUTE,
    WAIT,
    Event,
    JobTimes,
    LaneJob,
    LaneTask,
    Level,
    Timeline,
    longest,
    run_jobs,
)
from zeroshard.planner.durations import ALONE, STEP, TENSOR, Durations, TensorParallel
from zeroshard.planner.exact import LaidOut, made_once, rest_bytes
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import Training
from zeroshard.planner.replay import PlannedGroup, PlannedUnit, PlanReplay, TransportTraits

# ----------------------------------------------------------------------------------------- the jobs
#     gather     what the last step has published | the unit after the one that computes ...
#     compute    forward 0, 1, ... n | backward n, ... 1, 0 | step
#     reduce     each unit's gradients when its backward is over
#     tiers      reads before gathers, writes after reduces; the step's own
#
# The schedule that the engine executes (core/schedule) says what is gathered, released and waited
# for; here its commands become jobs. A gather's lane first waits for what compute was given before
# (streams.py: fork); the optimizer's step waits for all reduces (finalize.py); the host steps what
# rests off the device, a unit at a time (optim/runner.py). A step begins where the last one has
# ended: with the gathers that it has published, where weights rest whole.


@dataclass(frozen=True, slots=True)
class LevelChange:
    """Memory of the device, taken (or given back) where a job starts or, `at_stop`, ends."""

    job: int
    at_stop: bool
    state: str
    num_bytes: float


@dataclass(frozen=True)
class UnitWork:
    """The tasks of one kind of unit in a step."""

    planned: PlannedUnit
    forward: LaneTask
    backward: LaneTask
    unshard: dict[str, tuple[LaneTask, ...]]  # by phase
    keep: tuple[LaneTask, ...]  # after a forward, for its backward

    @property
    def trained(self) -> tuple[PlannedGroup, ...]:
        """The groups that have gradients."""
        return self.planned.trained

    @property
    def sums_leave(self) -> bool:
        """Whether sums of gradients rest on another tier."""
        return any(group.cells.grad.tier is not Tier.DEVICE for group in self.trained)

    @property
    def steps_off_device(self) -> bool:
        """Whether the host steps the unit."""
        return any(group.cells.optim.tier is not Tier.DEVICE for group in self.trained)


class Program(PlanReplay):
    """The jobs of one step, and the memory that they take beside what rests."""

    def __init__(self, durations: Durations, policy: Policy) -> None:
        laid_out, training = durations.laid_out, durations.training
        super().__init__(laid_out, policy, training, TransportTraits.of(durations.machine))
        self.jobs: list[LaneJob] = []
        self.marks: list[LevelChange] = []
        self._durations = durations
        self._policy = policy
        leaves = training.deal(policy, laid_out.mesh)
        self._reduces_each = leaves is not None and not leaves.is_local
        # of a group that a fraction cuts in two, all leaves
        self.units = made_once(self.planned, self._work)
        uses = [(number, unit.uses) for number, unit in enumerate(laid_out.model.units)]
        # to which a forward comes again at its end, and a backward first
        self._again = [number for number, times in uses for _ in range(times - 1)]
        self._last = -1  # the last job of compute
        self._joined: list[int] = []  # what compute waits for next
        self._gathers: dict[int, list[int]] = {}  # unit -> the last job of its gather
        self._columns: set[int] = set()  # units that keep a part for their backward
        self._reduces: dict[int, tuple[int, int]] = {}  # unit -> its bucket, the last job
        numbers = list(range(len(self.units)))
        self.schedule.expect("forward", [*numbers, *self._again])
        self.schedule.expect("backward", [*self._again, *reversed(numbers)])

    def _work(self, unit: PlannedUnit) -> UnitWork:
        groups = unit.groups
        forward = self.tasks(groups, (group.routes.unshard_forward for group in groups))
        backward = self.tasks(groups, (group.routes.unshard_backward for group in groups))
        # what compute keeps for the backward, it copies when it releases the rest
        ways = {"forward": tuple(task for task in forward if task.lane != "compute")}
        keep = tuple(task for task in forward if task.lane == "compute")
        ways["backward"] = backward
        return UnitWork(unit, *self._durations.compute(groups[0].one.unit), ways, keep)

    def build(self) -> None:
        """Enqueue one step: all micro-batches, then the optimizer."""
        count = len(self.units)
        self.run(self.schedule.publish())
        for micro_batch in range(self._durations.training.micro_batches):
            self.begin("forward")
            # a tied unit is used again at the end, with the product with the vocabulary
            for at, number in enumerate([*range(count), *self._again]):
                self.need(number)
                task = self.units[number].forward
                is_later = at < count and number in self._again
                self._compute(replace(task, duration=0.0) if is_later else task, number)
                self.release(number)
            self._backwards(micro_batch)
        self.run(self.schedule.reduces.finish())
        self.build_tail()

    def build_tail(self) -> None:
        """Enqueue what follows the last reduce of a step: averages, the step, and what it
        publishes. The device's part is stepped at once, others each where their states rest.
        """
        joined: list[int] = []
        for number, unit in enumerate(self.units):
            tasks = self.tasks(unit.trained, (group.routes.average for group in unit.trained))
            joined += self._send(tasks, number)[-1:]
        self._joined += joined
        moved = 0.0
        for unit in self.units:
            if not unit.steps_off_device:
                state, grad = self._stepped_bytes(unit)
                # gradients are read to be stepped, and before that to be divided and checked
                moved += 2 * state + grad + self._averaging(grad)
        if moved:
            task = self._durations.in_memory("compute", "step", moved, STEP)
            seconds = task.duration + self._durations.newton_schulz(self._policy)
            self._compute(replace(task, duration=seconds), -1)
        steps: list[int] = []
        writes: list[int] = []
        for number, unit in enumerate(self.units):
            if unit.steps_off_device:
                self._step_off_device(number, steps, writes)
            hops = [
                [hop for hop in group.routes.publish if hop.lane != "gather"]
                for group in unit.trained
            ]
            self._send(self.tasks(unit.trained, hops), number, steps[-1:])

    def tasks(
        self, groups: Iterable[PlannedGroup], routes: Iterable[Iterable[Hop]]
    ) -> tuple[LaneTask, ...]:
        """Return the tasks of one route for each group."""
        return tuple(
            task
            for group, route in zip(groups, routes, strict=True)
            for hop in route
            for task in self._durations.hop(hop, group.one.layout.numel, mapped=group.is_mapped)
        )

    def reduce_tasks(self, group: PlannedGroup, route: Route) -> list[LaneTask]:
        """Return the tasks of one reduce, with the copy of the gradient where no cast is it."""
        tasks = list(self.tasks([group], [route]))
        if all(hop.lane != "compute" for hop in route):
            tasks.insert(0, self._durations.grad_copy(group.one.layout.numel, group.formats))
        return tasks

    # ------------------------------------------------------------------------------ enqueueing

    def _add(self, task: LaneTask, unit: int, needs: Iterable[int]) -> int:
        name = self._durations.laid_out.model.units[unit].name if unit >= 0 else ""
        self.jobs.append(LaneJob(task, name, tuple(need for need in needs if need >= 0)))
        return len(self.jobs) - 1

    def _compute(self, task: LaneTask, unit: int, needs: Iterable[int] = ()) -> int:
        """Enqueue `task` on compute, after what compute has joined."""
        self._last = self._add(task, unit, (*self._joined, *needs))
        self._joined.clear()
        return self._last

    def _send(self, tasks: Iterable[LaneTask], unit: int, needs: Iterable[int] = ()) -> list[int]:
        """Enqueue `tasks` one after another, after what compute was given; return their jobs."""
        sent: list[int] = []
        before = (*needs, *self._joined, self._last)
        for task in tasks:
            enqueue = self._compute if task.lane == "compute" else self._add
            sent.append(enqueue(task, unit, before))
            before = (sent[-1],)
        return sent

    def _mark(self, job: int, at_stop: bool, state: str, num_bytes: float) -> None:
        if num_bytes:
            self.marks.append(LevelChange(job, at_stop, state, num_bytes))

    # ------------------------------------------------------------------------------ the schedule

    def execute(self, command: Command, repeats: int) -> None:
        """Enqueue the jobs of one command, and mark its memory."""
        op, number = command.op, command.unit
        if op is Op.START:
            self._start(number)
        elif op is Op.WAIT:
            self._joined += self._gathers.pop(number, [])
        elif op in RELEASES:
            planned = self.planned[number]
            if op is Op.RELEASE_FOR_BACKWARD and number not in self._columns:
                for task in self.units[number].keep:
                    self._compute(task, number)
                self._mark(self._last, True, "kept", planned.column)
                self._columns.add(number)
            elif op is Op.RELEASE_ALL and number in self._columns:
                self._mark(self._last, True, "kept", -planned.column)
                self._columns.discard(number)
            self._mark(self._last, True, "gathered", -planned.full)
        elif op is Op.WAIT_REDUCE:
            self._wait_for_reduce(number)

    def _start(self, number: int) -> None:
        """Start gathering a unit: whole weights that rest stale, as the last step has published
        them; or what rests sharded, from the part that is kept for the backward if there is one.
        """
        unit = self.units[number]
        if self.schedule.units[number].traits.is_published:
            hops = [
                [hop for hop in group.routes.publish if hop.lane == "gather"]
                for group in unit.trained
            ]
            sent = self._send(self.tasks(unit.trained, hops), number)
        else:
            way = "backward" if number in self._columns else "forward"
            sent = self._send(unit.unshard[way], number)
        self._gathers[number] = sent[-1:]
        # what is whole already is copied, which no hop says
        copied = (self._last, True) if self._last >= 0 else (0, False)
        first = (sent[0], False) if sent else copied
        self._mark(*first, "gathered", unit.planned.full)

    def _wait_for_reduce(self, number: int) -> None:
        """Let compute wait for a unit's reduce, and take its buffer back."""
        buffer, job = self._reduces.pop(number)
        self.schedule.reduces.over((number, 0))
        self._joined.append(job)
        self.meter.live -= buffer

    # ------------------------------------------------------------------------------ gradients

    def _backwards(self, micro_batch: int) -> None:
        reduces, micro_batches = self.schedule.reduces, self._durations.training.micro_batches
        self.begin("backward")
        buffers: dict[int, int] = {}  # of units in their backward
        if self._reduces_each:
            micro_batches = micro_batch + 1
        for at, number in enumerate([*self._again, *reversed(range(len(self.units)))]):
            unit, is_first = self.units[number], number not in buffers
            routes = [group.reduce(micro_batch, micro_batches) for group in unit.trained]
            self.need(number)
            if is_first:
                buffers[number] = self._open_bucket(unit, routes)
            task = unit.backward if is_first else replace(unit.backward, duration=0.0)
            last, buffer = self._compute(task, number), buffers[number]
            if is_first:
                self._mark(last, False, "buckets", buffer)
            if at < len(self._again):  # the rest of its gradient comes at the end
                continue
            self.release(number)

            self.run(reduces.before((number, 0)))
            last = on_lane = self._last
            for group, route in zip(unit.trained, routes, strict=True):
                tasks, numel = self.reduce_tasks(group, route), group.one.layout.numel
                writes = [hop for hop in route if hop.kind is Kind.WRITE]
                tasks += [self._durations.arrive(hop, numel) for hop in writes]
                for last in self._send(tasks, number):
                    on_lane = last if self.jobs[last].task.lane == "reduce" else on_lane
            self._mark(on_lane, True, "buckets", -buffer)
            if buffer:
                self._reduces[number] = (buffer, on_lane)
                reduces.start((number, 0), off_device=unit.sums_leave)
            self.run(reduces.handed_over())
            for group in unit.trained if micro_batch == 0 else ():
                self._mark(last, True, "grad", group.resting)

    def _open_bucket(self, unit: UnitWork, routes: Sequence[Route]) -> int:
        """Take a unit's gradient buffer; return its bytes: none where nothing leaves compute."""
        num_bytes = round(
            sum(
                group.one.layout.numel * group.formats.reduce.plain.bytes_per_element
                for group, route in zip(unit.trained, routes, strict=True)
                if any(hop.lane != "compute" for hop in route)
            )
        )
        self.run(self.schedule.reduces.make_room(num_bytes))
        # where no reduce is waited for, a buffer waits for the pool
        while not self.schedule.rules.waits_for_room and self._reduces:
            if num_bytes + sum(buffer for buffer, _ in self._reduces.values()) <= self.pool_bytes:
                break
            self._wait_for_reduce(next(iter(self._reduces)))
        self.meter.live += num_bytes
        return num_bytes

    # ------------------------------------------------------------------------------ the step

    def _stepped_bytes(self, unit: UnitWork) -> tuple[float, float]:
        """Return the bytes of the masters and moments of this rank, and of their gradients."""
        cell, state = self._policy.default.optim, 4.0 + self._durations.training.moment_bytes
        grads = (
            group.bytes_of(cell, group.formats.grad.bytes_per_element) for group in unit.trained
        )
        return sum(group.bytes_of(cell, state) for group in unit.trained), sum(grads)

    @property
    def _divides(self) -> bool:
        """Whether a sum becomes an average by a division: by the ranks, or the loss scale."""
        training = self._durations.training
        return self._durations.laid_out.mesh.size > 1 or training.precision == "fp16"

    def _averaging(self, grad: float) -> float:
        """Return the bytes of a pass over gradients on the device that sees whether they are
        finite, and divides them.
        """
        return (2 if self._divides else 1) * grad

    def _step_off_device(self, number: int, steps: list[int], writes: list[int]) -> None:
        """Step one unit on the host: from disk through a ring, with gradients of the device after a
        copy that the host waits for. Gradients off the device are divided here, a tile at a time:
        in the ring, or in a copy, since what rests stays as it is (state/gradient.py: block).
        """
        durations, unit = self._durations, self.units[number]
        state, grad = self._stepped_bytes(unit)
        on_disk = self._policy.default.optim.tier is Tier.DISK
        grads_leave = unit.sums_leave
        needs = steps[-1:]
        if on_disk:
            last_written = len(writes) - TILE_BUFFERS + 1
            free = [*steps[-TILES_AHEAD - 1 : -TILES_AHEAD], *writes[-TILE_BUFFERS:last_written]]
            read_bytes = state + (
                grad if grads_leave and self._policy.default.grad.tier is Tier.DISK else 0.0
            )
            read = durations.transfer("tier read", "read", read_bytes, disk=True)
            needs = needs + self._send(read, number, free)
        if not grads_leave:
            average = durations.in_memory("compute", "average", self._averaging(grad), STEP)
            needs = needs + self._send([average], number)
        if not grads_leave and (on_disk or durations.machine.accelerator):  # else it lies there
            copy = durations.transfer("tier write", "write", grad, disk=False)
            needs = needs + self._send(copy, number, (*needs[-1:], *steps[-1:]))
        passes = 1
        # A tile fits the caches, so that memory is read once; a rank's own core, as fast as its
        # loads and stores, passes over the tile again.
        if grads_leave and self._divides and not durations.machine.accelerator:
            passes += 2 if on_disk else 4  # read and written, in a copy twice
        steps += self._send([durations.on_host("step", 2 * state + passes * grad)], number, needs)
        if on_disk:
            write = durations.transfer("tier write", "write", state, disk=True)
            writes += self._send(write, number, steps[-1:])[-1:]


# ----------------------------------------------------------------------------------------- the step

_MICRO_BATCHES = 4  # run; more are extrapolated


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and how they pass on compute: computing, or waiting for what bounds."""

    total: float
    shares: Mapping[str, float]

    @property
    def bound_by(self) -> str:
        """Compute where it is at least half of the step, else what takes most of the rest."""
        return longest(self.shares, self.total)

    @property
    def bubble(self) -> float:
        """The part of the step for which ranks wait for other stages, on average."""
        return 0.0


def simulate(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> Timeline:
    """Return the events of rank 0 in one step of `training`, all micro-batches, and its memory.

    The step begins where the last one has ended. Levels are bytes by state: "weight", "master",
    "grad", "optimizer" (from ``exact.rest_bytes``; what rests on another tier is "weight (host)"
    and so on, as in a trace), and beside them on the device "gathered" weights, gradient "buckets"
    and what is "kept" for the backward.
    """
    program = Program(Durations(laid_out, machine, training), policy)
    program.build()
    schedule = run_jobs(program.jobs)
    events = [
        Event(
            cast(Lane, job.task.lane),  # of one rank: nothing is sent to other stages
            job.task.name,
            job.unit,
            start,
            job.task.duration,
            job.task.num_bytes,
        )
        for job, start in zip(schedule.jobs, schedule.starts, strict=True)
    ]
    events += [
        Event("compute", WAIT + schedule.jobs[cause].task.lane, unit, start, stop - start)
        for start, stop, cause, unit in _waits(schedule)
    ]
    # bytes by state, from the beginning on; gradients come to rest in the backward
    now: dict[str, float] = dict.fromkeys(("gathered", "buckets", "kept"), 0.0)
    for state, by_tier in rest_bytes(laid_out, policy, training).items():
        for tier, num_bytes in by_tier.items():
            name = state if tier is Tier.DEVICE else f"{state} ({tier.value})"
            now[name] = 0.0 if name == "grad" else float(num_bytes)
    changes = [
        (
            schedule.stop(mark.job) if mark.at_stop else schedule.starts[mark.job],
            mark.num_bytes > 0,  # what is given back serves what is taken at the same time
            mark.state,
            mark.num_bytes,
        )
        for mark in program.marks
    ]
    levels = [Level(0.0, dict(now))]
    for at, group in groupby(sorted(changes), key=lambda one: one[0]):
        for _, _, state, change in group:
            now[state] += change
        levels.append(Level(at, dict(now)))
    labels = {"policy": policy.name, "model": laid_out.model.name, "machine": machine.name}
    in_order = tuple(sorted(events, key=lambda one: one.start))
    return Timeline(0, 0.0, in_order, tuple(levels), labels)


def step_time(
    laid_out: LaidOut,
    policy: Policy,
    machine: Machine,
    training: Training,
    tensor: TensorParallel = ALONE,
) -> StepTime:
    """Return what one step of `training` takes, with the all-reduces of `tensor`."""
    durations = Durations(laid_out, machine, training, tensor)
    if training.micro_batches <= _MICRO_BATCHES:
        return _step_time(durations, policy)
    most, fewer = (
        _step_time(replace(durations, training=replace(training, micro_batches=number)), policy)
        for number in (_MICRO_BATCHES, _MICRO_BATCHES - 1)
    )
    more = training.micro_batches - _MICRO_BATCHES
    shares = {
        name: seconds + more * (seconds - fewer.shares.get(name, 0.0))
        for name, seconds in most.shares.items()
    }
    return StepTime(most.total + more * (most.total - fewer.total), shares)


def _step_time(durations: Durations, policy: Policy) -> StepTime:
    program = Program(durations, policy)
    program.build()
    schedule = run_jobs(program.jobs)
    tensor_s = durations.tensor_s()
    shares = {COMPUTE: -tensor_s, TENSOR: tensor_s} if tensor_s else {COMPUTE: 0.0}

    def add(name: str, seconds: float) -> None:
        shares[name] = shares.get(name, 0.0) + seconds

    for job in schedule.jobs:
        if job.task.lane == "compute":
            add(job.task.bound_by, job.task.duration)
    for start, stop, cause, _ in _waits(schedule):
        for number, begin, end in schedule.waited_for(start, stop, cause):
            add(schedule.jobs[number].task.bound_by, end - begin)
    return StepTime(schedule.total, shares)


def _waits(schedule: JobTimes) -> list[tuple[float, float, int, str]]:
    """Return when compute had nothing to do: start, stop, the job waited for, and the unit that
    waits ("" at the end of the step).
    """
    on_compute = [at for at, job in enumerate(schedule.jobs) if job.task.lane == "compute"]
    waits = [
        (start, stop, schedule.causes[number], schedule.jobs[number].unit)
        for start, stop, number in schedule.waits(on_compute)
    ]
    idle_from = schedule.stop(on_compute[-1]) if on_compute else 0.0
    total = schedule.total
    if total > idle_from:
        last = max(range(len(schedule.jobs)), key=schedule.stop)
        waits.append((idle_from, total, last, ""))
    return waits
