"""``zeroshard.load``: from any layout into any other; each rank reads the bytes of its own pieces.

    choose a step (rank 0) . compare parameters . read and verify everything needed . agree . write

Invariant: nothing of the engine, the optimizer or the states has changed when it raises
CheckpointError. Cost: the bytes of this rank's pieces, plus at most a chunk at either end of each;
memory for the state a second time, except for state on disk, which is read twice, a piece at a
time, first to be verified.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

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
from zeroshard.checkpoint.match import Wanted
from zeroshard.checkpoint.pipeline_stages import names_elsewhere
from zeroshard.checkpoint.rank_part import RNG, Stateful, check_arguments
from zeroshard.checkpoint.step_loader import StepLoader
from zeroshard.checkpoint.step_reader import StepReader
from zeroshard.checkpoint.steps import list_steps, remember_steps, saved_order
from zeroshard.errors import CheckpointError, ConfigError, StorageError
from zeroshard.runtime.curve import curve_of, departures
from zeroshard.runtime.engine import Engine, states_of

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
    unless the run has gone back to a lower one. Where the launcher has started the ranks again, one
    that ``Saver.keep`` had left in memory counts.
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
    """Read the checkpoint that was saved last in `directory`, or that of `step`, into `engine`.
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
