"""DeepSpeed's engine and names on zeroshard (``zeroshard.deepspeed``), beside the other frameworks.

    from zeroshard.integrations import deepspeed            # in place of `import deepspeed`
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="zero.json")

Names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

__all__ = ["DeepSpeedEngine", "add_config_arguments", "initialize"]


def __getattr__(name: str) -> Any:
    home = f"zeroshard.deepspeed.{name}"
    if not name.startswith("_") and find_spec(home) is not None:
        return importlib.import_module(home)
    return getattr(importlib.import_module("zeroshard.deepspeed"), name)
