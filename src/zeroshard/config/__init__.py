"""The keywords of ``zeroshard.shard`` as one validated object: from Python, from JSON, or from
DeepSpeed's JSON, which zeroshard.deepspeed.keys reads.

native.py           Config, and the doors through which one comes
option_sections.py  its sections, models that convert nothing
reference.py        every option as a table, and the JSON schema
strict_json.py      strict JSON, and the nearest right name for a wrong one
"""

from __future__ import annotations

from zeroshard.config.native import AUTO, Config, ShardOptions, build_config
from zeroshard.config.option_sections import Comm, ErrorFeedback, LossScale, Offload
from zeroshard.config.strict_json import nearest

__all__ = [
    "AUTO",
    "Comm",
    "Config",
    "ErrorFeedback",
    "LossScale",
    "Offload",
    "ShardOptions",
    "build_config",
    "nearest",
]
