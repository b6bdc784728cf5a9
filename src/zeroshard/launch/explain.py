"""What each key of a configuration does here, ours or DeepSpeed's, for ``zeroshard config``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeroshard.config.native import Config, build_config
from zeroshard.config.reference import SECTIONS, options
from zeroshard.config.strict_json import flattened, nearest, read_json
from zeroshard.deepspeed.file import read_deepspeed
from zeroshard.deepspeed.keys.findings import Finding, is_deepspeed
from zeroshard.errors import ConfigError


def explain(source: str | Path | dict[str, Any]) -> tuple[str, list[Finding]]:
    """Return the form of a configuration ("zeroshard" or "deepspeed") and a finding for each key.

    Raises ConfigError where there is no JSON object; a key never raises. A combination that is
    refused has a finding of its own, without a key.
    """
    data = source
    if isinstance(source, (str, Path)):
        data = read_json(source, lambda data: is_deepspeed(data, Config.model_fields))
    if not isinstance(data, dict):
        raise ConfigError(f"a configuration is a JSON object, not a {type(data).__name__}")
    theirs = is_deepspeed(data, Config.model_fields)
    findings = list(read_deepspeed(data).findings if theirs else _ours(data))
    if not any(finding.verdict == "refused" for finding in findings):
        try:
            config = read_deepspeed(data).config() if theirs else build_config(data)
            if config.policy != "auto":
                config.refuse_unsupported()
        except ConfigError as error:
            findings.append(Finding("", None, "file", "refused", "", str(error)))
    return "deepspeed" if theirs else "zeroshard", findings


def _ours(data: dict[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each key of our form, and for each option that is left out."""
    known = options()
    flat = dict(flattened(data, lambda name, value: name in SECTIONS))
    for name, value in flat.items():
        field = known.get(name)
        if field is None:
            section, _, last = name.rpartition(".")
            inside = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == section]
            why = f"is not an option of ours{nearest(last, inside)}"
            yield Finding(name, value, "file", "refused", "", why)
        else:
            yield Finding(name, value, "file", "honoured", "", field.description or "")
    for name, field in known.items():
        is_given = any(key == name or key.startswith(f"{name}.") for key in flat)
        if not is_given and name not in SECTIONS:
            why = field.description or ""
            yield Finding(name, field.default, "default", "honoured", "", why)
