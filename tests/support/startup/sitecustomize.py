"""Interpreters that tests start import torch without collecting garbage: 1 s of CPU less of 3 s.
``tests/conftest.py`` puts this directory on their path.

The modules are those of Python's own finder. What torch has made is left out of later collections,
as the zygotes do (zygote.py); nothing of the program is there yet.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_LARGE = {"torch", "torch._dynamo", "transformers"}


class _Quietly:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _LARGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def quietly(module: ModuleType) -> None:
                enabled = gc.isenabled()
                gc.disable()
                try:
                    execute(module)
                finally:
                    if name == "torch":
                        gc.freeze()
                    if enabled:
                        gc.enable()

            spec.loader.exec_module = quietly  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Quietly())
