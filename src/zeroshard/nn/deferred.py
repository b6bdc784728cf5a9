"""Deferred initialisation: build a model without memory, and fill it later, unit by unit.

    with zs.deferred_init():
        model = GPT(config)                   # its own init code runs as it is
    engine = zs.shard(model, optimizer)       # each unit is computed, sharded and released

Inside the block every operation of this thread passes through the recorder (nn/deferred.py). New
tensors of 64 KiB or more become hollow (nn/hollow.py), and operations on them go on a tape
(nn/hollow.py). Small tensors are real, so most code that looks at values simply runs. A random
operation runs on a temporary, so that the generator advances, and again from the generator's old
state when the tensor is filled.

Invariant: after the block the generators, and after filling every bit, are the same as without the
block. Uninitialised memory is zero. Cost: memory for the largest tensor during the block; random
operations run twice. At the end of the block large tensors that no parameter uses are filled.

It does not follow other threads, or code that reads memory behind torch's back (C++ extensions).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.errors import ConfigError
from zeroshard.memory import return_freed_memory, storage_of
from zeroshard.nn.hollow import (
    Constant,
    Entry,
    HollowRecord,
    Seeded,
    TapeCell,
    TapePlace,
    adopt_all,
    end_recording,
    fill,
    fill_storages,
    fingerprint_of,
    hollow_out,
    inflated,
    leaves,
    map_leaves,
    place_of,
    record_of,
    replay,
)
from zeroshard.system.device import Device

# ----------------------------------------------------------------------------------------- recorder
# The recorder: what deferred_init() does to each operation of its thread.
#
#     operation                                    is
#     new large tensors from small ones, or none   run and recorded; the tensors' memory is released
#     views of hollow tensors                      run: they share the storage, nothing is read
#     draws (``normal_``) into hollow tensors      run on a temporary, for the generator; recorded
#     others on hollow tensors                     recorded; meta kernels give the results' shapes
#     results that depend on values (``item``)     run on values that are computed from the tape
#     anything the tape cannot hold                run, after the tensors concerned have been filled
#
# The last row (``resize_``, ``numpy()``, a large tensor from elsewhere copied in, a write into a
# real tensor, a shape that no meta kernel gives) has the same bits, and takes more memory.
#
# Invariant: after each operation, the real tensors and the generators are what they would be, and
# so are hollow ones once they are filled. Cost: ten to a hundred microseconds per operation on
# hollow tensors; memory for one operation's results at a time.


LARGE_BYTES = 64 * 1024  # below this a tensor is real
# partial writes to one tensor on the tape; a loop over its elements is cheaper done at once
_MOST_PENDING_WRITES = 500
_KEPT_BYTES = 32 * 2**20  # freed memory that the allocator may hold


def _aten(*names: str) -> set[str]:
    return {f"aten::{name}" for name in names}


# allocations without values
_EMPTY = _aten("empty", "empty_like", "empty_strided", "empty_permuted")
_EMPTY |= _aten("new_empty", "new_empty_strided")
# operations that read the metadata of their arguments only
_LIKES = _aten("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")
_LIKES |= _aten("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_DRAWS = _aten("uniform_", "normal_", "random_", "exponential_", "cauchy_", "log_normal_")
_DRAWS |= _aten("geometric_", "bernoulli_")
_OVERWRITES = _DRAWS | _aten("zero_", "fill_", "copy_")
# operations that reach for the storage
_EAGER = _aten("resize_", "resize_as_", "_pin_memory")
# views, though their schema does not say so
_VIEWS = _aten("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes")
_POINTERS = {  # methods that read memory without passing through the dispatcher
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.data_ptr),
    *(torch.Tensor.untyped_storage, torch.Tensor.share_memory_, torch.Tensor.__array__),
    *(torch.Tensor.__dlpack__, torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__),
}


@dataclass(frozen=True)
class _Traits:
    """The traits of an operation, from its schema and tags."""

    name: str
    is_view: bool  # its result shares the argument's memory, and it reads none of it
    written: frozenset[str]  # arguments that it writes
    is_random: bool
    is_composite: bool
    gives_numbers: bool  # out of a tensor


@cache
def _traits(func: Any) -> _Traits:
    schema = func._schema
    aliased = [one for one in schema.arguments if one.alias_info is not None]
    written = frozenset(one.name for one in aliased if one.alias_info.is_write)
    shares = any(one.alias_info is not None for one in schema.returns)
    is_view = torch.Tag.inplace_view in func.tags or schema.name in _VIEWS
    return _Traits(
        name=schema.name,
        is_view=is_view or (shares and not written),
        written=written,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_composite=func._can_decompose(),
        gives_numbers=torch.Tag.data_dependent_output in func.tags,
    )


def _empty_as(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class _RecordedCall:
    """One operation on its way through the recorder."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        records = [(id(tensor), record_of(tensor)) for tensor in self.tensors]
        self.hollow = {key: record for key, record in records if record is not None}
        self.traits = _traits(func)
        given = zip(func._schema.arguments, args, strict=False)
        named = {argument.name: value for argument, value in given} | kwargs
        written = leaves([named.get(name) for name in self.traits.written])
        self.written = [leaf for leaf in written if isinstance(leaf, torch.Tensor)]

    @property
    def hollow_tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors if id(tensor) in self.hollow]

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""
        if self.kwargs.get("device") is not None:
            return torch.empty(0, device=self.kwargs["device"]).device  # with its index
        accelerated = [tensor.device for tensor in self.tensors if tensor.device.type != "cpu"]
        return accelerated[0] if accelerated else torch.device("cpu")

    @property
    def metadata_only(self) -> bool:
        """Whether the values of tensor arguments do not matter."""
        return self.traits.name in _LIKES

    @property
    def reads_large(self) -> bool:
        """Whether it reads a large tensor that is not on the tape."""
        real = [t for t in self.tensors if id(t) not in self.hollow and not t.is_meta]
        sizes = [t.nbytes for t in real if t.layout is torch.strided]
        return not self.metadata_only and max(sizes, default=0) >= LARGE_BYTES

    def states(self) -> dict[torch.device, torch.Tensor]:
        """Return the states of the default generators that it draws from."""
        given = any(isinstance(leaf, torch.Generator) for leaf in leaves((self.args, self.kwargs)))
        if given or not self.traits.is_random or self.device.type == "meta":
            return {}
        return {self.device: Device.of(self.device).generator_state()}

    def run(self, stand_ins: dict[int, torch.Tensor], **options: Any) -> Any:
        """Run it with `stand_ins`, by id, for arguments and `options` for keywords."""

        def swap(leaf: Any) -> Any:
            return stand_ins.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

        return self.func(*map_leaves(swap, self.args), **map_leaves(swap, self.kwargs | options))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on small tensors, and records those on hollow ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paused = False
        self._freed_bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for the method below: a second, and 70 MB."""
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let every operation through inside the context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):  # control flow operators
            fill(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            return func(*args, **kwargs)
        call = _RecordedCall(func, args, kwargs)
        fill_storages(leaf for leaf in args if isinstance(leaf, torch.UntypedStorage))
        if not call.hollow or call.metadata_only:
            return self._create(call)
        is_lazy = any(t.is_conj() or t.is_neg() for t in call.hollow_tensors)
        if is_lazy or call.traits.name in _EAGER:
            return self._do_at_once(call)
        if call.traits.is_view or call.device.type == "meta":
            with inflated(call.hollow_tensors):
                return func(*args, **kwargs)
        if call.traits.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        return self._record(call)

    def _create(self, call: _RecordedCall) -> Any:
        """Run an operation on real tensors or none; release the memory of large new results."""
        states, arguments = call.states(), self._describe(call) if call.traits.is_random else None
        result = call.func(*call.args, **call.kwargs)
        shares = call.written or call.traits.is_view
        if shares or call.reads_large or call.kwargs.get("pin_memory"):
            return result
        fresh = [self._hollowed(leaf, call) for leaf in leaves(result)]
        if any(fresh) and call.traits.name not in _EMPTY:
            self._note(call, arguments or self._describe(call), fresh, states)
            self._freed(sum(new[1].cell.num_bytes for new in fresh if new is not None))
        return result

    def _record(self, call: _RecordedCall) -> Any:
        """An operation that reads or writes hollow tensors."""
        writes_real = any(id(tensor) not in call.hollow for tensor in call.written)
        if writes_real or (call.reads_large and call.written):
            return self._do_at_once(call)
        if call.traits.gives_numbers or call.reads_large or call.kwargs.get("pin_memory"):
            return call.run(self._values(call))
        states, arguments = call.states(), self._describe(call)
        stand_ins: dict[int, torch.Tensor] = {}
        result = None
        if not call.traits.is_random:
            stand_ins = {id(t): _empty_as(t, "meta") for t in call.tensors}
            result = self._shapes(call, stand_ins)
        elif call.traits.name in _DRAWS and len(call.tensors) == 1:  # it reads no values
            (target,) = call.tensors
            self._freed(target.nbytes)
            stand_ins[id(target)] = place_of(target, call.hollow[id(target)].cell).temporary()
            result = call.run(stand_ins)
        if result is None:  # it depends on values
            if call.written:
                return self._do_at_once(call)
            result = call.run(self._values(call))
            computed = [self._hollowed(leaf, call) for leaf in leaves(result)]
            if any(computed):
                self._note(call, arguments, computed, states)
            return result
        pairs = [(stand_ins.get(id(tensor)), tensor) for tensor in call.tensors]
        originals = {id(one): tensor for one, tensor in pairs if one is not None}
        fresh: list[tuple[HollowRecord, TapePlace] | None] = []

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or id(leaf) in originals:
                fresh.append(None)
                return originals.get(id(leaf), leaf)
            hollow = _empty_as(leaf, call.device) if leaf.is_meta else leaf
            fresh.append(hollow_out(hollow, self))
            return hollow

        result = map_leaves(real, result)
        self._note(call, arguments, fresh, states)
        return result

    def _do_at_once(self, call: _RecordedCall) -> Any:
        """Fill its arguments, and run it."""
        fill(call.hollow_tensors)
        return call.func(*call.args, **call.kwargs)

    def _values(self, call: _RecordedCall) -> dict[int, torch.Tensor]:
        """Return the values of its hollow arguments, by id; small ones are filled for good."""
        fill([t for t in call.hollow_tensors if call.hollow[id(t)].cell.num_bytes < LARGE_BYTES])
        records = [(t, record_of(t)) for t in call.hollow_tensors]
        large = [(t, record) for t, record in records if record is not None]
        memory = replay({record.cell: record.entry for _, record in large}, {})
        self._freed(sum(storage.nbytes() for storage in memory.values()))
        return {id(t): place_of(t, record.cell).within(memory[record.cell]) for t, record in large}

    @staticmethod
    def _shapes(call: _RecordedCall, stand_ins: dict[int, torch.Tensor]) -> Any:
        """Run it on meta tensors; None if that fails, or would reshape an argument."""
        options = {"device": torch.device("meta")} if call.kwargs.get("device") is not None else {}
        try:
            result = call.run(stand_ins, **options)
        except Exception:  # no such kernel, a value-dependent shape, or an error of the call's own
            return None
        pairs = [(stand_ins[id(t)], t) for t in call.tensors]
        kept = all(one.shape == t.shape and one.stride() == t.stride() for one, t in pairs)
        results = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        plain = all(leaf.layout is torch.strided for leaf in results)
        return result if kept and plain else None

    # ------------------------------------------------------------------ writing on the tape

    def _freed(self, num_bytes: int) -> None:
        """Count freed memory that had been written, and return it to the system now and then."""
        self._freed_bytes += num_bytes
        if self._freed_bytes > _KEPT_BYTES:
            return_freed_memory()
            self._freed_bytes = 0

    def _hollowed(self, leaf: Any, call: _RecordedCall) -> tuple[HollowRecord, TapePlace] | None:
        """Take the memory of a new large tensor; None for any other."""
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
            return None
        if leaf.is_meta or leaf.is_complex():
            return None
        storage = storage_of(leaf)
        if storage is None or storage.nbytes() < LARGE_BYTES or not storage.resizable():
            return None
        if any(storage is storage_of(tensor) for tensor in call.tensors):
            return None
        return hollow_out(leaf, self)

    @staticmethod
    def _describe(call: _RecordedCall) -> tuple[Any, Any]:
        """Return its arguments by value, as they are before it runs."""

        def describe(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return Seeded(leaf.device, leaf.get_state())
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if call.metadata_only:
                return place_of(leaf, TapeCell(0, leaf.device), metadata_only=True)
            record = call.hollow.get(id(leaf))
            if record is not None:
                return place_of(leaf, record.cell)
            return Constant(leaf.detach().clone())

        return map_leaves(describe, call.args), map_leaves(describe, call.kwargs)

    def _note(
        self,
        call: _RecordedCall,
        arguments: tuple[Any, Any],
        fresh: list[tuple[HollowRecord, TapePlace] | None],
        states: dict[torch.device, torch.Tensor],
    ) -> None:
        """Write one entry, and let the storages that it writes lead to it."""
        args, kwargs = arguments
        written = [call.hollow[id(tensor)] for tensor in call.written]
        overwrites = call.traits.name in _OVERWRITES and len(written) == 1
        if overwrites:  # the whole of a storage, which no other argument reads
            (target,), (record,) = call.written, written
            readers = [t for t in call.tensors if t is target or call.hollow.get(id(t)) is record]
            overwrites = len(readers) == 1 and place_of(target, record.cell).covers_cell
        needed = [] if call.metadata_only else list(call.hollow.values())
        if overwrites:
            needed = [record for record in needed if record not in written]
        entry = Entry(
            call.func,
            args,
            kwargs,
            outputs=tuple(None if new is None else new[1] for new in fresh),
            needs=tuple(dict.fromkeys(record.entry for record in needed)),
            generators=states,
            default_dtype=torch.get_default_dtype(),
        )
        for record in written:
            record.entry = entry
            record.pending_writes = 0 if overwrites else record.pending_writes + 1
        for new in filter(None, fresh):
            new[0].entry = entry
        if any(record.pending_writes > _MOST_PENDING_WRITES for record in written):
            fill(call.written)


class PointerReads(TorchFunctionMode):
    """Fills tensors before their memory is read behind the dispatcher's back."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # it takes all modes off
        if func is torch.Tensor.__repr__ and record_of(args[0]) is not None:
            return f"tensor(deferred, shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        if func in _POINTERS and record_of(args[0]) is not None:
            with self._recorder.paused():
                fill(args[:1])
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------- deferred

__all__ = [
    "allocate", "deferred_init", "fingerprint_of", "is_deferred", "materialize", "refuse_inside",
]  # fmt: skip

_thread = threading.local()


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules in this context without memory; ``shard()`` or ``materialize()`` gives it.

    Parameters are the final objects, so an optimizer may be built from them at once; reading their
    values before they have any raises StateError. Their values, and the random generators after the
    block, are the same bits as without it. Meta tensors are left alone. Nests; applies to the
    thread that enters it.
    """
    if _current() is not None:
        yield
        return
    recorder = _thread.recorder = Recorder()
    complete = False
    try:
        adopt_all(recorder)
        with PointerReads(recorder), recorder:
            yield
        complete = True
    finally:
        _thread.recorder = None
        end_recording(recorder, compute=complete)


def materialize(*things: nn.Module | torch.Tensor) -> None:
    """Give deferred modules and tensors memory and values, in place; others are left alone.

    For a deferred model that is used without ``shard()``, which does this unit by unit.
    """
    tensors: list[torch.Tensor] = []
    for thing in things:
        if isinstance(thing, nn.Module):
            tensors += [*thing.parameters(), *thing.buffers()]
        elif isinstance(thing, torch.Tensor):
            tensors.append(thing)
        else:
            raise ConfigError(
                f"materialize() takes modules and tensors, not {type(thing).__name__}"
            )
    _fill(tensors)


def allocate(*tensors: torch.Tensor) -> None:
    """Give deferred tensors memory without values, for a caller that overwrites them."""
    _fill(tensors, compute=False)


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no memory yet."""
    return record_of(tensor) is not None


def refuse_inside(what: str) -> None:
    """Raise ConfigError where a deferred_init() block is open in this thread."""
    if _current() is not None:
        raise ConfigError(f"{what} inside deferred_init(): end the block first")


def _current() -> Recorder | None:
    return getattr(_thread, "recorder", None)


def _fill(tensors: Iterable[torch.Tensor], *, compute: bool = True) -> None:
    recorder = _current()
    with nullcontext() if recorder is None else recorder.paused():
        fill(tensors, compute=compute)
