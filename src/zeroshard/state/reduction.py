"""Whether gradients are finite, and their norms: on an accelerator one vector, read once.

    slices of all gradients here    | s0 | s1 | s2 | ... |      one _foreach_norm
    their sums of squares, fp64      [ q0,  q1,  q2, ... ]      one read by the host

A sum of squares in fp64 of numbers that are finite in fp32 does not overflow, so the same vector
says whether all of them are finite and what the norm is. A read waits for all work that is queued
on the device, which is why there is one per step. The host reads its own memory for nothing: on the
CPU nothing is collected, and sums keep the order and the bits that they have in
state/gradient.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Asked", "read_squares", "reads_wait", "squares_of"]


@dataclass(frozen=True)
class Asked:
    """A slice whose sum of squares the host has yet to learn."""

    numbers: torch.Tensor  # [n], on the device of all others that are asked for with it
    learn: Callable[[float], None]


def reads_wait(tensor: torch.Tensor) -> bool:
    """Whether the host waits for a device when it reads `tensor`."""
    return tensor.device.type != "cpu"


def squares_of(slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of `slices`, fp64 [len(slices)], on their device; nothing is
    read.
    """
    return torch.stack(torch._foreach_norm(list(slices), 2, dtype=torch.float64)).square_()


def read_squares(asked: Sequence[Asked]) -> None:
    """Tell each of `asked`, of which there are some, its sum of squares: one vector, one read."""
    squares = squares_of([one.numbers for one in asked]).tolist()
    for one, value in zip(asked, squares, strict=True):
        one.learn(value)
