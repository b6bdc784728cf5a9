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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from zeroshard.checkpoint.kept import (
    Holdings,
    KeptStep,
    copies_of,
    local_keeper,
    newest_kept_step,
    tell_saved,
    telling_keeper,
)
from zeroshard.checkpoint.manifest import BUFFER, CUT, range_in, row_stride
from zeroshard.checkpoint.pipeline_stages import names_elsewhere, rank_there
from zeroshard.checkpoint.rank_part import (
    EXTRA,
    OF_MODULES,
    RNG,
    SCALER,
    Experts,
    ExtraStates,
    Stateful,
    check_arguments,
    generators,
    persistent_buffers,
    restore_generators,
    whole_parts,
)
from zeroshard.checkpoint.step_reader import Match, StepReader, Wanted
from zeroshard.checkpoint.steps import list_steps, remember_steps, saved_order
from zeroshard.core.boxes import Span, overlap
from zeroshard.core.layout import Range
from zeroshard.core.placement import STATE, VALUE, Part, Tier
from zeroshard.core.values import common_part, decode
from zeroshard.errors import CheckpointError, ConfigError, StorageError
from zeroshard.optim.copies import (
    TRIAL_SHAPE,
    WHOLE,
    fitted_state,
    flatten,
    is_plain,
    joined,
    state_after_trial,
)
from zeroshard.optim.several import class_name, owner, owners_of_groups
from zeroshard.optim.shards import ParamShard
from zeroshard.optim.tiles import TileStates, is_apart, settled
from zeroshard.runtime.access import curve_of, departures
from zeroshard.runtime.ema import EMA
from zeroshard.runtime.engine import Engine, RestingPiece, states_of
from zeroshard.runtime.whole import saved_names

_TRIAL_NUMEL = 1 << 16  # rules of few bits leave parameters of less than 4096 elements as they are

# -------------------------------------------------------------------------------------- step loader
# Load one step into one engine: read and verify all that is needed, then write it.
#
# Invariant: `read` changes nothing; after `apply` everything that was read is loaded, or it raises.
# Cost: see checkpoint/load.py.


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
        match = self._match = Match(saved, engine, experts, wanted)
        self.misfits = match.misfits  # an error where strict
        self.skipped = match.skipped  # entries of the checkpoint that are not loaded
        self._parts = {name: part for name, (part, _) in whole_parts(engine, experts).items()}
        # by param group: whether the optimizer steps whole parameters in their shapes
        self._by_shape: Sequence[bool] = ()
        self._states_here: TileStates | None = None  # of the optimizer
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
    def left_out(self) -> list[str]:
        """The state of the engine that this load leaves as it is."""
        return self.misfits + self._match.left_alone

    # ------------------------------------------------------------- reading, before anything changes

    def read(self) -> None:
        """Read and verify everything that this rank needs."""
        self._read_pieces()
        if self._match.groups is not None:
            self._check_options(self._match.groups)
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
        self._read_buffers()
        for name in self._saved.manifest.states:
            if name in self._states or name in self._own:
                self._read_state(name)
        modules = self._values.get(OF_MODULES, {}).keys()
        for name in self._modules.modules.keys() - modules:
            self.skipped.append(f"the extra state {name!r} is not in the checkpoint")
        for name in (
            modules - self._modules.modules.keys() if not self._saved.manifest.places else ()
        ):
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
        beside = {name: ema.averages for name, ema in averages.items()}
        for table in states_of(self._engine).tables(beside):
            self._by_shape, self._states_here = table.by_shape, table.tile_states
            for piece in table.pieces((VALUE, *beside)):
                name = self._match.there.get(id(piece.parameter))
                if name is not None:
                    place = Span(self._parts[piece.name], piece.stride, piece.start, piece.stop)
                    again = piece.state.away is not None and piece.state.away.tier is Tier.DISK
                    read = partial(self._saved.range, name, piece.kind, place)
                    self._copies.append((piece, self._saved.held(read, again=again)))

    def _check_options(self, groups: list[dict[str, Any]]) -> None:
        """Raise CheckpointError for saved options with which the optimizer cannot step."""
        optimizer, home = self._engine.optimizer, states_of(self._engine).device
        assert optimizer is not None
        pieces = states_of(self._engine).stepped_pieces()
        shapes = {id(o.tensor): self._trial_shape(o.shape, o.group) for o in pieces}
        for index, (mine, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            options, rule = {**mine, **saved}, owners_of_groups(optimizer)[index]
            # a fraction cuts a group: its step counts lie where its pieces are; a rule that goes by
            # shapes is tried on pieces alone
            kinds = {
                id(one): (one.dtype, one.device, home, shapes.get(id(one), TRIAL_SHAPE))
                for one in mine["params"]
                if id(one) in shapes or not self._by_shape[index]
            }
            others = [] if self._by_shape[index] else [(torch.float32, home, home, TRIAL_SHAPE)]
            try:
                trials = {
                    kind: state_after_trial(rule, options, *kind)
                    for kind in {*kinds.values()} or others
                }
            except Exception as error:
                raise CheckpointError(
                    f"{self._saved.path}: {class_name(rule)} cannot step with the options"
                    f" of param group {index} there: {type(error).__name__}: {error}"
                ) from error
            self._trials |= {one: trials[kind] for one, kind in kinds.items()}

    def _trial_shape(self, stepped: Sequence[int], group: int) -> tuple[int, ...]:
        """Return the shape with which the rule of a param group is tried out on what is `stepped`
        in a shape. Which states it keeps of that may go by its shape and size.
        """
        shape = list(stepped if self._by_shape[group] else TRIAL_SHAPE)
        while prod(shape) > _TRIAL_NUMEL:
            shape[shape.index(max(shape))] //= 2
        return tuple(shape)

    def _state_of(self, name: str, owned: ParamShard, kinds: Iterable[str]) -> dict[str, Any]:
        """Return the optimizer's state of one piece."""
        assert self._saved.manifest.optimizer is not None
        state, apart, here = dict[str, Any](), dict[str, Any](), owned.tensor.device
        part, piece = self._parts[owned.name], owned.piece
        by_shape, states = self._by_shape[owned.group], self._states_here
        span, scalars = (piece.start, piece.stop), self._saved.manifest.optimizer["scalars"]
        ranges = dict[str, dict[Range, Any]]()
        for saved_key, value in scalars.get(name, {}).items():
            key, of_range = range_in(saved_key, part.numel)
            if key.endswith(CUT) or not overlap(of_range, span):
                continue
            try:
                found = decode(value, lambda place: self._fetch(0, place).to(here, copy=True))
            except ValueError as error:
                raise CheckpointError(
                    f"{self._saved.path}: optimizer state {key!r} of parameter {name!r}: {error}"
                ) from error
            ranges.setdefault(key, {})[of_range] = found
        for key, parts in ranges.items():
            found, is_cut = next(iter(parts.values())), scalars[name].get(key + CUT)
            has_shape = is_plain(found) and found.dim() > 0 and found.shape == part.shape
            if is_apart(found) and is_cut:
                found = joined(sorted(parts.items()), span, iter(is_cut), owned.shape)
            elif has_shape and part.is_whole and owned.shape != part.shape:
                found = owned.shaped(flatten(found, owned.stride)[piece.start : piece.stop].clone())
            elif is_apart(found) and by_shape and part.is_whole:
                assert states is not None, name
                of_ranges = {of_range: {key: one} for of_range, one in parts.items()}
                try:
                    found = states.gathered(owned, owned.group, of_ranges)[key]
                except ConfigError as error:
                    raise CheckpointError(f"{self._saved.path}: {error}") from error
            if is_apart(found) and not (by_shape and part.is_whole):
                if not is_plain(found) or found.numel() != piece.numel or not part.is_whole:
                    raise CheckpointError(
                        f"{self._saved.path}: optimizer state {key!r} of parameter {name!r} is"
                        f" whole there and cannot be cut into parts: {WHOLE}"
                    )
                found = found.reshape(-1)
            is_whole = by_shape and is_apart(found)
            (apart if is_whole else state)[key] = found
        for kind in kinds:
            key, every = kind.removeprefix(STATE), self._saved.pieces[name, kind]
            if by_shape and not any(e.box or overlap((e.start, e.stop), span) for e in every):
                continue  # other parts have one
            place = Span(part, owned.stride, piece.start, piece.stop)
            state[key] = self._saved.range(name, kind, place).to(here)
            if by_shape:
                state[key] = owned.shaped(state[key])
        trial = dict(self._trials.get(id(owned.tensor), {}))
        for key, one in tuple(trial.items()) if by_shape else ():
            is_coded = is_apart(one) and not (is_plain(one) and one.is_floating_point())
            if key in apart or (key in state and is_coded):  # its form may go by its size
                del trial[key]
        try:
            fitted = fitted_state(state, trial)
            return settled(owned, {**fitted, **apart}) if by_shape else fitted
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
        numbers, before = generators(), dict[str, Any]()
        loaded: list[str] = []
        for name in self._values.keys() & self._states.keys():
            with suppress(Exception):  # a state that gives none cannot be put back
                before[name] = copy.deepcopy(self._states[name].state_dict())
        try:
            with states_of(self._engine).everyone.together("zs.load()", refusal=CheckpointError):
                for name, value in self._values.items():
                    loaded.append(name)
                    try:
                        if name in self._states:
                            self._states[name].load_state_dict(value)
                        elif name == RNG:
                            restore_generators(value)
                    except Exception as error:
                        raise CheckpointError(
                            f"states[{name!r}] does not take what was saved:"
                            f" {type(error).__name__}: {error}"
                        ) from error
        except CheckpointError as told:
            stuck = [name for name in loaded if name in self._states]
            for name in [*stuck]:
                with suppress(Exception):
                    self._states[name].load_state_dict(before[name])
                    stuck.remove(name)
            restore_generators(numbers)
            if stuck:
                names = ", ".join(f"states[{name!r}]" for name in stuck)
                raise CheckpointError(
                    f"{told}; {names} could not be put back, the rest is as it was"
                ) from told
            raise

    def _apply_optimizer(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
    ) -> None:
        def take_over(owned: ParamShard) -> None:
            if id(owned) not in self._optimizer_states:
                return
            with _too_late():
                state = self._optimizer_states[id(owned)]()
            entries = owner(optimizer, owned.parameter).state
            entries.pop(owned.tensor, None)
            if state:
                entries[owned.tensor] = state
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


# --------------------------------------------------------------------------------------------- load

_log = logging.getLogger("zeroshard")
_HOLDINGS = TypeAdapter(Holdings)


@dataclass
class Restored:
    """The result of `load`."""

    step: int
    path: Path
    extra: Any = None
    # entries of the checkpoint that were not loaded, and state that it lacks
    skipped: list[str] = field(default_factory=list)
    # it was kept in memory (saver.keep); `path` is then no directory
    from_memory: bool = False
    damaged: list[str] = field(default_factory=list)  # newer steps that were passed over, and why
    bytes_read: int = 0  # on this rank


def latest_step(directory: str | Path) -> int | None:
    """Return the complete step in `directory` that was saved last, or None: the highest number,
    unless the run has gone back to a lower one. Where the ranks have been started again, one that
    ``Saver.keep`` had left in memory counts; without ``zeroshard run --elastic`` only after
    ``shard()``, where the ranks hear of it.
    """
    steps = [*saved_order(Path(directory)), newest_kept_step(Path(directory))]
    return max((step for step in steps if step is not None), default=(0, None))[1]


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
    generators: bool = True,
) -> Restored:
    """Read the checkpoint that was saved last in `directory`, or the one of `step`, into `engine`.
    Collective.

    A step that ``Saver.keep`` has copied into memory counts, too; of two equal ones it is taken.

    It may have been saved under any row, precision, number of ranks and unit cut. `states` are the
    objects that were saved under these names; random generators and the loss scaler are loaded too.
    State that differed between ranks is loaded on as many ranks as saved it: on others, the entries
    of `extra` and the random generators that were alike are loaded, and the rest is named in
    ``Restored.skipped`` and logged. Without `strict`,
    whatever does not fit (missing, unexpected and reshaped parameters, param groups, states) is
    left out and named in ``Restored.skipped``. ``fallback="previous"`` replaces a damaged step by
    the one that was saved before it, with a lower number. `verify` off reads without comparing
    hashes. Without `frozen` the engine's frozen parameters stay as they are, without `generators`
    the random generators.

    Raises CheckpointError on every rank, with nothing changed: if ``load_state_dict()`` of one of
    `states` fails, all get their former ``state_dict()`` back, and one that refuses it is named.
    Raises StorageError if a tier fails on any rank: the state is then half loaded, and the engine
    refuses to continue until a load succeeds.
    """
    check_arguments(directory, engine, states)
    directory = Path(directory)
    states_of(engine).begin_load()
    elsewhere = names_elsewhere(engine, "zs.load()")
    wanted = Wanted(dict(states or {}), elsewhere, frozen, generators)
    asked = {
        "step": step, "states": sorted(wanted.states), "frozen": frozen, "generators": generators,
        "fallback": fallback,
    }  # fmt: skip
    candidates = _candidates(
        directory, engine, step, {name: str(one) for name, one in asked.items()}
    )
    damaged: list[str] = []
    while True:
        candidate = candidates.pop()
        try:
            restored = _load_step(candidate, engine, wanted, strict=strict, verify=verify)
        except CheckpointError as error:
            if not candidates:
                raise CheckpointError("; ".join([*damaged, str(error)])) from error
            if fallback is None:
                more = f". Step {candidates[-1].step} is there, too: fallback='previous' takes it"
                if isinstance(error, _Misfit):
                    more = ""
                raise CheckpointError(f"{error}{more}") from error
            damaged.append(str(error))
            if states_of(engine).everyone.rank == 0:
                _log.warning("step %d is passed over: %s", candidate.step, error)
            continue
        restored.damaged = damaged
        return restored


@dataclass
class _Candidate:
    """A step that may be loaded: on disk, or kept in memory."""

    directory: Path
    branch: int
    step: int
    kept: KeptStep | None = None
    held: list[Holdings] = field(default_factory=list)  # what each rank's host has in memory

    def found(self) -> Path | KeptStep:
        """Return the path of the step that this rank reads, or the one in memory."""
        if self.kept is not None:
            return self.kept
        path = list_steps(self.directory).get(self.step)
        if path is None:
            raise CheckpointError(
                f"{self.directory} holds no step {self.step} that this rank can see: is it on"
                " storage that all ranks share, and was the step not removed meanwhile?"
            )
        return path

    def fetch(self, engine: Engine) -> None:
        """Copy to this host the parts that it lacks. Collective."""
        if self.kept is not None:
            ranks = states_of(engine).everyone
            what = f"step {self.step} cannot be fetched from memory"
            together = partial(ranks.together, "zs.load()", what, refusal=CheckpointError)
            self.kept.fetch(self.held, ranks.rank, partial(copies_of, engine), together)


def _candidates(
    directory: Path, engine: Engine, step: int | None, asked: Mapping[str, str]
) -> list[_Candidate]:
    """Return the steps to try, first choice last. Rank 0's list of those on disk counts: others
    may see a prune. Raises PlanMismatch where ranks have `asked` for different things.
    """
    ranks, what = states_of(engine).everyone, f"{directory} cannot be listed"
    with ranks.together("zs.load()", what, refusal=CheckpointError) as meeting:
        meeting.compare(asked)
        held = asdict(Holdings.of(directory))
        meeting.give([saved_order(directory) if ranks.rank == 0 else [], held])
    all_held = [_HOLDINGS.validate_python(one) for _, one in meeting.answers]
    found = [_Candidate(directory, *place) for place in meeting.answers[0][0]]
    kept = KeptStep.find(directory, all_held)
    if kept is not None:
        found.append(_Candidate(directory, kept.branch, kept.step, kept, all_held))
        found.sort(key=lambda one: (one.branch, one.step, one.kept is not None))
    if not found:
        raise CheckpointError(
            f"{directory} holds no checkpoint: name the directory that zs.save() was given; plain"
            " weights are for model.load_state_dict() or zs.load_pretrained()"
        )
    if step is not None and step not in (one.step for one in found):
        raise _NoSuchStep(f"{directory} holds no step {step}; its newest is {found[-1].step}")
    while step is not None and found[-1].step != step:
        found.pop()
    return [one for one in found if one.step <= found[-1].step]


def _load_step(
    candidate: _Candidate, engine: Engine, wanted: Wanted, *, strict: bool, verify: bool
) -> Restored:
    directory, step = candidate.directory, candidate.step
    candidate.fetch(engine)
    ranks, what = states_of(engine).everyone, f"step {step} in {directory} cannot be read"
    with ExitStack() as stack:
        # also for invalid values, a disk that fails, no memory
        with ranks.together("zs.load()", what, refusal=CheckpointError) as meeting:
            trimmer = states_of(engine).trimmer
            saved = StepReader(candidate.found(), stack, trimmer, verify=verify)
            reading = StepLoader(saved, engine, wanted)
            if strict and reading.misfits:
                raise _Misfit(
                    f"{saved.path} does not fit {type(engine.module).__name__}:"
                    f" {_some(reading.misfits)}; strict=False loads what fits"
                )
            if states_of(engine).is_lost and reading.left_out:
                raise _Misfit(
                    f"{saved.path} would leave out {_some(reading.left_out)}, and what rests here"
                    " is lost since a tier failed: load all of it"
                )
            reading.read()
            meeting.give(saved.text_hash)
        if len(set(meeting.answers)) > 1:
            raise CheckpointError(
                f"the ranks see different checkpoints under {directory}: is it on storage that all"
                " ranks share, and was the step not replaced by another save meanwhile?"
            )
        with ranks.together("zs.load()", refusal=StorageError):  # where a tier fails on any
            reading.apply()
        if ranks.rank == 0:
            _note(candidate)
            _tell_differing(candidate, reading.differed, saved.manifest.world)
            if parted := departures(saved.manifest.curve, curve_of(states_of(engine))):
                _log.warning(
                    "step %d of %s: from here on the run may leave its curve: %s",
                    candidate.step,
                    candidate.directory,
                    "; ".join(parted),
                )
        skipped = reading.misfits + reading.skipped
        return Restored(
            step,
            saved.path,
            reading.extra,
            skipped,
            from_memory=candidate.kept is not None,
            bytes_read=saved.bytes_read,
        )


def _note(candidate: _Candidate) -> None:
    """On rank 0, after a load: log where it came from, and remember the steps on disk."""
    with suppress(CheckpointError):
        remember_steps(candidate.directory)  # steps of other jobs are known from now on
    if local_keeper() is not None:
        where = "disk" if candidate.kept is None else "memory"
        _log.info("step %d of %s is loaded from %s", candidate.step, candidate.directory, where)
        if candidate.kept is None:
            with telling_keeper():
                tell_saved(candidate.directory, candidate.branch, candidate.step)


def _tell_differing(candidate: _Candidate, differed: list[str], world: int) -> None:
    """On rank 0, after a load: log the state that differed between the ranks that saved it."""
    numbers = f"states[{RNG!r}]"
    # Python's and numpy's generators differ in every script that does not seed them
    unseeded = f"{numbers}['python']", f"{numbers}['numpy']"
    matter = any(one.startswith(numbers) and not one.startswith(unseeded) for one in differed)
    told = [one for one in differed if matter or not one.startswith(numbers)]
    if not told:
        return
    seeded = "; random generators go on from this script's seed, as at its start" if matter else ""
    _log.warning(
        "step %d of %s: not loaded, since the %d ranks that saved it differed: %s%s",
        candidate.step,
        candidate.directory,
        world,
        ", ".join(told),
        seeded,
    )


class _NoSuchStep(CheckpointError):
    """The step that was asked for is not there; the others are sound."""

    exit_code = ConfigError.exit_code


class _Misfit(CheckpointError):
    """The checkpoint is sound, and of another model."""


def _some(items: list[str]) -> str:
    more = f" (and {len(items) - 3} more)" if len(items) > 3 else ""
    return "; ".join(items[:3]) + more
