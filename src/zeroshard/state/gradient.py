"""The gradient of one segment at rest, which its accumulator and steps hold: a sum, and then the
average that a step reads.

    take       += what a reduce brings                    range `own`, of what this rank steps
    average    / ranks / loss scale                       range `own`
    divide     / weights, where backwards had any         all of it
    scale      x clip                                     all of it

    on the device    sum --/ ranks, / loss scale--> average --x clip--> read by the step
    elsewhere        sum, and what is pending on it: [/ 2, x 0.3]

On the device a reduce adds to them, and they are divided and clipped in place. Elsewhere a sum
arrives in two steps: it is copied there, and added by whoever comes next. Whoever reads a range
applies what is pending to a copy, in the order in which the device would have done it: the same
bits. So a gradient on disk is written once by each reduce and read once by the step.

It is a *sum* until ``average`` divides it, once, and one again from ``reopen`` on: a reduce follows
without ``zero_grad()``. One that could not be made, read or written is *lost*: it says so once
(runtime/context.py), reads as NaN from then on, and takes what comes without a word.

Invariants: the memory lasts as long as somebody holds it; memory of another tier then serves the
next gradient. The numbers do not change before a step that reads them has read them. What it does
not do: it knows no parameter and no rank; runtime/grad.py does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from zeroshard.core.layout import Range
from zeroshard.core.resting import tiles
from zeroshard.core.work import Work, wait_on_host
from zeroshard.errors import StorageError
from zeroshard.memory import bounce_buffer, reads_wait
from zeroshard.state.norms import (
    ExactSum,
    RunningSum,
    SquaresRequest,
    SquaresSum,
    chunks,
    divide,
)
from zeroshard.state.state import DeviceMemory, State
from zeroshard.tier.store import Direct, Storage

_BLOCK = 1 << 20  # elements read from another tier at a time; a multiple of a chunk (norms.py)


class Gradient:
    """Numbers at rest that sums arrive in, and the divisions and multiplications that they still
    lack.

    Readers (`block`, `blocks`, `read`, `fetch`) and `wait_writes` raise StorageError; the other
    methods note it, and the gradient is lost.
    """

    def __init__(
        self,
        key: str,
        numbers: State,
        *,
        own: Range,
        memory: DeviceMemory,
        idle: list[tuple[Storage, bool]],
        note: Callable[[StorageError], None],
    ) -> None:
        """The gradient of segment `key`, `numbers`: sums of range `own` arrive there.
        `idle` takes the memory of another tier in the end, and whether it may serve again;
        `note` a StorageError.
        """
        self.key = key
        self.numbers = numbers
        self.dtype = numbers.dtype
        # whether all of it is one device tensor
        self.on_device = numbers.on_device
        self.lost: StorageError | None = None
        self.pending: list[tuple[str, float | torch.Tensor]] = []  # ("div", 2.0), ("mul", 0.3)
        self._passed = RunningSum()  # of a rest on another tier: all that has arrived
        self._own = own
        self._memory = memory
        self._idle = idle
        self._note = note
        self.divided_by = 0.0  # the ranks and the loss scale, once averaged; 0 while it is a sum
        self._weight = 0.0  # part of that: the sum of weights, once divided by it
        # of groups of ranges on an accelerator: sums of squares that the host has read
        self._squares: dict[tuple[Range, ...], ExactSum] = {}
        self._finite: dict[tuple[Range, ...], bool] = {}  # of others: whether they are finite
        self._wait: Callable[[], None] | None = None  # for a step that may be reading it
        # copies under way and what they read; of a sum to be added on the host: where it arrives
        self._coming: list[tuple[Work, torch.Tensor, torch.Tensor | None]] = []

    def lose(self, error: StorageError) -> None:
        """It holds no gradient any more."""
        self.lost = self.lost or error
        self.on_device = False

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Lose the numbers where the body raises StorageError, and note it."""
        try:
            yield
        except StorageError as error:
            self._fail(error)

    def _fail(self, error: StorageError) -> None:
        self.lose(error)
        self._note(error)

    def replace(self, tensor: torch.Tensor) -> None:
        """Rest in `tensor`, which holds the same numbers or will."""
        self.numbers, self.on_device = State(tensor), True

    def lend(self, wait: Callable[[], None]) -> None:
        """Let a step that goes on by itself read it; `wait` returns when the step has done so."""
        self._wait = wait

    def _begin_change(self) -> None:
        """Return when the step that it was lent to has read it; what is known of the numbers is
        known no longer.
        """
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        self._squares.clear()
        self._finite.clear()

    # ------------------------------------------------------------------ what arrives

    def take(self, total: torch.Tensor, fresh: bool) -> None:
        """Take over `total` (the device's sum, fp32 or the dtype of the rest); `fresh`: it is the
        first. (On the device a reduce adds by itself.)
        """
        if self.lost is not None:
            return
        if self.on_device:
            there = self.fetch(*self._own)
            there.copy_(total) if fresh else there.add_(total)
            return
        with self.losing():
            if fresh:
                self._passed.add(total)
                source = total.to(self.dtype)
                writes = self.numbers.write(*self._own, source)
                self._coming += [(work, source, None) for work in writes]
                return
            self.wait_writes()
            if isinstance(self._memory.link, Direct):
                self._add(total)
                return
            host = bounce_buffer(total.numel(), total.dtype, total.device)
            work = self._memory.link.copy(host, total, "to_host")
            self._coming.append((work, total, host))

    def _add(self, total: torch.Tensor) -> None:
        for low, there in self.blocks(*self._own, write=True):
            # a block of the part that rests on the device is lent there
            part = total[low - self._own[0] :][: there.numel()].to(there.device)
            for target, more in zip(chunks(there), chunks(part), strict=True):
                if target.dtype is torch.float32:
                    target.add_(more)
                else:  # rounded once
                    target.copy_(more.float().add_(target))
            self._passed.add(there)

    def wait_writes(self) -> None:
        """Return when everything that has arrived rests."""
        coming, self._coming = self._coming, []
        for work, _, host in coming:
            if host is None:
                work.wait()
            else:
                wait_on_host(work)
                self._add(host)

    @property
    def is_flushing(self) -> bool:
        """Whether a sum is still on its way here, and so held on the device, too."""
        with self.losing():
            while self._coming and self._coming[0][2] is None and self._coming[0][0].done():
                self._coming.pop(0)[0].wait()  # raises what went wrong
        return bool(self._coming)

    def reopen(self) -> None:
        """Turn range `own` of an average back into a sum, to which more is added."""
        if not self.divided_by:
            return
        self._begin_change()
        with self.losing():
            self.wait_writes()
            changes = self.pending or self.divided_by != 1.0
            for _, there in self.blocks(*self._own, write=True) if changes else ():
                self.apply_to(there)
                there.mul_(self.divided_by)
        self.pending.clear()
        self.divided_by = self._weight = 0.0

    # ------------------------------------------------------------------ what is done to it

    def divide(self, weight: float) -> None:
        """Divide all that rests here by the sum of weights, after the averages of other ranks have
        come, once.
        """
        self._begin_change()
        if not self._weight:
            self._weight = weight
            self.divided_by *= weight
            self._change("div", weight)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply the average by `factor`."""
        self._begin_change()
        self._change("mul", factor)

    def store_range(self, start: int, stop: int, numbers: torch.Tensor) -> None:
        """Set a range of the average to `numbers` [stop - start], of any dtype and device."""
        self._begin_change()
        with self.losing():
            self.wait_writes()
            for _, there in self.blocks(0, self.numbers.numel, write=True) if self.pending else ():
                self.apply_to(there)
            self.pending.clear()
            for low, there in self.blocks(start, stop, write=True):
                there.copy_(numbers[low - start :][: there.numel()])
                if not self.on_device:
                    self._passed.add(there)

    def zero_range(self, start: int, stop: int) -> None:
        """Set a range to zero."""
        self._begin_change()
        with self.losing():
            self.wait_writes()
            for _, there in self.blocks(start, stop, write=True):
                there.zero_()

    def apply_to(self, tensor: torch.Tensor) -> None:
        """Do to `tensor`, in place, what is pending."""
        for what, by in self.pending:
            tensor.div_(by) if what == "div" else tensor.mul_(by)

    def _change(self, what: str, by: float | torch.Tensor) -> None:
        """Divide ("div") or multiply ("mul") all of it, now or when it is read."""
        self.pending.append((what, by))
        if self.on_device:
            self.apply_to(self.numbers.whole)
            self.pending.clear()

    def seems_finite(self) -> bool:
        """Whether range `own` is finite, as far as the host knows: of numbers on an accelerator
        once it has read what is `unread`. What has arrived is written first: whether all of it
        could be must be known before a step begins.
        """
        if self.on_device and reads_wait(self.numbers.whole):
            known = [one.is_finite for one in self._squares.values()]
            return False not in known and False not in self._finite.values()
        with self.losing():
            self.wait_writes()
        if self.lost is not None:
            return False
        # the sum of all numbers may have overflowed by itself
        return (not self.on_device and self._passed.is_finite()) or self.is_finite(*self._own)

    # ------------------------------------------------------------------ who reads and writes it

    @contextmanager
    def block(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Lend a range to be read, on the host (the device part: there), with everything pending
        applied.
        """
        if self.lost is not None:
            raise self.lost
        with self.numbers.borrowed(start, stop, write=False) as there:
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
            lent = self.numbers.borrowed(low, high, write=True) if write else self.block(low, high)
            with lent as there:
                yield low, there

    def read(self, start: int, stop: int, out: torch.Tensor) -> list[Work]:
        """Start copying a range to `out` on the host; the caller then applies what is pending."""
        if self.lost is not None:
            raise self.lost
        return self.numbers.read(start, stop, out)

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """Return a range as it would be on the device: there the memory itself, else a copy."""
        if self.on_device:
            whole = self.numbers.tensor
            assert whole is not None
            return whole if stop - start == self.numbers.numel else whole[start:stop]
        out = self._memory.empty(stop - start, self.dtype)
        for low, block in self.blocks(start, stop):
            out[low - start :][: block.numel()].copy_(block)
        return out

    # ------------------------------------------------------------------ its norm

    def unread(self, groups: Iterable[tuple[Range, ...]], *, squares: bool) -> list[SquaresRequest]:
        """Return what the host has yet to read of an accelerator (state/norms.py) to know the
        `squares` of each group of ranges, or whether they are finite; nothing of the CPU. Between
        the ranges of a group lie zeros.
        """
        whole = self.numbers.tensor
        if not self.on_device or whole is None:
            return self._passed.unread()
        if not reads_wait(whole):
            return []
        known: Any = self._squares if squares else self._finite
        return [
            SquaresRequest(whole[group[0][0] : group[-1][1]], partial(known.__setitem__, group))
            for group in groups
            if group not in known and group not in self._squares
        ]

    def add_squares(self, groups: Iterable[tuple[Range, ...]], to: SquaresSum) -> None:
        """Add the squares of groups of ranges, each from the beginning of a block on
        (state/norms.py), `to` a sum: NaN of a lost one.
        """
        try:
            for group in groups:
                if group in self._squares:
                    to.add_known(self._squares[group])
                    continue
                for span in group:
                    for _, block in self.blocks(*span):
                        to.add(block)
        except StorageError as error:
            self._fail(error)
            to.add_known(ExactSum.of(math.nan))

    def is_finite(self, start: int, stop: int) -> bool:
        """Whether a range holds neither NaN nor infinity."""
        known = {group: one.is_finite for group, one in self._squares.items()} | self._finite
        for group, finite in known.items():
            if (start, stop) in group and (finite or len(group) == 1):
                return finite
        try:
            return all(bool(torch.isfinite(block).all()) for _, block in self.blocks(start, stop))
        except StorageError as error:
            self._fail(error)
            return False

    def __del__(self) -> None:
        away = None if self.numbers.on_device else self.numbers.away
        if away is not None:  # never closed here, perhaps in the garbage collector: that waits
            self._idle.append((away, self.lost is None))


def average(gradients: Sequence[Gradient], divisor: float) -> list[str]:
    """Divide range `own` of the `gradients` that are sums by `divisor`; return the keys of all
    that are not finite, as far as the host knows (`Gradient.seems_finite`).
    """
    sums, averages = list[torch.Tensor](), list[torch.Tensor]()
    for one in gradients:
        is_sum = not one.divided_by
        if is_sum:
            one.divided_by = divisor
        if one.on_device:
            (sums if is_sum else averages).append(one.fetch(*one._own))
        elif is_sum and divisor != 1.0:
            one.pending.append(("div", divisor))
    are_finite = divide(sums, averages, divisor)
    return [
        one.key for one in gradients if not ((one.on_device and are_finite) or one.seems_finite())
    ]
