"""Gradients that the user assigns to ``.grad``, as gradient surgery, noise that is added to
gradients and evolution strategies do.

    p.grad = t, then a backward    autograd adds to t, and the sum is reduced as any gradient is
    p.grad = t, then a step        t is the averaged gradient: each rank steps its slice of it

Both are what DistributedDataParallel makes of it. An assigned gradient stays the user's tensor and
stands on the parameter until a backward or ``zero_grad()`` takes it away: the step reads what it
holds then, and a clip scales it, too.

Invariant: a gradient assigned before a step is the same on every rank that has the parameter. The
ranks compare which ones are assigned with the step's decisions, and their digests right after (of
those assigned after the gradients were averaged: in the next step). Cost: nothing where none is
assigned; else one small exchange per step, and a copy and a digest of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.comm.ranks import Ranks
from zeroshard.core.digest import holders
from zeroshard.core.tensor_digest import digest_of
from zeroshard.errors import PlanMismatch, StateError
from zeroshard.runtime.decisions import Decisions
from zeroshard.runtime.leaves import Leaf, Leaves

__all__ = ["ASSIGNED", "AssignedGradients", "names_of"]

ASSIGNED = "the parameters whose .grad was assigned by hand"


def names_of(leaves: Sequence[Leaf]) -> str:
    """Return the names of `leaves` as text that ranks compare."""
    return ", ".join(leaf.name for leaf in leaves)


@dataclass(frozen=True)
class _TakenGradient:
    """A gradient that the user has assigned, and the numbers of it that are here."""

    leaf: Leaf
    numbers: torch.Tensor

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.numbers).all())

    def store(self) -> None:
        """Let it rest as the averaged gradient."""
        bucket, index = self.leaf.bucket, self.leaf.index
        flat = self.numbers.new_empty(self.numbers.numel())
        bucket.flat.buffer.view_in(flat, index).copy_(self.numbers)
        bucket.accumulator.store(index, flat)


class AssignedGradients:
    """The assigned gradients of one engine that a step is to take."""

    def __init__(self, leaves: Leaves, decisions: Decisions, control: Ranks) -> None:
        self._leaves = leaves
        self._decisions = decisions
        self._control = control
        self._taken: list[_TakenGradient] = []
        self._digests: dict[str, str] = {}  # not yet compared, by name of the parameter

    def take(self, only: nn.Parameter | None = None) -> bool:
        """Take note of those that are assigned now, or of that of parameter `only`; return whether
        any is.
        """
        assigned = self._leaves.assigned()
        if only is not None:
            assigned = [leaf for leaf in assigned if leaf.parameter is only]
        with torch._C.DisableTorchFunctionSubclass():
            self._taken = [_TakenGradient(leaf, leaf.assigned()) for leaf in assigned]
        if not self._taken:
            return False
        for taken in self._taken:
            leaf = taken.leaf
            leaf.bucket.used[leaf.index] = True
            group = leaf.bucket.flat.context.holders.members[0]  # of ranks that have the parameter
            self._digests[leaf.name] = f"{group} {digest_of(taken.numbers)}"
        self._decisions.note(ASSIGNED, names_of(assigned))
        return True

    def replace_sums(self) -> None:
        """Forget what backwards have brought for the parameters of those that `take` has found."""
        for taken in self._taken:
            taken.leaf.bucket.zero([taken.leaf.index])
            taken.leaf.bucket.accumulator.open_empty()

    def first_bad(self) -> str | None:
        """Return the segment of the first that is not finite."""
        return next((one.leaf.bucket.key for one in self._taken if not one.is_finite), None)

    def store(self, divisor: float, weight: float | None) -> bool:
        """Let those that `take` has found rest beside gradients that have been divided by `divisor`
        and by the sum of weights; return whether any has.
        """
        taken, self._taken = self._taken, []
        with torch._C.DisableTorchFunctionSubclass():
            for one in taken:
                zeros = one.leaf.bucket.accumulator.open_empty()
                if zeros is not None:
                    zeros.average(divisor)
                    if weight is not None:
                        zeros.divide(weight)
                one.store()
        return bool(taken)

    def check_finite(self) -> None:
        """Raise StateError for one that is not finite, after the ranks have agreed on the step."""
        for taken in self._taken:
            if not taken.is_finite:
                raise StateError(
                    f"the gradient assigned to {taken.leaf.name!r} holds NaN or infinity: assign a"
                    " finite one, or drop the step with zero_grad()"
                )

    def compare(self) -> None:
        """Raise PlanMismatch where ranks have assigned different gradients to one parameter.
        Collective; the ranks agree about the names.
        """
        digests, self._digests = self._digests, {}
        if not digests:
            return
        answers = self._control.share(digests, ASSIGNED)
        for name in digests:
            told = [answer[name].split() for answer in answers]
            if len({group for group, _ in told}) < len({tuple(one) for one in told}):
                raise PlanMismatch(
                    f"the .grad that was assigned to {name!r} differs between ranks"
                    f" ({holders([f'digest {digest}' for _, digest in told])}), and the step takes"
                    " it as it is: assign the same tensor on every rank, average it first with"
                    " torch.distributed.all_reduce(), or assign it before the backward, which"
                    " averages it"
                )

    def abandon(self) -> None:
        """After an exception: nothing is assigned."""
        self._taken, self._digests = [], {}
