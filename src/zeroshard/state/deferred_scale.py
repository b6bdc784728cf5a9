"""What is done to a sum at rest, noted now and applied by whoever reads a range.

    sum, and the list [/ 2, x 0.3]    a reader applies the list to its copy, in the same order as a
                                      sum on the device would have seen it: the same bits

So a gradient on disk is read once by the step and written once by each reduce, however it is
averaged and clipped.
"""

from __future__ import annotations

import torch

__all__ = ["DeferredScale"]


class DeferredScale:
    """Divisions and multiplications that a sum at rest still lacks."""

    __slots__ = ("_pending", "_weight", "divided_by")

    def __init__(self) -> None:
        self.divided_by = 0.0  # the ranks and the loss scale, once averaged; 0 while it is a sum
        self._weight = 0.0  # part of that: the sum of weights, once divided by it
        self._pending: list[tuple[str, float]] = []

    @property
    def is_pending(self) -> bool:
        """Whether a reader has anything to apply."""
        return bool(self._pending)

    def average(self, divisor: float) -> None:
        """Divide by `divisor`, once."""
        if not self.divided_by:
            self.divided_by = divisor
            if divisor != 1.0:
                self._pending.append(("div", divisor))

    def divide(self, weight: float) -> None:
        """Divide the average by the sum of weights, once."""
        if not self._weight:
            self._weight = weight
            self.divided_by *= weight
            self._pending.append(("div", weight))

    def multiply(self, factor: float) -> None:
        """Multiply by `factor`."""
        self._pending.append(("mul", factor))

    def apply_to(self, tensor: torch.Tensor) -> None:
        """Do to `tensor`, in place, what is pending."""
        for what, by in self._pending:
            tensor.div_(by) if what == "div" else tensor.mul_(by)

    def applied(self) -> None:
        """Note that all of the sum has been through `apply_to`."""
        self._pending = []

    def reset(self) -> None:
        """Note that it is a sum again, with nothing pending."""
        self._pending, self._weight, self.divided_by = [], 0.0, 0.0
