"""DeepSpeed's three batch sizes, of which two give the third; the counts of a training; and the
errors of values that torch does not take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zeroshard import Config, ConfigError

__all__ = ["Batch", "Progress", "as_config_error", "complete_batch"]


@dataclass
class Batch:
    """train = micro * steps * ranks."""

    train: int
    micro: int
    steps: int  # of gradient accumulation
    ranks: int

    def set_train(self, train_batch_size: int) -> None:
        """Set the whole batch, and with it the accumulation. Raises ConfigError."""
        steps, rest = divmod(train_batch_size, self.micro * self.ranks)
        if rest:
            raise ConfigError(
                f"train_batch_size={train_batch_size} is no multiple of {self.micro} per rank x"
                f" {self.ranks} ranks"
            )
        self.train, self.steps = train_batch_size, steps

    def set_micro(self, micro_batch_size: int) -> None:
        """Set the batch of one rank and backward, and with it the whole."""
        self.train, self.micro = micro_batch_size * self.steps * self.ranks, micro_batch_size


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


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Raise what torch says of values that it does not take as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).partition("__init__() ")[2] or str(error) or type(error).__name__
        raise ConfigError(f"{what}: {reason}") from None
