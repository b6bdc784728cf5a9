"""finalize.py where an accelerator is not waited for: the device knows at once, the host later.

    averages --table--> digits, odd --sum over ranks--> norm --> clip       all on the device
                         odd --> found_inf --> the optimizer's step, which leaves out a bad one
                         odd --copied--> the host of each rank --agreed--> `skipped`, a warning

What ranks did is compared as before, in the step itself: it reads no device. Of the averages they
learn in the first step by which the copies of all ranks are there. Once a step was bad each is read
before it is taken, and named by parameter, until one is good: so three in a row end as before.

Invariant: weights, moments and counters have the bits of a loop that reads. Cost: one sum
over ranks of an integer per segment, with a norm of 163 more, in the place of an exchange.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.errors import StateError
from zeroshard.memory import Mark, bounce_buffer, note_copy
from zeroshard.optim.several import each_of
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.context import Context
from zeroshard.runtime.finalize import DIVERGED, Finalizer
from zeroshard.state.norms import digits_of, squares_of, total_of

_log = logging.getLogger("zeroshard")
_NORM = "the norm of the gradient"
_NEEDS_ALL = -1  # as the number of verdicts known: the step reads its own, and all before it
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # which take `found_inf`


def serves(backward: Backward, context: Context) -> bool:
    """Return whether a `LateFinalizer` serves: elsewhere the host is asked in the step itself."""
    return (
        context.streams.enqueues
        and context.transport.device_sum is not None
        and context.axes.size == 1
        and not (backward.leaves or context.own or context.tiering.away)
        and not context.precision.decodes  # that waits for the device anyway
        # elsewhere a multiplication by a number of the device rounds that first
        and {bucket.precision.accumulate for bucket in backward.buckets} == {torch.float32}
    )


@dataclass(frozen=True)
class _Verdict:
    """The averages of one step that are not finite, on its way to the host."""

    step: int
    odd: torch.Tensor  # by segment: not 0 where one is not
    copied: Mark


class LateFinalizer(Finalizer):
    """A Finalizer that reads the device only where the next call cannot do without."""

    def __init__(self, backward: Backward, context: Context, *rest: Any) -> None:
        super().__init__(backward, context, *rest)
        self._device = context.device
        self._pending: deque[_Verdict] = deque()
        # of this step, on the device: by segment, and the sum of squares that a norm asks for next
        self._odd: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._reads = False  # whether this step reads its verdict

    @property
    def skipped(self) -> int:
        return self._skipped + len([*filter(None, map(self._culprits, self._pending))])

    def _culprits(self, verdict: _Verdict) -> list[str]:
        """Return the segments that are not finite, once the copy is here."""
        verdict.copied.synchronize()
        return self._named(verdict.odd)

    def _named(self, odd: torch.Tensor) -> list[str]:
        buckets = self._backward.buckets
        return [one.key for one, here in zip(buckets, odd.tolist(), strict=True) if here]

    # ------------------------------------------------------------------ the averages

    def _read(self, *, squares: bool) -> bool:
        """Nothing is read."""
        return False

    def _average_and_compare(self, divisor: float, norm: bool) -> Any:
        done = [verdict.copied.done() for verdict in self._pending]
        self._known = [*done, False].index(False) if self._may_be_late() else _NEEDS_ALL
        return super()._average_and_compare(divisor, norm)

    def _may_be_late(self) -> bool:
        """Whether the optimizer leaves weights, moments and counters alone where it is told to."""
        if self._scaler is not None:  # the next loss has its scale
            return False
        if (sharded := self._backward.optimizer) is None:
            return True
        optimizer = sharded.optimizer
        for group in optimizer.param_groups:
            # a first step of torch's fused SGD makes momenta, and leaves them undefined
            held = [one for one in group["params"] if group.get("momentum") and one.numel()]
            states = [optimizer.state.get(one, {}) for one in held]
            begun = [one for one in states if one.get("momentum_buffer") is not None]
            if not group.get("fused") or (held and not begun):
                return False
        return all(type(one) in _FUSED for one in each_of(optimizer))

    def _judge(self, culprits: Sequence[str], answers: Sequence[Any], norm: bool) -> None:
        known = min([answer.known for answer in answers], default=0)
        for _ in range(len(self._pending) if known < 0 else known):
            self._count(self._pending.popleft())
        self._reads = self._reads or known < 0 or self._bad_in_a_row > 0
        self._total = self._look(squares=norm)
        super()._judge(culprits, answers, norm)

    def _count(self, verdict: _Verdict) -> None:
        """Count a step before: every rank counts it now."""
        if not (culprits := self._culprits(verdict)):
            self._bad_in_a_row = 0
            return
        self._skipped += 1
        self._bad_in_a_row += 1
        self._backward.saved.watch_steps()
        if self._transport.rank == 0:
            _log.warning(
                "step %d skipped, as is seen in step %d: a gradient of unit %r is not finite",
                verdict.step,
                self._digest.step,
                culprits[0],
            )
        if self._bad_in_a_row >= self._bad_steps:
            raise StateError(DIVERGED.format(self._bad_in_a_row, f"unit {culprits[0]!r}"))

    def _look(self, *, squares: bool) -> torch.Tensor | None:
        """Look on the device which averages of all ranks are not finite; return the sum of their
        `squares`, 0-d, in fp64, if that is asked for.
        """
        buckets = self._backward.buckets
        slices = [bucket.accumulator.own_averages(bucket.used) for bucket in buckets]
        if not any(slices):
            slices[0] = [torch.empty(0, device=self._device)]
        counts, every = [len(here) for here in slices], [one for here in slices for one in here]
        if squares:
            table = squares_of(every)
            odd = table[:, -2:].sum(1)
        else:  # NaN where one is not finite, else 0
            odd = torch.stack(torch._foreach_norm(every, 2, dtype=torch.float64)).mul_(0)
        if set(counts) != {1}:
            odd = torch.stack([part.sum() for part in torch.split(odd, counts)])
        told = torch.cat([digits_of(table).sum(0), odd]) if squares else odd
        assert self._transport.device_sum is not None
        self._transport.device_sum(told)
        self._odd = told[-len(buckets) :]
        return total_of(told[: -len(buckets)]) if squares else None

    # ------------------------------------------------------------------ norm, clip and step

    def _squares(self, max_norm: float) -> torch.Tensor:
        total, self._total = self._total, None
        if total is None:  # they have changed since the ranks have agreed
            self._agree("", _NORM)
            total = self._look(squares=True)
        assert total is not None
        return total

    def _scale(self, coefficient: torch.Tensor) -> None:
        # where it is NaN the step is left out, and what is not finite keeps its place
        self._scale_by(coefficient.nan_to_num(nan=1.0))

    def before_step(self) -> bool:
        finite, odd = super().before_step(), self._odd
        if not finite:
            return False
        assert odd is not None and self._backward.optimizer is not None
        if self._reads:
            super()._judge(self._named(odd), (), False)
            return bool(self._finite)
        found = torch.empty((), device=self._device)
        torch.ne(odd.sum(), 0, out=found)
        for one in each_of(self._backward.optimizer.optimizer):
            vars(one)["found_inf"] = found
        here = bounce_buffer(len(odd), odd.dtype, self._device)
        here.copy_(odd, non_blocking=True)
        self._pending.append(_Verdict(self._digest.step, here, copied := Mark(self._device)))
        note_copy(here, copied)
        return True

    def after_step(self) -> None:
        super().after_step()
        self._end_step()

    def _end_step(self) -> None:
        self._odd = self._total = None
        self._reads = False
        sharded = self._backward.optimizer
        for one in () if sharded is None else each_of(sharded.optimizer):
            vars(one).pop("found_inf", None)

    def continue_from(self, step: int, skipped: int) -> None:
        self._pending.clear()
        super().continue_from(step, skipped)

    def abandon(self) -> None:
        self._skipped = self.skipped
        self._pending.clear()
        self._end_step()
        super().abandon()
