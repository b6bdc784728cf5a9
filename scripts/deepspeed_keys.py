#!/usr/bin/env python3
"""Compare our table of DeepSpeed's keys with the DeepSpeed that is installed.

    PYTHONPATH=src python scripts/deepspeed_keys.py

Theirs are the fields of its pydantic models, with their defaults, and whatever else its
DeepSpeedConfig looks up in a configuration. Exits with 1 where a key of theirs is not in our
table, or has another default there. Keys that only we have are printed, too: DeepSpeed has removed
them, or documents them and reads them nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_args

import deepspeed
from deepspeed.runtime import config as theirs
from pydantic import BaseModel

from zeroshard.deepspeed.keys.table import KEYS, SECTIONS, key_of

# the sections that are models, as attributes of DeepSpeedConfig; all others are dictionaries
MODELS = {"zero_optimization": "zero_config", "fp16": "float16_config", "bf16": "bfloat16_config"}
REMOVED = {
    *theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS,
    *(f"zero_optimization.{name}" for name in theirs._REMOVED_ZERO_CONFIG_KEYS),
}
# ours says it in words: DeepSpeed's list grows with Transformers
IN_WORDS = "zero_optimization.leaf_module.classes"


class Asked(dict[str, Any]):
    """A dictionary that remembers the keys that it is asked for, and their defaults."""

    def __init__(self, **held: Any) -> None:
        super().__init__(held)
        self.asked: dict[str, Any] = {}

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), ...)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default`."""
        self.asked[key] = default if default != {} else ...
        return super().get(key, default)

    def keys(self) -> Any:
        """Return this dictionary, which is asked as its keys are."""
        return self


def fields(model: type[BaseModel], section: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the default of each field, fields of inner models included."""
    for name, field in model.model_fields.items():
        whole = f"{section}.{field.alias or name}"
        inner = [
            one
            for one in (field.annotation, *get_args(field.annotation))
            if isinstance(one, type) and issubclass(one, BaseModel)
        ]
        if inner and whole not in KEYS:
            yield from fields(inner[0], whole)
        else:
            yield whole, field.get_default(call_default_factory=True)


def main() -> None:
    """Print the differences, one a line."""
    opened = sorted({name.split(".")[0] for name in SECTIONS if "." not in name} - {"zeroshard"})
    sections = {name: Asked() for name in opened if name not in {*MODELS, "bfloat16"}}
    asked = Asked(train_batch_size=1, **sections)
    made = theirs.DeepSpeedConfig(asked)
    found = {name: one for name, one in asked.asked.items() if name not in {*SECTIONS, *REMOVED}}
    for section, held in asked.items():
        if isinstance(held, Asked):
            found |= {f"{section}.{name}": default for name, default in held.asked.items()}
    for section, attribute in MODELS.items():
        found |= dict(fields(type(getattr(made, attribute)), section))
    missing = [
        name
        for name in sorted(found)
        if key_of(name) is None and name not in SECTIONS and name.split(".")[0] not in KEYS
    ]
    plain = {name: one.value if isinstance(one, Enum) else one for name, one in found.items()}
    other = [
        f"{name}: {default!r} there, {KEYS[name].default!r} here"
        for name, default in sorted(plain.items())
        if default is not ... and name in KEYS and name != IN_WORDS
        if default != KEYS[name].default
    ]
    ours = [name for name in KEYS if name not in found and not name.endswith("*")]
    print(f"DeepSpeed {deepspeed.__version__}: {len(found)} keys; {len(KEYS)} in our table")
    for title, names in (
        ("not in our table", missing),
        ("another default", other),
        ("removed there", [name for name in ours if name in REMOVED]),
        ("only in our table", [name for name in ours if name not in REMOVED]),
    ):
        print("\n".join([f"{title}: {len(names)}", *(f"  {name}" for name in names)]))
    sys.exit(bool(missing or other))


if __name__ == "__main__":
    main()
