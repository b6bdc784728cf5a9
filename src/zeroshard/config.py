"""The keywords of ``zeroshard.shard``, validated: one pydantic model, JSON in and out, wrong keys refused with the nearest right one.

Invariant: ``Config.from_json(config.to_json()) == config``. Nothing below this layer sees a config object: it is lowered to Policy,
Precision and plain numbers in api.py. A field that this version cannot honour is refused, never dropped.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from zeroshard.core.placement import Tier
from zeroshard.core.policy import STAGES, Policy, row
from zeroshard.core.precision import PRECISIONS, Precision, dtype_name
from zeroshard.errors import ConfigError

__all__ = ["Comm", "Config", "Offload", "build_config", "nearest"]

TierName = Literal["device", "host", "disk"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Comm(_Strict):
    """How bytes travel. `ordered` asks for the canonical sum where the backend has a faster one of its own (nccl)."""

    transport: Literal["auto", "shared_memory", "gloo", "nccl"] = "auto"
    ordered: bool | None = None
    weight_codec: str | None = None
    grad_codec: str | None = None
    node_size: int | None = Field(default=None, ge=1)
    hierarchical: bool | None = None


class Offload(_Strict):
    """On which tier each state rests. This version runs the device tier; the others are refused by name."""

    weight: TierName = "device"
    grad: TierName = "device"
    optimizer: TierName = "device"
    fraction: float | dict[str, float] | Literal["auto"] = 1.0
    disk_path: str | None = None
    staging_bytes: int | None = None
    delayed_update: int | None = None
    verify: bool = False


class Config(_Strict):
    """Everything that ``shard()`` takes besides the model, the optimizer and the mesh."""

    stage: int | None = None
    policy: str | Policy | None = None
    precision: str | Precision = "fp32"
    offload: Offload = Offload()
    comm: Comm = Comm()
    units: Any = None
    prefetch_bytes: int | None = Field(default=None, ge=0)
    stall_timeout_s: float = Field(default=300.0, gt=0)
    strict: bool = False
    verify_every: int | None = Field(default=None, ge=1)
    broadcast_buffers: bool = False

    @field_validator("stage")
    @classmethod
    def _known_stage(cls, stage: int | None) -> int | None:
        if stage is not None and stage not in STAGES:
            raise ValueError(f"stage={stage} does not exist: 0 (plain data parallel), 1, 2 or 3")
        return stage

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str | Policy | None) -> str | Policy | None:
        if isinstance(policy, str):
            row(policy)
        return policy

    @field_validator("precision")
    @classmethod
    def _known_precision(cls, precision: str | Precision) -> str | Precision:
        if isinstance(precision, str) and precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r} is not one of {', '.join(PRECISIONS)}, nor a zeroshard.Precision")
        return precision

    @model_validator(mode="after")
    def _one_policy(self) -> Config:
        if self.stage is not None and self.policy is not None:
            raise ValueError(f"stage={self.stage} and policy={_policy_name(self.policy)!r} were both given: one of them decides")
        return self

    def resolved_policy(self) -> Policy:
        """Return the row in force (stage 3 where nothing was said)."""
        if isinstance(self.policy, Policy):
            return self.policy
        return row(self.policy if self.policy is not None else STAGES[3 if self.stage is None else self.stage])

    def resolved_precision(self) -> Precision:
        """Return the dtypes in force."""
        return PRECISIONS[self.precision] if isinstance(self.precision, str) else self.precision

    def refuse_unsupported(self) -> None:
        """Raise ConfigError for what this version cannot honour."""
        for name in ("weight", "grad", "optimizer"):
            tier = getattr(self.offload, name)
            if Tier(tier) is not Tier.DEVICE:
                raise ConfigError(f"offload.{name}={tier!r} is not supported in this version: states rest on the device tier")
        defaults = Offload()
        for name in ("fraction", "disk_path", "staging_bytes", "delayed_update", "verify"):
            if getattr(self.offload, name) != getattr(defaults, name):
                raise ConfigError(f"offload.{name} has no effect while every state rests on the device: leave it out")
        for name in ("weight_codec", "grad_codec", "hierarchical"):
            if getattr(self.comm, name) is not None:
                raise ConfigError(f"comm.{name} is not supported in this version: bytes travel as they are")
        policy = self.resolved_policy()
        if policy.name in ("hpz", "mics", "hfsdp"):
            raise ConfigError(f"policy={policy.name!r} shards over a (node, local) mesh, which this version does not run: use zero3")

    def to_json(self) -> str:
        """Return the JSON text of this configuration; raises ConfigError for a policy object or a callable `units`, which have none."""
        data = self.model_dump(exclude={"policy", "precision", "units"})
        if isinstance(self.policy, Policy):
            raise ConfigError("a zeroshard.Policy object has no JSON form: name a row of the table")
        data["policy"] = self.policy
        data["precision"] = self.precision if isinstance(self.precision, str) else _precision_json(self.precision)
        if self.units is not None and not (isinstance(self.units, (list, tuple)) and all(isinstance(u, str) for u in self.units)):
            raise ConfigError("units given as classes or a callable have no JSON form: give qualified names")
        data["units"] = None if self.units is None else list(self.units)
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Read what `to_json` wrote; raises ConfigError naming a wrong key and the nearest right one."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the configuration is not JSON: {error}") from None
        return build_config(data)


def _policy_name(policy: str | Policy) -> str:
    return policy if isinstance(policy, str) else policy.name


def _precision_json(precision: Precision) -> dict[str, str]:
    return {name: dtype_name(getattr(precision, name)) for name in ("compute", "reduce", "accumulate", "master")}


def nearest(name: str, choices: list[str]) -> str:
    """Return "; did you mean 'x'?" for the choice nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def build_config(source: Config | dict[str, Any] | str | Path | None, **overrides: Any) -> Config:
    """Return the configuration in `source` (a Config, a dict, a path to JSON) with `overrides` on top.

    Raises ConfigError, one line, naming a wrong key with the nearest right one, or a wrong value.
    """
    data: dict[str, Any] = {}
    if isinstance(source, (str, Path)):
        try:
            data = json.loads(Path(source).read_text())
        except OSError as error:
            raise ConfigError(f"config={str(source)!r} cannot be read: {error.strerror}") from None
        except json.JSONDecodeError as error:
            raise ConfigError(f"config={str(source)!r} is not JSON: {error}") from None
    elif isinstance(source, Config):
        data = {name: getattr(source, name) for name in source.model_fields_set}
    elif source is not None:
        data = source
    if not isinstance(data, dict):
        raise ConfigError(f"config must be a zeroshard.Config, a dict or a path to a JSON object, not {type(data).__name__}")
    data = dict(data)
    given = {key: value for key, value in overrides.items() if value is not None}
    if "stage" in given:
        data.pop("policy", None)
    if "policy" in given:
        data.pop("stage", None)
    data.update(given)
    for key in data:
        if key not in Config.model_fields:
            raise ConfigError(f"{key!r} is not a keyword of shard(){nearest(key, list(Config.model_fields))}")
    if isinstance(data.get("precision"), dict):
        try:
            data["precision"] = Precision(**data["precision"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"precision: {error}") from None
    if isinstance(data.get("precision"), torch.dtype):
        data["precision"] = dtype_name(data["precision"])
    try:
        return Config(**data)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {"comm": Comm, "offload": Offload}
        section = sections.get(str(first["loc"][0]))
        choices = list(section.model_fields) if section is not None else []
        return f"{where!r} is not a key of {first['loc'][0]}{nearest(str(first['loc'][-1]), choices)}"
    return message if not where or where.split(".")[0] in message else f"{where}: {message}"
