"""The form of a row of the table of DeepSpeed's keys, and the kinds of values that keys take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

__all__ = [
    "Key", "Kind", "Lower", "an_object", "anything", "becomes", "count", "every", "flag", "number",
    "one_of", "ranks", "refuses", "refuses_section", "text", "tunes", "whole",
]  # fmt: skip

Kind = Callable[[Any], str]  # the end of a sentence about a value of another kind, or ""
# an option of ours ("comm.node_size") and its value, from a value and all values of the file, of
# which those left out and "auto" have DeepSpeed's default; raises ConfigError with the reason
Lower = Callable[[Any, Mapping[str, Any]], dict[str, Any]]


def flag(value: Any) -> str:
    """Take true and false."""
    return "" if type(value) is bool else "is neither true nor false"


def number(value: Any) -> str:
    """Take numbers that are not negative."""
    if type(value) not in (int, float) or not isfinite(value):
        return "is not a number"
    return "" if value >= 0 else "is negative"


def count(value: Any) -> str:
    """Take whole numbers from 1, also as DeepSpeed's files write them: 5e8."""
    if type(value) not in (int, float) or not isfinite(value):
        return "is not a number"
    return "" if value >= 1 and value == int(value) else "is not a whole number from 1"


def every(value: Any) -> str:
    """Take numbers of steps, infinity among them: never."""
    return "" if type(value) in (int, float) and value >= 0 else "is not a number of steps"


def ranks(value: Any) -> str:
    """Take numbers of ranks; -1 stands for none."""
    return "" if type(value) is int and (value >= 1 or value == -1) else "is not a number of ranks"


def whole(value: Any) -> str:
    """Take whole numbers from 0."""
    return "" if type(value) is int and value >= 0 else "is not a whole number"


def text(value: Any) -> str:
    """Take text."""
    return "" if isinstance(value, str) else "is not text"


def an_object(value: Any) -> str:
    """Take objects; null and false stand for an empty one."""
    return "" if isinstance(value, dict) or value is None or value is False else "is not an object"


def anything(value: Any) -> str:
    """Take any value: for keys whose value makes no difference here."""
    return ""


def one_of(*choices: Any, also: tuple[Any, ...] = ()) -> Kind:
    """Take one of `choices`, or of older forms, `also`; a number is not a truth value."""

    def kind(value: Any) -> str:
        if any(type(value) is type(one) and value == one for one in (*choices, *also)):
            return ""
        return f"is not one of {', '.join(map(str, choices))}"

    return kind


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's and what it does here.

    With `lower` it becomes an option of ours. Else a value that is not `harmless` is refused,
    because it would change a run; all others make no difference here.
    """

    name: str  # dotted; a last part "*" stands for every key of the section
    default: Any
    why: str  # one sentence
    kind: Kind = anything
    lower: Lower | None = None
    harmless: Callable[[Any], bool] = lambda value: True
    instead: str = ""  # of a refused value
    tells_default: bool = False  # also where it is left out, its default has an effect


def becomes(
    name: str, default: Any, kind: Kind, lower: Lower, why: str, *, tells_default: bool = False
) -> Key:
    """Return a key that is an option of ours, too."""
    return Key(name, default, why, kind, lower, tells_default=tells_default)


def tunes(name: str, default: Any, why: str, kind: Kind = anything) -> Key:
    """Return a key that changes speed or memory there, and nothing here."""
    return Key(name, default, why, kind)


def refuses(name: str, default: Any, why: str, instead: str = "leave it out") -> Key:
    """Return a key that asks for something else than happens here, unless it has its default."""

    def harmless(value: Any) -> bool:
        return value is None or (type(value) is type(default) and value == default)

    return Key(name, default, why, harmless=harmless, instead=instead)


def refuses_section(
    name: str, why: str, instead: str, *, switches: tuple[str, ...] = ("enabled",)
) -> Key:
    """Return a whole section that asks for something else than happens here, unless each of
    `switches` in it, at any depth, is off or left out; without switches, unless it is empty.
    """

    def settings(value: Any) -> list[Any]:
        if not isinstance(value, dict):
            return []
        own = [setting for key, setting in value.items() if key in switches]
        return own + [one for inner in value.values() for one in settings(inner)]

    def harmless(value: Any) -> bool:
        return not value or (bool(switches) and not any(settings(value)))

    return Key(name, None, why, an_object, harmless=harmless, instead=instead)
