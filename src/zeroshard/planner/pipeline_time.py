"""One step of a pipeline, predicted: an event-driven simulation of all of its stages.

Each rank has lanes (core/timeline.py): compute runs its schedule's computations in order; gathers,
releases and reduces stand where the engine places them (core/pipeline_orders.py); outputs and
their gradients leave on lanes of their own, one in each direction, and a computation starts when
its input is there. Weights stay gathered over consecutive micro-batches within `room`.

    bubble     of a rank: compute waits for another rank, or for what it sends
    exposed    compute waits for a gather, a reduce or a tier of its own rank

Invariant: with free communication the bubble is (p - 1) / (m + p - 1) of the step for GPipe and
1F1B of p even stages and m micro-batches (arXiv 2104.04473, section 2.2). Many rounds of p
micro-batches are alike: a few run, and the time of the others is added. What is left out: what the
host of a schedule does between its actions, and the exchange of all stages before the optimizer's
step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zeroshard.core.pipeline_orders import RESHARD, UNSHARD, Action, PipelineOrder, place
from zeroshard.core.policy import Policy
from zeroshard.core.timeline import COMPUTE, AnyLane, JobTimes, LaneJob, LaneTask, run_jobs
from zeroshard.planner.durations import TENSOR, Durations
from zeroshard.planner.exact import made_once
from zeroshard.planner.simulate import Program, StepTime, UnitWork

# ------------------------------------------------------------------------------------------ a stage
# The tasks of all units of a stage together, in the hops of the same routes and of the durations
# that simulate.py enqueues one by one.
#
#     F B I W     each computation, with the copies that it ends with
#     unshard     the gathers of all units, before a forward and before a backward
#     publish     of weights that rest whole and stale, before the first forward
#     reduce      of all units' gradients, after a backward (or W): of the first micro-batch, of
#                 others, of the last
#     tail        averages and the optimizer's step
#
# Tasks of several lanes for one purpose (a read, then its gather) are as long as they take
# together, unit by unit.


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
    """Return what a stage does; `durations` knows its model and machine."""
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
    copies = [
        sum(_sum([task for task in tasks if task.lane == "compute"]) for tasks in one)
        for one in reduces
    ]
    publish = made_once(
        units,
        lambda unit: program.tasks(unit.trained, (one.routes.regather for one in unit.trained)),
    )
    program.build_tail()
    tail_s = run_jobs(program.jobs).total
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
        whole_bytes=sum(
            unit.planned.whole for unit in units if unit.unshard["forward"] or unit.planned.full > 0
        ),
        gathered_bytes=sum(unit.planned.full for unit in units),
        tensor_s=durations.tensor_s() / training.micro_batches,
    )


def _sum(tasks: Iterable[LaneTask]) -> float:
    return sum(task.duration for task in tasks)


def _off_compute(units: Sequence[Sequence[LaneTask]]) -> LaneTask | None:
    """Return one task of what leaves compute."""
    left = [[task for task in tasks if task.lane != "compute"] for tasks in units]
    return _together("reduce", "reduce", left)


def _together(lane: AnyLane, name: str, units: Sequence[Sequence[LaneTask]]) -> LaneTask | None:
    """Return one task of `lane` that takes as long as the tasks of all `units`, unit by unit."""
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
        seconds = run_jobs(jobs).total
    slowest = max(every, key=lambda task: task.duration)
    takes = tuple(dict.fromkeys(link for task in every for link in task.takes))
    moved = sum(task.num_bytes for task in every)
    return LaneTask(lane, name, seconds, moved, takes, slowest.bound_by)


# --------------------------------------------------------------------------------------- all stages
BUBBLE = "pipeline bubble"
_BACKWARD = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank in a step, by what its compute lane does: computing, or waiting."""

    computing: float
    bubble: float
    exposed: float
    shares: Mapping[str, float]  # by what bounds each part

    def plus(self, more: float, other: RankTime, less: RankTime) -> RankTime:
        """Return this and `more` times what `other` has more than `less`."""
        names = dict.fromkeys((*self.shares, *other.shares))
        mine, theirs, given = self.shares, other.shares, less.shares
        return RankTime(
            self.computing + more * (other.computing - less.computing),
            self.bubble + more * (other.bubble - less.bubble),
            self.exposed + more * (other.exposed - less.exposed),
            {
                name: mine.get(name, 0.0) + more * (theirs.get(name, 0.0) - given.get(name, 0.0))
                for name in names
            },
        )


@dataclass(frozen=True)
class PipelineTime(StepTime):
    """Seconds of one step, and how they pass on every rank; `shares` are the mean."""

    ranks: tuple[RankTime, ...]

    @classmethod
    def of(cls, total: float, ranks: Sequence[RankTime]) -> PipelineTime:
        """Return the step of these ranks."""
        names = dict.fromkeys(name for one in ranks for name in one.shares)
        shares = {
            name: sum(one.shares.get(name, 0.0) for one in ranks) / len(ranks) for name in names
        }
        return cls(total, shares, tuple(ranks))

    @property
    def bubble(self) -> float:
        """The part of the step for which ranks wait for other stages, on average."""
        return sum(one.bubble for one in self.ranks) / len(self.ranks) / self.total


def room(stages: Sequence[int], ranks: int) -> int:
    """Return the bytes that gathered stages of a rank may take in a plan, the same on each of the
    `ranks`: one stage, or, where a rank has several, two that follow each other.
    """
    return max(sum(sorted(stages[rank::ranks])[-2:]) for rank in range(ranks))


def placed_actions(
    schedule: PipelineOrder, rank: int, ranks: int, micro_batches: int, stage_bytes: Sequence[int]
) -> list[Action]:
    """Return what `rank` does in a step, with gathers where the engine places them within `room`.
    `stage_bytes`: of all stages, what gathering each takes.
    """
    order = schedule.order(rank, ranks, micro_batches)
    budget = room(stage_bytes, ranks)
    sizes = dict(enumerate(stage_bytes))
    return place(order, sizes, budget if budget else None)


@dataclass(frozen=True)
class Pipeline:
    """A schedule over stages: what each does, and how long its output takes to the next."""

    schedule: PipelineOrder
    ranks: int
    micro_batches: int
    stages: Sequence[StageWork]
    sends: Sequence[float]  # seconds from each stage to the next, one fewer
    links: Sequence[str]  # "local" or "network": what each send takes

    def time(self) -> PipelineTime:
        """Return how long one step takes."""
        rounds, left = divmod(self.micro_batches, self.ranks)
        few = (2 if self.ranks <= 16 else 1) * self.ranks + left
        if rounds < 4 or (left and self.schedule.chunks > 1):
            return self._run(self.micro_batches)
        most, fewer = self._run(few + self.ranks), self._run(few)
        more = (self.micro_batches - few) / self.ranks - 1.0
        pairs = zip(most.ranks, fewer.ranks, strict=True)
        ranks = [one.plus(more, one, other) for one, other in pairs]
        return PipelineTime.of(most.total + more * (most.total - fewer.total), ranks)

    def _run(self, micro_batches: int) -> PipelineTime:
        jobs = _Jobs(self, micro_batches)
        for rank in range(self.ranks):
            jobs.add_rank(rank)
        for waits, what in jobs.waiting:  # every computation waits for its input
            jobs.jobs[waits].needs = (*jobs.jobs[waits].needs, jobs.sent[what])
        done = run_jobs(jobs.jobs)
        computed: list[list[int]] = [[] for _ in range(self.ranks)]
        for number, job in enumerate(done.jobs):
            if job.task.lane == "compute":
                computed[job.rank].append(number)
        total, ranks = done.total, []
        for rank, own in enumerate(computed):
            tensor_s = micro_batches * sum(one.tensor_s for one in self.stages[rank :: self.ranks])
            ranks.append(_rank_time(done, own, total, tensor_s))
        return PipelineTime.of(total, ranks)


class _Jobs:
    """The jobs of one step of all ranks."""

    def __init__(self, pipeline: Pipeline, micro_batches: int) -> None:
        self.jobs: list[LaneJob] = []
        self._pipeline = pipeline
        self._micro_batches = micro_batches
        self.sent: dict[tuple[str, int, int], int] = {}  # direction, to a stage, micro-batch
        self.waiting: list[tuple[int, tuple[str, int, int]]] = []  # jobs for what is sent

    def add_rank(self, rank: int) -> None:
        """Enqueue what `rank` does."""
        pipeline = self._pipeline
        own = range(rank, len(pipeline.stages), pipeline.ranks)
        sizes = [stage.whole_bytes for stage in pipeline.stages]
        actions = placed_actions(
            pipeline.schedule, rank, pipeline.ranks, self._micro_batches, sizes
        )
        gathers: dict[int, int] = {}  # of a stage, the job that brings its weights
        for stage in own:
            publish = pipeline.stages[stage].publish
            if publish is not None:
                gathers[stage] = self._add(publish, stage)
        reduces: dict[int, int] = {}
        last = -1
        what_for = phases(actions)
        for at, action in enumerate(actions):
            work = pipeline.stages[action.stage]
            if action.kind == UNSHARD:
                task = work.unshard[what_for[at]]
                if task is not None:
                    gathers[action.stage] = self._add(task, action.stage, last)
            elif action.kind in work.compute:
                needs = [gathers.pop(action.stage, -1)]
                if action.kind in "BW":
                    needs.append(reduces.get(action.stage, -1))
                last = self._compute(work, action, needs, reduces)
            else:  # what a plan reduces follows each backward by itself
                assert action.kind in (RESHARD, "REDUCE_GRAD")
        tails = [work.tail for work in (pipeline.stages[stage] for stage in own) if work.tail]
        for tail in tails:
            self._add(tail, rank, *reduces.values())

    def _compute(
        self, work: StageWork, action: Action, needs: Sequence[int], reduces: dict[int, int]
    ) -> int:
        """Enqueue a computation, and what it sends and reduces."""
        stage, number = action.stage, action.micro_batch or 0
        position = 2 if number == self._micro_batches - 1 else min(1, number)
        task = work.compute[action.kind]
        ends = action.kind in "BW"
        copies = work.copies[position] if ends else 0.0
        if copies:
            task = LaneTask("compute", task.name, task.duration + copies, takes=task.takes)
        job = self._add(task, stage, *needs)
        last = len(self._pipeline.stages) - 1
        # it waits for its input, and sends its output to the next stage in that direction
        ahead = action.kind == "F"
        lane: AnyLane = "send ahead" if ahead else "send back"
        after, until = (stage > 0, stage < last) if ahead else (stage < last, stage > 0)
        if after and action.kind in "FBI":
            self.waiting.append((job, (lane, stage, number)))
        if until and action.kind in "FBI":
            link, to = (stage, stage + 1) if ahead else (stage - 1, stage - 1)
            pipeline = self._pipeline
            takes = (pipeline.links[link], *pipeline.stages[stage].compute["F"].takes)
            send = LaneTask(lane, "send", pipeline.sends[link], 0.0, takes, BUBBLE)
            self.sent[lane, to, number] = self._add(send, stage, job)
        reduce = work.reduce[position] if ends else None
        if reduce is not None:
            reduces[stage] = self._add(reduce, stage, job)
        return job

    def _add(self, task: LaneTask, stage: int, *needs: int) -> int:
        there = tuple(need for need in needs if need >= 0)
        self.jobs.append(LaneJob(task, f"stage {stage}", there, stage % self._pipeline.ranks))
        return len(self.jobs) - 1


def phases(actions: Sequence[Action]) -> dict[int, str]:
    """Return, of each gather in the list, what it is for."""
    out: dict[int, str] = {}
    following: dict[int, str] = {}
    for at in range(len(actions) - 1, -1, -1):
        action = actions[at]
        if action.kind == UNSHARD:
            out[at] = following[action.stage]
        elif action.kind in _BACKWARD:
            following[action.stage] = _BACKWARD[action.kind]
    return out


def _rank_time(done: JobTimes, computed: Sequence[int], total: float, tensor_s: float) -> RankTime:
    """Return how a rank's compute lane, with these jobs, passes the step."""
    rank = done.jobs[computed[0]].rank
    shares: defaultdict[str, float] = defaultdict(float, {COMPUTE: -tensor_s})
    if tensor_s:
        shares[TENSOR] = tensor_s
    computing = exposed = 0.0
    for number in computed:
        task = done.jobs[number].task
        shares[task.bound_by] += task.duration
        computing += task.duration
    for start, stop, number in done.waits(computed):
        left = stop
        for cause, begin, end in done.waited_for(start, stop, done.causes[number]):
            waited, left = done.jobs[cause], begin
            own = waited.rank == rank and waited.task.lane not in ("send ahead", "send back")
            shares[waited.task.bound_by if own else BUBBLE] += end - begin
            exposed += (end - begin) if own else 0.0
        shares[BUBBLE] += left - start
    shares[BUBBLE] += total - done.stop(computed[-1])
    return RankTime(computing, total - computing - exposed, exposed, dict(shares))
