"""Sums of tensors by hand, in an order that is written down."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, one after another."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def sum_in_tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum by a tree that is cut at the largest power of two below the number of them."""
    if len(parts) == 1:
        return parts[0]
    middle = 1
    while 2 * middle < len(parts):
        middle *= 2
    return sum_in_tree(parts[:middle]) + sum_in_tree(parts[middle:])


def sum_of_micro_batches(
    of: Sequence[Sequence[torch.Tensor]], *, micro_batches_first: bool
) -> torch.Tensor:
    """Return the sum of what each rank has, in rank order, in either of two micro-batches."""
    if micro_batches_first:
        return sum_in_order([first + second for first, second in zip(*of, strict=True)])
    return sum_in_order(of[0]) + sum_in_order(of[1])
