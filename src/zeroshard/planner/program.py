"""The jobs of one step of one rank, in the order in which the engine enqueues them.

    gather     what the last step has published | the unit after the one that computes ...
    compute    forward 0, 1, ... n | backward n, ... 1, 0 | step
    reduce     each unit's gradients when its backward is over
    tiers      reads before gathers, writes after reduces; the step's own

It follows runtime/: a unit is gathered ahead as far as the order of the last pass and the budget go
(prefetch.py, budget.py), by a lane that first waits for what compute was given before (streams.py:
fork); a gradient buffer that does not fit the budget waits for the oldest reduce (reductions.py:
make_room); the optimizer's step waits for all of them (finalize.py); what rests off the device is
stepped by the host, a unit at a time (optim/runner.py). A step begins where the last one has ended:
with the gathers that it has published, where weights rest whole.

Invariant: each hop of ``exact.step_routes`` is one task, once. What is left out: the host's own
time, the exchange before a step, clipping, and gathers that give way to others (there are none
where every step runs in the same order).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zeroshard.core.placement import Cell, Cells, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.route import Hop, Kind, Route, Routes, routes
from zeroshard.core.wire import Formats
from zeroshard.planner.durations import STEP, Durations
from zeroshard.planner.exact import Cut, LaidOutGroup, cells_by_unit
from zeroshard.planner.lanes import Job, Task
from zeroshard.planner.training import Training

__all__ = ["Group", "Mark", "Program", "Unit"]

_IN_FLIGHT = 2  # reduces whose sums rest on another tier: runtime/reductions.py
_RING, _AHEAD = 4, 2  # tiles on disk: optim/runner.py


@dataclass(frozen=True, slots=True)
class Mark:
    """Memory of the device, taken (or given back) where a job starts or, `at_stop`, ends."""

    job: int
    at_stop: bool
    state: str
    num_bytes: float


@dataclass(frozen=True)
class Group:
    """A group with its cells, routes and formats."""

    one: LaidOutGroup
    cut: Cut
    cells: Cells
    routes: Routes
    formats: Formats

    def bytes_of(self, cell: Cell, per_element: float) -> float:
        """Return the bytes of a trained group's state in `cell` on rank 0."""
        return self.one.held(cell, 0) * per_element if self.one.group.trained else 0.0

    @property
    def resting_bytes(self) -> float:
        """The bytes of its gradient that rest on the device."""
        cell, size = self.cells.grad, self.formats.grad.bytes_per_element
        if cell.tier is Tier.DEVICE:
            return self.bytes_of(cell, size)
        return 0.0 if cell.is_partial else self.cut.grad * size  # sums that wait are never cut

    def reduce(self, number: int, micro_batches: int) -> Route:
        """Return the reduce of micro-batch `number`: see Routes.step, inside no_sync."""
        routes, again = self.routes, number > 0
        route = routes.reduce if number == micro_batches - 1 else routes.reduce_partial
        return route.taken(held=routes.holds and again, again=not routes.holds and again)


@dataclass(frozen=True)
class Unit:
    """What one kind of unit does."""

    groups: tuple[Group, ...]
    forward: Task
    backward: Task
    unshard: dict[str, tuple[Task, ...]]  # by phase
    keep: tuple[Task, ...]  # after a forward, for its backward
    whole_bytes: float  # of its weights, wherever they are
    gathered_bytes: float  # that gathering takes beyond what rests
    kept_bytes: float  # of the part kept between forward and backward

    @property
    def trained(self) -> tuple[Group, ...]:
        """The groups that have gradients."""
        return tuple(group for group in self.groups if group.one.group.trained)

    @property
    def sums_leave(self) -> bool:
        """Whether sums of gradients rest on another tier."""
        return any(group.cells.grad.tier is not Tier.DEVICE for group in self.trained)

    @property
    def steps_off_device(self) -> bool:
        """Whether the host steps the unit."""
        return any(group.cells.optim.tier is not Tier.DEVICE for group in self.trained)


class Program:
    """The jobs of one step, and the memory that they take beside what rests."""

    def __init__(self, durations: Durations, policy: Policy) -> None:
        self.jobs: list[Job] = []
        self.marks: list[Mark] = []
        self._durations = durations
        self._policy = policy
        laid_out, training = durations.laid_out, durations.training
        made: dict[int, Unit] = {}
        self.units: list[Unit] = []
        placed = list(cells_by_unit(laid_out, policy, training))
        for kind, groups in zip(laid_out.alike, placed, strict=True):
            # one that a fraction cuts in two leaves as a whole
            if id(groups) not in made:
                made[id(groups)] = self._make(kind, [self._group(*one, training) for one in groups])
            self.units.append(made[id(groups)])
        uses = [(number, unit.uses) for number, unit in enumerate(laid_out.model.units)]
        # to which a forward comes again at its end, and a backward first
        self._again = [number for number, times in uses for _ in range(times - 1)]
        self._largest = max((unit.whole_bytes for unit in self.units), default=0.0)
        # runtime/budget.py: where the host runs ahead, two reduces are under way
        self.budget = (3 + durations.machine.accelerator) * self._largest
        self._live = 0.0
        self._last = -1  # the last job of compute
        self._joined: list[int] = []  # what compute waits for next
        self._gathers: dict[int, list[int]] = {}  # unit -> the last job of its gather
        self._ahead: dict[int, float] = {}  # unit -> bytes gathered and not used yet
        self._here: set[int] = set()  # units that are gathered
        self._reduces: dict[int, tuple[float, int]] = {}  # unit -> its buffer, the last job

    def build(self) -> None:
        """Enqueue one step: all micro-batches, then the optimizer."""
        self._regather()
        for number in range(self._durations.training.micro_batches):
            self._forwards()
            self._backwards(number)
        self._wait_for_reduces(0)
        self.build_tail()

    def build_tail(self) -> None:
        """Enqueue what follows the last reduce of a step."""
        self._average()
        self._step()

    def _group(self, one: LaidOutGroup, cut: Cut, cells: Cells, training: Training) -> Group:
        formats = one.formats(training)
        mesh = self._durations.laid_out.mesh
        of = routes(cells, mesh, formats, node_sums=self._policy.sums_nodes)
        return Group(one, cut, cells, of, formats)

    def _make(self, number: int, groups: Sequence[Group]) -> Unit:
        durations = self._durations
        gathered = kept = whole = 0.0
        for group in groups:
            numel, hops = group.one.layout.numel, group.routes.unshard_forward.hops
            num_bytes = numel * group.formats.weight.bytes_per_element
            whole += num_bytes
            if hops and not all(durations.is_mapped(hop, group.cells) for hop in hops):
                gathered += num_bytes
            kept += sum(hop.held_bytes(hop.target, numel) for hop in hops if hop.kind is Kind.KEEP)
        forward = self.tasks(groups, (group.routes.unshard_forward for group in groups))
        backward = self.tasks(groups, (group.routes.unshard_backward for group in groups))
        # what compute keeps for the backward, it copies when it releases the rest
        ways = {"forward": tuple(task for task in forward if task.lane != "compute")}
        keep = tuple(task for task in forward if task.lane == "compute")
        ways["backward"] = backward
        compute = durations.compute(number)
        return Unit(tuple(groups), *compute, ways, keep, whole, gathered, kept)

    def tasks(self, groups: Iterable[Group], routes: Iterable[Iterable[Hop]]) -> tuple[Task, ...]:
        """Return the tasks of one route for each group."""
        return tuple(
            task
            for group, route in zip(groups, routes, strict=True)
            for hop in route
            for task in self._durations.hop(hop, group.one.layout.numel, group.cells)
        )

    # ------------------------------------------------------------------------------ enqueueing

    def _add(self, task: Task, unit: int, needs: Iterable[int]) -> int:
        name = self._durations.laid_out.model.units[unit].name if unit >= 0 else ""
        self.jobs.append(Job(task, name, tuple(need for need in needs if need >= 0)))
        return len(self.jobs) - 1

    def _compute(self, task: Task, unit: int, needs: Iterable[int] = ()) -> int:
        """Enqueue `task` on compute, after what compute has joined."""
        self._last = self._add(task, unit, (*self._joined, *needs))
        self._joined.clear()
        return self._last

    def _send(self, tasks: Iterable[Task], unit: int, needs: Iterable[int] = ()) -> list[int]:
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
            self.marks.append(Mark(job, at_stop, state, num_bytes))

    # ------------------------------------------------------------------------------ weights

    def _regather(self) -> None:
        """Whole weights that rest stale come together: the last step has started it."""
        for number, unit in enumerate(self.units):
            hops = [_on_gather(group.routes.publish) for group in unit.trained]
            self._gathers[number] = self._send(self.tasks(unit.trained, hops), number)[-1:]

    def _start(self, number: int, phase: str) -> None:
        """Start gathering a unit."""
        unit = self.units[number]
        sent = self._send(unit.unshard[phase], number)
        self._here.add(number)
        self._gathers[number] = sent[-1:]
        self._live += unit.gathered_bytes
        # what is kept whole is copied, which no hop says
        first = (sent[0], False) if sent else (self._last, True)
        self._mark(*first, "gathered", unit.gathered_bytes)

    def _unshard(self, number: int, phase: str, following: Iterable[tuple[int, str]]) -> list[int]:
        """Return the jobs after which `number` may be used; start gathering those `following`, each
        for a phase, as far as the budget goes.
        """
        unit = self.units[number]
        if number not in self._here and (unit.unshard[phase] or unit.gathered_bytes):
            self._make_room(unit.gathered_bytes)
            self._start(number, phase)
        self._ahead.pop(number, None)
        left = self.budget - self._live
        allowed = min(left, self._largest - sum(self._ahead.values()))
        for other, then in following if unit.gathered_bytes and allowed > 0 else ():
            if other in self._here:
                continue
            size = self.units[other].gathered_bytes
            allowed -= size
            if allowed < 0:
                break
            if size:
                self._ahead[other] = size
                self._start(other, then)
        return self._gathers.pop(number, [])

    def _release(self, number: int) -> None:
        if number in self._here:
            self._here.discard(number)
            size = self.units[number].gathered_bytes
            self._live -= size
            self._mark(self._last, True, "gathered", -size)

    # ------------------------------------------------------------------------------ passes

    def _forwards(self) -> None:
        # a unit that is tied comes back from where a backward would find it
        passes = [(number, "forward") for number in range(len(self.units))]
        passes += [(number, "backward") for number in self._again]
        for at, (number, phase) in enumerate(passes):
            unit, later = self.units[number], at < len(self.units) and number in self._again
            needs = self._unshard(number, phase, passes[at + 1 :])
            # of a tied embedding, the product with the vocabulary is at the end
            task = replace(unit.forward, duration=0.0) if later else unit.forward
            self._compute(task, number, needs)
            if phase == "forward":
                for task in unit.keep:
                    self._compute(task, number)
                self._mark(self._last, True, "kept", unit.kept_bytes)
            if self._policy.default.between.is_sharded:
                self._release(number)
            elif number in self._here and phase == "forward":
                self._live -= unit.gathered_bytes  # kept beside the budget, until its backward

    def _backwards(self, micro_batch: int) -> None:
        micro_batches = self._durations.training.micro_batches
        order = [*self._again, *reversed(range(len(self.units)))]
        passes = [(number, "backward") for number in order]
        buffers: dict[int, float] = {}  # of units whose backward has begun
        for at, number in enumerate(order):
            unit, is_first = self.units[number], number not in buffers
            routes = [group.reduce(micro_batch, micro_batches) for group in unit.trained]
            needs: list[int] = []
            if is_first:
                needs, buffers[number] = self._begin_backward(number, routes, passes[at + 1 :])
            task = unit.backward if is_first else replace(unit.backward, duration=0.0)
            job, buffer = self._compute(task, number, needs), buffers[number]
            if is_first:
                self._mark(job, False, "buckets", buffer)
            if at < len(self._again):  # the rest of its gradient comes at the end
                continue
            self._release(number)
            self._mark(job, True, "kept", -unit.kept_bytes)
            last = self._reduce(number, routes, buffer)
            for group in unit.trained if micro_batch == 0 else ():
                self._mark(last, True, "grad", group.resting_bytes)

    def _begin_backward(
        self, number: int, routes: Sequence[Route], following: Iterable[tuple[int, str]]
    ) -> tuple[list[int], float]:
        """Gather a unit, and take its gradient buffer; return the jobs to wait for, and its size:
        none where nothing leaves compute.
        """
        unit = self.units[number]
        if number in self._here and not self._policy.default.between.is_sharded:
            self._live += unit.gathered_bytes
        needs = self._unshard(number, "backward", following)
        buffer = sum(
            group.one.layout.numel * group.formats.reduce.plain.bytes_per_element
            for group, route in zip(unit.trained, routes, strict=True)
            if any(hop.lane != "compute" for hop in route)
        )
        if buffer:
            self._make_room(buffer)
            self._live += buffer
        return needs, buffer

    # ------------------------------------------------------------------------------ gradients

    def _reduce(self, number: int, routes: Sequence[Route], buffer: float) -> int:
        """Enqueue a unit's reduces after its backward; return the last job."""
        if number in self._reduces:  # of the micro-batch before
            self._wait_for_reduce(number)
        last = on_lane = self._last
        for group, route in zip(self.units[number].trained, routes, strict=True):
            tasks = list(self.tasks([group], [route]))
            numel = group.one.layout.numel
            tasks += [self._durations.arrive(hop, numel) for hop in route if hop.kind is Kind.WRITE]
            if all(hop.lane != "compute" for hop in route):  # no cast, which would be the copy
                tasks.insert(0, self._durations.grad_copy(numel, group.formats))
            for last in self._send(tasks, number):
                on_lane = last if self.jobs[last].task.lane == "reduce" else on_lane
        self._mark(on_lane, True, "buckets", -buffer)
        if buffer:
            self._reduces[number] = (buffer, on_lane)
        if self.units[number].sums_leave:
            self._wait_for_reduces(_IN_FLIGHT)
        return last

    def _wait_for_reduce(self, number: int) -> None:
        """Let compute wait for a unit's reduce, and take its buffer back."""
        buffer, job = self._reduces.pop(number)
        self._joined.append(job)
        self._live -= buffer

    def _wait_for_reduces(self, left: int) -> None:
        """Wait for reduces, oldest first, until `left` are under way."""
        while len(self._reduces) > left:
            self._wait_for_reduce(next(iter(self._reduces)))

    def _make_room(self, num_bytes: float) -> None:
        """Wait for reduces, oldest first, until `num_bytes` fit the budget."""
        while self._reduces and num_bytes > self.budget - self._live:
            self._wait_for_reduce(next(iter(self._reduces)))

    # ------------------------------------------------------------------------------ the step

    def _average(self) -> None:
        """Bring averages to the ranks that step the same, and wait for them."""
        joined: list[int] = []
        for number, unit in enumerate(self.units):
            tasks = self.tasks(unit.trained, (group.routes.average for group in unit.trained))
            joined += self._send(tasks, number)[-1:]
        self._joined += joined

    def _step(self) -> None:
        """Step the device's part at once, or each unit where its state rests; then publish."""
        durations, moved = self._durations, 0.0
        here = [unit for unit in self.units if not unit.steps_off_device]
        for unit in here:
            state, grad = self._stepped_bytes(unit)
            # gradients are read to be stepped, and before that to be divided and checked
            moved += 2 * state + grad + self._averaging(grad)
        if moved:
            self._compute(durations.in_memory("compute", "step", moved, STEP), -1)
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

    def _stepped_bytes(self, unit: Unit) -> tuple[float, float]:
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
            free = [*steps[-_AHEAD - 1 : -_AHEAD], *writes[-_RING : len(writes) - _RING + 1]]
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
        # A tile fits the caches, so that memory is read once; a rank's own core, whose rate is that
        # of its loads and stores, passes over the tile again.
        if grads_leave and self._divides and not durations.machine.accelerator:
            passes += 2 if on_disk else 4  # read and written, in a copy twice
        steps += self._send([durations.on_host("step", 2 * state + passes * grad)], number, needs)
        if on_disk:
            write = durations.transfer("tier write", "write", state, disk=True)
            writes += self._send(write, number, steps[-1:])[-1:]


def _on_gather(route: Route) -> list[Hop]:
    return [hop for hop in route if hop.lane == "gather"]
