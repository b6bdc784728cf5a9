"""What a pass over a model holds in activations, event by event: plain numbers, made by whoever may
import torch (modules/activations.py), or for a decoder whose sizes are known, in closed_form.py.

    gather u   unit u is needed         gradient u g   the first gradient of group g of u is there
    release u  it is needed no longer   reduce u       all of its gradients are
    turn       the forward is over      end            the backward is over

The events are those at which the engine takes and gives back memory (runtime/loop.py), whatever the
row. Between two of them activations grow and shrink by themselves; a `Moment` holds the most of
them from its event to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Event = Literal["gather", "release", "gradient", "reduce", "turn", "end"]


@dataclass(frozen=True)
class Moment:
    """An event, and the most bytes of activations, logits among them, from it to the next."""

    event: Event
    unit: int = -1  # number in ``ModelShape.units``
    group: int = 0  # number in ``UnitShape.groups``, of a gradient
    activations: int = 0
    logits: int = 0
    repeats: int = 1  # equal units that it stands for


@dataclass(frozen=True)
class ActivationTrace:
    """One forward and backward of a micro-batch of `tokens`, from its first event to its last."""

    moments: tuple[Moment, ...]
    tokens: int
    checkpointing: bool
    buffers: int = 0  # bytes of the model's own buffers, which are there all the time
    # FLOPs of the forward and the backward of each unit, recomputing included, that were counted
    flops: tuple[tuple[float, float], ...] = ()

    def scaled(self, tokens: int) -> ActivationTrace:
        """Return the trace of a micro-batch of so many tokens, to which activations are taken as
        proportional.
        """
        if tokens == self.tokens:
            return self
        factor = tokens / self.tokens
        moments = tuple(
            replace(
                one,
                activations=round(one.activations * factor),
                logits=round(one.logits * factor),
            )
            for one in self.moments
        )
        flops = tuple((ahead * factor, back * factor) for ahead, back in self.flops)
        return replace(self, moments=moments, tokens=tokens, flops=flops)

    def above(self, num_bytes: int) -> ActivationTrace:
        """Return the trace beside so many bytes of other activations."""
        moments = tuple(
            replace(one, activations=one.activations + num_bytes) for one in self.moments
        )
        return replace(self, moments=moments)
