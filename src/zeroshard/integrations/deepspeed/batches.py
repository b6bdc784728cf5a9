"""DeepSpeed's three batch sizes, of which two give the third, and the counts of a training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard import Config, ConfigError

__all__ = ["Batch", "Progress", "complete_batch"]


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
    backwards: int = 0  # calls of backward() since the last step
    applied: bool = False  # whether the last step() moved the weights
    norm: torch.Tensor | None = None  # of the last step's gradient, before clipping

    def counts(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        names = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}


def complete_batch(settings: Config, ranks: int) -> Batch:
    """Return the batch sizes that `settings` give over `ranks`. Raises ConfigError.

    One of the two sizes is enough, with or without the accumulation, as in DeepSpeed.
    """
    sizes = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    if sizes == (None, None):
        raise ConfigError(
            "the configuration names neither train_batch_size nor train_micro_batch_size_per_gpu:"
            " give one of them"
        )
    if None in sizes and settings.gradient_accumulation_steps is None:
        settings = settings.model_copy(update={"gradient_accumulation_steps": 1})
    train, micro, steps = settings.batch_sizes(ranks)
    assert train is not None and micro is not None and steps is not None
    return Batch(train, micro, steps, ranks)
