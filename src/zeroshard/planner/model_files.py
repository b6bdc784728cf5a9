"""A model from files: a Transformers ``config.json``, safetensors (headers only), or a directory of
them.

A config.json says more, and is preferred where its family is known. Safetensors hold names and
shapes in an order of their own, not in the model's: bytes at rest and on the wire are those of the
model, but for how the pieces of the parameters fall to ranks. Repeated blocks are those whose names
differ in a number and whose shapes are the same. Buffers that were saved count as parameters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.planner.config_fields import read_config
from zeroshard.planner.families import is_known, shape_of_config
from zeroshard.planner.model import ModelShape, Shape, pack_units
from zeroshard.system.safe_files import NotReadable, has_transformers, open_file

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_HEADER_BYTES = 100 << 20  # the format's own limit
_BLOCK = re.compile(r"(.*?\.)(\d+)\.")


def config_of(path: Path) -> Path | None:
    """Return the config.json that `path` is or has; None where it holds safetensors alone."""
    if path.suffix == ".safetensors":
        return None
    config = path / "config.json" if path.is_dir() else path
    return config if config.is_file() or not _tensors_of(path) else None


def is_foreign(path: Path) -> bool:
    """Whether `path` has a config.json of a family that is not known in closed form, and
    Transformers is there, which may know it. Raises ConfigError.
    """
    config = config_of(path)
    return config is not None and not is_known(read_config(config)) and has_transformers()


def _tensors_of(path: Path) -> list[Path]:
    if path.suffix == ".safetensors":
        return [path]
    return sorted(path.glob("*.safetensors")) if path.is_dir() else []


def read_model(path: Path) -> ModelShape:
    """Return the model that the file or the directory `path` describes.

    Raises ConfigError where it describes none, or only one of an unknown family.
    """
    config, tensors = config_of(path), _tensors_of(path)
    if config is not None:
        fields = read_config(config)
        if is_known(fields) or not tensors:
            return shape_of_config(fields, str(config))
    parameters = [shape for file in tensors for shape in _read_header(file)]
    if not parameters:
        raise ConfigError(f"model {str(path)!r} holds no floating-point tensor")
    return ModelShape(path.stem, pack_units(parameters, _blocks(parameters)), tokenwise=False)


def _read_header(file: Path) -> list[Shape]:
    """Return the names and shapes of the tensors of one file, in the order of their bytes."""
    try:
        with open_file(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(min(length, _HEADER_BYTES)))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        entries.sort(key=lambda named: named[1]["data_offsets"][0])
        return [_shape(name, entry) for name, entry in entries if entry["dtype"] in _FLOATS]
    except NotReadable as error:
        raise ConfigError(f"model {str(file)!r} cannot be read: {error}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ConfigError(f"model {str(file)!r} is not a safetensors file") from None


def _shape(name: str, entry: Any) -> Shape:
    sizes = tuple(entry["shape"])
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(name)
    return name, sizes


def _blocks(parameters: list[Shape]) -> list[str]:
    """Return the prefixes of repeated blocks: "layers.0", "layers.1"."""
    members: dict[tuple[str, str], set[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in parameters:
        found = _BLOCK.match(name)
        if found is not None:
            members.setdefault((found[1], found[2]), set()).add((name[found.end() :], shape))
    alike: dict[object, list[str]] = {}
    for (stack, number), block in members.items():
        alike.setdefault((stack, frozenset(block)), []).append(f"{stack}{number}")
    return [name for names in alike.values() if len(names) > 1 for name in names]
