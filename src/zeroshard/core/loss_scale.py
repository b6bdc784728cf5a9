"""The loss scale of fp16: when it grows and when it backs off.

Mixed precision training (Micikevicius et al., 2018), section 3.2: the loss is multiplied by
``scale`` so that small gradients survive fp16; a step with gradients that overflowed is skipped and
the scale shrinks; after many good steps in a row it grows::

    interval = 3    step      ok    ok    ok    over  ok    ok    ok
                    scale     8     8     8     16    8     8     8     16
                    streak    1     2     0     0     1     2     0

Invariant: every rank calls ``update`` with the same answer, so every rank holds the same scale
(the overflow must be agreed on before). The arithmetic is torch.amp.GradScaler's, in Python
floats: powers of two stay exact, so scaling changes no bit that does not overflow. Nothing here
looks at gradients, skips steps, or talks to other ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from zeroshard.errors import ConfigError

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
