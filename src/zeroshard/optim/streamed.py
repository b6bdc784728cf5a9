"""The step where the state rests: read | step | write, a tile at a time.

ZeRO-Offload, section 5 (the optimizer runs on the host), and ZeRO-Infinity, section 5.2.2 (its
state streams from NVMe through a bounded buffer). A *tile* is a range of one segment's optimizer
state; the pieces of parameters in it are stepped together by the user's own optimizer
(optim/shadow.py). On the host a tile is stepped where it lies. On disk tiles pass through a ring of
buffers::

    tile     0      1      2      3
    read    ====   ====   ====   ====            two tiles ahead
    step           ====   ====   ====
    write                 ====   ====   ====     into the same buffer, which is read into again when
                                                 the write is over

Tiles go from the start of the model to its end, as the next forward needs them, and each sends its
weights back as soon as it is stepped.

Invariants. A piece off the device, and its moments, are one NaN expanded to their shape wherever
the user sees them: real numbers are lent. Every element is stepped once, with the bits that it
would have on the device. Cost: the state once each way over its link or disk, and
``ring * (2 + moments)`` tiles of memory. What it does not do: it does not know ranks; what must be
agreed between them is agreed before.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.errors import StorageError
from zeroshard.memory import Trimmer, placeholder
from zeroshard.optim.pieces import ParamShard
from zeroshard.optim.shadow import Shadow
from zeroshard.state.gradient import RestingGradient
from zeroshard.state.state import State
from zeroshard.tier.staging import Memory
from zeroshard.tier.store import Storage, Store

__all__ = ["StateAtRest", "StepJob", "SteppedSegment", "Streamed", "Tile"]

_RING = 4  # sets of buffers for tiles on disk: two ahead, one being stepped, one being written
_AHEAD = 2


@dataclass
class SteppedSegment:
    """What the streamed step knows of one segment. Ranges count the elements that this rank
    steps of it.
    """

    key: str
    split: int  # the first elements, whose optimizer state rests on the device
    master: State
    # where the state of the others rests; None: all on the device, and the gradients elsewhere
    store: Store | None
    gradient: Callable[[], RestingGradient | None]
    # start casting stepped masters into the weights; do they stay meanwhile?
    bring: Callable[[int, int, torch.Tensor, bool], list[Work]]
    can_bring_from_rest: Callable[[int, int], bool]  # whether that needs no cast
    bring_from_rest: Callable[[int, int], list[Work]]  # the same from where the master rests
    # the optimizer's state of elements [split, numel), by key
    storages: dict[str, Storage] = field(default_factory=dict)
    stepped: threading.Event = field(default_factory=threading.Event)  # no step of it is under way

    def __post_init__(self) -> None:
        self.stepped.set()


@dataclass
class Tile:
    """Elements [start, stop) of what this rank steps of one segment, and the pieces of
    parameters in it.
    """

    segment: SteppedSegment
    start: int
    stop: int
    # index of the param group, piece, where it begins in the tile
    pieces: list[tuple[int, ParamShard, int]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def on_device(self) -> bool:
        """Whether the tile's states rest on the device."""
        return self.stop <= self.segment.split

    @property
    def storage_range(self) -> tuple[int, int]:
        """Where the tile lies in the storages of its segment."""
        return self.start - self.segment.split, self.stop - self.segment.split


@dataclass
class StepJob:
    """One step to take: settled when it is made, so that it may be taken later."""

    # with the gradient, and which pieces are stepped
    tiles: deque[tuple[Tile, RestingGradient, list[bool]]]
    host: Shadow
    device: Shadow
    late: bool = False  # the weights are brought up to date by whoever joins it


@dataclass
class StateAtRest:
    """One tensor of the optimizer's state of one piece, on another tier."""

    storage: Storage
    start: int
    stop: int

    def borrowed(self) -> AbstractContextManager[torch.Tensor]:
        """Lend it, to be read."""
        return self.storage.borrowed(self.start, self.stop, write=False)


class Streamed:
    """The tiles of one engine, in the order in which they are stepped."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, tiles: Sequence[Tile], device: torch.device
    ) -> None:
        self.tiles: list[Tile] = []
        self.trimmer = Trimmer(None)  # set by the engine
        self.step_s = 0.0  # how long the last step of the tiles took
        self.timed = False  # whether that includes the way of the last weights back
        self._sent: list[Work] = []
        self._optimizer = optimizer
        self._device = device
        self._ring = [_Buffers(pinned=device.type != "cpu") for _ in range(_RING)]
        self._placeholders: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # by length and dtype

        self.retile(tiles)

    def retile(self, tiles: Sequence[Tile]) -> None:
        """Take other tiles; state that rests is that of segments, which keep it."""
        self.tiles = list(tiles)
        self._places = {
            id(owned): (tile, low) for tile in self.tiles for _, owned, low in tile.pieces
        }
        for tile in self.tiles:
            for _, owned, _ in tile.pieces:
                owned.streamed = True

    def _placeholder(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the placeholder of `numel` numbers, the same object each time."""
        key = (numel, dtype)
        if key not in self._placeholders:
            self._placeholders[key] = placeholder((numel,), dtype)
        return self._placeholders[key]

    def _state(self, owned: ParamShard) -> dict[str, Any]:
        """Return the optimizer's state of a piece, {} before its first step."""
        state: dict[str, Any] = self._optimizer.state.get(owned.tensor, {})
        return state

    def _rests_at(self, tile: Tile, key: str) -> bool:
        """Whether any piece of the tile has state `key` at rest."""
        for _, owned, _ in tile.pieces:
            value = self._state(owned).get(key)
            if isinstance(value, torch.Tensor) and value is self._placeholders.get(
                (owned.piece.numel, value.dtype)
            ):
                return True
        return False

    # ------------------------------------------------- real numbers, for as long as they are needed

    def _open(self, tile: Tile, states: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        """Return the state of every piece of a tile with real numbers in it, out of `states`
        (each [tile.numel]).
        """
        out = []
        for _, owned, low in tile.pieces:
            state = dict(self._state(owned))
            for key, numbers in states.items():
                if state.get(key) is self._placeholder(owned.piece.numel, numbers.dtype):
                    state[key] = numbers[low : low + owned.piece.numel]
            out.append(state)
        return out

    def _park(
        self,
        tile: Tile,
        opened: Sequence[dict[str, Any]],
        states: dict[str, torch.Tensor],
        make: Callable[[str, torch.dtype], torch.Tensor],
    ) -> None:
        """Collect the `opened` state of a tile in `states` (`make` makes room for a new key),
        and give the optimizer stand-ins.
        """
        for (_, owned, low), state in zip(tile.pieces, opened, strict=True):
            numel = owned.piece.numel
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != owned.tensor.shape:
                    continue  # a step count, a number: of no size
                if key not in states:
                    states[key] = make(key, value.dtype)
                room = states[key][low : low + numel]
                if room.data_ptr() != value.data_ptr():
                    room.copy_(value)
                state[key] = self._placeholder(numel, value.dtype)
            if state:
                self._optimizer.state[owned.tensor] = state

    @contextmanager
    def bound(
        self, tile: Tile, *, write: bool
    ) -> Iterator[tuple[torch.Tensor, list[dict[str, Any]]]]:
        """Lend the masters of a tile off the device, and the state of its pieces. With `write`,
        what is changed or added there rests afterwards.
        """
        segment = tile.segment
        added: dict[str, torch.Tensor] = {}

        def make(key: str, dtype: torch.dtype) -> torch.Tensor:
            added[key] = torch.zeros(tile.numel, dtype=dtype)
            return added[key]

        with ExitStack() as stack:
            master = stack.enter_context(
                segment.master.borrowed(tile.start, tile.stop, write=write)
            )
            states = {
                key: stack.enter_context(storage.borrowed(*tile.storage_range, write=write))
                for key, storage in segment.storages.items()
                if write or self._rests_at(tile, key)
            }
            opened = self._open(tile, states)
            yield master, opened
            if write:
                self._park(tile, opened, states, make)
        for key, numbers in added.items():
            with self._storage_of(segment, key, numbers.dtype).borrowed(
                *tile.storage_range, write=True
            ) as room:
                room.copy_(numbers)

    def _storage_of(self, segment: SteppedSegment, key: str, dtype: torch.dtype) -> Storage:
        if key not in segment.storages:
            assert segment.store is not None, segment.key
            segment.storages[key] = segment.store.allocate(
                f"{segment.key} {key}", segment.master.numel - segment.split, dtype
            )
        return segment.storages[key]

    def at_rest(self, owned: ParamShard) -> dict[str, StateAtRest]:
        """Return what of a piece's state rests off the device, by key."""
        tile, low = self._places[id(owned)]
        if tile.on_device:
            return {}
        start = tile.storage_range[0] + low
        return {
            key: StateAtRest(storage, start, start + owned.piece.numel)
            for key, storage in tile.segment.storages.items()
            if self._state(owned).get(key) is self._placeholder(owned.piece.numel, storage.dtype)
        }

    def forget(self) -> None:
        """Give back what rests of every segment: all of it is about to be set anew."""
        for tile in self.tiles:
            self.drop(tile.segment.key)

    def drop(self, key: str) -> None:
        """Give back what rests of the segment called `key`."""
        for tile in self.tiles:
            if tile.segment.key == key:
                for storage in tile.segment.storages.values():
                    storage.close()
                tile.segment.storages = {}

    def park(self) -> None:
        """Put to rest what stands in the optimizer as real numbers: state from before the
        sharding, or loaded.
        """
        for tile in self.tiles:
            self.park_tile(tile)

    def park_tile(self, tile: Tile) -> None:
        """Do so for one tile."""
        if not tile.on_device and self._has_numbers(tile):
            with self.bound(tile, write=True):
                pass

    def _has_numbers(self, tile: Tile) -> bool:
        """Whether state of a piece of the tile stands in the optimizer as real numbers."""
        for _, owned, _ in tile.pieces:
            for value in self._state(owned).values():
                is_state = isinstance(value, torch.Tensor) and value.shape == owned.tensor.shape
                if is_state and value is not self._placeholders.get(
                    (owned.piece.numel, value.dtype)
                ):
                    return True
        return False

    # ------------------------------------------------------------------ a step

    def job(self, *, late: bool) -> StepJob:
        """Return the step that the gradients at rest now ask for."""
        tiles: deque[tuple[Tile, RestingGradient, list[bool]]] = deque()
        for tile in self.tiles:
            used = [owned.is_used() for _, owned, _ in tile.pieces]
            if any(used):
                resting = tile.segment.gradient()
                assert resting is not None, (
                    f"the gradient of {tile.segment.key} is used and not held"
                )
                tiles.append((tile, resting, used))
        away = self._device.type != "cpu"
        return StepJob(
            tiles,
            Shadow(self._optimizer, off_device=away),
            Shadow(self._optimizer, off_device=False),
            late,
        )

    def run(self, job: StepJob) -> None:
        """Take a step. Raises StorageError: some tiles are then stepped and others not; no
        buffer is in use any more.
        """
        begin = time.perf_counter()
        try:
            self._run(job)
        except BaseException:
            job.tiles.clear()
            for buffers in self._ring:
                buffers.abandon()
            raise
        self.step_s = time.perf_counter() - begin

    def _run(self, job: StepJob) -> None:
        ring = itertools.cycle(self._ring)
        loaded: deque[_Passing | None] = deque()
        while job.tiles:
            for following, gradient, _ in itertools.islice(job.tiles, len(loaded), _AHEAD + 1):
                passes = (
                    not following.on_device
                    and following.segment.store is not None
                    and following.segment.store.tier is Tier.DISK
                )
                loaded.append(self._load(following, gradient, next(ring)) if passes else None)
            tile, resting, used = job.tiles.popleft()
            passing = loaded.popleft()
            if passing is None:
                self._step_in_place(job, tile, resting, used)
            else:
                self._step_passing(job, passing, used)
            del resting, passing  # their memory may serve the next backward
            self.trimmer.passed(4 * tile.numel * tile.segment.master.dtype.itemsize)
            if not job.tiles or job.tiles[0][0].segment is not tile.segment:
                tile.segment.stepped.set()
        for buffers in self._ring:
            buffers.settle()
        if self.timed:
            for work in self._sent:  # the last ones: a link keeps its order
                getattr(work, "synchronize", work.wait)()

    def _step_in_place(
        self, job: StepJob, tile: Tile, resting: RestingGradient, used: list[bool]
    ) -> None:
        """Step a tile where it lies."""
        segment = tile.segment
        if tile.on_device:
            opened = [self._optimizer.state[owned.tensor] for _, owned, _ in tile.pieces]
            with segment.master.borrowed(tile.start, tile.stop, write=True) as master:
                self._step(
                    job.device, tile, used, master, opened, resting.fetch(tile.start, tile.stop)
                )
                if not job.late:
                    self._sent = segment.bring(tile.start, tile.stop, master, True)
            return
        from_rest = segment.can_bring_from_rest(tile.start, tile.stop)
        with _on_host(resting, tile) as grad, self.bound(tile, write=True) as (master, opened):
            self._step(job.host, tile, used, master, opened, grad)
            if not (from_rest or job.late):
                self._sent = segment.bring(tile.start, tile.stop, master, False)
        if from_rest and not job.late:
            self._sent = segment.bring_from_rest(tile.start, tile.stop)

    def _load(self, tile: Tile, resting: RestingGradient, buffers: _Buffers) -> _Passing:
        """Start reading a tile that rests on disk into one set of the ring, when what was
        written from there is written.
        """
        buffers.settle()
        segment = tile.segment
        assert segment.store is not None
        passing = _Passing(
            tile, resting, buffers, buffers.tensor("master", tile.numel, segment.master.dtype)
        )
        works = buffers.works = segment.master.read(tile.start, tile.stop, passing.master)
        for key, storage in segment.storages.items():
            passing.states[key] = buffers.tensor(key, tile.numel, storage.dtype)
            if self._rests_at(tile, key):
                works.append(storage.read(*tile.storage_range, passing.states[key]))
        if not resting.on_device and resting.state.split == 0:
            resting.settle()
            passing.grad = buffers.tensor("gradient", tile.numel, resting.state.dtype)
            works += resting.state.read(tile.start, tile.stop, passing.grad)
        return passing

    def _step_passing(self, job: StepJob, passing: _Passing, used: list[bool]) -> None:
        """Step a tile that has been read, and start writing it."""
        tile, segment, buffers = passing.tile, passing.tile.segment, passing.buffers
        buffers.settle()
        opened = self._open(tile, passing.states)
        with ExitStack() as stack:
            grad = passing.grad
            if grad is None:
                grad = stack.enter_context(_on_host(passing.resting, tile))
            elif not passing.resting.on_device:
                passing.resting.scaling.apply_to(grad)
            self._step(job.host, tile, used, passing.master, opened, grad)
        self._park(
            tile, opened, passing.states, lambda key, dtype: buffers.tensor(key, tile.numel, dtype)
        )
        works = buffers.works = segment.master.write(tile.start, tile.stop, passing.master)
        for key, numbers in passing.states.items():
            works.append(
                self._storage_of(segment, key, numbers.dtype).write(*tile.storage_range, numbers)
            )
        if not job.late:
            works += segment.bring(tile.start, tile.stop, passing.master, True)

    def _step(
        self,
        shadow: Shadow,
        tile: Tile,
        used: list[bool],
        master: torch.Tensor,
        opened: list[dict[str, Any]],
        grad: torch.Tensor,
    ) -> None:
        """Step the pieces of a tile, on parameters of the moment: the optimizer's own are the
        user's to look at meanwhile.
        """
        members: dict[int, list[nn.Parameter]] = {}
        states: dict[torch.Tensor, dict[str, Any]] = {}
        stepped: list[nn.Parameter | None] = []
        for (group, owned, low), is_used, state in zip(tile.pieces, used, opened, strict=True):
            if not is_used:
                stepped.append(None)
                continue
            span = slice(low, low + owned.piece.numel)
            parameter = nn.Parameter(master[span])
            parameter.grad = grad[span].to(master.dtype)
            members.setdefault(group, []).append(parameter)
            states[parameter] = state
            stepped.append(parameter)
        states = shadow.step(members, states)
        for index, taken in enumerate(stepped):
            if taken is not None:
                opened[index] = states[taken]

    def state_bytes(self) -> dict[Tier, int]:
        """Return the bytes of the optimizer's state that rest off the device."""
        out: dict[Tier, int] = {}
        for segment in {id(tile.segment): tile.segment for tile in self.tiles}.values():
            for storage in segment.storages.values():
                out[storage.tier] = (
                    out.get(storage.tier, 0) + storage.numel * storage.dtype.itemsize
                )
        return out


class _Buffers:
    """One set of the ring: a buffer per state, and what is being read into them or written from
    them.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.works: list[Work] = []
        self._pinned = pinned
        self._memory: dict[str, Memory] = {}

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory [numel] for state `name` that disks read and write directly: in pages of
        4 KiB a step took 2.8 times as long.
        """
        num_bytes = numel * dtype.itemsize
        held = self._memory.get(name)
        if held is None or held.num_bytes < num_bytes:
            held = self._memory[name] = Memory(num_bytes, pinned=self._pinned)
        return held.tensor(0, numel, dtype)

    def settle(self) -> None:
        """Return when none of it is under way; raise what the first has failed with."""
        works, self.works = self.works, []
        failure: StorageError | None = None
        for work in works:
            try:
                work.wait()
            except StorageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Return when none of it is under way, whether it has failed or not."""
        with suppress(StorageError):
            self.settle()


@dataclass
class _Passing:
    """A tile on its way through memory."""

    tile: Tile
    resting: RestingGradient
    buffers: _Buffers
    master: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    grad: torch.Tensor | None = None


@contextmanager
def _on_host(resting: RestingGradient, tile: Tile) -> Iterator[torch.Tensor]:
    """Lend a tile's averaged gradient as a CPU tensor."""
    if not resting.on_device:
        with resting.block(tile.start, tile.stop) as grad:
            yield grad.cpu()
    else:
        yield resting.fetch(tile.start, tile.stop).cpu()
