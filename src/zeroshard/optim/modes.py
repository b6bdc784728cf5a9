"""Optimizers with modes: ``optimizer.train()`` and ``optimizer.eval()``.

Schedule-free optimizers (Defazio et al., The Road Less Scheduled, 2024) train at one point and
evaluate at another, an average of where they have been. Their ``eval()`` moves the parameters
there, and ``train()`` back, each element by itself. Here these parameters are shards of the
masters, so the weights have to follow, on every rank, as after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

_NAMES = ("train", "eval")


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class of `optimizer` has both ``train()`` and ``eval()``."""
    return all(callable(getattr(type(optimizer), name, None)) for name in _NAMES)


def hide_modes(
    optimizer: torch.optim.Optimizer, moving: Callable[[str], AbstractContextManager[None]]
) -> Iterator[Mode]:
    """Hide ``train()`` and ``eval()``, where there are both, by ones that run inside ``moving``,
    which is given the call in words.
    """
    if has_modes(optimizer):
        for name in _NAMES:
            yield Mode(optimizer, name, moving)


class Mode:
    """An entry in an optimizer's instance dictionary that hides a method until it is removed."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str,
        moving: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._optimizer, self._name, self._moving = optimizer, name, moving
        self._own = vars(optimizer).get(name)
        self._method = getattr(optimizer, name)
        vars(optimizer)[name] = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with self._moving(f"optimizer.{self._name}()"):
            return self._method(*arguments, **options)

    def remove(self) -> None:
        """Let the optimizer's own method be seen again."""
        del vars(self._optimizer)[self._name]
        if self._own is not None:
            vars(self._optimizer)[self._name] = self._own
