"""Execute a schedule's commands on the weights of one engine's units.

    hooks --> Loop --> Weights.need(unit)      the schedule decides       core/schedule
                       Weights.run(commands)   START, WAIT, RELEASE       runtime/unit.py

Beside that it knows under which step the weights are valid (`epoch`), whether states may be used
at all (`availability`), and whether the user sees what rests. Invariant: no decision is made here
about what is gathered, ahead or released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._C._functorch import peek_interpreter_stack as peek_stack  # is None in no transform
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from zeroshard.core.digest import Digest
from zeroshard.core.precision import dtype_name
from zeroshard.core.residency import UnitState
from zeroshard.core.schedule import Command, Commands, Op, Phase, Schedule, Until
from zeroshard.errors import StallError, StateError
from zeroshard.memory import Trimmer
from zeroshard.runtime.availability import Availability
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.streams import Streams
from zeroshard.runtime.unit import Unit

# what a release keeps for a backward; see FlatWeights.keep
_FOR_BACKWARD = {Op.RELEASE_ALL: False, Op.RELEASE_FOR_BACKWARD: True, Op.RELEASE_GATHERED: None}
_SAME_UNITS = (
    "; where weights are encoded (comm.weight_codec), go over sockets or rest off the device, every"
    " rank gathers the same units: if ranks run other modules (experts), let the module that holds"
    " them be the unit, with units=[its class]"
)


class Weights:
    """The gathered weights of all units."""

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        wait_for_reduce: Callable[[Command], None],
        *,
        streams: Streams,
        digest: Digest,
        trimmer: Trimmer,
    ) -> None:
        """`schedule`: of the units' residencies; `wait_for_reduce` executes its commands on
        reduces.
        """
        self.units = tuple(units)
        self.schedule = schedule
        # steps, writebacks and loads so far: what a forward's weights are valid under
        self.epoch = 0
        self.availability = Availability()
        self._wait_for_reduce = wait_for_reduce
        self._trimmer = trimmer
        self._streams = streams
        self.digest = digest
        # the units, as a hook names them, with a backward under way in a graph task, and none to be
        # released: another gradient at an output of theirs needs nothing
        self.served: Sequence[Unit] | None = None
        self.served_in = -1
        self._ordered = schedule.rules.ordered
        self._phase: Phase = "forward"  # of the last need
        self._steps_elsewhere = any(unit.steps_elsewhere for unit in units)
        # whether each gathered() context, in which the user sees what rests, holds every unit
        self.shown: list[bool] = []
        self._tell: Callable[[int | None], object] | None = None

    @property
    def nothing_to_do(self) -> bool:
        """Whether a forward needs nothing of us: every unit is held, and no backward can follow."""
        return any(self.shown) and not torch.is_grad_enabled()

    # ------------------------------------------------------------------ executing commands

    def run(self, commands: Commands, *, forks: bool = True) -> None:
        """Execute `commands`, one after another. `forks`: every gather starts after what compute
        was given; else the first one alone does, for all.
        """
        fork = True
        for command in commands:
            op, unit = command.op, self.units[command.unit]
            if op is Op.START:
                if self._ordered:
                    if self._tell is not None:
                        self._tell(unit.index)
                    # a collective of every rank begins for each segment
                    every = unit.gathered_segments if unit.may_have_no_news else unit.segments
                    for segment in every:
                        flat = segment.flat
                        if not flat.is_local:
                            dtype, among = dtype_name(flat.dtype), flat.context.holders.members
                            size = flat.layout.numel
                            self.digest.fold("gather", unit.name, dtype, size, among, ordered=True)
                unit.unshard(self._streams, raw=bool(self.shown)).go(fork=fork)
                fork = forks
            elif op is Op.WAIT:
                flight = unit.landing()
                try:
                    if peek_stack() is None:
                        flight.wait()
                    else:
                        with temporarily_clear_interpreter_stack():  # not its copies to follow
                            flight.wait()
                except StallError as error:
                    raise StallError(f"{error}{_SAME_UNITS if self._ordered else ''}") from None
                unit.attach()
            elif op is Op.USE:
                self._use(unit)
            elif op in _FOR_BACKWARD:
                num_bytes = unit.reshard(for_backward=_FOR_BACKWARD[op])
                if self._trimmer.is_on:
                    self._trimmer.passed(num_bytes)
            elif op is Op.IDLE:
                unit.mark_idle()
            elif op is Op.RESUME:
                if self._tell is not None and unit.residency.traits.is_kept:
                    self._tell(unit.index)
                unit.resume()
            elif op is Op.ADVANCE:
                unit.advance()
            else:
                self._wait_for_reduce(command)

    def _use(self, unit: Unit) -> None:
        if self._ordered and unit.full_bytes:  # gathered in one order, used in another: differs
            flat = unit.segments[0].flat
            dtype, among = dtype_name(flat.dtype), flat.context.holders.members
            self.digest.fold(self._phase, unit.name, dtype, flat.layout.numel, among, ordered=True)

    # ------------------------------------------------------------------ passes

    def begin(self, phase: Phase, *, repeats: bool = False) -> None:
        """Start a pass over the model, which `repeats` itself: see Schedule.begin."""
        self.availability.check_open()
        self.run(self.schedule.begin(phase, repeats=repeats))

    def end_pass(self, *, repeats: bool = False) -> None:
        """A forward or backward of the whole model is over."""
        self.run(self.schedule.end_pass(repeats=repeats, keeps=torch.is_grad_enabled()))
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell(None)

    def tell_gathers(self, tell: Callable[[int | None], object]) -> None:
        """Call `tell` with each unit that the next pass needs, and with None at its end."""
        self._tell = tell

    def enter(self, *, evaluates: bool | None = None) -> None:
        """A forward begins, of the model where it is known whether it `evaluates`."""
        if self.availability.refusal is not None:
            self.availability.check_open()
        self.schedule.enter(evaluates)

    def leave(self, *, evaluates: bool | None = None) -> None:
        """A forward ends."""
        graph = torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0
        if commands := self.schedule.leave(evaluates, graph=graph):
            self.run(commands)

    def end_backward(self) -> None:
        """A backward is over, and its graph is gone."""
        self.run(self.schedule.end_backward())

    def end_step(self) -> None:
        """The weights have changed: no unit is held for a graph any more."""
        self.run(self.schedule.end_step())

    # ------------------------------------------------------------------ one unit

    def serve(self, units: Sequence[Unit] | None, task: int = -1) -> None:
        """Note that `units` are here for a backward, in a graph task; None: look again."""
        self.served, self.served_in = units, task

    def unshard(self, unit: Unit, phase: Phase) -> None:
        """Return with `unit` gathered, and the units expected next on their way."""
        if commands := self.need(unit, phase):
            self.run(commands)

    def need(self, unit: Unit, phase: Phase) -> Commands:
        """Return the commands that gather `unit`, and start those expected next, to be `run`.
        Raises StateError where `unit` cannot be gathered.
        """
        self._check(unit, phase)
        return self.schedule.need(unit.residency, phase, keeps=torch.is_grad_enabled())

    def hold(self, unit: Unit, phase: Phase, until: Until) -> None:
        """Gather a unit that is used outside its modules, and keep it at least `until` then."""
        self._check(unit, phase)
        self.run(self.schedule.hold(unit.residency, phase, until, keeps=torch.is_grad_enabled()))

    def _check(self, unit: Unit, phase: Phase) -> None:
        """`unit` is needed in a pass: raise StateError where it cannot be gathered."""
        if self.availability.refusal is not None:
            self.availability.check_open()
        self.digest.enter(phase, unit.name)
        self._phase = phase
        state = unit.residency.state
        if state is not UnitState.FULL:
            transforms = peek_stack() is not None or forward_ad._current_level >= 0
            if transforms and unit.residency.traits.is_sharded:
                raise StateError(
                    f"unit {unit.name!r} would be gathered inside a transform (torch.vmap,"
                    " torch.func.grad, jvp, forward-mode AD), which cannot follow memory that is"
                    " released: run the transform inside engine.gathered(), on every rank"
                )
            if state is UnitState.RESTING:
                self.availability.check_gather()

    def hold_stage(self, units: Sequence[Unit]) -> None:
        """A schedule computes with `units` from here on: start what is not here, and keep all."""
        if any(unit.residency.state is UnitState.RESTING for unit in units):
            self.availability.check_gather()
        held = [unit.residency for unit in units]
        self.run(self.schedule.hold_stage(held, keeps=torch.is_grad_enabled()))

    def release_stage(self, units: Sequence[Unit]) -> None:
        """It does so no longer: release those that nothing else uses."""
        self.run(self.schedule.release_stage([unit.residency for unit in units]))

    def after_forward(self, unit: Unit, *, recomputed: bool = False) -> None:
        """A module of `unit` has run; see Schedule.after_forward."""
        keeps = torch.is_grad_enabled()
        commands = self.schedule.after_forward(unit.residency, keeps=keeps, recomputed=recomputed)
        if commands:
            self.run(commands)

    def after_backward(self, unit: Unit) -> None:
        """The backward of `unit` is over."""
        self.served = None
        if commands := self.schedule.after_backward(unit.residency):
            self.run(commands)

    def release_unused(self, unit: Unit) -> None:
        """Release a unit that rests sharded and that nothing uses."""
        self.run(self.schedule.release_unused(unit.residency))

    def bring_to_rest(self, unit: Unit) -> None:
        """Release a unit, whatever it is here for."""
        self.run(self.schedule.bring_to_rest(unit.residency))

    def finish_gathers(self) -> None:
        """Wait for the gathers that nobody has used, and release units that rest sharded."""
        self.finish_published()
        for unit in self.units:
            if unit.residency.state is UnitState.GATHERING:
                self.bring_to_rest(unit)

    def finish_published(self) -> None:
        """Wait until the weights are here that rest whole, as the last step has published them."""
        for unit in self.units:
            if not unit.residency.traits.is_sharded:
                self.run(self.schedule.finish(unit.residency))

    # ------------------------------------------------------------------ what rests has changed

    @contextmanager
    def showing(self, units: Sequence[Unit]) -> Iterator[None]:
        """Show the user `units`, which the caller holds: gather what rests, without a codec."""
        everything = len(units) == len(self.units)
        self.shown.append(everything)
        for unit in units:
            if unit.is_coded and not unit.residency.in_use:
                self.bring_to_rest(unit)
        try:
            yield
        finally:
            if everything in self.shown:  # else an exception has ended it
                self.shown.remove(everything)

    def refresh(self, units: Iterable[Unit]) -> None:
        """The user's numbers have been written into `units`: what is gathered now is gathered
        anew, and older forwards cannot run backward.
        """
        self.epoch += 1
        for unit in units:
            residency = unit.residency
            if residency.state is UnitState.FULL and residency.traits.is_sharded:
                self.bring_to_rest(unit)
                if residency.is_held:
                    self.unshard(unit, "read")

    def invalidate(self, *, frozen: bool = False) -> None:
        """A step, writeback or load has written the shards (the last two also of `frozen`
        weights): replicated copies are stale, and their publish starts.
        """
        self.epoch += 1
        self.end_step()
        for unit in self.units:
            for segment in unit.segments:
                segment.invalidate(frozen=frozen)
        # one fork for all, unless compute waits for a step between these gathers
        self.run(self.schedule.publish(), forks=self._steps_elsewhere)

    def shadow(self, phase: Phase, order: Iterable[int] | None) -> Iterator[Unit]:
        """Take part in the gathers of a pass that only other ranks run, and that has begun here;
        yields each unit while it is gathered.

        `order` None: as in the last pass (before any: as defined). One-sided transports need
        nothing of us and yield nothing.
        """
        if order is None and (order := self.schedule.last_pass(phase)) is None:
            order = range(len(self.units))[:: 1 if phase == "forward" else -1]
        for unit in map(self.units.__getitem__, order if self._ordered else ()):
            self.unshard(unit, phase)
            yield unit
            self.after_backward(unit) if phase == "backward" else self.after_forward(unit)
            # where it comes next in the order, another unit was needed between the two
            self.run(self.schedule.release_idle(torch.is_grad_enabled()))

    @property
    def segments(self) -> Iterator[Segment]:
        """The segments of every unit."""
        return (segment for unit in self.units for segment in unit.segments)

    def abandon(self) -> None:
        """Release every unit and forget the recorded order, after an exception: ranks may have
        stopped at different points.
        """
        self.shown.clear()
        self._tell = self.served = None
        self.schedule.reset()
        for unit in self.units:
            unit.abandon()
