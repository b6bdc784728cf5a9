"""A checkpoint: how many bytes ``zs.save`` writes, exactly, and how long saving and loading take, a
model.

Every element is saved once: of trained parameters the fp32 master and the optimizer's state, of
frozen ones the weight, decoded (checkpoint/rank_part.py). Padding is not. Random generators (some
kilobytes per rank), buffers, schedulers and the files' headers come on top.

Where a machine has no disk the times of files are None: nobody knows how fast they are.

    save        what rests on the device over the host link, then all of it to the node's disks
                (what rests on disk is read there first)
    background  the copy alone: over the host link, or in the host's memory; where a state rests
                on disk, all of the save (checkpoint/save.py: Saver)
    load        all that a rank holds from the node's disks (what rests on disk twice, and written
                back), then what rests on the device over the host link
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.planner.exact import LaidOut, LaidOutGroup
from zeroshard.planner.machine import Machine
from zeroshard.planner.training import Training

_MASTER_BYTES = 4


@dataclass(frozen=True)
class CheckpointTimes:
    """Seconds that one checkpoint takes; None: not known, on a machine without a disk."""

    load: float | None  # zs.load
    save: float | None  # zs.save
    background: float | None  # for which zs.Saver holds training up


def checkpoint_bytes(laid_out: LaidOut, training: Training, rank: int | None = None) -> int:
    """Return the bytes of parameters and optimizer state that all ranks write, or `rank` does."""
    total = 0
    for one in laid_out.groups:
        layout = one.layout
        parts = layout.slots if rank is None else layout.pieces(rank)
        total += one.count * sum(_saved_bytes(one, part.numel, training) for part in parts)
    return total


def checkpoint_times(
    laid_out: LaidOut, policy: Policy, machine: Machine, training: Training
) -> CheckpointTimes:
    """Return how long rank 0 takes; its node's other ranks do as much at the same time."""
    speeds, cells, ranks = machine.speeds, policy.default, machine.node_size
    part = speeds.bandwidth_efficiency
    link, memory = speeds.host_link * part, speeds.host * part / ranks
    saved, held = checkpoint_bytes(laid_out, training, 0), _held_bytes(laid_out, policy, training)
    away = 0.0 if cells.optim.tier is Tier.DEVICE else training.fraction
    on_disk = away if cells.optim.tier is Tier.DISK else 0.0
    copied = saved * (1.0 - away) / link
    uses_disk = Tier.DISK in (cells.weight.tier, cells.grad.tier, cells.optim.tier)
    behind = None if uses_disk else copied + 2.0 * saved * away / memory
    if not machine.disk:
        return CheckpointTimes(None, None, behind)
    disks = speeds.disk * part / ranks
    save = copied + saved * (1.0 + on_disk) / disks
    load = held * (1.0 + 2.0 * on_disk) / disks + held * (1.0 - away) / link
    return CheckpointTimes(load, save, save if behind is None else behind)


def _held_bytes(laid_out: LaidOut, policy: Policy, training: Training) -> int:
    """Return the bytes that rank 0 reads: masters and moments that it steps, and its share of
    frozen weights, or all of those that every rank keeps (runtime/rest.py).
    """
    cells, total = policy.default, 0
    for one in laid_out.groups:
        scope = one.layout.scope(cells.optim)
        if not one.group.trained and (scope, cells.weight.scope) != (Scope.FULL, Scope.FULL):
            scope = Scope.SHARD
        pieces = one.layout.pieces_in(one.layout.span(0, scope))
        total += one.count * sum(_saved_bytes(one, piece.numel, training) for piece in pieces)
    return total


def _saved_bytes(one: LaidOutGroup, numel: int, training: Training) -> int:
    if one.group.trained:
        return _MASTER_BYTES * numel + training.state_bytes(numel)
    return round(numel * training.formats(one.group.dtype).weight.bytes_per_element)
