"""The gradients since the user cleared them: whether any rest here, of how many micro-batches, and
whether they have been averaged.

    backward --add--> a sum --finalized--> an average --add--> a sum ... --clear--> nothing

Invariant: `micro_batches` is the same number on every rank, or UNKNOWN; the ranks compare it before
a step (finalize.py).
"""

from __future__ import annotations

from zeroshard.errors import StateError

__all__ = ["UNKNOWN", "Accumulation"]

# micro-batches of a rank that cannot tell whether all gradients were cleared
UNKNOWN = (1 << 32) - 1


class Accumulation:
    """What the backwards since the last `clear` have left."""

    def __init__(self) -> None:
        self.has_gradient = False
        self.changed = False  # since the last average
        self.scaled = False  # whether the loss of these gradients was scaled
        self.divisor = 1  # by which the step divides them, beside the number of ranks
        self.micro_batches = 0  # backwards

    def check(self, *, scaled: bool, divisor: int = 1) -> None:
        """Raise StateError where a backward of a `scaled` loss, or of another, cannot be added, or
        one whose gradients are to be divided by another `divisor`.
        """
        if self.has_gradient and self.scaled != scaled:
            raise StateError(
                "fp16: this backward's loss is scaled otherwise than an earlier one's: call"
                " engine.backward(loss) for all"
            )
        if self.has_gradient and self.divisor != divisor:
            raise StateError(
                f"scale_grads divides these gradients by {divisor}, and those that rest here by"
                f" {self.divisor}: give all schedules of one step as many micro-batches and the"
                " same scale_grads, or call zero_grad() between them"
            )

    def add(self, *, scaled: bool, divisor: int = 1) -> None:
        """A backward begins."""
        self.micro_batches += self.micro_batches != UNKNOWN
        self.has_gradient = self.changed = True
        self.scaled, self.divisor = scaled, divisor

    def finalized(self) -> None:
        """The gradients have been averaged, or stepped."""
        self.changed = False

    def clear(self, micro_batches: int = 0) -> None:
        """No gradient rests here any more; `micro_batches` UNKNOWN: others may have some."""
        self.has_gradient = self.scaled = False
        self.changed, self.divisor = True, 1
        self.micro_batches = micro_batches
