"""The keywords of ``zeroshard.shard`` as one validated object: from Python, from JSON, or from
DeepSpeed's JSON.

native.py       Config, and the doors through which one comes
sections.py     its sections
strict.py       models that convert nothing
deepspeed/      DeepSpeed's JSON, key by key
reference.py    every option as a table, and the JSON schema
explain.py      a file, key by key
reading.py      strict JSON, and the nearest right name for a wrong one
"""

from __future__ import annotations

from zeroshard.config.deepspeed.findings import Finding
from zeroshard.config.native import (
    AUTO,
    Config,
    DeepSpeedFile,
    ShardOptions,
    build_config,
    read_deepspeed,
)
from zeroshard.config.reading import nearest
from zeroshard.config.sections import Comm, ErrorFeedback, LossScale, Offload

__all__ = [
    "AUTO",
    "Comm",
    "Config",
    "DeepSpeedFile",
    "ErrorFeedback",
    "Finding",
    "LossScale",
    "Offload",
    "ShardOptions",
    "build_config",
    "nearest",
    "read_deepspeed",
]
