"""The codecs that an engine sends through, and the errors of encoded gradients, which are kept.

Weights are encoded by the rank that owns them and decoded by all, the owner too, so that every rank
computes with the same numbers (qwZ: ZeRO++, arXiv 2306.10209, section 3.1); masters are never
encoded; weights that are not trained may rest so, too. Gradients are encoded before each hop of
their sum and added in fp32 (qgZ, section 3.3).

[Note: error feedback] What encoding takes from a gradient is kept per rank and added to the next
one (LoCo, arXiv 2407.04480, algorithm 1)::

    h = gradient + e
    sent = encode(h)
    e = (1 - beta) * e + beta * (h - decode(sent))        # and 0 every `reset` sums

Without it the same small values vanish in every step. Cost: two bytes (bf16) per element of every
trained parameter on every rank, one decoding more per reduce. It is the error of this rank's first
hop; what encoding a node's sum loses is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.core.layout import ALIGN
from zeroshard.core.wire import BlockCodec


@dataclass(frozen=True)
class Feedback:
    """The share of each new error that is taken over, and the number of sums after which all of
    it is forgotten (None: never).
    """

    beta: float = 0.8
    reset: int | None = 1024


@dataclass(frozen=True)
class Codecs:
    """The codecs of weights and gradients; None: they travel as they are."""

    weight: BlockCodec | None = None
    grad: BlockCodec | None = None
    frozen: BlockCodec | None = None  # in which weights that are not trained rest, too
    feedback: Feedback | None = None

    @property
    def align(self) -> int:
        """Shares must be cut on multiples of this many elements."""
        return max(
            [
                ALIGN,
                *(
                    codec.block
                    for codec in (self.weight, self.grad, self.frozen)
                    if codec is not None
                ),
            ]
        )

    def residual(self, codec: BlockCodec | None) -> Residual | None:
        """Return what keeps the error of gradients that `codec` encodes, where errors are kept."""
        return None if codec is None or self.feedback is None else Residual(self.feedback)


class Residual:
    """The error of one segment's encoded gradients on this rank. See [Note: error feedback]."""

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._error: torch.Tensor | None = None  # [numel] bf16
        self._sums = 0

    @property
    def num_bytes(self) -> int:
        return 0 if self._error is None else self._error.numel() * self._error.element_size()

    def encode(self, codec: BlockCodec, gradient: torch.Tensor, out: torch.Tensor) -> None:
        """Encode `gradient` [n] plus the error into `out`, and keep the new error. `gradient` is
        overwritten.
        """
        if (
            self._feedback.reset is not None
            and self._sums
            and self._sums % self._feedback.reset == 0
        ):
            self._error = None
        self._sums += 1
        if self._error is not None:
            gradient.add_(self._error)
        codec.encode(gradient, out)
        lost = torch.empty(gradient.numel(), dtype=torch.float32, device=gradient.device)
        codec.decode(out, lost)
        torch.sub(gradient, lost, out=lost)
        lost.nan_to_num_(0.0, 0.0, 0.0)  # an overflow skips its step; it must not stay
        beta = self._feedback.beta
        if self._error is None:
            self._error = lost.mul_(beta).to(torch.bfloat16)
        else:
            self._error.copy_(lost.mul_(beta).add_(self._error, alpha=1 - beta))

    def reset(self) -> None:
        """Start anew: weights were loaded, or an exception ended a step."""
        self._error = None
