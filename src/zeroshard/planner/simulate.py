"""One optimizer step, predicted: an event-driven simulation of the routes in the engine's order.

    simulate(...)   the events and levels of one rank, as a trace measures them (core/timeline.py)
    step_time(...)  how long the step takes, and what bounds it

lanes.py runs the jobs that program.py enqueues, for as long as durations.py says. Many
micro-batches are alike: `step_time` runs four and adds the time of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

from zeroshard.core.placement import Tier
from zeroshard.core.policy import Policy
from zeroshard.core.route import Lane
from zeroshard.core.timeline import WAIT, Event, Level, Timeline
from zeroshard.planner.beside import ALONE, TensorParallel
from zeroshard.planner.durations import TENSOR, Durations
from zeroshard.planner.exact import LaidOut, rest_bytes
from zeroshard.planner.lanes import COMPUTE, JobTimes, longest, run
from zeroshard.planner.machine import Machine
from zeroshard.planner.program import Program
from zeroshard.planner.training import Training

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


def simulate(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> Timeline:
    """Return the events of rank 0 in one step of `training`, all micro-batches, and its memory.

    The step begins where the last one has ended. Levels are bytes by state: "weight", "master",
    "grad", "optimizer" (those of ``exact.rest_bytes``; what rests on another tier is "weight
    (host)" and so on, as in a trace), and beside them on the device "gathered" weights, gradient
    "buckets" and what is "kept" for the backward.
    """
    program = Program(Durations(laid_out, machine, training), policy)
    program.build()
    schedule = run(program.jobs)
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
    levels = _levels(program, schedule, laid_out, policy, training)
    labels = {"policy": policy.name, "model": laid_out.model.name, "machine": machine.name}
    return Timeline(0, 0.0, tuple(sorted(events, key=lambda one: one.start)), levels, labels)


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
    schedule = run(program.jobs)
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


def _levels(
    program: Program, schedule: JobTimes, laid_out: LaidOut, policy: Policy, training: Training
) -> tuple[Level, ...]:
    """Return the bytes by state, from the beginning on; gradients come to rest in the backward."""
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
    return tuple(levels)
