"""Mixed precision: the dtype of each state of a trained parameter, and the loss scale of fp16.

Mixed precision training (Micikevicius et al., 2018) keeps an fp32 master beside half-precision
weights; ZeRO, section 3.1, counts its bytes: 2 (weight) + 4 (master) + 8 (Adam's moments), and the
gradient. In fp32 the weight, or this rank's slice of it, *is* the master.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch

from zeroshard.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype called "fp32", "bf16" or "fp16". Raises ValueError."""
    if isinstance(name, torch.dtype):
        name = _NAMES.get(name, str(name))
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of `dtype` ("fp32"), or torch's own."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Precision:
    """The dtypes of one training run; each may be given as a dtype or by its short name.

    compute: weights, activations and gradients as autograd makes them. reduce: gradients on the
    wire (default: compute). accumulate: gradients at rest, fp32 or compute. master: what the
    optimizer steps.
    """

    compute: torch.dtype = torch.float32
    reduce: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    master: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "accumulate", "master"):
            value = getattr(self, name)
            object.__setattr__(self, name, self.compute if value is None else parse_dtype(value))
        if self.master is not torch.float32:
            raise ValueError(
                f"master={dtype_name(self.master)!r} is not supported: the optimizer steps fp32"
                " masters"
            )
        if self.accumulate not in (torch.float32, self.compute):
            raise ValueError(
                f"accumulate={dtype_name(self.accumulate)!r} must be 'fp32' or the compute dtype"
                f" {dtype_name(self.compute)!r}"
            )

    @property
    def wire(self) -> torch.dtype:
        """The dtype of gradients on the wire."""
        assert self.reduce is not None
        return self.reduce

    def at(self, compute: torch.dtype) -> Precision:
        """Return these dtypes for a parameter that computes in `compute` instead."""
        reduce = compute if self.reduce is self.compute else self.reduce
        accumulate = torch.float32 if self.accumulate is torch.float32 else compute
        return replace(self, compute=compute, reduce=reduce, accumulate=accumulate)

    @property
    def weight_is_master(self) -> bool:
        """Whether the optimizer steps the weights themselves, without a second copy."""
        return self.compute is self.master

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether small gradients would underflow (fp16)."""
        return self.compute is torch.float16

    def describe(self) -> str:
        """Return the four dtypes in one line."""
        return ", ".join(f"{name}={dtype_name(dtype)}" for name, dtype in vars(self).items())


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}


# ------------------------------------------------------------------------------------- loss scaling
# When to grow the scale and when to back off (Micikevicius et al., section 3.2): the loss is
# multiplied by ``scale`` so that small gradients survive fp16; a step with gradients that
# overflowed is skipped and the scale shrinks; after many good steps in a row it grows::
#
#     interval = 3    step      ok    ok    ok    over  ok    ok    ok
#                     scale     8     8     8     16    8     8     8     16
#                     streak    1     2     0     0     1     2     0
#
# Invariant: every rank calls ``update`` with the same answer, so every rank holds the same scale
# (the overflow must be agreed on before). The arithmetic is torch.amp.GradScaler's, in Python
# floats: powers of two stay exact, so scaling changes no bit that does not overflow. Nothing here
# looks at gradients, skips steps, or talks to other ranks.

_MOVES = ("scale", "streak", "num_skipped", "overflows")


@dataclass
class LossScaler:
    """The state machine. Construct it with other numbers to start or move differently; what moves
    is saved.

    With `hysteresis` n the scale outlasts n - 1 overflows, counted since it last grew (with
    `consecutive_hysteresis`: since the last good step), as DeepSpeed's does.
    """

    scale: float = 2.0**16  # what the loss of the next step is multiplied by
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000  # good steps in a row before the scale grows
    min_scale: float = 1.0
    # a loss that is constant zero would grow the scale to infinity, and there is no way back from
    # there
    max_scale: float = 2.0**32
    dynamic: bool = True
    hysteresis: int = 1  # overflows that shrink the scale
    consecutive_hysteresis: bool = False
    overflows: int = 0  # of `hysteresis`
    streak: int = 0  # good steps since the scale last changed
    num_skipped: int = 0  # overflows since the last good step

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.scale <= self.max_scale < math.inf:
            raise ConfigError(
                f"loss scale {self.scale} must lie between min_scale={self.min_scale} > 0 and"
                f" max_scale={self.max_scale}"
            )
        if not (self.growth_factor > 1 > self.backoff_factor > 0) or self.growth_interval < 1:
            raise ConfigError(
                f"a loss scale must grow and back off: growth_factor={self.growth_factor} > 1 >"
                f" backoff_factor={self.backoff_factor} > 0 and"
                f" growth_interval={self.growth_interval} >= 1"
            )

    @property
    def at_floor(self) -> bool:
        """Whether the last step overflowed and the scale cannot shrink any more; twice in a row
        means that the training has diverged.
        """
        stays = not self.dynamic or self.scale == self.min_scale
        return self.num_skipped > 0 and stays

    def update(self, overflow: bool) -> None:
        """Move to the next step's scale; `overflow` says that some rank's gradients held an inf
        or NaN.
        """
        if overflow:
            self.streak = 0
            self.num_skipped += 1
            self.overflows = min(self.overflows + 1, self.hysteresis)
            if self.dynamic and self.overflows == self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.num_skipped = 0
        self.streak += 1
        if self.consecutive_hysteresis:
            self.overflows = 0
        if self.streak == self.growth_interval:
            self.streak = self.overflows = 0
            if self.dynamic:
                self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what moves, numbers only."""
        return {name: getattr(self, name) for name in _MOVES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or returned when it held all numbers. A scale that
        does not move stays.

        Raises ConfigError, and changes nothing, when keys or numbers are not a scaler's.
        """
        known = {item.name for item in fields(self)}
        odd = (state.keys() - known) | (set(_MOVES) - {"overflows"} - state.keys())
        if odd:
            names = ", ".join(repr(key) for key in sorted(map(str, odd)))
            raise ConfigError(f"this is not the state of a loss scaler: {names} missing or unknown")
        moved = {name: state[name] for name in _MOVES if name in state}
        loaded = replace(self, **moved)
        vars(self).update(vars(loaded) if self.dynamic else vars(loaded) | {"scale": self.scale})
