"""A gradient at rest: the sum over ranks and micro-batches, from the reduce that brings it here
to the step that reads it.

Where its cell says DEVICE, it is averaged and scaled in place. Elsewhere what is done to it is only
noted (state/deferred_scale.py), and a sum arrives in two steps: it is copied there, and added by
whoever comes next::

    device      sum --/ ranks, / loss scale--> average --x clip--> read by the step
    elsewhere   sum, and the list [/ 2, x 0.3]

One that could not be read or written is *lost*: it says so once (runtime/faults.py), reads as NaN
from then on, and takes what comes without a word.

Invariant: it is alive as long as a sealed gradient, or a reduce under way, holds it, and it is not
changed before a step under way has read it (`lend`). What it does not do: it knows no rank and
sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from zeroshard.core.layout import Range
from zeroshard.core.placement import Tier
from zeroshard.core.work import Work, wait_on_host
from zeroshard.errors import StorageError
from zeroshard.memory import bounce_buffer, reads_wait
from zeroshard.state.deferred_scale import DeferredScale
from zeroshard.state.reduction import (
    Asked,
    RunningSum,
    chunks,
    is_finite,
    sum_of_squares,
)
from zeroshard.state.state import DeviceMemory, State
from zeroshard.tier.link import Direct
from zeroshard.tier.store import Storage

__all__ = ["RestingGradient"]

_BLOCK = 1 << 20  # elements read from another tier at a time; a multiple of a chunk (reduction.py)


class RestingGradient:
    """A gradient at rest. Ranges count the elements that rest here: this rank's share, or the
    whole where every rank steps everything.
    """

    def __init__(
        self,
        state: State,
        memory: DeviceMemory,
        *,
        keep: Callable[[Storage], None],
        note: Callable[[StorageError], None],
        lost: StorageError | None = None,
    ) -> None:
        """`keep` takes its memory of another tier in the end; `note` is told of a loss. One that is
        `lost` from the beginning could not be made.
        """
        self.state = state
        self.on_device = state.on_device and lost is None
        self.lost: StorageError | None = None
        self.scaling = DeferredScale()
        self._memory = memory
        self._keep = keep
        self._tell = note
        self._wait: Callable[[], None] | None = None  # for a step that may be reading it
        self._passed = RunningSum()  # of a rest on another tier: all that has arrived
        # of slices on an accelerator: sums of squares that the host has read
        self._squares: dict[Range, float] = {}
        self._flushing: list[tuple[Work, torch.Tensor]] = []  # copies under way, and what they read
        # sums on their way to the host, to be added there
        self._to_add: list[tuple[Range, torch.Tensor, Work, torch.Tensor]] = []
        if lost is not None:
            self.lose(lost)

    @property
    def is_average(self) -> bool:
        """Whether the sum has been divided."""
        return bool(self.scaling.divided_by)

    def replace(self, state: State) -> None:
        """Rest in other memory, which holds the same numbers or will."""
        self.state = state

    def lend(self, wait: Callable[[], None]) -> None:
        """Let a step that goes on by itself read it; `wait` returns when the step has done so."""
        self._wait = wait

    def _wait_for_reader(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

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

    def _blocks(self, start: int, stop: int) -> Iterator[Range]:
        """Cut a range into what is read at a time: of a device tensor, all of it."""
        size = stop - start if self.on_device else _BLOCK
        for low in range(start, stop, max(size, 1)):
            yield low, min(low + size, stop)

    # ------------------------------------------------------------------ what arrives

    def take(self, own: Range, total: torch.Tensor, *, fresh: bool) -> None:
        """Take over `total` (the device's sum of range `own`, fp32 or the dtype of the rest);
        `fresh`: it is the first. Not of one on the device, where a reduce adds by itself.
        """
        if self.lost is None:
            with self._losing():
                self._take(own, total, fresh)

    def _take(self, own: Range, total: torch.Tensor, fresh: bool) -> None:
        if fresh:
            self._passed.add(total)
            source = total.to(self.state.dtype)
            self._flushing += [(work, source) for work in self.state.write(*own, source)]
        else:
            self.wait_writes()
            if isinstance(self._memory.link, Direct):
                self._add(own, total)
            else:
                host = bounce_buffer(total.numel(), total.dtype, total.device)
                work = self._memory.link.copy(host, total, "to_host")
                self._to_add.append((own, host, work, total))  # the copy reads `total`

    def _add(self, own: Range, total: torch.Tensor) -> None:
        for start in range(0, total.numel(), _BLOCK):
            part = total[start : start + _BLOCK]
            with self.state.borrowed(
                own[0] + start, own[0] + start + part.numel(), write=True
            ) as there:
                # a block of the part that rests on the device is lent there
                part = part.to(there.device)
                for target, more in zip(chunks(there), chunks(part), strict=True):
                    if target.dtype is torch.float32:
                        target.add_(more)
                    else:  # rounded once
                        target.copy_(more.float().add_(target))
                self._passed.add(there)

    def wait_writes(self) -> None:
        """Return when everything that has arrived rests."""
        landing, self._flushing = self._flushing, []
        for work, _ in landing:
            work.wait()
        pending, self._to_add = self._to_add, []
        for own, host, work, _ in pending:
            wait_on_host(work)
            self._add(own, host)

    @property
    def is_flushing(self) -> bool:
        """Whether a sum is still on its way here, and so held on the device, too."""
        with self._losing():
            while self._flushing and self._flushing[0][0].done():
                self._flushing.pop(0)[0].wait()  # raises what went wrong
        return bool(self._to_add or self._flushing)

    def flush(self) -> None:
        """Return when it is here."""
        with self._losing():
            self.wait_writes()

    def reopen(self, own: Range) -> None:
        """Turn an average back into a sum, to which more is added."""
        self._wait_for_reader()
        self._squares.clear()
        divided_by = self.scaling.divided_by
        if not divided_by:
            return
        with self._losing():
            self.wait_writes()
            changes = self.scaling.is_pending or divided_by != 1.0
            for start, stop in self._blocks(*own) if changes and self.lost is None else ():
                with self.state.borrowed(start, stop, write=True) as there:
                    self.scaling.apply_to(there)
                    there.mul_(divided_by)
        self.scaling.reset()

    def exchange(
        self, own: Range, whole: torch.Tensor, meet: Callable[[torch.Tensor], None]
    ) -> None:
        """Take over the other ranks' slices of the average: `meet` brings them together in
        `whole`, which is passing through, from `own`.
        """
        mine = whole[slice(*own)]
        with self._losing():
            self.wait_writes()
            for work in self.state.read(*own, mine) if self.lost is None else ():
                work.wait()
            self.scaling.apply_to(mine)
        if self.lost is not None:
            mine.fill_(float("nan"))
        meet(mine)
        with self._losing():
            for work in self.state.write(0, whole.numel(), whole) if self.lost is None else ():
                work.wait()
        self.scaling.applied()

    # ------------------------------------------------------------------ what is done to it

    def average(self, own: Range, divisor: float) -> bool:
        """Divide the sum by `divisor`, once; return whether all of `own` is finite, as far as the
        host knows: of numbers on an accelerator once it has read what is `asked` for.
        """
        self.scaling.average(divisor)
        if self.on_device:
            return self._apply_here(self.state.whole[slice(*own)])
        with self._losing():
            # whether everything could be written must be known before a step begins
            self.wait_writes()
        if self.lost is not None:
            return False
        # the sum of all numbers may have overflowed by itself
        return self._passed.is_finite() or self.is_finite(*own)

    def divide(self, weight: float) -> None:
        """Divide the average by the sum of weights, which the ranks have exchanged since, once."""
        self._wait_for_reader()
        self._squares.clear()
        self.scaling.divide(weight)
        if self.on_device:
            self.scaling.apply_to(self.state.whole)
            self.scaling.applied()

    def _apply_here(self, mine: torch.Tensor) -> bool:
        """Apply what is pending to `mine`, a chunk at a time, and return whether it is finite."""
        if reads_wait(mine):
            self.scaling.apply_to(mine)
            self.scaling.applied()
            return all(map(math.isfinite, self._squares.values()))
        if not self.scaling.is_pending:
            return is_finite(mine, mine.sum(dtype=torch.float32))
        total = torch.zeros((), dtype=torch.float32, device=mine.device)
        for chunk in chunks(mine):
            self.scaling.apply_to(chunk)
            total += chunk.sum(dtype=torch.float32)
        self.scaling.applied()
        return is_finite(mine, total)

    def asked(self, spans: Iterable[Range]) -> list[Asked]:
        """Return what the host has yet to read of an accelerator (state/reduction.py) to know the
        squares of these ranges of the average, and whether they are finite; nothing of the CPU.
        """
        if not self.on_device:
            return self._passed.asked()
        if not reads_wait(self.state.whole):
            return []
        return [
            Asked(self.state.whole[slice(*span)], partial(self._squares.__setitem__, span))
            for span in spans
            if span not in self._squares
        ]

    def scale(self, factor: float) -> None:
        """Multiply the average by `factor`."""
        self._wait_for_reader()
        self._squares.clear()
        if self.on_device:
            self.state.whole.mul_(factor)
        else:
            self.scaling.multiply(factor)

    # ------------------------------------------------------------------ who reads it

    @contextmanager
    def block(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Lend a range on the host (the device part: there) with everything pending applied;
        read only. Raises StorageError.
        """
        if self.lost is not None:
            raise self.lost
        self.wait_writes()
        with self.state.borrowed(start, stop, write=False) as there:
            if self.scaling.is_pending:
                there = there.clone()
                self.scaling.apply_to(there)
            yield there

    def read(self, start: int, stop: int, out: torch.Tensor) -> list[Work]:
        """Start copying a range to host memory `out`, to which the caller then applies `scaling`.
        Raises StorageError.
        """
        if self.lost is not None:
            raise self.lost
        self.wait_writes()
        return self.state.read(start, stop, out)

    def squares(self, start: int, stop: int) -> float:
        """Return the sum of squares of a range in fp64."""
        if (start, stop) in self._squares:
            return self._squares[start, stop]
        if self.on_device:
            return sum_of_squares(self.state.whole[start:stop])
        total = 0.0
        with self._losing():
            for low, high in self._blocks(start, stop):
                with self.block(low, high) as block:
                    total = sum_of_squares(block, total)
        return total if self.lost is None else float("nan")

    def is_finite(self, start: int, stop: int) -> bool:
        """Whether a range holds neither NaN nor infinity."""
        if (start, stop) in self._squares:
            return math.isfinite(self._squares[start, stop])
        with self._losing():
            for low, high in self._blocks(start, stop):
                with self.block(low, high) as block:
                    if not bool(torch.isfinite(block).all()):
                        return False
        return self.lost is None

    def zero(self, start: int, stop: int) -> None:
        """Set a range to zero."""
        self._wait_for_reader()
        self._squares.clear()
        with self._losing():
            self.wait_writes()
            for low, high in self._blocks(start, stop) if self.lost is None else ():
                with self.state.borrowed(low, high, write=True) as there:
                    there.zero_()

    def store(self, start: int, stop: int, numbers: torch.Tensor) -> None:
        """Set a range of the average to `numbers` [stop - start], of any dtype and device."""
        self._wait_for_reader()
        self._squares.clear()
        with self._losing():
            self.wait_writes()
            pending = self.scaling.is_pending and self.lost is None
            for low, high in self._blocks(0, self.state.numel) if pending else ():
                with self.state.borrowed(low, high, write=True) as there:
                    self.scaling.apply_to(there)
            self.scaling.applied()
            for low, high in self._blocks(start, stop) if self.lost is None else ():
                with self.state.borrowed(low, high, write=True) as there:
                    there.copy_(numbers[low - start : high - start])

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """Return a range as it would be on the device: there a view, else a copy."""
        if self.on_device:
            return self.state.whole[start:stop]
        out = self._memory.empty(stop - start, self.state.dtype)
        for low, high in self._blocks(start, stop):
            with self.block(low, high) as block:
                out[low - start : high - start].copy_(block)
        return out

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Return the bytes at rest."""
        return self.state.bytes_by_tier()

    def __del__(self) -> None:
        away = self.state.away
        if away is not None:
            # of one that was lost, the next gradient gets another
            self._keep(away) if self.lost is None else away.close()
