"""Deferred initialisation: the tape of what would have been computed, and the hollow tensors that
wait for it.

The tape holds operations that are recorded now and run later. A *cell* stands for one storage. An
*entry* is one operation that wrote into cells, with its arguments by value: copies of small
tensors, the geometry of other cells, the random generator's state. Each entry points at the earlier
entries that it reads the effect of:

    w = torch.empty(4096, 4096)      blank(w)
    w.normal_()                      normal_(w)           overwrites all of w: the blank is freed
    w.mul_(0.02)                     mul_(w)   --needs--> normal_(w)
    v = w.clone()                    v: clone  --needs--> mul_(w)
    w.zero_()                        zero_(w)             only v still needs mul_(w)

Invariant: replaying, in program order, all that an entry needs (`history`) gives the bits that the
program would have computed at once. Entries form no cycle and are freed by reference counting.
Cost: some hundred bytes per entry, 5 KB if it is random.

A hollow tensor is an ordinary strided tensor with a storage of size 0 until it is filled.

Shape, stride, dtype and device are right and every view shares the one storage, so parameters are
the final objects from the start. The entry that computes a storage is kept beside it, by weak
reference: it goes when the storage goes.

[Note: hollow tensors and torch] Torch checks for missing memory in some operations only (2.13:
``t[0]`` raises, ``t + 1`` ends the process, ``t.numpy()`` returns garbage). So a hollow tensor is
handled only inside the recorder, which intercepts all operations; outside, every tensor object over
a hollow storage is *guarded*: until it is filled its class is a subclass with a
``__torch_function__`` that raises StateError naming the remedy.

Invariant: outside the recorder no unguarded tensor object over a hollow storage exists. Cost: one
walk over all live objects when a block ends (0.1 s for 300,000 objects).
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import xxhash
from torch import nn

from zeroshard.core.digest import digest_of
from zeroshard.errors import StateError
from zeroshard.memory import storage_of
from zeroshard.optim.sealed import ANSWERED, SET_DATA, Guarded, name_of
from zeroshard.system.device import Device, undisturbed

_ORDER = itertools.count()


@dataclass(frozen=True, eq=False)
class TapeCell:
    """One storage to be."""

    num_bytes: int
    device: torch.device


@dataclass(frozen=True)
class TapePlace:
    """One strided tensor in a cell; with `metadata_only` only its shape matters."""

    cell: TapeCell
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    metadata_only: bool = False

    @property
    def covers_cell(self) -> bool:
        """Whether every byte of the cell is in this tensor, once."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected * self.dtype.itemsize == self.cell.num_bytes

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return this tensor as a view of `storage`, which holds the cell's bytes."""
        return torch.empty(0, dtype=self.dtype, device=self.cell.device).set_(
            storage, self.offset, self.shape, self.stride
        )

    def temporary(self) -> torch.Tensor:
        """Return uninitialised memory of this geometry."""
        device = self.cell.device
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def built(self, memory: dict[TapeCell, torch.UntypedStorage]) -> torch.Tensor:
        """Return this tensor inside `memory`, which grows by the cell where it was missing."""
        if self.metadata_only:
            tensor = self.temporary()
            tensor.untyped_storage().resize_(0)
            return tensor
        if self.cell not in memory:
            memory[self.cell] = torch.UntypedStorage(self.cell.num_bytes, device=self.cell.device)  # type: ignore[no-untyped-call]
        return self.within(memory[self.cell])


@dataclass(frozen=True)
class Constant:
    """A small tensor's value at the time."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Seeded:
    """A generator that was given, in its state at the time."""

    device: torch.device
    state: torch.Tensor

    def built(self) -> torch.Generator:
        """Return a generator in the recorded state."""
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


@dataclass(eq=False)
class Entry:
    """One operation, by value; ``func`` None is memory read but never written: zeros."""

    func: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # the new tensors among its results, which are counted flat
    outputs: tuple[TapePlace | None, ...] = ()
    needs: tuple[Entry, ...] = ()  # the entries that had the effects it reads
    # states of the default generators it draws from
    generators: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    default_dtype: torch.dtype = torch.float32
    order: int = field(default_factory=lambda: next(_ORDER))

    def cells(self) -> list[TapeCell]:
        """Return the cells that it reads or writes."""
        everything = [*leaves((self.args, self.kwargs)), *self.outputs]
        places = [leaf for leaf in everything if isinstance(leaf, TapePlace)]
        return [place.cell for place in places if not place.metadata_only]

    def run(self, memory: dict[TapeCell, torch.UntypedStorage]) -> None:
        """Do it on `memory`, to which the cells of its outputs are added."""
        if self.func is None:
            for place in self.outputs:
                assert place is not None, self
                flat = TapePlace(place.cell, (place.cell.num_bytes,), (1,), 0, torch.uint8)
                flat.built(memory).zero_()
            return
        for device, state in self.generators.items():
            Device.of(device).set_generator_state(state)
        if torch.get_default_dtype() is not self.default_dtype:
            torch.set_default_dtype(self.default_dtype)

        def build(leaf: Any) -> Any:
            if isinstance(leaf, Constant):
                return leaf.tensor
            if isinstance(leaf, TapePlace):
                return leaf.built(memory)
            return leaf.built() if isinstance(leaf, Seeded) else leaf

        args, kwargs = map_leaves(build, self.args), map_leaves(build, self.kwargs)
        results = leaves(self.func(*args, **kwargs))
        for place, result in zip(self.outputs, results, strict=True):
            if place is None:
                continue
            storage = result.untyped_storage()
            found = (result.stride(), result.storage_offset(), storage.nbytes())
            same = found == (place.stride, place.offset, place.cell.num_bytes)
            if same and place.cell not in memory:  # it may lie where it is
                memory[place.cell] = storage
            else:
                place.built(memory).copy_(result)


def leaves(value: Any) -> Iterator[Any]:
    """Yield `value`, or the items of nested lists, tuples and dicts in it."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for item in value:
        yield from leaves(item)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `function` applied to each of its leaves; containers keep their kind."""
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return function(value)


def history(entries: Iterable[Entry]) -> list[Entry]:
    """Return `entries` and all that they need, in program order."""
    found: dict[int, Entry] = {}
    waiting = list(entries)
    while waiting:
        entry = waiting.pop()
        if entry.order not in found:
            found[entry.order] = entry
            waiting.extend(entry.needs)
    return [found[order] for order in sorted(found)]


def replay(
    wanted: Mapping[TapeCell, Entry], homes: Mapping[TapeCell, torch.UntypedStorage]
) -> dict[TapeCell, torch.UntypedStorage]:
    """Compute the cells `wanted`, each as it is after its entry, and return their memory.

    A cell in `homes` is computed in that storage, which has its size; others get memory of their
    own, and intermediate ones lose it after their last use. The random generators and the default
    dtype are put back afterwards.
    """
    entries = history(wanted.values())
    last_use = {cell: entry.order for entry in entries for cell in entry.cells()}
    memory = dict(homes)
    devices = {device for entry in entries for device in entry.generators}
    dtype = torch.get_default_dtype()
    try:
        with undisturbed(*devices), torch.no_grad():
            for entry in entries:
                entry.run(memory)
                for cell in entry.cells():
                    if last_use[cell] == entry.order and cell not in wanted:
                        memory.pop(cell, None)
    finally:
        torch.set_default_dtype(dtype)
    return memory


# ----------------------------------------------------------------------------------- hollow tensors


@dataclass(eq=False)
class HollowRecord:
    """The state of one hollow storage."""

    cell: TapeCell
    entry: Entry  # the last that wrote into it
    owner: object | None  # the recorder at work on it; None outside
    pending_writes: int = 0  # since something overwrote the whole of it
    guarded: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


_RECORDS: weakref.WeakKeyDictionary[torch.UntypedStorage, HollowRecord] = (
    weakref.WeakKeyDictionary()
)


def record_of(tensor: torch.Tensor) -> HollowRecord | None:
    """Return the record of a hollow tensor, None for any other."""
    storage = storage_of(tensor)
    return _hollow_storages([storage]).get(storage) if storage is not None else None


def place_of(tensor: torch.Tensor, cell: TapeCell, *, metadata_only: bool = False) -> TapePlace:
    """Return where `tensor` lies in `cell`."""
    shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
    return TapePlace(cell, shape, tensor.stride(), offset, tensor.dtype, metadata_only)


def hollow_out(tensor: torch.Tensor, owner: object) -> tuple[HollowRecord, TapePlace]:
    """Release the memory of `tensor`'s storage; it reads as zeros until another entry writes."""
    storage = storage_of(tensor)
    assert storage is not None, tensor.layout
    cell = TapeCell(storage.nbytes(), tensor.device)
    place = place_of(tensor, cell)
    storage.resize_(0)
    _RECORDS[storage] = record = HollowRecord(cell, Entry(None, outputs=(place,)), owner)
    return record, place


@contextmanager
def inflated(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give hollow storages their size in the context: torch checks bounds when making views."""
    storages = _hollow_storages(storage_of(tensor) for tensor in tensors)
    try:
        for storage, record in storages.items():
            storage.resize_(record.cell.num_bytes)
        yield
    finally:
        for storage in storages:
            storage.resize_(0)


def fill(tensors: Iterable[torch.Tensor], *, compute: bool = True) -> None:
    """Give the hollow storages under `tensors` memory and, with `compute`, their contents."""
    fill_storages((storage_of(tensor) for tensor in tensors), compute=compute)


def fill_storages(
    candidates: Iterable[torch.UntypedStorage | None], *, compute: bool = True
) -> None:
    """Fill storages as `fill` does. After an exception they are hollow as before."""
    storages = _hollow_storages(candidates)
    try:
        for storage, record in storages.items():
            storage.resize_(record.cell.num_bytes)
        if compute:
            homes = {record.cell: storage for storage, record in storages.items()}
            replay({record.cell: record.entry for record in storages.values()}, homes)
    except BaseException:
        for storage in storages:
            storage.resize_(0)
        raise
    for storage, record in storages.items():
        _take_guards_off(record)
        del _RECORDS[storage]


def _hollow_storages(
    candidates: Iterable[torch.UntypedStorage | None],
) -> dict[torch.UntypedStorage, HollowRecord]:
    known = [one for one in candidates if one is not None and one in _RECORDS]
    return {storage: _RECORDS[storage] for storage in known if storage.nbytes() == 0}


def fingerprint_of(tensor: torch.Tensor) -> str | None:
    """Return a digest of how a hollow tensor is computed, None for any other tensor."""
    record = record_of(tensor)
    if record is None:
        return None
    numbers: dict[TapeCell, int] = {}
    digest = xxhash.xxh3_64()

    def describe(leaf: Any) -> str:
        if isinstance(leaf, TapePlace):
            cell = f"{numbers.setdefault(leaf.cell, len(numbers))} {leaf.cell.num_bytes}"
            return f"{cell} {leaf.shape} {leaf.stride} {leaf.offset} {leaf.dtype}"
        if isinstance(leaf, Constant):
            return f"{leaf.tensor.dtype} {tuple(leaf.tensor.shape)} {digest_of(leaf.tensor)}"
        return digest_of(leaf.state) if isinstance(leaf, Seeded) else repr(leaf)

    for one in history([record.entry]):  # operations, arguments and generators
        parts = [str(one.func), str(one.default_dtype)]
        parts += [describe(leaf) for leaf in leaves((one.args, [*one.kwargs.items()], one.outputs))]
        parts += [digest_of(state) for state in one.generators.values()]
        digest.update("\n".join(parts).encode())
    place = place_of(tensor, record.cell)
    return f"{digest.hexdigest()} {place.shape} {place.stride} {place.offset}"


# ----------------------------------------------------------------------------- outside the recorder


def adopt_all(owner: object) -> None:
    """A recorder begins: hollow tensors that rest become its own, without guards."""
    for record in list(_RECORDS.values()):
        if record.owner is None:
            _take_guards_off(record)
            record.owner = owner


def end_recording(owner: object, *, compute: bool) -> None:
    """End a recorder: fill what no parameter uses (buffers, temporaries) and guard the rest.

    With `compute` False (an exception is under way) everything is guarded.
    """
    hollow = _hollow_storages(_RECORDS)
    mine = {storage: record for storage, record in hollow.items() if record.owner is owner}
    if not mine:
        return
    over: dict[torch.UntypedStorage, list[torch.Tensor]] = {storage: [] for storage in mine}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and (storage := storage_of(thing)) in over:
            over[storage].append(thing)
    resting = {
        storage: tensors
        for storage, tensors in over.items()
        if not compute or any(issubclass(type(t), nn.Parameter) for t in tensors)
    }
    for storage, tensors in resting.items():
        record = mine[storage]
        record.owner = None
        for tensor in tensors:
            _guard(tensor, record)
    fill_storages(storage for storage in mine if storage not in resting)


def _guard(tensor: torch.Tensor, record: HollowRecord) -> None:
    tensor.__class__ = _guard_class(type(tensor))
    record.guarded.append(weakref.ref(tensor))


def _take_guards_off(record: HollowRecord) -> None:
    for reference in record.guarded:
        tensor: Any = reference()
        # it may have been given other memory since
        if issubclass(type(tensor), _Deferred) and record_of(tensor) in (record, None):
            _unguard(tensor)
    record.guarded.clear()


def _unguard(tensor: Any) -> None:
    tensor.__class__ = type(tensor)._zeroshard_plain


class _Deferred(Guarded):
    """Answers queries that need no values, and refuses everything else."""

    _answered = ANSWERED | {
        torch.Tensor.retains_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.data_ptr,  # 0, as for a tensor on the device "meta"
        torch.Tensor.__len__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
    _zeroshard_plain: type

    def __repr__(self, **_: Any) -> str:
        tensor: Any = self
        facts = f"shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r}"
        return f"{type(self).__name__}({facts})"

    @classmethod
    def _use(cls, func: Any, types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return repr(args[0])
        if func == torch.Tensor.detach:  # what state_dict() holds: without values as well
            with torch._C.DisableTorchFunctionSubclass():
                detached = func(*args)
                if (record := record_of(detached)) is not None:
                    _guard(detached, record)
                return detached
        if func == SET_DATA and not isinstance(args[1], _Deferred):
            _unguard(args[0])
            return func(*args)
        raise StateError(
            f"{name_of(func)!r} needs a parameter that deferred_init() left without values: call"
            " zeroshard.shard(model) or zeroshard.materialize(model) first, or do it inside"
            " deferred_init()"
        )


@cache
def _guard_class(plain: type) -> type:
    """Return the guarded subclass of a tensor class."""
    namespace = {"_zeroshard_plain": plain, "__module__": __name__}
    return type(f"Deferred{plain.__name__}", (_Deferred, plain), namespace)
