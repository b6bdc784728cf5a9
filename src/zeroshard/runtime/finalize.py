"""From resting sums to averaged gradients, agreed between the ranks: what stands between the
last backward and the optimizer's step.

    wait for the reduces . divide . gather the averages (rows that step everything everywhere)
    . exchange once: digest, decisions (decisions.py), used parameters, overflow, weights
    . divide by the weights of all ranks, where backwards had any

and all of it again after one more reduce where any rank says that gradients rest there which none
has taken: every backward ran inside ``no_sync``, or a gradient came after its unit was handed over.

ZeRO, section 5.2, leaves the norm to a reduction over partitions; here every rank sends the exact
sum of squares of its pieces, as an integer, and all add them, so that the result is the same number
on every rank, in every row and for every cut (state/norms.py: order-free norm). Division by the
number of ranks comes after the sum. A step with a number that is not finite is skipped on every
rank, its masters and moments untouched.

Where the mesh has other axes, each data parallel group agrees so and then tells the others, who add
its sum of squares to theirs and skip what it has to skip (comm/ranks.py).

Averages that were set by hand since are looked at once more by the norm or the step.

Invariant: idempotent until the next backward. Cost: one small exchange per step, one more for a
norm, one more after steps with all backwards inside ``no_sync``; the first two once more along the
other axes.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import nn

from zeroshard.core.digest import Digest, first_unlike
from zeroshard.errors import StateError
from zeroshard.memory import reads_wait
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.backward_pass import UNKNOWN, WEIGHTED, Weight, total_weight
from zeroshard.runtime.context import Context
from zeroshard.runtime.decisions import refuse
from zeroshard.runtime.trainable import AssignedGradients
from zeroshard.state.gradient import average
from zeroshard.state.norms import ExactSum, SquaresRequest, SquaresSum, read_squares

_log = logging.getLogger("zeroshard")
_STEP = "optimizer.step() or clip_grad_norm_()"
_NORM = "the norm of the gradient"
_BAD = "the search for a gradient that is not finite"
DIVERGED = (
    "{} steps in a row had gradients that are not finite, first in {}: lower the learning rate,"
    " clip with engine.clip_grad_norm_(), or look for a division by zero:"
    " zs.detect_anomaly(engine) names the module"
)
# digests, the decisions', micro-batches, begun, known, unreduced, kinds of backwards, their weight
_HEAD = "<{}QQIIi?B3d"
_DIGITS = b"01" + bytes(254)  # of 0 and 1


@dataclass(frozen=True)
class _Answer:
    """The answer of one rank about its gradients."""

    digests: tuple[int, ...]  # of what it has asked of the others, by who these are
    decisions: int  # digest of what it has decided
    micro_batches: int
    begun: int  # forwards, and reads of weights outside of them (`Digest.num_begun`)
    known: int  # verdicts of the device upon steps before (late_finalize.py)
    used: int  # a bit per trainable parameter: whether it has a gradient
    unreduced: bool  # gradients rest there that no reduce over all ranks has taken
    kinds: int  # of backwards, with a weight or without
    weight: Weight  # the sum of their weights
    bad: str  # the first segment with an average that is not finite, or ""
    order: tuple[int, ...] = ()  # of rank 0's units, where it is another one (reductions.py)

    def pack(self, head: struct.Struct, width: int) -> bytes:
        """Return it as bytes, `used` in `width` of them."""
        counts = self.decisions, self.micro_batches, self.begun, self.known
        first = head.pack(*self.digests, *counts, self.unreduced, self.kinds, *self.weight)
        order = struct.pack(f"<x{len(self.order)}I", *self.order) if self.order else b""
        return first + self.used.to_bytes(width, "little") + self.bad.encode() + order

    @classmethod
    def unpack(cls, told: bytes, head: struct.Struct, width: int) -> _Answer:
        *digests, decisions, count, begun, known, unreduced, kinds, a, b, c = head.unpack_from(told)
        used, (bad, _, rest) = told[head.size :][:width], told[head.size + width :].partition(b"\0")
        counts = decisions, count, begun, known, int.from_bytes(used, "little")
        order = struct.unpack(f"<{len(rest) // 4}I", rest)
        return cls(tuple(digests), *counts, unreduced, kinds, (a, b, c), bad.decode(), order)


class Finalizer:
    """Turns resting sums into averaged gradients, once per step."""

    def __init__(
        self, backward: Backward, context: Context, digest: Digest, *, bad_steps: int = 3
    ) -> None:
        self._skipped = 0  # as the ranks have agreed
        self.clipped = False  # since the last step
        self._backward = backward
        self._transport = context.transport
        self._axes = context.axes
        self._everyone = context.everyone
        self._held = context.held
        self._head = struct.Struct(_HEAD.format(len(self._held[1])))
        self._probe = context.streams.probe
        self._digest = digest
        self._scaler = context.options.loss_scaler
        # divides the sum: the number of ranks, or 1 where losses are weighted by shares. All ranks
        # count for every parameter: tokens of all pass through experts that some hold
        counts_ranks = backward.share is None and not backward.sums_ranks
        self._weight = context.transport.size if counts_ranks else 1
        self._checks = [backward.collect_dropped]  # before gradients are averaged
        if backward.leaves is not None:
            self._weight = backward.leaves.tree.leaves
            self._checks.append(backward.leaves.check_whole)
        # nobody waits for a rank that gathers weights by itself; leaves shadow what others run
        self._may_run_ahead = (
            context.levels.one_sided
            and context.transport.size > 1
            and backward.leaves is None
            and any(cells.weight.is_sharded for cells in context.policy.all_cells)
        )
        accumulators = [bucket.accumulator for bucket in backward.buckets]
        self._gathering = [one for one in accumulators if len(one.members) > 1]  # of other ranks
        self._on_device = torch.empty(0, device=context.device)
        self._faults = context.faults
        self._bad_steps = bad_steps
        self._bad_in_a_row = 0
        self._known = 0  # verdicts of the device upon steps before
        # whether all averages are finite, as the ranks have agreed; None: not yet
        self._finite: bool | None = None
        self._set = False  # whether averages were set by hand since
        control, seal = context.transport.control, backward.seal
        self._assigned = AssignedGradients(
            backward.parameters, backward.decisions, control, seal=seal
        )

    @property
    def skipped(self) -> int:
        """Steps skipped since the beginning."""
        return self._skipped

    @property
    def pending(self) -> bool:
        """Whether gradients rest here that no step has taken yet."""
        here = self._backward.accumulation
        return here.has_gradient and (here.changed or self._finite is not None)

    def finalize(self, only: nn.Parameter | None = None, *, norm: bool = False) -> bool:
        """Average every resting gradient, agree upon them, and put those that the user has assigned
        in their places; of those assigned later, the one of parameter `only`. Return whether all
        are finite. `norm`: the squares are read at once, since a norm is asked for.

        Raises StorageError where a rank could not read or write one.
        Raises StateError when no rank has a gradient, PlanMismatch when the ranks did different
        things, StateError where only some backwards had a weight, and StateError naming a parameter
        after three steps in a row without finite gradients (with fp16: once its scale can fall no
        further), earlier where a released parameter was read.
        """
        backward = self._backward
        for check in self._checks:
            check()
        if self._finite is not None and not backward.accumulation.changed:
            if self._set and only is None:
                self._look_again()
            if self._finite:
                self._assigned.add_late(only)  # compared in the next step
            return self._finite
        if self._assigned.replace_sums():
            backward.accumulation.assign(scaled=self._scaler is not None)
        ignored, divisor = backward.frozen.note(backward.decisions), self.divisor()
        with self._axes.together(_STEP) as meeting:
            answers = self._average_and_compare(divisor, norm)
            if True in {answer.unreduced for answer in answers}:
                backward.flush()
                answers = self._average_and_compare(divisor, norm)
            self._assigned.compare()
            united = self._unite(answers)
            kinds, weights = [one.kinds for one in answers], [one.weight for one in answers]
            weight = total_weight(kinds, weights, shared=backward.share is not None)
            # an average that is not finite here, and what other groups are to have done alike
            scale = 1.0 if self._scaler is None else self._scaler.scale
            bad = next((answer.bad for answer in answers if answer.bad), "")
            meeting.give(self._axes.name(bad) if bad else "")
            meeting.compare({"the step": str(self._digest.step), "the loss scale": str(scale)})
            alike = {
                "what was reduced": f"{self._digest.reduced():016x}",
                "what was decided": f"{answers[0].decisions:016x}",
                "the parameters with gradients": f"{united.bit_count()} ({hash(united):x})",
                "the weights of the losses": str(weight),
            }
            meeting.compare(alike, self._axes.replicas)
        if ignored:
            raise StateError(
                f"{ignored}: frozen, and with a .grad, which the optimizer would step without an"
                " engine: set requires_grad=True before shard(), or take the gradient off"
            )
        culprits = [bad for bad in meeting.answers if bad]
        if weight is not None:
            for gradient in backward.gradients:
                gradient.divide(weight)
        self._assigned.store()
        self._judge(culprits, answers, norm)
        backward.accumulation.finalized()
        self._set = False
        return not culprits

    def averages_set(self) -> None:
        """Called on every rank when averages were set by hand."""
        self._set = True

    def _look_again(self) -> None:
        """Agree again upon whether all averages are finite: some were set since."""
        self._set = False
        if not self._finite:  # it counts once, if it is one still
            self._skipped -= 1
            self._bad_in_a_row -= 1
        gradients = self._backward.gradients
        bad = average(gradients, 1.0)  # divided already
        if self._read(squares=False):
            bad += average(gradients, 1.0)
        self._judge(self._agree((bad or [""])[0], _STEP), (), False)

    def _agree(self, bad: str, call: str) -> list[str]:
        """Return what any group says is not finite, this one the first `bad` of its ranks."""
        with self._axes.together(call) as meeting:
            found = next(filter(None, self._transport.control.share(bad, call)), "")
            meeting.give(self._axes.name(found) if found else "")
        return [bad for bad in meeting.answers if bad]

    def _judge(self, culprits: Sequence[str], answers: Sequence[_Answer], norm: bool) -> None:
        """Count `culprits`, which are not finite, after what the ranks know of steps before."""
        if not culprits:
            self._finite = True
            return
        self._skipped += 1
        self._bad_in_a_row += 1
        # the first parameter on any rank that is not finite, or that was used while it was released
        found = (one.accumulator.first_bad() for one in self._backward.buckets)
        mine = [next(filter(None, found), ""), self._backward.saved.read_released or ""]
        told = self._everyone.share([self._axes.name(name) for name in mine], _BAD)
        bad, released = (next(filter(None, names), "") for names in zip(*told, strict=True))
        name = bad or culprits[0]
        self._backward.saved.watch_steps()
        if self._scaler is None or self._scaler.at_floor:  # else the scale may fall
            if released:
                raise StateError(
                    f"{self._bad_in_a_row} steps in a row had gradients that are not finite, first"
                    f" in parameter {name!r}, because a backward reads parameter {released!r} while"
                    " it is released: a result of its module leaves it unseen; let its forward()"
                    " return that result"
                )
            if self._transport.rank == 0:
                _log.warning(
                    "step %d skipped: the gradient of %s is not finite", self._digest.step, name
                )
            if self._bad_in_a_row >= self._bad_steps:
                raise StateError(DIVERGED.format(self._bad_in_a_row, f"parameter {name!r}"))
        self._finite = False

    def divisor(self) -> float:
        """Return the number by which sums are divided, but for the weights of losses."""
        here, scale = self._backward.accumulation, 1.0
        if self._scaler is not None and here.has_gradient:
            if not here.scaled:
                raise StateError(
                    "precision 'fp16' needs a scaled loss: call engine.backward(loss) instead of"
                    " loss.backward() (of two engines: make one engine of both models, or use bf16)"
                )
            scale = self._scaler.scale
        return scale * here.divisor * (1 if here.kinds == WEIGHTED else self._weight)

    def _average_and_compare(self, divisor: float, norm: bool) -> list[_Answer]:
        """Average what has been reduced; return what every rank says about it. Raises
        PlanMismatch when the ranks did different things.

        A rank that has `unreduced` gradients knows that there will be a second time, and leaves its
        sums as they are.
        """
        backward = self._backward
        self._digest.enter("step", "")
        unreduced = backward.has_unreduced
        backward.reductions.wait()
        averaged = [] if unreduced else backward.gradients
        bad = average(averaged, divisor)
        gathering = [one for one in self._gathering if one.resting() is not None]
        backward.reductions.gather_averages(gathering)
        if not unreduced and self._read(squares=norm):
            bad += average(averaged, divisor)
        bad.append(backward.saved.read_released or self._assigned.first_bad() or "")
        self._faults.agree()  # a gradient that could not be read is NaN: that is no bad step
        return self._compare(unreduced, bad[0])

    def _read(self, *, squares: bool) -> bool:
        """Read once what is to be known of averages on an accelerator: their `squares`, or whether
        they are finite. Return whether there was anything.
        """
        unread: list[SquaresRequest] = []
        for bucket in self._backward.buckets if reads_wait(self._on_device) else ():
            used = bucket.used if bucket.counted is None else bucket.in_norm
            unread += bucket.accumulator.unread(used, squares=squares)
        if unread:
            read_squares(unread, exactly=squares)
        return bool(unread)

    def _compare(self, unreduced: bool, bad: str) -> list[_Answer]:
        """Exchange answers: none of their digests and decisions may differ."""
        used = [flag for bucket in self._backward.buckets for flag in bucket.used]
        bits = int(bytes(used[::-1]).translate(_DIGITS) or b"0", 2)  # the lowest: the first
        decisions, here = self._backward.decisions, self._backward.accumulation
        reductions = self._backward.reductions
        mine = _Answer(
            tuple(map(self._digest.value, self._held[1])),
            decisions.digest(),
            here.micro_batches,
            self._digest.num_begun,
            self._known,
            bits,
            unreduced,
            here.kinds,
            here.weight,
            bad,
            reductions.news() if self._transport.rank == 0 else (),
        )
        head, width = self._head, (len(used) + 7) // 8
        with self._probe.waiting("reduce"):
            payloads = self._transport.control.exchange(mine.pack(head, width), _STEP)
        read = {one: _Answer.unpack(one, head, width) for one in set(payloads)}  # mostly one
        answers = [read[payload] for payload in payloads]
        known = {answer.micro_batches for answer in answers} - {UNKNOWN}
        differs = len(known) > 1
        if len({(answer.digests, answer.decisions) for answer in answers}) > 1:
            decided = {answer.decisions for answer in answers}
            done = [answer.digests for answer in answers]
            differs = differs or len(decided) > 1 or bool(first_unlike(self._held[0], done))
        if differs:
            told = "unknown" if here.micro_batches == UNKNOWN else str(here.micro_batches)
            refuse(self._transport.control, self._digest, self._held, decisions, told)
        decisions.compared()
        reductions.follow(answers[0].order)
        begun = [answer.begun for answer in answers]
        if self._may_run_ahead and len(set(begun)) > 1:
            self._may_run_ahead = False  # it is told once
            if self._transport.rank == 0:
                _log.warning(
                    "rank(s) %s began %d forwards, or reads of weights outside of them, before step"
                    " %d where others began %d: here ranks read each other's memory and go on, but"
                    " over sockets, or on GPUs, these wait for all ranks, and the job stalls: run"
                    " them on every rank (comm=zs.Comm(transport='gloo') does here what a cluster"
                    " does)",
                    [rank for rank, count in enumerate(begun) if count == max(begun)],
                    max(begun),
                    self._digest.step,
                    min(begun),
                )
        return answers

    def _unite(self, answers: Sequence[_Answer]) -> int:
        """Unite the used parameters, and return a bit for each. Raises StateError when no rank
        has a gradient.
        """
        united = reduce(or_, [answer.used for answer in answers])
        if not united:
            raise StateError(
                "nothing to clip or to step, without a gradient on any rank: call loss.backward()"
                " first (and zero_grad() before it, not after)"
            )
        if {answer.used for answer in answers} == {united}:
            return united
        position, others_used = 0, False
        unions: dict[tuple[int, ...], int] = {}  # by the ranks that have the same parameters
        for bucket in self._backward.buckets:
            members = bucket.flat.context.holders.members
            if members not in unions:
                unions[members] = reduce(or_, [answers[rank].used for rank in members])
            for index in range(len(bucket.used)):
                used = bool(unions[members] >> position & 1)
                others_used = others_used or used != bucket.used[index]
                bucket.used[index] = used
                position += 1
        if others_used:
            # those that only other ranks used: None there would say that the user cleared them
            self._backward.seal()
        return united

    def norm(self, max_norm: float = math.inf) -> torch.Tensor:
        """Return the 2-norm of the averaged gradient over all parameters, 0-d fp32, the same
        number on every rank, which will be clipped to `max_norm`.
        """
        self.finalize(norm=True)
        return self._squares(max_norm).sqrt().to(torch.float32)

    def _squares(self, max_norm: float) -> torch.Tensor:
        """Return the sum of squares of all averages, 0-d fp64."""
        with self._axes.together(_NORM) as meeting:
            # on an accelerator, of averages that have been scaled since they were read
            self._read(squares=True)
            meeting.give(self._squares_of_group().pack().hex())
            meeting.compare({"max_norm of clip_grad_norm_()": repr(max_norm)})
        payloads = map(bytes.fromhex, meeting.answers)  # replicas count in one group
        total = float(sum(map(ExactSum.unpack, payloads), ExactSum()))
        return torch.tensor(total, dtype=torch.float64)

    def _squares_of_group(self) -> ExactSum:
        """Return the sum of squares of all ranks' averages."""
        size, buckets, squares = self._transport.size, self._backward.buckets, SquaresSum()
        # whether every rank holds all averages
        of_all = size > 1 and {len(one.accumulator.members) for one in buckets} == {size}
        for bucket in buckets:
            bucket.accumulator.add_squares(bucket.in_norm, squares, of_all=of_all)
        total = squares.read()
        self._faults.agree()
        if of_all:
            return total
        payloads = self._transport.control.exchange(total.pack(), _NORM)
        return sum(map(ExactSum.unpack, payloads), ExactSum())

    def clip(
        self, max_norm: float, listeners: Sequence[Callable[[torch.Tensor], None]]
    ) -> torch.Tensor:
        """Scale the averaged gradient so that its norm is at most `max_norm`; return the norm
        before, as torch's clip does, after giving it to `listeners`.
        """
        self._backward.tell("clip", max_norm)
        self._backward.decisions.note("max_norm of clip_grad_norm_()", repr(max_norm))
        total = self.norm(max_norm)
        for listener in listeners:
            listener(total)
        self.clipped = self.clipped or math.isfinite(max_norm)  # else it is only read
        if math.isfinite(max_norm):
            self._scale(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def _scale(self, coefficient: torch.Tensor) -> None:
        """Multiply the averages by `coefficient` (0-d), where that is less than 1."""
        factor = float(coefficient)
        if factor < 1.0:
            self._scale_by(factor)

    def _scale_by(self, factor: float | torch.Tensor) -> None:
        self._backward.parameters.scale_assigned(factor)
        for gradient in self._backward.gradients:
            gradient.scale(factor)

    def before_step(self) -> bool:
        """The optimizer is about to step: see `finalize`."""
        self._backward.tell("step")
        was_agreed = self._finite is not None  # by a clip, say, and options may be others since
        finite = self.finalize()
        if was_agreed:
            self._backward.decisions.note_late_options(self._digest.step)
        return finite

    def after_step(self) -> None:
        """The step is taken or skipped: start the next one."""
        if self._scaler is not None and self._finite is not None:
            before = self._scaler.scale
            self._scaler.update(not self._finite)
            if self._scaler.scale != before:
                for bucket in self._backward.buckets:
                    bucket.reset_residual()  # it was of gradients in another scale
        if self._finite:
            self._bad_in_a_row = 0
        self._digest.advance()
        self._finite = None
        self.clipped = False
        self._backward.accumulation.finalized()
        self._backward.saved.end_step()

    @property
    def step(self) -> int:
        """The number of the step that comes."""
        return self._digest.step

    def continue_from(self, step: int, skipped: int) -> None:
        """Count steps from `step` on, of which `skipped` were not taken."""
        self._skipped = skipped
        self._digest.advance(step)

    def abandon(self) -> None:
        """After an exception: nothing is agreed."""
        self._finite = None
        self.clipped = False
        self._backward.decisions.reset()
        self._assigned.abandon()
        self._digest.advance(self._digest.step)  # a step that was not taken does not count
