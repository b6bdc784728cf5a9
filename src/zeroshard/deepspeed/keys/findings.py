"""A DeepSpeed configuration against the table: what each of its keys does here, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from zeroshard.config.strict_json import flattened, nearest, read_json
from zeroshard.deepspeed.keys.table import KEYS, SECTIONS, an_object, key_of
from zeroshard.errors import ConfigError

_PATHS = (str, Path)
_FILLED_IN = "left to whoever fills it in, and else to our default"
_LEAVE_OUT = " (up to 0.19.8): leave it out"
_READ_BY_NAME = ("optimizer", "scheduler")  # sections that drop other keys
_TOLD = [name for name, key in KEYS.items() if key.tells_default]


@dataclass(frozen=True)
class Finding:
    """One key of a configuration: its value, where that came from, and what it does here."""

    key: str  # dotted
    value: Any
    source: str  # "file", "default" or "auto"
    verdict: str  # "honoured" (our option of the same name), "mapped", "ignored" or "refused"
    becomes: str  # our options and their values; empty where nothing changes
    why: str  # one sentence

    @property
    def word(self) -> str:
        """Return the verdict in the words of docs/deepspeed-keys.md."""
        if self.verdict != "ignored":
            return self.verdict
        return "filled in" if self.why == _FILLED_IN else "no difference"

    @property
    def line(self) -> str:
        """Return the key, its value and the reason, as errors name them."""
        text = repr(self.value)
        text = text if len(text) <= 60 else f"{text[:57]}..."
        if not self.key:  # of all keys together
            return self.why
        between = " " if self.why.startswith(("is ", "has ", "needs ")) else ": "
        return f"{self.key}={text}{between}{self.why}"


@dataclass(frozen=True)
class FileFindings:
    """A DeepSpeed configuration, read. Values "auto" are left to whoever fills them in."""

    findings: tuple[Finding, ...]
    fields: dict[str, Any]  # keywords of zeroshard.Config
    optimizer: tuple[str, dict[str, Any]] | None  # type and params
    scheduler: tuple[str, dict[str, Any]] | None
    data: dict[str, Any]  # the file as it was read

    def refusals(self) -> list[Finding]:
        """Return the keys that cannot be honoured."""
        return [finding for finding in self.findings if finding.verdict == "refused"]

    def without_effect(self) -> list[str]:
        """Return the keys that the file sets to another value than DeepSpeed's default, and that
        make no difference here.
        """
        set_in_vain = (
            one for one in self.findings if (one.verdict, one.source) == ("ignored", "file")
        )
        keys = ((one, key_of(one.key)) for one in set_in_vain)
        return [one.key for one, key in keys if key and one.value not in (None, key.default)]

    def unknown(self) -> list[str]:
        """Return a line for each key that is none of DeepSpeed's, which drops it, too."""
        ours = (one for one in self.findings if one.verdict == "ignored")
        return [one.line for one in ours if one.key not in SECTIONS and key_of(one.key) is None]

    def checked_fields(self) -> dict[str, Any]:
        """Return `fields`. Raises ConfigError with every refused key and its reason, one a line."""
        refused = self.refusals()
        lines = [finding.line for finding in refused]
        if len(lines) == 1:
            raise ConfigError(f"DeepSpeed's {lines[0]}" if refused[0].key else lines[0])
        if lines:
            text = "".join(f"\n  {line}" for line in lines)
            raise ConfigError(f"{len(lines)} keys of DeepSpeed's are refused:{text}")
        return self.fields


def is_deepspeed(data: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether `data` has keys of DeepSpeed's alone, and none of `ours` alone."""
    theirs = {key.split(".")[0] for key in KEYS}
    keys = {key.partition(".")[0] for key in data}
    return bool((keys & theirs) - ours.keys()) and not (keys & ours.keys()) - theirs


def read(source: str | Path | dict[str, Any]) -> FileFindings:
    """Read a DeepSpeed configuration: a path to its JSON, or the dict.

    Raises ConfigError where there is no JSON object; a key never raises.
    """
    data = read_json(source, relaxed=lambda data: True) if isinstance(source, _PATHS) else source
    if not isinstance(data, dict):
        raise ConfigError(
            f"a DeepSpeed configuration is a JSON object, not a {type(data).__name__}"
        )
    data = _prefixed(_nested(_plain(data)))
    if data.get("zero_optimization") is True:  # an old form of stage 1
        data = {**data, "zero_optimization": {"stage": 1}}
    flat = dict(flattened(data, lambda name, value: name in SECTIONS and bool(value)))
    flat = {name: value for name, value in flat.items() if value is not None or name not in _TOLD}
    wrong = {key: why for key, value in flat.items() if (why := _complaint(key, value))}
    values = {name: key.default for name, key in KEYS.items()}
    values |= {
        name: value
        for name, value in flat.items()
        if name not in wrong and value not in (None, "auto")
    }
    if flat.get("zero_optimization.stage") == "auto":
        values["zero_optimization.stage"] = 3  # our default
    if values["zero_optimization.stage"] != 3:
        values["zero_optimization.offload_param.device"] = "none"
    untold = [name for name in _TOLD if name not in flat and not _is_off(name, values)]
    findings: list[Finding] = []
    fields: dict[str, Any] = {}
    for name in (*flat, *untold):
        value = flat.get(name, values.get(name))
        source = "default" if name in untold else "auto" if value == "auto" else "file"
        options: dict[str, Any] = {}
        verdict, why = "refused", wrong.get(name, "")
        if not why:
            verdict, why = _judged(name, value, source == "auto", values, options)
        becomes = ", ".join(f"{option}={setting!r}" for option, setting in options.items())
        findings.append(Finding(name, value, source, verdict, becomes, why))
        for option, setting in options.items():
            _put(fields, option, setting)
    optimizer, scheduler = _made(data.get("optimizer")), _made(data.get("scheduler"))
    return FileFindings(tuple(findings), fields, optimizer, scheduler, data)


def _nested(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with "section.key", as TRL writes it, in its section."""
    out = {name: value for name, value in data.items() if "." not in str(name)}
    for name, value in data.items():
        section, dot, key = str(name).partition(".")
        within = out.get(section, {})
        if dot and section in SECTIONS and isinstance(within, dict):
            out[section] = {**within, key: value}
        else:
            out[name] = value
    return out


def _plain(value: Any) -> Any:
    """Return `value` with the values of DeepSpeed's enums in their place."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.value if isinstance(value, Enum) else value


def _prefixed(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with the whole names of stage 3's keys, which DeepSpeed takes without, too."""
    zero = data.get("zero_optimization")
    if not isinstance(zero, dict):
        return data
    out: dict[str, Any] = {}
    for key, value in zero.items():
        whole = f"stage3_{key}"
        if f"zero_optimization.{whole}" not in KEYS:
            out[key] = value
        elif whole not in zero:  # else the whole name counts, as there
            out[whole] = value
    return {**data, "zero_optimization": out}


def _is_off(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the section of a key is there, but not enabled."""
    switch = f"{name.rpartition('.')[0]}.enabled"
    return name != switch and switch in values and values[switch] is not True


def _complaint(name: str, value: Any) -> str:
    """Return why a key or its value is not one of DeepSpeed's, or an empty string."""
    if name in SECTIONS:
        return an_object(value)
    key = key_of(name)
    if key is None:
        if "." not in name or name.partition(".")[0] in _READ_BY_NAME:
            return ""  # see _judged()
        return f"is not a key of DeepSpeed's{_nearest_key(name) or _LEAVE_OUT}"
    return "" if value in (None, "auto") else key.kind(value)


def _nearest_key(name: str) -> str:
    """Return the end of a sentence that names the nearest key of the same section, if any."""
    section, dot, last = name.rpartition(".")
    inside = (key.removeprefix(section + dot) for key in KEYS if key.startswith(section + dot))
    return nearest(last, list(dict.fromkeys(key.partition(".")[0] for key in inside)))


def _judged(
    name: str, value: Any, is_auto: bool, values: Mapping[str, Any], options: dict[str, Any]
) -> tuple[str, str]:
    """Return the verdict on a key and the reason; add the options that it becomes to `options`."""
    key = key_of(name)
    if key is None and name in SECTIONS:
        return "ignored", "an empty section"
    if key is None:
        return "ignored", f"is not a key of DeepSpeed's, which drops it{_nearest_key(name)}"
    if is_auto and key.lower is not None:
        return "ignored", _FILLED_IN
    if _is_off(name, values):
        return "ignored", f"counts where {name.rpartition('.')[0]}.enabled is true"
    if not is_auto and not key.harmless(value):
        return "refused", f"{key.why}: {key.instead}"
    if key.lower is None or value is None:
        return "ignored", key.why
    if key.idle is not None and (why := key.idle(value, values)):
        return "ignored", why
    try:
        options |= key.lower(value, values, *key.more)
    except ConfigError as error:
        return "refused", str(error)
    same = list(options) in ([], [name.rpartition(".")[2]])
    return "honoured" if same else "mapped", key.why


def _put(fields: dict[str, Any], name: str, value: Any) -> None:
    """Set the option with a dotted name."""
    *sections, last = name.split(".")
    for section in sections:
        fields = fields.setdefault(section, {})
    fields[last] = value


def _made(section: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the type and the parameters of ``optimizer`` or ``scheduler``."""
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        return None
    params = section.get("params")
    return section["type"], dict(params) if isinstance(params, dict) else {}
