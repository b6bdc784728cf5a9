"""After an exception inside ``optimizer.step()``: do the ranks still train one model, and do the
weights follow the masters?

A step may end anywhere: before the optimizer has written anything, between two parameters, or when
some ranks have finished it and others have not. No copy of the numbers before is kept. So the ranks
tell each other how many steps each has finished, and whether one was cut off::

    all have finished as many, none was cut off     nothing to do
    all have finished as many, some were cut off    the step goes no further: the weights follow the
                                                    masters as they are (plain PyTorch does the
                                                    same)
    some have finished more than others             what rests is lost: a load of everything helps

Copies that every rank holds (masters and moments of ddp, columns of mics) are compared: where they
differ, what rests is lost, too.

Cost: one small exchange per reset and load. What it does not do: undo a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from zeroshard.comm.ranks import Groups
from zeroshard.comm.transport import Transport
from zeroshard.core.digest import Digest, digest_of, holders
from zeroshard.core.placement import Cell, Scope
from zeroshard.core.sliced_digest import place_of, placed_sum
from zeroshard.errors import PlanMismatch
from zeroshard.optim.copies import plain_tensors
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, StepMethod
from zeroshard.runtime.context import Context
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.rest import Rest
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights

# ----------------------------------------------------------------------------------------- replicas
# Compare replicated state across ranks: what every rank holds must be the same bits on every rank.
#
# A flipped bit in a replicated weight or moment makes that rank's gradients differ from then on,
# silently (FAULTS: silent corruption). Every `verify_every` steps the ranks exchange one 64-bit
# digest per unit and state and compare. Sharded state has no second copy among data parallel ranks,
# and is not covered there. Along 'tp' it has: each group has the same plain parameters (parts of
# DTensors are a group's own), in shards that need not be cut alike. So sums of mixed bits, which
# add up, are compared there.
#
#     mesh (dp 2, tp 2), zero3      tp 0          tp 1
#                            dp 0   a[:5], b      a[:4], c      a: plain; b, c, d, e: of DTensors
#                            dp 1   a[5:], d      a[4:], e      sums: a[:5] + a[5:] = a[:4] + a[4:]
#
# Cost: a digest of the replicated state where it lies (core/digest.py) and 8 bytes per unit
# and state on the wire, every `verify_every` steps; of sharded state, too, where the mesh has 'tp'.


_CALL = "the comparison of replicas (verify_every)"
_REMEDY = (
    "They must hold the same bits: memory was corrupted or written to on one rank; go back to the"
    " last checkpoint"
)


def compare_replicas(
    weights: Weights, optimizer: ShardedOptimizer | None, transport: Transport
) -> None:
    """Raise PlanMismatch, on every rank, naming the first unit with weights or optimizer state that
    differ between ranks that hold the same; collective.
    """
    weights.finish_published()
    copies: dict[str, Groups] = {}  # the same on every rank
    named: dict[str, str] = {}
    for unit in weights.units:
        resting: list[torch.Tensor] = []
        for segment in unit.segments:
            flat = segment.flat
            copies[_weights_of(unit)] = _copies(flat, unit.cells.weight)
            states = _copies(flat, unit.cells.optim)
            copies |= dict.fromkeys(map(_state_of, segment.names), states)
            flat.wait_published()
            # on the device on all ranks that hold the same, and maybe on no other
            resting += [flat.rest.whole] if flat.rest.on_device else []
        if copies[_weights_of(unit)] and resting:
            named[_weights_of(unit)] = digest_of(*resting)
    for shard, tensors in _stepped(optimizer):
        if copies[_state_of(shard.name)]:
            named[_state_of(shard.name)] = digest_of(*tensors)
    answers = transport.control.share(named, _CALL)
    for name, group in ((name, group) for name, groups in copies.items() for group in groups):
        entries = [f"{name} = {answers[rank].get(name)}" for rank in group]
        others = [rank for rank, entry in zip(group, entries, strict=True) if entry != entries[0]]
        if others:
            raise PlanMismatch(
                f"the ranks disagree, first about {name!r}: {holders(entries, group)}. They differ"
                f" between rank {group[0]} and rank(s) {others}, which hold the same. {_REMEDY}"
            )


def _copies(flat: FlatWeights, cell: Cell) -> Groups:
    """Return the groups of ranks that hold the same of a state in `cell`: all ranks that have the
    parameters, the ranks of one column (mics, hfsdp), or no two.
    """
    mesh, groups = flat.layout.mesh, flat.context.holders.groups
    columns = [
        tuple(group[rank] for rank in mesh.column(local))
        for group in groups
        for local in range(mesh.node_size)
    ]
    of_scope = {Scope.FULL: groups, Scope.NODE_SHARD: columns, Scope.SHARD: ()}
    return tuple(group for group in of_scope[flat.layout.scope(cell)] if len(group) > 1)


def verify_replicas(weights: Weights, optimizer: ShardedOptimizer | None, context: Context) -> None:
    """Raise PlanMismatch, on every rank of the mesh, naming the first unit with replicated weights
    or optimizer state that differ between data parallel ranks, or along other axes; collective.
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
    states by parameter: the sums of a group's ranks add up to one number however they are cut.
    """
    sums: dict[str, int] = {}
    whole: set[str] = set()
    for unit in units:
        name, total = _weights_of(unit), 0
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
                    total += placed_sum(numbers, piece.start + place_of(piece.name))
        sums[name] = total
    for shard, tensors in _stepped(optimizer):
        if shard.name in whole:
            name = _state_of(shard.name)
            for tensor in (each for each in tensors if each.dim()):
                sums[name] = sums.get(name, 0) + placed_sum(tensor, shard.piece.start)
    return sums


def _stepped(
    optimizer: ShardedOptimizer | None,
) -> Iterator[tuple[ParamShard, list[torch.Tensor]]]:
    """Yield what this rank steps, with its master and the tensors of its state."""
    if optimizer is not None:
        for shard in optimizer.pieces():
            state, master = optimizer.states.of(shard).values(), shard.tensor.detach()
            if shard.method is StepMethod.DECODED:
                with shard.segment.master.borrowed(shard.start, shard.stop, write=False) as decoded:
                    master = decoded
            yield shard, [master, *(one for value in state for one in plain_tensors(value))]


def _weights_of(unit: Unit) -> str:
    """Return what errors call the weights of a unit."""
    return f"weights of unit {unit.name}"


def _state_of(parameter: str) -> str:
    """Return what errors call the optimizer's state of a parameter."""
    return f"optimizer state of {parameter}"


# ----------------------------------------------------------------------------------------- recovery

_log = logging.getLogger("zeroshard")
_SINCE = "an optimizer.step() ended by an exception"


class Recovery:
    """Brings one engine back after a step that ended by an exception."""

    def __init__(self, weights: Weights, rest: Rest, digest: Digest, context: Context) -> None:
        self._weights = weights
        self._rest = rest
        self._faults = context.faults
        self._digest = digest
        self._transport = context.transport
        self._everyone = context.everyone
        # whether several ranks step the same masters
        self._has_copies = context.transport.size > 1 and any(
            unit.cells.optim.scope is not Scope.SHARD for unit in weights.units
        )

    def meet(self, optimizer: ShardedOptimizer | None, call: str) -> bool:
        """Bring the ranks to the same step and the weights to the masters; return whether a step
        was cut off on any rank. Collective.
        """
        num_finished = 0 if optimizer is None else optimizer.num_finished
        cut_off = optimizer is not None and optimizer.is_cut_off
        lags = optimizer is not None and optimizer.runner.lags
        answers = self._everyone.share([self._digest.step, num_finished, cut_off, lags], call)
        steps, finished, cuts, lagging = zip(*answers, strict=True)
        self._digest.advance(max(steps))
        if optimizer is not None:  # a read that was cut off has brought a late step on some ranks
            optimizer.runner.note_late(lags=any(lagging))
        if optimizer is None or not (any(cuts) or len(set(finished)) > 1):
            return False
        optimizer.abandon(num_finished=max(finished))
        if len(set(finished)) > 1:
            self._faults.lose(
                _SINCE,
                "the ranks have finished different numbers of steps"
                f" ({holders([str(count) for count in finished])})",
            )
        elif not self._faults.is_lost:
            # else masters may be unreadable, and only a load of everything helps
            self._follow(optimizer, [rank for rank, cut in enumerate(cuts) if cut])
        return True

    def _follow(self, optimizer: ShardedOptimizer, ranks: list[int]) -> None:
        with self._rest.rewriting():
            pass
        if self._transport.rank == 0:
            _log.warning(
                "optimizer.step() ended by an exception on rank(s) %s: parameters may have taken"
                " part of that step, as in plain PyTorch; training goes on from there, and"
                " zs.load() goes back to a whole step",
                ranks,
            )
        if not self._has_copies:
            return
        try:
            compare_replicas(self._weights, optimizer, self._transport)
        except PlanMismatch as error:
            self._faults.lose(
                _SINCE,
                f"the ranks have taken different parts of the step: {str(error).split('. ')[0]}",
            )
        compared = (StepMethod.BY_USER, StepMethod.DECODED)
        if any(tile.method not in compared for tile in optimizer.tiles):
            self._faults.lose(
                _SINCE, "some ranks may have taken other parts of the step than others"
            )
