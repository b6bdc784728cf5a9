"""DeepSpeed's learning rate schedules, with its numbers.

A schedule counts optimizer steps from -1: building it writes the rate before the first step, the
first ``step()`` makes iteration 0. ``engine.step()`` steps it after each optimizer step that was
taken, never after a skipped one.

    WarmupLR         min + (max - min) * gamma(i), gamma = log(i + 1) / log(warmup) or i / warmup
    WarmupDecayLR    the same, then linearly down to 0 at total_num_steps
    WarmupCosineLR   the group's own rate * ratio(i), then half a cosine down to cos_min_ratio
    OneCycle         up and down between two rates (betas[0] the other way), then 1 / (1 + k * j)
    LRRangeTest      min * (1 + rate * (i + 1) / step_size)

They are not torch's LambdaLR, whose factor times a base rate rounds differently, and whose saved
state has other keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroshard import ConfigError

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_schedule",
]

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
_BETA2 = 0.99  # what OneCycle sets the second beta to
_FLAGS = ("lr_range_test_staircase", "cycle_momentum")
_POSITIVE = ("lr_range_test_step_size", "cycle_first_step_size")


class Schedule:
    """What all schedules share: the count, and the rates in the optimizer's param groups."""

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = _groups_of(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] = [group["lr"] for group in self.optimizer.param_groups]
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        """Return the rate of every param group at this iteration."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Return the rates that are in the optimizer."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on to the next iteration, or to the one given."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration; the rest comes from the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved iteration; its rates come with the optimizer's state."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _each(self, name: str, value: float | Sequence[float]) -> list[float]:
        """Return a rate per param group. Raises ConfigError for a list of another length."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [float(value)] * count  # type: ignore[arg-type]
        if len(value) != count:
            raise ConfigError(f"{name} has {len(value)} rates, the optimizer {count} param groups")
        return list(value)


class LRRangeTest(Schedule):
    """Raise the rate from `lr_range_test_min_lr` on, to find where training diverges."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = _groups_of(optimizer)
        self.min_lrs = self._each("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        if self.last_batch_iteration < 0:
            return self.min_lrs
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lrs]


class WarmupLR(Schedule):
    """Rise from `warmup_min_lr` to `warmup_max_lr` (default: the groups' own), and stay there."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = _groups_of(optimizer)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._each("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._each("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma(self.last_batch_iteration)
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * gamma for low, high in pairs]

    def _gamma(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return _warmed(iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rise as WarmupLR does, then fall linearly to zero at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _gamma(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._gamma(iteration)
        left = float(self.total_num_steps - iteration)
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """Rise to the groups' own rates, then fall with half a cosine to `cos_min_ratio` of them."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = _groups_of(optimizer)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the share of the groups' own rates at this iteration."""
        iteration, warmup = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0:
            return 0.0
        if iteration < warmup:
            rise = _warmed(iteration, warmup, self.warmup_type)
            return self.warmup_min_ratio + rise * (1.0 - self.warmup_min_ratio)
        done = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        half_cosine = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * half_cosine)


class OneCycle(Schedule):
    """One cycle up and down (betas[0] down and up), then a decay. See `_PARAMS` for its numbers."""

    _PARAMS: dict[str, Any] = {
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,  # None: as the first
        "cycle_first_stair_count": 0,  # 0: no stairs
        "cycle_second_stair_count": None,  # None: as the first
        "decay_step_size": 0,  # 0: no decay
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    }

    def __init__(
        self, optimizer: Any, cycle_min_lr: float, cycle_max_lr: float, **params: Any
    ) -> None:
        unknown = params.keys() - self._PARAMS.keys()
        if unknown:
            raise ConfigError(
                f"OneCycle has no parameter {sorted(unknown)[0]!r}: {', '.join(self._PARAMS)}"
            )
        p = self._PARAMS | params
        self.lrs = (cycle_min_lr, cycle_max_lr)
        self.moms = (p["cycle_min_mom"], p["cycle_max_mom"])
        first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
        self.sizes = (float(first), float(first if second is None else second))
        first, second = p["cycle_first_stair_count"], p["cycle_second_stair_count"]
        self.stairs = (first, first if second is None else second)
        self.decays = (p["decay_step_size"], p["decay_lr_rate"], p["decay_mom_rate"])
        inner = _groups_of(optimizer)
        self.cycle_momentum = p["cycle_momentum"] and "betas" in inner.defaults
        super().__init__(optimizer, p["last_batch_iteration"])

    def get_lr(self) -> list[float]:
        (low, high), (size, rate, _) = self.lrs, self.decays
        after = self._after_cycle()
        if after is None:
            lr = low + (high - low) * self._height()
        else:
            lr = low / (1 + rate * after / size) if size and rate else low
        return [lr] * len(self.optimizer.param_groups)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of every param group at this iteration; None where they stay."""
        if not self.cycle_momentum:
            return None
        (low, high), (size, _, rate) = self.moms, self.decays
        after = self._after_cycle()
        if self.last_batch_iteration < 0:
            mom = low
        elif after is None:
            mom = high - (high - low) * self._height()
        else:
            mom = high * (1 + rate * after / size) if size and rate else high
        return [(mom, _BETA2)] * len(self.optimizer.param_groups)

    def _write(self) -> None:
        super()._write()
        betas = self.get_mom()
        for group, pair in zip(self.optimizer.param_groups, betas or [], strict=False):
            group["betas"] = pair

    def _after_cycle(self) -> int | float | None:
        """Return how many iterations lie behind the cycle, None inside it."""
        if self.last_batch_iteration < sum(self.sizes):
            return None
        return self.last_batch_iteration - sum(self.sizes) + 1

    def _height(self) -> float:
        """Return where between low (0) and high (1) the cycle is."""
        total, iteration = sum(self.sizes), self.last_batch_iteration + 1
        ratio = self.sizes[0] / total
        place = 1.0 + iteration / total - math.floor(1 + iteration / total)
        height = place / ratio if place <= ratio else (place - 1) / (ratio - 1)
        # stairs count from the integers: the float at a corner may lie just below a stair
        at = iteration % total
        stairs = self.stairs[0] if place <= ratio else self.stairs[1]
        if stairs > 0:
            part = at / self.sizes[0] if at <= self.sizes[0] else (total - at) / self.sizes[1]
            height = math.floor(part * stairs) / stairs
        return height


def make_schedule(kind: str, params: dict[str, Any], optimizer: Any) -> Schedule:
    """Build the schedule of a configuration's ``scheduler`` section. Raises ConfigError."""
    kinds: dict[str, Callable[..., Schedule]] = {
        "LRRangeTest": LRRangeTest,
        "OneCycle": OneCycle,
        "WarmupLR": WarmupLR,
        "WarmupDecayLR": WarmupDecayLR,
        "WarmupCosineLR": WarmupCosineLR,
    }
    if kind not in kinds:
        raise ConfigError(f"scheduler.type={kind!r} is not one of {', '.join(VALID_LR_SCHEDULES)}")
    _check_params(params)
    try:
        return kinds[kind](optimizer, **params)
    except (TypeError, ValueError, ArithmeticError) as error:
        reason = str(error).partition("__init__() ")[2] or str(error)
        raise ConfigError(f"scheduler.params of {kind}: {reason}") from None


def _check_params(params: dict[str, Any]) -> None:
    """Raise ConfigError for a value that only a later step would stumble over."""
    for name, value in params.items():
        if name in ("warmup_type", *_FLAGS) or value is None:
            continue
        for one in value if isinstance(value, list | tuple) else (value,):
            if type(one) not in (int, float) or not math.isfinite(one):
                raise ConfigError(f"scheduler.params.{name}={value!r} is not a number")
        if name in _POSITIVE and not value > 0:
            raise ConfigError(f"scheduler.params.{name}={value!r} is not greater than 0")


def _groups_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer that is, or is wrapped in, `optimizer`."""
    for one in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(one, torch.optim.Optimizer):
            return one
    raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")


def _warmup_steps(steps: Any) -> int:
    if type(steps) is not int or steps <= 0:
        raise ConfigError(f"warmup_num_steps={steps!r} is not a positive number of steps")
    return max(2, steps)


def _warmup_type(kind: str) -> str:
    if kind not in ("log", "linear"):
        raise ConfigError(f"warmup_type={kind!r} is neither 'log' nor 'linear'")
    return kind


def _warmed(iteration: int, warmup: int, kind: str) -> float:
    """Return how far the warmup has come, from 0 on."""
    if kind == "log":
        return 1.0 / math.log(warmup) * math.log(iteration + 1)
    return iteration / warmup
