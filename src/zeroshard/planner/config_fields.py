"""The fields of a Transformers ``config.json``, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.system.safe_files import NotReadable, from_json, read_file

# what newer versions of Transformers call a field
_NEWER = {"num_experts": "num_local_experts"}


class ConfigFields:
    """The fields of a config.json; a missing or wrong one is a ConfigError that names it."""

    def __init__(
        self, fields: Mapping[str, Any], where: str, defaults: Mapping[str, int] | None = None
    ) -> None:
        """`where` is said in errors; `defaults` are those of the family's class."""
        self._fields = fields
        self._where = where
        self._defaults = {} if defaults is None else defaults

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of `least` or more; of the defaults that of the family goes
        first.
        """
        value = self._fields.get(name)
        value = self._fields.get(_NEWER.get(name, name)) if value is None else value
        value = self._defaults.get(name, default) if value is None else value
        if type(value) is not int or value < least:
            kind = "positive whole number" if least else "whole number"
            raise ConfigError(f"{self._where}: {name}={value!r} is not a {kind}")
        return value

    def maybe(self, name: str) -> int | None:
        """Return a positive whole number, or None where the file says null; without the field the
        family's default.
        """
        if name in self._fields and self._fields[name] is None:
            return None
        return self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._fields.get(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str:
        """Return a word, empty where there is none."""
        return str(self._fields.get(name) or "")

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers, None where there is none."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise ConfigError(f"{self._where}: {name}={value!r} is not a list of whole numbers")
        return value


def read_config(file: Path) -> dict[str, Any]:
    """Return the fields of a Transformers config.json. Raises ConfigError if it is none."""
    try:
        data = read_file(file)
    except NotReadable as error:
        raise ConfigError(f"model {str(file)!r} cannot be read: {error}") from None
    try:
        fields = from_json(data)
    except NotReadable as error:
        raise ConfigError(
            f"model {str(file)!r} is not a Transformers config.json: {error}"
        ) from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(
            f"model {str(file)!r} is not a Transformers config.json: it names no model_type"
        )
    return fields


def positions_of(fields: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence, where the `fields` of a config.json say it."""
    given = (fields.get(name) for name in ("n_positions", "max_position_embeddings"))
    return next((one for one in given if type(one) is int and one > 0), None)
