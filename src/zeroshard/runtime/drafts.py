"""The step on the host inside the backward: segment by segment as gradients come, before anybody
knows whether the step will be taken so (docs/design/state.md).

SuperOffload (arXiv 2509.21271, "speculation-then-validation") writes masters and moments, and takes
steps back. Here nothing that rests is written: the thread of the step makes *drafts*::

    backward    segment c    b       a     |  clip, step()
    thread         [draft c][draft b]      |  draft c, draft b: made of what the step reads?
                                           |  yes: memory of draft and state change places
                                           |  no:  dropped, and stepped as without it; so is a

A draft is a copy of a segment's masters and moments, stepped by the sum of gradients that rests
there over the divisor that the step will have, with no clip. It counts where the step finds what
the draft was made of: the same Gradient, not changed since and divided by the same number; masters
and moments not written to since; the same state, options and used parameters. Else, and after an
overflow, it is dropped. So what a draft was made of is compared, and not who might have changed it.

Invariant: the same bits as a step without drafts; whoever reads masters, moments or weights
between backward and step finds what the last step has left. Each rank decides by itself, and no
collective runs here. Cost: masters and moments on the host a second time, and one copy of them per
step beside the backward. Not drafted: a step of a class that is not known to read these alone (one
of several optimizers is enough), options that are tensors, gradients that other ranks average,
masters that are the weights, and the first step, which makes the moments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.work import Operation
from zeroshard.errors import StorageError
from zeroshard.optim.copies import TileOptimizer, is_repeatable
from zeroshard.optim.runner import StepJob, TileRunner, TileStep
from zeroshard.optim.several import each_of, tile_optimizer
from zeroshard.optim.sharded import ShardedOptimizer
from zeroshard.optim.shards import ParamShard, RestingSums, StepMethod, SteppedSegment, Tile
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.backward_pass import WEIGHTED
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.reductions import Reductions
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights
from zeroshard.state.gradient import Gradient
from zeroshard.tier.store import Storage
from zeroshard.tier.stores import HostStorage, HostStore

_MASTER = "master"
_PLAIN = (bool, int, float, str, type(None))
_Options = list[dict[str, Any]]


class _NewState(Exception):
    """The step makes moments that do not rest yet."""


@dataclass(eq=False)
class _Draft:
    """One segment stepped ahead: what of, and the outcome."""

    tiles: list[tuple[Tile, list[bool]]]  # all on the host, and which of their shards are used
    gradient: weakref.ref[Gradient]  # whoever drops it need not wait for us
    divisor: float
    optimizer: TileOptimizer
    options: _Options
    storages: dict[str, HostStorage]  # masters and moments, by key
    spares: dict[str, HostStorage]  # where they are stepped
    # of each shard that is stepped: its state before, with the version of each tensor, and after
    before: list[tuple[ParamShard, dict[str, tuple[Any, int]]]] = field(default_factory=list)
    after: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._versions: dict[str, int] = {}  # of the storages, when they were read
        self._around: object = None  # what it was stepped by beside options
        self._made: Future[None] | None = None
        self._is_made = self.is_dropped = False

    def begin(self, made: Future[None]) -> None:
        """The thread comes to it."""
        self._made = made

    def read(self, around: object) -> None:
        """Masters and moments are about to be read, and stepped by what is `around` (`_around`)."""
        self._versions, self._around = self._versions_now, around

    def finish(self) -> None:
        """All tiles are stepped."""
        self._is_made = True

    @property
    def _versions_now(self) -> dict[str, int]:
        return {key: one.version for key, one in self.storages.items()}

    @property
    def num_tiles(self) -> int:
        """The number of tiles that are stepped."""
        return sum(True in used for _, used in self.tiles)

    def end(self) -> None:
        """Return when the thread is not, and will not be, at it."""
        if self._made is not None and not self._made.cancel():
            wait([self._made])

    def drop(self) -> None:
        """Something that it was made of is about to change."""
        self.is_dropped = True
        self.end()

    def counts(self, steps: Sequence[TileStep], options: _Options | None, around: object) -> bool:
        """Whether it is what `steps`, of all tiles that a step takes here, would make."""
        gradient = self.gradient()
        return (
            self._is_made
            and not self.is_dropped
            and options == self.options
            and around == self._around
            and [(step.tile, step.used) for step in steps]
            == [(tile, used) for tile, used in self.tiles if True in used]
            and all(step.gradient is gradient for step in steps)
            and gradient is not None
            and gradient.divided_by == self.divisor
            and self._versions == self._versions_now
        )


def _versions(state: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return the values, which keep their identity while they are held, and their versions."""
    return {key: (value, getattr(value, "_version", 0)) for key, value in state.items()}


def _same(state: dict[str, Any], before: dict[str, tuple[Any, int]]) -> bool:
    now = _versions(state)
    return now.keys() == before.keys() and all(
        now[key][0] is value and now[key][1] == version for key, (value, version) in before.items()
    )


class DraftRunner(TileRunner):
    """A TileRunner that steps tiles on the host ahead, where that can be told."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self._drafts: dict[RestingSums, _Draft] = {}
        self._spares: dict[tuple[str, str], HostStorage] = {}  # by segment and state
        # of the drafts of one step
        self._options_now: _Options | None = None
        self._copy: TileOptimizer | None = None

    def draft(self, tiles: Sequence[Tile], divisor: float) -> None:
        """Begin to step `tiles`, those on the host of one segment, by the sum that rests over
        `divisor`.
        """
        segment = tiles[0].segment
        gradient, used = segment.sums.resting(), [[s.is_used() for s in t.shards] for t in tiles]
        if not self._drafts:
            self._options_now = _plain_options(self._optimizer)
            if self._options_now is not None:
                self._copy = tile_optimizer(self._optimizer, off_device=self._away)
        options, copy = self._options_now, self._copy
        if options is None or copy is None or gradient is None or gradient.divided_by:
            return
        if not any(True in each for each in used):
            return
        storages = dict[str, HostStorage]()
        for key, one in {_MASTER: segment.master.away, **segment.moments}.items():
            assert isinstance(one, HostStorage), segment.key
            storages[key] = one
        try:
            spares = {key: self._spare(segment, key, one.dtype) for key, one in storages.items()}
        except StorageError:
            return  # a step without drafts needs no such memory
        draft = _Draft(
            list(zip(tiles, used, strict=True)),
            weakref.ref(gradient),
            divisor,
            copy,
            options,
            storages,
            spares,
        )
        self._drafts[segment.sums] = draft
        draft.begin(self._in_thread(self._make, draft))
        gradient.lend(draft.drop)

    def _spare(self, segment: SteppedSegment, key: str, dtype: torch.dtype) -> HostStorage:
        """Return memory in which state `key` of a segment is stepped."""
        name, numel = (segment.key, key), segment.master.numel - segment.split
        held = self._spares.get(name)
        if held is None or (held.numel, held.dtype) != (numel, dtype):
            if held is not None:
                held.close()
            assert isinstance(segment.store, HostStore), segment.key
            held = segment.store.allocate(f"{segment.key} {key}, ahead", numel, dtype)
            self._spares[name] = held
        return held

    def _around(self) -> object:
        """Return what products of matrices are computed by in this thread, beside their factors."""
        if not self._states.whole:
            return None
        return torch.get_num_threads(), torch.is_autocast_enabled("cpu")

    # ------------------------------------------------------------------ in the thread

    def _make(self, draft: _Draft) -> None:
        gradient, recording = draft.gradient(), self._options.probe.recording
        if gradient is None:
            return
        draft.read(self._around())
        with suppress(StorageError, _NewState):  # a step without drafts meets it, too
            for tile, used in draft.tiles:
                if draft.is_dropped:
                    return
                since = None if recording is None else recording.now()
                self._step_ahead(draft, TileStep(tile, gradient, used))
                if gradient.divided_by and draft.divisor != 1.0:
                    return  # it was divided while we read it, perhaps
                if recording is not None:
                    recording.note(Operation("host", "step", tile.segment.key), since)
            draft.finish()

    def _step_ahead(self, draft: _Draft, step: TileStep) -> None:
        """Copy the state of a tile, and step the copy where any of its shards is used."""
        tile, first, last = step.tile, *step.tile.moments_range
        with ExitStack() as stack:
            moments = {}
            for key, spare in draft.spares.items():
                there = stack.enter_context(spare.borrowed(first, last, write=True))
                with draft.storages[key].borrowed(first, last, write=False) as here:
                    moments[key] = there.copy_(here)
            master = moments.pop(_MASTER)
            if True not in step.used:
                return
            opened = self._states.open(tile, moments)
            for shard, state, used in zip(tile.shards, opened, step.used, strict=True):
                held = dict(self._states.of(shard))
                if used:
                    draft.before.append((shard, _versions(held)))
                for key, value in held.items():  # numbers that a step changes in place
                    if state[key] is value and isinstance(value, torch.Tensor):
                        state[key] = value.clone()
            with step.gradient.block(tile.start, tile.stop) as grad:
                if draft.divisor != 1.0:
                    grad = grad.clone().div_(draft.divisor)
                self._step(draft.optimizer, step, master, opened, grad.cpu())
            self._states.park(tile, opened, moments, _refuse, into=draft.after)

    # ------------------------------------------------------------------ the step

    def _job(self, tiles: Sequence[Tile]) -> StepJob | None:
        job = super()._job(tiles)
        drafts, self._drafts = self._drafts, {}
        options, around = _plain_options(self._optimizer), self._around()
        for sums, draft in drafts.items():
            draft.end()
            steps = [
                step
                for step in (() if job is None else job.tiles)
                if step.tile.segment.sums is sums and step.tile.method is StepMethod.ON_HOST
            ]
            same = [_same(self._states.of(shard), told) for shard, told in draft.before]
            if not (steps and draft.counts(steps, options, around) and all(same)):
                self.ahead_counts["dropped"] += draft.num_tiles
                continue
            for key, storage in draft.storages.items():
                storage.change_places(draft.spares[key])
            for shard, _ in draft.before:
                if shard.tensor in draft.after:  # a rule without momentum keeps nothing
                    self._states.entries(shard)[shard.tensor] = draft.after[shard.tensor]
            for step in steps:
                step.leave_out()
            self.ahead_counts["kept"] += len(steps)
        return job

    def drop(self, sums: RestingSums | None = None) -> None:
        """Drop the draft made of `sums`, or all."""
        for key in [one for one in self._drafts if sums is None or one is sums]:
            draft = self._drafts.pop(key)
            draft.drop()
            self.ahead_counts["dropped"] += draft.num_tiles

    def settle(self) -> None:
        self.drop()
        super().settle()

    def ahead(self, keys: Container[str] | None) -> Iterable[Storage]:
        held = self._spares.items()
        return [one for (key, _), one in held if keys is None or key in keys]

    def close(self) -> None:
        self.drop()
        super().close()
        while self._spares:
            self._spares.popitem()[1].close()


def _refuse(key: str, dtype: torch.dtype) -> torch.Tensor:
    raise _NewState


def _plain_options(optimizer: torch.optim.Optimizer) -> _Options | None:
    """Return the options of every param group, as a step now reads them; None where it may read
    more than them, or what can be changed in place.
    """
    for one in each_of(optimizer):
        if not is_repeatable(one) or not {"grad_scale", "found_inf"}.isdisjoint(vars(one)):
            return None
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    values = [one for group in options for key, value in group.items() if key != "param_names"
              for one in (value if isinstance(value, tuple) else (value,))]  # fmt: skip
    return options if all(type(one) in _PLAIN for one in values) else None


class DraftingReductions(Reductions):
    """Reductions after which the host steps what has come, in the thread of its runner."""

    def __init__(self, *rest: Any, **options: Any) -> None:
        super().__init__(*rest, **options)
        self._runner: DraftRunner | None = None  # None before there is an optimizer
        self._landing: list[Bucket] = []  # buckets with sums on their way to where they rest
        self._tiles: dict[RestingSums, list[Tile]] = {}  # of this backward, on the host

    def attach(
        self,
        runner: DraftRunner,
        tiles: Callable[[], Sequence[Tile]],
        divisor: Callable[[], float | None],
    ) -> None:
        """Draft the steps of `runner`. `tiles` returns those that may be stepped ahead, `divisor`
        by what the step will divide sums, None where that is not known.
        """
        self._runner, self._all, self._divisor = runner, tiles, divisor

    def begin(self, units: Any) -> None:
        super().begin(units)
        self._landing = []
        if self._runner is not None:
            self._runner.drop()  # more is added to sums that rest, or others are begun
            self._tiles = {}
            for tile in self._all():
                self._tiles.setdefault(tile.segment.sums, []).append(tile)

    def start(self, unit: Unit, *, sync: bool, with_earlier: bool) -> bool:
        if self._runner is not None:
            for bucket in unit.buckets:  # one that comes late, too
                self._runner.drop(bucket.accumulator)
        started = super().start(unit, sync=sync, with_earlier=with_earlier)
        if sync and self._runner is not None:
            self._landing += unit.buckets
        return started

    def advance(self) -> None:
        super().advance()
        if self._landing:
            self._landing = [bucket for bucket in self._landing if not self._landed(bucket)]

    def _landed(self, bucket: Bucket) -> bool:
        """Return whether a sum is where it rests; then it is stepped ahead, if that can be."""
        sums = bucket.accumulator
        if bucket.in_flight or sums.is_flushing:
            return False
        tiles, divisor = self._tiles.get(sums), self._divisor()
        if tiles and divisor is not None and len(sums.members) == 1 and self._runner is not None:
            self._runner.draft(tiles, divisor)
        return True


def draft_steps(
    weights: Weights,
    backward: Backward,
    sharded: ShardedOptimizer,
    finalizer: Finalizer,
    scaler: LossScaler | None,
) -> None:
    """Step what `sharded` steps on the host ahead, as the reduces of `backward` bring it."""
    reductions, runner = backward.reductions, sharded.runner
    assert isinstance(reductions, DraftingReductions) and isinstance(runner, DraftRunner)
    apart = {
        segment.bucket.accumulator
        for segment in weights.segments
        if segment.bucket is not None and segment.own_master is not None
    }

    def tiles() -> list[Tile]:
        of_host = (tile for tile in sharded.tiles if tile.method is StepMethod.ON_HOST)
        return [tile for tile in of_host if tile.segment.sums in apart]

    def divisor() -> float | None:
        here = backward.accumulation
        if here.kinds & WEIGHTED or (scaler is not None and not here.scaled):
            return None  # by weights, which all ranks add up in the step; a loss without its scale
        return finalizer.divisor()

    reductions.attach(runner, tiles, divisor)
