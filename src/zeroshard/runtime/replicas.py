"""Compare replicated state across ranks: what every rank holds must be the same bits on every rank.

A flipped bit in a replicated weight or moment makes that rank's gradients differ from then on,
silently (FAULTS: silent corruption). Every `verify_every` steps the ranks exchange one 64-bit
digest per unit and state and compare. Sharded state has no second copy among data parallel ranks,
and is not covered there. Along 'tp' it has: each group has the same plain parameters (parts of
DTensors are a group's own), in shards that need not be cut alike. So sums of mixed bits, which add
up, are compared there.

    mesh (dp 2, tp 2), zero3      tp 0          tp 1
                           dp 0   a[:5], b      a[:4], c      a: plain; b, c, d, e: of DTensors
                           dp 1   a[5:], d      a[4:], e      sums: a[:5] + a[5:] = a[:4] + a[4:]

Cost: a digest of the replicated state where it lies (core/tensor_digest.py) and 8 bytes per unit
and state on the wire, every `verify_every` steps; of sharded state, too, where the mesh has 'tp'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.comm.ranks import Groups
from zeroshard.comm.transport import Transport
from zeroshard.core.placement import Scope
from zeroshard.core.tensor_digest import digest_of, placed_sum
from zeroshard.errors import PlanMismatch
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.context import Context
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights

__all__ = ["compare_replicas", "verify_replicas"]

_CALL = "the comparison of replicas (verify_every)"
_REMEDY = (
    "They must hold the same bits: memory was corrupted or written to on one rank; go back to the"
    " last checkpoint"
)


def compare_replicas(
    weights: Weights, optimizer: ShardedOptimizer | None, transport: Transport
) -> None:
    """Raise PlanMismatch, on every rank, naming the first unit whose replicated weights or
    optimizer state differ; collective.
    """
    named: dict[str, str] = {}
    within: dict[str, Groups] = {}  # of parameters that only some ranks have
    weights.finish_published()
    units = weights.units
    for unit in units:
        groups = unit.segments[0].flat.context.holders.groups
        if not unit.cells.weight.is_sharded:
            name = f"weights of unit {unit.name}"
            named[name] = digest_of(*(segment.flat.full for segment in unit.segments))
            within[name] = groups
        within |= {_state_of(name): groups for one in unit.segments for name in one.names}
    if optimizer is not None and units and not units[0].cells.optim.is_sharded:
        named |= _state_digests(optimizer)
    _compare_columns(units, optimizer, transport)
    transport.control.agree(named, _CALL, remedy=_REMEDY, within=within)


def verify_replicas(weights: Weights, optimizer: ShardedOptimizer | None, context: Context) -> None:
    """Raise PlanMismatch, on every rank of the mesh, naming the first unit whose replicated weights
    or optimizer state differ between data parallel ranks, or along other axes; collective.
    """
    axes = context.axes
    with axes.together(_CALL) as meeting:
        compare_replicas(weights, optimizer, context.transport)
        if axes.size > 1:
            sums = _sums(weights.units, optimizer)
            meeting.give(context.transport.control.share(sums, _CALL))  # of this group's ranks
    if axes.size == 1:
        return
    total: dict[str, dict[str, dict[str, int]]] = {}  # by stage, group and name
    for place, ranks in zip(axes.places, meeting.answers, strict=True):
        held = total.setdefault(place.stage, {}).setdefault(place.text, {})
        for name, number in (item for sums in ranks for item in sums.items()):
            held[name] = (held.get(name, 0) + number) % (1 << 64)
    for groups in total.values():
        (first, expected), *others = groups.items()
        for group, held in others:
            for name in (*expected, *held):
                if held.get(name) != expected.get(name):
                    raise PlanMismatch(
                        f"{name} differ between {first} and {group} of the mesh, which hold the"
                        f" same. {_REMEDY}"
                    )


def _sums(units: Sequence[Unit], optimizer: ShardedOptimizer | None) -> dict[str, int]:
    """Return sums of the bits that rest here of whole parameters, weights by unit and optimizer
    states by parameter: those of the ranks of a group add up to one number however they are cut.
    """
    sums: dict[str, int] = {}
    whole: set[str] = set()
    for unit in units:
        name, total = f"weights of unit {unit.name}", 0
        for segment in unit.segments:
            flat = segment.flat
            parts = zip(segment.names, segment.parts, strict=True)
            whole |= {each for each, part in parts if not part.axes}
            flat.wait_published()
            here = flat.rest.tensor  # of what rests on other tiers the part that does not
            low, numel = flat.rest_span[0], flat.rest.split
            for piece in flat.layout.pieces_in((low, low + numel)):
                if piece.name in whole and here is not None:
                    numbers = here[piece.shard_start :][: piece.numel]
                    total += placed_sum(numbers, piece.start + _seed(piece.name))
        sums[name] = total
    for shard in () if optimizer is None else optimizer.pieces():
        if shard.name in whole:
            state = optimizer.optimizer.state.get(shard.tensor, {}) if optimizer else {}
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            name = f"optimizer state of {shard.name}"
            for tensor in (shard.tensor, *(each for each in tensors if each.dim())):
                sums[name] = sums.get(name, 0) + placed_sum(tensor, shard.piece.start)
    return sums


def _seed(name: str) -> int:
    """Return where the elements of a parameter are counted from: apart from those of others."""
    return int(digest_of(torch.tensor(list(name.encode()), dtype=torch.uint8))[:8], 16) << 24


def _compare_columns(
    units: Sequence[Unit], optimizer: ShardedOptimizer | None, transport: Transport
) -> None:
    """Compare what only the ranks of one column hold alike (mics: weights and optimizer state,
    hfsdp: weights).
    """
    named: dict[str, str] = {}
    columns: dict[str, list[tuple[int, ...]]] = {}  # of every entry
    for unit in units:
        for segment in unit.segments:
            flat = segment.flat
            if flat.scope is not Scope.NODE_SHARD:
                continue
            name, mesh = f"weights of unit {unit.name}", flat.layout.mesh
            own = [
                tuple(group[rank] for rank in mesh.column(local))
                for group in flat.context.holders.groups
                for local in range(mesh.node_size)
            ]
            columns |= dict.fromkeys((name, *map(_state_of, segment.names)), own)
            if flat.rest.on_device:  # as on all ranks of the column, and maybe on no other
                flat.wait_published()
                named[name] = digest_of(flat.rest.whole)
    if not columns:
        return
    if optimizer is not None and units[0].cells.optim.scope is Scope.NODE_SHARD:
        named |= _state_digests(optimizer)
    answers = transport.control.share(named, _CALL)
    for name in named:
        for column in columns[name]:
            digest = answers[column[0]].get(name)
            others = [rank for rank in column if answers[rank].get(name) != digest]
            if others:
                raise PlanMismatch(
                    f"{name} differ between rank {column[0]} and rank(s) {others}, which hold the"
                    f" same. {_REMEDY}"
                )


def _state_digests(optimizer: ShardedOptimizer) -> dict[str, str]:
    """Return a digest of each piece here and its state, by what errors call it."""
    named = {}
    for piece in optimizer.pieces():
        state = optimizer.optimizer.state.get(piece.tensor, {})
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        named[_state_of(piece.name)] = digest_of(piece.tensor, *tensors)
    return named


def _state_of(parameter: str) -> str:
    """Return what errors call the optimizer's state of a parameter."""
    return f"optimizer state of {parameter}"
