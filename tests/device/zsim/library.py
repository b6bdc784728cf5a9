"""The compiled part, built where it is not there yet: ``_zsim``."""

from __future__ import annotations

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import torch.distributed  # noqa: F401 - its types are bases of what is loaded

from tests.device.build import build


def _load() -> ModuleType:
    loader = ExtensionFileLoader("_zsim", str(build()))
    spec = spec_from_loader("_zsim", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


_zsim: Any = _load()
