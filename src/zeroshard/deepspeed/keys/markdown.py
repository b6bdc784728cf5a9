"""docs/deepspeed-keys.md, from the table of DeepSpeed's keys."""

from __future__ import annotations

import json
from typing import Any

from zeroshard.deepspeed.keys.key_rows import Key, an_object
from zeroshard.deepspeed.keys.table import KEYS


def deepspeed_markdown() -> str:
    """Return the table of DeepSpeed's keys in Markdown."""
    rows = [f"| `{name}` | {_shown(key.default)} | {_effect(key)} |" for name, key in KEYS.items()]
    return "\n".join([_HEAD, "| key | its default | here |", "|---|---|---|", *rows]) + "\n"


_HEAD = """# DeepSpeed's keys

What each key of a DeepSpeed configuration does here: it *becomes* an option of ours, it makes *no
difference*, it *watches*, or it is *refused* where it asks for something else than happens here
anyway. Defaults are those of DeepSpeed's code. `zeroshard config explain FILE` says the same of one
file. Keys of stage 3 may leave out their `stage3_`. A key at the top that is not in this table is a
warning, with the nearest one, since DeepSpeed drops it; inside of a section it is refused. A file
may be HJSON: comments, keys without quotes, commas where they are not needed.

Made by `python -m zeroshard.config.reference deepspeed`.
"""


def _shown(default: Any) -> str:
    text = f"{default:g}".replace("e+0", "e") if type(default) is float else json.dumps(default)
    return "" if default is None else f"`{text}`"


def _effect(key: Key) -> str:
    if key.lower is not None:
        return f"becomes ours: {key.why}"
    if key.done:
        return f"watches: with initialize() {key.done}; elsewhere: {key.why}"
    if not key.instead:
        return f"no difference: {key.why}"
    where = "where it is on" if key.kind is an_object else "otherwise"
    return f"refused {where}: {key.why} ({key.instead})"
