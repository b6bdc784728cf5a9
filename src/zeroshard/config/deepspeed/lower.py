"""The keys of DeepSpeed's that become options of ours, each as a function of its value and of all
values of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard.config.deepspeed.rows import Lower
from zeroshard.errors import ConfigError

__all__ = [
    "TIERS", "clipping", "device", "dtype", "feedback", "first_scale", "half", "hpz", "mics",
    "moving", "option", "path", "quantized", "ratio", "stage", "static_scale",
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
            raise ConfigError("has no effect without zero_quantized_gradients: leave it out")
        return {f"comm.error_feedback.{setting}": value}

    return lower


def device(section: str, state: str) -> Lower:
    """The tier of a state; true and false are an older form of cpu and none. With the optimizer's
    state gradients leave the device, for the host.
    """

    def lower(value: Any, values: Values) -> dict[str, Any]:
        tier = TIERS.get(value, "host" if value is True else "device")
        if tier == "device":
            return {}
        if value == "nvme" and values[f"{_ZERO}.{section}.nvme_path"] is None:
            raise ConfigError("needs nvme_path, a directory on a local disk")
        grad = state == "optimizer" and values[f"{_ZERO}.stage"] in (2, 3)
        return {f"offload.{state}": tier, **({"offload.grad": "host"} if grad else {})}

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
        raise ConfigError("is not in [0, 1]")
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
        alone = all(values[key] in (None, usual[name]) for key, usual in _USUAL.items())
        return {"precision" if alone else "precision.compute": name}

    return lower


# the dtypes that are ours anyway, by compute dtype
_USUAL = {
    "communication_data_type": {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"},
    "data_types.grad_accum_dtype": {"fp32": "fp32", "bf16": "fp32", "fp16": "fp32"},
}


def _compute(values: Values) -> str:
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    return next((name for key, name in names.items() if values[f"{key}.enabled"]), "fp32")


def dtype(state: str) -> Lower:
    """The dtype of gradients on the wire ("reduce") or at rest ("accumulate")."""
    key = "communication_data_type" if state == "reduce" else "data_types.grad_accum_dtype"

    def lower(value: Any, values: Values) -> dict[str, Any]:
        compute = _compute(values)
        if state == "accumulate" and value not in ("fp32", compute):
            raise ConfigError(f"gradients rest in fp32 or in the compute dtype, {compute}")
        return {} if value == _USUAL[key][compute] else {f"precision.{state}": value}

    return lower


def static_scale(value: Any, values: Values) -> dict[str, Any]:
    """The scale of every step; 0 for one that moves."""
    return {"loss_scale.initial": float(value), "loss_scale.dynamic": False} if value else {}


def first_scale(value: Any, values: Values) -> dict[str, Any]:
    """The first scale that moves, as the exponent of 2."""
    if value > 32:
        raise ConfigError("loss scales end at 2**32")
    if not values["fp16.loss_scale"] and 2.0**value < values["fp16.min_loss_scale"]:
        raise ConfigError(f"2**{value} is less than min_loss_scale")
    return {} if values["fp16.loss_scale"] else {"loss_scale.initial": 2.0**value}


def moving(setting: str) -> Lower:
    """A number of the scale that moves."""

    def lower(value: Any, values: Values) -> dict[str, Any]:
        if setting == "min" and not value > 0:
            raise ConfigError("a scale is greater than 0")
        return {} if values["fp16.loss_scale"] else {f"loss_scale.{setting}": value}

    return lower
