"""The keys of DeepSpeed's that become options of ours, each as a function of its value and of all
values of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard.config.deepspeed.rows import Lower
from zeroshard.errors import ConfigError

__all__ = [
    "clipping", "device", "feedback", "half", "hpz", "mics", "option", "path", "quantized", "ratio",
    "stage",
]  # fmt: skip

_ZERO = "zero_optimization"
TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}
Values = Mapping[str, Any]


def option(name: str) -> Lower:
    """Take the value as our option `name`."""
    return lambda value, values: {name: int(value) if value == int(value) else value}


def clipping(value: Any, values: Values) -> dict[str, Any]:
    """The norm that a step clips to; 0 switches clipping off."""
    return {"gradient_clipping": value} if value else {}


def stage(value: Any, values: Values) -> dict[str, Any]:
    """The stage; true is an old form of stage 1. hpZ and MiCS are rows of their own."""
    return {} if _row(values) else {"stage": int(value)}


def _row(values: Values) -> str:
    sizes = {"hpz": "zero_hpz_partition_size", "mics": "mics_shard_size"}
    rows = [row for row, key in sizes.items() if values[f"{_ZERO}.{key}"] not in (1, -1)]
    return rows[0] if len(rows) == 1 else ""


def _needs_stage_3(values: Values) -> None:
    if values[f"{_ZERO}.stage"] != 3:
        raise ConfigError(f"ZeRO++ and MiCS are stage 3, not {values[f'{_ZERO}.stage']!r}")


def _node(row: str, size: int, other: Any, values: Values) -> dict[str, Any]:
    if size in (1, -1):
        return {}
    if other not in (1, -1):
        raise ConfigError(
            "zero_hpz_partition_size and mics_shard_size are both set: leave out one of them"
        )
    _needs_stage_3(values)
    return {"policy": row, "comm.node_size": int(size)}


def hpz(value: Any, values: Values) -> dict[str, Any]:
    """The ranks that keep a second shard of the weights between forward and backward."""
    return _node("hpz", value, values[f"{_ZERO}.mics_shard_size"], values)


def mics(value: Any, values: Values) -> dict[str, Any]:
    """The ranks that together hold all states."""
    return _node("mics", value, values[f"{_ZERO}.zero_hpz_partition_size"], values)


def quantized(setting: str, codec: str) -> Lower:
    """Encode with `codec` what our option `setting` names."""

    def lower(value: Any, values: Values) -> dict[str, Any]:
        if not value:
            return {}
        _needs_stage_3(values)
        return {setting: codec}

    return lower


def feedback(setting: str) -> Lower:
    """A number of LoCo's error feedback, which encoded gradients have."""

    def lower(value: Any, values: Values) -> dict[str, Any]:
        if not values[f"{_ZERO}.zero_quantized_gradients"]:
            raise ConfigError("it has no effect without zero_quantized_gradients: leave it out")
        return {f"comm.error_feedback.{setting}": value}

    return lower


def device(section: str, state: str) -> Lower:
    """The tier of a state. With the optimizer's state on the host gradients go there, too."""

    def lower(value: Any, values: Values) -> dict[str, Any]:
        if TIERS[value] == "device":
            return {}
        out = {f"offload.{state}": TIERS[value]}
        if value == "nvme" and values[f"{_ZERO}.{section}.nvme_path"] is None:
            raise ConfigError("it needs nvme_path, a directory on a local disk")
        if state == "optimizer" and values[f"{_ZERO}.stage"] in (2, 3):
            out["offload.grad"] = "host"
        return out

    return lower


def path(section: str, other: str) -> Lower:
    """The directory of what rests on disk: one for all states."""

    def lower(value: Any, values: Values) -> dict[str, Any]:
        if values[f"{_ZERO}.{section}.device"] != "nvme":
            return {}
        theirs = values[f"{_ZERO}.{other}.nvme_path"]
        if values[f"{_ZERO}.{other}.device"] == "nvme" and theirs not in (None, value):
            raise ConfigError(f"{other} names another directory, {theirs!r}: name one for both")
        return {"offload.disk_path": value}

    return lower


def ratio(value: Any, values: Values) -> dict[str, Any]:
    """The share of the optimizer's state, and of gradients beside it, that leaves the device."""
    if not 0 <= value <= 1:
        raise ConfigError("it is not in [0, 1]")
    if values[f"{_ZERO}.offload_optimizer.device"] == "none" or value == 1:
        return {}
    states = ["optimizer", *(["grad"] if values[f"{_ZERO}.stage"] in (2, 3) else [])]
    return {f"offload.fraction.{state}": value for state in states}


def half(name: str, others: tuple[str, ...]) -> Lower:
    """bf16 or fp16: one of them."""

    def lower(value: Any, values: Values) -> dict[str, Any]:
        if not value:
            return {}
        if any(values[f"{other}.enabled"] for other in others):
            raise ConfigError("bf16 and fp16 are both enabled: one of them decides")
        return {"precision": name}

    return lower
