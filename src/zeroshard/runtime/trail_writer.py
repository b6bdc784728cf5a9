"""Write for ``engine.trail(directory)``: the hashes of core/trail.py, a line per step.

    before_leaves     weights, this rank's slice at rest; without leaves: before_forward, or where a
                      rank without data comes to the step, before_step
    computed          in each leaf's forward, the output of a module that is a unit; in the rank's
                      first one also the weights as they are gathered for it
    after_backward    each unit as it is gathered for the rank's first backward
    a leaf's gradient handed over to its reduce, of the dtype and numbers that travel
    returned          the gradient that a unit returns to each of its inputs
    lost              without leaves, the loss
    after_leaves      this rank's slice of every sum, once its reduces are over
    clipped           the norm; without leaves this rank's slice of the averages before the clip
    averaged          what the optimizer is about to take, and its options
    after_step        its state, masters, and the weights that follow from them; the line is written

Slices are hashed by sums that add up (core/sliced_digest.py), whole buffers of the CPU by xxh3.

Invariant: it changes neither what is done nor in which order, sends nothing, and no failure of its
own ends a step on one rank alone: a line that cannot be written is raised at the end. Cost: of a
step that is recorded one pass of xxh3 over what units pass on and over the gradients of each leaf,
and about six of the slower sums over this rank's slice; of the others a call for each event that
looks whether there is anything to do. A step that would go on by itself (offload) is waited for.

A file that ``zeroshard replay`` has put into the directory of its run (core/trail.py) asks for
the hashes of the slices of other ranks, and may ask for one leaf alone: after it the process ends.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
import xxhash

from zeroshard.core.digest import digest_of
from zeroshard.core.layout import Piece, Range
from zeroshard.core.placement import STATE, VALUE, Scope
from zeroshard.core.resting import tiles
from zeroshard.core.shares import WholeParameters
from zeroshard.core.sliced_digest import MASK, BlockTotals, digest_at, place_of, whole_digest
from zeroshard.core.trail import FORMAT, REPLAY_FILE, REPLAY_VARIABLE, Replay
from zeroshard.errors import ConfigError, StorageError
from zeroshard.optim.copies import plain_tensors
from zeroshard.optim.tiles import is_apart
from zeroshard.runtime.access import StateAccess, curve_of, kernels_of
from zeroshard.runtime.backward_pass import is_checkpointed
from zeroshard.runtime.context import Context
from zeroshard.runtime.events import StepEvents, storing
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.trees import tensors_within
from zeroshard.runtime.unit import Unit
from zeroshard.state.state import State
from zeroshard.system.safe_files import open_to_add, read_json

# -------------------------------------------------------------------------------------- trail lines
# Of a device, hashes stay there until the line is written. What cannot be written ends the trail of
# this rank, and not the step.

_log = logging.getLogger("zeroshard")
_Number: TypeAlias = int | torch.Tensor  # of 64 bits; on a device one that nobody has waited for
# a phase and a unit, and for the slice of a rank of a replayed run that rank
_Key: TypeAlias = tuple[str, str, int | None]


class StepHashes:
    """The hashes of one step, by phase and unit (`_Key`), as numbers to be added."""

    def __init__(self, step: int, seed: int) -> None:
        self.step = step
        self.texts: dict[str, dict[str, str]] = {"seed": {"": str(seed)}}
        self.numbers: dict[_Key, list[_Number]] = {}
        self.totals = BlockTotals[_Key]()  # the same, of slices
        self.same: list[tuple[str, str, str]] = []  # a phase, the phase of the same hash, a unit

    def add(self, phase: str, unit: str, number: _Number, ranks: Iterable[int] = ()) -> None:
        """Add `number` to the hash of `unit` in `phase`, and to the hashes of `ranks`."""
        for rank in (None, *ranks):
            self.numbers.setdefault((phase, unit, rank), []).append(number)

    def read(self) -> dict[str, Any]:
        """Return them as the line of a file."""
        found = {key: sum(map(int, numbers)) for key, numbers in self.numbers.items()}
        for key, total in self.totals.read().items():
            found[key] = found.get(key, 0) + total
        for source, phase, unit in self.same:
            there = [key for key in found if key[:2] == (source, unit)]
            found |= {(phase, unit, key[2]): found[key] for key in there}
        hashes: dict[str, Any] = dict(self.texts)
        slices: dict[str, dict[str, dict[str, str]]] = {}
        for (phase, unit, rank), number in found.items():
            text = f"{number & MASK:016x}"
            if rank is None:
                hashes.setdefault(phase, {})[unit] = text
            else:
                slices.setdefault(phase, {}).setdefault(unit, {})[str(rank)] = text
        line = {"step": self.step, "hashes": hashes}
        return line | {"slices": slices} if slices else line


class TrailFile:
    """The file of one rank."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self.failure: StorageError | None = None
        self._name = f"trail {path}"
        with storing(self._name):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open_to_add(path)
            if self._file.tell():
                self._file.seek(-1, 2)
                if self._file.read(1) != b"\n":  # a process was killed in the middle of a line
                    self._file.write(b"\n")

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line; the first failure is kept, and nothing is written after it."""
        if self.failure is None:
            with self.losing(), storing(self._name):
                self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                self._file.flush()

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
            with storing(self._name):
                self._file.close()
        except StorageError as error:
            self.failure = self.failure or error


# ------------------------------------------------------------------------------------- trail writer

_TILE = 1 << 20  # elements that are hashed at a time


class TrailWriter:
    """The trail of one engine on this rank."""

    def __init__(
        self,
        loop: Loop,
        states: StateAccess,
        leaves: Leaves | None,
        *,
        every: int,
        file: TrailFile,
        replay: Replay | None,
    ) -> None:
        self._loop = loop
        self._states = states
        self._leaves = leaves
        self._every = every
        self._rank, self._world = states.transport.rank, states.transport.size
        self._file = file
        self._replay = replay
        trained = [(unit, segment) for unit in loop.weights.units for segment in unit.trainable]
        self._trained = trained
        self._by_key = {segment.key: (unit.name, segment) for unit, segment in trained}
        self._unit_of = {name: unit.name for unit, segment in trained for name in segment.names}
        self._hashes: StepHashes | None = None  # of the step under way, if it is one to record
        self._leaf: int | None = None
        self._numbers = count()  # of tensors inside a leaf
        self._begun = -1  # without leaves, the step that has had its first forward
        self._micro_batches = count()  # and the numbers of the step's micro-batches
        self._coming: Sequence[Unit] = ()

    def listeners(self) -> StepEvents:
        """Return what listens to the events of a step."""
        events = StepEvents(
            computed=[self._computed],
            returned=[self._returned],
            before_backward=[self._before_backward],
            after_backward=[self._gathered],
            clipped=[self._clipped],
            averaged=[self._averaged],
            after_step=[self._stepped],
        )
        if self._leaves is None:
            events.before_forward.append(self._begin_micro_batch)
            events.lost.append(self._lost)
            events.before_step.append(self._begin_late)
        else:
            events.before_leaves.append(self._begin)
            events.before_leaf.append(self._begin_leaf)
            events.after_leaves.append(self._summed)
        return events

    # ------------------------------------------------------------------ the events of a step

    def _begin(self, step: int, seed: int) -> None:
        self._hashes = None if step % self._every else StepHashes(step, seed)
        if self._hashes is None:
            return
        if self._leaves is not None and (leaf := self._only) is not None:
            self._leaves.run_only(leaf)
        self._states.join_step()
        with self._file.losing():
            for _, segment in self._trained:
                segment.wait_uploads()
                self._add_state(self._hashes, "weight", segment, segment.weight)

    @property
    def _only(self) -> int | None:
        """The leaf of the step under way that a replay asks for alone."""
        replay, hashes = self._replay, self._hashes
        if replay is None or hashes is None or replay.step != hashes.step:
            return None
        return replay.leaf

    def _begin_leaf(self, leaf: int) -> None:
        self._leaf, self._numbers = leaf, count()

    def _begin_micro_batch(self) -> None:
        """Without leaves: a forward of the model begins. The first one that finds no gradient
        begins a step, or begins it anew after ``engine.reset()``.
        """
        if not (torch.is_grad_enabled() or is_checkpointed()):
            return
        if not self._loop.backward.accumulation.has_gradient:
            self._begun = -1
        self._begin_late()
        self._begin_leaf(next(self._micro_batches))

    def _begin_late(self) -> None:
        """Begin the step that is under way if no forward of this rank has."""
        if self._begun != (step := self._loop.weights.digest.step):
            self._begun, self._leaf = step, None
            self._micro_batches = count(self._rank, self._world)
            self._begin(step, 0)

    def _computed(self, units: Sequence[Unit], output: Any) -> None:
        # of a recomputation the output is what it was
        evaluates = self._loop.weights.schedule.evaluates
        if self._hashes is None or evaluates or torch._C._current_graph_task_id() >= 0:
            return
        self._add_gathered("gather forward", units)
        self._add_tensors("forward", units, tensors_within(output))

    def _before_backward(self, units: Sequence[Unit]) -> None:
        self._coming = units

    def _gathered(self) -> None:
        if self._hashes is not None:
            self._add_gathered("gather backward", self._coming)

    def _returned(self, units: Sequence[Unit], grad: torch.Tensor) -> None:
        if self._hashes is not None:
            self._add_tensors("backward", units, [grad])

    def handed_over(self, key: str, gradient: Callable[[], torch.Tensor | None]) -> None:
        """This rank's gradient of segment `key` is about to be sent (`Bucket.handed_over`)."""
        buffer = None if self._hashes is None or self._leaf is None else gradient()
        if self._hashes is not None and buffer is not None:
            unit, segment = self._by_key[key]
            number = whole_digest(buffer, segment.flat.layout.slots)
            self._hashes.add(f"leaf {self._leaf}", unit, number)

    def _lost(self, loss: torch.Tensor) -> None:
        if self._hashes is not None and self._leaf is not None:
            self._hashes.add(f"loss {self._leaf}", "", digest_at(loss, 0))

    def _summed(self) -> None:
        hashes, self._leaf = self._hashes, None
        if hashes is None:
            return
        self._loop.backward.reductions.wait()
        if self._only is not None:
            self._file.write(hashes.read())
            raise SystemExit(0)  # of a replay: the sums are not a step's
        for _, segment in self._trained:
            assert segment.bucket is not None
            first = segment.bucket.accumulator.own[0]
            pieces = segment.flat.layout.pieces(self._rank)
            self._add_gradient(hashes, "sum", segment, pieces, first)

    def _clipped(self, norm: torch.Tensor) -> None:
        if self._leaves is None:
            self._begin_late()
        if self._hashes is None:
            return
        self._hashes.texts["norm"] = {"": float(norm).hex()}
        for _, segment in self._trained if self._leaves is None else ():
            self._add_gradient(self._hashes, "reduced", segment, segment.stepped_pieces, 0)

    def _averaged(self) -> None:
        if self._hashes is not None:
            for _, segment in self._trained:
                self._add_gradient(self._hashes, "grad", segment, segment.stepped_pieces, 0)
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
            for table in self._states.tables():
                for resting in (one for one in table.pieces() if one.kind != VALUE):
                    phase = f"state {resting.kind.removeprefix(STATE)}"
                    begin, end = resting.place.start, resting.place.stop
                    for low, high in tiles(begin, end, _TILE):
                        with resting.state.borrowed(low, high, write=False) as part:
                            start = resting.start + low - begin
                            self._add_slice(hashes, phase, resting.name, start, part)
                numbers, shares = table.numbers(), table.segment.flat.context.options.shares
                # other ranks may cut them elsewhere
                blocks = shares.blocks if isinstance(shares, WholeParameters) else ()
                for shard in table.shards:
                    of_parts, start = numbers[shard.name], shard.piece.start
                    ranks = self._replay.holders(shard.name, start) if self._replay else []
                    # a number of the whole parameter counts once
                    mine = of_parts.get((start, shard.piece.stop), {})
                    if not start:
                        mine = next(iter(of_parts.values()))
                    for key, value in mine.items():
                        if shard.name in blocks and (start or is_apart(value)):
                            continue
                        place = f"{shard.name} {start}" if start else shard.name
                        number = xxhash.xxh3_64_intdigest(f"{place} {_text(value)}".encode())
                        hashes.add(f"state {key}", self._unit_of[shard.name], number, ranks)
            for unit, segment in self._trained:
                segment.wait_uploads()
                self._add_state(hashes, "master", segment, segment.master)
                if segment.own_master is None and len(unit.trainable) == 1:
                    hashes.same.append(("master", "published", unit.name))
                else:
                    self._add_state(hashes, "published", segment, segment.weight)
        self._file.write(hashes.read())

    # ------------------------------------------------------------------ what is hashed

    def _add_gathered(self, phase: str, units: Sequence[Unit]) -> None:
        """Add the whole weights of units that have none of this phase yet."""
        hashes = self._hashes
        if hashes is None or self._leaf is None:
            return
        for unit in units:
            if (phase, unit.name, None) not in hashes.numbers:
                for segment in unit.segments:
                    number = whole_digest(segment.flat.full, segment.flat.layout.slots)
                    hashes.add(phase, unit.name, number)

    def _add_tensors(
        self, name: str, units: Sequence[Unit], tensors: Iterable[torch.Tensor]
    ) -> None:
        """Add what a module of `units` passes on inside a leaf."""
        if self._hashes is None or self._leaf is None:
            return
        for tensor in tensors:
            number = digest_at(tensor, next(self._numbers))
            for unit in units:
                self._hashes.add(f"{name} {self._leaf}", unit.name, number)

    def _add_slice(
        self, hashes: StepHashes, phase: str, name: str, start: int, numbers: torch.Tensor
    ) -> None:
        """Add `numbers`, elements of parameter `name` from `start` on."""
        stop = start + numbers.numel()
        whole = [(start, stop, list[int]())]
        for low, high, ranks in (
            self._replay.cut(phase, name, start, stop) if self._replay else whole
        ):
            keys = [(phase, self._unit_of[name], rank) for rank in (None, *ranks)]
            part, place = numbers[low - start : high - start], place_of(name) + low
            hashes.totals.add(keys, part, place)

    def _add_state(
        self, hashes: StepHashes, phase: str, segment: Segment, state: State | None
    ) -> None:
        """Add what rests here of a segment, in what this rank steps."""
        for piece in () if state is None else segment.stepped_pieces:
            assert state is not None
            for low, high in tiles(piece.shard_start, piece.shard_stop, _TILE):
                with state.borrowed(low, high, write=False) as numbers:
                    start = piece.start + low - piece.shard_start
                    self._add_slice(hashes, phase, piece.name, start, numbers)

    def _add_gradient(
        self, hashes: StepHashes, phase: str, segment: Segment, pieces: Sequence[Piece], first: int
    ) -> None:
        """Add `pieces` of the gradient that rests here, which begin at element `first` of it."""
        assert segment.bucket is not None
        accumulator = segment.bucket.accumulator
        resting = accumulator.resting()
        if resting is None:
            return
        accumulator.flush()
        with resting.losing():
            for piece in pieces if resting.lost is None else ():
                begin = first + piece.shard_start
                for low, numbers in resting.blocks(begin, begin + piece.numel):
                    self._add_slice(hashes, phase, piece.name, piece.start + low - begin, numbers)


def _text(value: object) -> str:
    """Return a number of the optimizer's state as text, the same whatever holds it."""
    if is_apart(value):
        return digest_of(*plain_tensors(value))
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
    if context.axes.size > 1 or context.own:
        raise ConfigError(
            "engine.trail() writes the trail of data parallel ranks, and this run has other axes or"
            " parameters with a mesh of their own"
        )
    rank = context.transport.rank
    with ExitStack() as stack:
        with states.peers.together("engine.trail()", refusal=StorageError) as meeting:
            meeting.compare({"every": str(every)})
            file = TrailFile(Path(directory) / f"rank-{rank:05d}.jsonl")
            stack.callback(file.close)
            replay = None if leaves is None else _asked(Path(directory) / REPLAY_FILE)
        stack.pop_all()
    file.write(_header(context, loop.weights.units, states, every=every, row=row))
    writer = TrailWriter(loop, states, leaves, every=every, file=file, replay=replay)
    buckets = loop.backward.buckets
    for bucket in buckets:
        bucket.handed_over.append(writer.handed_over)
    failed = True
    try:
        with loop.events.around(writer.listeners()):
            yield
        failed = False
    finally:
        for bucket in buckets:
            bucket.handed_over.remove(writer.handed_over)
        file.close()
        if file.failure is not None and not failed:
            raise file.failure


def _asked(file: Path) -> Replay | None:
    """Return what ``zeroshard replay`` asks for in `file`, if it has put it there. Raises
    StorageError.
    """
    if os.environ.get(REPLAY_VARIABLE) != str(file.resolve()):
        return None
    try:
        return Replay.parse(read_json(file))
    except (ValueError, TypeError, LookupError) as error:
        raise StorageError(f"{file} is no request of zeroshard replay: {error}") from None


def _header(
    context: Context, units: Sequence[Unit], states: StateAccess, *, every: int, row: str
) -> dict[str, Any]:
    """Return the first line of this rank's file."""
    rank, mesh = context.transport.rank, context.mesh
    groups, cuts = {}, []
    stepped: dict[str, Range] = {}
    summed: dict[str, Range] = {}
    for unit in units:
        for segment in unit.trainable:
            layout = segment.flat.layout
            scope = layout.scope(unit.cells.optim)
            number = {Scope.FULL: rank, Scope.NODE_SHARD: rank // mesh.node_size, Scope.SHARD: 0}
            groups[unit.name] = number[scope]
            cuts.append(f"{segment.key} {scope} {layout.ranges}")
            stepped |= {one.name: (one.start, one.stop) for one in segment.stepped_pieces}
            summed |= {one.name: (one.start, one.stop) for one in layout.pieces(rank)}
    return {
        "trail": FORMAT,
        "rank": rank,
        "world": mesh.size,
        "row": row,
        "leaves": "" if states.tree is None else str(states.tree),
        "every": every,
        "units": [unit.name for unit in units],
        "groups": groups,
        "cut": f"{xxhash.xxh3_64_intdigest(chr(10).join(cuts).encode()):016x}",
        "curve": curve_of(states) or kernels_of(states.device),
        "stepped": stepped,
        "summed": summed,
    }
