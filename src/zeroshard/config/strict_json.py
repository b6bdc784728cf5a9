"""Strict JSON, and the nearest right name for a wrong one: for both kinds of configuration."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.system.safe_files import NotReadable, check_depth, read_file

# --------------------------------------------------------------------------------------- hjson text
# HJSON, which DeepSpeed's configurations may be: JSON with comments, trailing or missing commas,
# keys and texts without quotes.
#
#     {
#       // a comment, also # and /* */
#       train_batch_size: 8,
#       "zero_optimization": {"stage": 2},
#     }
#
# Source: the syntax of hjson.org. Numbers that are not finite, and keys that are there twice, are
# errors, as in our strict JSON.


# possessive: a repeated group that may go back keeps a place in memory for each time
_SPACE = re.compile(r"(?:\s++|//[^\n]*+|#[^\n]*+|/\*.*?\*/)*+", re.DOTALL)
_KEY = re.compile(r"[^\s,:\[\]{}\"']+")
_TEXT = re.compile(r'"(?:[^"\\\n]++|\\.)*+"' + r"|'(?:[^'\\\n]++|\\.)*+'")
_LINES = re.compile(r"'''(.*?)'''", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# a word of JSON ends where its line does, or at a comma, a bracket or a comment
_WORD = re.compile(r"([^\s,\]}#/]+)[ \t]*(?=$|[,\]}\r\n]|#|//|/\*)")
_CONSTANTS = {"true": True, "false": False, "null": None}
_MOST_DEPTH = 100


class NotHjson(Exception):
    """The text is not HJSON."""


def parse_hjson(text: str) -> Any:
    """Read HJSON. Raises NotHjson."""
    reader = _Reader(text)
    first = reader.peek()
    if not first:
        raise NotHjson("it is empty")
    braces = first in ("{", "[")
    value = reader.value() if braces else reader.members("")
    if reader.peek():
        raise NotHjson(f"there is more after the end, at character {reader.at}")
    return value


class _Reader:
    """A place in a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._depth = 0

    def peek(self) -> str:
        """Return the next character after blanks and comments, "" at the end."""
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at : self.at + 1]

    def value(self) -> Any:
        """Read one value."""
        first = self.peek()
        if first == "{":
            return self._inside(self.members, "}")
        if first == "[":
            return self._inside(self._items, "]")
        if (lines := self._take(_LINES)) is not None:
            return lines.group(1).strip("\r\n")
        if first in ('"', "'"):
            return self._text()
        return self._word()

    def members(self, end: str) -> dict[str, Any]:
        """Read the keys and values of an object up to `end`."""
        out: dict[str, Any] = {}
        while (first := self.peek()) != end:
            if first == ",":
                self.at += 1
                continue
            key = self._text() if first in ('"', "'") else self._key()
            if self.peek() != ":":
                raise NotHjson(f"no ':' after the key {key!r}")
            self.at += 1
            if key in out:
                raise NotHjson(f"the key {key!r} is there twice")
            out[key] = self.value()
        return out

    def _items(self, end: str) -> list[Any]:
        out: list[Any] = []
        while (first := self.peek()) != end:
            if first == ",":
                self.at += 1
            elif first:
                out.append(self.value())
            else:
                raise NotHjson("a list has no end")
        return out

    def _inside(self, read: Any, end: str) -> Any:
        self.at += 1
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise NotHjson("it is nested too deep")
        out = read(end)
        self._depth -= 1
        self.at += 1
        return out

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def _key(self) -> str:
        if (found := self._take(_KEY)) is None:
            raise NotHjson(f"no key at character {self.at}")
        return found.group()

    def _text(self) -> str:
        found = self._take(_TEXT)
        if found is None:
            raise NotHjson(f"a text without end, from character {self.at} on")
        inside = found.group()[1:-1]
        if found.group()[0] == "'":
            inside = inside.replace("\\'", "'").replace('"', '\\"')
        try:
            return str(json.loads(f'"{inside}"'))
        except ValueError as error:
            raise NotHjson(str(error)) from None

    def _word(self) -> Any:
        """Read a number or a constant; anything else is a text up to the end of its line."""
        found = self._take(_WORD)
        word = found.group(1) if found else ""
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if _NUMBER.fullmatch(word):
            try:
                value: int | float = json.loads(word)
            except ValueError:  # more digits than Python reads
                value = float("inf")
            if not isfinite(value):
                raise NotHjson(f"{word[:40]} is not a finite number")
            return value
        self.at = found.start() if found else self.at
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        line = self.text[self.at : end].strip()
        if not line or line[0] in ",:]}" or word.lstrip("-") in ("NaN", "Infinity"):
            raise NotHjson(f"no value at character {self.at}")
        self.at = end
        return line


# -------------------------------------------------------------------------------------- strict json


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
