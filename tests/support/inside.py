"""What tests ask of an engine's inside: the only file in tests that knows its private names.

A test that can say what it means through the public API (``engine.memory()``,
``engine.traffic()``, ``states_of(engine)``) does that instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch

import zeroshard as zs
from benchmarks.paced_link import Paced
from tests.support.endless_link import Endless
from zeroshard.comm.cpu import collectives
from zeroshard.comm.levels import Levels
from zeroshard.comm.transport import Transport
from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.placement import Tier
from zeroshard.core.residency import Residency, UnitState, Use
from zeroshard.core.schedule import Schedule
from zeroshard.memory import MemoryCounter
from zeroshard.optim.shards import ParamShard
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.context import Context
from zeroshard.runtime.engine import states_of
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.reductions import Reductions
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights
from zeroshard.sharding import api
from zeroshard.state.norms import ExactSum
from zeroshard.state.sums import TreeSums
from zeroshard.tier.store import Store


def exchange(engine: zs.Engine, payload: bytes) -> list[bytes]:
    """Return every rank's `payload`, in rank order: the ranks meet here."""
    return states_of(engine).peers.exchange(payload, "inside.exchange()")


# ------------------------------------------------------------------------------------------- units


def levels(engine: zs.Engine) -> Levels:
    """Return the transports of all ranks, inside nodes and between them."""
    return engine._context.levels


def lanes_of(engine: zs.Engine) -> dict[int, str]:
    """Return the lanes of an engine on a device, but compute, by the id of their stream."""
    streams: Any = engine._context.streams
    return {stream.stream_id: lane for lane, stream in streams._lanes.items()}


def units(engine: zs.Engine) -> list[Unit]:
    """Return the units of `engine`, in order."""
    return list(engine._weights.units)


def unit(engine: zs.Engine, name: str) -> Unit:
    """Return the unit called `name`."""
    return next(unit for unit in units(engine) if unit.name == name)


def segments(engine: zs.Engine) -> list[Segment]:
    """Return the segments of every unit, in order."""
    return [segment for unit in units(engine) for segment in unit.segments]


def padded_numel(engine: zs.Engine, *, trained: bool = False) -> int:
    """Return the elements of all flat buffers (or of those that are `trained`), padding
    included.
    """
    return sum(
        segment.flat.layout.numel
        for segment in segments(engine)
        if not trained or segment.bucket is not None
    )


def largest_unit_bytes(engine: zs.Engine) -> int:
    """Return the bytes of the largest unit when it is gathered."""
    return max(unit.residency.traits.nominal_bytes for unit in units(engine))


def is_at_rest(engine: zs.Engine) -> bool:
    """Return whether no unit is gathered or used."""
    return not gathered(engine) and not any(unit.residency.in_use for unit in units(engine))


def is_unused(engine: zs.Engine) -> bool:
    """Return whether no unit is in a forward or a backward; it may still be gathered."""
    return not any(unit.residency.in_use for unit in units(engine))


def is_gathering(engine: zs.Engine) -> bool:
    """Return whether any unit is on its way."""
    return any(unit.residency.state is UnitState.GATHERING for unit in units(engine))


def gathered(engine: zs.Engine) -> list[str]:
    """Return the names of the units that are gathered, or being gathered."""
    return [unit.name for unit in units(engine) if unit.residency.state is not UnitState.RESTING]


@contextmanager
def traced(engine: zs.Engine, note: Callable[[str, str], None]) -> Iterator[None]:
    """Call `note` with each event of a unit inside ("gather", "use", "release" and, once per
    segment, "reduce") and the unit's name.
    """
    names: dict[object, str] = {unit: unit.name for unit in units(engine)}
    names |= {bucket: unit.name for unit in units(engine) for bucket in unit.buckets}
    noted = {
        "gather": (Unit, "unshard"),
        "use": (Weights, "_use"),
        "release": (Unit, "reshard"),
        "reduce": (Bucket, "reduce"),
        "reduce inside": (Bucket, "reduce_inside"),
    }

    def watched(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(target: Any, *args: Any, **options: Any) -> Any:
            name = names.get(args[0] if what == "use" else target)
            if name is not None:
                note(what.split()[0], name)
            return call(target, *args, **options)

        return run

    with ExitStack() as stack:
        for what, (kind, method) in noted.items():
            call = watched(what, getattr(kind, method))
            stack.enter_context(mock.patch.object(kind, method, call))
        yield


def recordings(engine: zs.Engine) -> list[object]:
    """Return what is told of the engine's operations, at each place that tells: None, untraced."""
    stores = engine._context.tiering.stores.values()
    assert engine._sharded is not None
    runner = engine._sharded.runner._options
    probes = [engine._context.streams.probe, runner.probe, *(store.probe for store in stores)]
    return [probe.recording for probe in probes]


@contextmanager
def linked(link: Endless | Paced | None) -> Iterator[None]:
    """Put `link` between device and host of the engines made inside, if it is one. Where nothing
    goes on while one copies, a step on the host does not go on into the next forward.
    """
    with ExitStack() as stack:
        if link is not None:
            stack.enter_context(mock.patch.object(api, "link_of", lambda device: link))
            if not link.overlaps:
                stack.enter_context(mock.patch.object(Context, "steps_into_forward", False))
        yield


class Commands:
    """The effects on units, buckets and reduces of one engine: each method stands for one of
    runtime's and notes it. They are what is done, not who decides it (core/schedule), so that any
    schedule can be recorded.
    """

    _WORDS = {
        Use.DIRECT: "direct",
        Use.USER: "user",
        Use.SECTION: "schedule",
        Use.STAGE: "schedule",
    }

    def __init__(self, engine: zs.Engine, note: Callable[[str], None]) -> None:
        self._meter = engine._context.meter
        self._names = {id(unit.residency): unit.name for unit in units(engine)}
        self._transports = engine._context.transports
        self._say = note
        self._live = self._meter.live
        self._last: Flight | None = None  # of the reduce that was started last
        self._starting: tuple[Flight | None, str, str] | None = None  # the one that is about to

    def _note(self, what: str, name: str, num_bytes: int | None = None) -> None:
        told = f"{what} {name.removesuffix(':fp32')}"
        if num_bytes is not None:
            told += f" {num_bytes}"
        if self._meter.live != self._live:
            self._live = self._meter.live
            told += f" | {self._live}"
        self._say(told)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note every command inside."""
        after: list[tuple[type, str, Callable[[Any], str], Callable[[Any], int | None]]] = [
            (Unit, "unshard", lambda unit: f"gather {unit.name}", lambda unit: unit.full_bytes),
            (Unit, "attach", lambda unit: f"use {unit.name}", lambda _: None),
            (Unit, "reshard", lambda unit: f"release {unit.name}", lambda _: None),
            (Unit, "mark_idle", lambda unit: f"keep {unit.name}", lambda _: None),
            (Unit, "resume", lambda unit: f"wake {unit.name}", lambda _: None),
            (
                Bucket,
                "_open",
                lambda one: f"bucket {one.key}" if one.loan else f"bucket at rest {one.key}",
                lambda one: one.num_bytes,
            ),
            (TreeSums, "_make", lambda one: f"partial {one._key}", lambda _: None),
        ]
        around: list[tuple[type, str, Callable[..., Any]]] = [
            (Residency, "acquire", self._acquire),
            (Residency, "release", self._release),
            (Unit, "advance", self._advance),
            (Schedule, "reset", self._reset),  # which abandons the units next
            (Unit, "abandon", self._abandon),
            (Bucket, "reduce", self._reduce),
            (Bucket, "reduce_inside", self._reduce_inside),
            (Bucket, "wait", self._wait),
            (Flight, "done", self._done),
            (Flight, "go", self._go),
        ]
        with ExitStack() as stack:
            for owner, name, told, num_bytes in after:
                stack.enter_context(_replaced(owner, name, self._after(told, num_bytes)))
            for owner, name, replacement in around:
                stack.enter_context(_replaced(owner, name, replacement))
            yield

    def _after(
        self, told: Callable[[Any], str], num_bytes: Callable[[Any], int | None]
    ) -> Callable[..., Any]:
        def noted(original: Callable[..., Any], one: Any, *args: Any, **options: Any) -> Any:
            result = original(one, *args, **options)
            what, name = told(one).rsplit(" ", 1)
            self._note(what, name, num_bytes(one))
            return result

        return noted

    def _acquire(self, original: Callable[..., Any], residency: Residency, use: Use) -> None:
        original(residency, use)
        if use in self._WORDS:
            self._note(f"hold ({self._WORDS[use]})", self._names[id(residency)])

    def _release(self, original: Callable[..., Any], residency: Residency, use: Use) -> None:
        was_held = residency.has(use)
        original(residency, use)
        if use in self._WORDS and was_held:
            self._note(f"let go ({self._WORDS[use]})", self._names[id(residency)])

    def _advance(self, original: Callable[..., Any], unit: Unit) -> None:
        reads = unit._flight is not None and unit._flight._reads_first
        original(unit)
        if reads:  # else there is nothing to wait for
            self._note("advance", unit.name)

    def _reset(self, original: Callable[..., Any], schedule: Schedule) -> None:
        self._rested = {id(one) for one in schedule.units if one.state is UnitState.RESTING}
        original(schedule)

    def _abandon(self, original: Callable[..., Any], unit: Unit) -> None:
        original(unit)
        if id(unit.residency) not in self._rested:
            self._note("abandon", unit.name)

    def _reduce(self, original: Callable[..., Any], bucket: Bucket, **options: Any) -> Any:
        flight = original(bucket, **options)
        if bucket.reduction is not None:
            self._last = bucket.reduction.flight
        return self._starts("reduce", bucket, flight)

    def _starts(self, what: str, bucket: Bucket, flight: Flight | None) -> Flight | None:
        """Note a reduce once its flight has started, or at once where there is none."""
        if flight is None:
            self._note(what, bucket.key)
        self._starting = (flight, what, bucket.key)
        return flight

    def _go(self, original: Callable[..., Any], flight: Flight, *args: Any, **options: Any) -> None:
        original(flight, *args, **options)
        if self._starting is not None and self._starting[0] is flight:
            self._note(*self._starting[1:])
            self._starting = None

    def _reduce_inside(self, original: Callable[..., Any], bucket: Bucket, **options: Any) -> Any:
        flight = original(bucket, **options)
        if bucket.reduction is not None:
            self._last = bucket.reduction.flight
        return self._starts("reduce inside", bucket, flight)

    def _wait(self, original: Callable[..., Any], bucket: Bucket, **options: Any) -> None:
        flew = bucket.in_flight
        original(bucket, **options)
        if flew and not bucket.in_flight:
            self._note("reduced", bucket.key)

    def _done(self, original: Callable[..., bool], flight: Flight) -> bool:
        """Whether a reduce is over is a matter of time: here, as soon as another was started. For
        ranks that run the same units.
        """
        if flight is self._last:
            return False
        while not original(flight):
            for progress in self._transports.progress:
                progress()
            time.sleep(0)
        return True


def _replaced(owner: type, name: str, replacement: Callable[..., Any]) -> Any:
    original = getattr(owner, name)

    def stands_for(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    return mock.patch.object(owner, name, stands_for)


@contextmanager
def commands(engine: zs.Engine, note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` with a line for each command that `engine` carries out inside: what, the unit or
    segment, its bytes, and after a bar the bytes in use from then on. No other engine may run.
    """
    with Commands(engine, note).recorded(), patient_pools():
        yield


@contextmanager
def patient_pools() -> Iterator[None]:
    """Let a full pool of gradient buffers wait for a late peer as long as it takes, so that peaks
    are the same on a machine whose cores are busy.
    """
    with mock.patch.object(collectives, "_SPILL_AFTER_S", 60.0):
        yield


@contextmanager
def ranks_in_step() -> Iterator[None]:
    """Let no rank be further behind than one unit: a reduce is over when the next unit has been
    handed over, so that peaks are the same on a machine whose cores are busy. For ranks that run
    the same units.
    """
    advance, earlier = Reductions.advance, WeakKeyDictionary[Reductions, list[Flight]]()

    def in_step(reductions: Reductions) -> None:
        for flight in earlier.get(reductions, []):
            while not flight.done():
                for progress in reductions._transports.progress:
                    progress()
                time.sleep(0)
        buckets = [reductions._buckets[key] for key in reductions._reduces.under_way]
        earlier[reductions] = [one.reduction.flight for one in buckets if one.reduction]
        advance(reductions)

    with mock.patch.object(Reductions, "advance", in_step), patient_pools():
        yield


# --------------------------------------------------------------------------------- weights, memory


def full_weights(engine: zs.Engine, name: str) -> torch.Tensor:
    """Return the buffer [numel] into which the first segment of the unit `name` is gathered."""
    return unit(engine, name).segments[0].flat.full


def full_bytes(engine: zs.Engine) -> int:
    """Return the bytes of the buffers into which weights are gathered, as they are now."""
    return sum(segment.flat.full.untyped_storage().nbytes() for segment in segments(engine))


def drop_full_weights(engine: zs.Engine) -> None:
    """Take the memory from under the buffers into which weights are gathered."""
    for unit in units(engine):
        unit.segments[0].flat.full.untyped_storage().resize_(0)


def column_bytes(engine: zs.Engine) -> int:
    """Return the bytes of the columns that `hpz` keeps for the backward."""
    return sum(segment.flat.column_bytes for segment in segments(engine))


def alter_weights_at_rest(engine: zs.Engine) -> None:
    """Change one number of what this rank holds of the second unit."""
    flat = units(engine)[1].segments[0].flat
    flat.wait_published()
    flat.rest.whole[5] += 1.0


def frozen_bytes_and_numel(engine: zs.Engine) -> tuple[int, int]:
    """Return the bytes at rest of the segments without gradient, and their elements in all."""
    frozen = [segment.flat for segment in segments(engine) if segment.bucket is None]
    return sum(flat.rest_bytes for flat in frozen), sum(flat.layout.numel for flat in frozen)


# --------------------------------------------------------------------------------------- gradients


def has_local_gradient(engine: zs.Engine, name: str) -> bool:
    """Return whether the unit `name` has a gradient that has not been reduced."""
    bucket = unit(engine, name).trainable[0].bucket
    assert bucket is not None
    return bucket.has_unreduced


def cut_buffers(engine: zs.Engine) -> list[int]:
    """Return, for each segment that is trained, of how many gradient buffers it keeps views."""
    return [len(bucket._cuts) for unit in units(engine) for bucket in unit.buckets]


def reducing(engine: zs.Engine) -> list[str]:
    """Return the names of the units whose gradients are being reduced."""
    buckets = [(unit.name, unit.trainable[0].bucket) for unit in units(engine)]
    return [name for name, bucket in buckets if bucket is not None and bucket.in_flight]


def gradient_buffer_bytes(engine: zs.Engine) -> int:
    """Return the bytes of gradient buffers that are being filled or reduced now; memory that the
    pool has lent again counts for its last loan.
    """
    buckets = [segment.bucket for segment in segments(engine) if segment.bucket is not None]
    reductions = [bucket.reduction for bucket in buckets if bucket.reduction is not None]
    loans = [reduction.loan for reduction in reductions if reduction.loan is not None]
    return sum(bucket.num_bytes for bucket in buckets if bucket.buffer is not None) + sum(
        loan.num_bytes for loan in loans if not loan.lent_again
    )


def lent_bytes(engine: zs.Engine) -> int:
    """Return the bytes of gradient buffers that the pool of a process group's collectives lends."""
    native: Any = transport(engine)
    return int(native._pool._lent_bytes)


def resting_gradients(engine: zs.Engine) -> list[Callable[[], object]]:
    """Return weak references to the gradients at rest, by segment."""
    return [segment.bucket.accumulator.resting for segment in segments(engine) if segment.bucket]


def flush_gradients(engine: zs.Engine) -> None:
    """Wait for the sums that are on their way to another tier."""
    engine._backward.reductions.flush()


def idle_gradient_bytes(engine: zs.Engine) -> dict[str, int]:
    """Return, by tier, the bytes that are kept for the next gradient."""
    idle: dict[str, int] = {}
    buckets: list[Bucket] = list(engine._backward.buckets)
    for bucket in buckets:
        for storage, _ in bucket.accumulator._idle:
            num_bytes = storage.numel * storage.dtype.itemsize
            idle[storage.tier.value] = idle.get(storage.tier.value, 0) + num_bytes
    return idle


def send_all_gradients(engine: zs.Engine) -> None:
    """Let one process reduce its gradients as several do, from buffers of the wire."""
    for bucket in engine._backward.buckets:
        bucket._direct = False


def gradient_norm(engine: zs.Engine) -> torch.Tensor:
    """Return the 2-norm of the averaged gradients over all ranks, before any clipping."""
    return engine._finalizer.norm()


@contextmanager
def other_norm(engine: zs.Engine, factor: float) -> Iterator[None]:
    """Inside, this rank's norm of the gradient is `factor` times what the ranks agree on."""
    finalizer = engine._finalizer
    norm = finalizer.norm
    finalizer.norm = lambda limit: norm(limit) * factor  # type: ignore[method-assign]
    yield
    del finalizer.norm


@contextmanager
def lost_leaf(engine: zs.Engine, unit_name: str, lost: int) -> Iterator[None]:
    """Inside, what a unit has of leaf `lost` is not sent; a trail has heard of it."""
    begun = list[int]()
    keys = [segment.key for segment in unit(engine, unit_name).segments]

    def lose(key: str, gradient: Callable[[], torch.Tensor | None]) -> None:
        buffer = gradient() if key in keys and begun[-1:] == [lost] else None
        if buffer is not None:
            buffer.zero_()

    buckets = engine._backward.buckets
    for bucket in buckets:
        bucket.handed_over.append(lose)
    engine._loop.events.before_leaf.append(begun.append)
    yield
    for bucket in buckets:
        bucket.handed_over.remove(lose)
    engine._loop.events.before_leaf.remove(begun.append)


def squares(engine: zs.Engine) -> ExactSum:
    """Return the sum of squares of the averaged gradients of all ranks, not rounded. Collective."""
    return engine._finalizer._squares_of_group()


# --------------------------------------------------------------------------------------- optimizer


def param_shards(engine: zs.Engine) -> list[ParamShard]:
    """Return the pieces of parameters that this rank steps."""
    assert engine._sharded is not None
    return list(engine._sharded.pieces())


def tile_seconds(engine: zs.Engine) -> float:
    """Return how long the tiles of the last step took that the engine steps itself."""
    assert engine._sharded is not None
    return engine._sharded.runner.step_s


def delay_tiles(engine: zs.Engine, delay: Callable[[], None]) -> None:
    """Call `delay` before each tile that the engine steps itself."""
    assert engine._sharded is not None
    runner: Any = engine._sharded.runner
    run = runner._step

    def slow(*args: Any) -> None:
        delay()
        run(*args)

    runner._step = slow


def pieces_off_device(engine: zs.Engine) -> set[int]:
    """Return the ids of the stepped tensors whose numbers are on the host or on disk."""
    return {id(shard.tensor) for shard in param_shards(engine) if shard.method.off_device}


def loss_scaler(engine: zs.Engine) -> LossScaler | None:
    """Return the fp16 loss scaler, None in other precisions."""
    return engine._scaler


def is_balanced(engine: zs.Engine) -> bool:
    """Return whether ``fraction="auto"`` has come to its fraction."""
    balance = None if engine._tiles is None else engine._tiles.balance
    return balance is not None and balance.settled


# ------------------------------------------------------------------------------- transport, stores


def transport(engine: zs.Engine) -> Transport:
    """Return what moves bytes between the ranks."""
    return engine._context.transport


def slow_publishes(delay_s: float) -> Any:
    """Return a context in which this rank takes so long before it publishes a segment's weights."""

    def publish(original: Callable[[FlatWeights], None], flat: FlatWeights) -> None:
        time.sleep(delay_s)
        original(flat)

    return _replaced(FlatWeights, "publish", publish)


def wait_published(engine: zs.Engine) -> None:
    """Return when the weights that the last step published have arrived on this rank."""
    for one in units(engine):
        if one._flight is not None and not one._flight._reads_first:
            one._flight.wait()
        for segment in one.segments:
            segment.flat.wait_published()
    engine._context.transports.begin_write()


def wait_reduced(engine: zs.Engine) -> None:
    """Return when the gradients of the last backward rest."""
    for one in units(engine):
        for bucket in one.buckets:
            bucket.wait()


def lose_notices(engine: zs.Engine) -> None:
    """Do as where the store through which ranks tell of their errors is gone."""
    unnoticed: Any = transport(engine).control
    unnoticed._far_notices = None


def slot_bytes(engine: zs.Engine) -> tuple[int, int]:
    """Return the bytes of shared memory in slots, and the limit of what the pool keeps."""
    shared: Any = transport(engine)
    slots = shared.collectives.slots
    return slots.total_bytes(), slots._limit_bytes


def buffer_counter(engine: zs.Engine) -> MemoryCounter:
    """Return what counts the bytes that are gathered or in buffers."""
    return engine._context.meter


def stores(engine: zs.Engine) -> dict[Tier, Store]:
    """Return the stores of the tiers in use beyond the device."""
    return dict(engine._context.tiering.stores)


@contextmanager
def disk_reads(engine: zs.Engine) -> Iterator[list[int]]:
    """Give the bytes of each read of the disk inside."""
    kind: Any = type(next(iter(stores(engine)[Tier.DISK].storages)))  # type: ignore[attr-defined]
    read, seen = kind.read, list[int]()

    def counted(storage: Any, start: int, stop: int, out: torch.Tensor) -> Any:
        seen.append((stop - start) * storage.dtype.itemsize)
        return read(storage, start, stop, out)

    kind.read = counted
    try:
        yield seen
    finally:
        kind.read = read


def close_stores(engine: zs.Engine) -> None:
    """Wait for a step under way and close the stores; the model stays as it is, unlike in
    ``engine.close()``, which brings all of it to the device.
    """
    states_of(engine).join_step()
    engine._context.tiering.close()


def await_drafts(engine: zs.Engine) -> None:
    """Return when what the host steps ahead is stepped."""
    assert engine._sharded is not None
    runner = engine._sharded.runner
    for draft in getattr(runner, "_drafts", {}).values():
        wait([draft._made])
