"""The keywords of ``zeroshard.shard`` as one validated pydantic model, with JSON in and out.

Invariant: ``Config.from_json(config.to_json()) == config``. Lower layers never see a config object:
api.py lowers it to Policy, Precision and plain numbers. An unsupported field is refused, never
dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from zeroshard.comm.codec import Codec, codec
from zeroshard.comm.quantized import Codecs, Feedback
from zeroshard.config.deepspeed import Reading, is_deepspeed, read
from zeroshard.config.reading import nearest, parse_json, read_json
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import STAGES, Policy, row
from zeroshard.core.precision import PRECISIONS, Precision, dtype_name
from zeroshard.errors import ConfigError

__all__ = ["AUTO", "Comm", "Config", "DeepSpeedFile", "Offload", "build_config", "read_deepspeed"]

AUTO = "auto"  # the policy that shard() plans

TierName = Literal["device", "host", "disk"]


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            name = type(self).__name__.lower()
            section = name if name in Config.model_fields else ""
            raise ConfigError(_one_line(error, section)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would convert: bool or str to a number, number or str to bool."""
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        takes_number = bool(kinds & {int, float})
        for item in value.values() if isinstance(value, dict) else [value]:
            is_text = isinstance(item, str) and item not in kinds and str not in kinds
            if takes_number and (is_text or (type(item) is bool and bool not in kinds)):
                raise ValueError(f"{value!r} is not a number")
        takes_bool_only = bool in kinds and not takes_number and str not in kinds
        is_bool = type(value) is bool
        if takes_bool_only and isinstance(value, (int, float, str)) and not is_bool:
            raise ValueError(f"{value!r} is neither true nor false")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types and literal values that an annotation names; of a dict, its values'."""
    if get_origin(annotation) in (Union, UnionType, Literal):
        return set().union(*(_kinds(part) for part in get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return _kinds(get_args(annotation)[1])
    return {annotation}


class ErrorFeedback(_Strict):
    """The weight of each new error, and after how many sums all is reset (None: never)."""

    beta: float = Field(default=0.8, gt=0, le=1)
    reset: int | None = Field(default=1024, ge=1)


class Comm(_Strict):
    """How bytes travel.

    `ordered` asks for the canonical sum where the backend has a faster one of its own (nccl). On
    several hosts it needs `node_size`. `node_size` ranks form a node (default: all do); the sums
    over ranks depend on it.
    `hierarchical` says whether collectives go in two levels, inside nodes and between them
    (default: those that move fewer bytes between hosts so).

    `weight_codec` and `grad_codec` ("int8", "int4", "fp8") encode what travels, in blocks of
    `codec_block` elements with one scale (ZeRO++: qwZ, qgZ); `frozen_codec` is how weights that are
    not trained rest and travel (MixZ++). `grad_codec="bf16"` only rounds sums over one node on
    their way to other nodes. `error_feedback` keeps what encoding gradients loses and adds it to
    the next ones (LoCo): True, or a dict of `beta` and `reset`.
    """

    transport: Literal["auto", "shared_memory", "gloo", "nccl"] = "auto"
    ordered: bool | None = None
    weight_codec: str | None = None
    grad_codec: str | None = None
    node_size: int | None = Field(default=None, ge=1)
    hierarchical: bool | None = None
    frozen_codec: str | None = None
    codec_block: int = 256
    error_feedback: bool | ErrorFeedback = False

    def codecs(self) -> Codecs:
        """Return the codecs. Raises ConfigError for an unknown name or block size."""

        def made(setting: str, name: str | None) -> Codec | None:
            if name is None or name == "bf16":
                return None
            try:
                return codec(name, block=self.codec_block)
            except ConfigError as error:
                raise ConfigError(f"comm.{setting}: {error}") from None

        feedback = Feedback() if self.error_feedback is True else None
        if isinstance(self.error_feedback, ErrorFeedback):
            feedback = Feedback(self.error_feedback.beta, self.error_feedback.reset)
        names = ("weight_codec", "grad_codec", "frozen_codec")
        weight, grad, frozen = (made(name, getattr(self, name)) for name in names)
        return Codecs(weight, grad, frozen, feedback)


State = Literal["weight", "grad", "optimizer"]
_Share = Annotated[float, Field(allow_inf_nan=True)]  # `Offload` says which numbers it takes


class Offload(_Strict):
    """On which tier each state rests (ZeRO-Offload, ZeRO-Infinity, Offload++).

    `fraction` of each state that leaves the device does so (a number for all, or one per state;
    "auto" moves the optimizer's until device and host take the same time for a step); `disk_path`
    is a directory for what rests on disk; `staging_bytes` bounds the buffers of the streamed step
    (default 64 MiB); `delayed_update` n applies updates one step late from step n on; `verify`
    checks what is read from disk against its hash.
    """

    weight: TierName = "device"
    grad: TierName = "device"
    optimizer: TierName = "device"
    fraction: _Share | dict[State, _Share] | Literal["auto"] = 1.0
    disk_path: str | None = None
    staging_bytes: int | None = Field(default=None, ge=1 << 16)
    delayed_update: int | None = Field(default=None, ge=0)
    verify: bool = False
    # replaces the link between device and host in tests: tests/support/paced_link.py
    link: Any = Field(default=None, exclude=True, repr=False)

    @field_validator("weight", "grad", "optimizer", mode="before")
    @classmethod
    def _known_tier(cls, tier: Any, info: ValidationInfo) -> Any:
        if tier not in get_args(TierName):
            raise ValueError(
                f"offload.{info.field_name}={tier!r} is not a tier: 'device', 'host' (the memory of"
                " the CPU) or 'disk' (NVMe)"
            )
        return tier

    @field_validator("fraction")
    @classmethod
    def _share(cls, fraction: Any) -> Any:
        shares = {} if fraction == "auto" else {"": fraction}
        if isinstance(fraction, dict):
            shares = {f"[{state!r}]": share for state, share in fraction.items()}
        for state, share in shares.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(
                    f"offload.fraction{state}={share} is not in [0, 1]: it is the share that leaves"
                    " the device"
                )
        return fraction

    def tier(self, state: State) -> Tier:
        """Return the tier of one state."""
        return Tier(getattr(self, state))

    @property
    def away(self) -> dict[str, Tier]:
        """The states that leave the device."""
        tiers = {state: Tier(getattr(self, state)) for state in get_args(State)}
        return {state: tier for state, tier in tiers.items() if tier is not Tier.DEVICE}

    def fractions(self) -> dict[str, float]:
        """Return the share of each state that leaves the device ("auto" starts from 1)."""
        if isinstance(self.fraction, dict):
            return {**dict.fromkeys(get_args(State), 1.0), **self.fraction}
        return dict.fromkeys(get_args(State), 1.0 if self.fraction == "auto" else self.fraction)

    def check(self) -> None:
        """Raise ConfigError for options without effect and invalid combinations."""
        away, defaults = self.away, Offload()
        names = ("fraction", "disk_path", "staging_bytes", "delayed_update", "verify")
        given = [name for name in names if getattr(self, name) != getattr(defaults, name)]
        if given and not away:
            raise ConfigError(
                f"offload.{given[0]} has no effect while every state rests on the device: leave it"
                " out"
            )
        if isinstance(self.fraction, dict):
            for state in self.fraction:
                if state not in away:
                    raise ConfigError(
                        f"offload.fraction[{state!r}] has no effect: that state rests on the device"
                    )
        on_disk = [state for state, tier in away.items() if tier is Tier.DISK]
        if on_disk and self.disk_path is None:
            raise ConfigError(
                f"offload.{on_disk[0]}='disk' needs offload.disk_path, a directory on a local disk"
            )
        for name in given:
            if name in ("disk_path", "verify") and not on_disk:
                raise ConfigError(
                    f"offload.{name} has no effect while no state rests on disk: leave it out"
                )
        if self.fraction == "auto" and self.optimizer != "host":
            raise ConfigError(
                "offload.fraction='auto' balances the steps of device and host: it needs"
                f" offload.optimizer='host', not {self.optimizer!r}"
            )
        if self.delayed_update is not None:
            if "optimizer" not in away:
                raise ConfigError(
                    "offload.delayed_update has no effect while the optimizer's state rests on the"
                    " device"
                )
            if self.fraction == "auto" or self.fractions()["optimizer"] < 1.0:
                raise ConfigError(
                    "offload.delayed_update needs the whole optimizer state off the device"
                    " (fraction=1.0): its parts would be a step apart"
                )


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
    # the norm of a step without clip_grad_norm_()
    gradient_clipping: float | None = Field(default=None, gt=0)
    # compared with the product of the next two and the ranks
    train_batch_size: int | None = Field(default=None, ge=1)
    train_micro_batch_size_per_gpu: int | None = Field(default=None, ge=1)
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)

    @field_validator("stage")
    @classmethod
    def _known_stage(cls, stage: int | None) -> int | None:
        if stage is not None and stage not in STAGES:
            raise ValueError(f"stage={stage} does not exist: 0 (plain data parallel), 1, 2 or 3")
        return stage

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, policy: str | Policy | None) -> str | Policy | None:
        if isinstance(policy, str) and policy != AUTO:
            row(policy)
        return policy

    @field_validator("precision")
    @classmethod
    def _known_precision(cls, precision: str | Precision) -> str | Precision:
        if isinstance(precision, str) and precision not in PRECISIONS:
            raise ValueError(
                f"precision={precision!r} is not one of {', '.join(PRECISIONS)}, nor a"
                " zeroshard.Precision"
            )
        return precision

    @model_validator(mode="after")
    def _one_policy(self) -> Config:
        if self.stage is not None and self.policy is not None:
            name = self.policy if isinstance(self.policy, str) else self.policy.name
            raise ValueError(
                f"stage={self.stage} and policy={name!r} were both given: one of them decides"
            )
        return self

    def resolved_policy(self) -> Policy:
        """Return the row in force (default: stage 3), on the tiers of `offload`. Raises ConfigError
        for "auto", which `shard` decides.
        """
        if self.policy == AUTO:
            raise ConfigError("policy='auto' names no row: zs.shard() chooses one")
        policy = self.policy or STAGES[3 if self.stage is None else self.stage]
        if isinstance(policy, str):
            policy = row(policy)
        if not self.offload.away:
            return policy
        try:
            weight, grad, optimizer = (self.offload.tier(state) for state in get_args(State))
            return policy.tiered(weight, grad, optimizer)
        except ValueError as error:
            raise ConfigError(f"policy={policy.name!r} with this offload: {error}") from None

    def resolved_precision(self) -> Precision:
        """Return the dtypes in force."""
        return PRECISIONS[self.precision] if isinstance(self.precision, str) else self.precision

    def check_batch(self, num_ranks: int) -> None:
        """Raise ConfigError unless the given batch sizes multiply up over `num_ranks`."""
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if total is None or micro is None or steps is None:
            return
        if total != micro * steps * num_ranks:
            raise ConfigError(
                f"train_batch_size={total} is not train_micro_batch_size_per_gpu={micro} x"
                f" gradient_accumulation_steps={steps} x {num_ranks} ranks"
            )

    def refuse_unsupported(self) -> None:
        """Raise ConfigError for options that this version does not support."""
        self.offload.check()
        self._check_codecs()

    def _check_codecs(self) -> None:
        comm, policy = self.comm, self.resolved_policy()
        codecs = comm.codecs()
        shards_all = all(cells.weight.scope is Scope.SHARD for cells in policy.all_cells)
        for setting in ("weight_codec", "frozen_codec"):
            name = getattr(comm, setting)
            if name is not None and not shards_all:
                raise ConfigError(
                    f"comm.{setting}={name!r} encodes gathers of weights that rest sharded over all"
                    f" ranks (zero3, hpz); policy={policy.name!r} keeps them otherwise"
                )
            if name == "bf16":
                raise ConfigError(
                    f"comm.{setting}='bf16' is no codec: weights travel in the compute dtype; use"
                    " precision='bf16'"
                )
        if comm.error_feedback and codecs.grad is None:
            raise ConfigError(
                "comm.error_feedback has no effect without an int8, int4 or fp8 comm.grad_codec"
            )

    def to_json(self) -> str:
        """Return JSON text. Raises ConfigError for a Policy object or a callable `units`."""
        data = self.model_dump(exclude={"policy", "precision", "units"})
        if isinstance(self.policy, Policy):
            raise ConfigError("a zeroshard.Policy object has no JSON form: name a row of the table")
        data["policy"] = self.policy
        data["precision"] = self.precision
        if isinstance(self.precision, Precision):
            dtypes = vars(self.precision)
            data["precision"] = {name: dtype_name(dtype) for name, dtype in dtypes.items()}
        units = () if self.units is None else self.units
        if not isinstance(units, (list, tuple)) or not all(isinstance(one, str) for one in units):
            raise ConfigError(
                "units given as classes or a callable have no JSON form: give qualified names"
            )
        data["units"] = None if self.units is None else list(units)
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Read what `to_json` wrote. Raises ConfigError naming a wrong key and the nearest."""
        return build_config(parse_json(text, "the configuration"))

    @classmethod
    def read(cls, source: Config | dict[str, Any] | str | Path | None) -> Config:
        """Return the configuration in `source`, in our format or in DeepSpeed's."""
        return build_config(source)

    @classmethod
    def from_deepspeed(cls, source: str | Path | dict[str, Any]) -> Config:
        """Read a DeepSpeed configuration: a path to its JSON, or the dict.

        Raises ConfigError with every key that cannot be honoured (``read_deepspeed`` lists all
        keys and what they do here); "auto" leaves a key to whoever fills it in
        (``zeroshard.integrations.transformers``), and to our default otherwise.
        """
        return read_deepspeed(source).config()


@dataclass(frozen=True)
class DeepSpeedFile(Reading):
    """A DeepSpeed configuration, read; the engine's `Config` if nothing is refused."""

    def config(self) -> Config:
        """Return our configuration. Raises ConfigError with every refused key."""
        return _config_of(self.checked_fields())


def read_deepspeed(source: str | Path | dict[str, Any]) -> DeepSpeedFile:
    """Read a DeepSpeed configuration (a path to its JSON, or the dict), key by key.

    Raises ConfigError where there is no JSON object. Keys never raise here: see `findings`, and
    ``config()``.
    """
    return DeepSpeedFile(**vars(read(source)))


def build_config(source: Config | dict[str, Any] | str | Path | None, **overrides: Any) -> Config:
    """Return the configuration in `source` (Config, dict, JSON path) with `overrides`.

    Raises ConfigError, one line, naming a wrong key with the nearest right one, or a wrong value.
    """
    data: Any = {} if source is None else source
    if isinstance(source, (str, Path)):
        data = read_json(source)
    elif isinstance(source, Config):
        data = {name: getattr(source, name) for name in source.model_fields_set}
    if not isinstance(data, dict):
        raise ConfigError(
            "config must be a zeroshard.Config, a dict or a path to a JSON object, not"
            f" {type(data).__name__}"
        )
    if is_deepspeed(data, Config.model_fields):
        data = read_deepspeed(data).checked_fields()
    data = dict(data)
    given = {key: value for key, value in overrides.items() if value is not None}
    if "stage" in given:
        data.pop("policy", None)
    if "policy" in given:
        data.pop("stage", None)
    data.update(given)
    return _config_of(data)


def _config_of(data: dict[str, Any]) -> Config:
    for key in data:
        if key not in Config.model_fields:
            hint = nearest(key, list(Config.model_fields))
            raise ConfigError(f"{key!r} is not a keyword of shard(){hint}")
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


def _one_line(error: ValidationError, section: str = "") -> str:
    def fits(one: ErrorDetails) -> tuple[int, bool]:
        """Rank errors: deeper ones first, then errors of a section's own."""
        return len(one["loc"]), one["type"] == "value_error"

    first = max(error.errors(), key=fits)
    place = (*filter(None, [section]), *first["loc"])
    where = ".".join(map(str, place))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "finite_number":
        message = f"{first['input']!r} is not a finite number"
    if first["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {"comm": Comm, "offload": Offload}
        model = sections.get(str(place[0]))
        choices = list(model.model_fields) if model is not None else []
        return f"{where!r} is not a key of {place[0]}{nearest(str(place[-1]), choices)}"
    return message if not where or where.split(".")[0] in message else f"{where}: {message}"
