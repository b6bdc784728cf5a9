"""The keywords of ``zeroshard.shard`` as one validated object: from Python, from JSON, or from
DeepSpeed's JSON.

native.py       Config and its sections
deepspeed/      DeepSpeed's JSON, key by key
reading.py      strict JSON, and the nearest right name for a wrong one
"""

from __future__ import annotations

from zeroshard.config.deepspeed import Finding
from zeroshard.config.native import (
    AUTO,
    Comm,
    Config,
    DeepSpeedFile,
    Offload,
    build_config,
    read_deepspeed,
)
from zeroshard.config.reading import nearest

__all__ = [
    "AUTO",
    "Comm",
    "Config",
    "DeepSpeedFile",
    "Finding",
    "Offload",
    "build_config",
    "nearest",
    "read_deepspeed",
]
