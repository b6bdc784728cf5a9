"""``import deepspeed`` without DeepSpeed: a finder on sys.meta_path, for this process alone.

    zeroshard run --as-deepspeed train.py                  each rank, before the script
    zeroshard as-deepspeed COMMAND ...                     each process that imports it (on_path/)
    python -m zeroshard.integrations.deepspeed train.py    under any other launcher

The finder answers for ``deepspeed`` and everything below it, and importlib.metadata for the
distribution of that name, before an installed DeepSpeed would. A module's names come from names.py
and are imported when they are first asked for. A name that is not there is an AttributeError, or an
ImportError, that says what to use; ``hasattr()`` is False for it.

Nothing is installed, and torch is imported only with the first name that needs it.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from zeroshard.deepspeed.names import FALLBACKS, INSTEAD, MODULES, VERSION

# the file of variables for other hosts, in the home directory or the current one
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_NAME = "deepspeed"
_HOME = "zeroshard.deepspeed"
_UNUSED = (
    "zeroshard: nothing was sharded: no deepspeed.initialize() in this run. Transformers drops the"
    " DeepSpeed configuration where use_cpu=True is set, or none is given\n"
)


def install() -> None:
    """Let ``deepspeed`` be the stand-in in this process. Does nothing the second time."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in [one for one in sys.modules if one.split(".")[0] == _NAME]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    atexit.register(_warn_where_unused)


def main() -> None:
    """Run ``sys.argv[1]`` as ``__main__`` with the arguments after it."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m zeroshard.integrations.deepspeed SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    sys.path[0:1] = [] if sys.flags.safe_path else [os.path.dirname(os.path.realpath(sys.argv[0]))]
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _warn_where_unused() -> None:
    """Say so on rank 0 where a program took the stand-in and never called initialize(). A launcher
    takes it to start the ranks, and a child of the program may import what the program does.
    """
    held = sys.modules.get(f"{_HOME}.held_parameters")
    took = _NAME in sys.modules and os.environ.get("RANK", "0") == "0"
    took = took and f"{_NAME}.launcher.runner" not in sys.modules
    took = took and multiprocessing.parent_process() is None
    if took and not (held is not None and held.was_used()):
        sys.stderr.write(_UNUSED)


def _missing(path: str) -> str:
    """Return the message for a name that is not there."""
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    use = next((INSTEAD[prefix] for prefix in prefixes if prefix in INSTEAD), "")
    end = f": use {use}" if use else "; docs/deepspeed-features.md says what there is"
    return f"{_NAME}.{path} is not part of zeroshard's stand-in for DeepSpeed{end}"


class _Module(ModuleType):
    """One module of the stand-in."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.partition(".")[2]
        inside = f"{path}.{name}" if path else name
        home = MODULES[path].get(name)
        if home is not None:
            module, _, attribute = home.partition(":")
            source = module if module == "torch" else f"{_HOME}.{module}"
            value = getattr(importlib.import_module(source), attribute)
        elif inside in MODULES:
            value = importlib.import_module(f"{_NAME}.{inside}")
        elif name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        else:
            other = importlib.import_module(FALLBACKS[path]) if path in FALLBACKS else None
            if not hasattr(other, name):
                raise AttributeError(_missing(inside))
            value = getattr(other, name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a function where its module has the same name, as DeepSpeed's package does: an
        import of ``utils.z3_leaf_module`` leaves the function of that name in ``utils``.
        """
        path = self.__name__.partition(".")[2]
        if not (isinstance(value, _Module) and name in MODULES.get(path, {})):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        path = self.__name__.partition(".")[2]
        prefix = f"{path}." if path else ""
        below = (one[len(prefix) :] for one in MODULES if one.startswith(prefix) and one != path)
        children = (one.partition(".")[0] for one in below)
        return sorted({*super().__dir__(), *MODULES[path], *children})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of the stand-in, and its distribution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of ours, None for other packages. Raises
        ModuleNotFoundError, with what to use, for one of DeepSpeed's that is not there.
        """
        top, _, inside = fullname.partition(".")
        if top != _NAME:
            return None
        if inside not in MODULES:
            raise ModuleNotFoundError(_missing(inside))  # without a name: `from` would swallow it
        is_package = not inside.endswith("__main__")
        return importlib.machinery.ModuleSpec(fullname, self, origin=_HOME, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _Module(spec.name, __doc__)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are first asked for."""

    def get_code(self, fullname: str) -> Any:
        """Return what ``python -m`` runs of a module that is a program."""
        home = MODULES[fullname.partition(".")[2]].get("main", "")
        text = f"from {_HOME}.{home.partition(':')[0]} import main\nmain()" if home else ""
        return compile(text, fullname, "exec")

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Return ours, where it is asked for, or all are."""
        name = getattr(context, "name", None)
        return [_Distribution()] if name is None or name.lower() == _NAME else []


class _Distribution(importlib.metadata.Distribution):
    """The distribution ``deepspeed``, as importlib.metadata finds it."""

    def read_text(self, filename: str) -> str | None:
        """Return one of the files of a distribution."""
        fields = ("Metadata-Version: 2.1", f"Name: {_NAME}", f"Version: {VERSION}")
        metadata = "\n".join([*fields, "Summary: zeroshard's stand-in\n"])
        return {"METADATA": metadata, "top_level.txt": f"{_NAME}\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return where a file would be."""
        return Path(__file__).parent / path
