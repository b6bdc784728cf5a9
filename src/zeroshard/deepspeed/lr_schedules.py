"""DeepSpeed's learning rate schedules, with its numbers.

A schedule counts optimizer steps from -1: building it writes the rate before the first step, the
first ``step()`` makes iteration 0. ``engine.step()`` steps it after each optimizer step that was
taken, never after a skipped one.

    WarmupLR         min + (max - min) * gamma(i), gamma = log(i + 1) / log(warmup) or i / warmup
    WarmupDecayLR    the same, then linearly down to 0 at total_num_steps
    WarmupCosineLR   the group's own rate * ratio(i), then half a cosine down to cos_min_ratio
    OneCycle         up and down between two rates (betas[0] the other way), then 1 / (1 + k * j)
    LRRangeTest      min * (1 + rate * (i + 1) / step_size)

Other names come from torch.optim.lr_scheduler. DeepSpeed's are not torch's LambdaLR: its factor
times a base rate rounds differently, and its saved state has other keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from zeroshard import ConfigError
from zeroshard.deepspeed.answers import torch_class
from zeroshard.deepspeed.shim import CONSTANTS

_BETA2 = 0.99  # what OneCycle sets the second beta to
_NO_NUMBERS = ("warmup_type", "lr_range_test_staircase", "cycle_momentum")
_POSITIVE = ("lr_range_test_step_size", "cycle_first_step_size")
_NOT_NEGATIVE = ("cycle_second_step_size",)
Rates = float | Sequence[float]


class LRSchedule:
    """A schedule: it counts steps and writes the rates of the optimizer's param groups. Its
    parameters are the fields of its class.
    """

    optimizer: Any
    last_batch_iteration: int

    def __post_init__(self) -> None:
        _check_params({name: one for name, one in vars(self).items() if name != "optimizer"})
        if not isinstance(self.optimizer, torch.optim.Optimizer):  # one may be wrapped
            inner = getattr(self.optimizer, "optimizer", None)
            if not isinstance(inner, torch.optim.Optimizer):
                name = type(self.optimizer).__name__
                raise TypeError(f"{name} is not a torch.optim.Optimizer")
            self.optimizer = inner
        self._prepare()
        if self.last_batch_iteration == -1:
            self._write()

    def _prepare(self) -> None:
        """Check the parameters, and make of them what the rates are computed from."""

    def get_lr(self) -> list[float]:
        """Return the rate of every param group at this iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Return the rates that are in the optimizer."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next iteration, or to the one given."""
        self.last_batch_iteration += 1
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration
        self._write()

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration; the rest comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved iteration; its rates come with the optimizer's state."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _each(self, name: str, value: Rates) -> list[float]:
        """Return a rate per param group. Raises ConfigError for a list of another length."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [float(value)] * count  # type: ignore[arg-type]
        if len(value) != count:
            raise ConfigError(f"{name} has {len(value)} rates, the optimizer {count} param groups")
        return list(map(float, value))


@dataclass(eq=False)
class LRRangeTest(LRSchedule):
    """Raise the rate from `lr_range_test_min_lr` on, to find where training diverges."""

    optimizer: Any
    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        self.min_lrs = self._each("lr_range_test_min_lr", self.lr_range_test_min_lr)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        if self.last_batch_iteration < 0:
            return self.min_lrs
        return [rate * (1 + self.lr_range_test_step_rate * interval) for rate in self.min_lrs]


class Warmup(LRSchedule):
    """Schedules that begin with a warmup."""

    warmup_num_steps: int
    warmup_type: str

    def _prepare(self) -> None:
        steps, kind = self.warmup_num_steps, self.warmup_type
        if type(steps) is not int or steps < 0:
            raise ConfigError(f"warmup_num_steps={steps!r} is not a number of steps")
        if kind not in ("log", "linear"):
            raise ConfigError(f"warmup_type={kind!r} is neither 'log' nor 'linear'")
        self.warmup_num_steps = max(2, steps)

    def _warmed(self) -> float:
        """Return how far the warmup has come, from 0 on."""
        iteration, warmup = self.last_batch_iteration, self.warmup_num_steps
        if self.warmup_type == "log":
            return 1.0 / math.log(warmup) * math.log(iteration + 1)
        return iteration / warmup


@dataclass(eq=False)
class WarmupLR(Warmup):
    """Rise from `warmup_min_lr` to `warmup_max_lr` (default: the groups' own), and stay there."""

    optimizer: Any
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        highest = self.get_last_lr() if self.warmup_max_lr is None else self.warmup_max_lr
        self.min_lrs = self._each("warmup_min_lr", self.warmup_min_lr)
        self.max_lrs = self._each("warmup_max_lr", highest)
        super()._prepare()

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        rises = self.last_batch_iteration < self.warmup_num_steps
        gamma = self._warmed() if rises else self._after_warmup()
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * gamma for low, high in pairs]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rise as WarmupLR does, then fall linearly to zero at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        *args: Any,
        **params: Any,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, *args, **params)

    def _after_warmup(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


@dataclass(eq=False)
class WarmupCosineLR(Warmup):
    """Rise to the groups' own rates, then fall with half a cosine to `cos_min_ratio` of them."""

    optimizer: Any
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        super()._prepare()
        self.org_lrs = list(map(float, self.get_last_lr()))

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the share of the groups' own rates at this iteration."""
        iteration, warmup = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0:
            return 0.0
        if iteration < warmup:
            return self.warmup_min_ratio + self._warmed() * (1.0 - self.warmup_min_ratio)
        done = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        half_cosine = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * half_cosine)


@dataclass(eq=False)
class OneCycle(LRSchedule):
    """One cycle up and down (betas[0] down and up), then a decay."""

    optimizer: Any
    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None  # None: as the first
    cycle_first_stair_count: int = 0  # 0: no stairs
    cycle_second_stair_count: int | None = None  # None: as the first
    decay_step_size: int = 0  # 0: no decay
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        second, stairs = self.cycle_second_step_size, self.cycle_second_stair_count
        self.first_step_size = float(self.cycle_first_step_size)
        self.second_step_size = self.first_step_size if second is None else float(second)
        self.first_stair_count = self.cycle_first_stair_count
        self.second_stair_count = self.first_stair_count if stairs is None else stairs
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.min_lrs = self._each("cycle_min_lr", self.cycle_min_lr)
        self.max_lrs = self._each("cycle_max_lr", self.cycle_max_lr)
        self.cycle_momentum = self.cycle_momentum and "betas" in self.optimizer.defaults
        if self.cycle_momentum:
            self.min_moms = self._each("cycle_min_mom", self.cycle_min_mom)
            self.max_moms = self._each("cycle_max_mom", self.cycle_max_mom)

    def get_lr(self) -> list[float]:
        after = self._after_cycle()
        if after is not None:
            return [low / (1 + self._decay(self.decay_lr_rate, after)) for low in self.min_lrs]
        height, pairs = self._height(), zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * height for low, high in pairs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of every param group at this iteration; None where they stay. Before the
        first one these are the highest, and the optimizer has the lowest, as in DeepSpeed.
        """
        if not self.cycle_momentum:
            return None
        after = self._after_cycle()
        if after is not None:
            factor = 1 + self._decay(self.decay_mom_rate, after)
            return [(high * factor, _BETA2) for high in self.max_moms]
        height, pairs = self._height(), zip(self.min_moms, self.max_moms, strict=True)
        return [(high - (high - low) * height, _BETA2) for low, high in pairs]

    def _write(self) -> None:
        super()._write()
        betas = self.get_mom()
        if betas is not None and self.last_batch_iteration < 0:
            betas = [(low, _BETA2) for low in self.min_moms]
        for group, pair in zip(self.optimizer.param_groups, betas or [], strict=False):
            group["betas"] = pair

    def _after_cycle(self) -> float | None:
        """Return how many iterations lie behind the cycle, None inside it."""
        total, iteration = self.total_size, self.last_batch_iteration
        return None if iteration < total else iteration - total + 1

    def _decay(self, rate: float, after: float) -> float:
        return rate * (after / self.decay_step_size) if self.decay_step_size else 0.0

    def _height(self) -> float:
        """Return where between low (0) and high (1) the cycle is."""
        total, ratio, iteration = self.total_size, self.step_ratio, self.last_batch_iteration + 1
        place = 1.0 + iteration / total - math.floor(1 + iteration / total)
        rises = place <= ratio
        # stairs count from the integers: the float at a corner may lie just below a stair
        at = iteration % total
        stairs = self.first_stair_count if rises else self.second_stair_count
        if stairs > 0:
            here, size = at, self.first_step_size
            if at > size:
                here, size = total - at, self.second_step_size
            return math.floor(here * stairs / size) / stairs
        return place / ratio if rises else (place - 1) / (ratio - 1)


_KINDS: dict[str, Callable[..., LRSchedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_KINDS)
# WARMUP_LR is "WarmupLR", WARMUP_MAX_LR "warmup_max_lr": kinds and parameters under constants
_NAMED = {
    "LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear",
}  # fmt: skip


def __getattr__(name: str) -> str:
    if name not in CONSTANTS.split():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _NAMED.get(name, name.lower())


def make_schedule(kind: str, params: dict[str, Any], optimizer: Any) -> Any:
    """Build the schedule of a configuration's ``scheduler`` section: one of DeepSpeed's, else
    torch's of that name. Raises ConfigError.
    """
    schedules = torch.optim.lr_scheduler
    make = _KINDS.get(kind) or torch_class(
        schedules, schedules.LRScheduler, f"scheduler.type={kind!r}", kind, _KINDS
    )
    try:
        return make(optimizer, **params)
    except (TypeError, ValueError, ArithmeticError) as error:
        reason = str(error).partition("__init__() ")[2] or str(error)
        raise ConfigError(f"scheduler.params of {kind}: {reason}") from None


def _check_params(params: dict[str, Any]) -> None:
    """Raise ConfigError for a value that only a later step would stumble over."""
    for name, value in params.items():
        if name in _NO_NUMBERS or value is None:
            continue
        for one in value if isinstance(value, list | tuple) else (value,):
            is_number = isinstance(one, Real | torch.Tensor) and not isinstance(one, bool)
            if not is_number or not math.isfinite(one):
                raise ConfigError(f"{name}={value!r} is not a number")
        if name in _POSITIVE and not value > 0:
            raise ConfigError(f"{name}={value!r} is not greater than 0")
        if name in _NOT_NEGATIVE and not value >= 0:
            raise ConfigError(f"{name}={value!r} is less than 0")
