"""Hollow tensors: ordinary strided tensors whose storage has size 0 until it is filled.

Shape, stride, dtype and device are right and every view shares the one storage, so parameters are
the final objects from the start. Which entry of the tape (nn/tape.py) computes a storage is kept
beside it, by weak reference: it goes when the storage goes.

[Note: hollow tensors and torch] Torch checks for missing memory in some operations only (2.13:
``t[0]`` raises, ``t + 1`` ends the process, ``t.numpy()`` returns garbage). So a hollow tensor is
handled only inside the recorder, which intercepts all operations; outside, every tensor object over
a hollow storage is *guarded*: until it is filled its class is a subclass whose
``__torch_function__`` raises StateError naming the remedy.

Invariant: outside the recorder no unguarded tensor object over a hollow storage exists. Cost: one
walk over all live objects when a block ends (0.1 s for 300,000 objects).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from zeroshard.errors import StateError
from zeroshard.memory import storage_of
from zeroshard.nn.tape import Entry, TapeCell, TapePlace, fingerprint, replay
from zeroshard.optim.sealed import ANSWERED, SET_DATA, name_of


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
    place = place_of(tensor, record.cell)
    return f"{fingerprint(record.entry)} {place.shape} {place.stride} {place.offset}"


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
        if issubclass(type(tensor), _Guarded) and record_of(tensor) in (record, None):
            _unguard(tensor)
    record.guarded.clear()


def _unguard(tensor: Any) -> None:
    tensor.__class__ = type(tensor)._zeroshard_plain


_ANSWERED = ANSWERED | {
    torch.Tensor.retains_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data_ptr,  # 0, as that of a tensor on the device "meta"
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}


class _Guarded:
    """Answers queries that need no values, and refuses everything else."""

    _zeroshard_plain: type

    def __repr__(self, **_: Any) -> str:
        tensor: Any = self
        facts = f"shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device={str(tensor.device)!r}"
        return f"{type(self).__name__}({facts})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return repr(args[0])
        if func == torch.Tensor.detach:  # what state_dict() holds: without values as well
            with torch._C.DisableTorchFunctionSubclass():
                detached = func(*args)
                if (record := record_of(detached)) is not None:
                    _guard(detached, record)
                return detached
        if func == SET_DATA and not isinstance(args[1], _Guarded):
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
    return type(f"Deferred{plain.__name__}", (_Guarded, plain), namespace)
