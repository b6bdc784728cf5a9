"""Access to what rests, for those who save, load or average it: checkpoints, averages and the
engine itself.

    states.finish_step()                no step is under way, none is late
    for piece in states.resting_pieces(): ...          masters and frozen weights, read or lent
    with states.rewriting(): ...        they are written; then the weights follow, as after a step

Invariant: what is read is never a step behind, and what is written reaches every rank before the
next forward. Cost: whatever the request costs; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

import torch
from torch import nn

from zeroshard.comm.ranks import MeshRanks, Ranks
from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.placement import VALUE, Part, Tier
from zeroshard.core.tree import Tree
from zeroshard.errors import ConfigError, StateError, StorageError
from zeroshard.memory import Trimmer
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.context import Context
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.pipeline import Following
from zeroshard.runtime.recovery import Recovery
from zeroshard.runtime.reports import Accounts
from zeroshard.runtime.rest import Rest
from zeroshard.runtime.segment_states import RestingPiece, SegmentStates, states_at_rest
from zeroshard.runtime.weights import Weights
from zeroshard.system.device import Device

_DELAYED = "delayed_steps"
_STEPS = "steps"  # by which engine.leaves() and engine.trail() number them


class StateAccess:
    """The states of one engine at rest."""

    def __init__(
        self,
        context: Context,
        weights: Weights,
        rest: Rest,
        backward: Backward,
        finalizer: Finalizer,
        recovery: Recovery,
        scaler: LossScaler | None,
    ) -> None:
        self._context = context
        self._weights = weights
        self.rest = rest
        self._backward = backward
        self._finalizer = finalizer
        self._recovery = recovery
        self._scaler = scaler
        self._faults = context.faults
        # whether a step may go on by itself, and fail unheard of
        self._steps_go_on = context.steps_into_forward and bool(context.tiering.away)
        self.transport = context.transport
        self._sharded: ShardedOptimizer | None = None
        self.accounts = Accounts(weights.units, context)
        self.is_closed = False
        self.following: Following | None = None  # the last one

    @property
    def peers(self) -> Ranks:
        """The data parallel ranks, for messages beside the engine's collectives."""
        self.check_open()
        return self._context.transport.control

    @property
    def everyone(self) -> MeshRanks:
        """All ranks of the mesh, for the same."""
        self.check_open()
        return self._context.everyone

    @property
    def tree(self) -> Tree | None:
        """The tree of a step's leaves, if the run has any."""
        leaves = self._context.leaves
        return None if leaves is None else leaves.tree

    @property
    def own_leaves(self) -> list[int]:
        """This rank's leaves of a step, in order."""
        leaves = self._context.leaves
        return [] if leaves is None else leaves.of_rank

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self._context.device

    def attach(self, sharded: ShardedOptimizer) -> None:
        """Take note of the optimizer: its state is one of ours."""
        self._sharded = sharded
        self.accounts.attach(sharded)

    def follow(self, following: Following) -> None:
        """Let a schedule drive the engine."""
        following.begin()
        self.following = following

    def close(self) -> None:
        """Refuse everything from here on."""
        self.is_closed = True

    @property
    def bytes_in_use(self) -> int:
        """Bytes of gathered weights and buffers, without those gathered for the next pass."""
        self._backward.collect_dropped()
        return self.accounts.report().temporary - self._weights.schedule.ahead_bytes

    def decided(self, name: str, value: str) -> None:
        """Take note of what every rank has to decide alike; the next step compares it."""
        self._backward.decisions.note(name, value)

    def tell(self, what: str, argument: object) -> None:
        """Inside ``engine.join()``, tell ranks without data what comes, which they do, too."""
        self._backward.tell(what, argument)

    def check_idle(self, call: str) -> None:
        """Raise StateError, naming the `call`, inside a forward or a backward."""
        if self._backward.running or self._weights.schedule.running:
            raise StateError(f"{call} inside a forward or a backward: call it between steps")

    def rewriting(self) -> AbstractContextManager[None]:
        """Return a context in which `rest.masters()` and `resting_pieces` may be written; then the
        weights follow, as after a step. Collective.
        """
        self.check_open()
        self.join_step()
        return self.rest.rewriting()

    def overwritten(self, parameters: Iterable[int]) -> None:
        """Called when every rank has read the same values for these parameters, given by id."""
        self._faults.overwritten(parameters)

    def tables(
        self, averages: Mapping[str, list[torch.Tensor]] = MappingProxyType({})
    ) -> Collection[SegmentStates]:
        """Return what rests here, by segment; `averages` beside it, by kind (SegmentStates)."""
        self.join_step()
        return states_at_rest(self._weights, self._sharded, averages).values()

    def resting_pieces(self, *, share: bool = False) -> Iterator[RestingPiece]:
        """Yield what rests here of every parameter: the master where there is one, else the weight.

        With `share`, of what rests on every rank only this rank's share: all ranks' pieces together
        are then every element once.
        """
        return chain.from_iterable(one.pieces((VALUE,), share=share) for one in self.tables())

    def stepped_pieces(self) -> Iterator[ParamShard]:
        """Yield what the optimizer steps here, a tensor of its own per piece of a parameter."""
        return iter(()) if self._sharded is None else iter(self._sharded.pieces())

    def optimizer_states(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of the states that rest off the device, by key, of the shard that stands as
        `tensor` in the optimizer.
        """
        shard = next((one for one in self.stepped_pieces() if one.tensor is tensor), None)
        if shard is None or self._sharded is None:
            return {}
        return self._sharded.states.away(shard)

    def set_states(self, set_state: Callable[[ParamShard], None]) -> None:
        """Call `set_state` for everything that the optimizer steps here, and put the state that
        it sets to rest where it belongs, a tile at a time.

        Collective; raises StorageError on every rank.
        """
        with self._faults.together(lost=True):
            if self._sharded is not None:
                self._sharded.park(set_state)

    def finish_step(self) -> None:
        """Return when no step is under way, and one that was taken late is in the weights.

        Collective; raises StorageError on every rank, and StateError where what rests is lost.
        """
        self._faults.check(passes=False)
        self.join_step()
        if self._sharded is not None and self._sharded.runner.lags:
            with self.rest.rewriting():
                pass
            self._sharded.runner.note_late(lags=False)

    @property
    def unsaved(self) -> str | None:
        """The reason not to save what rests here, if there is one."""
        return self._faults.unsaved

    @property
    def trimmer(self) -> Trimmer:
        """Keeps the allocator from holding on to temporaries."""
        return self._context.tiering.trimmer

    @property
    def own_places(self) -> dict[str, tuple[int, int]]:
        """By pattern of parameters that only some ranks hold: which of how many groups of ranks
        this rank is in.
        """
        own = self._context.own.items()
        return {pattern: one.holders.place for pattern, one in own if one.holders.differ}

    @property
    def rests_on_disk(self) -> bool:
        """Whether any state rests on disk, on any rank."""
        return any(Tier.DISK in tiers for tiers in self._context.tiering.away.values())

    @property
    def is_lost(self) -> bool:
        """Whether a tier has failed in the middle of a write, on any rank, so that only a load
        of everything helps.
        """
        return self._faults.is_lost

    def parameter_layouts(self) -> dict[int, tuple[Part, tuple[int, ...], bool]]:
        """Return, by id of each parameter, which part of it is here, the stride in which that
        lies, and whether it is trained.
        """
        return {
            id(parameter): (part, stride, segment.bucket is not None)
            for segment in self._weights.segments
            for parameter, part, stride in zip(
                segment.parameters, segment.parts, segment.flat.strides, strict=True
            )
        }

    def parts(self) -> dict[str, tuple[Part, bool]]:
        """Return, by name of each parameter, which part of it the ranks of this data parallel
        group have, and whether it counts here: of several groups with the same part, the first's.
        """
        alike = [axis.name for axis in self._context.mesh.others if axis.alike]
        first_along = self._context.axes.place.first_along
        return {
            name: (part, part.counts(alike, first_along))
            for segment in self._weights.segments
            for name, part in zip(segment.names, segment.parts, strict=True)
        }

    @property
    def has_pending_gradients(self) -> bool:
        """Whether a backward has left gradients that no step has taken yet."""
        self._backward.collect_dropped()
        return self._finalizer.pending

    def hide_gradients(self) -> None:
        """Let ``.grad`` of the model's parameters be None. The optimizer holds the gradients."""
        if self._sharded is None:
            raise StateError(
                "hide_gradients() needs an optimizer, which holds the gradients: call"
                " engine.attach(optimizer) first"
            )
        self._backward.parameters.hides = True

    def gradient_set(self) -> None:
        """Called on every rank when averaged gradients were set."""
        self._finalizer.averages_set()

    def param_groups(self) -> list[list[nn.Parameter]]:
        """Return the model's parameters of each of the optimizer's param groups."""
        return [] if self._sharded is None else [list(group) for group in self._sharded.parameters]

    def scaler_state(self) -> dict[str, float]:
        """Return the fp16 loss scaler's state, and how many steps the engine and `delayed_update`
        have counted.
        """
        state = {} if self._scaler is None else self._scaler.state_dict()
        state[_STEPS] = self._finalizer.step
        if self._sharded is not None and self._context.tiering.delayed_update is not None:
            state[_DELAYED] = self._sharded.runner.num_steps
        return state

    def begin_load(self) -> None:
        """Called before a load: no step is under way, and whether what rests is lost is known on
        every rank. Collective.
        """
        self._weights.availability.check_trained()
        self.end_step()
        for segment in self._weights.segments:
            segment.forget_overwritten()
        with suppress(StorageError):
            self._faults.agree()
        with suppress(StorageError):  # all groups of the mesh come here
            if self._recovery.meet(self._sharded, "zs.load()"):
                self._backward.abandon()
                self._finalizer.abandon()

    def check_restored(self, scaler: Mapping[str, object]) -> None:
        """Raise ConfigError for what `restored` could not take over."""
        numbers = dict(scaler)
        for name in (_DELAYED, _STEPS):
            count = numbers.pop(name, 0)
            if type(count) is not int or count < 0:
                raise ConfigError(f"{name} is {count!r}, not a number of steps")
        if self._scaler is not None and numbers:
            replace(self._scaler).load_state_dict(numbers)

    def restored(self, scaler: Mapping[str, float]) -> None:
        """Called when another state has been loaded: gradients are dropped, and `scaler` is
        taken over in fp16.
        """
        self._backward.abandon()
        self._finalizer.abandon()
        numbers = dict(scaler)
        late, steps = numbers.pop(_DELAYED, None), numbers.pop(_STEPS, None)
        if self._sharded is not None and late is not None:
            self._sharded.runner.count_from(int(late))
        if steps is not None:
            self._finalizer.continue_from(int(steps), self._finalizer.skipped)
        if self._scaler is not None and numbers:
            self._scaler.load_state_dict(numbers)

    @contextmanager
    def repairing(self, *, everything: bool) -> Iterator[None]:
        """Write what rests inside, by `rewriting` and `set_states`; `everything` of it: what was
        lost is whole again then.

        What rests on other tiers gets memory of its own again if something has failed: the file
        that was there may be cut off or damaged. Collective; raises StorageError on every rank.
        """
        if everything and self._faults.is_suspect:
            with self._faults.together(lost=True):
                for unit in self._weights.units:
                    for segment in unit.segments:
                        segment.renew(self._context.tiering.store)
                        if segment.bucket is not None:
                            segment.bucket.accumulator.release_idle()
                for tile in () if self._sharded is None else self._sharded.tiles:
                    for storage in tile.segment.moments.values():
                        storage.close()
                    tile.segment.moments.clear()
        yield
        if everything:
            self._faults.repaired()

    def join_step(self) -> None:
        """Return when no step is under way, and what rests may be read and written as what is
        trained, with what the user has written to the weights since; what went wrong in the step
        is noted.
        """
        self.join_trained()
        self.rest.take_writes()

    def join_trained(self) -> None:
        """`join_step` for who writes what the user has written himself."""
        self._weights.availability.check_trained()
        self._join_step()

    def _join_step(self) -> None:
        with self._faults.noted(lost=True):
            if self._sharded is not None:
                self._sharded.join()

    def end_step(self) -> None:
        """Return when no step is under way, whatever it ended by."""
        with suppress(Exception):
            self._join_step()

    def check_readable(self, *, ends_graphs: bool = False) -> None:
        """Refuse to show what is lost. Raises StorageError where that is heard of only now, of a
        step that went on by itself. Collective.

        A step that was taken late is brought into the weights, but within the next one, which has
        begun to compute without it. `ends_graphs`: also where a forward has left a graph, which
        may be one that no backward follows.
        """
        self.check_open()
        self._weights.availability.check_gather()
        self._faults.check(passes=False)
        if self._context.tiering.delayed_update is not None:
            schedule = self._weights.schedule
            running = self._backward.running or schedule.running > 0
            is_held = any(unit.residency.is_held for unit in self._weights.units)
            graph = (is_held or schedule.has_graph) and not ends_graphs
            within = running or graph or self.has_pending_gradients
            # ranks may have run other modules
            if not any(self.peers.share(within, "a read of whole weights")):
                self.finish_step()
        if self._steps_go_on:
            self._join_step()  # averages may be in the place of what is trained
            self._faults.agree()

    def check_open(self, *, trained: bool = False) -> None:
        """Raise StateError where the engine is closed, or refuses to be used; `trained`: also where
        what rests is off the device, or averages.
        """
        self._weights.availability.check_open()
        if self.is_closed:
            raise StateError(
                "this engine is closed: the module is plain again; call zeroshard.shard() for a"
                " new one"
            )
        if trained:
            self._weights.availability.check_trained()


# ---------------------------------------------------------------------------- what decides the bits
# The conditions, beside code and data, that decide the bits of a run with leaves: saved with it,
# and compared when it goes on.


def curve_of(states: StateAccess) -> dict[str, str]:
    """Return the tree of an engine's leaves, and with what its kernels run; empty without
    leaves.
    """
    return {} if states.tree is None else {"leaves": str(states.tree), **kernels_of(states.device)}


def kernels_of(device: torch.device) -> dict[str, str]:
    """Return what chooses the kernels of a process that computes on `device`."""
    return {
        "torch": torch.__version__,
        "device": device.type if device.type == "cpu" else Device.of(device).facts()["name"],
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def departures(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return in which respects a run goes on otherwise than it was `saved`; empty where it had no
    leaves: nothing was promised then.
    """
    return [
        f"{name} was {value} and is {here.get(name, 'not set')}"
        for name, value in saved.items()
        if here.get(name) != value
    ]
