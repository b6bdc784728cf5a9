"""Load one step into one engine: read and verify all that is needed, then write it.

Invariant: `read` changes nothing; after `apply` everything that was read is loaded, or it raises.
Cost: see checkpoint/load.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from zeroshard.checkpoint.experts import Experts
from zeroshard.checkpoint.manifest import BUFFER, STATE, VALUE, row_stride
from zeroshard.checkpoint.match import Match, Wanted
from zeroshard.checkpoint.pipeline_stages import rank_there
from zeroshard.checkpoint.rank_part import (
    EXTRA,
    OF_MODULES,
    RNG,
    SCALER,
    ExtraStates,
    generators,
    persistent_buffers,
    restore_generators,
    whole_parts,
)
from zeroshard.checkpoint.step_reader import StepReader
from zeroshard.checkpoint.values import common_part, decode
from zeroshard.core.boxes import Span
from zeroshard.core.part import Part
from zeroshard.core.placement import Tier
from zeroshard.errors import CheckpointError, ConfigError, StorageError
from zeroshard.optim.copies import fitted_state, state_after_trial
from zeroshard.optim.shards import ParamShard
from zeroshard.runtime.ema import EMA
from zeroshard.runtime.engine import Engine, RestingPiece, states_of
from zeroshard.runtime.whole import saved_names


class StepLoader:
    """Loads one step into one engine."""

    def __init__(self, saved: StepReader, engine: Engine, wanted: Wanted) -> None:
        self.extra: Any = None
        # of `skipped`: state that differed between the ranks that saved it, and is of none here
        self.differed: list[str] = []
        self._saved = saved
        self._engine = engine
        self._modules = ExtraStates(engine.module)
        self._states = {**wanted.states, OF_MODULES: self._modules}
        self._own = {EXTRA, SCALER} | ({RNG} if wanted.generators else set())
        experts = Experts.of(engine)
        self._match = Match(saved, engine, experts, wanted)
        self._parts = {name: part for name, (part, _) in whole_parts(engine, experts).items()}
        self._rank = rank_there(engine, saved.manifest.world, saved.manifest.places)
        # (to, from): masters, weights, averages
        self._copies: list[tuple[RestingPiece, Callable[[], torch.Tensor]]] = []
        self._averages: dict[str, EMA] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizer_states: dict[int, Callable[[], dict[str, Any]]] = {}  # by id of the piece
        # by id of the piece: the state that the optimizer would keep of it, of a few elements
        self._trials: dict[int, dict[str, Any]] = {}
        self._values: dict[str, Any] = {}

    @property
    def misfits(self) -> list[str]:
        """The mismatches: an error where strict."""
        return self._match.misfits

    @property
    def skipped(self) -> list[str]:
        """The entries of the checkpoint that are not loaded."""
        return self._match.skipped

    @property
    def left_out(self) -> list[str]:
        """The state of the engine that this load leaves as it is."""
        return self.misfits + self._match.left_alone

    # ------------------------------------------------------------- reading, before anything changes

    def read(self) -> None:
        """Read and verify everything that this rank needs."""
        self._read_pieces()
        if self._match.groups is not None:
            self._check_options(self._match.groups)
            self._read_optimizer()
        self._read_buffers()
        for name in self._saved.manifest.states:
            if name in self._states or name in self._own:
                self._read_state(name)
        there = self._values.get(OF_MODULES, {}).keys()
        for name in self._modules.modules.keys() - there:
            self.skipped.append(f"the extra state {name!r} is not in the checkpoint")
        for name in there - self._modules.modules.keys() if not self._saved.manifest.places else ():
            self.skipped.append(f"the extra state {name!r} is of no module here")
        try:
            states_of(self._engine).check_restored(self._values.get(SCALER, {}))
        except (ConfigError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._saved.path}: the loss scaler does not take what was saved: {error}"
            ) from error

    def _read_pieces(self) -> None:
        averages = self._averages = {
            name: state
            for name, state in self._states.items()
            if isinstance(state, EMA) and self._match.averages(name)
        }
        for piece in states_of(self._engine).resting_pieces():
            name = self._match.there.get(id(piece.parameter))
            if name is None:
                continue
            place = Span(self._parts[piece.name], piece.stride, piece.start, piece.stop)
            again = piece.state.away is not None and piece.state.away.tier is Tier.DISK
            source = self._saved.held(partial(self._saved.range, name, VALUE, place), again=again)
            self._copies.append((piece, source))
            for kind, ema in averages.items():
                beside = piece.average(ema.averages)
                if beside is not None:
                    read = partial(self._saved.range, name, kind, place)
                    self._copies.append((beside, self._saved.held(read, again=False)))

    def _check_options(self, groups: list[dict[str, Any]]) -> None:
        """Raise CheckpointError for saved options with which the optimizer cannot step."""
        optimizer, home = self._engine.optimizer, states_of(self._engine).device
        assert optimizer is not None
        for index, (mine, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            options = {**mine, **saved}
            # a fraction cuts a group: its step counts lie where its pieces are
            kinds = dict.fromkeys((piece.dtype, piece.device) for piece in mine["params"])
            try:
                trials = {
                    (dtype, device): state_after_trial(optimizer, options, dtype, device, home)
                    for dtype, device in kinds or [(torch.float32, home)]
                }
            except Exception as error:
                raise CheckpointError(
                    f"{self._saved.path}: {type(optimizer).__name__} cannot step with the options"
                    f" of param group {index} there: {type(error).__name__}: {error}"
                ) from error
            for piece in mine["params"]:
                self._trials[id(piece)] = trials[piece.dtype, piece.device]

    def _read_optimizer(self) -> None:
        kinds: dict[str, list[str]] = {}
        for name, kind in self._saved.pieces:
            if kind.startswith(STATE):
                kinds.setdefault(name, []).append(kind)
        again = self._engine.policy.default.optim.tier is Tier.DISK
        for owned in states_of(self._engine).stepped_pieces():
            there = self._match.there.get(id(owned.parameter))
            if there is not None:
                read = partial(self._state_of, there, owned, kinds.get(there, ()))
                self._optimizer_states[id(owned)] = self._saved.held(read, again=again)

    def _state_of(self, name: str, owned: ParamShard, kinds: Iterable[str]) -> dict[str, Any]:
        """Return the optimizer's state of one piece."""
        assert self._saved.manifest.optimizer is not None
        state = {
            key: decode(value, self._saved.fetch)
            for key, value in self._saved.manifest.optimizer["scalars"].get(name, {}).items()
        }
        part = self._parts[owned.name]
        wanted = Span(part, owned.stride, owned.piece.start, owned.piece.stop)
        for kind in kinds:
            tensor = self._saved.range(name, kind, wanted)
            state[kind.removeprefix(STATE)] = tensor.to(owned.tensor.device)
        try:
            return fitted_state(state, self._trials.get(id(owned.tensor), {}))
        except ValueError as error:
            raise CheckpointError(
                f"{self._saved.path}: the optimizer cannot go on from the state of parameter"
                f" {name!r}: {error}"
            ) from error

    def _read_buffers(self) -> None:
        rank, loose = self._rank or 0, self._saved.loose
        # under which older checkpoints have them
        own = {there: name for name, there in saved_names(self._engine.module).items()}
        for name, buffer in persistent_buffers(self._engine.module).items():
            shape = tuple(buffer.shape)
            keys = [f"{BUFFER}{one}@" for one in (name, own.get(name, name))]
            found = (loose.get(f"{key}{one}") for key in keys for one in (rank, 0))
            entry = next(filter(None, found), None)
            imported = self._saved.manifest.parameters.get(name)
            if entry is None and imported is not None and imported.shape == shape:
                whole = Span.of_all(Part.whole(shape), row_stride(shape))
                value = self._saved.range(name, VALUE, whole).view(shape)
                self._buffers.append((buffer, value))
            elif entry is None:
                self.skipped.append(f"buffer {name!r} is not in the checkpoint")
            elif entry.shape != shape:
                self.skipped.append(f"buffer {name!r} has another shape there")
            else:
                self._buffers.append((buffer, self._saved.whole(entry)))

    def _read_state(self, name: str) -> None:
        saved = self._saved.manifest.states[name]
        rank, value = 0, saved.get("same")
        if "same" not in saved and self._rank is not None:
            rank, value = self._rank, saved["ranks"][self._rank]
        elif "same" not in saved and name == OF_MODULES:
            self._values[name] = ExtraStates.decoded(saved, self._fetch)
            return
        elif "same" not in saved:
            path = EXTRA if name == EXTRA else f"states[{name!r}]"
            value, differing = common_part(saved["ranks"], path, self._saved.identity)
            if name not in (RNG, EXTRA) and differing:
                differing = [path]  # an object takes all of its state, or none
            self.differed += differing
            self.skipped.extend(
                f"{one}: it differed between the {self._saved.manifest.world} ranks that saved it"
                for one in differing
            )
            if differing == [path]:
                return
        num_ranks = states_of(self._engine).everyone.size
        if name == RNG and self._saved.manifest.world == 1 and num_ranks > 1:
            self.skipped.append(
                f"states[{RNG!r}]: one rank saved them, and all {num_ranks} go on with"
                " the same numbers, dropout's masks too: torch.manual_seed(seed + engine.rank)"
                " after zs.load() gives each rank its own"
            )
        self._values[name] = decode(value, partial(self._fetch, rank))

    def _fetch(self, rank: int, key: str) -> torch.Tensor:
        return self._saved.fetch(f"{key}@{rank}")

    # ------------------------------------------------------------------ writing

    def apply(self) -> None:
        """Load everything that was read. Collective; every rank has read and verified."""
        engine = self._engine
        self._load_states()
        states_of(engine).restored(self._values.get(SCALER, {}))
        with torch.no_grad(), states_of(engine).repairing(everything=not self.left_out):
            with states_of(engine).rewriting():
                for target, source in self._copies:
                    with _too_late():
                        numbers = source()
                    target.write(numbers)
                    del numbers
                    self._saved.release_memory()
            states_of(engine).overwritten(self._match.there)
            for ema in self._averages.values():
                ema.num_updates = 0  # the same on every rank, whatever they had done
            for buffer, value in self._buffers:
                buffer.copy_(value)
            if engine.optimizer is not None and self._match.groups is not None:
                self._apply_optimizer(engine.optimizer, self._match.groups)
        self.extra = self._values.get(EXTRA)

    def _load_states(self) -> None:
        """Load states and generators; restore all of them if one fails on any rank. Collective."""
        numbers = generators()
        before, loaded = dict[str, Any](), list[str]()
        for name in self._values.keys() & self._states.keys():
            with suppress(Exception):  # a state that gives none cannot be put back
                before[name] = copy.deepcopy(self._states[name].state_dict())
        try:
            with states_of(self._engine).everyone.together("zs.load()", refusal=CheckpointError):
                self._give_values(loaded)
        except CheckpointError as told:
            stuck = [
                f"states[{name!r}]"
                for name in loaded
                if name in self._states and not self._put_back(name, before)
            ]
            restore_generators(numbers)
            if stuck:
                names = ", ".join(stuck)
                raise CheckpointError(
                    f"{told}; {names} could not be put back, the rest is as it was"
                ) from told
            raise

    def _give_values(self, loaded: list[str]) -> None:
        """Give states and generators what was saved, and add their names to `loaded`. Raises
        CheckpointError.
        """
        for name, value in self._values.items():
            loaded.append(name)
            try:
                if name in self._states:
                    self._states[name].load_state_dict(value)
                elif name == RNG:
                    restore_generators(value)
            except Exception as error:
                raise CheckpointError(
                    f"states[{name!r}] does not take what was saved: {type(error).__name__}:"
                    f" {error}"
                ) from error

    def _put_back(self, name: str, before: dict[str, Any]) -> bool:
        """Load a state from `before` again; return whether it was there, and taken."""
        try:
            self._states[name].load_state_dict(before[name])
        except Exception:
            return False
        return True

    def _apply_optimizer(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
    ) -> None:
        def take_over(owned: ParamShard) -> None:
            if id(owned) not in self._optimizer_states:
                return
            with _too_late():
                state = self._optimizer_states[id(owned)]()
            optimizer.state.pop(owned.tensor, None)
            if state:
                optimizer.state[owned.tensor] = state
            self._saved.release_memory()

        states_of(self._engine).set_states(take_over)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)


@contextmanager
def _too_late() -> Iterator[None]:
    """Convert a second-read failure into StorageError: part of the state is overwritten already."""
    try:
        yield
    except CheckpointError as error:
        raise StorageError(str(error)) from None
