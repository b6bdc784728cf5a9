"""When units are gathered, prefetched and released.

The policy's cells decide: sharded ``between`` releases a unit after its forward, sharded ``weight``
after its backward, and a step makes replicated weights stale (their gather is the publish, started
at once and waited for by the next forward).

    unshard(unit): make room . start (unless prefetched) . wait . record . prefetch what ran after
    it last time

Invariants: gathered weights beyond rest and gradient buffers never exceed the budget (budget.py),
unless one pass needs more at the same time; every decision depends on what the ranks share (order
and sizes), never on timing, so that two-sided collectives meet. Cost: one dictionary look-up per
unit that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zeroshard.core.digest import Digest
from zeroshard.core.precision import dtype_name
from zeroshard.errors import StateError
from zeroshard.heap import Trimmer
from zeroshard.runtime.availability import Availability
from zeroshard.runtime.passes import Passes, Until
from zeroshard.runtime.prefetch import Phase, Prefetch
from zeroshard.runtime.streams import Streams
from zeroshard.runtime.unit import Unit, UnitState, Use

__all__ = ["Weights", "in_transform"]


class Weights:
    """The gathered weights of all units."""

    def __init__(
        self,
        units: Sequence[Unit],
        prefetch: Prefetch,
        make_room: Callable[[int], None],
        *,
        streams: Streams,
        digest: Digest,
        ordered: bool,
        trimmer: Trimmer,
    ) -> None:
        """`make_room(num_bytes)` waits for reduces; `ordered`: gathers need every rank, so that all
        gather the same units in the same order.
        """
        self.units = tuple(units)
        # steps, writebacks and loads so far: what a forward's weights are valid under
        self.epoch = 0
        # tests look at the order of events through this
        self.trace: Callable[[str, str], None] | None = None
        self._prefetch = prefetch
        self._wait_for_reduces = make_room
        self._trimmer = trimmer
        self._streams = streams
        self._digest = digest
        self._ordered = ordered
        # units that do not rest, by index
        self._here = {unit.index for unit in units if unit.state is not UnitState.RESTING}
        self._idle: Unit | None = None  # forward over, kept until another unit is needed
        # whether each gathered() context, which shows what rests, holds every unit
        self._shown: list[bool] = []
        self.availability = Availability()
        self.passes = Passes()

    @property
    def nothing_to_do(self) -> bool:
        """Whether a forward needs nothing of us: every unit is held, and no backward can follow."""
        return any(self._shown) and not torch.is_grad_enabled()

    @property
    def shows_rest(self) -> bool:
        """Whether the user sees what rests: inside gathered()."""
        return bool(self._shown)

    def enter(self, *, evaluates: bool | None = None) -> None:
        """A forward begins, of the model where it is known whether it `evaluates`."""
        self.availability.check_open()
        self.passes.enter(evaluates)

    def leave(self, *, evaluates: bool | None = None) -> None:
        """A forward ends."""
        for unit in self.passes.leave(evaluates):
            self.release_unused(unit)

    def end_backward(self) -> None:
        """A backward is over, and its graph is gone."""
        for unit in self.passes.end_backward():
            self.release_unused(unit)

    def end_step(self) -> None:
        """The weights have changed: no unit is held for a graph any more."""
        for unit in self.passes.end_step():
            self.release_unused(unit)

    def hold(self, unit: Unit, phase: Phase, until: Until) -> None:
        """Gather a unit that is used outside its modules, and keep it at least `until` then."""
        self.passes.hold(unit, until)
        self.unshard(unit, phase)

    def hold_stage(self, units: Sequence[Unit], *, held: bool) -> None:
        """A schedule computes with `units` from here on: start what is not here, and keep all; or
        (not `held`) it does so no longer: release those that nothing else uses.
        """
        for unit in units:
            if not held:
                self._prefetch.let_go(unit)
                unit.release(Use.SCHEDULE)
                if unit.state is UnitState.GATHERING:
                    unit.wait_for_unshard()
                self.release_unused(unit, for_backward=None)
                continue
            if unit is self._idle:
                self.release_idle()
            elif unit.dozing:
                self._prefetch.keep(unit, kept=False)
                unit.wake()
            unit.acquire(Use.SCHEDULE)
            self._prefetch.hold(unit)
            if unit.state is UnitState.RESTING:
                self.availability.check_gather()
                self.start(unit)

    def begin(self, phase: Phase, *, repeats: bool = False) -> None:
        """Start a pass over the model, which `repeats` itself: see Prefetch."""
        self.availability.check_open()
        if not repeats:  # a backward needs last what is ahead for a forward
            for unit in self._prefetch.units:
                self.release_prefetched(unit)
        self._prefetch.begin(phase, repeats=repeats)

    def unshard(self, unit: Unit, phase: Phase) -> None:
        """Return with `unit` gathered, and the units expected next on their way."""
        self.availability.check_open()
        self._digest.enter(phase, unit.name)
        if self._idle is unit:
            self._idle = None
        elif self._idle is not None:
            self.release_idle()
        if unit.state is UnitState.FULL:
            if unit.dozing:
                self._prefetch.keep(unit, kept=False)
                unit.wake()
        else:
            self._gather(unit, phase)

    def _gather(self, unit: Unit, phase: Phase) -> None:
        _refuse_transforms(unit)
        if unit.state is UnitState.RESTING:
            self.availability.check_gather()
            for other in self._prefetch.giving_way(unit, phase):
                self.release_prefetched(other)
            self._wait_for_reduces(unit.full_bytes)
            self.start(unit)
        self._prefetch.discard(unit)
        if in_transform():
            with temporarily_clear_interpreter_stack():  # our copies are not its to follow
                unit.wait_for_unshard()
        else:
            unit.wait_for_unshard()
        for segment in unit.segments:
            self._streams.read(segment.key)
        if self.trace is not None:
            self.trace("use", unit.name)
        self._prefetch.ran(unit, phase)
        for other in self._prefetch.due:
            other.advance()
        if unit.full_bytes:
            # prefetched in one order and run in another: the ranks' next gathers will differ
            if self._ordered:
                first = unit.segments[0].flat
                self._digest.fold(
                    phase, unit.name, dtype_name(first.dtype), first.layout.numel, ordered=True
                )
            for other in self._prefetch.following(unit, phase, self._here):
                self._prefetch.add(other)
                self.start(other)

    def start(self, unit: Unit, *, fork: bool = True) -> None:
        """Start gathering `unit`, a collective on two-sided transports."""
        for segment in unit.gathered_segments if self._ordered else ():
            flat = segment.flat
            if not flat.is_local:
                self._digest.fold(
                    "gather", unit.name, dtype_name(flat.dtype), flat.layout.numel, ordered=True
                )
        if self.trace is not None:
            self.trace("gather", unit.name)
        unit.unshard(self._streams, fork=fork, raw=self.shows_rest)
        self._here.add(unit.index)

    @contextmanager
    def showing(self, units: Sequence[Unit]) -> Iterator[None]:
        """Let the user see `units` inside: gather what rests, without a codec. The caller holds
        them.
        """
        everything = len(units) == len(self.units)
        self._shown.append(everything)
        for unit in units:
            if unit.is_coded and not unit.in_use:
                if unit.state is UnitState.GATHERING:
                    self.release_prefetched(unit)
                elif unit.state is UnitState.FULL:
                    self._idle = None if self._idle is unit else self._idle
                    self.release(unit, for_backward=None)
        try:
            yield
        finally:
            if everything in self._shown:  # else an exception has ended it
                self._shown.remove(everything)

    def release_prefetched(self, unit: Unit) -> None:
        """Release a unit that was prefetched and not used."""
        self._prefetch.discard(unit)
        unit.wait_for_unshard()
        self.release(unit, for_backward=None)

    def after_forward(self, unit: Unit) -> None:
        """`unit`'s module has run: release it now if nothing else of it can follow, else when
        another unit is needed.
        """
        # for a backward that may follow
        kept = not unit.cells.between.is_sharded and torch.is_grad_enabled()
        if not unit.cells.weight.is_sharded or unit.state is not UnitState.FULL:
            return
        if kept:
            self._prefetch.keep(unit, kept=True)
            unit.doze()
        elif unit.spans_one_module:
            self.release(unit, for_backward=torch.is_grad_enabled() or None)
        elif self._idle is not unit:
            self.release_idle()
            self._idle = unit
            unit.doze()

    def release_idle(self) -> None:
        """Release the unit that was kept because another use might follow at once."""
        unit, self._idle = self._idle, None
        if unit is None or unit.state is not UnitState.FULL:
            return
        if not unit.in_use:
            self.release(unit, for_backward=torch.is_grad_enabled() or None)
        else:
            unit.wake()

    def release(self, unit: Unit, *, for_backward: bool | None = False) -> None:
        """Release a unit; see FlatWeights.release."""
        if self.trace is not None:
            self.trace("release", unit.name)
        self._here.discard(unit.index)
        if unit.dozing:
            self._prefetch.keep(unit, kept=False)
        self._trimmer.passed(unit.reshard(for_backward=for_backward))

    def release_unused(self, unit: Unit, *, for_backward: bool | None = False) -> None:
        """Release a unit that rests sharded, where neither a forward, a backward nor the user
        has it in use; see `release`.
        """
        if unit.cells.weight.is_sharded and unit.state is UnitState.FULL and not unit.in_use:
            self.release(unit, for_backward=for_backward)

    def end_pass(self, *, repeats: bool = False) -> None:
        """A forward or backward of the whole model is over: nothing stays that was only expected
        or idle, unless the same forward may follow (`repeats`) and is read for already.
        """
        self.release_idle()
        for unit in [] if repeats and self._prefetch.around else self._prefetch.units:
            self.release_prefetched(unit)

    def after_backward(self, unit: Unit) -> None:
        """`unit`'s backward is over."""
        unit.release(Use.BACKWARD)
        self.release_unused(unit)

    def serves(self, unit: Unit, epoch: int) -> bool:
        """Whether `unit` is gathered for the backward of a forward under `epoch` already."""
        return (
            unit.in_backward
            and unit.state is UnitState.FULL
            and not unit.dozing
            and epoch == self.epoch
            and self._idle is None
            and self.availability.refusal is None
        )

    def check_epoch(self, unit: Unit, epoch: int) -> None:
        """Raise StateError when the weights have changed since the forward that ran under
        `epoch`.
        """
        if epoch != self.epoch:
            raise StateError(
                f"backward through unit {unit.name!r} of a forward that ran before the last"
                " optimizer.step(), load or writeback: its weights have changed since; run the"
                " forward again (or step after the backward)"
            )

    def refresh(self, units: Sequence[Unit]) -> None:
        """The user's numbers have been written into `units`: what is gathered now is gathered
        anew, and older forwards cannot run backward.
        """
        self.epoch += 1
        for unit in units:
            if unit.state is UnitState.FULL and unit.cells.weight.is_sharded:
                self.release(unit)
                if unit.is_held:
                    self.unshard(unit, "forward")

    def invalidate(self, *, frozen: bool = False) -> None:
        """A step, writeback or load has written the shards (the last two also of `frozen`
        weights): replicated copies are stale, and their publish starts.
        """
        self.epoch += 1
        self.end_step()
        stale = [
            unit
            for unit in self.units
            if unit.cells.optim.is_sharded and not unit.cells.weight.is_sharded
        ]
        for unit in self.units:
            unit.forwards.reset()
            for segment in unit.segments:
                segment.invalidate(frozen=frozen)
            if unit.state is UnitState.FULL and not unit.is_held and unit.cells.optim.is_sharded:
                self.release(unit)
        fork = True  # once for all: nothing touches compute between these gathers
        for unit in stale:
            if unit.state is UnitState.RESTING:
                self.start(unit, fork=fork)
                fork = False

    def shadow(self, phase: Phase) -> Iterator[Unit]:
        """Take part in the gathers of a pass that only other ranks run; yields each unit while
        it is gathered.

        The order is that of the last pass (before any: of definition). One-sided transports need
        nothing of us and yield nothing.
        """
        self.begin(phase)
        if self._ordered:
            in_order = self.units if phase == "forward" else self.units[::-1]
            for unit in self._prefetch.last_pass(phase) or in_order:
                self.unshard(unit, phase)
                yield unit
                self.after_backward(unit) if phase == "backward" else self.after_forward(unit)
        self.end_pass()

    def abandon(self) -> None:
        """After an exception: every unit back at rest, and no expectation, since the ranks may
        have come to different places.
        """
        self._prefetch.abandon()
        self._idle = None
        self._here.clear()
        self._shown.clear()
        self.passes = Passes()
        for unit in self.units:
            unit.abandon()


def in_transform() -> bool:
    """Whether a transform of torch.func is at work (vmap, grad, jvp, ...): gradients inside are
    its own, and no pass of ours.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def _refuse_transforms(unit: Unit) -> None:
    """Raise StateError where a gather would run inside a transform of torch.func, which cannot
    follow memory that comes and goes.
    """
    if unit.cells.weight.is_sharded and (
        in_transform() or torch.autograd.forward_ad._current_level >= 0
    ):
        raise StateError(
            f"unit {unit.name!r} would be gathered inside a transform (torch.vmap, torch.func.grad,"
            " jvp, forward-mode AD), which cannot follow memory that is released: run the"
            " transform inside engine.gathered(), on every rank"
        )
