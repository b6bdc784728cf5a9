"""What a backward counts in its step: ``engine.backward(loss, weight=n)``.

Of means over n_1, n_2, ... samples with gradients g_1, g_2, ... the mean over all samples has::

    (n_1 g_1 + n_2 g_2 + ...) / (n_1 + n_2 + ...)          over ranks and micro-batches

Each product is formed where a gradient enters its buffer (bucket.py), the sum as any other, and the
quotient once all ranks have told their weights (finalize.py). In fp16 the power of two in a weight
goes to the loss, as the loss scale does, so that gradients of activations keep their range.

Invariant: a product is rounded once (docs/design/weights-of-losses.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zeroshard.optim.scaler import LossScaler
from zeroshard.runtime.backward import Backward

__all__ = ["weighed"]


@contextmanager
def weighed(
    backward: Backward, scaler: LossScaler | None, weight: float | torch.Tensor | None
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Run backwards of losses that count `weight` (0-d of a tensor; None: as all others of their
    rank) inside. Yields the function that gives the loss to call ``backward()`` of.
    """
    scale = 1.0 if scaler is None else scaler.scale
    changes: dict[str, float] = {}
    if weight is not None:
        weight = float(weight)
        power = 1.0 if scaler is None else _power_of_two(weight)
        scale *= power
        changes = {"weight": weight, "factor": weight / power}

    def scaled(loss: torch.Tensor) -> torch.Tensor:
        return loss if scaler is None else loss.float() * scale

    with backward.running_as(scaled=scaler is not None, **changes):
        yield scaled


def _power_of_two(weight: float) -> float:
    """Return the largest power of two that is at most `weight`, 1 where there is none."""
    if not 0.0 < weight < math.inf:
        return 1.0
    return math.ldexp(1.0, math.frexp(weight)[1] - 1)
