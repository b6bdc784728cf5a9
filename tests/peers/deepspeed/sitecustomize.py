"""Puts the stand-in in DeepSpeed's place in every process of a run of DeepSpeed's unit tests:
pytest's and those that a test starts (tests/peers/run.py).

Names of DeepSpeed's inside, which the tests import beside its interface, become classes that skip
a test where it makes one, and that nothing is an instance of.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import itertools
import multiprocessing
import multiprocessing.pool
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TOP = "deepspeed"
_VALUES: dict[str, dict[str, Any]] = {  # of DeepSpeed's inside, with which tests are written
    "deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 2**14},
    "deepspeed.runtime.config": {"ADAM_OPTIMIZER": "adam"},
}


class _Inside(type):
    """A class that stands for a name of DeepSpeed's inside."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        import pytest

        pytest.skip(f"{cls.__name__} is inside of DeepSpeed")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inside(name, (), {})


class _InsideModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inside(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that the stand-in does not have."""

    def __init__(self, known: Any) -> None:
        self._known = known

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, inside = fullname.partition(".")
        if top != _TOP or inside in self._known:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _InsideModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def starmapstar(args: Any) -> list[Any]:
    """Run a task of a pool of processes. A test's own failure ends there as an Exception: pytest's,
    which is none, would end the process, and the pool would wait for it for ever.
    """
    try:
        return list(itertools.starmap(args[0], args[1]))
    except BaseException as error:
        if type(error).__name__ == "Failed":
            raise AssertionError(str(error)) from None
        raise


def _on_cpu() -> None:
    """Let what tests compare with run on CPU ranks: a DistributedDataParallel that is given numbers
    of devices, and a gather of 0-d flags, which NCCL takes and gloo does not.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def gather(out: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
        return dist.all_gather_into_tensor(out, part.reshape(-1), *args, **kwargs)

    vars(importlib.import_module("deepspeed.comm"))["all_gather_into_tensor"] = gather

    made = DistributedDataParallel.__init__

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            kwargs |= {"device_ids": None, "output_device": None}
        made(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _install() -> None:
    from zeroshard.deepspeed import shim

    shim.install()
    sys.meta_path.insert(0, _Finder(shim.MODULES))
    multiprocessing.pool.starmapstar = starmapstar  # type: ignore[attr-defined]
    _on_cpu()
    # ranks are forked from a process that has imported these: seconds a test otherwise
    multiprocessing.set_forkserver_preload(["torch", "pytest", "zeroshard.deepspeed.start"])
    own = shim._Module.__getattr__

    def found(self: Any, name: str) -> Any:
        try:
            return own(self, name)
        except AttributeError:
            if name.startswith("__") or self.__name__ == _TOP:
                raise
            return _Inside(name, (), {})

    shim._Module.__getattr__ = found  # type: ignore[method-assign]
    for module, values in _VALUES.items():
        vars(importlib.import_module(module)).update(values)
    # what the tests ask before they skip: whether a kernel is there
    importlib.import_module("deepspeed.ops").__compatible_ops__ = defaultdict(lambda: True)  # type: ignore[attr-defined]


if os.environ.get("ZEROSHARD_DEEPSPEED_UNIT"):
    _install()
