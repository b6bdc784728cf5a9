"""DeepSpeed's engine and names on zeroshard, and a stand-in for ``import deepspeed``.

    from zeroshard.integrations import deepspeed            # in place of `import deepspeed`
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config="zero.json")

start.py            initialize(), and its verdict about a configuration
deepspeed_engine.py the engine: answers.py (a table of its getters), checkpoint_tags.py
optimizers.py       optimizers by name, DeepSpeed's classes, the wrapper; lr_schedules.py
zero.py             whole parameters; held_parameters.py: their masters, gradients, states
comm.py helpers.py  torch.distributed, the logger, the accelerator, ...
file.py keys/       its configuration, key by key
shim.py             ``import deepspeed``, and which names there are (docs/design/deepspeed.md)

Names are looked up when they are first used: the shim is put in place before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import Any

from zeroshard.deepspeed.shim import MODULES

__all__ = ["DeepSpeedEngine", "add_config_arguments", "initialize"]


def __getattr__(name: str) -> Any:
    home = MODULES[""].get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = home.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
