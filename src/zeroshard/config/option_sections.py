"""The sections of the configuration: `Comm`, `Offload`, `LossScale`, `ErrorFeedback`; and the
strict pydantic models that they are, in which a wrong value is one ConfigError of one line.
"""

from __future__ import annotations

from inspect import Parameter, Signature, cleandoc
from textwrap import fill
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from zeroshard.comm.codec import Codec, codec
from zeroshard.comm.quantized import Codecs, Feedback
from zeroshard.config.strict_json import nearest
from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.placement import Tier, TierName
from zeroshard.core.sizes import any_of
from zeroshard.core.wire import CODEC_BITS
from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


# ------------------------------------------------------------------------------------ strict models


class _OwnNames(ModelMetaclass):
    """Let ``help()`` and a prompt's completion show a section's own names, not pydantic's."""

    def __dir__(self) -> list[str]:
        hidden = set(dir(BaseModel))
        return [one for one in super().__dir__() if one not in hidden and one[:2] != "__"]


class Strict(BaseModel, metaclass=_OwnNames):
    """A section of options; unknown keys and wrong values are refused, nothing is converted."""

    section: ClassVar[str] = ""  # its keyword in Config, for errors

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Add the fields' descriptions to the docstring, and their defaults to the signature, for
        ``help()``.
        """
        fields = [f"{name}: {field.description}" for name, field in cls.model_fields.items()]
        wrapped = [fill(one, 92, subsequent_indent="    ") for one in fields]
        cls.__doc__ = "\n\n".join([cleandoc(cls.__doc__ or ""), "\n".join(wrapped)])
        cls.__signature__ = Signature(
            [
                Parameter(name, Parameter.KEYWORD_ONLY, default=field.default)
                for name, field in cls.model_fields.items()
            ]
        )

    def __init__(self, *unnamed: Any, **data: Any) -> None:
        if unnamed:
            names = list(type(self).model_fields)
            raise ConfigError(
                f"{type(self).__name__}({unnamed[0]!r}): every option is given by name, one of"
                f" {', '.join(names)}{self._hint(unnamed[0])}"
            )
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(one_line(error, type(self))) from None

    @classmethod
    def _hint(cls, value: Any) -> str:
        """Return how a `value` that was given without a name is meant, "; did you mean ...?"."""
        return ""

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what pydantic would convert: bool or str to a number, number or str to bool."""
        taken = kinds(cls.model_fields[str(info.field_name)].annotation)
        takes_number = bool(taken & {int, float})
        for item in value.values() if isinstance(value, dict) else [value]:
            is_text = isinstance(item, str) and item not in taken and str not in taken
            if takes_number and (is_text or (type(item) is bool and bool not in taken)):
                raise ValueError(f"{value!r} is not a number")
        takes_bool_only = bool in taken and not takes_number and str not in taken
        is_bool = type(value) is bool
        if takes_bool_only and isinstance(value, (int, float, str)) and not is_bool:
            raise ValueError(f"{value!r} is neither true nor false")
        return value


def kinds(annotation: Any) -> set[Any]:
    """Return the types and literal values that an annotation names; of a dict, its values'."""
    if get_origin(annotation) in (Union, UnionType, Literal):
        return set().union(*(kinds(part) for part in get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return kinds(get_args(annotation)[1])
    return {annotation}


def one_line(error: ValidationError, model: type[Strict]) -> str:
    """Return the error that says most, as one line that names the field."""

    def fits(one: ErrorDetails) -> tuple[int, bool]:
        """Rank errors: deeper ones first, then errors of a section's own."""
        return len(one["loc"]), one["type"] == "value_error"

    first = max(error.errors(), key=fits)
    place = [*filter(None, [model.section]), *first["loc"]]
    where = ".".join(map(str, place))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":
        name = first["ctx"]["class_name"]
        message = f"{where}={first['input']!r} is neither a zeroshard.{name} nor a dictionary"
        inner = _inside(model, (*first["loc"], ""))
        if issubclass(inner, Strict):
            message += inner._hint(first["input"])
    if first["type"] == "finite_number":
        message = f"{first['input']!r} is not a finite number"
    if first["type"] == "extra_forbidden":
        choices = list(_inside(model, first["loc"]).model_fields)
        name = ".".join(map(str, place[:-1])) or model.__name__
        return f"{where!r} is not a key of {name}{nearest(str(place[-1]), choices)}"
    return message if not where or where.split(".")[0] in message else f"{where}: {message}"


def _inside(model: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the section of `model` that holds the key at `place`."""
    for part in place[:-1]:
        field = model.model_fields.get(str(part))  # no field: pydantic's name of a union's member
        inner = kinds(field.annotation) if field is not None else ()
        models = [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]
        model = models[0] if models else model
    return model


# ------------------------------------------------------------------------------------- the sections

_REMARKS = {Tier.HOST: " (the memory of the CPU)", Tier.DISK: " (NVMe)"}  # on a tier, in errors


class ErrorFeedback(Strict):
    """The losses of encoding gradients, added to the next ones (LoCo)."""

    beta: float = Field(default=0.8, gt=0, le=1, description="The weight of each new error.")
    reset: int | None = Field(
        default=1024,
        ge=1,
        description="The number of sums after which all errors are dropped (None: never).",
    )


class LossScale(Strict):
    """The scaling of losses in fp16 (``core/loss_scale.py``). A checkpoint holds the scale itself,
    and not these numbers.
    """

    section = "loss_scale"

    initial: float = Field(
        default=2.0**16, gt=0, description="The scale of the first step, or of every step."
    )
    dynamic: bool = Field(
        default=True,
        description="Whether the scale moves; a step that overflows is skipped anyway.",
    )
    growth_interval: int = Field(
        default=2000,
        ge=1,
        description="The number of good steps in a row before the scale doubles.",
    )
    hysteresis: int = Field(
        default=1,
        ge=1,
        description="The number of overflows since the scale last grew that halve it.",
    )
    consecutive_hysteresis: bool = Field(
        default=False, description="Whether a good step starts the count of `hysteresis` anew."
    )
    min: float = Field(default=1.0, gt=0, description="The smallest scale.")

    def scaler(self) -> LossScaler:
        """Return a scaler that begins here. Raises ConfigError."""
        options = self.model_dump(exclude={"initial", "min"})
        floor = self.min if self.dynamic else min(self.min, self.initial)
        return LossScaler(scale=self.initial, min_scale=floor, **options)


class Comm(Strict):
    """The ways in which bytes travel."""

    section = "comm"

    transport: Literal["auto", "shared_memory", "gloo", "nccl"] = Field(
        default="auto", description="What moves the bytes; auto takes the fastest that works here."
    )
    ordered: bool | None = Field(
        default=None,
        description="Whether sums are taken in the canonical order where the backend has a faster"
        " one of its own (nccl); on several hosts it needs `node_size`.",
    )
    weight_codec: str | None = Field(
        default=None, description=f"The code in which weights travel: {any_of(CODEC_BITS)} (qwZ)."
    )
    grad_codec: str | None = Field(
        default=None,
        description=f"The code in which gradients travel: {', '.join(CODEC_BITS)} (qgZ), or bf16"
        " for sums over a node on their way to other nodes.",
    )
    node_size: int | None = Field(
        default=None,
        ge=1,
        description="The number of ranks of a node (default: all); the sums over ranks depend on"
        " it.",
    )
    hierarchical: bool | None = Field(
        default=None,
        description="Whether collectives go in two levels, inside nodes and between them (default:"
        " those that so move fewer bytes between hosts).",
    )
    separate_reduce_group: bool = Field(
        default=False,
        description="Whether reduces have a process group of their own (nccl), so that no gather"
        " stands behind a reduce; it takes device memory.",
    )
    frozen_codec: str | None = Field(
        default=None,
        description="The code in which weights that are not trained rest and travel (MixZ++).",
    )
    codec_block: int = Field(
        default=256, description="The number of elements that share one scale in a code."
    )
    error_feedback: bool | ErrorFeedback = Field(
        default=False,
        description="Whether the loss of encoded gradients is added to the next ones (LoCo).",
    )

    @field_validator("weight_codec", "grad_codec", "frozen_codec")
    @classmethod
    def _known_codec(cls, name: str | None) -> str | None:
        if name is not None and name != "bf16":  # which is for gradients, as Config checks
            codec(name)
        return name

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


class Offload(Strict):
    """On which tier each state rests (ZeRO-Offload, ZeRO-Infinity, Offload++)."""

    section = "offload"

    weight: TierName | tuple[TierName, ...] = Field(
        default="device",
        description="The tier of weights, one name or (as for the next two) one per data parallel"
        " rank.",
    )
    grad: TierName | tuple[TierName, ...] = Field(
        default="device", description="The tier of gradients."
    )
    optimizer: TierName | tuple[TierName, ...] = Field(
        default="device", description="The tier of masters and moments, and where they are stepped."
    )
    fraction: _Share | dict[State, _Share] | Literal["auto"] = Field(
        default=1.0,
        description="The share of each state that leaves the device, one number or one per state;"
        " auto moves the optimizer's until device and host take the same time for a step.",
    )
    disk_path: str | None = Field(
        default=None, description="The directory of what rests on disk, on a local disk."
    )
    staging_bytes: int | None = Field(
        default=None,
        ge=1 << 16,
        description="The most bytes of the buffers of the streamed step (default: 64 MiB).",
    )
    delayed_update: int | None = Field(
        default=None, ge=0, description="The step from which on updates are applied one step late."
    )
    step_in_backward: bool = Field(
        default=False,
        description="Whether the host steps each unit's states as its gradients arrive, on a copy"
        " that counts where neither an overflow nor a clip changes the step: the same bits, for the"
        " host's share of masters and moments once more in host memory.",
    )
    verify: bool = Field(
        default=False, description="Whether what is read from disk is checked against its hash."
    )

    @classmethod
    def _hint(cls, value: Any) -> str:
        tier = {"cpu": "host", "nvme": "disk"}.get(value, value) if isinstance(value, str) else None
        known = [known.value for known in Tier]
        return f"; did you mean Offload(optimizer={tier!r})?" if tier in known else ""

    @field_validator("weight", "grad", "optimizer", mode="before")
    @classmethod
    def _known_tier(cls, tier: Any, info: ValidationInfo) -> Any:
        for one in tier if isinstance(tier, (list, tuple)) and tier else [tier]:
            if one not in [known.value for known in Tier]:
                tiers = any_of(f"{known.value!r}{_REMARKS.get(known, '')}" for known in Tier)
                raise ValueError(f"offload.{info.field_name}={one!r} is not a tier: {tiers}")
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

    def tiers(self, state: State) -> tuple[Tier, ...]:
        """Return the tiers of one state: one, or one for each rank."""
        named = getattr(self, state)
        return (Tier(named),) if isinstance(named, str) else tuple(map(Tier, named))

    def tier(self, state: State) -> Tier:
        """Return the tier of one state, where ranks do not differ (`at`)."""
        (tier,) = self.tiers(state)
        return tier

    def at(self, rank: int) -> Offload:
        """Return the tiers of data parallel rank number `rank`."""
        own: dict[str, str] = {s: self.tiers(s)[rank].value for s in self.by_rank}
        return self.model_copy(update=own) if own else self

    @property
    def by_rank(self) -> dict[State, int]:
        """The states with tiers per rank, and for how many ranks."""
        named = {state: getattr(self, state) for state in get_args(State)}
        return {state: len(tiers) for state, tiers in named.items() if not isinstance(tiers, str)}

    @property
    def away(self) -> dict[str, Tier]:
        """The states that leave the device, where ranks do not differ (`at`)."""
        leaving = self.leaving
        return {state: self.tier(state) for state in get_args(State) if state in leaving}

    @property
    def leaving(self) -> dict[str, tuple[Tier, ...]]:
        """The states that leave the device on any rank, with their `tiers`."""
        tiers: dict[str, tuple[Tier, ...]] = {s: self.tiers(s) for s in get_args(State)}
        return {state: named for state, named in tiers.items() if set(named) != {Tier.DEVICE}}

    def fractions(self) -> dict[str, float]:
        """Return the share of each state that leaves the device ("auto" starts from 1)."""
        if isinstance(self.fraction, dict):
            return {**dict.fromkeys(get_args(State), 1.0), **self.fraction}
        return dict.fromkeys(get_args(State), 1.0 if self.fraction == "auto" else self.fraction)

    def check(self) -> None:
        """Raise ConfigError for options without effect and invalid combinations."""
        away, defaults = self.leaving, Offload()
        names = ("fraction", "disk_path", "staging_bytes", "delayed_update", "step_in_backward")
        given = [
            name for name in (*names, "verify") if getattr(self, name) != getattr(defaults, name)
        ]
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
        on_disk = [state for state, tiers in away.items() if Tier.DISK in tiers]
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
        if self.step_in_backward:
            if self.optimizer != "host":
                raise ConfigError(
                    "offload.step_in_backward steps states in host memory ahead: it needs"
                    f" offload.optimizer='host', not {self.optimizer!r}"
                )
            if self.delayed_update is not None or self.fraction == "auto":
                other = "fraction='auto'" if self.fraction == "auto" else "delayed_update"
                raise ConfigError(
                    f"offload.step_in_backward and offload.{other} both decide when the host"
                    " steps: leave one of them out"
                )
        if self.delayed_update is not None:
            if "optimizer" in self.by_rank:
                raise ConfigError(
                    "offload.delayed_update with tiers per rank would apply some ranks' updates a"
                    " step later than others': name one tier for offload.optimizer"
                )
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
