"""An engine is put together from parts, once when it is made, and anew whenever its states come to
lie otherwise (``Engine.repartition``).

Invariant: the parts belong to one context and one list of units; nobody keeps an old one. Cost:
none beside the parts' own.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import nn

from zeroshard.comm.cpu.control import PeerControl
from zeroshard.comm.job import heartbeat, status
from zeroshard.core.digest import Digest, describe_unlike, first_unlike
from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.policy import Policy
from zeroshard.core.precision import Precision
from zeroshard.errors import PlanMismatch
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import Tile
from zeroshard.runtime.access import StateAccess
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.build import make_weights_and_gradients, step_settings
from zeroshard.runtime.context import Context
from zeroshard.runtime.drafts import draft_steps
from zeroshard.runtime.events import StepEvents
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.guards import Watch
from zeroshard.runtime.hooks import Hooks
from zeroshard.runtime.late_finalize import LateFinalizer, serves
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.recovery import Recovery, verify_replicas
from zeroshard.runtime.rest import Rest
from zeroshard.runtime.step_tiles import StepTiles
from zeroshard.runtime.trees import tensors_within
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.units import UnitPlan
from zeroshard.runtime.weights import Weights
from zeroshard.runtime.whole import Whole
from zeroshard.state.local import local_of
from zeroshard.system.device import Device

# ------------------------------------------------------------------------------------------- forked
# A forked child of a rank is no rank: it holds copies of the rank's sockets and of its shared
# memory, and every use of them corrupts the job.
#
# A data loader's workers are such children, and whatever a program starts with ``os.fork()`` or
# ``multiprocessing`` in its "fork" mode. In the child every use of a sharded module, of its
# optimizer and of its engine raises StateError; the parents do not notice.
#
# The engines of a forked child are kept alive until it ends: destroying them would wait for threads
# that a fork does not copy.
#
# Cost: nothing in the parents; one callback per fork. What it does not do: look after an engine of
# one process, which has no peers.


# what makes every later use of an engine raise StateError, by engine, which it must not hold: that
# would live for ever
_REFUSALS: weakref.WeakKeyDictionary[object, Callable[[str], None]] = weakref.WeakKeyDictionary()
_KEPT: list[object] = []  # in a forked child only


def _in_child() -> None:
    for engine, refuse in list(_REFUSALS.items()):
        _KEPT.append(engine)
        refuse(
            f"process {os.getpid()} was forked off a rank and cannot use its sharded module,"
            f" optimizer or engine: use them in process {os.getppid()}, and give a child numbers"
            " instead (engine.full_state_dict())"
        )


os.register_at_fork(after_in_child=_in_child)


# ----------------------------------------------------------------------------------------- assembly

_EVALUATED = "a forward without gradients"


class _Listeners:
    """The listeners at the events of one engine's steps beside the loop."""

    def __init__(
        self,
        module: nn.Module,
        context: Context,
        weights: Weights,
        backward: Backward,
        finalizer: Finalizer,
        watch: Watch,
    ) -> None:
        self._module = module
        self._context = context
        self._weights = weights
        self._finalizer = finalizer
        self._sharded: ShardedOptimizer | None = None
        self._control = context.transport.control
        options, faults = context.options, context.faults
        beats = [] if (beat := heartbeat()) is None else [beat]
        # elsewhere ranks may run forwards that the others do not
        may_agree = context.weights_leave or context.transport.size == 1
        agrees = bool(context.tiering.away) and may_agree
        by_order = isinstance(self._control, PeerControl) and not context.levels.keyed
        # who is called at each event, in this order
        self.events = StepEvents(
            before_forward=[
                faults.check,
                self._check_finished,
                watch.check_frozen,
                partial(backward.tell, "forward"),  # to ranks without data, in join()
                *beats,
            ],
            forward_begun=[self._broadcast] if options.broadcast_buffers else [],
            forward_agreed=[self._agree] if agrees else [],
            evaluated=[self._post_digests] if by_order else [],
            before_step=[
                faults.check,
                self._weights.availability.check_trained,
                watch.check,
                *([] if options.clip_norm is None else [self._clip]),
            ],
            averaged=[] if options.verify_every is None else [self._verify],
            after_step=[*beats, self._first_step_over],
        )

    def attach(self, sharded: ShardedOptimizer, tiles: StepTiles) -> None:
        """`sharded` steps the `tiles` from here on."""
        self._sharded = sharded

        def balance() -> None:
            """Move the cut between device and host to where the last steps say."""
            with self._context.faults.noted(lost=True):
                tiles.after_step(sharded)

        if tiles.balance is not None:
            self.events.after_step.append(balance)

    def _first_step_over(self) -> None:
        self.events.after_step.remove(self._first_step_over)
        self._context.first_step_over()

    def _check_finished(self) -> None:
        if self._sharded is not None:
            self._sharded.check_finished()

    def _broadcast(self) -> None:
        """Let every rank have rank 0's buffers."""
        for buffer in self._module.buffers():
            self._context.transport.broadcast(local_of(buffer))

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients; return their norm before."""
        return self._finalizer.clip(max_norm, self.events.clipped)

    def _clip(self) -> None:
        """Clip as the configuration says where the user has not clipped."""
        max_norm = self._context.options.clip_norm
        if max_norm is not None and not self._finalizer.clipped:
            self.clip(max_norm)

    def _agree(self) -> None:
        """Share failures between the ranks, also of a step that goes on by itself."""
        with self._context.faults.together(lost=True):
            if self._sharded is not None:
                self._sharded.runner.raise_failure()

    def _post_digests(self) -> None:
        """Post the digests of what this rank has gathered, if anything, since the ranks last
        compared: no step may follow that would compare them.
        """
        context, digest, before = self._context, self._weights.digest, self.events.before_forward
        if digest.has_news(context.holders.members):
            _, members = context.held
            mine = struct.pack(f"<{len(members)}Q", *map(digest.value, members))
            assert isinstance(self._control, PeerControl), self._control
            self._control.post(mine, _EVALUATED, self._compare_digests)
            if context.options.strict:
                self._control.read_posted()
            elif self._read_digests not in before:
                before.append(self._read_digests)

    def _read_digests(self) -> None:
        """A forward begins after one without gradients: compare before its backward meets others'.
        Between two of the latter hosts may be one forward apart.
        """
        if torch.is_grad_enabled():
            self.events.before_forward.remove(self._read_digests)  # the last of them
            assert isinstance(self._control, PeerControl), self._control
            self._control.read_posted()

    def _compare_digests(self, payloads: Sequence[bytes]) -> None:
        """Raise PlanMismatch where ranks that meet in gathers have posted unlike digests."""
        held, members = self._context.held
        if first_unlike(held, [struct.unpack(f"<{len(members)}Q", one) for one in payloads]):
            mine = list(map(self._weights.digest.log, members))
            logs = self._control.share(mine, f"the comparison of {_EVALUATED}")
            raise PlanMismatch(
                f"the ranks ran other units in {_EVALUATED}; {describe_unlike(held, logs)}. Gathers"
                " meet by their order alone here, so units of one size may have been mixed: drop"
                " the results, and call engine.reset() on every rank"
            )

    def _verify(self) -> None:
        every = self._context.options.verify_every
        if every is not None and self._weights.digest.step % every == every - 1:
            verify_replicas(self._weights, self._sharded, self._context)


_TOLD_S = 0.5  # between two notes of what this rank holds, and how fast it is
_WHOLE = (torch.int64, torch.int32)


class _Pulse:
    """Notes for ``zeroshard top`` how far this rank is, and what it holds."""

    _noted: tuple[float, ...]

    def __init__(self, tell: Callable[..., None], digest: Digest, states: StateAccess) -> None:
        self._tell, self._digest, self._states = tell, digest, states
        self._begun, self._steps, self._tokens, self._noted = monotonic(), 0, 0, ()

    def called(self, inputs: Any) -> None:
        """Count the tokens of a micro-batch that trains: whole numbers in its `inputs`."""
        if torch.is_grad_enabled():
            sizes = (one.numel() for one in tensors_within(inputs) if one.dtype in _WHOLE)
            self._tokens += next(sizes, 0)

    def stepped(self) -> None:
        """Note the step, and the rest at most twice a second."""
        self._steps += 1
        seconds = monotonic() - self._begun
        if seconds > _TOLD_S or not self._noted:
            report, accelerator = self._states.accounts.report(), Device.accelerator()
            usage = accelerator and accelerator.usage()
            rest, (_, reserved) = report.by_tier["device"], usage or (0, 0)
            sizes = rest + report.temporary, rest + report.peak, reserved
            self._noted = (seconds / self._steps, self._tokens / seconds, *sizes)
            self._begun, self._steps, self._tokens = monotonic(), 0, 0
        self._tell(self._digest.step, *self._noted)


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
        """Return the loss scaler of fp16."""
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
        kind = LateFinalizer if serves(backward, context) else Finalizer
        self._finalizer = kind(backward, context, digest)
        rest = Rest(weights, transports=transports, faults=faults)
        self._recovery = Recovery(weights, rest, digest, context)
        self._watch = Watch(self.module, units)
        self._listeners = _Listeners(
            self.module, context, weights, backward, self._finalizer, self._watch
        )
        events = self._listeners.events
        self._loop = Loop(context, weights, backward, self._finalizer, rest, events)
        self._states = StateAccess(
            context, weights, rest, backward, self._finalizer, self._recovery, self._scaler
        )
        if (tell := status()) is not None:
            pulse = _Pulse(tell, digest, self._states)
            events.called.append(pulse.called)
            events.after_step.append(pulse.stepped)
        self._whole = Whole(
            self.module, weights, self._finalizer, context, self._states.join_trained
        )
        as_given = context.dtypes.as_given or context.precision.compute is torch.float32
        self._hooks = Hooks(
            self.module,
            plans,
            self._loop,
            # as they are given where that is the dtype of what computes
            input_dtype=None if as_given else context.precision.compute,
            watch=self._watch,
            write_back=self._whole.load_unit,
            owner=self,
        )
        transports.watch(digest, context.streams.is_idle)
        if context.transport.size > 1 or context.axes.size > 1:
            _REFUSALS[self] = weights.availability.refuse
        else:
            _REFUSALS.pop(self, None)

    def _step_with(self, sharded: ShardedOptimizer, tiles: StepTiles) -> None:
        """Let `sharded` step the `tiles` of these parts."""
        self._sharded, self._tiles = sharded, tiles
        self._listeners.attach(sharded, tiles)
        self._states.attach(sharded)
        self._backward.attach(sharded)
        if self._context.tiering.step_in_backward:
            draft_steps(self._weights, self._backward, sharded, self._finalizer, self._scaler)

    def _rejoin(self, cut: Sequence[list[Tile]]) -> None:
        """Step the optimizer that these parts have taken over, in the tiles `cut`."""
        if self._sharded is None:
            return
        units = self._weights.units
        tiles = StepTiles(units, self._context, cut, whole=self._sharded.states.whole)
        settings = step_settings(self._context, units, self._backward.decisions)
        self._sharded.rejoin(tiles.all, self._loop, *settings)
        self._step_with(self._sharded, tiles)
