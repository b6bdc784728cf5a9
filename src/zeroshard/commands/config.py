"""``zeroshard config``: what each key of a configuration does, and the schema of ours.

    zeroshard config explain ds_config.json      ours or DeepSpeed's: every key and its effect
    zeroshard config explain zero.json --json    the same for programs
    zeroshard config schema                      the JSON schema of ours, for editors

Exit code 3 where a key is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.errors import ConfigError
from zeroshard.terminal import JSON, Option, Subcommand, print_json, say

if TYPE_CHECKING:
    from zeroshard.deepspeed.keys.findings import Finding


def explained(source: str | Path | dict[str, Any]) -> tuple[str, list[Finding]]:
    """Return the form of a configuration and a finding for each key; DeepSpeed's form is read as
    its ``initialize()`` reads it. Raises ConfigError where there is no JSON object.
    """
    from zeroshard.deepspeed import start
    from zeroshard.deepspeed.file import read_deepspeed
    from zeroshard.sharding.checks import check_optimizer

    form, findings = explain(source)
    if form == "deepspeed":
        findings = start.findings(read_deepspeed(source), check_optimizer)
    return form, findings


def explain(source: str | Path | dict[str, Any]) -> tuple[str, list[Finding]]:
    """Return the form of a configuration ("zeroshard" or "deepspeed") and a finding for each key.

    Raises ConfigError where there is no JSON object; a key never raises. A combination that is
    refused has a finding of its own, without a key.
    """
    from zeroshard.config.native import Config, build_config
    from zeroshard.config.strict_json import read_json
    from zeroshard.deepspeed.file import read_deepspeed
    from zeroshard.deepspeed.keys.findings import Finding, is_deepspeed

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
    from zeroshard.config.reference import SECTIONS, options
    from zeroshard.config.strict_json import flattened, nearest
    from zeroshard.deepspeed.keys.findings import Finding

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


def _explain(arguments: argparse.Namespace) -> int:
    form, findings = explained(arguments.file)
    refused = sum(finding.verdict == "refused" for finding in findings)
    if arguments.json:
        keys = [asdict(finding) for finding in findings]
        print_json({"form": form, "refused": refused, "keys": keys})
    else:
        say(f"{arguments.file} ({form}'s form)")
        for finding in findings:
            value = json.dumps(finding.value, default=str)
            key = f"{finding.key} = {value}  ({finding.source})" if finding.key else "all together"
            effect = ": ".join(filter(None, [finding.becomes, finding.why]))
            say(f"{finding.word:13} {key}\n              {effect}")
        if refused:
            print(f"{refused} of {len(findings)} keys refused")
    return ConfigError.exit_code if refused else 0


def _schema(arguments: argparse.Namespace) -> int:
    from zeroshard.config.reference import schema

    print(json.dumps(schema(), indent=2))
    return 0


_EXPLAIN_OPTIONS = (
    Option("FILE", "JSON, ours or DeepSpeed's", Path, dest="file"),
    JSON,
)  # fmt: skip
_EXPLAIN = Subcommand(
    "explain", "each key of a file, its value, where it comes from, and its effect",
    "zeroshard config explain ds_config.json", _EXPLAIN_OPTIONS, _explain,
    description="Exit code 3 where a key is refused.",
)  # fmt: skip
_SCHEMA = Subcommand(
    "schema", "print the JSON schema of our form, for editors",
    "zeroshard config schema > zeroshard.schema.json", handler=_schema,
    description="Print the JSON schema of our form, for editors.",
)  # fmt: skip
COMMAND = Subcommand(
    "config", "say what each key of a configuration does, ours or DeepSpeed's",
    "zeroshard config explain ds_config.json", commands=(_EXPLAIN, _SCHEMA),
    description="Say what a configuration does here, ours or DeepSpeed's.",
)  # fmt: skip
