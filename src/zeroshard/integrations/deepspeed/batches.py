"""DeepSpeed's three batch sizes, of which two give the third, and the counts of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard import ConfigError

__all__ = ["Batch", "Progress", "complete_batch"]

_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass
class Batch:
    """train = micro * steps * ranks."""

    train: int
    micro: int
    steps: int  # of gradient accumulation
    ranks: int

    def set_train(self, train: int) -> None:
        """Set the whole batch, and with it the accumulation. Raises ConfigError."""
        if train % (self.micro * self.ranks):
            raise ConfigError(
                f"train_batch_size={train} is no multiple of {self.micro} per rank x {self.ranks}"
                " ranks"
            )
        self.train, self.steps = train, train // (self.micro * self.ranks)

    def set_micro(self, micro: int) -> None:
        """Set the batch of one rank and backward, and with it the whole."""
        self.train, self.micro = micro * self.steps * self.ranks, micro


@dataclass
class Progress:
    """How far a training has come."""

    micro_steps: int = 0  # calls of step()
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    applied: bool = False  # whether the last step() moved the weights
    norm: torch.Tensor | None = None  # of the last step's gradient, before clipping

    def counts(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        names = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}


def complete_batch(config: Mapping[str, Any], ranks: int) -> Batch:
    """Return the batch sizes that `config` gives over `ranks`. Raises ConfigError.

    One of the two sizes is enough, with or without the accumulation, as in DeepSpeed.
    """
    given = (config.get(name) for name in _KEYS)
    train, micro, steps = (None if value == "auto" else value for value in given)
    for name, value in zip(_KEYS, (train, micro, steps), strict=True):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}={value!r} is not a positive number")
    if train is None and micro is None:
        raise ConfigError(
            "the configuration names neither train_batch_size nor train_micro_batch_size_per_gpu:"
            " give one of them"
        )
    if micro is None:
        assert train is not None
        steps = steps or 1
        micro = train // (steps * ranks)
    if steps is None:
        steps = 1 if train is None else train // (micro * ranks)
    if train is None:
        train = micro * steps * ranks
    if train != micro * steps * ranks or not train:
        raise ConfigError(
            f"train_batch_size={train} is not train_micro_batch_size_per_gpu={micro} x"
            f" gradient_accumulation_steps={steps} x {ranks} ranks"
        )
    return Batch(train, micro, steps, ranks)
