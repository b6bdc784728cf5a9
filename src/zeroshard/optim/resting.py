"""A gradient at rest: the sum over ranks and micro-batches, from the reduce that brings it here
to the step that reads it.

Two kinds behind one surface. Where the gradient's cell says DEVICE it is a tensor, averaged and
scaled in place. Elsewhere it is a shelf (tier/shelf.py), and what is done to it is only noted::

    device      sum --/ ranks, / loss scale--> average --x clip--> read by the step
    elsewhere   sum, and the list [/ 2, x 0.3]; whoever reads a block applies the list to a copy, in
                the same order: the same bits

so that a gradient on disk is read once by the step and written once by each reduce, however it is
averaged and clipped.

One that could not be read or written is *lost*: it says so once (runtime/faults.py), reads as NaN
from then on, and takes what comes without a word.

Invariant: it is alive as long as a sealed gradient, or a reduce under way, holds it, and it is not
changed before a step under way has read it (`Lent`). What it does not do: it knows no rank and
sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from zeroshard.buffer import PagePool
from zeroshard.core.layout import Range
from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.errors import StorageError
from zeroshard.tier.link import Direct, Link
from zeroshard.tier.shelf import Shelf
from zeroshard.tier.store import Slab, Store

__all__ = ["DeviceResting", "Resting", "RestingPlace", "TieredResting"]

_CHUNK = 1 << 17  # elements: a chunk of fp32 stays in a core's own cache
_BLOCK = 1 << 20  # elements read from another tier at a time; a multiple of _CHUNK


class Resting(Protocol):
    """A gradient at rest. Ranges count the elements that rest here: this rank's share, or the
    whole where every rank steps everything.
    """

    divided_by: float  # the ranks and the loss scale, once averaged; 0 while it is a sum

    def lend(self, wait: Callable[[], None]) -> None:
        """Let a step that goes on by itself read it; `wait` returns when the step has done so."""

    def reopen(self, own: Range) -> None:
        """Turn an average back into a sum, to which more is added."""

    def average(self, own: Range, divisor: float) -> bool:
        """Divide the sum by `divisor`, once; return whether all of `own` is finite."""

    def scale(self, factor: float) -> None:
        """Multiply the average by `factor`."""

    def squares(self, start: int, stop: int) -> float:
        """Return the sum of squares of a range in fp64."""

    def is_finite(self, start: int, stop: int) -> bool:
        """Whether a range holds neither NaN nor infinity."""

    def zero(self, start: int, stop: int) -> None:
        """Set a range to zero."""

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """Return a range as it would be on the device: there a view, else a copy."""

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes at rest."""


class Lent:
    """What a step that goes on by itself may be reading: whoever changes it calls
    `wait_for_reader` first.
    """

    __slots__ = ("_wait",)

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None

    def lend(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait_for_reader(self) -> None:
        """Return when the step under way, if there is one, has read the gradient."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class DeviceResting(Lent):
    """A gradient that rests on the device."""

    __slots__ = ("__weakref__", "divided_by", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.divided_by = 0.0

    def reopen(self, own: Range) -> None:
        self.wait_for_reader()
        if self.divided_by:
            self.tensor[slice(*own)].mul_(self.divided_by)
            self.divided_by = 0.0

    def average(self, own: Range, divisor: float) -> bool:
        divide = 1.0 if self.divided_by else divisor
        self.divided_by = self.divided_by or divide
        mine = self.tensor[slice(*own)]
        total = torch.zeros((), dtype=torch.float32, device=mine.device)
        for chunk in (mine,) if divide == 1.0 else chunks(mine):
            if divide != 1.0:
                chunk.div_(divide)
            total += chunk.sum(dtype=torch.float32)
        return _finite(mine, total)

    def scale(self, factor: float) -> None:
        self.wait_for_reader()
        self.tensor.mul_(factor)

    def squares(self, start: int, stop: int) -> float:
        return _squares(self.tensor[start:stop])

    def is_finite(self, start: int, stop: int) -> bool:
        return bool(torch.isfinite(self.tensor[start:stop]).all())

    def zero(self, start: int, stop: int) -> None:
        self.wait_for_reader()
        self.tensor[start:stop].zero_()

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def bytes_by_tier(self) -> dict[Tier, int]:
        return {Tier.DEVICE: self.tensor.numel() * self.tensor.element_size()}


class TieredResting(Lent):
    """A gradient that rests, in part or as a whole, on the host or on disk."""

    def __init__(
        self,
        shelf: Shelf,
        *,
        give_back: Callable[[Slab], None],
        pages: PagePool,
        link: Link,
        device: torch.device,
        note: Callable[[StorageError], None],
    ) -> None:
        super().__init__()
        self.shelf = shelf
        self.lost: StorageError | None = None
        self._give_back = give_back
        self._tell = note
        self.divided_by = 0.0
        self._pages = pages
        self._link = link
        self._device = device
        # what a reader does to a copy: ("div" | "mul", by)
        self._pending: list[tuple[str, float]] = []
        # a sum of all numbers: NaN or infinite when one of them is
        self._bad = torch.zeros((), dtype=torch.float32)
        self._landing: list[tuple[Work, torch.Tensor]] = []  # copies under way, and what they read
        # sums on their way to the host, to be added there
        self._to_add: list[tuple[Range, torch.Tensor, Work]] = []

    def lose(self, error: StorageError) -> None:
        """It holds no gradient any more."""
        self.lost = self.lost or error
        self._tell(error)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self.lose(error)

    # ------------------------------------------------------------------ what arrives

    def take(self, own: Range, total: torch.Tensor, *, fresh: bool) -> None:
        """Take over `total` (the device's sum of range `own`, fp32 or the dtype of the rest);
        `fresh`: it is the first.
        """
        if self.lost is None:
            with self._losing():
                self._take(own, total, fresh)

    def _take(self, own: Range, total: torch.Tensor, fresh: bool) -> None:
        if fresh:
            self._note(total)
            source = total.to(self.shelf.dtype)
            self._landing += [(work, source) for work in self.shelf.write(*own, source)]
        else:
            self.settle()
            if isinstance(self._link, Direct):
                self._add(own, total)
            else:
                host = torch.empty_like(total, device="cpu")
                self._to_add.append((own, host, self._link.copy(host, total, "to_host")))

    def _note(self, total: torch.Tensor) -> None:
        """Take note of numbers that are not finite."""
        for chunk in chunks(total):
            self._bad = self._bad.to(total.device) + chunk.sum(dtype=torch.float32)

    def _add(self, own: Range, total: torch.Tensor) -> None:
        for start in range(0, total.numel(), _BLOCK):
            part = total[start : start + _BLOCK]
            with self.shelf.borrowed(
                own[0] + start, own[0] + start + part.numel(), write=True
            ) as there:
                # a block of the part that rests on the device is lent there
                part = part.to(there.device)
                for target, more in zip(chunks(there), chunks(part), strict=True):
                    if target.dtype is torch.float32:
                        target.add_(more)
                    else:  # rounded once
                        target.copy_(more.float().add_(target))
                self._note(there)

    def settle(self) -> None:
        """Return when everything that has arrived rests."""
        landing, self._landing = self._landing, []
        for work, _ in landing:
            work.wait()
        pending, self._to_add = self._to_add, []
        for own, host, work in pending:
            getattr(work, "synchronize", work.wait)()
            self._add(own, host)

    @property
    def is_landing(self) -> bool:
        """Whether a sum is still on its way here, and so held on the device, too."""
        with self._losing():
            while self._landing and self._landing[0][0].done():
                self._landing.pop(0)[0].wait()  # raises what went wrong
        return bool(self._to_add or self._landing)

    def land(self) -> None:
        """Return when it is here."""
        with self._losing():
            self.settle()

    def reopen(self, own: Range) -> None:
        self.wait_for_reader()
        if not self.divided_by:
            return
        with self._losing():
            self.settle()
            for start, stop in (
                _blocks(*own)
                if (self._pending or self.divided_by != 1.0) and self.lost is None
                else ()
            ):
                with self.shelf.borrowed(start, stop, write=True) as there:
                    self.apply_to(there)
                    there.mul_(self.divided_by)
        self._pending, self.divided_by = [], 0.0

    def exchange(
        self, own: Range, whole: torch.Tensor, meet: Callable[[torch.Tensor], None]
    ) -> None:
        """Take over the other ranks' slices of the average: `meet` brings them together in
        `whole`, which is passing through, from `own`.
        """
        mine = whole[slice(*own)]
        with self._losing():
            self.settle()
            for work in self.shelf.read(*own, mine) if self.lost is None else ():
                work.wait()
            self.apply_to(mine)
        if self.lost is not None:
            mine.fill_(float("nan"))
        meet(mine)
        with self._losing():
            for work in self.shelf.write(0, whole.numel(), whole) if self.lost is None else ():
                work.wait()
        self._pending = []

    # ------------------------------------------------------------------ what is done to it

    def average(self, own: Range, divisor: float) -> bool:
        with self._losing():
            self.settle()  # whether everything could be written must be known before a step begins
        if not self.divided_by:
            self.divided_by = divisor
            if divisor != 1.0:
                self._pending.append(("div", divisor))
        if self.lost is not None:
            return False
        if bool(torch.isfinite(self._bad)):
            return True
        return self.is_finite(*own)  # the sum of all numbers may have overflowed by itself

    def scale(self, factor: float) -> None:
        self.wait_for_reader()
        self._pending.append(("mul", factor))

    # ------------------------------------------------------------------ who reads it

    @contextmanager
    def block(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Lend a range on the host (the device part: there) with everything pending applied;
        read only. Raises StorageError.
        """
        if self.lost is not None:
            raise self.lost
        self.settle()
        with self.shelf.borrowed(start, stop, write=False) as there:
            if self._pending:
                there = there.clone()
                self.apply_to(there)
            yield there

    @property
    def is_raw(self) -> bool:
        """Whether nothing is pending: what rests is what is to be read."""
        return not self._pending

    def apply_to(self, tensor: torch.Tensor) -> None:
        """Do to a copy of a range what is pending."""
        for what, by in self._pending:
            tensor.div_(by) if what == "div" else tensor.mul_(by)

    def squares(self, start: int, stop: int) -> float:
        total = 0.0
        with self._losing():
            for low, high in _blocks(start, stop):
                with self.block(low, high) as block:
                    total = _squares(block, total)
        return total if self.lost is None else float("nan")

    def is_finite(self, start: int, stop: int) -> bool:
        with self._losing():
            for low, high in _blocks(start, stop):
                with self.block(low, high) as block:
                    if not bool(torch.isfinite(block).all()):
                        return False
        return self.lost is None

    def zero(self, start: int, stop: int) -> None:
        self.wait_for_reader()
        with self._losing():
            self.settle()
            for low, high in _blocks(start, stop) if self.lost is None else ():
                with self.shelf.borrowed(low, high, write=True) as there:
                    there.zero_()

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        out = self._pages.empty(stop - start, self.shelf.dtype, self._device)
        for low, high in _blocks(start, stop):
            with self.block(low, high) as block:
                out[low - start : high - start].copy_(block)
        return out

    def bytes_by_tier(self) -> dict[Tier, int]:
        return self.shelf.bytes_by_tier()

    def __del__(self) -> None:
        if self.shelf.slab is not None and self.lost is None:
            self._give_back(self.shelf.slab)
        elif self.shelf.slab is not None:
            self.shelf.slab.close()  # the next gradient gets another


class RestingPlace:
    """Where the resting gradients of one segment lie: makes them, and keeps the memory of
    another tier from one step to the next.
    """

    def __init__(
        self,
        key: str,
        numel: int,
        dtype: torch.dtype,
        *,
        split: int,
        store: Store | None,
        link: Link,
        pages: PagePool,
        device: torch.device,
        note: Callable[[StorageError], None],
    ) -> None:
        self.tiered = split < numel
        assert not self.tiered or store is not None, key
        self._key = key
        self._numel = numel
        self._dtype = dtype
        self._split = split
        self._store = store
        self._link = link
        self._pages = pages
        self._device = device
        self._note = note
        self._idle: list[Slab] = []

    def open(self) -> Resting:
        """Return memory for a gradient, its contents undefined."""
        if not self.tiered:
            return DeviceResting(self._pages.empty(self._numel, self._dtype, self._device))
        near = self._pages.empty(self._split, self._dtype, self._device) if self._split else None
        slab, failure = None, None
        try:
            slab = self._take_slab()
        except StorageError as error:
            failure, near = error, self._pages.empty(self._split, self._dtype, self._device)
        shelf = Shelf(near, slab, link=self._link)
        resting = TieredResting(
            shelf,
            give_back=self._take_back,
            pages=self._pages,
            link=self._link,
            device=self._device,
            note=self._note,
        )
        if failure is not None:
            resting.lose(failure)
        return resting

    def _take_slab(self) -> Slab:
        assert self._store is not None
        return (
            self._idle.pop()
            if self._idle
            else self._store.slab(f"{self._key} gradient", self._numel - self._split, self._dtype)
        )

    def forget_memory(self) -> None:
        """Close what is kept for the next gradient: something may be wrong with it."""
        while self._idle:
            self._idle.pop().close()

    def _take_back(self, slab: Slab) -> None:
        self._idle.append(slab) if slab.numel == self._numel - self._split else slab.close()

    def move(self, split: int) -> None:
        """Let the gradients to come rest on the device up to `split`."""
        idle, self._idle, self._split = self._idle, [], split
        self.tiered = split < self._numel
        for slab in idle:
            slab.close()

    def scratch(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return undefined memory [numel] on the device, for what is only passing through."""
        return self._pages.empty(numel, dtype, self._device)


def _blocks(start: int, stop: int) -> Iterator[Range]:
    for low in range(start, stop, _BLOCK):
        yield low, min(low + _BLOCK, stop)


def chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut `tensor` for cache-sized passes on CPU; other devices take it whole."""
    return torch.split(tensor, _CHUNK) if tensor.device.type == "cpu" else (tensor,)


def _finite(tensor: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether all of `tensor` is finite, given the sum of its elements."""
    if bool(torch.isfinite(total)):
        return True
    # the sum itself may have overflowed
    return all(bool(torch.isfinite(chunk).all()) for chunk in chunks(tensor))


def _squares(tensor: torch.Tensor, total: float = 0.0) -> float:
    """Return `total` plus the sum of squares in fp64, a chunk at a time (the conversion stays in
    cache).
    """
    if tensor.device.type != "cpu":
        return total + float(torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2)
    scratch = torch.empty(min(_CHUNK, tensor.numel()), dtype=torch.float64)
    for chunk in chunks(tensor):
        wide = scratch[: chunk.numel()]
        wide.copy_(chunk)
        total += float(torch.dot(wide, wide))
    return total
