"""A plain ``loss.backward()`` with gradient accumulation: the gradients of the outputs are divided
by the number of micro-batches, as ``engine.backward(loss)`` divides the loss.

Where a forward returns several tensors and one is made from another (a loss and its logits), only
the outermost is divided: a tensor whose hook fires later in the same backward is left alone where
it is reached from one that was divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["PlainBackward"]


class PlainBackward:
    """Divides the gradients of outputs by ``steps()``, outside `paused`."""

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps = steps
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave gradients alone: the loss of this backward is divided already."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def watch(self, outputs: Any) -> None:
        """Divide the gradients of these tensors when a plain backward comes to them."""
        if self._steps() == 1 or not torch.is_grad_enabled():
            return
        leaves = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]
        tensors = [one for one in leaves if one.requires_grad and one.grad_fn is not None]
        divided: list[Any] = []  # the nodes of outputs that have been divided
        for tensor in tensors:
            tensor.register_hook(self._hook(tensor.grad_fn, divided))  # type: ignore[no-untyped-call]

    def _hook(self, node: Any, divided: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def divide(grad: torch.Tensor) -> torch.Tensor:
            if self._paused or any(one is not node and _reaches(one, node) for one in divided):
                return grad
            divided.append(node)
            return grad / self._steps()

        return divide


def _reaches(start: Any, target: Any) -> bool:
    """Whether `target` is among the nodes that `start` is made from."""
    seen, todo = set(), [start]
    while todo:
        node = todo.pop()
        if node is target:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return False
