"""What one stage of a pipeline does in a step, and for how long: the tasks of all of its units
together, in the hops of the same routes and of the durations that program.py enqueues one by one.

    F B I W     each computation, with the copies that it ends with
    unshard     the gathers of all units, before a forward and before a backward
    publish     of weights that rest whole and stale, before the first forward
    reduce      of all units' gradients, after a backward (or W): of the first micro-batch, of
                others, of the last
    tail        averages and the optimizer's step

Tasks of several lanes for one purpose (a read, then its gather) are as long as they take together,
unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zeroshard.core.policy import Policy
from zeroshard.planner.durations import Durations
from zeroshard.planner.exact import made_once
from zeroshard.planner.lanes import AnyLane, LaneJob, LaneTask, run
from zeroshard.planner.program import Program, UnitWork


@dataclass(frozen=True)
class StageWork:
    """The tasks of one stage; None: nothing to do."""

    compute: Mapping[str, LaneTask]  # by computation, of any micro-batch
    copies: tuple[float, float, float]  # seconds of compute after a backward; see `reduce`
    unshard: Mapping[str, LaneTask | None]  # before a "forward" or a "backward"
    publish: LaneTask | None
    reduce: tuple[
        LaneTask | None, LaneTask | None, LaneTask | None
    ]  # first, other, last micro-batch
    tail: LaneTask | None
    whole_bytes: int  # of weights that do not rest whole: what is gathered and released
    gathered_bytes: int  # what that takes beyond what rests; none of weights that ranks map
    tensor_s: float  # of a micro-batch's computations: all-reduces along ``tp``


def stage_work(durations: Durations, policy: Policy) -> StageWork:
    """Return what a stage does, whose model and machine `durations` knows."""
    program = Program(durations, policy)
    units, training = program.units, durations.training
    kinds = list(durations.laid_out.alike)
    forward = sum(unit.forward.duration + _sum(unit.keep) for unit in units)
    backward = sum(unit.backward.duration for unit in units)
    weights = sum(map(durations.weights_s, kinds))
    seconds = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
    names = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weights"}
    cores = durations.cores
    last = training.micro_batches - 1

    def after_backward(number: int, unit: UnitWork) -> list[LaneTask]:
        pairs = ((group, group.reduce(number, last + 1)) for group in unit.trained)
        return [task for pair in pairs for task in program.reduce_tasks(*pair)]

    reduces = [  # units of one kind are one object
        made_once(units, partial(after_backward, number)) for number in (0, min(1, last), last)
    ]
    copies = [sum(_sum(_on_compute(tasks)) for tasks in one) for one in reduces]
    publish = made_once(
        units,
        lambda unit: program.tasks(unit.trained, (one.routes.regather for one in unit.trained)),
    )
    program.build_tail()
    tail_s = run(program.jobs).total
    return StageWork(
        compute={
            kind: LaneTask("compute", names[kind], seconds[kind], takes=cores) for kind in seconds
        },
        copies=(copies[0], copies[1], copies[2]),
        unshard={
            phase: _together("gather", phase, [unit.unshard[phase] for unit in units])
            for phase in ("forward", "backward")
        },
        publish=_together("gather", "publish", publish),
        reduce=(_off_compute(reduces[0]), _off_compute(reduces[1]), _off_compute(reduces[2])),
        tail=LaneTask("compute", "step", tail_s, takes=cores, bound_by="optimizer step")
        if tail_s
        else None,
        whole_bytes=sum(unit.held.whole for unit in units if _comes_and_goes(unit)),
        gathered_bytes=sum(unit.held.full for unit in units),
        tensor_s=durations.tensor_s() / training.micro_batches,
    )


def _comes_and_goes(unit: UnitWork) -> bool:
    return bool(unit.unshard["forward"]) or unit.held.full > 0


def _sum(tasks: Iterable[LaneTask]) -> float:
    return sum(task.duration for task in tasks)


def _on_compute(tasks: Iterable[LaneTask]) -> list[LaneTask]:
    return [task for task in tasks if task.lane == "compute"]


def _off_compute(units: Sequence[Sequence[LaneTask]]) -> LaneTask | None:
    """Return one task of what leaves compute."""
    left = [[task for task in tasks if task.lane != "compute"] for tasks in units]
    return _together("reduce", "reduce", left)


def _together(lane: AnyLane, name: str, units: Sequence[Sequence[LaneTask]]) -> LaneTask | None:
    """Return one task of `lane` that takes as long as those of all `units`, each one's in turn."""
    every = [task for tasks in units for task in tasks]
    if not every:
        return None
    if len({task.lane for task in every}) == 1:
        seconds = _sum(every)
    else:
        jobs: list[LaneJob] = []
        for tasks in units:
            for at, task in enumerate(tasks):
                jobs.append(LaneJob(task, name, (len(jobs) - 1,) if at else ()))
        seconds = run(jobs).total
    slowest = max(every, key=lambda task: task.duration)
    takes = tuple(dict.fromkeys(link for task in every for link in task.takes))
    moved = sum(task.num_bytes for task in every)
    return LaneTask(lane, name, seconds, moved, takes, slowest.bound_by)
