"""Whether gradients are finite, and their norms: on an accelerator one vector, read once.

    slices of all gradients here    | s0 | s1 | s2 | ... |      one _foreach_norm
    their sums of squares, fp64      [ q0,  q1,  q2, ... ]      one read by the host

A sum of squares in fp64 of numbers that are finite in fp32 does not overflow, so the same vector
says whether all of them are finite and what the norm is. A read waits for all work that is queued
on the device, which is why there is one per step. The host reads its own memory for nothing, so
that nothing is collected on the CPU: there a sum of squares is a chain of fp64 dots over chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zeroshard.memory import reads_wait

__all__ = [
    "RunningSum",
    "SquaresRequest",
    "chunks",
    "is_finite",
    "read_squares",
    "squares_of",
    "sum_of_squares",
]  # fmt: skip

_CHUNK = 1 << 17  # elements: a chunk of fp32 stays in a core's own cache


@dataclass(frozen=True)
class SquaresRequest:
    """A slice whose sum of squares the host has yet to learn."""

    numbers: torch.Tensor  # [n], on the device of all others that are asked for with it
    learn: Callable[[float], None]


def squares_of(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of `slices`, fp64 [len(slices)], on their device; nothing is
    read.
    """
    return torch.stack(torch._foreach_norm(list(slices), 2, dtype=torch.float64)).square_()


def read_squares(requests: Sequence[SquaresRequest]) -> None:
    """Tell each of `requests` (at least one) its sum of squares: one vector, one read."""
    squares = squares_of([one.numbers for one in requests]).tolist()
    for one, value in zip(requests, squares, strict=True):
        one.learn(value)


def chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut `tensor` for cache-sized passes on CPU; other devices take it whole."""
    return (tensor,) if reads_wait(tensor) else torch.split(tensor, _CHUNK)


def is_finite(tensor: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether all of `tensor` is finite, given the sum of its elements."""
    if math.isfinite(total.item()):
        return True
    # the sum itself may have overflowed
    return all(bool(torch.isfinite(chunk).all()) for chunk in chunks(tensor))


def sum_of_squares(tensor: torch.Tensor, total: float = 0.0) -> float:
    """Return `total` plus the sum of squares in fp64, a chunk at a time (the conversion stays in
    cache).
    """
    if reads_wait(tensor):
        return total + float(squares_of([tensor]))
    scratch = torch.empty(min(_CHUNK, tensor.numel()), dtype=torch.float64)
    for chunk in chunks(tensor):
        wide = scratch[: chunk.numel()]
        wide.copy_(chunk)
        total += float(torch.dot(wide, wide))
    return total


class RunningSum:
    """The sum of all numbers that have passed by, on the host and on a device: it is not finite
    where one of them is not.
    """

    def __init__(self) -> None:
        self._totals: dict[bool, torch.Tensor] = {}  # by whether the host waits for it

    def add(self, numbers: torch.Tensor) -> None:
        """Add all of `numbers`, on their device."""
        for chunk in chunks(numbers):
            self._hold(chunk.sum(dtype=torch.float32))

    def _hold(self, more: torch.Tensor) -> None:
        waits = reads_wait(more)
        held = self._totals.get(waits)
        self._totals[waits] = more if held is None else held + more

    def is_finite(self) -> bool:
        """Whether it is finite, as far as the host knows: what is `unread` is not known yet."""
        known = self._totals.get(False)
        return known is None or bool(torch.isfinite(known))

    def unread(self) -> list[SquaresRequest]:
        """Return what the host has yet to read of an accelerator to know whether it is finite."""
        total = self._totals.get(True)
        return [] if total is None else [SquaresRequest(total.reshape(1), self._learn)]

    def _learn(self, squares: float) -> None:
        """Keep on the host, squared, what the numbers that passed the device add up to."""
        del self._totals[True]
        self._hold(torch.tensor(squares, dtype=torch.float64))
