"""The keys of DeepSpeed's configuration and what each does here.

Defaults are those of DeepSpeed's code, also where its documentation says otherwise.
"""

from __future__ import annotations

from zeroshard.config.deepspeed.other_keys import OTHER_KEYS
from zeroshard.config.deepspeed.rows import Key
from zeroshard.config.deepspeed.zero_keys import ZERO_KEYS

__all__ = ["KEYS", "SECTIONS", "key_of"]

KEYS: dict[str, Key] = {key.name: key for key in (*ZERO_KEYS, *OTHER_KEYS)}
_PARTS = [name.split(".") for name in KEYS]
SECTIONS = frozenset(".".join(parts[:n]) for parts in _PARTS for n in range(1, len(parts)))


def key_of(name: str) -> Key | None:
    """Return the row of a key: its own, or that of all keys of its section."""
    return KEYS.get(name) or KEYS.get(f"{name.rpartition('.')[0]}.*")
