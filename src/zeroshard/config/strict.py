"""Strict pydantic models: what is not as it should be is one ConfigError of one line."""

from __future__ import annotations

from inspect import Parameter, Signature, cleandoc
from textwrap import fill
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from zeroshard.config.strict_json import nearest
from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


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
