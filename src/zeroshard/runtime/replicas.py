"""Compare replicated state across ranks: what every rank holds must be the same bits on every rank.

A flipped bit in a replicated weight or moment makes that rank's gradients differ from then on,
silently (FAULTS: silent corruption). Every `verify_every` steps the ranks exchange one 64-bit
digest per unit and state and compare. Sharded state has no second copy and is not covered.

Cost: a digest of the replicated state where it lies (core/tensor_digest.py) and 8 bytes per unit
and state on the wire, every `verify_every` steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from zeroshard.comm.agree import Groups, agree
from zeroshard.comm.transport import Transport
from zeroshard.core.placement import Scope
from zeroshard.core.tensor_digest import digest_of
from zeroshard.errors import PlanMismatch
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.unit import Unit, UnitState

__all__ = ["compare_replicas"]

_CALL = "the comparison of replicas (verify_every)"
_REMEDY = (
    "They must hold the same bits: memory was corrupted or written to on one rank; go back to the"
    " last checkpoint"
)


def compare_replicas(
    units: Sequence[Unit], optimizer: ShardedOptimizer | None, transport: Transport
) -> None:
    """Raise PlanMismatch, on every rank, naming the first unit whose replicated weights or
    optimizer state differ; collective.
    """
    named: dict[str, str] = {}
    within: dict[str, Groups] = {}  # of parameters that only some ranks have
    for unit in units:
        groups = unit.segments[0].flat.context.holders.groups
        if not unit.cells.weight.is_sharded:
            if unit.state is UnitState.GATHERING:  # published, and not used since on this rank
                unit.wait_for_unshard()
            name = f"weights of unit {unit.name}"
            named[name] = digest_of(*(segment.flat.full for segment in unit.segments))
            within[name] = groups
        within |= {_state_of(name): groups for one in unit.segments for name in one.names}
    if optimizer is not None and units and not units[0].cells.optim.is_sharded:
        named |= _state_digests(optimizer)
    _compare_columns(units, optimizer, transport)
    agree(transport.control.exchange, named, call=_CALL, remedy=_REMEDY, within=within)


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
            if flat.scope is Scope.NODE_SHARD and flat.rest.on_device:
                flat.wait_published()
                name, mesh = f"weights of unit {unit.name}", flat.layout.mesh
                named[name] = digest_of(flat.rest.whole)
                own = [
                    tuple(group[rank] for rank in mesh.column(local))
                    for group in flat.context.holders.groups
                    for local in range(mesh.node_size)
                ]
                columns |= dict.fromkeys((name, *map(_state_of, segment.names)), own)
    if not named:
        return
    if optimizer is not None and units[0].cells.optim.scope is Scope.NODE_SHARD:
        named |= _state_digests(optimizer)
    answers = [
        json.loads(answer)
        for answer in transport.control.exchange(json.dumps(named).encode(), _CALL)
    ]
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
