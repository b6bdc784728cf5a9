"""The parts that an engine is put together from, out of a model and its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.core.digest import Digest
from zeroshard.core.schedule import Rules, Schedule, is_ordered
from zeroshard.errors import StateError
from zeroshard.memory import Trimmer
from zeroshard.optim.runner import StepOptions
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.tiles import PartialState
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.build import Context
from zeroshard.runtime.decisions import Decisions
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.guards import Watch
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.reductions import Reductions
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights


@dataclass(frozen=True)
class Parts:
    """The parts of one engine that hold its states, and the tie to its optimizer."""

    context: Context
    loop: Loop
    finalizer: Finalizer
    watch: Watch
    sharded: ShardedOptimizer | None

    @property
    def weights(self) -> Weights:
        """The weights of all units."""
        return self.loop.weights

    @property
    def backward(self) -> Backward:
        """Their gradients."""
        return self.loop.backward

    def check_at_rest(self, call: str) -> None:
        """Raise StateError, naming the `call`, where something is under way that goes on with
        the layout as it is, or where the model is not the one that was sharded.
        """
        self.loop.check_states()
        if (unsaved := self.context.faults.unsaved) is not None:
            raise StateError(f"{call}: what rests here is not whole: {unsaved}")
        if self.sharded is not None:
            self.sharded.check_finished()
        if self.context.streams.probe.recording is not None:
            raise StateError(f"{call} inside engine.trace(): leave that first")
        if not self.backward.runs_plainly:
            raise StateError(
                f"{call} inside no_sync(), join() or a schedule that the engine follows: call it"
                " outside"
            )
        self.watch.check()
        self.watch.check_frozen()
        for leaf in self.backward.parameters:
            if not leaf.parameter.requires_grad:
                raise StateError(
                    f"parameter {leaf.name!r} was trained when the model was sharded and is frozen"
                    f" now: set requires_grad=True before {call}"
                )


def make_weights_and_gradients(
    units: Sequence[Unit], context: Context, digest: Digest, *, prefetch_bytes: int | None
) -> tuple[Weights, Backward]:
    """Make what gathers `units`, and what takes their gradients."""
    residencies, transport = [unit.residency for unit in units], context.transport
    rules = Rules.of(
        [residency.traits for residency in residencies],
        ordered=is_ordered(
            one_sided=context.levels.one_sided,
            leave=context.weights_leave,
            coded=any(unit.is_coded for unit in units),
        ),
        keyed=context.levels.keyed,
        enqueues=context.streams.enqueues,
        around=context.policy.weights_leave_the_device and not context.options.trains,
        alone=transport.size == 1,
        prefetch_bytes=prefetch_bytes,
    )
    schedule = Schedule(residencies, rules, context.meter)
    streams = context.streams
    reductions = Reductions(
        units, schedule.reduces, streams=streams, digest=digest, transports=context.transports
    )
    weights = Weights(
        units,
        schedule,
        reductions.finish,
        streams=streams,
        digest=digest,
        trimmer=context.tiering.trimmer if context.device.type == "cpu" else Trimmer(None),
    )
    shares, leaves = context.options.batch_shares, context.leaves
    share = shares[context.transport.rank] if shares and leaves is None else None
    sums = context.options.sums_ranks
    return weights, Backward(weights, reductions, share=share, leaves=leaves, sums_ranks=sums)


def step_settings(
    context: Context, units: Sequence[Unit], decisions: Decisions
) -> tuple[PartialState, StepOptions]:
    """Return what the optimizer's step knows of the engine."""
    transport, tiering = context.transport, context.tiering
    is_part = transport.size > 1 and any(unit.cells.optim.is_sharded for unit in units)
    part = PartialState(transport.rank, transport.size, is_part=is_part, note=decisions.note)
    return part, StepOptions(
        context.device,
        enqueues=context.streams.enqueues,
        into_forward=context.steps_into_forward,
        delayed_update=tiering.delayed_update,
        timed=tiering.automatic,
        trimmer=tiering.trimmer,
        probe=context.streams.probe,
    )


def input_dtype(context: Context) -> torch.dtype | None:
    """Return the dtype into which the model's inputs are cast, None to leave them alone."""
    as_given = context.dtypes.as_given or context.precision.weight_is_master
    return None if as_given else context.precision.compute
