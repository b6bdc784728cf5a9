"""The pages that are made when the site is built: their place in the site and their Markdown."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from scripts.docs_site.api import api_page
from scripts.docs_site.messages import messages_page

__all__ = ["COPIED", "ROOT", "command_line_page", "configuration_page", "generated_pages"]

ROOT = Path(__file__).parents[2]
# files of the repository that are pages of the site
COPIED = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
HELP_COLUMNS = "88"
# of a page's front matter: the site's search shows what explains before what lists
BEHIND = "---\nsearch:\n  boost: 0.2\n---\n\n"


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every generated page by its path in the site."""
    made = {
        "reference/api.md": api_page(),
        "reference/configuration.md": configuration_page(),
        "reference/command-line.md": command_line_page(),
        "reference/messages.md": messages_page(),
    }
    copied = {path: (ROOT / name).read_text() for name, path in COPIED.items()}
    return {path: BEHIND + text for path, text in made.items()} | copied


def configuration_page() -> str:
    """Return the reference of the keywords of ``zeroshard.shard``."""
    from zeroshard.config.reference import reference_markdown

    return (
        "# Configuration reference\n\nThe keywords of [`zs.shard`](api.md#shard), and the keys of"
        ' its JSON form (`config="zero.json"`). A key that does not exist, and an option without'
        f" effect, raise ConfigError.\n\n{reference_markdown()}"
    )


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
