"""The form of a row of the table of DeepSpeed's keys, and the kinds of values that keys take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Key",
    "Kind",
    "Lower",
    "an_object",
    "anything",
    "count",
    "flag",
    "number",
    "one_of",
    "text",
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
    if type(value) not in (int, float):
        return "is not a number"
    return "" if value >= 0 else "is negative"


def count(value: Any) -> str:
    """Take whole numbers from 1, also as DeepSpeed's files write them: 5e8."""
    if type(value) not in (int, float):
        return "is not a number"
    return "" if value >= 1 and value == int(value) else "is not a whole number from 1"


def ranks(value: Any) -> str:
    """Take numbers of ranks; -1 stands for none."""
    return "" if type(value) is int and (value >= 1 or value == -1) else "is not a number of ranks"


def text(value: Any) -> str:
    """Take text."""
    return "" if isinstance(value, str) else "is not text"


def an_object(value: Any) -> str:
    """Take objects; null and false stand for an empty one."""
    return "" if isinstance(value, dict) or value is None or value is False else "is not an object"


def anything(value: Any) -> str:
    """Take any value: for keys whose value makes no difference here."""
    return ""


def one_of(*choices: Any) -> Kind:
    """Take one of `choices`; a number is not a truth value."""

    def kind(value: Any) -> str:
        if any(type(value) is type(one) and value == one for one in choices):
            return ""
        return f"is not one of {', '.join(map(str, choices))}"

    return kind


@dataclass(frozen=True)
class Key:
    """A key of DeepSpeed's and what it does here.

    With `lower` it becomes an option of ours. Else `refused` says whether a value other than the
    default (or those in `harmless`) is refused, because it would change a run; `instead` says what
    to use. A key that is not refused makes no difference here.
    """

    name: str  # dotted
    default: Any
    why: str  # one sentence
    kind: Kind = anything
    lower: Lower | None = None
    refused: bool = False
    instead: str = ""
    harmless: tuple[Any, ...] = ()
    tells_default: bool = False  # also where it is left out, its default has an effect

    def is_harmless(self, value: Any) -> bool:
        """Whether `value` asks for nothing that does not happen here anyway."""
        same = [one for one in (self.default, *self.harmless) if type(one) is type(value)]
        return not self.refused or value is None or value in same
