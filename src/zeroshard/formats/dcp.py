"""A checkpoint of torch.distributed.checkpoint as the tree of dictionaries that was saved.

Its ``.metadata`` is a pickle, which is read as data (restricted_unpickler.py); it locates the
blocks of each tensor. Each block is a torch file of its own, opened with ``weights_only=True``.

Invariant: blocks fill their tensor without gaps and overlaps; no file outside the directory is
opened. Cost: the wanted tensors are held in memory.
"""

from __future__ import annotations

import io
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.shard_files import DTYPES
from zeroshard.errors import CheckpointError
from zeroshard.formats.restricted_unpickler import (
    Name,
    Pickled,
    load_tensors,
    read_restricted,
    require_file,
)

_METADATA = "torch.distributed.checkpoint.metadata"
_MAX_BYTES = 512 << 20  # of .metadata
_DTYPES = {f"torch.{str(dtype).removeprefix('torch.')}": dtype for dtype in DTYPES.values()}
_TENSOR = f"{_METADATA}.TensorStorageMetadata"
_BYTES = f"{_METADATA}.BytesStorageMetadata"
_INDEX = f"{_METADATA}.MetadataIndex"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_ENUMS = {
    f"{_METADATA}._MEM_FORMAT_ENCODING": {
        "TORCH_CONTIGUOUS_FORMAT": 0,
        "TORCH_CHANNELS_LAST": 1,
        "TORCH_PRESERVE_FORMAT": 2,
    }
}
_CLASSES = ("Metadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta")
_OTHERS = ("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict")
_ALLOWED = {
    *(f"{_METADATA}.{name}" for name in _CLASSES),
    *(_TENSOR, _BYTES, _INDEX, _PLACE, "pathlib.PosixPath", *_OTHERS, *_ENUMS, *_DTYPES),
}


@dataclass(frozen=True)
class _TensorBlock:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def inside(self, size: tuple[int, ...]) -> bool:
        if not len(self.offsets) == len(self.sizes) == len(size):
            return False
        ends = zip(self.offsets, self.sizes, size, strict=True)
        return all(first + count <= all_ for first, count, all_ in ends)

    def overlaps(self, other: _TensorBlock) -> bool:
        edges = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a < b + other_size and b < a + size for a, size, b, other_size in edges)


def _overlap(blocks: list[_TensorBlock]) -> bool:
    ordered = sorted(blocks, key=lambda block: block.offsets)
    whole_rows = len({(block.offsets[1:], block.sizes[1:]) for block in blocks}) < 2
    pairs = pairwise(ordered) if whole_rows else combinations(ordered, 2)
    return any(a.overlaps(b) for a, b in pairs)


def read_dcp(directory: Path, wanted: Container[str]) -> dict[Any, Any]:
    """Return what was saved under the keys `wanted`, or everything. Raises CheckpointError."""
    path = directory / ".metadata"
    require_file(path)
    if path.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than {_MAX_BYTES}")
    record = read_restricted(path.read_bytes(), _ALLOWED, str(path), _ENUMS)
    try:
        reading = _DcpReader(directory, _fields(record, f"{_METADATA}.Metadata"))
        return reading.tree(wanted)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as odd:
        raise CheckpointError(f"{path} makes no sense: {type(odd).__name__}: {odd}") from None


class _DcpReader:
    def __init__(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        self._directory = directory
        self._entries: dict[str, Pickled] = metadata["state_dict_metadata"]
        # nothing where the saved dictionary was flat
        self._paths: dict[str, tuple[Any, ...]] = metadata["planner_data"] or {}
        self._places: dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]] = {}
        for index, place in metadata["storage_data"].items():
            at = _fields(index, _INDEX)
            offsets = None if at.get("offset") is None else _sizes(at["offset"])
            self._places[at["fqn"], offsets] = _fields(place, _PLACE)

    def tree(self, wanted: Container[str]) -> dict[Any, Any]:
        paths = {name: tuple(self._paths.get(name, (name,))) for name in self._entries}
        chosen = {name: path for name, path in paths.items() if path[0] in wanted} or paths
        root: dict[Any, Any] = {}
        for name, path in chosen.items():
            inner = root
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = self._value(name)
        return {key: _lists(value) for key, value in root.items()}

    def _value(self, name: str) -> Any:
        entry = self._entries[name]
        if entry.name == _BYTES:
            return self._read(name, None)
        fields = _fields(entry, _TENSOR)
        dtype = _DTYPES[_text(_fields_of_properties(fields["properties"])[0])]
        size = _sizes(fields["size"])
        chunks = [_fields(chunk, f"{_METADATA}.ChunkStorageMetadata") for chunk in fields["chunks"]]
        blocks = [
            _TensorBlock(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks
        ]
        self._require_whole(name, size, blocks, dtype.itemsize)
        out = torch.empty(size, dtype=dtype)
        for block in blocks:
            part = self._read(name, block.offsets)
            is_tensor = isinstance(part, torch.Tensor)
            if not is_tensor or tuple(part.shape) != block.sizes or part.dtype is not dtype:
                raise CheckpointError(
                    f"{self._directory}: the block of {name!r} at {list(block.offsets)} is not what"
                    " .metadata says"
                )
            edges = zip(block.offsets, block.sizes, strict=True)
            out[tuple(slice(first, first + count) for first, count in edges)] = part
        return out

    def _require_whole(
        self, name: str, size: tuple[int, ...], blocks: list[_TensorBlock], itemsize: int
    ) -> None:
        """See that the blocks fill the tensor, before memory is taken for it."""
        inside = all(block.inside(size) for block in blocks)
        filled = [block for block in blocks if prod(block.sizes)]
        numel = sum(prod(block.sizes) for block in filled)
        if not inside or numel != prod(size) or _overlap(filled):
            raise CheckpointError(
                f"{self._directory}: the blocks of {name!r} do not fill a tensor of shape"
                f" {list(size)}"
            )
        for block in blocks:
            if prod(block.sizes) * itemsize > self._place(name, block.offsets)[2]:
                raise CheckpointError(
                    f"{self._directory}: the block of {name!r} at {list(block.offsets)} is larger"
                    " than its place in the file"
                )

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> tuple[Path, int, int]:
        """Return file, first byte and number of bytes."""
        if (name, offsets) not in self._places:
            raise CheckpointError(f"{self._directory}: .metadata does not say where {name!r} lies")
        place = self._places[name, offsets]
        file = _text(place["relative_path"])
        start, length = _whole(place["offset"]), _whole(place["length"])
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"{self._directory}: {name!r} is stored through {place['transform_descriptors']!r},"
                " which is not known here"
            )
        path = self._directory / file
        if Path(file).name != file or path.is_symlink():
            raise CheckpointError(
                f"{self._directory}: .metadata names a file outside the directory: {file!r}"
            )
        if not path.is_file() or path.stat().st_size < start + length:
            raise CheckpointError(
                f"{path} is missing or was cut short: {name!r} lies at bytes {start} to"
                f" {start + length}"
            )
        return path, start, length

    def _read(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        path, start, length = self._place(name, offsets)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(length)
        return load_tensors(io.BytesIO(data), f"{path} ({name!r})")


def _fields(record: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(record, Pickled) or record.name != kind or not isinstance(record.state, dict):
        raise ValueError(f"{record!r} is no {kind.rpartition('.')[2]}"[:200])
    return record.state


def _fields_of_properties(record: Any) -> tuple[Any, ...]:
    if not isinstance(record, Pickled) or not isinstance(record.state, tuple):
        raise ValueError("properties of a tensor have another form")
    return record.state


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the numbers of a recorded torch.Size."""
    is_size = isinstance(value, Pickled) and value.name == "torch.Size" and len(value.args) == 1
    if not is_size or not isinstance(value.args[0], tuple):
        raise ValueError("a shape is no torch.Size")
    return tuple(_whole(size) for size in value.args[0])


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no size")
    return value


def _text(value: Any) -> str:
    found = value.name if isinstance(value, Name) else value
    if not isinstance(found, str):
        raise ValueError(f"{value!r} is no text")
    return found


def _lists(value: Any) -> Any:
    """Turn dictionaries with the keys 0, 1, ... back into the lists they were."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if not inner or set(inner) != set(range(len(inner))):
        return inner
    return [inner[key] for key in sorted(inner)]
