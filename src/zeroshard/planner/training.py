"""What is trained with, per GPU: precision, optimizer, batch."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.core.wire import Formats
from zeroshard.errors import ConfigError

__all__ = ["MOMENT_BYTES", "Training"]

MOMENT_BYTES = {"adam": 8, "momentum": 4, "sgd": 0}  # fp32 state per parameter
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Training:
    """One training run. Raises ConfigError for values that make no sense.

    `accumulate` is the dtype in which gradients rest ("fp32" or that of `precision`, which is the
    default and the papers' count; ``zs.shard`` alone takes fp32). `optimizer` is "adam" (AdamW
    alike), "momentum" (SGD with it) or "sgd". `batch` sequences of `sequence` tokens are one
    micro-batch of one GPU; `micro_batches` of them, all but the last inside ``no_sync()``, are a
    step. `checkpointing`: every block is recomputed in the backward.
    """

    precision: str = "bf16"
    accumulate: str | None = None
    optimizer: str = "adam"
    batch: int = 1
    sequence: int = 2048
    micro_batches: int = 1
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, tuple(MOMENT_BYTES)),
            ("accumulate", self.resting, tuple(dict.fromkeys(("fp32", self.precision)))),
        ):
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(choices)}")
        for name in ("batch", "sequence", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is less than one")

    @property
    def resting(self) -> str:
        """The dtype in which gradients rest."""
        return self.accumulate or self.precision

    @property
    def moment_bytes(self) -> int:
        """Bytes that the optimizer keeps per parameter beside the master."""
        return MOMENT_BYTES[self.optimizer]

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one GPU."""
        return self.batch * self.sequence

    def formats(self, dtype: str | None) -> Formats:
        """Return the formats of parameters that compute in `dtype` (None: the precision)."""
        compute = dtype or self.precision
        accumulate = "fp32" if self.resting == "fp32" else compute
        return Formats.of(compute, accumulate=accumulate)
