"""DeepSpeed's engine and names on zeroshard (``zeroshard.deepspeed``), beside the other frameworks.

    from zeroshard.integrations import deepspeed            # in place of `import deepspeed`
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="zero.json")

It also runs a script with the stand-in in DeepSpeed's place, for launchers other than ``zeroshard
run``:

    torchrun --nproc-per-node 2 -m zeroshard.integrations.deepspeed train.py --deepspeed zero.json

Names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    home = f"zeroshard.deepspeed.{name}"
    if not name.startswith("_") and find_spec(home) is not None:
        return importlib.import_module(home)
    return getattr(importlib.import_module("zeroshard.deepspeed"), name)


if __name__ == "__main__":
    importlib.import_module("zeroshard.deepspeed.shim").main()
