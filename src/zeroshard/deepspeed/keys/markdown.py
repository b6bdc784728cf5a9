"""docs/deepspeed-keys.md, from the table of DeepSpeed's keys."""

from __future__ import annotations

import json
from typing import Any

from zeroshard.deepspeed.keys.key_rows import Key, an_object
from zeroshard.deepspeed.keys.table import KEYS

__all__ = ["deepspeed_markdown"]


def deepspeed_markdown() -> str:
    """Return the table of DeepSpeed's keys in Markdown."""
    rows = [f"| `{name}` | {_shown(key.default)} | {_effect(key)} |" for name, key in KEYS.items()]
    return "\n".join([_HEAD, "| key | its default | here |", "|---|---|---|", *rows]) + "\n"


_HEAD = """# DeepSpeed's keys

What each key of a DeepSpeed configuration does here: it *becomes* an option of ours, it makes *no
difference*, or it is *refused* where it asks for something else than happens here anyway. Defaults
are those of DeepSpeed's code. `zeroshard config explain FILE` says the same of one file. A key that
is not in this table is refused, with the nearest one.

Made by `python -m zeroshard.config.reference deepspeed`.
"""


def _shown(default: Any) -> str:
    text = f"{default:g}".replace("e+0", "e") if type(default) is float else json.dumps(default)
    return "" if default is None else f"`{text}`"


def _effect(key: Key) -> str:
    if key.lower is not None:
        return f"becomes ours: {key.why}"
    if not key.instead:
        return f"no difference: {key.why}"
    where = "where it is on" if key.kind is an_object else "otherwise"
    return f"refused {where}: {key.why} ({key.instead})"
