"""Puts the stand-in in DeepSpeed's place in every process of a run of DeepSpeed's unit tests:
pytest's and those that a test starts (tests/support/deepspeed_unit/run.py).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from types import ModuleType
from typing import Any


class _Builder:
    """Stands for every builder of a kernel: torch's operators need none."""

    NAME = "torch"

    def __init__(self, *_: Any) -> None: ...


class _Builders(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Builder


def _install() -> None:
    from zeroshard.deepspeed.shim import install

    install()
    # what the tests ask before they skip: whether a kernel is there
    sys.modules["deepspeed.ops.op_builder"] = _Builders("deepspeed.ops.op_builder")
    importlib.import_module("deepspeed.ops").__compatible_ops__ = defaultdict(lambda: True)  # type: ignore[attr-defined]


if os.environ.get("ZEROSHARD_DEEPSPEED_UNIT"):
    _install()
