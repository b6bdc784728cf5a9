"""The weight of a backward's loss in its step: ``engine.backward(loss, weight=n)``, and
``batch_shares``.

Of means over n_1, n_2, ... samples with gradients g_1, g_2, ... the mean over all samples has::

    (n_1 g_1 + n_2 g_2 + ...) / (n_1 + n_2 + ...)          over ranks and micro-batches

The loss is multiplied, before its backward: where autograd crosses ranks (experts, context
parallelism, gathered features, SyncBatchNorm) the gradient that arrives in a parameter comes from
the losses of several ranks, each with its own weight. The quotient is formed once all ranks have
told their weights (finalize.py).

Invariant: a loss that counts 0 brings zeros, whatever its numbers are, and its graph runs, in which
other ranks may wait (docs/design/weights-of-losses.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import ConfigError
from zeroshard.optim.scaler import LossScaler
from zeroshard.runtime.backward import Backward


@contextmanager
def weighed(
    backward: Backward,
    scaler: LossScaler | None,
    loss: torch.Tensor,
    weight: float | torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Run the backward of `loss` inside, which counts `weight` (0-d of a tensor; None: the share of
    this rank). Yields the loss to call ``backward()`` of. Raises ConfigError for a weight where
    ranks are summed up.
    """
    if weight is not None:
        if backward.sums_ranks:
            raise ConfigError(
                "backward(weight=) forms a mean over all ranks, and gradient_reduction='sum' their"
                " sum: leave weight out and multiply the loss, or take gradient_reduction='mean'"
            )
        weight = _in_dtype(float(weight), loss.dtype)
    counts = backward.share if weight is None else weight
    scaled = loss if scaler is None else loss.float() * scaler.scale
    if counts is not None:
        scaled = scaled * counts
    # to which the gradients of the loss are added
    scale = 1.0 if scaler is None else scaler.scale
    backward.parameters.scale_assigned(scale if counts is None else scale * counts)
    silenced = silence([scaled.grad_fn]) if counts == 0 else []
    try:
        with backward.running_as(has_loss=True, scaled=scaler is not None, weight=weight):
            yield scaled
    finally:
        for handle in silenced:
            handle.remove()


def _in_dtype(weight: float, dtype: torch.dtype) -> float:
    """Return `weight` with as many digits as numbers of `dtype` have: autograd rounds it so, and it
    shall count as much in the sum of all weights.
    """
    digits, power = math.frexp(weight)
    return math.ldexp(float(torch.tensor(digits, dtype=dtype)), power)


def silence(nodes: Iterable[Any]) -> list[RemovableHandle]:
    """Let all operators between `nodes` and the leaves make zeros of zeros, where 0 x NaN and 0 / 0
    would be NaN: the mean over no token is. Return the hooks that do so.

    Functions of other code are left alone: gradients of other ranks may come out of them.
    """
    handles, seen, todo = [], set[Any](), list(nodes)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(after for after, _ in node.next_functions)
        if not isinstance(node, BackwardCFunction) and "::" not in node.name():
            handles.append(node.register_hook(_zeros_of_zeros))
    return handles


def _zeros_of_zeros(
    grads: tuple[torch.Tensor | None, ...], arrived: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...] | None:
    """Return the `grads` that an operator has made of those that have `arrived`, zeros where all of
    these are. The host waits only where an operator copies to another device.
    """
    there = [grad for grad in arrived if grad is not None]
    if not there or not all(  # in one block here
        type(grad) is torch.Tensor and grad.layout is torch.strided and not grad.is_nested
        for grad in (*there, *grads)
        if grad is not None
    ):
        return None
    device = there[0].device
    nothing = torch.stack([grad.count_nonzero().to(device) for grad in there]).sum() == 0
    return tuple(
        None if grad is None else torch.where(nothing.to(grad.device), 0.0, grad) for grad in grads
    )
