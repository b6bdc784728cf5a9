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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zeroshard.checkpoint.match import Wanted
from zeroshard.checkpoint.pieces import Stateful, check_arguments
from zeroshard.checkpoint.reading import Reading
from zeroshard.checkpoint.stages import names_elsewhere
from zeroshard.checkpoint.step_reader import StepReader
from zeroshard.checkpoint.steps import list_steps, remember_steps
from zeroshard.checkpoint.together import first_failure, on_all_ranks
from zeroshard.errors import CheckpointError, ConfigError, StorageError
from zeroshard.runtime.engine import Engine, states_of

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
    elsewhere = names_elsewhere(engine, "zs.load()")
    wanted = Wanted(dict(states or {}), elsewhere, frozen)
    candidates = _candidates(directory, engine, step)
    damaged: list[str] = []
    while True:
        number = candidates.pop()
        try:
            restored = _load_step(directory, number, engine, wanted, strict=strict, verify=verify)
        except CheckpointError as error:
            if not candidates:
                raise CheckpointError("; ".join([*damaged, str(error)])) from error
            if fallback is None:
                more = f". Step {candidates[-1]} is there, too: fallback='previous' takes it"
                if isinstance(error, _Misfit):
                    more = ""
                raise CheckpointError(f"{error}{more}") from error
            damaged.append(str(error))
            if states_of(engine).everyone.rank == 0:
                _log.warning("step %d is passed over: %s", number, error)
            continue
        restored.damaged = damaged
        return restored


def _candidates(directory: Path, engine: Engine, step: int | None) -> list[int]:
    """Return the steps to try, first choice last. Rank 0 decides: others may see a prune."""
    steps: list[int] = []
    with on_all_ranks(engine, "zs.load()", f"{directory} cannot be listed"):
        if states_of(engine).everyone.rank == 0:
            steps = list(list_steps(directory))
            if not steps:
                raise CheckpointError(f"{directory} holds no checkpoint")
    answer = states_of(engine).everyone.exchange(",".join(map(str, steps)).encode(), "zs.load()")[0]
    steps = [int(number) for number in answer.decode().split(",")]
    if step is not None and step not in steps:
        raise _NoSuchStep(f"{directory} holds no step {step}; its newest is {steps[-1]}")
    return [number for number in steps if step is None or number <= step]


def _load_step(
    directory: Path,
    step: int,
    engine: Engine,
    wanted: Wanted,
    *,
    strict: bool,
    verify: bool,
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
            reading = Reading(saved, engine, wanted)
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
        if len(set(states_of(engine).everyone.exchange(mine, "zs.load()"))) > 1:
            raise CheckpointError(
                f"the ranks see different checkpoints under {directory}: is it on storage that all"
                " ranks share?"
            )
        _apply(reading, engine)
        if states_of(engine).everyone.rank == 0:
            with suppress(CheckpointError):
                remember_steps(directory)  # steps of other jobs are known from now on
        skipped = reading.misfits + reading.skipped
        return Restored(step, path, reading.extra, skipped, bytes_read=saved.bytes_read)


def _apply(reading: Reading, engine: Engine) -> None:
    """Load what was read. Raises on every rank of the mesh where a tier fails on any."""
    error: StorageError | None = None
    try:
        reading.apply()
    except StorageError as failed:  # on every rank of its data parallel group
        error = failed
    told = first_failure(engine, error, "zs.load()")
    if error is not None:
        raise error
    if told is not None:
        raise StorageError(told)


class _NoSuchStep(CheckpointError):
    """The step that was asked for is not there; the others are sound."""

    exit_code = ConfigError.exit_code


class _Misfit(CheckpointError):
    """The checkpoint is sound, and of another model."""


def _some(items: list[str]) -> str:
    more = f" (and {len(items) - 3} more)" if len(items) > 3 else ""
    return "; ".join(items[:3]) + more
