"""The tape of deferred initialisation: operations that are recorded now and run later.

A *cell* stands for one storage. An *entry* is one operation that wrote into cells, with its
arguments by value: copies of small tensors, the geometry of other cells, the random generator's
state. Each entry points at the earlier entries whose effect it reads:

    w = torch.empty(4096, 4096)      blank(w)
    w.normal_()                      normal_(w)           overwrites all of w: the blank is freed
    w.mul_(0.02)                     mul_(w)   --needs--> normal_(w)
    v = w.clone()                    v: clone  --needs--> mul_(w)
    w.zero_()                        zero_(w)             only v still needs mul_(w)

Invariant: replaying, in program order, all that an entry needs (`history`) gives the bits that the
program would have computed at once. Entries form no cycle and are freed by reference counting.
Cost: some hundred bytes per entry, 5 KB if it is random. Modes and live tensors are nn/hollow.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from zeroshard.core.digest import digest_of
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
    needs: tuple[Entry, ...] = ()  # the entries whose effect it reads
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
            if place is not None:
                _keep(place, result, memory)


def _keep(
    place: TapePlace, result: torch.Tensor, memory: dict[TapeCell, torch.UntypedStorage]
) -> None:
    """Take over the memory of `result` where it may lie where it is; else copy it."""
    storage = result.untyped_storage()
    found = (result.stride(), result.storage_offset(), storage.nbytes())
    same = found == (place.stride, place.offset, place.cell.num_bytes)
    if same and place.cell not in memory:
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
    with _undisturbed(devices), torch.no_grad():
        for entry in entries:
            entry.run(memory)
            for cell in entry.cells():
                if last_use[cell] == entry.order and cell not in wanted:
                    memory.pop(cell, None)
    return memory


@contextmanager
def _undisturbed(devices: set[torch.device]) -> Iterator[None]:
    dtype = torch.get_default_dtype()
    try:
        with undisturbed(*devices):
            yield
    finally:
        torch.set_default_dtype(dtype)


def fingerprint(entry: Entry) -> str:
    """Return 16 hexadecimal digits for operations, arguments and generators of `entry`."""
    numbers: dict[TapeCell, int] = {}
    digest = xxhash.xxh3_64()

    def describe(leaf: Any) -> str:
        if isinstance(leaf, TapePlace):
            cell = f"{numbers.setdefault(leaf.cell, len(numbers))} {leaf.cell.num_bytes}"
            return f"{cell} {leaf.shape} {leaf.stride} {leaf.offset} {leaf.dtype}"
        if isinstance(leaf, Constant):
            return f"{leaf.tensor.dtype} {tuple(leaf.tensor.shape)} {digest_of(leaf.tensor)}"
        return digest_of(leaf.state) if isinstance(leaf, Seeded) else repr(leaf)

    for one in history([entry]):
        parts = [str(one.func), str(one.default_dtype)]
        parts += [describe(leaf) for leaf in leaves((one.args, [*one.kwargs.items()], one.outputs))]
        parts += [digest_of(state) for state in one.generators.values()]
        digest.update("\n".join(parts).encode())
    return digest.hexdigest()
