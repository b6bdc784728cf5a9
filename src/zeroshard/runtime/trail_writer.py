"""What ``engine.trail(directory)`` writes: the hashes of core/trail.py, a line per step.

    before_leaves     weights, this rank's slice at rest
    after_backward    each unit as it is gathered for the rank's first leaf
    a leaf's gradient handed over to its reduce, of the dtype and numbers that travel
    after_leaves      this rank's slice of every sum, once its reduces are over
    clipped           the norm
    averaged          what the optimizer is about to take, and its options
    after_step        its state, masters, and the weights that follow from them; the line is written

Slices are hashed by sums that add up (core/sliced_digest.py), whole buffers of the CPU by xxh3. Of
a device, numbers stay there until the line is written.

Invariant: it changes neither what is done nor in which order, sends nothing, and no failure of its
own ends a step on one rank alone: a line that cannot be written is raised at the end. Cost: of a
step that is recorded one pass of xxh3 over the gradients of each leaf, and about six of the slower
sums over this rank's slice; nothing of the others but a look at empty lists. A step that would go
on by itself (offload) is waited for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from zeroshard.core.layout import Piece
from zeroshard.core.placement import Scope
from zeroshard.core.sliced_digest import MASK, block_total, place_of, whole_digest
from zeroshard.core.split import tiles
from zeroshard.core.trail import FORMAT
from zeroshard.errors import ConfigError, StorageError
from zeroshard.runtime.access import StateAccess
from zeroshard.runtime.context import Context
from zeroshard.runtime.curve import curve_of
from zeroshard.runtime.events import StepEvents
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.state.state import State

__all__ = ["trailing"]

_log = logging.getLogger("zeroshard")
_TILE = 1 << 20  # elements that are hashed at a time
_Number = int | torch.Tensor  # of 64 bits; on a device one element that nobody has waited for


class _Hashes:
    """The hashes of one step, by phase and unit, as numbers to be added."""

    def __init__(self, step: int, seed: int) -> None:
        self.step = step
        self.texts: dict[str, dict[str, str]] = {"seed": {"": str(seed)}}
        self._numbers: dict[str, dict[str, list[_Number]]] = {}

    def add(self, phase: str, unit: str, number: _Number) -> None:
        """Add `number` to the hash of `unit` in `phase`."""
        self._numbers.setdefault(phase, {}).setdefault(unit, []).append(number)

    def has(self, phase: str, unit: str) -> bool:
        """Whether there is one."""
        return unit in self._numbers.get(phase, ())

    def copy(self, phase: str, source: str, unit: str) -> None:
        """Take the hash of `unit` in phase `source` for that in `phase`."""
        for number in self._numbers.get(source, {}).get(unit, ()):
            self.add(phase, unit, number)

    def read(self) -> dict[str, Any]:
        """Return them as the line of a file."""
        hashes = dict(self.texts)
        for phase, by_unit in self._numbers.items():
            hashes[phase] = {
                unit: f"{sum(int(number) for number in numbers) & MASK:016x}"
                for unit, numbers in by_unit.items()
            }
        return {"step": self.step, "hashes": hashes}


class _TrailFile:
    """The file of one rank, to which lines are added."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self._path = path
        self.failure: StorageError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("a+b")
            if self._file.tell():
                self._file.seek(-1, 2)
                if self._file.read(1) != b"\n":  # a process was killed in the middle of a line
                    self._file.write(b"\n")
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> StorageError:
        return StorageError(
            f"trail {self._path}: cannot write it ({error.strerror or error}): name another"
            " directory"
        )

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; the first failure is kept, and nothing is written after it."""
        if self.failure is not None:
            return
        with self.losing():
            try:
                self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                self._file.flush()
            except OSError as error:
                raise self._error(error) from None

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Keep the first StorageError of the body as the `failure`: the other ranks go on."""
        try:
            yield
        except StorageError as error:
            if self.failure is None:
                self.failure = error
                _log.warning("the trail ends here: %s", error)

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self.failure = self.failure or self._error(error)


class TrailWriter:
    """The trail of one engine on this rank."""

    def __init__(
        self,
        loop: Loop,
        states: StateAccess,
        *,
        every: int,
        rank: int,
        file: _TrailFile,
    ) -> None:
        self._loop = loop
        self._states = states
        self._every = every
        self._rank = rank
        self._file = file
        trained = [(unit, segment) for unit in loop.weights.units for segment in unit.trainable]
        self._trained = trained
        self._by_key = {segment.key: (unit.name, segment) for unit, segment in trained}
        self._unit_of = {name: unit.name for unit, segment in trained for name in segment.names}
        self._hashes: _Hashes | None = None  # of the step under way, if it is one to record
        self._leaf = 0
        self._coming: Sequence[Unit] = ()

    def listeners(self) -> StepEvents:
        """Return what listens to the events of a step."""
        return StepEvents(
            before_leaves=[self._begin],
            before_leaf=[self._begin_leaf],
            before_backward=[self._before_backward],
            after_backward=[self._gathered],
            after_leaves=[self._summed],
            clipped=[self._clipped],
            averaged=[self._averaged],
            after_step=[self._stepped],
        )

    # ------------------------------------------------------------------ the events of a step

    def _begin(self, step: int, seed: int) -> None:
        self._hashes = None if step % self._every else _Hashes(step, seed)
        if self._hashes is not None:
            self._states.join_step()
            with self._file.losing():
                for unit, segment in self._trained:
                    segment.wait_uploads()
                    self._add_state("weight", unit, segment, segment.weight)

    def _begin_leaf(self, leaf: int) -> None:
        self._leaf = leaf

    def _before_backward(self, units: Sequence[Unit]) -> None:
        self._coming = units

    def _gathered(self) -> None:
        hashes = self._hashes
        for unit in () if hashes is None else self._coming:
            if hashes is not None and not hashes.has("gather", unit.name):
                for segment in unit.segments:
                    number = whole_digest(segment.flat.full, segment.flat.layout.slots)
                    hashes.add("gather", unit.name, number)

    def handed_over(self, key: str, buffer: torch.Tensor | None) -> None:
        """This rank's gradient of segment `key` is about to be sent (`Leaves.handed_over`)."""
        if self._hashes is not None and buffer is not None:
            unit, segment = self._by_key[key]
            self._hashes.add(
                f"leaf {self._leaf}", unit, whole_digest(buffer, segment.flat.layout.slots)
            )

    def _summed(self) -> None:
        if self._hashes is not None:
            self._loop.backward.reductions.wait()
            for unit, segment in self._trained:
                assert segment.grad is not None
                first = segment.grad.accumulator.own[0]
                self._add_gradient(
                    "sum", unit, segment, segment.flat.layout.pieces(self._rank), first
                )

    def _clipped(self, norm: torch.Tensor) -> None:
        if self._hashes is not None:
            self._hashes.texts["norm"] = {"": float(norm).hex()}

    def _averaged(self) -> None:
        if self._hashes is not None:
            for unit, segment in self._trained:
                self._add_gradient("grad", unit, segment, segment.stepped_pieces, 0)
            options = self._loop.backward.decisions.items()
            self._hashes.texts["option"] = {
                name: text for name, text in options.items() if name.startswith("option ")
            }

    def _stepped(self) -> None:
        hashes, self._hashes = self._hashes, None
        if hashes is None:
            return
        self._states.join_step()
        with self._file.losing():
            self._add_states(hashes)
            for unit, segment in self._trained:
                segment.wait_uploads()
                self._add_state("master", unit, segment, segment.master, hashes)
                if segment.own_master is None and len(unit.trainable) == 1:
                    hashes.copy("published", "master", unit.name)
                else:
                    self._add_state("published", unit, segment, segment.weight, hashes)
        self._file.write(hashes.read())

    # ------------------------------------------------------------------ what is hashed

    def _add_state(
        self,
        phase: str,
        unit: Unit,
        segment: Segment,
        state: State | None,
        hashes: _Hashes | None = None,
    ) -> None:
        """Add what rests here of a segment, in what this rank steps."""
        hashes = hashes or self._hashes
        assert hashes is not None
        for piece in () if state is None else segment.stepped_pieces:
            assert state is not None
            for low, high in tiles(piece.shard_start, piece.shard_stop, _TILE):
                with state.borrowed(low, high, write=False) as numbers:
                    place = piece.start + low - piece.shard_start + place_of(piece.name)
                    hashes.add(phase, unit.name, block_total(numbers, place))

    def _add_gradient(
        self, phase: str, unit: Unit, segment: Segment, pieces: Sequence[Piece], first: int
    ) -> None:
        """Add `pieces` of the gradient that rests here, which begin at element `first` of it."""
        assert segment.grad is not None and self._hashes is not None
        accumulator = segment.grad.accumulator
        resting = accumulator.resting()
        if resting is None:
            return
        accumulator.flush()
        with resting.losing():
            for piece in pieces if resting.lost is None else ():
                begin = first + piece.shard_start
                for low, numbers in resting.blocks(begin, begin + piece.numel):
                    place = piece.start + low - begin + place_of(piece.name)
                    self._hashes.add(phase, unit.name, block_total(numbers, place))

    def _add_states(self, hashes: _Hashes) -> None:
        """Add the optimizer's state of what this rank steps."""
        for shard in self._states.stepped_pieces():
            unit = self._unit_of[shard.name]
            moments, numbers = self._states.optimizer_states(shard)
            for key, resting in moments.items():
                for low, high in tiles(resting.place.start, resting.place.stop, _TILE):
                    with resting.state.borrowed(low, high, write=False) as part:
                        place = resting.start + low - resting.place.start + place_of(shard.name)
                        hashes.add(f"state {key}", unit, block_total(part, place))
            if shard.piece.start == 0:  # a number of the whole parameter: it counts once
                for key, value in numbers.items():
                    text = f"{shard.name} {_text(value)}"
                    hashes.add(f"state {key}", unit, xxhash.xxh3_64_intdigest(text.encode()))


def _text(value: object) -> str:
    """Return a number of the optimizer's state as text, the same whatever holds it."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    return repr(float(value)) if isinstance(value, Real) else repr(value)


# ------------------------------------------------------------------ files


@contextmanager
def trailing(
    directory: str | Path,
    context: Context,
    loop: Loop,
    states: StateAccess,
    *,
    every: int,
    row: str,
) -> Iterator[None]:
    """Write the trail of one engine; see ``Engine.trail``."""
    leaves = context.leaves
    if type(every) is not int or every < 1:
        raise ConfigError(f"every={every!r}: a number of steps, at least 1")
    if leaves is None:
        raise ConfigError("engine.trail() needs zs.shard(..., leaves=V): its hashes are of leaves")
    if context.axes.size > 1 or context.own:
        raise ConfigError(
            "engine.trail() writes the trail of data parallel ranks, and this run has other axes or"
            " parameters with a mesh of their own"
        )
    rank = context.transport.rank
    file = _TrailFile(Path(directory) / f"rank-{rank:05d}.jsonl")
    file.write(_header(context, loop.weights.units, states, every=every, row=row))
    writer = TrailWriter(loop, states, every=every, rank=rank, file=file)
    leaves.handed_over.append(writer.handed_over)
    failed = True
    try:
        with loop.events.around(writer.listeners()):
            yield
        failed = False
    finally:
        leaves.handed_over.remove(writer.handed_over)
        file.close()
        if file.failure is not None and not failed:
            raise file.failure


def _header(
    context: Context, units: Sequence[Unit], states: StateAccess, *, every: int, row: str
) -> dict[str, Any]:
    """Return the first line of this rank's file."""
    rank, mesh = context.transport.rank, context.mesh
    groups, cuts = {}, []
    for unit in units:
        for segment in unit.trainable:
            layout = segment.flat.layout
            scope = layout.scope(unit.cells.optim)
            number = {Scope.FULL: rank, Scope.NODE_SHARD: rank // mesh.node_size, Scope.SHARD: 0}
            groups[unit.name] = number[scope]
            cuts.append(f"{segment.key} {scope} {layout.ranges}")
    return {
        "trail": FORMAT,
        "rank": rank,
        "world": mesh.size,
        "row": row,
        "leaves": str(states.tree),
        "every": every,
        "units": [unit.name for unit in units],
        "groups": groups,
        "cut": f"{xxhash.xxh3_64_intdigest(chr(10).join(cuts).encode()):016x}",
        "curve": curve_of(states),
    }
