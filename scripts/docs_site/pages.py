"""The pages that are made when the site is built: their place in the site and their Markdown.

The reference of the configuration is ``zeroshard.config.reference`` where the package has that
module, and a table of the fields of ``Config`` otherwise.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.docs_site.api import api_page
from scripts.docs_site.messages import messages_page

__all__ = ["COPIED", "ROOT", "command_line_page", "configuration_page", "generated_pages"]

ROOT = Path(__file__).parents[2]
# files of the repository that are pages of the site
COPIED = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
HELP_COLUMNS = "88"


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every generated page by its path in the site."""
    return {
        "reference/api.md": api_page(),
        "reference/configuration.md": configuration_page(),
        "reference/command-line.md": command_line_page(),
        "reference/messages.md": messages_page(),
        **{path: (ROOT / name).read_text() for name, path in COPIED.items()},
    }


def configuration_page() -> str:
    """Return the reference of the keywords of ``zeroshard.shard``."""
    from zeroshard import config

    out = [
        "# Configuration reference",
        "",
        "The keywords of [`zs.shard`](api.md#shard), and the keys of its JSON form"
        ' (`config="zero.json"`). A key that does not exist, and an option without effect, raise'
        " ConfigError.",
        "",
    ]
    if find_spec("zeroshard.config.reference") is not None:
        described = import_module("zeroshard.config.reference")
        return "\n".join(out) + "\n" + str(described.reference_markdown())
    for name in ("Config", "Comm", "Offload"):
        model = getattr(config, name)
        out += [f"## {name}", "", "| key | type | default |", "|---|---|---|"]
        out += list(_fields(model))
        out += ["", f"[`{name}`](api.md#{name.lower()}) says what each key does.", ""]
    return "\n".join(out) + "\n"


def _fields(model: Any) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if not field.exclude:
            kind = str(field.annotation).replace("typing.", "").replace("|", "\\|")
            kind = kind.removeprefix("<class '").removesuffix("'>").rpartition("zeroshard.")[2]
            default = field.default if isinstance(field.default, str | int | float) else None
            yield f"| `{name}` | {kind} | `{default!r}` |"


def command_line_page() -> str:
    """Return the help of every command, from the parsers."""
    from zeroshard.launch.cli import build_parsers

    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = HELP_COLUMNS  # argparse asks for it
    try:
        parser = build_parsers()[0]
        out = [
            "# Command line reference",
            "",
            "Made from the parsers when the site is built. Errors are one line on stderr;"
            " [exit codes](../errors.md#exit-codes) say what went wrong.",
        ]
        for name, one in _parsers(parser):
            out += ["", f"## {name}", "", "```text", one.format_help().rstrip(), "```"]
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return "\n".join(out) + "\n"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield `parser` and those of its commands, with the words that call them."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _parsers(one)
