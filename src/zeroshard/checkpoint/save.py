"""``zeroshard.save`` and ``Saver``: write a checkpoint atomically, now or in the background.

    collect (ranks agree on what each writes) . make the hidden directory . [copy] . each rank
    writes its file . rank 0 writes the manifest, renames

Every collective runs in the caller's thread. In the background the other ranks leave their parts of
the manifest as files in the hidden directory, and rank 0 commits once all are there.

Invariant: either the step is visible and complete, or it is not there and the earlier ones are
unchanged. An error on any rank is CheckpointError on every rank: at once, or (in the background) at
the next call.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.kept import Keeping, next_branch, tell_saved
from zeroshard.checkpoint.manifest import Manifest, shard_name
from zeroshard.checkpoint.pipeline_stages import unite
from zeroshard.checkpoint.rank_part import RankPart, Stateful, check_arguments, collect, divide
from zeroshard.checkpoint.shard_files import Stored, opened, shard_bytes, write_shard
from zeroshard.checkpoint.steps import (
    MANIFEST,
    begin_step,
    commit,
    os_errors,
    prune,
    remember_steps,
    remove_tree,
    settle,
    step_path,
    working_path,
)
from zeroshard.comm.ranks import Meeting, MeshRanks
from zeroshard.core.digest import holders
from zeroshard.errors import (
    CheckpointError,
    ConfigError,
    PeerLostError,
    PlanMismatch,
    StateError,
    StorageError,
)
from zeroshard.memory import Pages
from zeroshard.runtime.ema import EMA, updates_of
from zeroshard.runtime.engine import Engine, open_engines, states_of

_log = logging.getLogger("zeroshard")
_POLL_S = 0.005
_LOOK_S = 0.5  # how often a rank that waits for its own writer looks whether the others are alive
# how long a program that ends waits for the other ranks' files: less than a launcher's grace
_HURRY_S = 2.0
# by the path of a step, on rank 0: the engine that wrote it, and the engines of that time
_writers: dict[str, tuple[weakref.ref[Engine], weakref.WeakSet[Engine]]] = {}
_savers: weakref.WeakKeyDictionary[Engine, weakref.WeakSet[Saver]] = weakref.WeakKeyDictionary()


def save(
    directory: str | Path,
    engine: Engine,
    *,
    step: int,
    states: Mapping[str, Stateful] | None = None,
    extra: Any = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    frozen: bool = True,
    drop_gradients: bool = False,
) -> Path:
    """Write ``directory/step-NNNNNNNNNN`` and return the path once it is on disk. Collective.

    `states` are objects with ``state_dict()`` by name (LR scheduler, data loader, ``zs.EMA``),
    `extra` anything of numbers, text, lists, dictionaries and tensors. Random generators and the
    loss scaler are always saved; gradients are not: save after ``optimizer.step()``. With
    `keep_last` only the newest so many steps stay, and those that `keep_every` divides; the newest
    is the one that was saved last, also where a run that has gone back saves lower numbers. With
    ``offload.delayed_update`` a save waits for the pending update and applies it, so its run
    continues with the bits of a run that loads, not of one that does not save. Without `frozen`
    no frozen parameter is saved: an adapter's checkpoint stays small, and ``zs.load(frozen=False)``
    leaves alone what it lacks. With `drop_gradients` a save in the middle of a step's micro-batches
    is allowed: the run goes on with its gradients, and one that loads begins the step anew.

    Raises CheckpointError on every rank if any rank cannot write; earlier checkpoints are then
    unchanged.
    """
    options: Any = {"keep_last": keep_last, "keep_every": keep_every, "frozen": frozen}
    with Saver(directory, engine, states=states, background=False, **options) as saver:
        return saver.save(step, extra=extra, drop_gradients=drop_gradients)


def end_saves(engine: Engine) -> None:
    """Wait for the saves under way on this rank: the layout of `engine` is about to change. Raises
    CheckpointError where one has failed here.
    """
    failures = [saver._end_alone() for saver in _savers.get(engine, ())]
    for failure in filter(None, failures):
        raise failure


class Saver:
    """Saves repeatedly, in the background: ``save()`` copies the state, a thread writes the files.

    Where state rests on disk it is written in the foreground instead, since the copy would bring
    all of it into memory; that is logged once.

    One save is under way at a time: the next one, ``wait()``, ``close()`` and
    ``engine.repartition()`` wait for it, and raise its error on every rank. The copy takes as much
    host memory as the checkpoint has bytes on this rank, once. All methods are collective. Use it
    as a context, or call ``close()``.

    ``keep()`` copies the state into memory that outlives the rank; with ``redundancy=1`` also into
    memory of another host.
    """

    def __init__(
        self,
        directory: str | Path,
        engine: Engine,
        *,
        states: Mapping[str, Stateful] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        background: bool = True,
        frozen: bool = True,
        redundancy: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        check_arguments(directory, engine, states)
        for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
            if number is not None and number < 1:
                raise ConfigError(f"{name}={number}: at least one step stays")
        if keep_every is not None and keep_last is None:
            raise ConfigError(
                f"keep_every={keep_every} says which steps stay beside the newest: say how many"
                " those are with keep_last"
            )
        self.directory = Path(directory)
        self._engine = engine
        self._states = dict(states or {})
        self._keep = {"keep_last": keep_last, "keep_every": keep_every}
        self._frozen = frozen  # whether frozen parameters are saved, too
        self._background = background
        self._has_told = False  # that saves are written in the foreground
        self._keeping = Keeping(self.directory, engine, redundancy)
        self._timeout_s = timeout_s  # how long rank 0 waits for the other ranks' files
        self._pages = Pages()
        self._staging: dict[str, torch.Tensor] = {}
        self._job: _SaveJob | None = None  # the save that is under way in the background
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._hurry = threading.Event()  # something has gone wrong: other ranks may never come
        _savers.setdefault(engine, weakref.WeakSet()).add(self)

    @property
    def _ranks(self) -> MeshRanks:
        """All ranks of the mesh, as the engine lies now: a repartition may have changed them."""
        return states_of(self._engine).everyone

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._hurry.set()
            self._join_writer()  # the ranks may be anywhere: nothing collective
            self._keeping.close()

    def save(self, step: int, *, extra: Any = None, drop_gradients: bool = False) -> Path:
        """Save `step`; return the path that it has, or will have once it is written. With
        `drop_gradients` also where some wait for a step; they are not saved.
        """
        self.wait()
        self._agree_on(step, "zs.save()")
        job = self._prepare(step, extra, drop_gradients)
        if job.background:
            self._begin(job)
        else:
            self._run(job)
            self._raise_failure()
        return step_path(self.directory, step)

    def keep(self, step: int, *, extra: Any = None) -> bool:
        """Copy `step` into memory that outlives this process, and return True. Collective.

        A process of each host keeps the memory until the ranks have been started again, by
        ``zeroshard run --elastic``, by torchrun with ``--max-restarts`` or by Ray; where nobody
        would, nothing happens, and the answer is False. ``zs.load`` then takes the newest step of
        memory and disk. A save under way goes on meanwhile.
        """
        states_of(self._engine).check_open(trained=True)
        if not self._keeping.begin():
            return False
        self._agree_on(step, "saver.keep()")
        self._finish_step("saver.keep()")
        self._keeping.keep(step, self._states, extra, frozen=self._frozen)
        return True

    def wait(self) -> None:
        """Wait for the save under way; raise CheckpointError if it failed on any rank. Collective.

        Ranks first exchange whether their files are written, so that rank 0 does not wait for a
        file that will never come.
        """
        if self._job is not None:
            self._end_writer(together=True)
            self._raise_failure()

    def _end_alone(self) -> CheckpointError | None:
        """Wait on this rank alone; return the error, which `wait` will not raise again."""
        self._end_writer(together=False)
        failure, self._failure = self._failure, None
        return failure

    def _end_writer(self, *, together: bool) -> None:
        """Wait for the save under way. With `together` the ranks exchange their failures; without,
        rank 0 learns of them by a note in the directory.
        """
        job = self._job
        if job is None:
            return
        try:
            states_of(self._engine).check_open()  # else this rank has left in a repartition
            while not job.tried.wait(_LOOK_S):
                self._ranks.check_peers("a save in the background")
            if together:
                mine = None if job.failure is None else f"rank {job.rank}: {job.failure}"
                told = self._ranks.share(mine, "zs.save()")
                job.failure_elsewhere = next((text for text in told if text is not None), None)
            while self._writer is not None and self._writer.is_alive():
                self._writer.join(_LOOK_S)
                self._ranks.check_peers("a save in the background")
        except (PeerLostError, StateError) as error:
            if isinstance(error, PeerLostError):
                self._hurry.set()
            self._join_writer()
            raise
        self._join_writer()

    def _join_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()
        self._job = self._writer = None

    def close(self) -> None:
        """Wait for the save under way, and release the staging memory. Collective."""
        try:
            self.wait()
            self._keeping.leave()
        finally:
            self._staging.clear()
            self._pages.clear()
            self._keeping.close()

    # ------------------------------------------------------------------ together

    def _agree_on(self, step: int, call: str) -> None:
        """Raise PlanMismatch if the ranks save different steps, or those with the same parameters
        different things; ConfigError for an invalid step.
        """
        answers = self._ranks.share([repr(step), self._ranks.stage, self._options()], call)
        steps = [one for one, _, _ in answers]
        if len(set(steps)) > 1:
            said = ", ".join(f"rank {rank} step={text}" for rank, text in enumerate(steps))
            raise PlanMismatch(
                f"{call} is called with different steps: {said}. Give every rank the same step"
            )
        asked = {
            rank: options
            for rank, (_, stage, options) in enumerate(answers)
            if stage == self._ranks.stage
        }
        for name in self._options():
            values = [options[name] for options in asked.values()]
            if len(set(values)) > 1:
                raise PlanMismatch(
                    f"{call}: {name} differs between ranks ({holders(values, list(asked))}): give"
                    " every rank the same"
                )
        if type(step) is not int or step < 0:
            raise ConfigError(f"step={step!r} is not a number of steps")

    def _options(self) -> dict[str, str]:
        """Return what ranks with the same parameters have to save alike."""
        averages = {n: one for n, one in self._states.items() if isinstance(one, EMA)}
        return {
            "states": ", ".join(sorted(self._states)),
            "frozen": str(self._frozen),
            "background": str(self._background),
            "redundancy": str(self._keeping.redundancy),
            "update of zs.EMA": ", ".join(
                f"{n}: {updates_of(averages[n])}" for n in sorted(averages)
            ),
        }

    def _together(self, call: str, what: str = "") -> AbstractContextManager[Meeting]:
        return self._ranks.together(call, what, refusal=CheckpointError)

    def _begin(self, job: _SaveJob) -> None:
        """Copy the state and start writing; the other ranks learn of a copy that failed later."""
        try:
            job.part.stored = self._copied(job.part.stored)
        except Exception as error:
            job.failure = CheckpointError(
                f"step {job.step} cannot be copied to be written in the background:"
                f" {type(error).__name__}: {error}"
            )
        self._job = job
        self._writer = threading.Thread(target=self._run, args=(job,), name="zeroshard-save")
        try:
            self._writer.start()
        except RuntimeError:  # no thread is to be had
            self._writer = None
            self._run(job)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        self._ranks.agree({}, "zs.save()", error=failure, refusal=CheckpointError)

    def _prepare(self, step: int, extra: Any, drop_gradients: bool) -> _SaveJob:
        engine = self._engine
        self._finish_step("zs.save()")
        with self._together("zs.save()", f"step {step} cannot be collected"):
            part = collect(
                engine, self._states, extra, frozen=self._frozen, drop_gradients=drop_gradients
            )
        unite(engine, part)
        divide(engine, part)
        rank, num_ranks = self._ranks.rank, self._ranks.size
        metadata = {"format": "zeroshard", "rank": str(rank), "step": str(step)}
        num_bytes = sum(self._ranks.share(shard_bytes(part.stored, metadata), "zs.save()"))
        branch = 0  # on rank 0 the one that counts
        with ExitStack() as stack:
            with self._together("zs.save()", f"step {step} cannot be begun") as meeting:
                if rank == 0:
                    self._check_unwritten(step)
                    nonce = secrets.token_hex(4)
                    with os_errors(f"{self.directory} cannot be written"):
                        stack.enter_context(begin_step(self.directory, step, nonce, num_bytes))
                    branch = next_branch(self.directory, step)
                    meeting.give(nonce)
            path = working_path(self.directory, step, meeting.answers[0])
            background = self._background and not self._rests_on_disk()
            return _SaveJob(
                step, branch, rank, num_ranks, background, part, metadata, path, stack.pop_all()
            )

    def _check_unwritten(self, step: int) -> None:
        """Raise CheckpointError where another open engine of this process wrote `step` there.

        An engine that was made after that begins its run again, and replaces what is there.
        """
        path = step_path(self.directory, step)
        writer, beside = _writers.get(os.path.realpath(path), (lambda: None, ()))
        if self._engine in beside and writer() not in (None, self._engine) and path.exists():
            gc.collect()  # one that nobody has any more may be in a cycle
            if writer() in open_engines():
                raise CheckpointError(
                    f"{path} is of another engine of this program, and would be replaced: give each"
                    " engine a directory of its own, or close() the other one first"
                )

    def _rests_on_disk(self) -> bool:
        """Whether any state rests on disk now, which is logged once where it matters."""
        found = states_of(self._engine).rests_on_disk
        if found and not self._has_told and self._ranks.rank == 0:
            reason = "a copy in memory of what rests on disk would undo the offload"
            _log.info("saves of %s are written in the foreground: %s", self.directory, reason)
        self._has_told = self._has_told or found
        return found

    def _finish_step(self, call: str) -> None:
        """Return when no step is under way; raise on every rank where that fails on any."""
        states = states_of(self._engine)
        with self._together(call):
            if states.is_lost:
                raise CheckpointError(f"what rests must not be saved: {states.unsaved}")
            try:
                states.finish_step()
            except StorageError as failed:  # on every rank of its data parallel group
                raise CheckpointError(f"what rests cannot be saved: {failed}") from failed

    def _copied(self, stored: list[Stored]) -> list[Stored]:
        """Copy tensors into the staging memory of this saver."""
        out: list[Stored] = []
        staging: dict[str, torch.Tensor] = {}
        for entry, numbers in stored:
            copy = self._staging.get(entry.key)
            with opened(numbers) as tensor:
                if copy is None or copy.shape != tensor.shape or copy.dtype is not tensor.dtype:
                    flat = self._pages.empty(tensor.numel(), tensor.dtype, torch.device("cpu"))
                    copy = flat.view(tensor.shape)
                copy.copy_(tensor)
            staging[entry.key] = copy
            out.append((entry, copy))
        self._staging = staging
        return out

    # ------------------------------------------------------------------ alone

    def _run(self, job: _SaveJob) -> None:
        """Write this rank's file; on rank 0 also commit. Failures are kept for `wait`."""
        try:
            with job.stack:
                self._write_or_report(job)
                if job.rank == 0:
                    try:
                        self._commit(job)
                    finally:
                        remember_steps(self.directory)
        except Exception as error:
            if not isinstance(error, CheckpointError):
                error = CheckpointError(f"step {job.step}: {type(error).__name__}: {error}")
            if job.visible:
                error = CheckpointError(f"step {job.step} is complete, but {error}")
            self._failure = error
            if job.rank == 0 and not job.visible:  # else the next save removes it
                remove_tree(job.path)
        finally:
            job.tried.set()

    def _write_or_report(self, job: _SaveJob) -> None:
        """Write our file. After a failure raise on all ranks, or in the background leave a note."""
        if job.failure is None:
            try:
                job.index = self._write(job)
            except Exception as error:
                job.failure = error
        if job.background and job.failure is not None:
            with suppress(OSError):
                self._shard(job).unlink()  # on a full disk the note needs its space
            if job.rank > 0:
                with suppress(OSError):
                    _leave(job.path / f"rank-{job.rank}.failed", str(job.failure))
        # we write nothing more: once all have tried, rank 0 may remove the directory
        job.tried.set()
        if not job.background:
            self._ranks.agree({}, "zs.save()", error=job.failure, refusal=CheckpointError)
        elif job.failure is not None:
            if job.rank == 0:
                with suppress(CheckpointError, OSError):
                    self._gather(job)
            raise job.failure

    def _write(self, job: _SaveJob) -> dict[str, Any]:
        """Write our file, leave its part of the manifest for rank 0, and return that part."""
        rank = job.rank
        if not job.path.is_dir():
            raise CheckpointError(
                f"{job.path} is not there, though rank 0 has made it: is {self.directory} on"
                " storage that all ranks share, and was nothing removed?"
            )
        file, tensors = write_shard(self._shard(job), rank, job.part.stored, job.metadata)
        index = job.part.index(file, tensors)
        if rank > 0:
            with os_errors(f"{job.path} cannot be written"):
                _leave(job.path / f"rank-{rank}.json", json.dumps(index))
        return index

    def _shard(self, job: _SaveJob) -> Path:
        return job.path / shard_name(job.rank, job.num_ranks)

    def _gather(self, job: _SaveJob) -> list[dict[str, Any]]:
        """Collect all indices. Raise only after every rank has stopped writing to the directory."""
        indices, failure = [job.index], None
        for rank in range(1, job.num_ranks):
            try:
                indices.append(self._await(job, rank))
            except CheckpointError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return indices

    def _commit(self, job: _SaveJob) -> None:
        """On rank 0: wait for every rank's file, write the manifest, make the step visible."""
        indices = self._gather(job)
        heading = job.part.heading(self._engine, job.step, job.branch)
        manifest = Manifest.of_ranks(heading, indices)
        with os_errors(f"{job.path / MANIFEST} cannot be written"):
            for rank in range(1, job.num_ranks):
                (job.path / f"rank-{rank}.json").unlink()
            _leave(job.path / MANIFEST, manifest.dump())
        older = commit(job.path, self.directory, job.step)
        job.visible = True
        path = os.path.realpath(step_path(self.directory, job.step))
        _writers[path] = weakref.ref(self._engine), weakref.WeakSet(open_engines())
        settle(self.directory, older)
        tell_saved(self.directory, job.branch, job.step)
        prune(self.directory, **self._keep, written=job.step)

    def _await(self, job: _SaveJob, rank: int) -> dict[str, Any]:
        """On rank 0: return a rank's index once it is there. Raises CheckpointError if never."""
        path, deadline, hurried = job.path, time.monotonic() + self._timeout_s, False
        while True:
            with os_errors(f"{path} cannot be read"), suppress(FileNotFoundError):
                index: dict[str, Any] = json.loads((path / f"rank-{rank}.json").read_text())
                return index
            failed = path / f"rank-{rank}.failed"
            if failed.exists():
                raise CheckpointError(f"rank {rank}: {failed.read_text()}")
            if job.failure_elsewhere is not None:
                raise CheckpointError(job.failure_elsewhere)
            if not path.is_dir():
                raise CheckpointError(f"{path} was removed while the ranks wrote to it")
            if (self._hurry.is_set() or not threading.main_thread().is_alive()) and not hurried:
                hurried, deadline = True, min(deadline, time.monotonic() + _HURRY_S)
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {rank} did not write its file within {self._timeout_s:g} s; is {path} on"
                    " storage that all ranks share?"
                )
            time.sleep(_POLL_S)


@dataclass
class _SaveJob:
    """One save on this rank."""

    step: int
    branch: int
    rank: int  # of so many as save it
    num_ranks: int
    background: bool
    part: RankPart
    metadata: dict[str, str]
    path: Path
    stack: ExitStack  # holds the lock, on rank 0
    # this rank's part of the manifest, once its file is written
    index: dict[str, Any] = field(default_factory=dict)
    failure: Exception | None = None  # why this rank's file could not be written
    # this rank's file is written, or never will be
    tried: threading.Event = field(default_factory=threading.Event)
    failure_elsewhere: str | None = None  # why another rank's file will never come
    visible: bool = False  # on rank 0: the step has its name


def _leave(path: Path, content: str | bytes) -> None:
    """Write a small file so that it is seen whole or not at all."""
    hidden = path.with_name(f".{path.name}")
    with hidden.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(hidden, path)
