"""``zeroshard.load``: from any layout into any other; each rank reads the bytes of its own pieces.

    choose a step (rank 0) . compare parameters . read and verify everything needed . agree . write

Invariant: nothing of the engine, the optimizer or the states has changed when it raises
CheckpointError. Cost: the bytes of this rank's pieces, plus at most a chunk at either end of each;
memory for the state a second time, except for state on disk, which is read twice, a piece at a
time, first to be verified.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from zeroshard.checkpoint.manifest import BUFFER, STATE, VALUE
from zeroshard.checkpoint.pieces import (
    EXTRA,
    RNG,
    SCALER,
    Stateful,
    check_arguments,
    generators,
    parameters_of,
    persistent_buffers,
    restore_generators,
)
from zeroshard.checkpoint.save import on_all_ranks, raise_on_all
from zeroshard.checkpoint.step_reader import StepReader
from zeroshard.checkpoint.steps import list_steps, remember_steps
from zeroshard.checkpoint.values import decode
from zeroshard.core.placement import Tier
from zeroshard.errors import CheckpointError, ConfigError, StorageError
from zeroshard.optim.copies import fitted_state, state_after_trial
from zeroshard.optim.shards import ParamShard
from zeroshard.runtime.ema import EMA
from zeroshard.runtime.engine import Engine, RestingPiece, states_of

__all__ = ["Restored", "latest_step", "load"]

_log = logging.getLogger("zeroshard")


@dataclass
class Restored:
    """The result of `load`."""

    step: int
    path: Path
    extra: Any = None
    # entries of the checkpoint that were not loaded, and state that it lacks
    skipped: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # newer steps that were passed over, and why
    bytes_read: int = 0  # on this rank


def latest_step(directory: str | Path) -> int | None:
    """Return the newest complete step in `directory`, or None."""
    return next(reversed(list_steps(Path(directory))), None)


def load(
    directory: str | Path,
    engine: Engine,
    *,
    step: int | None = None,
    states: Mapping[str, Stateful] | None = None,
    strict: bool = True,
    fallback: Literal["previous"] | None = None,
    verify: bool = True,
    frozen: bool = True,
) -> Restored:
    """Read the newest checkpoint in `directory`, or that of `step`, into `engine`. Collective.

    It may have been saved under any row, precision, number of ranks and unit cut. `states` are the
    objects that were saved under these names; random generators and the loss scaler are loaded too.
    State that differed between ranks is loaded on as many ranks as saved it. Without `strict`,
    whatever does not fit (missing, unexpected and reshaped parameters, param groups, states) is
    left out and named in ``Restored.skipped``. ``fallback="previous"`` replaces a damaged step by
    the one before it. `verify` off reads without comparing hashes. Without `frozen` the engine's
    frozen parameters stay as they are.

    Raises CheckpointError on every rank, with nothing changed: if ``load_state_dict()`` of one of
    `states` fails, all get their former ``state_dict()`` back, and one that refuses it is named.
    Raises StorageError if a tier fails on any rank: the state is then half loaded, and the engine
    refuses to continue until a load succeeds.
    """
    check_arguments(directory, engine, states)
    directory = Path(directory)
    states_of(engine).begin_load()
    candidates = _candidates(directory, engine, step)
    damaged: list[str] = []
    while True:
        number = candidates.pop()
        try:
            options = {"strict": strict, "verify": verify, "frozen": frozen}
            restored = _load_step(directory, number, engine, dict(states or {}), **options)
        except CheckpointError as error:
            if not candidates:
                raise CheckpointError("; ".join([*damaged, str(error)])) from error
            if fallback is None:
                more = f". Step {candidates[-1]} is there, too: fallback='previous' takes it"
                if isinstance(error, _Misfit):
                    more = ""
                raise CheckpointError(f"{error}{more}") from error
            damaged.append(str(error))
            if engine.rank == 0:
                _log.warning("step %d is passed over: %s", number, error)
            continue
        restored.damaged = damaged
        return restored


def _candidates(directory: Path, engine: Engine, step: int | None) -> list[int]:
    """Return the steps to try, first choice last. Rank 0 decides: others may see a prune."""
    steps: list[int] = []
    with on_all_ranks(engine, "zs.load()", f"{directory} cannot be listed"):
        if engine.rank == 0:
            steps = list(list_steps(directory))
            if not steps:
                raise CheckpointError(f"{directory} holds no checkpoint")
    answer = states_of(engine).peers.exchange(",".join(map(str, steps)).encode(), "zs.load()")[0]
    steps = [int(number) for number in answer.decode().split(",")]
    if step is not None and step not in steps:
        raise _NoSuchStep(f"{directory} holds no step {step}; its newest is {steps[-1]}")
    return [number for number in steps if step is None or number <= step]


def _load_step(
    directory: Path,
    step: int,
    engine: Engine,
    states: dict[str, Stateful],
    *,
    strict: bool,
    verify: bool,
    frozen: bool,
) -> Restored:
    with ExitStack() as stack:
        # also for invalid values, a disk that fails, no memory
        with on_all_ranks(engine, "zs.load()", f"step {step} in {directory} cannot be read"):
            path = list_steps(directory).get(step)
            if path is None:
                raise CheckpointError(
                    f"{directory} holds no step {step} that this rank can see: is it on storage"
                    " that all ranks share?"
                )
            saved = StepReader(path, stack, states_of(engine).trimmer(), verify=verify)
            reading = _Reading(saved, engine, states, frozen=frozen)
            if strict and reading.misfits:
                raise _Misfit(
                    f"{path} does not fit {type(engine.module).__name__}: {_some(reading.misfits)};"
                    " strict=False loads what fits"
                )
            if states_of(engine).is_lost and reading.left_out:
                raise _Misfit(
                    f"{path} would leave out {_some(reading.left_out)}, and what rests here is lost"
                    " since a tier failed: load all of it"
                )
            reading.read()
        mine = saved.text_hash.encode()
        if len(set(states_of(engine).peers.exchange(mine, "zs.load()"))) > 1:
            raise CheckpointError(
                f"the ranks see different checkpoints under {directory}: is it on storage that all"
                " ranks share?"
            )
        reading.apply()
        if engine.rank == 0:
            with suppress(CheckpointError):
                remember_steps(directory)  # steps of other jobs are known from now on
        skipped = reading.misfits + reading.skipped
        return Restored(step, path, reading.extra, skipped, bytes_read=saved.bytes_read)


class _NoSuchStep(CheckpointError):
    """The step that was asked for is not there; the others are sound."""

    exit_code = ConfigError.exit_code


class _Misfit(CheckpointError):
    """The checkpoint is sound, and of another model."""


class _Reading:
    """One checkpoint on its way into one engine."""

    def __init__(
        self, saved: StepReader, engine: Engine, states: dict[str, Stateful], *, frozen: bool
    ) -> None:
        self.misfits: list[str] = []  # an error where strict
        self.skipped: list[str] = []
        self.extra: Any = None
        self._saved = saved
        self._engine = engine
        self._states = states
        # (to, from): masters, weights, averages
        self._copies: list[tuple[torch.Tensor | RestingPiece, Callable[[], torch.Tensor]]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._optimizer_states: dict[int, Callable[[], dict[str, Any]]] = {}  # by id of the piece
        # by id of the piece: the state that the optimizer would keep of it, of a few elements
        self._trials: dict[int, dict[str, Any]] = {}
        self._values: dict[str, Any] = {}
        self._left_alone: list[str] = []  # frozen parameters, where they are not asked for
        self._there = self._match(frozen=frozen)
        self._groups = self._match_groups()
        self._check_states()

    @property
    def left_out(self) -> list[str]:
        """What this load leaves as it is."""
        return self.misfits + self._left_alone

    # ------------------------------------------------------------------ matching

    def _match(self, *, frozen: bool) -> dict[int, str]:
        """Return each parameter's name in the checkpoint, by id, and collect what does not fit."""
        saved = self._saved.manifest.parameters
        by_any_name = {one: name for name, entry in saved.items() for one in (name, *entry.aliases)}
        left = dict.fromkeys(saved)
        found: dict[int, str] = {}
        parameters = dict(self._engine.module.named_parameters())
        for name, entry in parameters_of(self._engine).items():
            known = [alias for alias in (name, *entry.aliases) if alias in by_any_name]
            if not (frozen or entry.trained):
                self._left_alone.append(name)
                left.pop(by_any_name[known[0]] if known else name, None)
                continue
            if not known:
                self.misfits.append(f"parameter {name!r} is not in the checkpoint")
                continue
            there = by_any_name[known[0]]
            left.pop(there, None)
            shape = saved[there].shape
            if shape == entry.shape:
                found[id(parameters[name])] = there
                continue
            self.misfits.append(
                f"parameter {name!r} is {list(shape)} in the checkpoint and {list(entry.shape)}"
                " in the model"
            )
        # imports from some formats hold buffers as parameters
        buffers = persistent_buffers(self._engine.module)
        self.misfits += [
            f"parameter {other!r} of the checkpoint is not in the model"
            for other in left
            if other not in buffers
        ]
        return found

    def _match_groups(self) -> list[dict[str, Any]] | None:
        """Return the saved options of each param group, or None if there are none to load."""
        optimizer, saved = self._engine.optimizer, self._saved.manifest.optimizer
        if optimizer is None or saved is None:
            if optimizer is not None:
                self.misfits.append(
                    "the checkpoint has no optimizer state: it was saved without an optimizer"
                )
            elif saved is not None:
                self.skipped.append("the optimizer's state: this engine has no optimizer")
            return None
        name = type(optimizer).__name__
        if saved["class"] != name:
            self.misfits.append(f"the optimizer was {saved['class']} and is {name}")
            return None
        mine = [
            sorted(self._there.get(id(parameter), "?") for parameter in group)
            for group in states_of(self._engine).param_groups()
        ]
        theirs = [sorted(group["params"]) for group in saved["groups"]]
        if mine != theirs:
            if not self.misfits:
                pairs = enumerate(zip_longest(mine, theirs))
                index = next(index for index, (one, other) in pairs if one != other)
                self.misfits.append(
                    f"optimizer param group {index} holds other parameters here than in the"
                    " checkpoint"
                )
            return None
        return [
            {key: decode(value, self._saved.fetch) for key, value in group["options"].items()}
            for group in saved["groups"]
        ]

    def _check_states(self) -> None:
        for name in self._states:
            if name not in self._saved.manifest.states and not self._averages(name):
                self.misfits.append(f"states[{name!r}] is not in the checkpoint")
        kinds = {kind for _, kind in self._saved.pieces if kind != VALUE}
        averages = {kind for kind in kinds if not kind.startswith(STATE)}
        for name in sorted(averages | self._saved.manifest.states.keys()):
            if name not in self._states and name not in (RNG, EXTRA, SCALER):
                self.skipped.append(f"states[{name!r}]: not asked for")

    def _averages(self, name: str) -> bool:
        is_saved = any(kind == name for _, kind in self._saved.pieces)
        return is_saved and isinstance(self._states.get(name), EMA)

    # ------------------------------------------------------------- reading, before anything changes

    def read(self) -> None:
        """Read and verify everything that this rank needs."""
        self._read_pieces()
        if self._groups is not None:
            self._check_options(self._groups)
            self._read_optimizer()
        self._read_buffers()
        for name in self._saved.manifest.states:
            if name in self._states or name in (RNG, EXTRA, SCALER):
                self._read_state(name)
        try:
            states_of(self._engine).check_restored(self._values.get(SCALER, {}))
        except (ConfigError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._saved.path}: the loss scaler does not take what was saved: {error}"
            ) from error

    def _read_pieces(self) -> None:
        averages = {
            name: state
            for name, state in self._states.items()
            if isinstance(state, EMA) and self._averages(name)
        }
        for piece in states_of(self._engine).resting_pieces():
            name = self._there.get(id(piece.parameter))
            if name is None:
                continue
            place = (piece.stride, piece.start, piece.stop)
            again = piece.state.away is not None and piece.state.away.tier is Tier.DISK
            source = self._saved.held(partial(self._saved.range, name, VALUE, *place), again=again)
            self._copies.append((piece, source))
            for kind, ema in averages.items():
                if piece.master is not None:
                    number, span = piece.master
                    read = partial(self._saved.range, name, kind, *place)
                    self._copies.append(
                        (ema.averages[number][span], self._saved.held(read, again=False))
                    )

    def _check_options(self, groups: list[dict[str, Any]]) -> None:
        """Raise CheckpointError for saved options with which the optimizer cannot step."""
        optimizer, device = self._engine.optimizer, torch.device("cpu")
        assert optimizer is not None
        for index, (mine, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            options = {**mine, **saved}
            for key in ("params", "param_names"):
                options.pop(key, None)
            device = next((piece.device for piece in mine["params"]), device)
            dtype = next((piece.dtype for piece in mine["params"]), torch.float32)
            try:
                trial = state_after_trial(optimizer, options, dtype, device)
            except Exception as error:
                raise CheckpointError(
                    f"{self._saved.path}: {type(optimizer).__name__} cannot step with the options"
                    f" of param group {index} there: {type(error).__name__}: {error}"
                ) from error
            self._trials.update({id(piece): trial for piece in mine["params"]})

    def _read_optimizer(self) -> None:
        kinds: dict[str, list[str]] = {}
        for name, kind in self._saved.pieces:
            if kind.startswith(STATE):
                kinds.setdefault(name, []).append(kind)
        again = self._engine.policy.default.optim.tier is Tier.DISK
        for owned in states_of(self._engine).stepped_pieces():
            there = self._there.get(id(owned.parameter))
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
        for kind in kinds:
            tensor = self._saved.range(
                name, kind, owned.stride, owned.piece.start, owned.piece.stop
            )
            state[kind.removeprefix(STATE)] = tensor.to(owned.tensor.device)
        try:
            return fitted_state(state, self._trials.get(id(owned.tensor), {}))
        except ValueError as error:
            raise CheckpointError(
                f"{self._saved.path}: the optimizer cannot go on from the state of parameter"
                f" {name!r}: {error}"
            ) from error

    def _read_buffers(self) -> None:
        rank = self._engine.rank if self._engine.world == self._saved.manifest.world else 0
        for name, buffer in persistent_buffers(self._engine.module).items():
            key, shape = f"{BUFFER}{name}@", tuple(buffer.shape)
            entry = self._saved.loose.get(f"{key}{rank}") or self._saved.loose.get(f"{key}0")
            imported = self._saved.manifest.parameters.get(name)
            if entry is None and imported is not None and imported.shape == shape:
                value = self._saved.span(name, VALUE, 0, imported.numel).view(shape)
                self._buffers.append((buffer, value))
            elif entry is None:
                self.skipped.append(f"buffer {name!r} is not in the checkpoint")
            elif entry.shape != shape:
                self.skipped.append(f"buffer {name!r} has another shape there")
            else:
                self._buffers.append((buffer, self._saved.whole(entry)))

    def _read_state(self, name: str) -> None:
        saved = self._saved.manifest.states[name]
        rank = 0
        if "same" not in saved:
            if self._engine.world == self._saved.manifest.world:
                rank = self._engine.rank
            elif name != EXTRA:
                self.skipped.append(
                    f"states[{name!r}]: it differed between the {self._saved.manifest.world} ranks"
                    " that saved it"
                )
                return
        value = saved["same"] if "same" in saved else saved["ranks"][rank]
        self._values[name] = decode(value, lambda key: self._saved.fetch(f"{key}@{rank}"))

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
                    if isinstance(target, torch.Tensor):
                        target.copy_(numbers)
                    else:
                        target.write(numbers)
                    del numbers
                    self._saved.release_memory()
            states_of(engine).overwritten(self._there)
            for buffer, value in self._buffers:
                buffer.copy_(value)
            if engine.optimizer is not None and self._groups is not None:
                self._apply_optimizer(engine.optimizer, self._groups)
        self.extra = self._values.get(EXTRA)

    def _load_states(self) -> None:
        """Load states and generators; restore all of them if one fails on any rank. Collective."""
        error: CheckpointError | None = None
        numbers = generators()
        mine = [name for name in self._values if name in self._states]
        before = {name: _state_before(self._states[name]) for name in mine}
        loaded: list[str] = []
        try:
            for name, value in self._values.items():
                loaded.append(name)
                if name in self._states:
                    self._states[name].load_state_dict(value)
                elif name == RNG:
                    restore_generators(value)
        except Exception as refused:
            error = CheckpointError(
                f"states[{name!r}] does not take what was saved: {type(refused).__name__}:"
                f" {refused}"
            )
        try:
            raise_on_all(self._engine, error, "zs.load()")
        except CheckpointError as told:
            stuck = [
                f"states[{name!r}]"
                for name in loaded
                if name in before and not _put_back(self._states[name], before[name])
            ]
            restore_generators(numbers)
            if stuck:
                names = ", ".join(stuck)
                raise CheckpointError(
                    f"{told}; {names} could not be put back, the rest is as it was"
                ) from error
            raise

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


def _state_before(state: Stateful) -> Any:
    """Return a copy of a state, or None where it gives none."""
    try:
        return copy.deepcopy(state.state_dict())
    except Exception:
        return None


def _put_back(state: Stateful, before: Any) -> bool:
    """Load `before` into a state again; return whether it was taken."""
    if before is None:
        return False
    try:
        state.load_state_dict(before)
    except Exception:
        return False
    return True


def _some(items: list[str]) -> str:
    more = f" (and {len(items) - 3} more)" if len(items) > 3 else ""
    return "; ".join(items[:3]) + more
