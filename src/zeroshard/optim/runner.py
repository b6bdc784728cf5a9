"""The step where the state rests: read | step | write, a tile at a time, now or late.

ZeRO-Offload, section 5 (the optimizer runs on the host), and ZeRO-Infinity, section 5.2.2 (its
state streams from NVMe through a bounded buffer). The shards of a tile are stepped together by a
copy of the user's own optimizer (optim/copies.py). On the host a tile is stepped where it lies. On
disk tiles pass through a ring of buffers::

    tile     0      1      2      3
    read    ====   ====   ====   ====            two tiles ahead
    step           ====   ====   ====
    write                 ====   ====   ====     into the same buffer, which is read into again when
                                                 the write is over

Tiles go from the start of the model to its end, as the next forward needs them, and each sends its
weights back as soon as it is stepped. When they run:

    at once    optimizer.step():  [ tiles ][ device ]    nothing rests on the device: no thread is
                                                         needed
    beside     optimizer.step():  [ device ]             Twin-Flow (Offload++): two parts at the
                                  [ tiles  ]             same time
    into       optimizer.step()  forward                 a unit's forward waits for its own tiles:
    forward              [ tiles    ....  ]              exact, and the first units' weights are
                                                         there while the last are stepped
    late       forward, backward t+1, step t+1 ...       ZeRO-Offload, section 5.2: one-step delayed
                    [ tiles of step t ]                  parameter update

Late means: the update that the gradients of step t ask for is in the weights from the forward t+2
on. Step t+1 first waits for it.

Invariants. Every element is stepped once, with the bits that it would have on the device. At most
one step is under way; whoever reads masters or moments waits for it, and whoever changes a gradient
that it reads (``zero_grad(set_to_none=False)``, a backward without ``zero_grad()``) waits until it
has been read. An error inside surfaces in `wait`. Cost: the state once each way over its link or
disk, and ``ring * (2 + moments)`` tiles of memory. It knows no rank.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.core.schedule import TILE_BUFFERS, TILES_AHEAD
from zeroshard.core.work import Operation, Probe, Work, wait_on_host
from zeroshard.errors import StorageError
from zeroshard.memory import Trimmer
from zeroshard.optim.copies import TileOptimizer
from zeroshard.optim.several import tile_optimizer
from zeroshard.optim.shards import StepMethod, Tile
from zeroshard.optim.tiles import TileStates, reshape_state
from zeroshard.state.gradient import Gradient
from zeroshard.tier.store import Storage
from zeroshard.tier.transfer import Memory


@dataclass(frozen=True)
class StepOptions:
    """Options of the step of one engine's tiles."""

    device: torch.device
    enqueues: bool = False  # whether the device goes on by itself (Streams.enqueues)
    into_forward: bool = False  # the next forward may begin: its units wait for their own tiles
    delayed_update: int | None = None  # steps before updates are applied one step late; None: never
    timed: bool = False  # measure both parts of a step, with the way of the last weights back
    moments: torch.dtype | None = None  # in which moments rest that are stepped in fp32
    whole: bool = False  # parameters are owned whole, so rules that go by matrices may step
    trimmer: Trimmer = field(default_factory=lambda: Trimmer(None))
    probe: Probe = field(default_factory=Probe)  # of tiles stepped and waited for
    runner: type[TileRunner] | None = None  # the class that steps tiles, where it is another one


@dataclass
class TileStep:
    """One tile to be stepped, and its numbers while they pass through memory."""

    tile: Tile
    gradient: Gradient
    used: list[bool]  # which of its shards are stepped
    is_stepped: bool = False  # already, in the backward (runtime/drafts.py)
    buffers: _Buffers | None = None
    master: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    moments: dict[str, torch.Tensor] = field(default_factory=dict)

    def leave_out(self) -> None:
        """It is stepped already: only its weights are to be brought."""
        self.is_stepped = True


@dataclass
class StepJob:
    """One step to take: settled when it is made, so that it may be taken later."""

    tiles: deque[TileStep]
    host: TileOptimizer
    device: TileOptimizer
    late: bool = False  # the weights are brought up to date by whoever waits for it


class TileRunner:
    """Steps the tiles of one engine that the user's own step() leaves out."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, states: TileStates, options: StepOptions
    ) -> None:
        self.num_steps = 0  # steps that have been started: `delayed_update` counts them
        self.was_late = False  # the last step that was started ends one step late
        self.step_s = 0.0  # how long the last step of the tiles took
        self._own_s = 0.0  # and the user's own part of it
        # tiles that were stepped in the backward: they count, or were stepped again or not at all
        self.ahead_counts = {"kept": 0, "dropped": 0}
        self._own_began: Any = None
        self._optimizer = optimizer
        self._states = states
        self._options = options
        self._away = options.enqueues
        self._stream: Any = None  # of the thread, on an accelerator
        self._sent: list[Work] = []
        self._ring = [_Buffers(pinned=self._away) for _ in range(TILE_BUFFERS)]
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        self.lags = False  # a late step has ended and is not in the weights yet

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._options.device)

    # ------------------------------------------------------------------ when

    @property
    def is_late(self) -> bool:
        """Whether the next step is applied one step late."""
        late = self._options.delayed_update
        return late is not None and self.num_steps >= late

    def start(self, tiles: Sequence[Tile], *, failed: bool = False) -> None:
        """Begin the step that the gradients at rest ask of `tiles`; the one before has been waited
        for. `failed`: this rank cannot take it, and only counts it as the others do.
        """
        assert self._under_way is None
        self.was_late = self.is_late
        self.num_steps += 1
        job = None if failed else self._job(tiles)
        if job is None:
            self.lags = self.lags or self.was_late  # all ranks publish late updates alike
            return
        beside = any(tile.method is StepMethod.BY_USER for tile in tiles)
        if all(step.tile.method is StepMethod.DECODED for step in job.tiles):
            self.run(job)
            return
        if not (beside or self._options.into_forward or self.was_late):
            with self._options.probe.waiting("host"):
                self.run(job)
            return
        if not self.was_late:
            for step in job.tiles:
                step.tile.segment.stepped.clear()
        over = threading.Event()
        for step in job.tiles:
            step.gradient.lend(partial(self._wait_until, over))
        # the weights' last readers come before the first write
        self._under_way = self._in_thread(self._run_in_thread, job, over)

    def _in_thread(self, call: Callable[..., None], *args: Any) -> Future[None]:
        """Call `call` in the thread, after what compute was given so far."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-step")
            if self._away:
                self._stream = self._module.Stream(self._options.device)
        if self._stream is None:
            return self._pool.submit(call, *args)
        ready = self._module.Event()
        ready.record()
        return self._pool.submit(self._call_on_stream, ready, call, *args)

    def _call_on_stream(self, ready: Any, call: Callable[..., None], *args: Any) -> None:
        with self._module.stream(self._stream):
            self._stream.wait_event(ready)
            call(*args)

    def _wait_until(self, over: threading.Event) -> None:
        over.wait()
        if self._stream is not None:
            self._module.current_stream(self._options.device).wait_stream(self._stream)

    def _run_in_thread(self, job: StepJob, over: threading.Event) -> None:
        segments = [step.tile.segment for step in job.tiles]
        try:
            self.run(job)
        finally:
            for segment in segments:
                segment.stepped.set()
            over.set()

    def begin_own(self) -> None:
        """The user's own step begins."""
        if self._options.timed:
            self._own_began = self._clock()

    def end_own(self) -> None:
        """The user's own step is over: wait for the tiles, unless they may go on into what
        follows.
        """
        if self._options.timed:
            self._own_s = self._since(self._own_began)
        if not (self.was_late or self._options.into_forward):
            self.wait()

    def _clock(self) -> Any:
        """Return the time on the device's own stream: seconds on the CPU, an event elsewhere."""
        if not self._away:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, begin: Any) -> float:
        end = self._clock()
        if not self._away:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the last step: the user's own part, and the tiles', which are waited for."""
        self.wait()
        return self._own_s, self.step_s

    def wait(self) -> None:
        """Return when no step is under way: masters and moments may be read. Raises what the step
        raised.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self.lags = self.lags or self.was_late  # also where it has failed: the ranks agree
            with self._options.probe.waiting("host"):
                under_way.result()
            if self._stream is not None:  # what it stepped on the device is read on this stream
                self._module.current_stream(self._options.device).wait_stream(self._stream)

    def settle(self) -> None:
        """`wait`; what was stepped ahead, if anything, is stepped again."""
        self.wait()

    def ahead(self, keys: Container[str] | None) -> Iterable[Storage]:
        """Return the memory of what is stepped ahead, of segments with these `keys` or of all."""
        return ()

    def raise_failure(self) -> None:
        """Raise what a step that went on by itself has failed with, if it has ended so."""
        under_way = self._under_way
        if under_way is not None and under_way.done() and under_way.exception() is not None:
            self.wait()

    def note_late(self, *, lags: bool) -> None:
        """A late step that has ended is in the weights, unless it `lags` on."""
        self.lags = lags

    def count_from(self, num_steps: int) -> None:
        """Go on counting steps from `num_steps`: another state has been loaded."""
        self.num_steps = num_steps

    def close(self) -> None:
        """Wait, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool, self._under_way = None, None

    # ------------------------------------------------------------------ a step

    def _job(self, tiles: Sequence[Tile]) -> StepJob | None:
        steps: deque[TileStep] = deque()
        for tile in tiles:
            if tile.method is StepMethod.BY_USER:
                continue
            used = [shard.is_used() for shard in tile.shards]
            if any(used):
                steps.append(TileStep(tile, tile.segment.resting(), used))
        if not steps:
            return None
        return StepJob(
            steps,
            tile_optimizer(self._optimizer, off_device=self._away),
            tile_optimizer(self._optimizer, off_device=False),
            self.was_late,
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
        ring, num_read = itertools.cycle(self._ring), 0
        while job.tiles:
            for following in itertools.islice(job.tiles, num_read, TILES_AHEAD + 1):
                num_read += 1
                if following.tile.method is StepMethod.THROUGH_RING:
                    self._read(following, next(ring))
            step = job.tiles.popleft()
            num_read -= 1
            tile, recording = step.tile, self._options.probe.recording
            since = time.perf_counter()
            _WAYS[tile.method](self, job, step)
            if recording is not None and tile.method.off_device:
                recording.note(Operation("host", "step", tile.segment.key), since)
            del step  # its memory may serve the next backward
            self._options.trimmer.passed(4 * tile.numel * tile.segment.master.dtype.itemsize)
            if not job.tiles or job.tiles[0].tile.segment is not tile.segment:
                tile.segment.stepped.set()
        for buffers in self._ring:
            buffers.wait()
        if self._options.timed:
            for work in self._sent:  # the last ones: a link keeps its order
                wait_on_host(work)

    def _step_on_device(self, job: StepJob, step: TileStep) -> None:
        tile, segment = step.tile, step.tile.segment
        self._states.widen(tile)
        opened = [self._states.entries(shard)[shard.tensor] for shard in tile.shards]
        with segment.master.borrowed(tile.start, tile.stop, write=True) as master:
            grad = step.gradient.fetch(tile.start, tile.stop)
            self._step(job.device, step, master, opened, grad)
            if tile.method is StepMethod.ON_DEVICE and not job.late:
                self._sent = segment.bring(tile.start, tile.stop, master, True, step.gradient)
        self._states.put_to_rest(tile)

    def _step_on_host(self, job: StepJob, step: TileStep) -> None:
        tile, segment = step.tile, step.tile.segment
        from_rest = segment.can_bring_from_rest(tile.start, tile.stop)
        with ExitStack() as stack:
            if step.is_stepped:
                lent = segment.master.borrowed(tile.start, tile.stop, write=False)
                master = stack.enter_context(lent)
            else:
                grad = stack.enter_context(step.gradient.block(tile.start, tile.stop))
                master, opened = stack.enter_context(self._states.lent(tile))
                self._step(job.host, step, master, opened, grad.cpu())
            if not (from_rest or job.late):
                self._sent = segment.bring(tile.start, tile.stop, master, False, None)
        if from_rest and not job.late:
            self._sent = segment.bring_from_rest(tile.start, tile.stop)

    def _read(self, step: TileStep, buffers: _Buffers) -> None:
        """Start reading a tile that rests on disk into one set of the ring, when what was
        written from there is written.
        """
        buffers.wait()
        tile, segment = step.tile, step.tile.segment
        step.buffers = buffers
        step.master = buffers.tensor("master", tile.numel, segment.master.dtype)
        works = buffers.works = segment.master.read(tile.start, tile.stop, step.master)
        step.grad = buffers.tensor("gradient", tile.numel, step.gradient.dtype)
        for key, storage in segment.moments.items():
            step.moments[key] = buffers.tensor(key, tile.numel, storage.dtype)
            if self._states.rests(tile, key):
                works.append(storage.read(*tile.moments_range, step.moments[key]))
        works += step.gradient.read(tile.start, tile.stop, step.grad)

    def _step_read(self, job: StepJob, step: TileStep) -> None:
        """Step a tile that has been read, and start writing it."""
        tile, segment, buffers = step.tile, step.tile.segment, step.buffers
        master, grad = step.master, step.grad
        assert buffers is not None and master is not None and grad is not None
        buffers.wait()
        step.gradient.apply_to(grad)
        opened = self._states.open(tile, step.moments)
        self._step(job.host, step, master, opened, grad)
        self._states.park(
            tile, opened, step.moments, lambda key, dtype: buffers.tensor(key, tile.numel, dtype)
        )
        works = buffers.works = segment.master.write(tile.start, tile.stop, master)
        for key, numbers in step.moments.items():
            works.append(segment.moment(key, numbers.dtype).write(*tile.moments_range, numbers))
        if not job.late:
            works += segment.bring(tile.start, tile.stop, master, True, None)

    def _step(
        self,
        optimizer: TileOptimizer,
        step: TileStep,
        master: torch.Tensor,
        opened: list[dict[str, Any]],
        grad: torch.Tensor,
    ) -> None:
        """Step the shards of a tile, on parameters of the moment: the optimizer's own are the
        user's to look at meanwhile. Where the rule goes by parameters, they have their shapes.
        """
        members: dict[int, list[nn.Parameter]] = {}
        states: dict[torch.Tensor, dict[str, Any]] = {}
        stepped: dict[int, nn.Parameter] = {}
        by_shape, shards = self._states.by_shape, step.tile.shards
        for index, shard in enumerate(shards):
            if not step.used[index]:
                continue
            numbers, own = master[shard.span], grad[shard.span].to(master.dtype)
            if by_shape[shard.group]:
                numbers, own = shard.shaped(numbers), shard.shaped(own)
                reshape_state(shard, opened[index], whole=True)
            parameter = stepped[index] = nn.Parameter(numbers)
            parameter.grad = own
            members.setdefault(shard.group, []).append(parameter)
            states[parameter] = opened[index]
        try:
            states = optimizer.step(members, states)
        finally:
            for index, parameter in stepped.items():
                opened[index] = states[parameter]
                if by_shape[shards[index].group]:
                    if parameter.data_ptr() != master[shards[index].span].data_ptr():
                        shards[index].shaped(master[shards[index].span]).copy_(parameter.data)
                    reshape_state(shards[index], opened[index], whole=False)


_WAYS = {
    StepMethod.DECODED: TileRunner._step_on_device,
    StepMethod.ON_DEVICE: TileRunner._step_on_device,
    StepMethod.ON_HOST: TileRunner._step_on_host,
    StepMethod.THROUGH_RING: TileRunner._step_read,
}


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

    def wait(self) -> None:
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
            self.wait()
