"""Other checkpoints as a step of ours: a torch state_dict, Transformers' safetensors,
torch.distributed.checkpoint, DeepSpeed's ZeRO 1, 2 and 3.

    recognise the format . read it (never running code that it chose) . write one file of pieces and
    a manifest . commit

The step has one rank and the row ``ddp``; ``zeroshard.load`` reads it into any other. Strides are a
contiguous tensor's; buffers are guessed in formats that do not name them (`Importer.is_buffer`).
Without optimizer state that names its parameters the step has none, and ``load(strict=False)``
reads the weights.

Invariant: torch's files are opened with ``weights_only=True``, other pickles are read as data
(importer.py). Cost: files are mapped, not read into memory, but for DCP's, which are
held whole.
"""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from zeroshard.checkpoint.kept import next_branch
from zeroshard.checkpoint.manifest import Manifest, shard_name
from zeroshard.checkpoint.shard_files import DTYPES, WRITTEN_BY, shard_bytes, write_new, write_shard
from zeroshard.checkpoint.steps import (
    MANIFEST,
    begin_step,
    commit,
    list_steps,
    remember_steps,
    remove_tree,
    require_space,
    settle,
    step_path,
)
from zeroshard.core.precision import PRECISIONS
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.formats.deepspeed_zero import read_deepspeed
from zeroshard.formats.importer import (
    MODEL_KEYS,
    OPTIMIZER_KEYS,
    STEP_KEYS,
    Importer,
    Name,
    NamedOptimizer,
    Pickled,
    load_tensors,
    optimizer_class,
    read_restricted,
    require_file,
    take_state,
)
from zeroshard.formats.pretrained import open_tensors
from zeroshard.system.safe_files import NotReadable, read_json


@dataclass(frozen=True)
class Imported:
    """The result of `import_checkpoint`."""

    path: Path
    step: int
    format: str
    num_parameters: int
    num_bytes: int
    optimizer: str | None  # the name of its class
    notes: list[str]  # skipped entries and guesses


def import_checkpoint(
    source: Path,
    directory: Path,
    *,
    format: str = "auto",
    step: int | None = None,
    buffers: Sequence[str] = (),
    optimizer: str | None = None,
) -> Imported:
    """Write the content of `source` as a step in `directory`.

    `step` is its number (default: what the source says, or 0). `buffers` are patterns of the names
    of tensors that are buffers, beyond those that are recognised. `optimizer` is the name of the
    optimizer's class, where the source does not say or says another.

    Raises CheckpointError for a source that is damaged, hostile or incomplete, ConfigError where
    the format is unknown or the step is there already.
    """
    format = recognise(source) if format == "auto" else format
    with ExitStack() as stack:
        importer = Importer(buffers, optimizer)
        READERS[format](source, importer, stack)
        importer.check(str(source))
        number = (importer.step or 0) if step is None else step
        path, num_bytes = _write(importer, directory, number, format)
    name = None if importer.optimizer is None else importer.optimizer["class"]
    return Imported(path, number, format, len(importer.parameters), num_bytes, name, importer.notes)


def recognise(source: Path) -> str:
    """Return which format `source` has. Raises ConfigError where it has none that is known."""
    if not source.is_dir():
        if not source.exists():
            raise FileNotFoundError(2, "No such file or directory", str(source))
        return "hf" if source.suffix == ".safetensors" else "torch"
    if any(source.glob("model*.safetensors*")):
        return "hf"
    if (source / ".metadata").is_file():
        return "dcp"
    patterns = ("global_step*", "*model_states.pt")
    if (source / "latest").is_file() or any(any(source.glob(one)) for one in patterns):
        return "deepspeed"
    raise ConfigError(
        f"{source} is no checkpoint that is known here (torch, Transformers, DCP, DeepSpeed);"
        " --from says which it is"
    )


def _write(importer: Importer, directory: Path, step: int, format: str) -> tuple[Path, int]:
    metadata = {"format": "zeroshard", "step": str(step)}
    num_bytes = shard_bytes(importer.stored, metadata)
    above = next(one for one in (directory, *directory.absolute().parents) if one.is_dir())
    require_space(above, num_bytes, f"step {step} in {directory}")  # before anything is made there
    with begin_step(directory, step, secrets.token_hex(4), num_bytes) as working:
        try:
            if step in list_steps(directory):
                raise ConfigError(
                    f"{directory} already holds step {step}: choose another with --step, or"
                    " another directory"
                )
            path = working / shard_name(0, 1)
            file, tensors = write_shard(path, 0, importer.stored, metadata)
            manifest = Manifest(
                step=step,
                world=1,
                written_by=f"{WRITTEN_BY}, imported ({format})",
                policy="ddp",
                precision=PRECISIONS["fp32"].describe(),
                files=(file,),
                parameters=importer.parameters,
                tensors=tuple(tensors),
                optimizer=importer.optimizer,
                model_config=importer.model_config,
                branch=next_branch(directory, step),
            )
            text = manifest.dump()
            Manifest.parse(text, "what was imported")
            write_new(working / MANIFEST, len(text), [text])
            settle(directory, commit(working, directory, step))
            remember_steps(directory)
            return step_path(directory, step), manifest.total_bytes()
        except BaseException:
            remove_tree(working)
            raise


# ------------------------------------------------------------------ torch


def _read_torch(source: Path, importer: Importer) -> None:
    read_tree(load_tensors(source, str(source)), importer, str(source))


def read_tree(content: Any, importer: Importer, where: str) -> None:
    """Take a state_dict, or a dictionary with one beside optimizer state and a step number."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} holds a {type(content).__name__}, not a state_dict")
    model = next((content[key] for key in MODEL_KEYS if isinstance(content.get(key), dict)), None)
    if model is None:
        if not any(isinstance(value, torch.Tensor) for value in content.values()):
            keys = ", ".join(map(repr, content))
            raise CheckpointError(
                f"{where} holds no state_dict under one of {', '.join(MODEL_KEYS)}: it has {keys}"
            )
        take_state(importer, _named(content, where), None)
        return
    step = next((content[key] for key in STEP_KEYS if key in content), None)
    importer.step = int(step) if isinstance(step, int | torch.Tensor) and int(step) >= 0 else None
    found = next((content[key] for key in OPTIMIZER_KEYS if content.get(key)), None)
    optimizer = None if found is None else _named_optimizer(found, content, importer)
    take_state(importer, _named(model, where), optimizer)


def _named(state: dict[Any, Any], where: str) -> dict[str, Any]:
    if not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{where} makes no sense: a state_dict has a key that is no name")
    return state


def _named_optimizer(
    found: Any, content: Mapping[str, Any], importer: Importer
) -> NamedOptimizer | None:
    """Return optimizer state that names its parameters (torch's or our format), else None."""
    state, groups = found, content.get("param_groups")
    if isinstance(found, dict):
        inner = found.get("state"), found.get("param_groups")
        if isinstance(inner[0], dict) and isinstance(inner[1], list):
            state, groups = inner
    try:
        names = [*state, *(name for group in groups or () for name in group["params"])]
        if any(isinstance(name, int) for name in names):
            importer.notes.append(
                "the optimizer's state is not taken: it numbers its parameters (torch's"
                " get_optimizer_state_dict names them)"
            )
            return None
        keys = {key for values in state.values() for key in values}
        name = importer.optimizer_name or content.get("optimizer_class")
        name = name or optimizer_class(groups or (), keys)
        if name is not None and groups:
            named = {str(one): dict(values) for one, values in state.items()}
            return NamedOptimizer(str(name), list(groups), named)
    except (TypeError, KeyError, AttributeError, ValueError):
        pass
    importer.notes.append("the optimizer's state is not taken: its form is not known here")
    return None


# ------------------------------------------------------------------ Transformers


def _read_hf(source: Path, importer: Importer, stack: ExitStack) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path, opened, name in open_tensors(source, stack):
        if name in tensors:
            raise CheckpointError(f"{path} holds {name!r}, as another file of the checkpoint does")
        try:
            tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    take_state(importer, tensors, None)
    config = source / "config.json"
    if source.is_dir() and config.is_file():
        try:
            importer.model_config = json.dumps(read_json(config))
        except NotReadable as error:
            importer.notes.append(f"config.json is not taken: {error}")


def _read_dcp(source: Path, importer: Importer) -> None:
    wanted = {*MODEL_KEYS, *OPTIMIZER_KEYS, *STEP_KEYS, "param_groups", "optimizer_class"}
    read_tree(read_dcp(source, wanted), importer, str(source))


READERS: dict[str, Callable[[Path, Importer, ExitStack], None]] = {
    "torch": lambda source, importer, stack: _read_torch(source, importer),
    "hf": _read_hf,
    "dcp": lambda source, importer, stack: _read_dcp(source, importer),
    "deepspeed": lambda source, importer, stack: read_deepspeed(source, importer),
}


# --------------------------------------------------------------------- torch.distributed.checkpoint
# The tree of dictionaries that was saved. Its ``.metadata`` is a pickle, which is read as data
# (importer.py); it locates the blocks of each tensor. Each block is a torch file of its
# own, opened with ``weights_only=True``.
#
# Invariant: blocks fill their tensor without gaps and overlaps; no file outside the directory is
# opened. Cost: the wanted tensors are held in memory.

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
        record = fields["properties"]
        if not isinstance(record, Pickled) or not isinstance(record.state, tuple):
            raise ValueError("properties of a tensor have another form")
        dtype = _DTYPES[_text(record.state[0])]
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
        fits = inside and numel == prod(size)
        if fits:
            ordered = sorted(filled, key=lambda block: block.offsets)
            whole_rows = len({(block.offsets[1:], block.sizes[1:]) for block in filled}) < 2
            pairs = pairwise(ordered) if whole_rows else combinations(ordered, 2)
            fits = not any(a.overlaps(b) for a, b in pairs)
        if not fits:
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
