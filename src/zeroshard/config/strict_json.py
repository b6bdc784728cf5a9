"""Strict JSON, and the nearest right name for a wrong one: for both kinds of configuration."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from zeroshard.config.hjson_text import NotHjson, parse_hjson
from zeroshard.errors import ConfigError
from zeroshard.system.safe_files import NotReadable, check_depth, read_file


def read_json(path: str | Path, relaxed: Callable[[Any], bool] | None = None) -> Any:
    """Read a JSON file; raises ConfigError naming `path`. An HJSON file is read where `relaxed` is
    true of what it holds.
    """
    try:
        data = read_file(path)
    except NotReadable as error:
        raise ConfigError(f"config={str(path)!r} cannot be read: {error}") from None
    return parse_json(data, f"config={str(path)!r}", relaxed)


def parse_json(text: str | bytes, where: str, relaxed: Callable[[Any], bool] | None = None) -> Any:
    """Read strict JSON (no NaN, Infinity or repeated key), or HJSON where `relaxed` is true of what
    it holds. Raises ConfigError naming `where`.
    """

    def number(literal: str) -> float:
        if not isfinite(float(literal)):
            raise ValueError(f"{literal[:40]} is not a finite number")
        return float(literal)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ValueError(f"the key {key!r} is there twice")
        return out

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        data = json.loads(text, object_pairs_hook=unique, parse_float=number, parse_constant=number)
        check_depth(data)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not JSON: it is not UTF-8 text, from byte {error.start} on"
        ) from None
    except (RecursionError, NotReadable):
        raise ConfigError(f"{where} is not JSON that can be read: it is nested too deep") from None
    except ValueError as error:
        with suppress(NotHjson, NotReadable):
            data = parse_hjson(str(text)) if relaxed is not None else None
            check_depth(data)
            if relaxed is not None and isinstance(data, dict) and relaxed(data):
                return data
        raise ConfigError(f"{where} is not JSON: {error}") from None
    return data


def flattened(
    data: Mapping[str, Any], is_section: Callable[[str, Any], bool], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted name; of objects that are sections those inside them."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and is_section(name, value):
            yield from flattened(value, is_section, f"{name}.")
        else:
            yield name, value


def nearest(name: str, choices: list[str]) -> str:
    """Return "; did you mean 'x'?" for the choice nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
