"""Which units keep whole gradients between micro-batches under an `accumulation_budget`.

The choice is the engine's (core/gradient_budget.py), from the bytes of each unit's gradient; the
row then has cells of single units, as the engine's policy has, and everything else reads those.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.core.gradient_budget import UnitGradient, resting_whole
from zeroshard.core.placement import Cell, Tier
from zeroshard.core.policy import Policy
from zeroshard.planner.exact import LaidOut, LaidOutGroup
from zeroshard.planner.training import Training


def with_budget(laid_out: LaidOut, policy: Policy, training: Training) -> Policy:
    """Return `policy` with whole gradients where the budget of `training` holds them; `policy`
    itself where it holds none, or has no effect: in rows that keep whole gradients anyway, or with
    gradients on disk, which ``zs.shard`` refuses.
    """
    budget, cell = training.accumulation_bytes, policy.default.grad
    if budget is None or not cell.is_sharded or cell.tier is Tier.DISK:
        return policy
    units = zip(laid_out.model.units, laid_out.by_unit, strict=True)
    ranks = range(1 if laid_out.shares is None else laid_out.mesh.size)
    sizes = [_bytes_of(unit.name, groups, cell, ranks, training) for unit, groups in units]
    resting = resting_whole(sizes, budget)
    return policy.with_whole_gradients(resting) if resting else policy


def _bytes_of(
    name: str, groups: Sequence[LaidOutGroup], cell: Cell, ranks: range, training: Training
) -> UnitGradient:
    """Return the bytes of a unit's gradient: whole, and in `cell` on that of `ranks` where they
    are most.
    """
    whole = shard = 0
    for one in groups:
        if one.group.trained:
            each = round(one.formats(training).grad.bytes_per_element)
            whole += one.layout.numel * each
            shard += max(one.held(cell, rank) for rank in ranks) * each
    return UnitGradient(name, whole, shard)
