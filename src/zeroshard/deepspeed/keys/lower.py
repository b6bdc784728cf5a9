"""The keys of DeepSpeed's that become options of ours: each a function of its value, of all values
of the file, and of what its row in the table adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard.errors import ConfigError

_ZERO = "zero_optimization"
TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}
_NODES = {"hpz": f"{_ZERO}.zero_hpz_partition_size", "mics": f"{_ZERO}.mics_shard_size"}
_HALVES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
# the dtypes that are ours anyway, by compute dtype
_USUAL = {
    "communication_data_type": {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"},
    "data_types.grad_accum_dtype": {"fp32": "fp32", "bf16": "fp32", "fp16": "fp32"},
}
_LOW = "bf16_master_weights_and_grads"
Values = Mapping[str, Any]
Options = dict[str, Any]  # of ours, by dotted name


def option(value: Any, values: Values, name: str) -> Options:
    """Take the value as our option `name`."""
    return {name: int(value) if value == int(value) else value}


def given(value: Any, values: Values, name: str) -> Options:
    """Take the value as it is as our option `name`."""
    return {name: value}


def clipping(value: Any, values: Values) -> Options:
    """The norm that a step clips to; 0 switches clipping off."""
    return {"gradient_clipping": value} if value else {}


def stage(value: Any, values: Values) -> Options:
    """The stage; true is an old form of stage 1. hpZ and MiCS are rows of their own."""
    return {} if len(_nodes(values)) == 1 else {"stage": int(value)}


def reduction(value: Any, values: Values) -> Options:
    """Whether gradients are the mean over the ranks, or their sum."""
    return {} if value.lower() == "mean" else {"gradient_reduction": value.lower()}


def _nodes(values: Values) -> list[str]:
    return [row for row, key in _NODES.items() if values[key] not in (1, -1)]


def _needs_stage_3(values: Values) -> None:
    if values[f"{_ZERO}.stage"] != 3:
        raise ConfigError(f"ZeRO++ and MiCS are stage 3, not {values[f'{_ZERO}.stage']!r}")


def node(value: Any, values: Values, row: str) -> Options:
    """The ranks of a node: under hpZ they keep a second shard of the weights between forward and
    backward, under MiCS they hold all states.
    """
    if value in (1, -1):
        return {}
    if len(_nodes(values)) == 2:
        raise ConfigError(
            "zero_hpz_partition_size and mics_shard_size are both set: leave out one of them"
        )
    _needs_stage_3(values)
    return {"policy": row, "comm.node_size": int(value)}


def quantized(value: Any, values: Values, setting: str, codec: str) -> Options:
    """Encode with `codec` what our option `setting` names."""
    if not value:
        return {}
    _needs_stage_3(values)
    return {setting: codec}


def feedback(value: Any, values: Values, setting: str) -> Options:
    """A number of LoCo's error feedback, which encoded gradients have."""
    if not values[f"{_ZERO}.zero_quantized_gradients"]:
        raise ConfigError("has no effect without zero_quantized_gradients: leave it out")
    return {f"comm.error_feedback.{setting}": value}


def _offloaded(state: str, values: Values) -> list[str]:
    """Return the states that leave the device with `state`: gradients with the optimizer's."""
    with_gradients = state == "optimizer" and values[f"{_ZERO}.stage"] in (2, 3)
    return [state, "grad"] if with_gradients else [state]


def device(value: Any, values: Values, section: str, state: str) -> Options:
    """The tier of a state; true and false are an older form of cpu and none. Gradients leave the
    device for the host.
    """
    tier = TIERS.get(value, "host" if value is True else "device")
    if tier == "device":
        return {}
    if value == "nvme" and values[f"{_ZERO}.{section}.nvme_path"] is None:
        raise ConfigError("needs nvme_path, a directory on a local disk")
    states = _offloaded(state, values)
    return {f"offload.{one}": "host" if one == "grad" else tier for one in states}


def below_stage_3(value: Any, values: Values) -> str:
    """The reason why a key of weights that leave the device has no effect, as in DeepSpeed; ""
    where it has one.
    """
    at = values[f"{_ZERO}.stage"]
    return "" if at == 3 or not value else f"weights leave the device at stage 3, not at {at!r}"


def path(value: Any, values: Values, section: str, other: str) -> Options:
    """The directory of what rests on disk: one for all states."""
    if values[f"{_ZERO}.{section}.device"] != "nvme":
        return {}
    theirs = values[f"{_ZERO}.{other}.nvme_path"]
    if values[f"{_ZERO}.{other}.device"] == "nvme" and theirs not in (None, value):
        raise ConfigError(f"{other} names another directory, {theirs!r}: name one for both")
    return {"offload.disk_path": value}


def ratio(value: Any, values: Values) -> Options:
    """The share of the optimizer's state, and of gradients beside it, that leaves the device."""
    if not 0 <= value <= 1:
        raise ConfigError("is not in [0, 1]")
    if values[f"{_ZERO}.offload_optimizer.device"] == "none" or value == 1:
        return {}
    return {f"offload.fraction.{state}": value for state in _offloaded("optimizer", values)}


def half(value: Any, values: Values, name: str) -> Options:
    """bf16 or fp16: one of them."""
    if not value:
        return {}
    if any(values[f"{key}.enabled"] for key, other in _HALVES.items() if other != name):
        raise ConfigError("bf16 and fp16 are both enabled: one of them decides")
    alone = all(values[key] in (None, usual[name]) for key, usual in _USUAL.items())
    alone = alone and not values[f"bf16.{_LOW}"]
    return {"precision" if alone else "precision.compute": name}


def low_masters(value: Any, values: Values) -> Options:
    """bf16 weights as masters, with gradients at rest in bf16."""
    if not value:
        return {}
    if not (values["bf16.enabled"] or values["bfloat16.enabled"]):
        raise ConfigError("is for bf16: enable it")
    if not values["bf16.bf16_optimizer_states"]:
        raise ConfigError("moments are of the masters' dtype: set bf16_optimizer_states, too")
    given = values["data_types.grad_accum_dtype"]
    return {"precision.master": "bf16"} | ({} if given else {"precision.accumulate": "bf16"})


def low_moments(value: Any, values: Values) -> Options:
    """Nothing more: moments are of the masters' dtype."""
    if value and not values[f"bf16.{_LOW}"]:
        raise ConfigError(f"needs {_LOW} (of fp32 masters: precision.moments='bf16')")
    return {}


def dtype(value: Any, values: Values, key: str, state: str) -> Options:
    """The dtype of gradients on the wire ("reduce") or at rest ("accumulate")."""
    compute = next((name for one, name in _HALVES.items() if values[f"{one}.enabled"]), "fp32")
    if state == "accumulate" and value not in ("fp32", compute):
        raise ConfigError(f"gradients rest in fp32 or in the compute dtype, {compute}")
    return {} if value == _USUAL[key][compute] else {f"precision.{state}": value}


def same_dtype(value: Any, values: Values) -> Options:
    """Nothing: the dtype of weights has to be that of fp16 or bf16."""
    compute = next((name for one, name in _HALVES.items() if values[f"{one}.enabled"]), "fp32")
    if value != compute:
        raise ConfigError(f"weights are {compute}, as fp16 and bf16 say: leave it out")
    return {}


def static_scale(value: Any, values: Values) -> Options:
    """The scale of every step; 0 for one that moves."""
    return {"loss_scale.initial": float(value), "loss_scale.dynamic": False} if value else {}


def first_scale(value: Any, values: Values) -> Options:
    """The first scale that moves, as the exponent of 2."""
    if value > 32:
        raise ConfigError("loss scales end at 2**32")
    if not values["fp16.loss_scale"] and 2.0**value < values["fp16.min_loss_scale"]:
        raise ConfigError(f"2**{value} is less than min_loss_scale")
    return moving(2.0**value, values, "initial")


def moving(value: Any, values: Values, setting: str) -> Options:
    """A number of the scale that moves."""
    if setting == "min" and not value > 0:
        raise ConfigError("a scale is greater than 0")
    return {} if values["fp16.loss_scale"] else {f"loss_scale.{setting}": value}
