"""The numbers of a gradient at rest, which sealed gradients and steps hold.

    on the device    sum --/ ranks, / loss scale--> average --x clip--> read by the step
    elsewhere        sum, and what is pending on it: [/ 2, x 0.3]

On the device a reduce adds to them, and they are divided and clipped in place. Elsewhere a sum
arrives in two steps: it is copied there, and added by whoever comes next. Whoever reads a range
applies what is pending to a copy, in the order in which the device would have done it: the same
bits. So a gradient on disk is written once by each reduce and read once by the step.

Invariant: the memory lasts as long as somebody holds it; that of another tier then serves the next
gradient. What it does not do: it knows no parameter and no rank; runtime/grad.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zeroshard.core.layout import Range
from zeroshard.core.split import tiles
from zeroshard.core.work import Work, wait_on_host
from zeroshard.errors import StorageError
from zeroshard.memory import bounce_buffer, reads_wait
from zeroshard.state.reduction import RunningSum, chunks, is_finite, sum_of_squares
from zeroshard.state.state import DeviceMemory, DeviceStorage, State
from zeroshard.tier.link import Direct
from zeroshard.tier.store import Storage

__all__ = ["GradientState"]

_BLOCK = 1 << 20  # elements read from another tier at a time; a multiple of a chunk (reduction.py)


class GradientState(State):
    """A State that sums arrive in, and the divisions and multiplications that it still lacks.

    Methods raise StorageError. One that could not be made, read or written is *lost*.
    """

    def __init__(
        self,
        *parts: Storage,
        own: Range,
        memory: DeviceMemory,
        idle: list[Storage],
        lost: StorageError | None = None,
    ) -> None:
        """Sums of range `own` arrive here; `idle` takes the memory of another tier in the end."""
        super().__init__(*parts)
        self.lost: StorageError | None = None
        if lost is not None:
            self.lose(lost)
        self.pending: list[tuple[str, float]] = []  # ("div", 2.0), ("mul", 0.3)
        self.passed = RunningSum()  # of a rest on another tier: all that has arrived
        self._own = own
        self._memory = memory
        self._idle = idle
        self._wait: Callable[[], None] | None = None  # for a step that may be reading it
        self._flushing: list[tuple[Work, torch.Tensor]] = []  # copies under way, and what they read
        # sums on their way to the host, to be added there
        self._to_add: list[tuple[torch.Tensor, Work, torch.Tensor]] = []

    @property
    def is_read_late(self) -> bool:
        """Whether a read of it waits for what is enqueued on an accelerator."""
        return self.on_device and reads_wait(self.whole)

    def lose(self, error: StorageError) -> None:
        """It holds no gradient any more."""
        self.lost = self.lost or error
        self.on_device = False

    def replace(self, tensor: torch.Tensor) -> None:
        """Rest in `tensor`, which holds the same numbers or will."""
        self._rest((DeviceStorage(tensor),))

    def lend(self, wait: Callable[[], None]) -> None:
        """Let a step that goes on by itself read it; `wait` returns when the step has done so."""
        self._wait = wait

    def wait_for_reader(self) -> None:
        """Return when the step that it was lent to has read it."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    # ------------------------------------------------------------------ what arrives

    def take(self, total: torch.Tensor, *, fresh: bool) -> None:
        """Take over `total` (the device's sum, fp32 or the dtype of the rest); `fresh`: it is the
        first. Not of one on the device, where a reduce adds by itself.
        """
        if fresh:
            self.passed.add(total)
            source = total.to(self.dtype)
            self._flushing += [(work, source) for work in self.write(*self._own, source)]
            return
        self.wait_writes()
        if isinstance(self._memory.link, Direct):
            self._add(total)
            return
        host = bounce_buffer(total.numel(), total.dtype, total.device)
        work = self._memory.link.copy(host, total, "to_host")
        self._to_add.append((host, work, total))  # the copy reads `total`

    def _add(self, total: torch.Tensor) -> None:
        for low, there in self.blocks(*self._own, write=True):
            # a block of the part that rests on the device is lent there
            part = total[low - self._own[0] :][: there.numel()].to(there.device)
            for target, more in zip(chunks(there), chunks(part), strict=True):
                if target.dtype is torch.float32:
                    target.add_(more)
                else:  # rounded once
                    target.copy_(more.float().add_(target))
            self.passed.add(there)

    def wait_writes(self) -> None:
        """Return when everything that has arrived rests."""
        landing, self._flushing = self._flushing, []
        for work, _ in landing:
            work.wait()
        pending, self._to_add = self._to_add, []
        for host, work, _ in pending:
            wait_on_host(work)
            self._add(host)

    @property
    def is_flushing(self) -> bool:
        """Whether a sum is still on its way here, and so held on the device, too."""
        while self._flushing and self._flushing[0][0].done():
            self._flushing.pop(0)[0].wait()  # raises what went wrong
        return bool(self._to_add or self._flushing)

    # ------------------------------------------------------------------ what is done to it

    def apply_to(self, tensor: torch.Tensor) -> None:
        """Do to `tensor`, in place, what is pending."""
        for what, by in self.pending:
            tensor.div_(by) if what == "div" else tensor.mul_(by)

    def change(self, what: str, by: float) -> None:
        """Divide ("div") or multiply ("mul") all of it, now or when it is read."""
        self.pending.append((what, by))
        if self.on_device:
            self.apply_to(self.whole)
            self.pending.clear()

    def settle(self) -> bool:
        """Bring range `own` to rest: on the device with everything pending applied, elsewhere with
        all that has arrived. Return whether it is finite, as far as the host knows.
        """
        if not self.on_device:
            # whether everything could be written must be known before a step begins
            self.wait_writes()
            if self.lost is not None:
                return False
            # the sum of all numbers may have overflowed by itself
            return self.passed.is_finite() or self.is_finite(*self._own)
        mine = self.whole[slice(*self._own)]
        if reads_wait(mine):
            self.apply_to(mine)
            self.pending.clear()
            return True
        if not self.pending:
            return is_finite(mine, mine.sum(dtype=torch.float32))
        total = torch.zeros((), dtype=torch.float32, device=mine.device)
        for chunk in chunks(mine):
            self.apply_to(chunk)
            total += chunk.sum(dtype=torch.float32)
        self.pending.clear()
        return is_finite(mine, total)

    # ------------------------------------------------------------------ who reads and writes it

    @contextmanager
    def block(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Lend a range to be read, on the host (the device part: there), with everything pending
        applied.
        """
        if self.lost is not None:
            raise self.lost
        with self.borrowed(start, stop, write=False) as there:
            if self.pending:
                there = there.clone()
                self.apply_to(there)
            yield there

    def blocks(
        self, start: int, stop: int, *, write: bool = False
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Lend a range as `block` does, or as it rests to `write` to it (of a lost one nothing): as
        many elements at a time as fit memory, with the first one's place.
        """
        size = max(stop - start, 1) if self.on_device else _BLOCK
        for low, high in [] if write and self.lost else tiles(start, stop, size):
            with self.borrowed(low, high, write=True) if write else self.block(low, high) as there:
                yield low, there

    def read(self, start: int, stop: int, out: torch.Tensor) -> list[Work]:
        """Start copying a range to `out` on the host; the caller then applies what is pending."""
        if self.lost is not None:
            raise self.lost
        return super().read(start, stop, out)

    def is_finite(self, start: int, stop: int) -> bool:
        """Whether a range holds neither NaN nor infinity."""
        return all(bool(torch.isfinite(block).all()) for _, block in self.blocks(start, stop))

    def squares(self, start: int, stop: int) -> float:
        """Return the sum of squares of a range in fp64."""
        if self.on_device:
            return sum_of_squares(self.whole[start:stop])
        total = 0.0
        for _, block in self.blocks(start, stop):
            total = sum_of_squares(block, total)
        return total

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """Return a range as it would be on the device: there a view, else a copy."""
        if self.on_device:
            return self.whole[start:stop]
        out = self._memory.empty(stop - start, self.dtype)
        for low, block in self.blocks(start, stop):
            out[low - start :][: block.numel()].copy_(block)
        return out

    def __del__(self) -> None:
        away = self.away
        if away is not None:  # of one that was lost, the next gradient gets another
            self._idle.append(away) if self.lost is None else away.close()
