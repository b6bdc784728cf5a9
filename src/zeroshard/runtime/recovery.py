"""After an exception inside ``optimizer.step()``: do the ranks still train one model, and are
the weights those of the masters?

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

from zeroshard.core.digest import Digest, holders
from zeroshard.core.placement import Scope
from zeroshard.errors import PlanMismatch
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.runtime.context import Context
from zeroshard.runtime.replicas import compare_replicas
from zeroshard.runtime.rest import Rest
from zeroshard.runtime.weights import Weights

_log = logging.getLogger("zeroshard")
_SINCE = "an optimizer.step() ended by an exception"


class Recovery:
    """What one engine does after a step that ended by an exception."""

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
        if optimizer.rests_elsewhere:  # and is not compared there
            self._faults.lose(
                _SINCE, "some ranks may have taken other parts of the step than others"
            )
