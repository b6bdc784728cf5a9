"""The form of a row of the table of DeepSpeed's keys, and the kinds of values that keys take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from re import fullmatch
from typing import Any

Kind = Callable[[Any], str]  # the end of a sentence about a value of another kind, or ""
Test = Callable[[Any], bool]
Idle = Callable[[Any, Mapping[str, Any]], str]
# options of ours ("comm.node_size") and their values, of a value, of all values of the file (those
# left out, and "auto", are DeepSpeed's default), and of more; raises ConfigError with the reason
Lower = Callable[..., dict[str, Any]]


def _kind(*tests: tuple[Test, str]) -> Kind:
    """Take values that pass every test; say of another what its first failing test says."""
    return lambda value: next((complaint for test, complaint in tests if not test(value)), "")


_NUMBERS = (int, float)
_FINITE: tuple[Test, str] = (lambda v: type(v) in _NUMBERS and isfinite(v), "is not a number")

flag = _kind((lambda v: type(v) is bool, "is neither true nor false"))
number = _kind(_FINITE, (lambda v: v >= 0, "is negative"))
# also as DeepSpeed's files write whole numbers: 5e8
count = _kind(_FINITE, (lambda v: v >= 1 and v == int(v), "is not a whole number from 1"))
whole = _kind((lambda v: type(v) is int and v >= 0, "is not a whole number"))
# infinity stands for never, and -1 for no ranks
every = _kind((lambda v: type(v) in _NUMBERS and v >= 0, "is not a number of steps"))
ranks = _kind((lambda v: type(v) is int and (v >= 1 or v == -1), "is not a number of ranks"))
levels = _kind((
    lambda v: type(v) in (int, str) and bool(fullmatch(r"[1-9]\d*(x[1-9]\d*)*", str(v))),
    "is neither a number of leaves nor levels such as '3x2x2'",
))  # fmt: skip
texts = _kind((
    lambda v: isinstance(v, list) and all(isinstance(one, str) for one in v),
    "is not a list of names",
))  # fmt: skip
text = _kind((lambda v: isinstance(v, str), "is not text"))
# null and false stand for an empty object
an_object = _kind((lambda v: isinstance(v, dict | None) or v is False, "is not an object"))
anything = _kind()  # for keys that make no difference here


def one_of(*choices: Any, also: tuple[Any, ...] = ()) -> Kind:
    """Take one of `choices`, or of older forms, `also`; a number is not a truth value."""
    known = [(type(one), one) for one in (*choices, *also)]
    complaint = f"is not one of {', '.join(map(str, choices))}"
    return _kind((lambda value: (type(value), value) in known, complaint))


@dataclass(frozen=True)
class Key:
    """The effect of one of DeepSpeed's keys here.

    With `lower` it becomes an option of ours. Else a value that is not `harmless` is refused,
    because it would change a run; all others make no difference here.
    """

    default: Any
    why: str  # one sentence
    kind: Kind = anything
    lower: Lower | None = None
    more: tuple[str, ...] = ()  # arguments of `lower`
    harmless: Test = lambda value: True
    instead: str = ""  # of a refused value
    tells_default: bool = False  # also where it is left out, its default has an effect
    idle: Idle | None = None  # of the value and all values: why it has no effect, or ""
    done: str = ""  # of a key that only watches: what initialize() writes for it

    only_watches: bool = False

    def watches_in_vain(self, value: Any) -> bool:
        """Whether `value` asks to be shown something that nothing shows here."""
        return self.only_watches and not self.done and self.is_on(value)

    def is_on(self, value: Any) -> bool:
        """Whether a section of switches, or a flag, is switched on."""
        return _is_on(value, "enabled") if isinstance(value, dict) else bool(value)


def becomes(default: Any, kind: Kind, why: str, lower: Lower, *more: str, **rest: Any) -> Key:
    """Return a key that is an option of ours, too: `lower` of its value, all values and `more`."""
    return Key(default, why, kind, lower, more, **rest)


tunes = Key  # a key that changes speed or memory there, and nothing here


def refuses(default: Any, why: str, instead: str = "leave it out") -> Key:
    """Return a key that asks for something else than happens here, unless it has its default."""
    usual = (type(None), None), (type(default), default)
    return Key(default, why, harmless=lambda v: (type(v), v) in usual, instead=instead)


def section(why: str, instead: str = "leave it out", switch: str = "enabled") -> Key:
    """Return a whole section that asks for something else than happens here, unless each `switch`
    in it, at any depth, is off or left out; without a switch, unless it is empty.
    """

    def is_off(value: Any) -> bool:
        return not value or (bool(switch) and not _is_on(value, switch))

    return Key(None, why, an_object, harmless=is_off, instead=instead)


def watches(default: Any, kind: Kind, why: str, done: str = "") -> Key:
    """Return a key that changes no number: `done` is what initialize() writes for it, `why` what
    to use elsewhere.
    """
    return Key(default, why, kind, done=done, only_watches=True)


def _is_on(value: Any, switch: str) -> bool:
    """Whether a `switch` in an object is on, at any depth."""
    held = value.items() if isinstance(value, dict) else ()
    return any((key == switch and bool(one)) or _is_on(one, switch) for key, one in held)
