"""DeepSpeed's JSON configuration as the fields of ours; an unsupported key raises ConfigError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zeroshard.config.reading import nearest
from zeroshard.errors import ConfigError

__all__ = ["deepspeed_fields"]

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_HALF_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
_ZERO_KEYS = (
    "stage", "offload_optimizer", "offload_param", "zero_hpz_partition_size",
    "zero_quantized_weights", "zero_quantized_gradients", "zeropp_loco_param", "mics_shard_size",
)  # fmt: skip
_DEVICES = {"none": "device", "cpu": "host", "nvme": "disk"}


def deepspeed_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Return the Config fields of a DeepSpeed configuration. Raises ConfigError."""
    fields: dict[str, Any] = {"stage": 0, "gradient_clipping": 1.0}  # None: our default
    for key, value in data.items():
        if key in _BATCH_KEYS or key == "gradient_clipping":
            is_off = key == "gradient_clipping" and value == 0 and type(value) is not bool
            fields[key] = None if value == "auto" or is_off else value
        elif key == "zero_optimization":
            fields |= _zero_section(value)
        elif key in _HALF_PRECISIONS:
            if _flag(f"{key}.enabled", _section(key, value, ["enabled"]).get("enabled", False)):
                if "precision" in fields:
                    raise ConfigError("bf16 and fp16 are both enabled: one of them decides")
                fields["precision"] = _HALF_PRECISIONS[key]
        else:
            known = [*_BATCH_KEYS, *_HALF_PRECISIONS, "gradient_clipping", "zero_optimization"]
            raise _unsupported(key, key, known)
    if isinstance(fields["stage"], bool):  # an old form of stage 1
        fields["stage"] = int(fields["stage"])
    return fields


def _unsupported(path: str, key: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"DeepSpeed's key {path!r} is not supported in this"
        f" version{nearest(key, list(known))}: leave it out"
    )


def _section(name: str, value: Any, known: Iterable[str]) -> dict[str, Any]:
    """Return a section that has only `known` keys."""
    if not isinstance(value, dict):
        raise ConfigError(f"DeepSpeed's section {name!r} is an object, not {value!r}")
    for key in value:
        if key not in known:
            raise _unsupported(f"{name}.{key}", key, known)
    return value


def _optional(name: str, value: Any, known: Iterable[str]) -> dict[str, Any]:
    """Return a section as `_section` does; None and False are empty sections."""
    return {} if value in (None, False) else _section(name, value, known)


def _flag(name: str, value: Any) -> bool:
    """Return a truth value of DeepSpeed's; "auto" is false."""
    if type(value) is not bool and value != "auto":
        raise ConfigError(f"DeepSpeed's {name}={value!r} is neither true nor false")
    return value is True


def _zero_section(value: Any) -> dict[str, Any]:
    """Read ``zero_optimization``. With a host optimizer gradients go to the host, as there."""
    stage = _section("zero_optimization", value, _ZERO_KEYS).get("stage", 0)
    fields: dict[str, Any] = {"stage": 0 if stage == "auto" else stage}
    offload: dict[str, Any] = {}
    for section, state in (("offload_optimizer", "optimizer"), ("offload_param", "weight")):
        known = ["device", "nvme_path", "pin_memory", *(["ratio"] if state == "optimizer" else [])]
        given = _optional(f"zero_optimization.{section}", value.get(section), known)
        device = given.get("device", "none")
        if not isinstance(device, str) or device not in _DEVICES:
            raise ConfigError(
                f"zero_optimization.{section}.device={device!r} is not one of {', '.join(_DEVICES)}"
            )
        if _DEVICES[device] == "device":
            continue
        offload[state] = _DEVICES[device]
        if device == "nvme":
            offload["disk_path"] = given.get("nvme_path")
        if given.get("ratio", 1.0) != 1.0 or given.get("ratio") is True:
            offload["fraction"] = {"optimizer": given["ratio"], "grad": given["ratio"]}
    if "optimizer" in offload and fields["stage"] in (2, 3):
        offload["grad"] = "host"
    elif isinstance(offload.get("fraction"), dict):
        del offload["fraction"]["grad"]
    if offload:
        fields["offload"] = offload
    return fields | _plus_plus(value, fields["stage"])


def _plus_plus(section: dict[str, Any], stage: Any) -> dict[str, Any]:
    """Read DeepSpeed's keys of ZeRO++ and MiCS; its int4 gradients and int8 weights."""
    comm: dict[str, Any] = {}
    row: str | None = None
    for key, name in (("zero_hpz_partition_size", "hpz"), ("mics_shard_size", "mics")):
        size = section.get(key, 1)
        if type(size) is not int and size != "auto":
            raise ConfigError(
                f"DeepSpeed's zero_optimization.{key}={size!r} is not a number of ranks"
            )
        if size not in (1, -1, "auto"):
            if row is not None:
                raise ConfigError(
                    "zero_hpz_partition_size and mics_shard_size are both set: one of them decides"
                )
            row, comm["node_size"] = name, size
    for key, setting, codec_name in (
        ("zero_quantized_weights", "weight_codec", "int8"),
        ("zero_quantized_gradients", "grad_codec", "int4"),
    ):
        if _flag(f"zero_optimization.{key}", section.get(key, False)):
            comm[setting] = codec_name
    known = {"err_beta": "beta", "reset_T": "reset"}
    loco = _optional("zeropp_loco_param", section.get("zeropp_loco_param"), known)
    if loco:
        comm["error_feedback"] = {known[key]: number for key, number in loco.items()}
    if (row or comm) and stage != 3:
        raise ConfigError(f"zero_optimization: ZeRO++ and MiCS are stage 3, not {stage!r}")
    out: dict[str, Any] = {"comm": comm} if comm else {}
    return out | ({"policy": row, "stage": None} if row else {})
