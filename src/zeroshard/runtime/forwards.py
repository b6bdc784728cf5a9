"""How many forwards of one unit's modules are still to be followed by something in a backward.

Invariant: no count is below zero; a step resets both, since no backward of an earlier forward can
follow it.
"""

from __future__ import annotations

__all__ = ["Forwards"]


class Forwards:
    """The forwards of one unit's modules."""

    def __init__(self) -> None:
        self.open = 0  # that a backward follows, which is not over
        # that ran inside reentrant checkpoints and run again in a backward (recomputed.py)
        self.to_recompute = 0

    def begin(self, count: int) -> None:
        """So many forwards begin that a backward follows."""
        self.open += count

    def end(self, count: int) -> None:
        """The backward of so many of them is over."""
        self.open = max(0, self.open - count)

    def expect_recomputation(self) -> None:
        """A forward begins that will run again."""
        self.to_recompute += 1

    def recompute(self) -> None:
        """It runs again."""
        self.to_recompute = max(0, self.to_recompute - 1)

    def restore(self, to_recompute: int) -> None:
        """So many run again in another backward: the graph was retained."""
        self.to_recompute = to_recompute

    def reset(self) -> None:
        """Nothing of an earlier forward can follow."""
        self.open = self.to_recompute = 0
