"""``zeroshard config``: what each key of a configuration does, and the schema of ours.

    zeroshard config explain ds_config.json      ours or DeepSpeed's: every key and its effect
    zeroshard config explain zero.json --json    the same for programs
    zeroshard config schema                      the JSON schema of ours, for editors

Exit code 3 where a key is refused.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.errors import ConfigError
from zeroshard.terminal.console import print_json, say
from zeroshard.terminal.declared import JSON, Option, Subcommand

if TYPE_CHECKING:
    from zeroshard.deepspeed.keys.findings import Finding


def explained(source: str | Path | dict[str, Any]) -> tuple[str, list[Finding]]:
    """Return the form of a configuration and a finding for each key; DeepSpeed's form is read as
    its ``initialize()`` reads it. Raises ConfigError where there is no JSON object.
    """
    from zeroshard.deepspeed import start
    from zeroshard.deepspeed.file import read_deepspeed
    from zeroshard.launch.explain import explain
    from zeroshard.sharding.checks import check_model

    form, findings = explain(source)
    if form == "deepspeed":
        findings = start.findings(read_deepspeed(source), check_model)
    return form, findings


def _explain(arguments: argparse.Namespace) -> int:
    form, findings = explained(arguments.file)
    refused = sum(finding.verdict == "refused" for finding in findings)
    if arguments.json:
        keys = [asdict(finding) for finding in findings]
        print_json({"form": form, "refused": refused, "keys": keys})
    else:
        say(f"{arguments.file} ({form}'s form)")
        for finding in findings:
            say(_lines(finding))
        if refused:
            print(f"{refused} of {len(findings)} keys refused")
    return ConfigError.exit_code if refused else 0


def _lines(finding: Finding) -> str:
    """Return a finding as two lines: the key, then its effect."""
    value = json.dumps(finding.value, default=str)
    key = f"{finding.key} = {value}  ({finding.source})" if finding.key else "all together"
    effect = ": ".join(filter(None, [finding.becomes, finding.why]))
    return f"{finding.word:13} {key}\n              {effect}"


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
