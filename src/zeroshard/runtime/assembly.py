"""An engine is put together from parts, once when it is made, and anew whenever its states come to
lie otherwise (``Engine.repartition``).

Invariant: the parts are those of one context and one list of units; nobody keeps an old one. Cost:
none beside that of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zeroshard.core.digest import Digest
from zeroshard.core.policy import Policy
from zeroshard.core.precision import Precision
from zeroshard.optim.scaler import LossScaler
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import Tile
from zeroshard.runtime.access import StateAccess
from zeroshard.runtime.build import Context
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.forked import refuse_in_children
from zeroshard.runtime.hooks import Hooks
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.parts import input_dtype, make_weights_and_gradients, step_settings
from zeroshard.runtime.recovery import Recovery
from zeroshard.runtime.rest import Rest
from zeroshard.runtime.step_tiles import StepTiles
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.units import UnitPlan
from zeroshard.runtime.whole import Whole

__all__ = ["Assembly"]


class Assembly:
    """A module and the parts of its engine."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._sharded: ShardedOptimizer | None = None
        self._tiles: StepTiles | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, or None where none is attached."""
        return None if self._sharded is None else self._sharded.optimizer

    @property
    def policy(self) -> Policy:
        """The row of the table in force."""
        return self._context.policy

    @property
    def rank(self) -> int:
        """This rank's number among the data parallel ranks."""
        return self._context.transport.rank

    @property
    def world(self) -> int:
        """The number of data parallel ranks."""
        return self._context.transport.size

    @property
    def precision(self) -> Precision:
        """The dtypes in force."""
        return self._context.precision

    @property
    def _scaler(self) -> LossScaler | None:
        """What scales the loss in fp16."""
        return self._context.options.loss_scaler

    def _put_together(
        self,
        units: Sequence[Unit],
        plans: Sequence[UnitPlan],
        context: Context,
        prefetch_bytes: int | None,
    ) -> None:
        """Make the parts around `units`, which rest; none of the module's is hooked.
        Collective.
        """
        self._context = context
        transports, faults, digest = context.transports, context.faults, Digest()
        weights, backward = make_weights_and_gradients(
            units, context, digest, prefetch_bytes=prefetch_bytes
        )
        self._weights, self._backward = weights, backward
        self._finalizer = Finalizer(backward, context, digest, self._scaler)
        rest = Rest(weights, transports=transports, faults=faults)
        self._recovery = Recovery(weights, rest, digest, context)
        self._loop = Loop(
            self.module, context, weights, backward, self._finalizer, rest, self._recovery
        )
        self._states = StateAccess(
            context, weights, rest, backward, self._finalizer, self._recovery, self._scaler
        )
        self._whole = Whole(self.module, weights, self._finalizer, context, self._states.join_step)
        self._hooks = Hooks(
            self.module,
            plans,
            self._loop,
            input_dtype=input_dtype(context),
            write_back=self._whole.load_unit,
            owner=self,
        )
        transports.watch(digest, context.streams.is_idle)
        has_peers = context.transport.size > 1 or context.axes.size > 1
        refuse_in_children(self, weights.availability.refuse if has_peers else None)

    def _step_with(self, sharded: ShardedOptimizer, tiles: StepTiles) -> None:
        """Let `sharded` step the `tiles` of these parts."""
        self._sharded, self._tiles = sharded, tiles
        self._loop.attach(sharded, tiles.after_step if tiles.balance is not None else None)
        self._states.attach(sharded)
        self._backward.attach(sharded)

    def _rejoin(self, cut: Sequence[list[Tile]]) -> None:
        """Step the optimizer that these parts have taken over, in the tiles `cut`."""
        if self._sharded is None:
            return
        units = self._weights.units
        tiles = StepTiles(units, self._context, cut)
        self._sharded.rejoin(tiles.all, self._loop, *step_settings(self._context, units))
        self._step_with(self._sharded, tiles)
